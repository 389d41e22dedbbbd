"""The routes for the page: racks in columns, topology, search, jobs, settings and what-ifs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from policies import REGISTRY
from tests.support.builders import two_racks
from tests.support.in_process_daemon import Pod, serve
from tests.unit.test_api_updates import watching
from twin.api import updates as api_updates
from twin.api.page import changed, responses, simulations, with_responses
from twin.catalogue import NS, control_words, plain_text
from twin.cli.main import main
from twin.telemetry import events as ev

CELLS = st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=3, max_size=3)
COLUMNS = st.fixed_dictionaries({"a": CELLS, "b": CELLS})


def applied(before: dict[str, list[Any]], differing: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the columns of a page after an update."""
    out = {name: list(values) for name, values in before.items()}
    for name, part in differing.items():
        if "all" in part:
            out[name] = list(part["all"])
        else:
            for i, value in zip(part["at"], part["to"], strict=True):
                out[name][i] = value
    return out


@given(COLUMNS, COLUMNS)
def test_a_change_leads_from_what_was_to_what_is(before: Any, now: Any) -> None:
    assert applied(before, changed(before, now)) == now
    assert changed(now, now) == {}


def test_racks_come_in_columns_and_agree_with_the_summary(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.tick(
            {"rack.power_w": np.array([51_234.0, np.nan]), "gpu.temp_c": 61.0, "rack.supply_temp_c": 33.0}
        )
        _, tree = await pod.ask("GET", "/api/v1/racks")
        _, summary = await pod.ask("GET", "/api/v1/summary")
        columns = tree["columns"]
        assert tree["names"] == [r["name"] for r in summary["racks"]] == ["lab/h/r1", "lab/h/r2"]
        assert columns["power_w"] == [51_200, 50_400]  # its meter; else 72 GPUs of 700 W
        assert columns["from"] == [0, 2]
        assert columns["gpu_temp_c"] == [61, 61]
        assert columns["margin_k"] == [10.0, 10.0]  # 33 °C of supply, guarded at 43 °C
        assert [tree["states"][s] for s in columns["state"]] == ["ok", "ok"]
        pod.tick({"gpu.temp_c": np.where(np.arange(144) < 72, 95.0, 60.0)})
        _, tree = await pod.ask("GET", "/api/v1/racks")
        assert [tree["states"][s] for s in tree["columns"]["state"]] == ["critical", "ok"]

    serve(tmp_path, check)


def test_racks_that_fell_silent_are_unknown_though_an_alarm_names_a_few(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for _ in range(30):
            pod.tick({"rack.power_w": 50_000.0, "gpu.temp_c": 60.0})
        for _ in range(120):
            pod.tick({})
        _, tree = await pod.ask("GET", "/api/v1/racks")
        shown = [tree["states"][s] for s in tree["columns"]["state"]]
        assert 0 < shown.count("warning") < len(shown)
        assert set(shown) == {"warning", "unknown"}
        assert tree["columns"]["power_w"] == [50_000] * len(shown), "what was read last, with its age"
        assert min(tree["columns"]["age_s"]) > 60

    serve(tmp_path, check, tree=two_racks(racks="r[1-12]"))


def test_the_stream_begins_whole_and_goes_on_with_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_updates, "EVERY_S", 0.05)

    async def check(pod: Pod) -> None:
        async with watching(pod) as stream:
            _, _, state = await stream.next("state")
            _, _, racks = await stream.next("racks")
            assert state["whole"]
            assert {"site", "policies", "supply", "sizes"} <= state.keys()
            assert "racks" not in state
            held = {name: part["all"] for name, part in racks["columns"].items()}
            pod.tick({"rack.power_w": np.array([90_000.0, 80_000.0])})
            _, _, state = await stream.next("state")
            _, _, racks = await stream.next("racks")
            assert "site" not in state
            assert "ticks" in state
            held = applied(held, racks["columns"])
            assert held["power_w"] == [90_000, 80_000]
            _, tree = await pod.ask("GET", "/api/v1/racks")
            assert held == tree["columns"]

    serve(tmp_path, check)


def test_topology_says_who_feeds_and_cools_whom(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        _, tree = await pod.ask("GET", "/api/v1/topology")
        racks = ["lab/h/r1", "lab/h/r2"]
        assert [(f["name"], f["parent"], f["side"], f["budget_w"], f["racks"]) for f in tree["feeders"]] == [
            ("lab/h/a", None, "A", 300_000.0, racks), ("lab/h/b", None, "B", 300_000.0, racks)]  # fmt: skip
        assert [(c["name"], c["racks"]) for c in tree["cdus"]] == [("lab/h/cdu1", racks)]
        _, summary = await pod.ask("GET", "/api/v1/summary")
        assert [(s["side"], s["budget_w"]) for s in summary["supply"]] == [("A", 3e5), ("B", 3e5)]

    serve(tmp_path, check)


def test_entities_and_jobs_are_found_by_a_part_of_their_names(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.live.put_event(ev.JobStarted(id="j", job="llm-7", nodes=("lab/h/r2/node0",), kind="training"))
        pod.tick()
        wanted = (("r2", "rack", "lab/h/r2"), ("cdu", "cdu", "lab/h/cdu1"), ("LLM", "job", "lab/job0"),
                  ("r1/node3/gpu2", "gpu", "lab/h/r1/node3/gpu2"), ("node3", "node", "lab/h/r2/node3"),
                  ("node3/gpu2", "gpu", "lab/h/r2/node3/gpu2"))  # fmt: skip
        for text, table, name in wanted:
            _, tree = await pod.ask("GET", f"/api/v1/find?text={text}&limit=5")
            assert (table, name) in [(f["table"], f["name"]) for f in tree["found"]], text
        assert (await pod.ask("GET", "/api/v1/find?text=no-such"))[1] == {"found": []}
        assert (await pod.ask("GET", f"/api/v1/find?text={'x' * 200}"))[0] == 400
        _, tree = await pod.ask("GET", "/api/v1/jobs")
        job = tree["jobs"][0]
        assert (job["name"], job["kind"], job["nodes"], job["gpus"], job["capped_gpus"]) == (
            "llm-7", "training", 1, 4, 0)  # fmt: skip
        assert (job["goodput_pu"], job["held_back_by"], job["expected_end_ns"]) == (None, None, None)

    serve(tmp_path, check)


def test_settings_are_listed_with_their_source(tmp_path: Path) -> None:
    tree = two_racks(policies={"power_cap": {"authority": "act", "settings": {"margin_pu": 0.05}}})
    from policies.power_capping.power_cap import PowerCap

    async def check(pod: Pod) -> None:
        _, answer = await pod.ask("GET", "/api/v1/policies")
        power = next(p for p in answer["policies"] if p["name"] == "power_cap")
        found = {s["name"]: (s["value"], s["default"], s["source"]) for s in power["settings"]}
        assert found["margin_pu"] == (0.05, 0.02, "site file")
        assert found["failover"] == (True, True, "default")
        assert power["acknowledge"] == "power_cap may act on lab"

    serve(tmp_path, check, tree=tree, more=[PowerCap(margin_pu=0.05)])


def test_the_power_of_the_site_is_the_sum_of_its_racks_over_time(tmp_path: Path) -> None:
    class History:
        async def query(self, key: str, names: list[str], *_: Any) -> dict[str, Any]:
            assert key == "rack.power_w"
            t_ns = [NS * i for i in range(1, 5)]
            values = {names[0]: [1.0, 2.0, None, 4.0], names[1]: [10.0, 20.0, 30.0, 40.0]}
            return {"t_ns": t_ns, "values": values, "damaged": 0}

    async def check(pod: Pod) -> None:
        assert (await pod.ask("GET", "/api/v1/history?signal=site.power_w"))[0] == 503
        pod.live.history = History()
        _, tree = await pod.ask("GET", "/api/v1/history?signal=site.power_w&last_s=60")
        # Half of the racks is too few to go by
        assert tree["values"] == {"lab": [11.0, 22.0, None, 44.0]}
        assert tree["unit"] == "W"

    serve(tmp_path, check)


def test_alarms_say_what_is_done_about_them(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.twin.engine.intake.authority["thermal_guard"] = "act"
        pod.tick({"gpu.temp_c": np.where(np.arange(144) < 72, 95.0, 60.0)})
        pod.tick()
        for entity, count in (("lab/h/r1", 1), ("lab/h/r2", 0), ("lab/h/r1/node0", 1)):
            path = f"/api/v1/decisions?kind=command&entity={entity}"
            assert len((await pod.ask("GET", path))[1]["decisions"]) == 0
            found = (await pod.ask("GET", f"{path}&below=true"))[1]["decisions"]
            assert (len(found) > 0) == (count > 0), entity
        _, tree = await pod.ask("GET", "/api/v1/alarms")
        (alarm,) = tree["alarms"]
        assert len(alarm["entities"]) < 72  # it names the first
        assert [d.startswith("thermal_guard holds the power cap of 72 GPUs at ") for d in alarm["doing"]] == [
            True
        ]

    serve(tmp_path, check)


def test_an_alarm_tells_what_was_commanded_since_it_began_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(pod: Pod) -> None:
        pod.twin.engine.intake.authority["thermal_guard"] = "act"
        pod.tick({"gpu.temp_c": np.where(np.arange(144) < 72, 95.0, 60.0)})
        pod.tick()
        lease = pod.twin.engine.arbiter.leases["gpu.power_cap_w"]
        issued_ns = int(lease.issued_ns[lease.running()].max())
        alarm = {"id": "x/y", "entities": ["lab/h/a"], "count": 1}  # above r1; no reason names it
        for raised_ns, lines in ((issued_ns, 1), (issued_ns + 16 * NS, 0)):
            (told,) = with_responses(pod.live, [alarm | {"raised_ns": raised_ns}])
            assert len(told["doing"]) == lines, told
        with monkeypatch.context() as patch:
            patch.setattr(responses, "LEAST_SHARE", 0.6)
            (told,) = with_responses(pod.live, [alarm | {"raised_ns": issued_ns}])
            assert told["doing"] == [], "half of its GPUs alone: another matter"
        gpu = alarm | {"raised_ns": issued_ns, "entities": ["lab/h/r1/node0/gpu0"]}
        (told,) = with_responses(pod.live, [gpu])
        assert told["doing"] == [], "a command on 72 GPUs is not about this one"
        own = (await pod.ask("GET", "/api/v1/alarms"))[1]["alarms"][0] | {"raised_ns": issued_ns + 16 * NS}
        assert "gpu.temp_c" in own["id"]
        (told,) = with_responses(pod.live, [own])
        assert len(told["doing"]) == 1, "the reason names its signal: it stands however old the command is"

    serve(tmp_path, check)


WRONG = [
    ({"name": "x"}, 400, "at least a fault"),
    ({"name": " ", "budget_pu": 0.5}, 400, "name: expected"),
    ({"name": "x", "budget_pu": 0.5, "horizon_s": 10}, 400, "horizon_s"),
    ({"name": "x", "budget_pu": 50.0}, 400, "budget_pu"),
    ({"name": "x", "policies": {"nobody": "act"}}, 404, "no policy nobody"),
    ({"name": "x", "faults": [{"kind": "pump_trip"}] * 21}, 400, "at most 20"),
    ({"name": "x", "shell": "rm"}, 400, "shell"),
    ({"name": "x", "before": 0}, 400, "before: expected a tick from 1"),
    ({"name": "x", "before": 10**9}, 400, "before: expected a tick from 1"),
    ({"name": "x", "before": 1, "budget_pu": 0.5}, 400, "before: expected alone"),
    ({"name": "x", "more_racks": {"count": 0, "beside": "r1"}}, 400, "more_racks.count: expected 1 to"),
    ({"name": "x", "more_racks": {"count": 2, "beside": "r9"}}, 404, "no rack r9"),
    ({"name": "x", "more_racks": {"count": 2, "beside": "r1", "load_pu": 2.0}}, 400, "load_pu"),
    ({"name": "x", "before": 1}, 409, "records no run"),
]


def test_a_what_if_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.tick()
        pod.tick()
        for body, status, words in WRONG:
            got, tree = await pod.ask("POST", "/api/v1/simulations", "operator", body)
            assert (got, words in tree["error"]) == (status, True), (body, tree)
        assert (await pod.ask("POST", "/api/v1/simulations", "viewer", {"name": "x", "budget_pu": 0.5}))[
            0
        ] == 403
        assert (await pod.ask("GET", "/api/v1/simulations/none"))[0] == 404

    serve(tmp_path, check)


def test_another_budget_is_that_of_feeders_of_several_halls_too(tmp_path: Path) -> None:
    site, feeder = tmp_path / "site.yaml", {"name": "m1", "budget_w": 1000.0, "guaranteed_w": 400}
    site.write_text(json.dumps({"site": "lab", "feeders": [feeder], "halls": [{"feeders": [feeder]}]}))
    loaded = SimpleNamespace(site_file=site)
    asked: Any = simulations.NewSimulation(name="half", budget_pu=0.5)
    tree = simulations._altered(SimpleNamespace(loaded=loaded), asked)  # type: ignore[arg-type]
    half = feeder | {"budget_w": 500.0, "guaranteed_w": 200.0}
    assert (tree["feeders"], tree["halls"][0]["feeders"]) == ([half], [half])


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A what-if steps back behind nobody: on a busy machine it would wait for minutes."""
    monkeypatch.setattr(simulations, "NICE", 0)


async def ended(pod: Pod, identity: str) -> dict[str, Any]:
    """A what-if once it has ended."""
    async with asyncio.timeout(240):
        while True:
            _, run = await pod.ask("GET", f"/api/v1/simulations/{identity}")
            if run["state"] != "running":
                found: dict[str, Any] = run
                return found
            await asyncio.sleep(0.2)


@pytest.mark.long
@pytest.mark.usefixtures("prompt")
def test_a_what_if_runs_beside_the_loop_one_at_a_time_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(json.dumps(two_racks()))

    async def check(pod: Pod) -> None:
        before = pod.twin.engine.checksum()
        body = {"name": "half the budget, no pump", "horizon_s": 60, "budget_pu": 0.5,
                "faults": [{"kind": "pump_trip", "entity": "lab/h/cdu1", "begin_s": 10, "part": "both"}],
                "settings": {}, "policies": {"thermal_guard": "act"}}  # fmt: skip
        status, run = await pod.ask("POST", "/api/v1/simulations", "operator", body)
        assert (status, run["state"], run["author"]) == (200, "running", "operator-1")
        status, refused = await pod.ask("POST", "/api/v1/simulations", "admin", body)
        assert (status, "operator-1 runs" in refused["error"]) == (409, True)
        done = await ended(pod, run["id"])
        assert (done["state"], done["error"]) == ("done", ""), done["error"]
        result = done["result"]
        assert result["simulated"]
        assert result["authority"]["thermal_guard"] == "act"
        assert result["from"]["tick"] == pod.twin.engine.state.tick
        arms = result["curves"]
        assert len(arms["policies"]["time_s"]) == len(arms["nothing"]["it_power_kw"]) > 10
        assert result["cases"][0]["difference"]["commands"] >= 0
        assert pod.twin.engine.checksum() == before
        _, other = await pod.ask("POST", "/api/v1/simulations", "operator", body | {"horizon_s": 3600})
        assert (await pod.ask("DELETE", f"/api/v1/simulations/{other['id']}", "operator"))[0] == 200
        assert (await ended(pod, other["id"]))["state"] == "cancelled"
        racks = {"name": "more", "horizon_s": 60, "more_racks": {"count": 2, "beside": "r1", "load_pu": 1.0}}
        _, other = await pod.ask("POST", "/api/v1/simulations", "operator", racks)
        grown = await ended(pod, other["id"])
        assert grown["error"] == ""
        limits = grown["result"]["cases"][0]["nothing"]["limits"]
        assert "the budget of a feeder" in [row["limit"] for row in limits]
        assert pod.twin.engine.site.sizes["rack"] == 2
        bad = {"name": "x", "faults": [{"kind": "pump_trip", "entity": "nowhere"}]}
        _, other = await pod.ask("POST", "/api/v1/simulations", "operator", bad)
        failed = await ended(pod, other["id"])
        assert failed["state"] == "failed"
        assert "nowhere" in failed["error"]
        assert str(tmp_path) not in failed["error"]

    # A snapshot is of all policies of a site
    more = [c() for name, c in REGISTRY.items() if name not in ("operator", "thermal_guard")]
    serve(tmp_path, check, more=more)


@pytest.mark.long
@pytest.mark.usefixtures("prompt")
def test_a_what_if_goes_back_before_a_tick_of_the_run(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(json.dumps(two_racks()))
    run = tmp_path / "run"
    assert main(["simulation", "run", "--site", str(site), "--for", "20s", "--out", str(run), "--json"]) == 0

    async def check(pod: Pod) -> None:
        pod.live.run_dir = str(run)
        while pod.twin.engine.state.tick < 15:
            pod.tick()
        body = {"name": "had nobody acted", "horizon_s": 60, "before": 8}
        _, begun = await pod.ask("POST", "/api/v1/simulations", "operator", body)
        done = await ended(pod, begun["id"])
        assert (done["state"], done["error"]) == ("done", "")
        assert done["result"]["from"]["tick"] == 7
        assert done["from_ns"] == done["result"]["from"]["now_ns"] != begun["from_ns"]
        assert done["result"]["cases"][0]["nothing"]["commands"] == 0
        for path in (*run.glob("snapshot-*"), *run.glob("trace-*")):
            path.unlink()
        _, begun = await pod.ask("POST", "/api/v1/simulations", "operator", body)
        failed = await ended(pod, begun["id"])
        assert (failed["state"], "no readable trace segments" in failed["error"]) == ("failed", True)
        assert str(tmp_path) not in failed["error"]

    more = [c() for name, c in REGISTRY.items() if name not in ("operator", "thermal_guard")]
    serve(tmp_path, check, more=more)


def test_the_server_says_words_for_keys(tmp_path: Path) -> None:
    """Explanations name no signal by its key; the words for keys are asked for once."""

    async def check(pod: Pod) -> None:
        pod.tick({"gpu.temp_c": 92.0})
        _, told = await pod.ask("GET", "/api/v1/explain/thermal_guard")
        texts = [s["text"] for s in told["sentences"]]
        texts += [
            v for t in told["tables"] for row in t["rows"] for v in row if isinstance(v, str) and " " in v
        ]
        assert texts
        assert all(plain_text(text) == text for text in texts)
        _, words = await pod.ask("GET", "/api/v1/words")
        assert words["controls"]["gpu.power_cap_w"] == control_words("gpu.power_cap_w") == "power cap"
        assert words["signals"]["ecc_dbe_count"] == "double-bit memory errors"

    serve(tmp_path, check)
