"""Forecasts of a real daemon between a broker and agents: told, fitted, and kept over a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_pod import pod
from tests.support.builders import two_racks
from tests.support.daemon_process import RunningDaemon, running
from tests.support.mosquitto import mosquitto

pytestmark = [pytest.mark.slow, pytest.mark.long]
KEY = "gpu.power_w"
# The first fit is asked for 10 s after the first forecast, and due 30 s later.
MODELS = {
    "load": {
        "signals": [KEY],
        "horizons_s": [10, 20],
        "settings": {"experts": "last,ewma5,linear", "fit_every_s": 10, "zone": "Europe/Berlin"},
    }
}


def told(daemon: RunningDaemon) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = daemon.get(f"/api/v1/forecasts?signal={KEY}")["forecasts"]
    return [row for row in rows if row["basis"]]


def fitted(daemon: RunningDaemon) -> list[dict[str, Any]]:
    return [row for row in told(daemon) if row["model"] != "load@unfitted"]


def events(daemon: RunningDaemon) -> list[str]:
    return [line["body"]["event"]["type"] for line in daemon.journal("event")]


def test_forecasts_are_told_fitted_and_kept_over_a_restart(
    server: Callable[..., Path], tmp_path: Path
) -> None:
    site = two_racks(racks="r1", models=MODELS)
    with (
        mosquitto(server, tmp_path) as broker,
        running(tmp_path / "twin", broker.port, site=site) as daemon,
        pod(broker.port, racks=1, state=tmp_path / "agent"),
    ):
        rows = daemon.until(lambda: told(daemon), what="a forecast with a basis")
        assert {row["horizon_s"] for row in rows} == {10.0, 20.0}
        assert {row["model"] for row in rows} == {"load@unfitted"}
        for row in rows:
            assert len(row["mean"]) == len(row["names"]) == 72
            assert all(0.0 < mean < 2000.0 for mean in row["mean"])
        rows = daemon.until(lambda: fitted(daemon), what="a fit that is in use")
        assert all(row["model"].startswith("load@") for row in rows)
        model = rows[0]["model"]
        daemon.until(lambda: "ModelFitted" in events(daemon), what="the fit's line in the journal")
        assert "FitFailed" not in events(daemon)
        daemon.kill()
        daemon.start()
        # From its snapshot and what came after it, before anything new is heard.
        again = fitted(daemon)
        assert [row["model"] for row in again] == [model] * 2
        assert all(row["basis"] and all(mean > 0.0 for mean in row["mean"]) for row in again)
        assert daemon.get("/api/v1/summary")["ready"]
        alarms = daemon.get("/api/v1/alarms")["alarms"]
        assert not [a for a in alarms if a["id"].startswith("suspended/")]
