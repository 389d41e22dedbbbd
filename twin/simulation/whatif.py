"""Simulated comparison (what-if): runs a course of events twice, with acting policies and without.

A course is one engine beside one plant, in one process, the same for the same seed wherever it runs. Its
starting point is not changed. A sweep runs the courses of many cases; one that fails costs its own case only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from twin.catalogue import NS, ConfigError, StorageError, TwinError, clean, utc
from twin.config import make_engine
from twin.contracts import Decision
from twin.engine import Engine, snapshot
from twin.plant import Plant, Scenario, Sensors, mirror_twin, read_as_one
from twin.run import Failed, Pool, ProgressBar, Report, TraceReader, by_number
from twin.simulation.closed_loop import Simulation
from twin.simulation.limits import CourseLimits
from twin.site import Site, SiteSpec, build_site, grown_site
from twin.telemetry import Frame

Arm = Literal["policies", "nothing"]
ARMS: tuple[Arm, ...] = ("policies", "nothing")
# Spread of a mirrored plant's hidden parameters about the design where nothing was learned of them, over
# that of a drawn plant; source: estimate.
MIRROR_SPREAD = 0.25
KWH_J = 3.6e6
MAX_FAULTS = 200  # faults kept per course
NICE = 5  # of worker processes
POINTS = 480
# Curve -> value of a point for its stretch: the mean for power, the worst value for dangerous quantities.
CURVES = {
    "hottest_gpu_c": "max",
    "throttled_gpus": "max",
    "it_power_kw": "mean",
    "lowest_flow_lpm": "min",
    "warmest_supply_c": "max",
}


@dataclass(frozen=True)
class Question:
    """Settings that all cases of a call share, as plain data for other processes.

    `given` are the levels of the call. `hold_work` and `hold_weather`: the scenario says nothing of them, so
    that a mirrored plant goes on with those of now.
    """

    spec: SiteSpec
    site_name: str
    snapshot: bytes | None = None
    snapshot_name: str = ""
    horizon_s: float | None = None
    given: dict[str, str] = field(default_factory=dict)
    hold_work: bool = True
    hold_weather: bool = True

    def site(self) -> Site:
        """Build it."""
        return build_site(self.spec, self.site_name)


@dataclass(frozen=True)
class Case:
    """One scenario; `varied` names its differences from the others."""

    number: int
    varied: dict[str, Any]
    scenario: Scenario
    grown: SiteSpec | None = None  # the site with the scenario's more racks


@dataclass
class ArmResult:
    """Outcome of one arm: figures by name with their unit, diagnosed faults, its curves, the limits."""

    figures: dict[str, float | None]
    faults: list[dict[str, Any]]
    trail: dict[str, list[float]]
    begun_ns: int
    not_carried: list[str]
    limits: list[dict[str, Any]] = field(default_factory=list)


def newest_snapshot(path: Path) -> tuple[bytes, Path, list[Path]]:
    """(bytes, file, newer damaged files) of a snapshot, or of the newest whole one of a run's folder.

    Raises StorageError if there is none.
    """
    try:
        if not path.is_dir():
            return path.read_bytes(), path, []
        damaged: list[Path] = []
        found = by_number(path, "snapshot-*.rts")[::-1]
        for one in found:
            raw = one.read_bytes()
            try:
                snapshot.decode(raw)
            except StorageError:
                if len(found) == 1:
                    raise
                damaged.append(one)
                continue
            return raw, one, damaged
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except StorageError as error:
        raise StorageError(f"{found[0]}: {error}") from error
    raise StorageError(f"{path}: holds no whole snapshot; expected a snapshot-*.rts or the folder of a run")


def engine_of(question: Question, site: Site) -> Engine:
    """The twin as it stood. Raises StorageError for a snapshot that is damaged or of something else."""
    engine = make_engine(site)
    if question.snapshot is not None:
        try:
            data = snapshot.decode(question.snapshot)
            if data["site_hash"] != site.spec_hash:
                raise StorageError(_of_another(data["site_hash"], question.snapshot_name, site))
            engine.restore(data)
        except StorageError as error:
            raise StorageError(f"{question.snapshot_name}: {error}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise StorageError(
                f"{question.snapshot_name}: is not one that this version reads: {error!r}"
            ) from error
    return engine


def _of_another(found: str, name: str, site: Site) -> str:
    """Return the text for a snapshot of another site, with its name from a recording beside it."""
    try:
        header = TraceReader(Path(name).parent).first_header()
        spec = msgspec.json.decode(header.spec, type=SiteSpec)
        name_then = clean(spec.file["site"]) if header.site_hash == found else ""
    except (TwinError, OSError, msgspec.MsgspecError, KeyError, IndexError, AttributeError):
        name_then = ""
    own = clean(site.file.site)
    of = f" ({name_then})" if name_then else ""
    hint = "; the site's file is another one since" if name_then == own else ""
    return f"snapshot is of site {found}{of}, this is {site.spec_hash} ({own}){hint}"


def authority_of(engine: Engine, scenario: Scenario, given: dict[str, str]) -> dict[str, str]:
    """Levels of the arm with policies: all that are not off act, unless the scenario or the call says other.

    Raises ConfigError for a policy that the site does not have.
    """
    out = {name: "off" if level == "off" else "act" for name, level in engine.intake.authority.items()}
    for name, level in (scenario.policies | given).items():
        if name not in out:
            raise ConfigError(f"--authority {name}={level}: expected a policy of {', '.join(sorted(out))}")
        out[name] = level
    return out


def begin(question: Question, case: Case, arm: Arm) -> tuple[Simulation, list[str]]:
    """Return plant and twin at the moment of the question, and reported faults that the plant cannot
    represent."""
    site, scenario = question.site(), case.scenario
    engine = engine_of(question, site)
    mirrored = question.snapshot is not None
    before, spread, more, load_pu = site, MIRROR_SPREAD if mirrored else 1.0, scenario.more_racks, None
    if case.grown is not None and more is not None:
        site = grown_site(case.grown, before, question.site_name)
        engine.change_site(site)
        scenario = _moved(scenario, before, site)
        load_pu = np.full(site.sizes["gpu"], np.nan if more.load_pu is None else more.load_pu)
    plant = Plant(site, scenario.seed, scenario, spread=spread)
    if load_pu is not None:
        plant.keep_equipment_of(before, spread)
    sensors, left = Sensors(site, scenario.seed), list[str]()
    if mirrored:
        left = mirror_twin(
            engine,
            plant,
            hold_work=question.hold_work,
            hold_weather=question.hold_weather,
            load_pu=load_pu,
        )
        read_as_one(sensors)
    if arm == "policies":
        engine.intake.authority.update(authority_of(engine, scenario, question.given))
        engine.arbiter.mode = "normal"
    else:
        engine.intake.authority.update(dict.fromkeys(engine.intake.authority, "off"))
        engine.arbiter.mode = "released"  # nothing is commanded: leases that run lapse
    simulation = Simulation(engine, plant, sensors, dt_s=scenario.dt_s, start_ns=scenario.start_ns)
    plant.start_ns = simulation.begun_ns
    return simulation, left


def _moved(scenario: Scenario, before: Site, now: Site) -> Scenario:
    """The scenario with its faults where the same entities stand in a site with more racks."""
    faults = []
    for fault in scenario.faults:
        at = now.entity(fault.table, before.name(fault.table, fault.entity))
        assert at is not None
        faults.append(replace(fault, entity=at))
    return replace(scenario, faults=tuple(faults))


def run_arm(
    question: Question, case: Case, arm: Arm, progress: Callable[[float], None] | None = None
) -> ArmResult:
    """Run one arm to its horizon; `progress` gets the simulated seconds from time to time."""
    simulation, left = begin(question, case, arm)
    horizon_s = question.horizon_s or case.scenario.duration_s
    watch = Watch(simulation, case.scenario, horizon_s)
    simulation.observers = (watch,)
    try:
        for _ in range(max(1, round(horizon_s / simulation.dt_s))):
            simulation.step()
            watch.record_round()
            if progress is not None:
                progress(simulation.time_s)
    finally:
        simulation.close()
    return ArmResult(
        watch.figures(),
        watch.new_faults(),
        watch.trail.columns(),
        simulation.begun_ns,
        left,
        watch.limits.rows(),
    )


class Watch:
    """Sums up a course in constant memory. Call `record_round` after each round."""

    def __init__(self, simulation: Simulation, scenario: Scenario, horizon_s: float) -> None:
        self.simulation, self.scenario = simulation, scenario
        plant: Any = simulation.plant
        self.plant: Plant = plant
        self.trail = Trail(horizon_s)
        self.liquid = plant.parameters.rack_liquid
        self.first_throttle_s: float | None = None
        self.hottest_c, self.least_lpm = -np.inf, np.inf
        self.commands = 0
        self._throttle_s = plant.truth.throttle_s.copy()
        self._throttled = float(self._throttle_s.sum())
        self._begun_throttle_s = self._throttle_s.copy()
        self._tripped = plant.truth.feeder_tripped.copy()
        self.limits = CourseLimits(plant)
        self._before = plant.figures()
        self._known = {_key(f) for f in simulation.engine.diagnosis.faults}
        self._faults: dict[tuple[str, str, int, str], dict[str, Any]] = {}

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """After a tick, of which a round may have two."""
        self.commands += sum(len(c.index) for c in decision.commands if not c.renewal)

    def record_round(self) -> None:
        """After a round of the simulation."""
        self.limits.see(self.simulation.time_s)
        sim, t, now_s = self.simulation, self.plant.truth, self.simulation.time_s
        throttled = float(t.throttle_s.sum())
        slowed, heated = throttled != self._throttled, 0.0
        if slowed:  # counted as the figures count it: where heat, and no cap, sets the clock
            grown = np.count_nonzero(t.throttle_s > self._throttle_s)
            heated = float(grown * self.plant.parameters.lump)
            np.copyto(self._throttle_s, t.throttle_s)
        if slowed and self.first_throttle_s is None:
            self.first_throttle_s = now_s
        self._throttled = throttled
        hottest = float(t.gpu_temp_c.max(initial=-273.0))
        flowing = t.rack_flow_lpm[self.liquid & ~t.rack_isolated]
        least = float(flowing.min()) if len(flowing) else np.nan
        self.hottest_c = max(self.hottest_c, hottest)
        self.least_lpm = float(np.fmin(self.least_lpm, least))
        self.trail.add(
            now_s, hottest, heated, float(t.rack_power_w.sum()) / 1e3, least,
            float(t.cdu_supply_c.max()) if len(t.cdu_supply_c) else np.nan,
        )  # fmt: skip
        self.plant.job_names = {slot: name for name, slot in sim.engine.jobs.slot_of.items()}
        faults = sim.engine.diagnosis.faults
        if faults:
            self._note(faults, now_s)

    def _note(self, faults: Any, now_s: float) -> None:
        for fault in faults:
            key = _key(fault)
            if key in self._known or key in self._faults or len(self._faults) >= MAX_FAULTS:
                continue
            begun = [
                s.begin_s for s in self.scenario.faults
                if (s.kind, s.table, s.entity) == key[:3] and s.begin_s <= now_s
            ]  # fmt: skip
            self._faults[key] = {
                "kind": fault.kind,
                "entity": self.simulation.site.name(fault.table, fault.entity),
                "signal": fault.signal,
                "told_s": now_s,
                "delay_s": now_s - max(begun) if begun else None,
            }

    def new_faults(self) -> list[dict[str, Any]]:
        """Faults in the order of their first report."""
        return list(self._faults.values())

    def figures(self) -> dict[str, float | None]:
        """Figures by name; each says its unit. None where there is none."""
        t, now = self.plant.truth, self.plant.figures()
        gone = {k: now[k] - self._before[k] for k in now}
        it_kwh, total_kwh = gone["it_energy_j"] / KWH_J, gone["total_energy_j"] / KWH_J
        work = None if self.plant.workload is None else self.plant.workload.progress
        out: dict[str, float | None] = {
            "first_throttle_s": self.first_throttle_s,
            "throttled_gpu_s": gone["throttle_s"] * self.plant.parameters.lump,
            "throttled_gpus": float(
                np.count_nonzero(t.throttle_s > self._begun_throttle_s) * self.plant.parameters.lump
            ),
            "shut_down_gpus": gone["gpu_trips"],
            "breaker_trips": float(np.count_nonzero(t.feeder_tripped & ~self._tripped)),
            "highest_gpu_temp_c": self.hottest_c,
            "lowest_rack_flow_lpm": self.least_lpm if np.isfinite(self.least_lpm) else None,
            "it_energy_kwh": it_kwh,
            "total_energy_kwh": total_kwh,
            "pue": total_kwh / it_kwh if it_kwh > 0 else None,
            "cost_usd": gone["cost_usd"],
            "carbon_kg": gone["carbon_g"] / 1e3,
            "water_l": gone["water_l"],
            "done_work_gpu_h": None if work is None else work.done_gpu_s / 3600.0,
            "lost_work_gpu_h": None if work is None else work.lost_gpu_s / 3600.0,
            "checkpoint_gpu_h": None if work is None else work.saving_gpu_s / 3600.0,
            "slowed_work_gpu_h": None if work is None else work.slowed_gpu_s / 3600.0,
            "interrupted_jobs": None if work is None else float(work.interruptions),
            "commands": float(self.commands),
            "faults_told": float(len(self._faults)),
        }
        return {k: v if v is None or np.isfinite(v) else None for k, v in out.items()}


def _key(fault: Any) -> tuple[str, str, int, str]:
    return fault.kind, fault.table, fault.entity, fault.signal


def difference(one: dict[str, float | None], other: dict[str, float | None]) -> dict[str, float | None]:
    """one - other, figure by figure; None where one of them has none."""
    return {k: None if a is None or (b := other[k]) is None else a - b for k, a in one.items()}


def when(begun_ns: int) -> str:
    """The moment of a question, for people."""
    return f"{utc(begun_ns)} UTC" if begun_ns >= NS else "the start"


class Trail:
    """Site-wide curves over `horizon_s` seconds in a bounded number of points, each the worst of its part."""

    def __init__(self, horizon_s: float, points: int = POINTS) -> None:
        self.horizon_s, self.points = horizon_s, points
        self._values = np.full((len(CURVES), points), np.nan)
        self._count = np.zeros(points, np.int64)

    def add(self, time_s: float, *values: float) -> None:
        """Add the present value of each curve, in the order of CURVES; NaN = unknown."""
        at = min(self.points - 1, max(0, int((time_s / self.horizon_s) * self.points - 1e-9)))
        column, n = self._values[:, at], int(self._count[at])
        self._count[at] = n + 1
        for k, (how, value) in enumerate(zip(CURVES.values(), values, strict=True)):
            kept = column[k]
            if n == 0 or kept != kept:
                column[k] = value
            elif how == "mean":
                column[k] = kept + (value - kept) / (n + 1)
            elif value == value:
                column[k] = max(kept, value) if how == "max" else min(kept, value)

    def columns(self) -> dict[str, list[float]]:
        """The curves with `time_s`, where there is anything; plain lists."""
        known = np.flatnonzero(self._count)
        step_s = self.horizon_s / self.points
        out = {"time_s": [(k + 1) * step_s for k in known.tolist()]}
        return out | {name: self._values[k, known].tolist() for k, name in enumerate(CURVES)}


@dataclass
class Result:
    """A case with its two courses, or why there are none."""

    case: Case
    courses: dict[Arm, ArmResult] = field(default_factory=dict)
    error: str = ""


def run_cases(question: Question, cases: Sequence[Case], processes: int, bar: ProgressBar) -> list[Result]:
    """All cases, both arms, in the order of `cases`: the same whatever `processes` is."""
    results = [Result(case) for case in cases]
    tasks = [(case, arm) for case in cases for arm in ARMS]
    pool = Pool(partial(_run, question), processes, bar.move, NICE)
    for task, outcome in pool.completed(tasks):
        i, arm = task // len(ARMS), tasks[task][1]
        if not isinstance(outcome, Failed):
            results[i].courses[arm] = outcome
            if i:
                outcome.trail = {}  # only the first case is drawn
        elif not results[i].error:
            results[i].error = outcome.reason
    for result in results:
        result.courses = {arm: result.courses[arm] for arm in ARMS if arm in result.courses}
    return results


def _run(question: Question, task: tuple[Case, Arm], report: Report) -> ArmResult:
    """One course."""
    case = task[0]
    horizon_s = question.horizon_s or case.scenario.duration_s
    return run_arm(question, case, task[1], lambda seconds: report(seconds / horizon_s, ""))
