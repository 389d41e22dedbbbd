"""Calibration: what is learned and what drifted, through the interface and on a terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.support.builders import two_racks
from tests.support.estimator_rig import Desk
from tests.support.in_process_daemon import Pod, serve
from twin.api.comparisons import shown_row
from twin.catalogue import F64, NS
from twin.cli.operate.calibration import drift_text, show
from twin.contracts import Z90
from twin.estimation import LEARNED, LEARNING, NOTHING_LEARNED, PARAMETER_KINDS, Calibration, calibrations

GPU = "lab/h/r1/node0/gpu1"


def plates(desk: Desk, seconds: int, plate: F64, growth_per_s: F64) -> None:
    """GPUs whose load changes; `plate` [2, n] is the resistance, which grows, and the rise, 7 s late."""
    for k in range(0, seconds, 4):
        busy = 0.35 + 0.5 * (k // 120 % 2)
        power_w = 200.0 + 1000.0 * busy
        plate[0] += 4.0 * growth_per_s * plate[0]
        plate[1] += (plate[0] * power_w - plate[1]) * -np.expm1(-4.0 / 7.0)
        desk.tick({
            "gpu.power_w": power_w, "gpu.sm_active_pu": busy, "gpu.temp_c": 25.0 + plate[1],
            "rack.supply_temp_c": 25.0, "rack.flow_lpm": 115.0,
        }, 4.0)  # fmt: skip


@pytest.mark.long
def test_a_plate_that_fouls_slowly_drifts_and_no_other() -> None:
    desk = Desk(two_racks())
    n = desk.site.sizes["gpu"]
    plate, none = np.stack([np.linspace(0.024, 0.034, n), np.zeros(n)]), np.zeros(n)

    def found(name: str) -> Calibration:
        return {c.kind.name: c for c in calibrations(desk.estimator, "gpu")}[name]

    assert (found("gpu.resistance").state == NOTHING_LEARNED).all()
    plates(desk, 600, plate, none)
    assert (found("gpu.resistance").state == LEARNING).all()
    assert np.isnan(found("gpu.resistance").drift).all()
    plates(desk, 2400, plate, none)
    settled = found("gpu.resistance")
    assert (settled.state == LEARNED).all()
    assert settled.value == pytest.approx(plate[0], rel=0.03)
    assert not settled.drifted.any()
    grows = none.copy()
    grows[7] = 0.2 / 7200.0
    plates(desk, 7200, plate, grows)
    fouled = found("gpu.resistance")
    assert np.flatnonzero(fouled.drifted).tolist() == [7]
    assert 0.1 < fouled.drift[7] / fouled.reference[7] < 0.22
    assert "fouls" in fouled.meaning(7)
    assert fouled.since_ns[7] == settled.since_ns[7] < desk.now_ns - 7200 * NS


def fouled(pod: Pod, gpu: int, weeks: float) -> None:
    """As if the plate of a GPU had been better by a half for so long."""
    gpus = pod.live.engine.estimator.gpus
    gpus.temp.reference.value[0] = gpus.temp.set.in_use[1]
    gpus.temp.reference.sigma[0] = 0.0005
    gpus.temp.reference.value[0, gpu] /= 1.5
    gpus.temp.reference.settled_ns[:] = pod.live.engine.state.now_ns - round(weeks * 7 * 86_400 * NS)
    gpus.derive()


def text_of(tree: dict[str, Any], width: int = 160) -> str:
    out = io.StringIO()
    show(tree, Console(file=out, width=width))
    return out.getvalue()


def test_the_site_has_counts_and_its_largest_drifts_and_an_entity_all_it_learned(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for k in range(20):
            pod.tick({"gpu.power_w": 700.0, "gpu.temp_c": 45.0, "gpu.sm_active_pu": 0.6,
                      "rack.supply_temp_c": 25.0, "rack.flow_lpm": 90.0 + k % 2})  # fmt: skip
        _, site = await pod.ask("GET", "/api/v1/calibration")
        kinds = {k["table"]: k for k in site["kinds"]}
        assert kinds["gpu"] == {"table": "gpu", "of": 144, "learned": 0, "learning": 144, "unknown": 0,
                                "drifted": 0}  # fmt: skip
        assert kinds["cdu"]["unknown"] == 1
        assert (site["total"], site["drifts"]) == (0, [])
        assert "no learned parameter has drifted" in text_of(site)
        fouled(pod, 1, weeks=4.0)
        _, site = await pod.ask("GET", "/api/v1/calibration?prefix=lab/h/r1")
        assert [k["of"] for k in site["kinds"] if k["table"] in ("gpu", "rack")] == [72, 1]
        (drift,) = site["drifts"]
        assert (drift["name"], drift["parameter"]) == (GPU, "gpu.resistance")
        assert drift["drift_pu"] == pytest.approx(0.5, abs=1e-3)
        assert drift["per_week"] == pytest.approx(drift["drift"] / 4.0, rel=1e-3)
        assert drift["rate_over_s"] == pytest.approx(4 * 7 * 86_400)
        shown = text_of(site)
        assert "+50 %" in shown
        assert "+12 %" in shown or "+13 %" in shown, "a week"
        assert "fouls" in shown
        assert (await pod.ask("GET", "/api/v1/calibration?prefix=lab/h/r2"))[1]["drifts"] == []
        assert (await pod.ask("GET", "/api/v1/calibration?parameter=gpu.idle_w"))[1]["drifts"] == []
        status, entity = await pod.ask("GET", f"/api/v1/calibration/{GPU}")
        assert (status, entity["table"], entity["name"]) == (200, "gpu", GPU)
        found = {p["parameter"]: p for p in entity["parameters"]}
        assert set(found) == {k for k in PARAMETER_KINDS if k.startswith("gpu.")}
        assert found["gpu.resistance"]["nominal_from"] == "profile"
        assert found["gpu.resistance"]["band"] > 0.0
        assert found["gpu.exponent"]["state"] == "unknown"
        shown = text_of(entity)
        assert "thermal resistance" in shown
        assert "fouls" in shown
        for bad, words in (("calibration/lab/h/r1/node0/gpu9", "did you mean"),
                           ("calibration?parameter=gpu.resistence", "gpu.resistance"),
                           ("calibration?tabel=gpu", "expected prefix")):  # fmt: skip
            status, refusal = await pod.ask("GET", f"/api/v1/{bad}")
            assert status in (400, 404)
            assert words in refusal["error"]
        _, metrics = await pod.ask("GET", "/metrics?tables=none")
        assert 'racktwin_calibration_drifted{parameter="gpu.resistance"} 1.0' in metrics
        assert 'racktwin_calibration_entities{state="learning",table="gpu"}' in metrics

    serve(tmp_path, check)


def test_a_drift_is_a_share_where_it_can_be_and_else_in_its_unit() -> None:
    row = {"drift": 0.4, "drift_pu": 0.1, "unit": "W"}
    assert drift_text(row) == "+10 %"
    assert drift_text(row | {"drift_pu": None, "unit": "K"}) == "+0.4 K"
    assert drift_text(row | {"drift_pu": None, "drift": -0.03, "unit": "1"}) == "−0.03"
    assert drift_text(row | {"drift": None}) == "–"


def test_a_line_that_seldom_readings_bent_is_neither_learned_nor_drifted() -> None:
    """As in a demo whose past ticks each 10 s: offsets of 8 K, and resistances that fell by a sixth."""
    desk = Desk(two_racks())
    gpus = desk.estimator.gpus
    gpus.temp.fit.taught_s[:] = 5000.0
    gpus.temp.reference.value[0] = gpus.temp.resistance
    gpus.temp.reference.sigma[0] = 0.02 * gpus.temp.resistance
    gpus.temp.set.in_use[1] /= 1.2
    gpus.temp.set.in_use[0, ::2] = 8.0
    found = {c.kind.name: c for c in calibrations(desk.estimator, "gpu")}
    of = found["gpu.resistance"]
    assert (of.state[::2] == LEARNING).all()
    assert not of.drifted[::2].any()
    assert (np.abs(of.value - gpus.temp.resistance) < of.sigma * Z90)[::2].all(), "the truth is in its band"
    assert (found["gpu.offset_k"].sigma[::2] * Z90 > 8.0).all()
    assert (of.state[1::2] == LEARNED).all()
    assert of.drifted[1::2].all(), "without such an offset it is a drift"


def test_a_reference_of_an_older_snapshot_has_no_instant_and_its_drift_no_rate(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    fouled(pod, 1, weeks=4.0)
    engine = pod.live.engine
    kept = engine.estimator.dump()
    for part in (kept["board"], kept["gpus"]["temp"]["reference"], kept["gpus"]["power"]["reference"]):
        del part["settled_ns"]
    engine.estimator.gpus.temp.reference.settled_ns[:] = 0
    engine.estimator.restore(kept)
    (of,) = (c for c in calibrations(engine.estimator, "gpu") if c.kind.name == "gpu.resistance")
    assert np.isfinite(of.drift).all()
    row = shown_row(pod.live, of, 1)
    assert (row["since_ns"], row["per_week"], row["rate_over_s"]) == (None, None, None)
    assert row["drift_pu"] == pytest.approx(0.5, abs=1e-3)
