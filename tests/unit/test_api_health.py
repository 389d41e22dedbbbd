"""Health over HTTP: counts, whom to look at first, one part explained, filters, bounds, mistyped names."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.builders import two_racks
from tests.support.in_process_daemon import Pod, serve
from tests.support.scripted_health import Ailing, ailing, days_ago_ns
from twin.api import health
from twin.api.answers import Refused
from twin.api.health import DRAIN_FIRST, DRAINED, SERVICE, of_name
from twin.api.state import forecast_rows
from twin.catalogue import NS, TABLES, utc
from twin.contracts import BY_FACILITY, DEGRADED, FAILED, HEALTHY, LEVELS, UNKNOWN, WATCH
from twin.telemetry import EntityReplaced, JobStarted, MaintenanceBegun

DAY_S = 86_400.0
NODE3, GPU2 = "lab/h/r1/node3", 14  # gpu2 of node3


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    made = Pod(tmp_path)
    made.tick({"gpu.temp_c": 60.0, "gpu.power_w": 700.0})
    return made


@pytest.fixture
def ill(pod: Pod) -> Ailing:
    """One GPU off the bus, one node to watch, one lemon, supplies unknown, and forecasts."""
    said = ailing(pod.twin.engine)
    now_ns = pod.twin.now_ns
    said.say("gpu", GPU2, FAILED, "XID 79: fell off the bus", action_name="replace", sure_pu=0.97,
             since_ns=now_ns - 180 * NS, source="NVIDIA XID catalogue", rule="xid")  # fmt: skip
    said.say("gpu", GPU2, WATCH, "memory errors grow", since_ns=now_ns - 3600 * NS, sure_pu=0.6)
    said.say("node", 9, WATCH, "silent for 12 % of the last hour", action_name="watch", sure_pu=0.4)
    said.verdicts.held["psu"].level[:] = UNKNOWN
    said.lemons.why[7] = ("3 failures in 28 days, others 0.2",)
    said.lemons.counts[7] = [1, 12, 2, 1, 0, 3, 0.5]
    chances = np.full(36, 0.004)
    chances[3], chances[9], chances[30] = np.nan, 0.31, 0.02
    for horizon_s in (3600.0, DAY_S, 604_800.0, 2_592_000.0):
        said.forecast(horizon_s, chances, basis="self_exciting 60 %, decayed_count 40 %")
        said.forecast(horizon_s, 0.4, key="site.node_failure_count")
    said.failures.begin_ns = days_ago_ns(now_ns, 31)
    said.failed(3, now_ns - 180 * NS, kind="off_bus")
    said.failed(7, days_ago_ns(now_ns, 6), days_ago_ns(now_ns, 5), "memory")
    said.failed(8, days_ago_ns(now_ns, 4), days_ago_ns(now_ns, 3), "taken_out")
    said.reports("gpu", GPU2, 79, now_ns - 180 * NS, detail="NVRM: Xid (PCI:0000:3b:00): 79")
    said.reports("gpu", GPU2, 63, now_ns - 600 * NS, times=3)
    return said


def rows(
    pod: Pod, part: str | None = None, prefix: str = "", *levels: str, **more: int
) -> list[dict[str, Any]]:
    total, found = health.page(pod.live, part, prefix, list(levels), more.get("offset", 0),
                                   more.get("limit", 20))  # fmt: skip
    assert total >= len(found)
    return found


def test_nothing_judged_is_unknown_and_never_healthy(pod: Pod) -> None:
    pod.twin.engine.health.__init__(pod.twin.site)  # type: ignore[misc]
    tree = health.whole(pod.live)
    assert tree["judged_s"] is None
    assert all(counts["healthy"] == 0 for counts in tree["parts"].values())
    assert "no health verdict yet: the first check follows the first tick" in tree["notes"]
    gpus = next(u for u in tree["unknown"] if u["part"] == "gpu")
    missing = {m["what"]: (m["never"], m["of"]) for m in gpus["missing"]}
    assert missing["NVLink errors"] == (144, 144)
    assert "heat" not in missing  # that is heard


def test_nodes_whose_bmc_was_never_connected_are_unknown_though_their_gpus_are_healthy(pod: Pod) -> None:
    tree = health.whole(pod.live)
    assert (tree["parts"]["gpu"]["healthy"], tree["parts"]["node"]["unknown"]) == (144, 36)
    (nodes,) = (u for u in tree["unknown"] if u["part"] == "node")
    power = next(m for m in nodes["missing"] if m["what"] == "power")
    assert (power["never"], power["of"]) == (36, 36)
    assert "BMC" in power["connect"]
    tree = of_name(pod.live, NODE3)
    assert (tree["level"], tree["missing"][0]["state"]) == ("unknown", "never reported")
    assert "not reported: power, state of its supply" in health.part_row(pod.live, "node", 3)["why"]
    assert "node3" not in [r["name"].rpartition("/")[2] for r in rows(pod, None, "", "healthy")]


def test_only_dpus_that_ever_told_anything_are_counted_and_told(pod: Pod) -> None:
    assert "dpu" not in health.whole(pod.live)["parts"]
    assert [u["part"] for u in health.whole(pod.live)["unknown"] if u["part"] == "dpu"] == []
    first = np.arange(36) < 2
    for _ in range(12):
        pod.tick({"node.dpu2_temp_c": np.where(first, 70.0, np.nan), "node.dpu2_health_state": 2.0 * first})
    tree = health.whole(pod.live)
    assert sum(tree["parts"]["dpu"].values()) == 36  # by their health, which all tell
    assert tree["parts"]["dpu"]["failed"] == 2
    assert [r["name"] for r in rows(pod, "dpu", "", "failed")] == [f"lab/h/r1/node{i}#dpu2" for i in (0, 1)]
    below = [row for row in of_name(pod.live, NODE3)["parts"] if row["part"] == "dpu"]
    assert [row["name"] for row in below] == [f"{NODE3}#dpu2"]
    told = of_name(pod.live, "r1/node1#dpu2")
    assert (told["level"], told["do"]) == ("failed", "drain the node and ask the vendor's support")
    (heat,) = (m for m in of_name(pod.live, "r1/node3#dpu2")["missing"] if m["what"] == "heat")
    assert "redfish" in heat["connect"]
    assert "dpu" in of_name(pod.live, NODE3)["parts_counts"]
    prefix = health.parts_of(pod.live, "lab/h/r2")
    assert sum(prefix["dpu"].values()) == 18


def test_the_whole(pod: Pod, ill: Ailing) -> None:
    tree = health.whole(pod.live)
    assert tree["parts"]["gpu"] == {"healthy": 143, "unknown": 0, "watch": 0, "degraded": 0, "failed": 1}
    assert tree["lemons"] == {"total": 1, "names": ["lab/h/r1/node7"]}
    assert [e["horizon_s"] for e in tree["expected"]] == [3600.0, DAY_S, 604_800.0, 2_592_000.0]
    assert tree["model"] == "failure@test"
    assert tree["failures"]["total"] == 2  # one was taken out by people
    assert tree["failures"]["by_class"] == {"off_bus": 1, "memory": 1}
    assert tree["failures"]["down"] == 1
    (unknown,) = tree["unknown"]
    assert (unknown["part"], unknown["unknown"]) == ("psu", 72)


def test_those_stand_out_who_are_ill_lemons_or_likely_the_worst_first(pod: Pod, ill: Ailing) -> None:
    found = rows(pod)
    assert [r["name"].rpartition("/")[2] for r in found] == ["node3", "node9", "node7"]
    assert [r["level"] for r in found] == ["failed", "watch", "healthy"]
    assert found[0]["why"] == "gpu2: XID 79: fell off the bus"
    assert found[0]["do"] == "drain the node and replace the part"
    assert found[0]["day"]["mean"] is None
    assert found[1]["day"]["said"].endswith("x the average")
    assert found[2]["lemon"]
    assert found[2]["why"] == "3 failures in 28 days, others 0.2"
    chances = np.full(36, 0.004)
    chances[30] = 0.02  # five times the others
    ill.forecast(DAY_S, chances)
    assert "lab/h/r2/node12" in [r["name"] for r in rows(pod)]


@pytest.mark.parametrize(
    ("part", "prefix", "levels", "count", "first"),
    [
        ("gpu", "", (), 144, f"{NODE3}/gpu2"),
        ("gpu", "lab/h/r2", (), 72, "lab/h/r2/node0/gpu0"),
        ("gpu", "", ("failed", "degraded"), 1, f"{NODE3}/gpu2"),
        ("node", "", ("watch",), 1, "lab/h/r1/node9"),
        (None, "", ("failed",), 1, NODE3),  # by its GPU
        (None, "lab/h/r2", (), 18, "lab/h/r2/node12"),  # the likeliest
        ("psu", NODE3, (), 2, f"{NODE3}#psu1"),
        ("pump", "", (), 2, "lab/h/cdu1#pump1"),
        ("switch", "", (), 0, ""),
    ],
)
def test_filters(
    pod: Pod, ill: Ailing, part: str | None, prefix: str, levels: tuple[str, ...], count: int, first: str
) -> None:
    total, found = health.page(pod.live, part, prefix, list(levels), 0, 5)
    assert total == count
    assert [r["name"] for r in found[:1]] == ([first] if first else [])
    assert len(found) == min(5, count)


def test_a_gpu_explained(pod: Pod, ill: Ailing) -> None:
    tree = of_name(pod.live, f"{NODE3}/gpu2")
    assert (tree["kind"], tree["part"], tree["level"], tree["action"]) == ("part", "gpu", "failed", "replace")
    assert tree["sure"] == "sure (97 %)"
    assert tree["age_s"] == pytest.approx(180)
    assert [e["text"] for e in tree["evidence"]] == ["XID 79: fell off the bus", "memory errors grow"]
    assert tree["evidence"][0]["source"] == "NVIDIA XID catalogue"
    assert [(f["label"], f["times"]) for f in tree["faults"]] == [("XID 79", 1), ("XID 63", 3)]
    assert tree["faults"][0]["means"]
    assert tree["faults"][1]["asks"] == "nothing"
    missing = {m["what"]: m["state"] for m in tree["missing"]}
    assert {"memory errors", "NVLink errors", "reasons of a lowered clock"} <= missing.keys()
    assert not {"heat", "power"} & missing.keys()
    assert set(missing.values()) == {"never reported"}
    assert tree["node"] == NODE3
    assert [c["mean"] for c in tree["chance"]] == [None] * 4
    assert "new serial number" in tree["changes"]


def test_a_node_that_has_failed_has_no_chance_of_failing_though_the_model_has_yet_to_learn_it(
    pod: Pod, ill: Ailing
) -> None:
    """A forecast is up to a minute old: its last figures are those of a node that worked."""
    for horizon_s in (3600.0, DAY_S, 604_800.0, 2_592_000.0):
        ill.forecast(horizon_s, np.full(36, 0.03))
    now_ns = pod.twin.now_ns
    ill.say("node", 5, FAILED, "it is off", since_ns=now_ns - 20 * NS)
    ill.failed(6, now_ns - 10 * NS, kind="silent")  # by the log alone
    for name, ago_s in ((NODE3, 180), (f"{NODE3}/gpu2", 180), (f"{NODE3}/gpu0", 180), ("lab/h/r1/node5", 20),
                        ("lab/h/r1/node6", 10)):  # fmt: skip
        tree = of_name(pod.live, name)
        assert tree["failed_since_ns"] == now_ns - ago_s * NS, name
        assert [(c["mean"], c["lo"], c["hi"]) for c in tree["chance"]] == [(None, None, None)] * 4
    assert of_name(pod.live, NODE3)["failed_words"].startswith("has failed since ")
    assert of_name(pod.live, f"{NODE3}/gpu0")["node"] == NODE3
    ill.failures.well_ns[6] = now_ns - 5 * NS
    words = of_name(pod.live, "lab/h/r1/node6")["failed_words"]
    back, end = utc(now_ns - 5 * NS), utc(now_ns + 595 * NS)
    failed = f"failed at {utc(now_ns - 10 * NS)} UTC, is well since {back} UTC"
    assert words == f"{failed} and counts as failed until {end} UTC"
    well = of_name(pod.live, "lab/h/r1/node4")
    assert well["failed_since_ns"] is None
    assert well["chance"][1]["mean"] == pytest.approx(0.03)
    days = {r["name"]: (r["failed_since_ns"], r["day"]["mean"]) for r in rows(pod, "node", limit=40)}
    assert days[NODE3] == (now_ns - 180 * NS, None)
    assert days["lab/h/r1/node5"] == (now_ns - 20 * NS, None)
    (day,) = (f for f in forecast_rows(pod.live, "node", np.arange(36)) if f["horizon_s"] == DAY_S)
    for key in ("mean", "lo", "hi"):
        assert np.flatnonzero(np.isnan(day[key])).tolist() == [3, 5, 6]


def test_a_node_that_is_drained_is_not_to_be_drained_again(
    pod: Pod, ill: Ailing, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of_name(pod.live, f"{NODE3}/gpu2")["do"]
    assert before.startswith(DRAIN_FIRST)
    levels = np.full(pod.live.engine.site.sizes["node"], np.nan)
    monkeypatch.setitem(pod.live.engine.arbiter.leases, SERVICE, SimpleNamespace(value=levels))
    levels[3] = DRAINED - 1.0
    assert of_name(pod.live, f"{NODE3}/gpu2")["do"] == before, "it drains still"
    levels[3] = DRAINED
    after = of_name(pod.live, f"{NODE3}/gpu2")["do"]
    assert after == f"it is drained. Repair it, then report the repair: `racktwin device repaired {NODE3}`"


def test_a_node_explained(pod: Pod, ill: Ailing) -> None:
    pod.twin.tick(None, JobStarted(job="train", nodes=("lab/h/r1/node7",)))
    pod.twin.tick(None, EntityReplaced(table="gpu", name="lab/h/r1/node7/gpu1", serial="s2"))
    tree = of_name(pod.live, "r1/node7")
    assert (tree["name"], tree["level"], tree["job"]) == ("lab/h/r1/node7", "healthy", "train")
    assert tree["lemon"]["is"]
    assert {s["name"]: s["value"] for s in tree["lemon"]["signals"]}["xids"] == 12
    history = tree["history"]
    assert (history["failures_total"], history["gpus_replaced"], history["reboots"]) == (1, 1, None)
    assert history["failures"][0]["class"] == "memory"
    assert history["failures"][0]["lasted_s"] == pytest.approx(DAY_S)
    day = tree["chance"][1]
    assert day["horizon_s"] == DAY_S
    assert day["mean"] == pytest.approx(0.004)
    assert day["average"] == pytest.approx(np.mean([0.004] * 33 + [0.31, 0.02]), rel=1e-5)
    assert day["said"] == "below average"
    assert day["basis"] == "self_exciting 60 %, decayed_count 40 %"
    assert tree["parts_counts"]["psu"]["unknown"] == 2
    assert of_name(pod.live, NODE3)["parts"][0]["name"] == f"{NODE3}/gpu2"


def test_silence_since_when(pod: Pod, ill: Ailing) -> None:
    pod.tick(dt_s=3600.0)
    missing = {m["what"]: m["state"] for m in of_name(pod.live, f"{NODE3}/gpu0")["missing"]}
    assert missing["heat"] == "silent for 1 h"
    assert missing["PCIe replays"] == "never reported"


def test_whose_doing_a_lowered_clock_is(pod: Pod, ill: Ailing) -> None:
    ill.say("gpu", 20, DEGRADED, "held down by heat", action_name="check_facility", lowered=BY_FACILITY)
    tree = of_name(pod.live, "r1/node5/gpu0")
    assert tree["lowered"] == "facility"
    assert "not the GPU" in tree["lowered_words"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("lab/h/r1", "place"), ("r1", "place"), ("lab/h", "place"), ("cdu1", "equipment"),
     ("cdu1#pump2", "part"), ("r1/node3#psu1", "part"), ("r1/node3", "part"), ("r1/node3/gpu0", "part")],
)  # fmt: skip
def test_every_kind_of_name_has_an_answer(pod: Pod, ill: Ailing, name: str, kind: str) -> None:
    assert of_name(pod.live, name)["kind"] == kind


def test_equipment_without_a_verdict_says_what_is_heard_of_it_and_whom_it_serves(tmp_path: Path) -> None:
    tree = two_racks(loops=[{"name": "fw1"}], storage=[{"name": "fs1"}])
    tree["halls"][0]["cdus"][0]["loop"] = "fw1"
    pod = Pod(tmp_path, tree=tree)
    pod.tick({"loop.supply_temp_c": 30.0, "gpu.temp_c": 60.0})
    for name, racks in (("fw1", 2), ("lab/fw1", 2), ("a", 2), ("fs1", 0)):
        found = of_name(pod.live, name)
        assert (found["kind"], found["racks_total"]) == ("equipment", racks), name
        assert sum(found["nodes"].values()) == 18 * racks
        states = [m["state"] for m in found["missing"]]
        assert states == ([] if name.endswith("fw1") else ["never reported"]), name
    pod.tick(dt_s=7200.0)
    (silent,) = of_name(pod.live, "fw1")["missing"]
    assert (silent["what"], silent["state"]) == ("supply_temp_c", "silent for 2 h")


def test_a_job_is_refused_with_one_of_its_nodes(pod: Pod, ill: Ailing) -> None:
    pod.twin.tick(None, JobStarted(job="train", nodes=("lab/h/r1/node7",)))
    for name in ("train", "lab/job0"):
        with pytest.raises(Refused) as refused:
            of_name(pod.live, name)
        assert "it is a job on 1 nodes: ask for one of them, such as lab/h/r1/node7" in refused.value.why


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_an_answer_or_a_reason(pod: Pod, ill: Ailing, table: str) -> None:
    site = pod.live.engine.site
    if not site.sizes[table]:
        return
    if table == "job":
        with pytest.raises(Refused, match="no node, GPU"):
            of_name(pod.live, site.name(table, 5))
    else:
        assert of_name(pod.live, site.name(table, 0))["kind"] in ("part", "equipment", "place")


def test_a_rack_and_a_cdu_list_their_parts(pod: Pod, ill: Ailing) -> None:
    ill.wears("cdu.ua", 0, (9.0, 6.0, 20.0))
    rack = of_name(pod.live, "r1")
    assert rack["total"] == 18
    assert rack["rows"][0]["name"] == NODE3
    assert rack["parts"]["gpu"]["failed"] == 1
    cdu = of_name(pod.live, "cdu1")
    assert [p["name"] for p in cdu["parts"]] == ["lab/h/cdu1#pump1", "lab/h/cdu1#pump2"]
    assert cdu["racks"] == ["lab/h/r1", "lab/h/r2"]
    assert cdu["nodes"]["failed"] == 1
    assert cdu["remaining"][0]["mid_s"] == pytest.approx(9 * DAY_S)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lab/h/r3", "did you mean lab/h/r"),
        ("lab/h/r1/node18", "did you mean lab/h/r1/node0 to lab/h/r1/node17?"),
        ("r1/node99/gpu0", "lab/h/r1/node0 to lab/h/r1/node17"),
        ("cdu2", "did you mean lab/h/cdu1?"),
        ("xyz", "racktwin device health lists all names"),
        ("r1/node3#psu3", ""),
        ("\x1b[31mevil" + "x" * 5000, "racktwin device health lists all names"),
    ],
)
def test_an_unknown_name_is_refused_with_those_alike(pod: Pod, ill: Ailing, name: str, hint: str) -> None:
    with pytest.raises(Refused) as refused:
        of_name(pod.live, name)
    assert refused.value.status == 404
    assert hint in refused.value.why
    assert "\x1b" not in refused.value.why
    assert len(refused.value.why) < 400


def test_maintenance_is_said(pod: Pod, ill: Ailing) -> None:
    end_ns = pod.twin.now_ns + 3600 * NS
    pod.twin.tick(None, MaintenanceBegun(id="w", author="a", table="node", names=(NODE3,), until_ns=end_ns))
    assert of_name(pod.live, f"{NODE3}/gpu2")["maintenance"]
    assert not of_name(pod.live, "r1/node4")["maintenance"]


def test_the_summary_s_block_is_small(pod: Pod, ill: Ailing) -> None:
    for node in range(20):
        ill.unwell("node", node)
    block = health.block(pod.live)
    assert len(block["worst"]) == health.SHOWN_FEW
    assert block["stand_out"] == 20
    assert block["expected_day"]["mean"] == pytest.approx(0.4)
    assert block["lemons"] == 1


def test_over_http(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        ill = ailing(pod.twin.engine)
        ill.say("gpu", GPU2, FAILED, "XID 79 \x1b[31m<b>", action_name="replace")
        status, tree = await pod.ask("GET", "/api/v1/health")
        assert (status, tree["total"], tree["rows"][0]["name"]) == (200, 1, NODE3)
        assert "\x1b" not in tree["rows"][0]["why"]
        status, tree = await pod.ask("GET", "/api/v1/health?part=gpu&limit=10&offset=140&prefix=lab")
        assert (status, tree["total"], len(tree["rows"]), tree["next_offset"]) == (200, 144, 4, None)
        assert (await pod.ask("GET", "/api/v1/health?limit=10&part=gpu"))[1]["next_offset"] == 10
        status, tree = await pod.ask("GET", "/api/v1/health/lab/h/r1/node3/gpu2")
        assert (status, tree["level"]) == (200, "failed")
        assert (await pod.ask("GET", "/api/v1/health/cdu1%23pump1"))[1]["part"] == "pump"
        for query, part in (("part=disk", "expected one of gpu"), ("level=bad", "expected one of healthy"),
                            ("limit=100000", "limit"), ("nope=1", "unknown parameter")):  # fmt: skip
            status, tree = await pod.ask("GET", f"/api/v1/health?{query}")
            assert status == 400
            assert part in tree["error"]
        assert (await pod.ask("GET", "/api/v1/health/nowhere"))[0] == 404
        assert (await pod.ask("GET", "/api/v1/health", "none"))[0] == 401
        assert (await pod.ask("GET", "/api/v1/summary"))[1]["health"]["parts"]["gpu"]["failed"] == 1

    serve(tmp_path, check, tree=two_racks())


def test_metrics_are_bounded(pod: Pod, ill: Ailing) -> None:
    from prometheus_client import generate_latest
    from prometheus_client.registry import CollectorRegistry

    from twin.api.metrics import DaemonSeries
    from twin.api.summary import Pulse

    ill.book.counts |= {f"strange {i}": 1 for i in range(1000)}
    registry = CollectorRegistry()
    registry.register(DaemonSeries(pod.live, Pulse(), {}))
    lines = generate_latest(registry).decode().splitlines()
    assert 'racktwin_health_parts{level="failed",part="gpu"} 1.0' in lines
    assert "racktwin_health_lemons 1.0" in lines
    assert 'racktwin_node_failures{class="off_bus"} 1.0' in lines
    assert "racktwin_nodes_down 1.0" in lines
    likely = [x for x in lines if x.startswith("racktwin_node_failure_probability{")]
    assert len(likely) == 20 * 4
    ill.forecast(DAY_S, np.full(36, 0.03))
    again = generate_latest(registry).decode().splitlines()
    of_failed = [x for x in again if x.startswith("racktwin_node_failure_probability{") and NODE3 + '"' in x]
    assert not of_failed, "a node that has failed is no likely one"
    assert any('name="lab/h/r1/node9"' in x for x in likely)
    assert not any(NODE3 + '"' in x for x in likely)  # no forecast, no series
    assert len([x for x in lines if x.startswith("racktwin_health_faults_total{")]) <= 100
    assert 'racktwin_forecast_site_node_failure_count{edge="mean",horizon_s="86400",name="lab"}' in "\n".join(
        lines
    )


def test_the_document_names_series_alarms_and_commands_that_there_are(pod: Pod, ill: Ailing) -> None:
    from prometheus_client import generate_latest
    from prometheus_client.registry import CollectorRegistry

    from twin.api.metrics import DaemonSeries
    from twin.api.summary import Pulse
    from twin.health.alarms import LIKELY_PU, MOST, STILL_LIKELY_PU, WEARS_OUT_S

    text = (Path(__file__).parents[2] / "docs" / "health.md").read_text(encoding="utf-8")
    registry = CollectorRegistry()
    registry.register(DaemonSeries(pod.live, Pulse(), {}))
    there = set(re.findall(r"^(racktwin_\w+)", generate_latest(registry).decode(), re.MULTILINE))
    named = set(re.findall(r"racktwin_\w+", text))
    assert len(named) >= 8
    assert named <= there
    assert f"is {100 * LIKELY_PU:.0f} % or more; the alarm stands until" in text
    assert f"until the chance is below {100 * STILL_LIKELY_PU:.0f} %" in text
    assert f"within {WEARS_OUT_S / DAY_S:.0f} days" in text
    assert f"more than {MOST} findings" in text
    assert all(f"| {level} |" in text for level in LEVELS)


def test_what_is_missing_is_no_reason_for_a_healthy_part(pod: Pod, ill: Ailing) -> None:
    ill.say("gpu", 30, UNKNOWN, "heat: not reported now", rule="missing:heat")
    ill.say("gpu", 30, HEALTHY, "heard for 3 days; its age is not known", rule="history")
    assert pod.live is not None
    assert health.part_row(pod.live, "gpu", 30)["why"] == "heat: not reported now"
    ill.verdicts.held["gpu"].level[30] = HEALTHY
    assert health.part_row(pod.live, "gpu", 30)["why"] == ""
