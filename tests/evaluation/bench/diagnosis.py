"""The campaign of the diagnosis: faults on simulated sites, and scores.

Plants of several sites and seeds are warmed up, then forked once for each drawn fault, or pair of faults; the
twin runs until its diagnosis has told them, or the time for their kind is over. Healthy plants run on to
count false alarms. `--shares` runs single faults of given sizes instead: how small a fault is found how soon.
Development uses seeds below 1000 and the ranges "develop"; figures to report come from others.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tests.evaluation.bench.diagnosis_scores import power_table_of, summary_of, table_of, written
from tests.evaluation.bench.fault_draws import DEVELOP, HELD_OUT, SIZED, draw, draw_pair, kinds_of
from twin.config import spec_of
from twin.contracts import Fault
from twin.diagnosis import Diagnosis, good
from twin.engine import Engine
from twin.plant import Campaign, Script, scenario_of
from twin.run import Pool, Report
from twin.simulation import Simulation
from twin.site import Site, build_site

WARM_S = 1500
DRAWS = 50  # until sensor faults are of sensors that there are
SETTLE_S = 30.0  # after the last expected fault was named, for what is told beside it
TIMEOUT_S = 300.0
SLOW_S = {"exchanger_fouled": 1500.0, "pump_worn": 900.0, "plate_degraded": 900.0, "heat_wave": 1500.0,
          "cooler_failed": 1200.0, "leak": 1200.0, "xid_burst": 900.0, "ecc_growth": 600.0,
          "valve_stuck": 900.0,
          "sensor_frozen": 900.0, "sensor_biased": 600.0, "sensor_spiking": 600.0, "tray_blocked": 600.0,
          "filter_blocked": 900.0, "branch_blocked": 600.0}  # fmt: skip
FIRST_SEED = {"develop": 100, "held_out": 5000}
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def liquid_site() -> dict[str, Any]:
    """Four racks of 72 GPUs on two CDUs, two loops, feeds A and B with a PDU per side and pair of racks."""
    racks = "r[1-4]"
    return {
        "site": "lab",
        "loops": [{"name": "fws[1-2]", "cooling": "dry_cooler"}],
        "halls": [{
            "name": "h",
            "racks": [{"name": racks, "profile": "gb200-nvl72"}],
            "cdus": [
                {"name": "cdu1", "serves": ["r1", "r2"], "loop": "fws1"},
                {"name": "cdu2", "serves": ["r3", "r4"], "loop": "fws2"},
            ],
            "feeders": [
                {"name": "a", "side": "A", "budget_w": 700_000, "serves": [racks]},
                {"name": "b", "side": "B", "budget_w": 700_000, "serves": [racks]},
            ],
            "planes": [{"name": "compute", "links_per_node": 4}],
        }],
    }  # fmt: skip


def air_site() -> dict[str, Any]:
    """Two racks of four air-cooled nodes with eight GPUs each, and two feeds."""
    racks = "r[1-2]"
    return {
        "site": "lab",
        "halls": [{
            "name": "h",
            "racks": [{"name": racks, "profile": "hgx-h100", "nodes": 4}],
            "feeders": [
                {"name": "a", "side": "A", "budget_w": 120_000, "serves": [racks]},
                {"name": "b", "side": "B", "budget_w": 120_000, "serves": [racks]},
            ],
        }],
    }  # fmt: skip


SITES = {"liquid": liquid_site, "air": air_site}
SHARES = {"liquid": 0.8, "air": 0.2}  # of the faults


@dataclass
class Outcome:
    """One run: what was put in, and what was told."""

    site: str
    seed: int
    scripts: list[dict[str, Any]]
    right_entity: list[bool]
    right_class: list[bool]
    delay_s: list[float]  # from the first changed sample; NaN where it was never named
    shown: bool = True  # whether any sample ever differed; else there is nothing to find
    beside: list[str] = field(default_factory=list)  # what else was told in the end
    told: list[str] = field(default_factory=list)
    share: float | None = None  # of the greatest size, where it was given


def site_of(name: str) -> Site:
    """A site of the campaign with its packaged profiles."""
    return build_site(spec_of(SITES[name](), None, f"{name}.yaml"), f"{name}.yaml")


class Watched:
    """A simulation and what its engine's diagnosis reports."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    @property
    def diagnosis(self) -> Diagnosis:
        return self.simulation.engine.diagnosis

    def step(self) -> tuple[Fault, ...]:
        """One round; the faults that are told after it."""
        self.simulation.step()
        return self.diagnosis.faults

    def fork(self) -> Watched:
        """The same moment, going on by itself."""
        return Watched(self.simulation.fork())


def warm(site_name: str, seed: int, seconds: float) -> tuple[Watched, Site, list[str]]:
    """A plant that has run for a while, and what was told of it although it is healthy."""
    site = site_of(site_name)
    scenario = scenario_of({"name": "campaign", "seed": seed, "hours": 24.0}, site)
    watched = Watched(Simulation.of(Engine(site, [], []), seed=seed, scenario=scenario))
    alarms = dict[str, None]()
    for _ in range(round(seconds)):
        for fault in watched.step():
            alarms.setdefault(text_of(fault, site))
    return watched, site, list(alarms)


def inject(watched: Watched, scripts: Sequence[Script], seed: int) -> None:
    """From the next step on the plant suffers these."""
    plant = watched.simulation.plant
    plant.campaign = Campaign(watched.simulation.site, scripts, seed)


def text_of(fault: Fault, site: Site) -> str:
    """A fault on one line."""
    return f"{fault.kind} {site.name(fault.table, fault.entity)} {fault.signal}".strip()


def same_entity(s: Script, f: Fault) -> bool:
    return (f.table, f.entity) == (s.table, s.entity)


def same_class(script: Script, fault: Fault) -> bool:
    return fault.kind == script.kind and fault.signal == (script.signal if script.is_sensor else "")


def changed(a: Simulation, b: Simulation) -> bool:
    """Return True if any sample of this round differs."""
    if len(a.observation.reports) != len(b.observation.reports):
        return True
    for one, other in zip(a.observation.reports, b.observation.reports, strict=True):
        if one.table != other.table or not np.array_equal(one.present, other.present):
            return True
        same = np.array_equal(one.values, other.values, equal_nan=True)
        if not same or not np.array_equal(one.counts, other.counts):
            return True
    return len(a.observation.events) != len(b.observation.events)


def run_one(watched: Watched, site: Site, name: str, seed: int, scripts: list[Script]) -> Outcome:
    """Inject into a fork; run until all are named and settled, or time is over."""
    healthy, sick = watched.fork(), watched.fork()
    before = {(f.kind, f.table, f.entity, f.signal) for f in sick.diagnosis.faults}
    inject(sick, scripts, seed)
    limit_s = max(SLOW_S.get(s.kind, TIMEOUT_S) + s.ramp_s for s in scripts)
    first_s: float | None = None
    named_s: list[float | None] = [None] * len(scripts)
    told: dict[str, float] = {}
    ever: dict[str, Fault] = {}
    begun_s, settled_s = sick.simulation.time_s, limit_s
    faults: tuple[Fault, ...] = ()
    while (at_s := sick.simulation.time_s - begun_s) < min(limit_s, settled_s):
        faults = sick.step()
        if first_s is None:
            healthy.simulation.step()
            if changed(healthy.simulation, sick.simulation):
                first_s = at_s
        faults = tuple(f for f in faults if (f.kind, f.table, f.entity, f.signal) not in before)
        for fault in faults:
            told.setdefault(text_of(fault, site), at_s - (first_s or 0.0))
            ever.setdefault(text_of(fault, site), fault)
            for i, script in enumerate(scripts):
                if named_s[i] is None and same_entity(script, fault):
                    named_s[i] = at_s - (first_s or 0.0)
        if settled_s == limit_s and all(s is not None for s in named_s):
            settled_s = at_s + SETTLE_S
    # One that is over is judged by what was told of it
    final = {i: faults if s.end_s is None else tuple(ever.values()) for i, s in enumerate(scripts)}
    right = [any(same_entity(s, f) for f in final[i]) for i, s in enumerate(scripts)]
    of_class = [any(same_entity(s, f) and same_class(s, f) for f in final[i]) for i, s in enumerate(scripts)]
    beside = [text_of(f, site) for f in faults if not any(same_entity(s, f) for s in scripts)]
    plain = [asdict(s) | {"name": site.name(s.table, s.entity)} for s in scripts]
    return Outcome(name, seed, plain, right, of_class,
                   [float("nan") if s is None else s for s in named_s], first_s is not None, beside,
                   [f"{k} @{v:.0f}" for k, v in told.items()])  # fmt: skip


@dataclass
class Lot:
    """The work of one process: a plant and what to do with it."""

    site: str
    seed: int
    singles: int
    pairs: int
    healthy_s: float
    ranges: str
    kinds: tuple[str, ...] = ()
    first: int = 0  # case of the lot among all of its site
    verbose: bool = False
    shares: tuple[float, ...] = ()  # sizes that single faults have in turn, of the greatest


def run_lot(lot: Lot, _: Report) -> dict[str, Any]:
    """Warm a plant, run its faults, then let it go on in good health."""
    watched, site, alarms = warm(lot.site, lot.seed, WARM_S)
    outcomes = []
    for i in range(lot.singles + lot.pairs):
        scripts = _drawn(watched.simulation, i, lot, 1 if i < lot.singles else 2)
        outcomes.append(run_one(watched, site, lot.site, lot.seed * 1000 + i, scripts))
        outcomes[-1].share = _share(lot, i, site)
        if lot.verbose:
            _tell(outcomes[-1])
    false: dict[str, float] = {}
    count, known = 0, set[str]()
    for _ in range(round(lot.healthy_s)):
        now = {text_of(f, site) for f in watched.step()}
        for text in sorted(now - known):
            false.setdefault(text, watched.simulation.time_s)
            count += 1
        known = now
    hours = (lot.healthy_s + WARM_S) / 3600.0 * site.sizes["rack"]
    return {"outcomes": [asdict(o) for o in outcomes], "rack_hours": hours, "false": false,
            "false_count": count + len(alarms), "false_warm": alarms, "site": lot.site,
            "seed": lot.seed}  # fmt: skip


def _tell(o: Outcome) -> None:
    """One case, as soon as it is over."""
    console = Console(width=200)
    good = (all(o.right_class) or not o.shown) and not o.beside
    for s in o.scripts:
        size = f"severity {s['severity']:.2f} amount {s['amount']:.3g} ramp {s['ramp_s']:.0f}"
        console.print("well" if good else "ill ", o.site, o.seed, s["kind"], s["name"], s["signal"], size)
    console.print("     told:", "; ".join(o.told), "| beside:", "; ".join(o.beside))


def _kinds(lot: Lot, site: Site) -> tuple[str, ...]:
    """Kinds of a lot, in turn."""
    kinds = [k for k in kinds_of(site) if not lot.kinds or k in lot.kinds]
    return tuple(k for k in kinds if not lot.shares or k in SIZED)


def _share(lot: Lot, case: int, site: Site) -> float | None:
    """Size of a case, which all kinds have before the next size comes; None: drawn."""
    turn = (lot.first + case) // len(_kinds(lot, site))
    return lot.shares[turn % len(lot.shares)] if lot.shares else None


def _drawn(simulation: Simulation, case: int, lot: Lot, many: int) -> list[Script]:
    """The scripts of a case. Kinds come in turn, so that a small campaign has some of each."""
    site = simulation.site
    ranges = DEVELOP if lot.ranges == "develop" else HELD_OUT
    rng = ranges.generator(lot.seed * 1000 + case)
    begin_s = simulation.plant.truth.time_s + float(rng.uniform(5.0, 20.0))
    kinds = _kinds(lot, site)
    ranges = replace(ranges, share=_share(lot, case, site))
    scripts: list[Script] = []
    for _ in range(DRAWS):
        if many == 2:
            scripts = list(draw_pair(site, rng, ranges, begin_s, kinds=kinds))
        else:
            scripts = [draw(site, rng, kinds[(lot.first + case) % len(kinds)], ranges, begin_s)]
        if all(_reads(simulation, s) for s in scripts):
            break
    return scripts


def _reads(simulation: Simulation, script: Script) -> bool:
    """Return True if the sensor exists: an air-cooled rack has none of its coolant."""
    if not script.is_sensor:
        return True
    state = simulation.engine.state
    return bool(np.isfinite(good(state, f"{script.table}.{script.signal}")[script.entity]))


def lots(args: argparse.Namespace) -> list[Lot]:
    """The work, spread over plants of ten faults each."""
    out: list[Lot] = []
    kinds = tuple(args.kinds.split(",")) if args.kinds else ()
    shares = tuple(float(share) for share in args.shares.split(",") if share)
    for name, share in SHARES.items():
        if args.site and name != args.site:
            continue
        share = 1.0 if args.site else share
        singles, pairs = round(args.singles * share), round(args.pairs * share)
        plants = max(1, -(-(singles + pairs) // args.per_plant))
        racks = {"liquid": 4, "air": 2}[name]
        healthy_s = args.healthy_hours * share * 3600.0 / plants / racks
        for i in range(plants):
            out.append(
                Lot(name, FIRST_SEED[args.ranges] + args.offset + len(out),
                    (i + 1) * singles // plants - i * singles // plants,
                    (i + 1) * pairs // plants - i * pairs // plants, healthy_s, args.ranges, kinds,
                    i * singles // plants, args.verbose, shares)
            )  # fmt: skip
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The campaign; prints its tables."""
    parser = argparse.ArgumentParser(description="Score the diagnosis on simulated faults.")
    parser.add_argument("--singles", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--healthy-hours", type=float, default=20.0, help="rack-hours of healthy plant")
    parser.add_argument("--ranges", choices=("develop", "held_out"), default="develop")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--per-plant", type=int, default=12)
    parser.add_argument("--site", choices=tuple(SITES), default="")
    parser.add_argument("--kinds", default="")
    parser.add_argument("--shares", default="", help="sizes, such as 0.05,0.2,1: power curves, no campaign")
    parser.add_argument("--offset", type=int, default=0, help="of the seeds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args(argv)
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")
    console, work = Console(width=140), lots(args)
    results = Pool(run_lot, args.jobs).results(work)
    outcomes = [o for r in results for o in r["outcomes"]]
    hours = sum(r["rack_hours"] for r in results)
    false = sum(r["false_count"] for r in results)
    console.print(power_table_of(outcomes) if args.shares else table_of(outcomes))
    if hidden := [o for o in outcomes if not o["shown"]]:
        console.print(f"{len(hidden)} left out, which no sample shows")
    if (both := summary_of(results)["both_named_pu"]) is not None:
        console.print(f"both entities of a pair named: {both:.1%}")
    console.print(f"{false} false alarms in {hours:.1f} rack-hours: {1000 * false / hours:.1f} per 1,000")
    for r in results if args.verbose else []:
        if r["false"] or r["false_warm"]:
            console.print(r["site"], r["seed"], "false:", r["false"], "while warming:", r["false_warm"])
    if args.out:
        args.out.write_text(written(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
