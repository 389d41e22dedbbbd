"""Fits of the model of load: done in a worker, recorded, applied by a replay that has no statistics."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import golden_story
from tests.support.golden_story import Kept, record
from twin.catalogue import unpack
from twin.telemetry import events as ev

pytestmark = [pytest.mark.slow, pytest.mark.long]
MODELS = {
    "load": {
        "signals": ["rack.power_w"],
        "horizons_s": [10, 20],
        "settings": {"experts": "last,ewma5,state_space,autoregression", "fit_every_s": 620},
    }
}
SECONDS = 700


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The story with a model of load that is fitted once, after its site has changed."""
    plain = golden_story.tree

    def tree(racks: list[str], **more: Any) -> dict[str, Any]:
        return {**plain(racks, **more), "models": MODELS}

    monkeypatch.setattr(golden_story, "tree", tree)


@pytest.mark.usefixtures("told")
def test_a_replay_applies_what_a_worker_fitted_without_any_statistics(
    tmp_path: Path, blocked_cli: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    kept = Kept()
    engine, outcome = record(tmp_path / "run", SECONDS, kept)
    events = [e for f in kept.frames for e in f.events if isinstance(e, ev.ModelFitted | ev.FitFailed)]
    assert engine.suspended == {}
    (fitted,) = events
    assert isinstance(fitted, ev.ModelFitted), fitted
    parameters = unpack(fitted.params)
    experts = {key.partition("/")[2].partition("/")[0] for key in parameters}
    assert experts == {"grid", "state_space", "autoregression"}
    assert engine.intake.params_hash == {"load": fitted.params_hash}
    assert {f.model for f in engine.forecasts.values()} != {"load@unfitted"}
    bases = {f.basis for f in engine.forecasts.values()}
    assert all(bases)
    done = blocked_cli("7", "trace", "replay", "--trace", tmp_path / "run", "--no-compare", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["state_checksum"] == engine.checksum()
    assert result["journal_head"] == outcome.journal_head
