"""First use: filters that are mistyped, requests without effect, files that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.builders import START_NS, site_of, two_racks
from tests.support.in_process_daemon import Pod, serve
from twin.catalogue import NS
from twin.cli.main import main
from twin.contracts import read_record
from twin.report import sentence

CAP = "gpu.power_cap_w"
ROOT = Path(__file__).resolve().parents[2]


def test_a_filter_that_nothing_can_match_is_refused_and_short_names_are_places(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.tick({"gpu.temp_c": 95.0})
        for path, status, why in (
            ("/alarms?severity=crit", 400, "expected some of critical, warning, info"),
            ("/alarms?state=open", 400, "expected some of raised"),
            ("/alarms?entity=r9", 404, "no entity r9"),
            ("/decisions?kind=foo", 400, "'foo' is unknown; expected some of command"),
        ):
            got, tree = await pod.ask("GET", f"/api/v1{path}")
            assert (got, why in tree["error"]) == (status, True), tree
        _, full = await pod.ask("GET", "/api/v1/alarms?entity=lab/h/r1")
        _, short = await pod.ask("GET", "/api/v1/alarms?entity=r1")
        assert full["total"] == short["total"] > 0

    serve(tmp_path, check)


def test_a_request_that_can_do_nothing_says_so(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        body = {"control": CAP, "names": ["r1"], "reason": "x", "for_s": 60}
        for bounds in ({"lo": 5000}, {"hi": 10}, {"want": 9000}):
            got, tree = await pod.ask("POST", "/api/v1/requests", "operator", body | bounds)
            assert (got, "outside the allowed range, 200 to 1200 W" in tree["error"]) == (400, True)
        got, tree = await pod.ask("POST", "/api/v1/requests", "operator", body | {"hi": 800_000})
        assert (got, len(tree["warnings"])) == (200, 1)
        assert "changes nothing" in tree["warnings"][0]
        got, tree = await pod.ask("POST", "/api/v1/requests", "operator", body | {"hi": 900})
        assert (got, "warnings" in tree) == (200, False)
        work = {"table": "rack", "names": ["r1"], "reason": "x", "for_s": 60}
        assert (await pod.ask("POST", "/api/v1/maintenance", "operator", work))[0] == 200
        got, tree = await pod.ask("POST", "/api/v1/requests", "operator", body | {"hi": 700})
        assert (got, tree["warnings"][0][:30]) == (200, "72 of 72 are under maintenance")
        got, tree = await pod.ask("POST", "/api/v1/approvals", "operator",
                                  {"policy": "nope", "control": CAP, "names": [], "for_s": 60})  # fmt: skip
        assert (got, "expected one of" in tree["error"]) == (404, True)

    serve(tmp_path, check)


def test_the_summary_counts_who_was_heard(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        _, tree = await pod.ask("GET", "/api/v1/summary")
        assert tree["heard"]["feeder"] == {"heard": 0, "of": 2, "silent": 0, "learning": 0}
        pod.tick({"feeder.power_w": [9e4, float("nan")]})
        _, tree = await pod.ask("GET", "/api/v1/summary")
        assert tree["heard"]["feeder"] == {"heard": 1, "of": 2, "silent": 0, "learning": 1}

    serve(tmp_path, check)


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("daemon", {"started": "1", "resumed_at": -1, "faults": []}, "started (racktwin 1): a new run"),
        ("daemon", {"started": "1", "resumed_at": 7, "faults": ["a"]}, "continues after tick 7; repaired: a"),
        ("leader", {"epoch": 3, "predecessor": "", "head": "", "adopt": False}, "leads with epoch 3"),
        ("cleared", {"id": "beyond/x/guard", "superseded_by": "beyond/x/limit"}, "by limit"),
        ("event", {"event": {"type": "Approved", "author": "a", "policy": "p", "control": CAP, "names": [],
                              "expires_ns": START_NS}}, "until 2023-11-14 22:13:20 UTC"),
        ("kept_back", {"window": "w", "control": CAP, "count": 2, "why": "people"},
         "of 2 GPUs under w: people"),
    ],
)  # fmt: skip
def test_records_are_told_in_words(kind: str, body: dict[str, object], said: str) -> None:
    text = sentence(read_record(kind, body), site_of(two_racks()))
    assert said in text
    assert "_ns" not in text
    assert "[]" not in text


def written(folder: Path, **more: object) -> Path:
    (folder / "site.yaml").write_text(yaml.safe_dump({"site": "lab", "halls": [{"name": "h"}]}))
    path = folder / "racktwin.yaml"
    path.write_text(yaml.safe_dump({"site": "site.yaml", "broker": "embedded", "state": "state", **more}))
    return path


def test_a_check_of_the_configuration_looks_at_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    broker: dict[str, object] = {
        "host": "b",
        "username": "u",
        "password_file": "none.txt",
        "tls": {"ca_file": "ca.pem"},
    }
    broker |= {"topics": ["t/#"], "maps": {"t/#": "no-map"}}
    path = written(tmp_path, broker=broker, state="site.yaml/state")
    assert main(["daemon", "check", "--config", str(path)]) == 78
    err = capsys.readouterr().err
    for what in ("$.broker.password_file", "$.broker.tls.ca_file", "$.broker.maps.t/#", "$.state"):
        assert what in err
    path = written(tmp_path, broker={"host": "b", "username": "u", "password_file": "credential:mqtt"})
    assert main(["daemon", "check", "--config", str(path)]) == 0
    assert "not checkable here" in " ".join(capsys.readouterr().out.split())


def test_a_check_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object: what is right and wrong, the notes, the levels; with --online what answered."""
    path = written(tmp_path)
    words = ["daemon", "check", "--config", str(path)]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["faults"], told["sizes"]) == (True, [], {"hall": 1})
    assert told["authority"]["thermal_guard"] == "advise"
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(note.split()) in said for note in told["notes"])
    scrape = {"url": "http://127.0.0.1:9/metrics", "map": "dcgm"}
    path = written(tmp_path, scrapes=[scrape])
    assert main([*words, "--online", "--listen", "1s", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert [answer["ok"] for answer in told["online"]["endpoints"] if "9/metrics" in answer["name"]] == [
        False
    ]
    written(tmp_path, tick_s="often")
    assert main([*words, "--json"]) == 78
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["ok"] is False
    assert "$.tick_s" in told["faults"][0]
    assert told["faults"][0] in captured.err


def test_a_check_looks_at_what_schedulers_and_tests_of_nodes_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "kube.yaml").write_text("clusters: none")
    path = written(
        tmp_path, burn_in={"command": ["./burn-in", "{hots}"]}, kubernetes={"kubeconfig": "kube.yaml"},
        jobs={"slurm": {"node_names": {"gpu[1-3]": "lab/h/r1/node[0-1]"}}},
    )  # fmt: skip
    assert main(["daemon", "check", "--config", str(path)]) == 78
    err = capsys.readouterr().err
    for what in ("$.jobs.slurm.node_names.gpu[1-3]: 3 names for 2", "$.burn_in.command: ./burn-in: expected",
                 "$.kubernetes: "):  # fmt: skip
        assert what in err
    path = written(
        tmp_path, kubernetes={"command": True}, burn_in={"command": ["/bin/sh", "{hots}", "{node}"]}
    )
    assert main(["daemon", "check", "--config", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "$.kubernetes: not checkable here, as this is no pod" in said
    assert "{hots} is given to the program as it is" in said
    assert "{node} is given" not in said
    assert "the policy asks for no tests" in said


def test_hints_for_the_wrong_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, leader={"kind": "etc"})
    assert main(["daemon", "check", "--config", str(path)]) == 78
    assert "$.leader.kind: expected one of host, etcd, got 'etc'" in capsys.readouterr().err
    assert main(["site", "check", str(path)]) == 1
    assert f"racktwin daemon check --config {path}" in capsys.readouterr().err.replace("\n", "")
    tree = two_racks()
    tree["halls"][0]["racks"][0] |= {"nodes": 0}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(tree))
    assert main(["site", "check", str(tmp_path / "site.yaml")]) == 0
    assert "has a profile but 0 GPUs" in capsys.readouterr().out


def test_alarms_beyond_a_limit_carry_units_and_are_superseded(tmp_path: Path) -> None:
    from tests.support.builders import Twin

    twin = Twin(two_racks())
    site = twin.site
    guard, most = (float(getattr(site.limits["gpu.temp_c"], n)[0]) for n in ("guard", "max"))
    twin.tick({"gpu.temp_c": (guard + most) / 2})
    twin.tick({"gpu.temp_c": most + 2})
    (over,) = twin.records("cleared")
    assert over["superseded_by"] == "beyond/gpu.temp_c/limit"
    (found,) = [r for r in twin.records("finding") if r["id"] == "beyond/gpu.temp_c/limit"]
    assert " °C" in found["evidence"][0]
    assert twin.now_ns > NS
