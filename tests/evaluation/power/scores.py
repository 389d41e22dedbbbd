"""Worth of power capping on the two test sites, beside nobody acting and three rivals. Simulated.

All arms live through the same demand; differences are paired by seed. What counts as work lost is measured
against the same seed without caps. A run whose demand is beyond no limit for 5 % of the time shows nothing,
and no goal of work is judged by it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.evaluation.power.arms import Ours
from tests.evaluation.power.demand import DAY_H, Demand, draw
from tests.evaluation.power.plant import MINUTE_S
from tests.evaluation.power.site import PowerSite, power_site
from tests.evaluation.power.troubles import drawn, metered
from tests.evaluation.power.week import ARMS, SETTLE_S, Week, arm_of, worst_loss
from tests.evaluation.replacement.scores import paired
from twin.catalogue import F64
from twin.run import Pool, Report, no_report

FIRST_SEED = 100  # 1 to 5 were for development
OURS = "racktwin"
COUNTS_PU = 0.05  # of the time that the demand has to be beyond a limit, or a run shows nothing
HIGH_PU, LOW_PU = 0.01, 0.05  # that work of high and of low priority may lose. source: the project's goals
# An hour at both rates agrees within these: work lost, energy, and nothing late. source: estimate
AGREE_WORK_PU, AGREE_ENERGY_PU = 0.005, 0.01
WARM_MIN = 15  # before that hour: peaks are forgotten with this time constant
# (key, title); all are better when less
FIGURES = (
    ("trips", "breakers that opened"), ("late_s", "s above a budget, after 3 s"),
    ("over_s", "s above a budget"), ("worst_over_pu", "worst overshoot"),
    ("exposed_s", "s a lost feed would overload"),
    ("after_loss_s", "s until a loss is overcome"),
    ("lost_high_pu", "work lost, high priority"), ("lost_low_pu", "work lost, low priority"),
    ("lost_pu", "work lost, all"), ("binds_pu", "time a cap binds"),
    ("held_w", "held back, mean W"),
    ("needed_pu", "time demand is beyond limits"), ("dark_h", "hours with dark racks"),
    ("energy_mwh", "energy, MWh"), ("cpu_s", "processor seconds"),
)  # fmt: skip
PAIRED = ("lost_high_pu", "lost_low_pu", "lost_pu", "exposed_s", "late_s", "energy_mwh")


@dataclass(frozen=True)
class CapWeek:
    """One arm on one site and seed, for so many hours of a demand [hours] times `scale`."""

    site: str
    arm: str
    seed: int
    hours: int
    scale: float
    running_pu: tuple[float, ...]
    troubles: bool = False  # beside the loss of a feed


def live(task: CapWeek) -> dict[str, Any]:
    """The figures of one run, and what it took."""
    begun = time.process_time()
    site, demand = _drawn(task)
    loss = worst_loss(site, demand)
    troubles = None
    if task.troubles:
        site, troubles = metered(site), drawn(site, demand, task.seed, loss)
    week = Week(site, demand, arm_of(task.arm, site), loss, troubles=troubles)
    return week.run() | {"seed": task.seed, "cpu_s": time.process_time() - begun}


def _live(task: CapWeek, _: Report) -> dict[str, Any]:
    return live(task)


def _drawn(task: CapWeek) -> tuple[PowerSite, Demand]:
    site = power_site(task.site)
    return site, draw(site, np.array(task.running_pu), task.seed, task.hours, task.scale)


def agreement(task: CapWeek, minutes: int = 60, warm: int = WARM_MIN) -> dict[str, Any]:
    """The worst hour of a run of our arm, asked each second throughout, and as in all runs.

    Both begin cold, `warm` minutes before; what is lost in these is not counted. `late_s` is of all of it.
    """
    site, demand = _drawn(task)
    loss = worst_loss(site, demand)
    busiest = int(demand.level.sum(axis=1).argmax()) if loss is None else loss.begin_s // MINUTE_S
    first = max(min(busiest - minutes // 2, demand.minutes - minutes) - warm, 0)
    part = demand.part(first, min(first + warm + minutes, demand.minutes))
    if loss is not None:
        at = MINUTE_S * first
        loss = loss._replace(begin_s=loss.begin_s - at, end_s=loss.end_s - at)
    mixed, fine = (
        _warm(Week(site, part, Ours(site), loss, every_second=every), warm) for every in (False, True)
    )
    off_work = max(abs(mixed[k] - fine[k]) for k in ("lost_high_pu", "lost_low_pu"))
    off_energy = abs(mixed["energy_mwh"] / fine["energy_mwh"] - 1.0)
    same_late = mixed["late_s"] == fine["late_s"] and mixed["trips"] == fine["trips"]
    return {
        "minutes": minutes, "warm_minutes": warm, "work_pu": off_work, "energy_pu": off_energy,
        "mixed": mixed, "each_second": fine,
        "agrees": off_work <= AGREE_WORK_PU and off_energy <= AGREE_ENERGY_PU and same_late,
    }  # fmt: skip


def _warm(week: Week, warm: int) -> dict[str, Any]:
    """The figures of a whole run, but for work lost and energy: these from so many minutes on."""
    plant, high = week.plant, week.site.high
    warm = min(warm, week.demand.minutes - 1)
    for minute in range(warm):
        week.step_minute(minute)
    work, free, energy_j = plant.work.copy(), plant.free_work.copy(), plant.energy_j
    for minute in range(warm, week.demand.minutes):
        week.step_minute(minute)
    work, free = plant.work - work, plant.free_work - free
    lost = {
        f"lost_{name}_pu": 1.0 - float(work[nodes].sum()) / max(float(free[nodes].sum()), 1e-9)
        for name, nodes in (("high", high), ("low", ~high))
    }
    return week.figures() | lost | {"energy_mwh": (plant.energy_j - energy_j) / 3.6e9}


def suite(
    sites: Sequence[str], running_pu: F64, seeds: Sequence[int], arms: Sequence[str] = ARMS,
    days: float = 7.0, jobs: int = 1, scale: float = 1.0, progress: Report = no_report,
    agree: bool = True, troubles: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Every arm on every site and seed, the same whatever `jobs` is; `simulated` is true. With `troubles`
    they live in those of `power_troubles`, and no hour is lived at both rates."""
    hours, told = max(1, round(days * DAY_H)), tuple(running_pu.tolist())
    tasks = [
        CapWeek(site, arm, seed, hours, scale, told, troubles)
        for site in sites for seed in seeds for arm in arms
    ]  # fmt: skip
    rows = Pool(_live, jobs, progress).results(tasks)
    parts, each = [], len(seeds) * len(arms)
    for i, name in enumerate(sites):
        some, site = rows[i * each : (i + 1) * each], power_site(name)
        part = {
            "simulated": True, "site": name, "nodes": site.nodes, "gpus": site.gpus,
            "racks": site.site.sizes["rack"], "days": days, "scale": scale, "seeds": list(seeds),
            "arms": compared(some), "rows": some,
        }  # fmt: skip
        if troubles:
            part["troubles"] = _troubles(some)
        if agree and not troubles and OURS in arms:
            part["agreement"] = agreement(CapWeek(name, OURS, seeds[0], hours, scale, told))
        parts.append(part)
    progress(1.0)
    return {"simulated": True, "suite": "week", "sites": parts, "goals": goals(parts)}


def _troubles(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count the troubles of each kind, all seeds; arms lived through the same."""
    out: Counter[str] = Counter()
    for row in rows:
        if row["arm"] == rows[0]["arm"]:
            out.update(row["troubles"])
    return dict(out)


def counts(row: dict[str, Any]) -> bool:
    """Return True if a run shows anything: its demand was beyond a limit for long enough.

    Caps that bind without need do not make it count.
    """
    return bool(row["needed_pu"] >= COUNTS_PU)


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means by arm over all seeds and over those that count, and by how much ours is less, paired by seed."""
    out: list[dict[str, Any]] = []
    by = {name: sorted((r for r in rows if r["arm"] == name), key=lambda r: r["seed"]) for name in ARMS}
    ours = by.get(OURS, [])
    for name, found in by.items():
        if not found:
            continue
        told: dict[str, Any] = {"arm": name, "runs": len(found), "runs_that_count": sum(map(counts, found))}
        for key, _ in FIGURES:
            values = [float(r[key]) for r in found if r[key] is not None]
            told[key] = float(np.mean(values)) if values else math.nan
            told[f"{key}_most"] = float(np.max(values)) if values else math.nan
        if ours and name != OURS:
            for key in PAIRED:
                theirs, mine = (np.array([r[key] for r in x], np.float64) for x in (found, ours))
                told[f"{key}_more_than_ours"] = paired(theirs - mine)
        out.append(told)
    return out


def goals(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals of the project; `met` is None where no run counts. In troubles no breaker may open; what is
    late or lost in them is a figure, and no goal."""
    out: list[dict[str, Any]] = []
    for part in parts:
        rows = [r for r in part["rows"] if r["arm"] == OURS]
        some = [r for r in rows if counts(r)]
        if rows:
            for what, value, bound, met in _of_site(rows, some):
                if "troubles" in part and "breakers" not in what:
                    continue
                told = {"goal": f"site {part['site']}: {what}", "value": value, "bound": bound}
                out.append(told | {"met": met if some or "troubles" in part else None})
        if "agreement" in part:
            both = part["agreement"]
            out.append({
                "goal": f"site {part['site']}: an hour at both rates, difference of work lost",
                "value": both["work_pu"], "met": both["agrees"],
                "bound": f"<= {AGREE_WORK_PU:g}, energy within {AGREE_ENERGY_PU:.0%}, as many seconds late",
            })  # fmt: skip
    return out


def _of_site(
    rows: Sequence[dict[str, Any]], some: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, float, str, bool]]:
    """(goal, value, bound, whether met) of our runs on a site; `some` are those that count."""
    trips, late = sum(r["trips"] for r in rows), sum(r["late_s"] for r in rows)
    yield "breakers that opened, all runs", trips, "= 0", trips == 0
    yield f"seconds above a budget after {SETTLE_S} s, all runs", late, "= 0", late == 0
    for key, most, what in (("lost_high_pu", HIGH_PU, "high"), ("lost_low_pu", LOW_PU, "low")):
        mean = float(np.mean([r[key] for r in some])) if some else math.nan
        yield f"work lost, {what} priority, mean of runs that count", mean, f"<= {most:g}", mean <= most
    lost = [r["after_loss_s"] for r in rows if r["after_loss_s"] is not None]
    if lost:
        worst = max(lost)
        yield (
            "seconds above the limit after a feed was lost, worst",
            worst,
            f"<= {SETTLE_S}",
            worst <= SETTLE_S,
        )
