"""Lives of parts in a simulated site: how often the interval of the time left holds the truth.

    python -m tests.support.wear_lives SEED COUNT [--healthy] [--days 40]

Eight CDUs with a rack each. Filter, exchanger and pumps of each wear with hidden lives of 40 to 250 days and
a power of time of 0.7 to 1.4, and so do eight cold plates. Plant, sensors, Inbox, estimator and trends run as
in the daemon, without policies. 24 days of wear pass in a simulated day, and with them the points of the
trends and the least time of one. That is exact for parameters of CDUs, which are learned within minutes;
those of GPUs lag by hours, which count as days here. Work and weather keep their own time, so that their
swings last longer against the wear than they do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.support.builders import START_NS, site_of
from twin.catalogue import I64, NS, Bool, find_signal
from twin.estimation import Estimator
from twin.health import wear
from twin.plant import Plant, Scenario, Script, Sensors
from twin.plant.faults import BOTH, LIVES
from twin.plant.weather import Weather
from twin.simulation.closed_loop import ReportInbox
from twin.site import Site
from twin.telemetry import State

PACE, STEP_S, CDUS, PLATES, EVERY_D, DAY_S = 24.0, 20.0, 8, 8, 5.0, 86_400.0
LEARNED = {"filter_blocked": "cdu.filter", "exchanger_fouled": "cdu.ua", "pump_worn": "cdu.pump_head",
           "plate_degraded": "gpu.resistance"}  # fmt: skip
MOST = 1.3  # of what is worn out


class Answer(NamedTuple):
    """The time left of a part as it is [days], and as it was told; NaN: not told."""

    what: str
    part: tuple[int, int]  # seed and entity
    true_d: float
    mid_d: float
    lo_d: float
    hi_d: float


class Moment:
    """Look of `Wear`: the state, the estimator, and nobody at work."""

    def __init__(self, site: Site) -> None:
        self.site, self.state, self.estimator = site, State(site.sizes), Estimator(site)

    @property
    def now_ns(self) -> int:
        return self.state.now_ns

    def fresh(self, key: str) -> Bool:
        signal = find_signal(key)
        assert signal is not None
        return self.state.tables[signal.table].current(signal, self.now_ns)

    def total(self, key: str) -> I64:
        signal = find_signal(key)
        assert signal is not None
        return np.asarray(self.state.tables[signal.table].total[signal.row])

    def under_work(self, table: str) -> None:
        return None


def small_site() -> Site:
    racks = [{"name": f"r{k}", "profile": "gb200-nvl72", "nodes": 2, "gpus_per_node": 4}
             for k in range(1, CDUS + 1)]  # fmt: skip
    cdus = [{"name": f"cdu{k}", "serves": [f"r{k}"]} for k in range(1, CDUS + 1)]
    feeders = [{"name": "a", "budget_w": 3_000_000, "serves": [f"r[1-{CDUS}]"]}]
    return site_of(
        {"site": "lab", "halls": [{"name": "h", "racks": racks, "cdus": cdus, "feeders": feeders}]}
    )


def lives(site: Site, seed: int) -> list[tuple[Script, float]]:
    """Scripts, with their lives in days."""
    rng = np.random.default_rng([seed, 99])
    at = [(kind, c) for c in range(CDUS) for kind in ("filter_blocked", "exchanger_fouled", "pump_worn")]
    out, plates = [], []
    for kind, entity in [*at, *(("plate_degraded", -1) for _ in range(PLATES))]:
        if kind == "plate_degraded" and not plates:
            plates = rng.choice(site.sizes["gpu"], PLATES, replace=False).tolist()
        entity = plates[len(out) - len(at)] if entity < 0 else entity
        life_d = float(np.exp(rng.uniform(np.log(40), np.log(250))))
        shape = float(rng.uniform(0.7, 1.4))
        ramp_s = life_d * MOST ** (1.0 / shape) * DAY_S / PACE
        part = BOTH if kind == "pump_worn" else 0
        severity = LIVES[kind].worn * MOST
        script = Script(kind, LIVES[kind].table, entity, 0.0, None, severity, ramp_s, part=part, shape=shape)
        out.append((script, life_d))
    return out


def answers(seed: int, days: float, healthy: bool) -> Iterator[Answer]:
    """Every five days what is told of each part that wears; of a healthy site whatever is told."""
    site = small_site()
    worn = [] if healthy else lives(site, seed)
    scenario = Scenario("worn", seed, faults=tuple(s for s, _ in worn), weather=Weather(seed=seed))
    plant, sensors = Plant(site, seed, scenario), Sensors(site, seed)
    plant.step_max_s, plant.start_ns = 5.0, START_NS
    now, inbox, trends, now_ns, due_d = (
        Moment(site),
        ReportInbox(site.sizes),
        wear.Wear(site),
        START_NS,
        EVERY_D,
    )
    for tick in range(round(days * DAY_S / PACE / STEP_S)):
        plant.step((), STEP_S)
        now_ns += round(STEP_S * NS)
        plant.acks()
        for report in sensors.observe(plant.truth, plant.present, now_ns, tuple(plant.events())).reports:
            inbox.put_report(report, min(report.arrival_ns, now_ns))
        now.state.now_ns = now_ns
        now.state.apply(inbox.take(tick, now_ns, STEP_S))
        now.estimator.update(now.state, STEP_S)
        trends.update(now)  # type: ignore[arg-type]
        day = (tick + 1) * STEP_S / DAY_S * PACE
        if day >= due_d:
            due_d += EVERY_D
            yield from _told(trends, worn, seed, day)


def _told(trends: wear.Wear, worn: list[tuple[Script, float]], seed: int, day: float) -> Iterator[Answer]:
    found = {r.what: r for r in trends.remaining()}
    asked = {(LEARNED[s.kind], s.entity): life_d - day for s, life_d in worn}
    for what, left in found.items():
        for entity in np.flatnonzero(np.isfinite(left.mid_s)).tolist():
            asked.setdefault((what, entity), np.nan)
    for (what, entity), true_d in asked.items():
        told: Any = found.get(what)
        mid, lo, hi = (np.nan,) * 3 if told is None else (
            float(v[entity]) / DAY_S * PACE for v in (told.mid_s, told.lo_s, told.hi_s))  # fmt: skip
        yield Answer(what, (seed, entity), true_d, mid, lo, hi)


def show(found: list[Answer]) -> None:
    """Coverage and error by parameter, while the part is not yet worn out."""
    for what in LEARNED.values():
        told = [a for a in found if a.what == what and np.isfinite(a.mid_d)]
        false = sum(np.isnan(a.true_d) for a in told)
        open_ = [a for a in told if a.true_d > 0.0]
        if not open_:
            print(f"{what}: nothing told of parts that wear; {false} of parts that do not")
            continue
        true, mid, lo, hi = np.array([a[2:] for a in open_]).T
        held = (lo <= true) & (true <= hi)
        print(
            f"{what}: {len(open_)} answers on {len({a.part for a in open_})} parts, {held.mean():.0%} of the "
            f"intervals hold (too late {np.mean(true < lo):.0%}, too soon {np.mean(true > hi):.0%}), error "
            f"of the middle {np.median(np.abs(mid / true - 1)):.0%}, high over low {np.median(hi / lo):.1f}; "
            f"{false} told of parts that do not wear"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--days", type=float, default=40.0)
    parser.add_argument("--healthy", action="store_true")
    asked = parser.parse_args()
    for name in ("POINT_S", "LEAST_SPAN_S", "LONGEST_S"):
        setattr(wear, name, getattr(wear, name) / PACE)
    found: list[Answer] = []
    for seed in range(asked.first, asked.first + asked.count):
        found += answers(seed, asked.days, asked.healthy)
        show(found)


if __name__ == "__main__":
    main()
