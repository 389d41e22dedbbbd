"""Metrics of power: headroom of feeders and of the site, capped GPUs, what caps cost, load targets kept.

Label sets are bounded; no name from outside is a label. Part of the shell.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twin.app.live import Live
from twin.app.load_now import load_now, places_of
from twin.app.power_headroom import capped_words, ground_of, limits_at
from twin.app.power_worth import CLASS_NAMES, NAMES

MAX_PLACES = 1000


def power_series(live: Live) -> Iterator[Metric]:
    """One metric after the other; none on a site without racks."""
    engine = live.engine
    if not engine.site.sizes["rack"]:
        return
    ground = ground_of(engine)
    limits, loads = limits_at(live, ground, engine.state.now_ns), ground.loads
    left = GaugeMetricFamily("racktwin_power_headroom_watts", "budget less load; case: as fed now, or with "
                             "the other side lost", labels=["kind", "name", "case"])  # fmt: skip
    kinds = np.array(loads.kind)
    known = np.flatnonzero(np.isfinite(limits.budget_w) & np.isfinite(loads.now_w) & (kinds != "rack"))
    for place in known[:MAX_PLACES].tolist():
        name, kind = ground.now.name(engine.site, place), loads.kind[place]
        left.add_metric([kind, name, "now"], float(limits.budget_w[place] - loads.now_w[place]))
        if kind == "feeder":
            left.add_metric([kind, name, "lost"], float(limits.budget_w[place] - loads.lost_w[place]))
    yield left
    yield GaugeMetricFamily("racktwin_power_headroom_left_out", "places beyond the bound",
                            max(0, len(known) - MAX_PLACES))  # fmt: skip
    told = capped_words(live)
    capped = GaugeMetricFamily("racktwin_power_capped_gpus", "GPUs held below their most", labels=["policy"])
    for policy, count in told["by_policy"].items():
        capped.add_metric([policy], count)
    yield capped
    yield GaugeMetricFamily("racktwin_power_advised_gpus", "GPUs that would be, were their policy let",
                            told["advised_gpus"])  # fmt: skip
    yield from _costs(live)
    yield from _targets(live)


def _costs(live: Live) -> Iterator[Metric]:
    """Since the account began; the net saving may fall, so that it is a gauge."""
    if live.power is None:
        return
    lost = CounterMetricFamily("racktwin_power_lost_gpu_hours", "work lost to caps", labels=["class", "case"])
    saved = CounterMetricFamily("racktwin_power_saved_kwh", "energy not drawn under caps", labels=["class"])
    net = GaugeMetricFamily("racktwin_power_net_kwh", "the same less what the lost work will take",
                            labels=["class"])  # fmt: skip
    for name in CLASS_NAMES:
        row = dict(zip(NAMES, live.power.totals.get(f"class/{name}", [0.0] * len(NAMES)), strict=True))
        lost.add_metric([name, "expected"], row["lost_gpu_s"] / 3600)
        lost.add_metric([name, "most"], row["lost_most_gpu_s"] / 3600)
        saved.add_metric([name], max(0.0, row["saved_ws"]) / 3.6e6)
        net.add_metric([name], row["net_ws"] / 3.6e6)
    yield lost
    yield saved
    yield net


def _targets(live: Live) -> Iterator[Metric]:
    """How many load targets are kept, and by how much the worst is exceeded."""
    engine = live.engine
    held = engine.intake.load_targets.held(engine.site)
    counts, worst_w = dict.fromkeys(("kept", "exceeded", "unknown", "to_come"), 0), 0.0
    load = load_now(ground_of(engine).view) if held else None
    for target in held:
        if load is None or not target.runs(engine.state.now_ns):
            counts["to_come"] += 1
            continue
        _, load_w = places_of(target, load)
        over_w = load_w - target.limit_w
        partly = target.feeders is None and load.unheard_racks > 0
        if (over_w > 0).any():
            counts["exceeded"] += 1
            worst_w = max(worst_w, float(np.nanmax(over_w)))
        elif partly or not np.isfinite(load_w).all():
            counts["unknown"] += 1
        else:
            counts["kept"] += 1
    targets = GaugeMetricFamily("racktwin_power_targets", "load targets", labels=["state"])
    for state, count in counts.items():
        targets.add_metric([state], count)
    yield targets
    yield GaugeMetricFamily("racktwin_power_target_excess_watts", "the most that any is exceeded by", worst_w)
