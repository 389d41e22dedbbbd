"""Metrics: valid Prometheus text, only current values, bounded, with labels that cannot break it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.in_process_daemon import Pod, serving
from twin.api import metrics
from twin.api.metrics import Metrics, SiteSeries, escaped, render
from twin.api.summary import Pulse
from twin.catalogue import TABLES

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"


def parsed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, as Prometheus reads them."""
    out: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            out.setdefault(sample.name, []).append((sample.labels, sample.value))
    return out


def test_prometheus_reads_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as pod:
            pod.tick({"gpu.temp_c": 95.0})
            pod.live.counts['odd\n"name\\'] = 3
            pod.live.messages = lambda: {"topics": {"a/b": {"bad": 2}}, "received": 7, "text": "x"}
            await pod.ask("GET", "/metrics", "none")
            status, text = await pod.ask("GET", "/metrics", "viewer")
            assert status == 200
            found = parsed(text)
            temps = found["racktwin_gpu_temp_c"]
            assert len(temps) == 144
            assert ({"name": "lab/h/r1/node0/gpu0", "rack": "lab/h/r1"}, 95.0) in temps
            assert found["racktwin_ticks_total"] == [({}, 2.0)]
            assert found["racktwin_leads"] == [({}, 1.0)]
            assert ({"severity": "critical"}, 1.0) in found["racktwin_alarms"]
            assert ({"what": "no token"}, 1.0) in found["racktwin_refused_total"]
            assert ({"what": 'odd\n"name\\'}, 3.0) in found["racktwin_counted_total"]
            assert {("topics.a/b.bad", 2.0), ("received", 7.0)} == {
                (labels["what"], value) for labels, value in found["racktwin_messages_total"]}  # fmt: skip
            assert ({"policy": "operator", "authority": "act"}, 1.0) in found["racktwin_policy_authority"]
            assert found["process_resident_memory_bytes"][0][1] > 1e6
            _, own = await pod.ask("GET", "/metrics?tables=none", "viewer")
            assert "racktwin_gpu_temp_c" not in own
            assert "racktwin_ticks_total" in own
            _, racks = await pod.ask("GET", "/metrics?tables=rack", "viewer")
            assert ("racktwin_rack_flow_lpm" in racks, "racktwin_gpu_temp_c" in racks) == (True, False)
            assert (await pod.ask("GET", "/metrics?tables=cpu", "viewer"))[0] == 404

    asyncio.run(main())


def series(pod: Pod, most: int = 10_000) -> tuple[str, dict[str, int]]:
    columns, left_out = SiteSeries().take(pod.live, TABLES, most)
    return render(columns, left_out).decode(), left_out


def test_what_is_not_current_is_left_out(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.tick({"gpu.temp_c": np.where(np.arange(144) < 4, np.nan, 60.0)})
    assert len(parsed(series(pod)[0])["racktwin_gpu_temp_c"]) == 140
    for _ in range(5):
        pod.tick()
    assert "racktwin_gpu_temp_c" not in parsed(series(pod)[0])  # stale after three periods of a second


def test_their_number_has_a_bound_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.tick({"gpu.temp_c": 60.0, "rack.flow_lpm": 96.0, "cdu.flow_lpm": 500.0})
    text, left_out = series(pod, most=100)
    found = parsed(text)
    assert "racktwin_gpu_temp_c" not in found
    assert len(found["racktwin_rack_flow_lpm"]) == 2
    assert left_out == {"gpu": 144}
    assert found["racktwin_series_left_out"] == [({"table": "gpu"}, 144.0)]


def test_boards_have_what_they_ask_of_gpus_without_scraping_them(tmp_path: Path) -> None:
    """The hottest GPU of each rack, and the least distance to each limit: both by hand."""
    pod = Pod(tmp_path)
    temps = np.linspace(40.0, 83.0, 144)
    temps[100] = np.nan
    pod.tick({"gpu.temp_c": temps, "rack.flow_lpm": [96.0, 50.0]})
    columns, _ = SiteSeries().take(pod.live, ["rack"])
    found = parsed(render(columns, {}).decode())
    flows = {labels["name"]: (labels["hall"], value) for labels, value in found["racktwin_rack_flow_lpm"]}
    assert flows == {"lab/h/r1": ("lab/h", pytest.approx(96.0)), "lab/h/r2": ("lab/h", pytest.approx(50.0))}
    hottest = {labels["name"]: value for labels, value in found["racktwin_rack_gpu_temp_c_max"]}
    assert hottest == pytest.approx({"lab/h/r1": round(temps[71] * 2) / 2, "lab/h/r2": 83.0})
    own = parsed(Metrics(pod.live, Pulse(), {}).own().decode())
    left = {(m["signal"], m["limit"]): value for m, value in own["racktwin_limit_margin"]}
    limits = pod.twin.site.limits
    assert left["gpu.temp_c", "max"] == limits["gpu.temp_c"].max[0] - 83.0
    assert left["rack.flow_lpm", "guard"] == pytest.approx(50.0 - limits["rack.flow_lpm"].guard[1])
    assert not any(signal == "rack.power_w" for signal, _ in left), "nobody reports it"
    assert ({"what": "notes_dropped"}, 0.0) in own["racktwin_counted_total"], "a rate has a beginning"


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", 'a\\"', "ü\u202e"])
def test_a_label_comes_back_as_it_was(name: str) -> None:
    text = f'x{{name="{escaped(name)}"}} 1\n'
    ((labels, _),) = parsed(text)["x"]
    assert labels["name"] == name


def test_counters_end_in_total_and_gauges_keep_their_precision(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    tables: dict[str, Any] = pod.live.engine.state.tables
    pod.tick({"gpu.temp_c": 60.5})
    row = next(s.row for s in TABLES["gpu"].counters if s.name == "energy_mj")
    tables["gpu"].raw[row], tables["gpu"].total[row] = 1, 2**53 + 1
    tables["gpu"].t_ns[:] = pod.twin.now_ns
    tables["gpu"]._times_changed()  # as `apply_update` does
    text = series(pod)[0]
    assert "# TYPE racktwin_gpu_energy_mj_total counter" in text
    assert f"}} {2**53 + 1}\n" in text
    assert 'racktwin_gpu_temp_c{name="lab/h/r1/node0/gpu0",rack="lab/h/r1"} 60.5\n' in text


def test_the_alerts_that_we_ship_ask_for_series_that_there_are(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.tick({"gpu.temp_c": 60.0})
    pod.live.stats.late_s.append(0.001)
    there = set(parsed(Metrics(pod.live, Pulse(), {"no such token": 1}).own().decode()))
    rules = yaml.safe_load((DEPLOY / "rules.yaml").read_text(encoding="utf-8"))
    every = [rule for group in rules["groups"] for rule in group["rules"]]
    alerts = [rule for rule in every if "alert" in rule]
    recorded = {rule["record"] for rule in every if "record" in rule}
    assert all(name in recorded for r in every for name in re.findall(r"\w+:racktwin_\w+:\w+", r["expr"]))
    asked = {name for rule in alerts for name in re.findall(r"(?<!:)\bracktwin_\w+", rule["expr"])}
    there |= set(parsed(series(pod)[0]))
    assert len(alerts) >= 8
    assert asked
    assert asked - {"racktwin_series_left_out"} <= there  # that one has a sample beyond the bound only
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in alerts)
    (job,) = yaml.safe_load((DEPLOY / "scrape.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    assert set(job["params"]["tables"][0].split(",")) <= set(TABLES)


def test_messages_cannot_grow_the_daemons_own_series(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.live.messages = lambda: {"topics": {f"t{i}": i for i in range(10_000)}}
    made = Metrics(pod.live, Pulse(), {})
    found = parsed(made.own().decode())
    assert len(found["racktwin_messages_total"]) <= 200
    assert metrics.MAX_SERIES == 100_000


def compared(pod: Pod, ticks: int = 260) -> None:
    """GPUs at work until their bands are learned, one of them too hot at the end."""
    for tick in range(ticks):
        busy = 0.4 + 0.2 * (tick // 40 % 2)
        temp_c = np.full(144, 35.0 + 20.0 * busy)
        temp_c[1] += 15.0 * (tick == ticks - 1)
        pod.tick({"gpu.power_w": 300.0 + 800.0 * busy, "gpu.temp_c": temp_c, "gpu.sm_active_pu": busy,
                  "rack.supply_temp_c": 25.0, "rack.flow_lpm": 90.0})  # fmt: skip


@pytest.mark.long
def test_expected_values_residuals_and_bands_stand_beside_and_by_rack(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as pod:
            compared(pod)
            _, text = await pod.ask("GET", "/metrics?prefix=lab/h/r1/node0")
            found = parsed(text)
            labels = {"name": "lab/h/r1/node0/gpu1", "rack": "lab/h/r1"}
            by_what = {
                what: {one["name"]: value for one, value in found[f"racktwin_gpu_temp_c_{what}"]}
                for what in ("expected", "residual", "band")
            }
            measured = {one["name"]: value for one, value in found["racktwin_gpu_temp_c"]}
            assert len(measured) == len(by_what["expected"]) == 4, "only what is inside"
            gpu = labels["name"]
            assert by_what["residual"][gpu] == pytest.approx(measured[gpu] - by_what["expected"][gpu])
            assert by_what["residual"][gpu] > by_what["band"][gpu] > 0.0
            assert by_what["expected"][gpu] == pytest.approx(by_what["expected"]["lab/h/r1/node0/gpu0"])
            found = parsed((await pod.ask("GET", "/metrics?tables=none&expected=gpu,rack"))[1])
            assert "racktwin_gpu_temp_c" not in found
            assert len(found["racktwin_gpu_temp_c_expected"]) == 144
            beyond = {one["name"]: value for one, value in found["racktwin_rack_gpu_temp_c_beyond_band"]}
            assert beyond == {"lab/h/r1": 1.0, "lab/h/r2": 0.0}
            mean = {one["name"]: value for one, value in found["racktwin_rack_gpu_temp_c_residual_mean"]}
            assert mean["lab/h/r1"] - mean["lab/h/r2"] == pytest.approx(15.0 / 72, abs=0.02)
            assert "_expected" not in (await pod.ask("GET", "/metrics?expected=none"))[1]
            assert "racktwin_gpu_temp_c_band" in (await pod.ask("GET", "/metrics?tables=gpu"))[1]
            shipped = (await pod.ask("GET", "/metrics?tables=rack,cdu"))[1]
            assert "racktwin_rack_gpu_power_w_beyond_band" in shipped, (
                "GPUs are not scraped, racks tell of them"
            )
            assert "racktwin_gpu_power_w_expected" not in shipped
            local = parsed((await pod.ask("GET", "/metrics?prefix=r2"))[1])
            assert [one["name"] for one, _ in local["racktwin_rack_flow_lpm"]] == ["lab/h/r2"]
            for query, status in (("expected=job", 404), ("prefix=lab/h/r9", 404)):
                assert (await pod.ask("GET", f"/metrics?{query}"))[0] == status

    asyncio.run(main())


@pytest.mark.parametrize(("most", "kinds"), [(10**6, {"gpu", "rack"}), (20, {"rack"}), (1, set())])
def test_beyond_the_bound_racks_stand_for_their_gpus(tmp_path: Path, most: int, kinds: set[str]) -> None:
    pod = Pod(tmp_path)
    compared(pod, 60)
    pod.live.engine.estimator.gpus.temp.sigma[:] = 1.0
    compared(pod, 1)
    columns, left_out = SiteSeries().take_expected(pod.live, ["gpu", "rack"], most)
    assert {c.signal.table for c in columns if "gpu" in c.signal.key} == kinds
    written = sum(int(c.good.sum()) for c in columns)
    assert written <= most
    everything, none = SiteSeries().take_expected(pod.live, ["gpu", "rack"], 10**6)
    assert written + sum(left_out.values()) == sum(int(c.good.sum()) for c in everything)
    assert none == {}
