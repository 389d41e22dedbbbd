"""Demand live: recorded days of Helios come as listings of Slurm, and are forecast as the backtest does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from connectors.demand import DemandBook
from connectors.slurm.demand import SlurmGpus
from connectors.slurm.jobs import parse_listing
from connectors.slurm.nodes import parse_nodes
from models.backtest.load import BacktestTerms, backtest, published_band
from models.load import FORECASTERS, KNOWN, Load, SeriesPanel
from tests.support.builders import Twin
from twin.catalogue import F64, I64, NS
from twin.tables import read_series
from twin.telemetry import Reading

DEMAND, GPUS_PER_NODE = "site.gpu_demand_count", 8
# All are scored, from the first minute on. 7: a week takes minutes
DAYS = int(os.environ.get("RACKTWIN_HELIOS_DAYS", "2"))
ROWS, HORIZONS = DAYS * 1440, (5, 60)  # minutes
BAND = (0.05, 0.5, 0.95)  # what a forecast tells
EXPERTS = ("last", "ewma5", "ewma60", "seasonal_day")  # none of them is fitted


def listing(running: int, pending: int, rng: np.random.Generator) -> str:
    """Output of `squeue` where jobs of any size hold and ask for so many GPUs."""
    lines: list[str] = []
    for state, left in (("RUNNING", running), ("PENDING", pending)):
        while left > 0:
            gpus = min(left, int(rng.integers(1, 33)))
            left -= gpus
            host, reason = ("n1", "None") if state == "RUNNING" else ("", "Resources")
            lines.append(
                f"{state}|{len(lines) + 1}|N/A|1-00:00:00|1|phys|ada|train|{host}|1|1|*|cpu=1|gres:gpu:{gpus}"
                f"|N/A|N/A|N/A|N/A|1588291200|1588291200|OK|normal|{reason}|\n"
            )
    return "".join(lines)


def fed(twin: Twin, book: DemandBook, running: int, pending: int, rng: np.random.Generator) -> None:
    """A minute: Slurm is asked, what it says is read, and the engine ticks."""
    jobs, bad = parse_listing(listing(running, pending, rng))
    assert not bad
    inventory = SlurmGpus(parse_nodes("n1|mixed|train|gpu:8|gpu:8|none|\n"), lambda host: GPUS_PER_NODE)
    now_ns = twin.now_ns + 60 * NS
    claims, stock = inventory.claims(jobs), inventory.stock(lambda host: False)
    for reading in book.take("slurm", claims, stock, inventory.partitions, now_ns, 120.0):
        assert isinstance(reading, Reading)
        twin.inbox.put(reading, now_ns)
    twin.tick(dt_s=60.0)


def scores(said: F64, values: F64, origins: I64, horizon: int) -> tuple[float, float]:
    """(mean absolute error of the median, pinball loss of the band)."""
    truth = values[origins + horizon]
    known = np.isfinite(truth) & np.isfinite(said).all(axis=1)
    assert known.mean() > 1.0 - 0.5 / DAYS  # none before nine spans of an hour
    error = truth[known, None] - said[known]
    levels = np.array(BAND)
    loss = np.maximum(levels * error, (levels - 1.0) * error)
    return float(np.abs(error[:, 1]).mean()), float(loss.mean())


@pytest.mark.evaluation
def test_days_of_helios_are_forecast_as_the_backtest_does(recording: Callable[[str], Path]) -> None:
    files = sorted(recording("gpu-demand-helios-earth").glob("*/cluster_sequence_vc.csv.xz"))
    read = read_series(files, "time", ["running_gpu_num", "pending_gpu_num"]).panel
    running, pending = (read.values[:ROWS, k::2].sum(axis=1) for k in (0, 1))
    values = running + pending
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 100

    seconds = tuple(60.0 * h for h in HORIZONS)
    model = Load((DEMAND,), seconds, experts=",".join(EXPERTS))
    twin = Twin({"site": "helios", "periods_s": {"site": 60}}, models=[model])
    twin.now_ns = read.start_ns
    book, rng = DemandBook(twin.site, ["slurm"]), np.random.default_rng(24)
    live = {h: np.full((ROWS, 3), np.nan) for h in HORIZONS}
    for row in range(ROWS):
        fed(twin, book, int(running[row]), int(pending[row]), rng)
        for h in HORIZONS:
            found = twin.engine.forecasts.get((DEMAND, 60.0 * h))
            if found is not None:
                live[h][row] = found.lo[0], found.mean[0], found.hi[0]

    unknown = {key: np.full(ROWS, np.nan) for key in KNOWN}
    panel = SeriesPanel(read.start_ns, 60.0, values[:, None], known=unknown)
    kinds = {name: FORECASTERS[name] for name in EXPERTS}
    result = backtest(panel, HORIZONS, kinds, BacktestTerms(start=0.0, checks_fits=False))
    for place, course in enumerate(result.courses):
        h = course.horizon
        scored = course.origins + h < ROWS
        origins = course.origins[scored]
        told = published_band(result, place)[scored, 0]
        np.testing.assert_allclose(live[h][origins], told, rtol=1e-5)  # gaps where the other has gaps
        ours = scores(live[h][origins], values, origins, h)
        theirs = scores(told, values, origins, h)
        print(f"{h} min: live {ours}, backtest {theirs}")
        assert ours == pytest.approx(theirs, rel=0.02)
        assert min(theirs) > 0.0
