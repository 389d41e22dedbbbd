"""The boards of Grafana: made from code, read by the SDK, answered by a Prometheus that scraped daemons."""

from __future__ import annotations

import asyncio
import enum
import json
import re
import time
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard, units
from racktwin_boards.all_boards import BOARDS
from racktwin_boards.panels import Panel

from tests.support import charted_pod, grafana_queries
from tests.support.builders import two_racks
from tests.support.capped_pod import guards
from tests.support.daemon_process import RunningDaemon
from tests.support.grafana_queries import Asked, interpolated
from tests.support.in_process_daemon import Desk, serving_aside
from tests.support.patience import PATIENCE_S
from tests.support.prometheus_server import Prometheus
from twin.catalogue import TABLES
from twin.cli.main import parse

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "grafana" / "boards"
PANELS = [(board.name, panel) for board in BOARDS for panel in board.panels]
POLICIES = ("thermal_guard", "leak_guard", "power_cap", "power_guard", "checkpoint", "replacement")
YARD = two_racks(policies={name: {"authority": "advise"} for name in POLICIES}) | {"site": "yard"}
# Panels that rightly have no data here, with the reason
EMPTY = {
    ("daemon", "Series that these boards lack", "of the site"): "no table is beyond the bound",
    ("health", "Node failures remembered, by class", "{{class}}"): "no node failed",
}


def test_the_files_are_what_the_code_makes() -> None:
    assert {b.name: b.document() for b in BOARDS} == {
        path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")
    }, "run `make boards`"


def test_the_sdk_reads_them_back_as_they_are() -> None:
    """No schema ships with the SDK; its model knows every field and its type."""
    register_default_plugins()
    for name, tree in grafana_queries.boards().items():
        board = dashboard.Dashboard.from_json(tree)
        again = json.loads(json.dumps(board, cls=JSONEncoder))
        again["links"][0]["placement"] = ""  # the model reads its only value there
        assert again == tree, name
        assert list(misfits(board, dashboard.Dashboard, name)) == []


def misfits(value: Any, wanted: Any, path: str) -> Iterator[str]:
    """Places where a value is not what the model's annotations say."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is object:
        wanted = type(value)  # what the type of a panel decides is read by that type's own model
    if wanted is Any:
        return
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        if value not in {part.value for part in wanted}:
            yield f"{path}: {value!r} is no {wanted}"
    elif origin in (typing.Union, types.UnionType):
        if all(list(misfits(value, part, path)) for part in args):
            yield f"{path}: {value!r} is none of {wanted}"
    elif origin is typing.Literal:
        if value not in args:
            yield f"{path}: {value!r} is not one of {args}"
    elif origin is list:
        if not isinstance(value, list):
            yield f"{path}: {value!r} is no list"
            return
        for i, part in enumerate(value):
            yield from misfits(part, args[0], f"{path}[{i}]")
    elif origin is dict:
        for key, part in value.items():
            yield from misfits(part, args[1], f"{path}.{key}")
    elif wanted is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            yield f"{path}: {value!r} is no number"
    elif not isinstance(value, wanted):
        yield f"{path}: {value!r} is no {wanted}"
    elif hasattr(value, "to_json") and not isinstance(value, str):
        for name, kind in typing.get_type_hints(type(value)).items():
            yield from misfits(getattr(value, name), kind, f"{path}.{name}")


def test_the_model_refuses_what_is_wrong() -> None:
    register_default_plugins()
    tree = grafana_queries.boards()["overview"]
    tree["panels"][0]["gridPos"]["h"] = "tall"
    tree["panels"][1]["options"]["colorMode"] = "plaid"
    found = list(misfits(dashboard.Dashboard.from_json(tree), dashboard.Dashboard, "board"))
    assert len(found) == 1, found
    assert "panels" in found[0]


@pytest.mark.parametrize("board,panel", PANELS, ids=lambda p: p.title if isinstance(p, Panel) else p)
def test_a_panel_says_what_is_good_and_what_to_do(
    board: str, panel: Panel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert panel.good.endswith(".")
    assert panel.otherwise.endswith((".", "`", "?"))
    assert bool(panel.source) == bool(panel.steps), "a threshold has a source"
    assert panel.unit in {v for k, v in vars(units).items() if k[0].isupper() and isinstance(v, str)}
    assert not panel.board or panel.board in {b.name for b in BOARDS}
    for text in (panel.good, panel.otherwise):
        for command in re.findall(r"`(racktwin [a-z][^`]*)`", text):
            assert refusal(command, capsys) == "", command
        for named in re.findall(r"board `(\w+)`", text):
            assert named in {b.name for b in BOARDS}
    alerts = {rule.get("alert") for group in rules()["groups"] for rule in group["rules"]}
    assert set(re.findall(r"Racktwin\w+", panel.source)) <= alerts


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The words with which a command is refused; a sentence may leave out its arguments."""
    try:
        parse(["x" if word.isupper() else word for word in command.split()[1:]])
    except SystemExit:
        why = capsys.readouterr().err
        return "" if "required" in why or "'x': expected one of" in why else why
    return capsys.readouterr().err  # a name of before


def test_boards_lead_to_each_other_and_ask_for_the_same_variables() -> None:
    for name, tree in grafana_queries.boards().items():
        assert tree["uid"] == f"racktwin-{name}"
        assert "racktwin" in tree["tags"]
        (link,) = tree["links"]
        assert (link["tags"], link["includeVars"], link["keepTime"]) == (["racktwin"], True, True)
        known = [v["name"] for v in tree["templating"]["list"]]
        assert known == ["datasource", "site", "daemon", "hall", "rack"]
        asked = {v for t in re.findall(r"\$(\w+)", json.dumps(tree["panels"])) for v in [t]}
        assert asked - {"__rate_interval", "datasource"} <= set(known)
        ids = [p["id"] for p in tree["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in tree["panels"]:
            for led in panel["fieldConfig"]["defaults"].get("links", ()):
                assert "${__field.labels.name:percentencode}" in led["url"], (
                    "a name cannot change the address"
                )


def test_compose_provides_the_boards() -> None:
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    mounts = dict(v.split(":")[:2] for v in services["grafana"]["volumes"])
    provider = yaml.safe_load((DEPLOY / "compose/grafana/dashboards.yaml").read_text())["providers"][0]
    assert (DEPLOY / "compose" / "../grafana/boards").resolve() == FOLDER.resolve()
    assert mounts["../grafana/boards"] == provider["options"]["path"]


def rules() -> dict[str, Any]:
    """The rules that ship."""
    return dict(yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text(encoding="utf-8")))


def scraped(tmp_path: Path, *targets: tuple[list[str], str]) -> dict[str, Any]:
    """The scrape configuration that ships, for these (addresses, token), a job for each token."""
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yaml").read_text())["scrape_configs"]
    del job["scrape_interval"], job["scrape_timeout"]
    jobs = []
    for number, (addresses, token) in enumerate(targets):
        path = tmp_path / f"{number}.token"
        path.write_text(token)
        jobs.append(job | {
            "job_name": f"target{number}", "authorization": {"credentials_file": str(path)},
            "static_configs": [{"targets": addresses}],
            "relabel_configs": [{"target_label": "job", "replacement": job["job_name"]}],
        })  # fmt: skip
    return {"scrape_configs": jobs, "rule_files": [str(DEPLOY / "prometheus" / "rules.yaml")]}


@pytest.mark.long
def test_prometheus_answers_every_query(
    server: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every panel, variable, rule and alert, for a real daemon and for one with odd names."""
    program = server("prometheus")
    pod = serving_aside(tmp_path, monkeypatch, tree=charted_pod.tree(), more=guards())
    with pod as desk, RunningDaemon(tmp_path / "yard", "embedded", YARD) as daemon:
        desk.do(lambda: charted_pod.fill(desk.pod))
        daemon.start()
        assert asyncio.run(desk.pod.ask("GET", "/metrics", "wrong"))[0] == 401
        port = desk.pod.url.rpartition(":")[2]
        config = scraped(
            tmp_path, ([f"127.0.0.1:{port}", f"localhost:{port}"], desk.pod.secrets["viewer"]),  # as a pair
            ([f"127.0.0.1:{daemon.port}"], daemon.token()),
        )  # fmt: skip
        with Prometheus(program, tmp_path, config) as prometheus:
            wait_for_rules(prometheus)
            check_variables(prometheus)
            check_rules(prometheus)
            found = check_panels(prometheus)
            check_pair(prometheus, desk)
            check_names(prometheus, desk)
    assert found > 100


def wait_for_rules(prometheus: Prometheus) -> None:
    """Until each target was scraped, and each rule that wants two scrapes evaluated."""
    ends = time.monotonic() + PATIENCE_S
    while len(prometheus.query("instance:racktwin_ticks_skipped:ratio_rate5m")) < 3:
        assert time.monotonic() < ends, (prometheus.words(), prometheus.get("/api/v1/targets"))
        time.sleep(0.2)


def choice(prometheus: Prometheus, board: dict[str, Any], site: str) -> dict[str, Any]:
    """A site, and all of what the other variables offer, as Grafana begins."""
    chosen: dict[str, Any] = {"site": site}
    chosen["daemon"] = grafana_queries.options(prometheus, board, "daemon", chosen)
    return chosen | {"hall": ".*", "rack": ".*"}


def check_variables(prometheus: Prometheus) -> None:
    """Each narrows the next; a name with signs of regular expressions is that name alone."""
    for board in grafana_queries.boards().values():
        assert grafana_queries.options(prometheus, board, "site", {}) == ["lab", "yard"]
        chosen = choice(prometheus, board, "lab")
        assert len(chosen["daemon"]) == 2
        assert grafana_queries.options(prometheus, board, "hall", chosen) == ["lab/h", "lab/hall2"]
        chosen["hall"] = [charted_pod.ODD_HALL]
        racks = grafana_queries.options(prometheus, board, "rack", chosen)
        assert racks == [charted_pod.ODD_RACK, "lab/h/r.1+a:2"]


def check_rules(prometheus: Prometheus) -> None:
    """Each is evaluated without an error; recorded ones have series, and no alert fires."""
    evaluated = [rule for group in prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert len(evaluated) == sum(len(group["rules"]) for group in rules()["groups"])
    for rule in evaluated:
        assert rule["health"] == "ok", rule
        if rule["type"] == "recording":
            rows = prometheus.query(rule["name"])
            assert rows, rule["name"]
            assert all({"job", "instance"} <= labels.keys() for labels, _ in rows)
        else:
            assert rule["state"] != "firing", rule


def check_panels(prometheus: Prometheus) -> int:
    """Every query answers for one of the sites, with the labels that its legend names; their number."""
    problems, empty, count = list[str](), set[tuple[str, str, str]](), 0
    board = grafana_queries.boards()["overview"]  # all have the same variables
    sites = [choice(prometheus, board, site) for site in ("lab", "yard")]
    for asked in grafana_queries.queries():
        rows = []
        for chosen in sites:
            try:
                found = answer_of(prometheus, asked, chosen)
                names = [asked.named_as(labels) for labels, _ in found]
                assert len(set(names)) == len(names), f"two lines have one name in {sorted(names)}"
                rows += found
            except (ValueError, AssertionError) as error:
                problems.append(f"{asked.board}: {asked.panel}: {asked.expr}: {error}")
            count += 1
        if not rows:
            empty.add((asked.board, asked.panel, asked.legend))
        problems += [
            f"{asked.board}: {asked.panel}: no label {sorted(asked.labels - labels.keys())} in {labels}"
            for labels, _ in rows
            if not asked.labels <= labels.keys()
        ]
    assert problems == []
    surprises = sorted(" | ".join(key) for key in empty ^ EMPTY.keys())
    assert not surprises, "\n".join(surprises)
    return count


def answer_of(
    prometheus: Prometheus, asked: Asked, chosen: dict[str, Any]
) -> list[tuple[dict[str, str], float]]:
    """Its series; of what was an hour before, an hour later."""
    later_s = 3600.0 if " offset 1h" in asked.expr else 0.0
    return prometheus.query(interpolated(asked.expr, chosen), time.time() + later_s)


def check_pair(prometheus: Prometheus, desk: Desk) -> None:
    """A pair of daemons reports each rack twice; it is counted once."""
    (asked,) = (a for a in grafana_queries.queries() if a.legend == "racks together")
    chosen = choice(prometheus, grafana_queries.boards()["overview"], "lab")
    ((_, power_w),) = answer_of(prometheus, asked, chosen)
    tables = desk.pod.twin.engine.state.tables
    assert power_w == pytest.approx(tables["rack"].value[TABLES["rack"].by_name["power_w"].row].sum())


def check_names(prometheus: Prometheus, desk: Desk) -> None:
    """Names of people and devices become labels unchanged. A rack with odd signs is found by its name."""
    board = grafana_queries.boards()["daemon"]
    chosen = choice(prometheus, board, "lab")
    parts = [a for a in grafana_queries.queries() if a.panel == "Sources, sinks and services"]
    labels = [labels["part"] for labels, _ in answer_of(prometheus, parts[0], chosen)]
    assert charted_pod.NASTY in labels
    chosen["hall"], chosen["rack"] = [charted_pod.ODD_HALL], [charted_pod.ODD_RACK]
    named = [a for a in grafana_queries.queries() if "$rack" in a.expr and "{{name}}" in a.legend]
    assert len(named) > 5
    for asked in named:
        rows = answer_of(prometheus, asked, chosen)
        assert {labels["name"] for labels, _ in rows} == {charted_pod.ODD_RACK}, asked
