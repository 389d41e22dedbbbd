"""Measured beside expected through the API and the terminal, and the line on what of a site is judged."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.in_process_daemon import Pod, serve
from twin.api.comparisons import judged_counts
from twin.cli.operate.show import show_comparisons, show_status
from twin.contracts import DEGRADED, FAILED, WATCH

GPU = "lab/h/r1/node0/gpu1"
LEARNED_S = 260  # three moves of a minute, then 30 readings


def at_work(pod: Pod, tick: int) -> None:
    busy = 0.4 + 0.2 * (tick // 40 % 2)
    pod.tick({
        "gpu.power_w": 300.0 + 800.0 * busy, "gpu.temp_c": 35.0 + 20.0 * busy, "gpu.sm_active_pu": busy,
        "rack.supply_temp_c": 25.0, "rack.flow_lpm": 90.0,
    })  # fmt: skip


def by_signal(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["signal"]: c for c in tree["comparisons"]}


@pytest.mark.long
def test_what_is_learned_is_told_from_what_is_not(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for tick in range(20):
            at_work(pod, tick)
        status, tree = await pod.ask("GET", f"/api/v1/comparisons/{GPU}")
        assert (status, tree["table"], tree["name"]) == (200, "gpu", GPU)
        power = by_signal(tree)["power_w"]
        assert (power["state"], power["band"]) == ("learning", None)
        assert 60.0 < power["left_s"] < 300.0
        assert by_signal(tree)["sm_clock_hz"]["state"] == "not read"
        _, summary = await pod.ask("GET", "/api/v1/summary")
        line = summary["judged"]
        assert line["learning"] > 0
        assert line["learned"] == 0
        assert line["text"].count("0 of 288 expected values learned, 144 still learning (") == 1
        assert "left)" in line["text"]
        assert line["text"].startswith("GPUs: 144 in service, 0 suspected; based on ")
        out = io.StringIO()
        show_status(summary, Console(file=out, width=300))
        assert line["text"] in out.getvalue()
        assert "144 healthy" not in out.getvalue(), "on so little that says too much"
        for tick in range(20, LEARNED_S):
            at_work(pod, tick)
        _, tree = await pod.ask("GET", f"/api/v1/comparisons/gpu:{GPU}")
        power = by_signal(tree)["power_w"]
        assert (power["state"], power["left_s"]) == ("learned", None)
        assert power["band"] > 0.0
        assert abs(power["measured"] - power["expected"] - power["residual"]) < 0.5
        assert power["from"] == "from its activity"
        done = judged_counts(pod.live, {})
        assert done is not None
        assert done["learned"] >= 144
        pod.live.engine.health.verdicts.level["gpu"][:3] = FAILED, DEGRADED, WATCH
        worse = judged_counts(pod.live, {})
        assert worse is not None
        assert worse["text"].startswith("GPUs: 143 in service, 2 suspected, 1 failed; based on ")
        _, entity = await pod.ask("GET", f"/api/v1/entities/gpu/{GPU}")
        assert entity["comparisons"] == tree["comparisons"]
        out = io.StringIO()
        show_comparisons(tree, Console(file=out, width=110))
        assert "from its activity" in out.getvalue()
        pod.tick({"rack.power_w": 100_000.0, "feeder.power_w": 101_000.0})
        status, tree = await pod.ask("GET", "/api/v1/comparisons/lab")
        assert (status, tree["table"]) == (200, "site")
        (balance,) = tree["comparisons"]
        assert (balance["measured"], balance["expected"], balance["residual"]) == (202_000, 200_000, 2000)
        assert (balance["state"], balance["from"]) == ("learning", "from the loads of a+b")
        status, refusal = await pod.ask("GET", "/api/v1/comparisons/lab/h/r1/node0/gpu9")
        assert status == 404
        assert "did you mean" in refusal["error"]

    serve(tmp_path, check)
