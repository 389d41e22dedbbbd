"""Load now: what the site and each feeder draw, beside what outside demands let them draw.

The site is its racks together: the meter of each, or what its GPUs draw where that is silent. A rack of which
nothing was ever heard is counted as unheard, so that nobody takes a part for the whole. May import the core
and policies; changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.power_budgets import carried_by, dead_feeders, gain_of, pairs_of
from policies.power_loads import loads_of
from twin.engine import Engine
from twin.frame import F64, I64
from twin.load_targets import LoadTarget
from twin.state import GOOD
from twin.view import EngineView


class LoadNow(NamedTuple):
    """What the site draws (W, NaN where nothing was ever heard), how many of its racks are unheard, what each
    feeder draws (W, NaN unknown) and whether that was read and not only feared [n_feeder]."""

    site_w: float
    unheard_racks: int
    feeder_w: F64
    metered: np.ndarray


def view_of(engine: Engine) -> EngineView:
    """The state as policies see it, load targets and budgets included."""
    return EngineView(
        engine.site, engine.state, engine.jobs, engine.arbiter, engine.estimator, engine.history, (),
        engine.forecasts, engine.intake.budget_w(engine.site, engine.state.now_ns), 1.0,
        lambda _: np.zeros(0, np.int32), engine.windows, engine.diagnosis.faults,
        lambda quantity, at_ns: engine.intake.outlooks.at(quantity, at_ns, engine.site),
        engine.health, engine.book, engine.intake.load_targets.held(engine.site),
    )  # fmt: skip


def load_now(view: EngineView) -> LoadNow:
    """Loads of all places, as bad as they may be where a meter has fallen silent."""
    site = view.site
    loads = loads_of(view, carried_by(view, pairs_of(site, dead_feeders(view), failover=False)))
    heard = view.quality("rack.power_w") == GOOD
    read_w = np.where(heard, view.value("rack.power_w"), view.worst("rack.power_w")).astype(np.float64)
    # A NaN of one GPU must not hide what the others of its rack draw
    gpus_w = site.sum_by_rack("gpu", np.nan_to_num(view.worst("gpu.power_w").astype(np.float64)))
    rack_w = np.where(np.isfinite(read_w), read_w, gpus_w * gain_of(site))
    unheard = ~np.isfinite(read_w) & (gpus_w <= 0)
    known = bool((~unheard).any())
    return LoadNow(float(rack_w.sum()) if known else np.nan, int(unheard.sum()), loads.load_w, loads.metered)


def places_of(target: LoadTarget, load: LoadNow) -> tuple[I64, F64]:
    """(feeder of each place that a target holds, -1 = the site; its load in W), the highest load first."""
    if target.feeders is None:
        return np.array([-1], np.int64), np.array([load.site_w])
    order = np.argsort(-np.nan_to_num(load.feeder_w[target.feeders], nan=np.inf), kind="stable")
    index = target.feeders[order].astype(np.int64)
    return index, load.feeder_w[index]
