"""Scenario file: the workload, weather, faults and length of a simulated run.

The parsed YAML tree becomes a Scenario, and all errors of a file are reported at once, as `twin.site.file`
does for a site. A sweep becomes one tree per case, each checked like a file of its own.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import product
from typing import Any, Literal

import msgspec

from twin.catalogue import NS, ConfigError
from twin.diagnosis import FAULT_KINDS
from twin.plant.faults import BOTH, KINDS_IN_PARTS, PUBLISHED, Script, wear_scripts
from twin.plant.jobs import Mix
from twin.plant.ledger import CARBON_G_PER_KWH, COST_USD_PER_KWH, Prices
from twin.plant.weather import DAY_S, Weather
from twin.site import Site, first_problems, salvage, short

PARTS = {"1": 0, "2": 1, "both": BOTH}
MAX_FAULTS, MAX_CASES = 10_000, 10_000
MAX_MORE_RACKS = 1000
DT_S = (0.01, 60.0)  # shortest and longest step
MAX_PACE = 10_000.0


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    pass


class WeatherEntry(_Strict, frozen=True):
    """Outdoor air: a mean with half its daily swing, and the variation of fronts; humidity holds at the
    mean."""

    outdoor_mean_c: float = 16.0
    swing_k: float = 6.0
    rh_pu: float = 0.55
    fronts_k: float = 0.0


class WorkloadEntry(_Strict, frozen=True):
    """Shares of the nodes; the rest is idle. `constant_pu`: no jobs, all GPUs at this activity."""

    training_pu: float = 0.60
    inference_pu: float = 0.25
    batch_pu: float = 0.12
    constant_pu: float | None = None
    swing_pu: float = 1.0
    diurnal_pu: float = 0.35
    job_hours: tuple[float, float] = (0.5, 48.0)
    checkpoint_interval_s: tuple[float, float] = (600.0, 1800.0)


class GridEntry(_Strict, frozen=True):
    """Prices of the report."""

    price_usd_per_kwh: float = COST_USD_PER_KWH
    carbon_g_per_kwh: float = CARBON_G_PER_KWH


class SweepEntry(_Strict, frozen=True):
    """Cases to run side by side: each seed with each combination of the values of `vary`.

    `seeds` is a list, or `count` seeds follow on the scenario's own. Keys of `vary` are paths of this file
    such as `faults[0].severity`.
    """

    seeds: list[int] = []
    count: int | None = None
    vary: dict[str, list[int | float | str | bool]] = {}


class MoreRacksEntry(_Strict, frozen=True):
    """More racks beside an existing one, with the same feeds and cooling; for a what-if only.

    `profile`: another type than its; `load_pu`: activity of their GPUs, by default as of those that work now.
    """

    count: int
    beside: str
    profile: str | None = None
    load_pu: float | None = None


class ScenarioFile(_Strict, frozen=True):
    """A whole scenario. One of `hours` and `duration_s` is its length; `start` is an ISO instant or ns.

    `wear_pace`: filters, exchangers, pumps and cold plates wear, by so many days in one; 0: nothing wears.
    """

    name: str
    seed: int = 0
    hours: float | None = None
    duration_s: float | None = None
    dt_s: float = 1.0
    start: str | int = "2026-01-01T10:00:00Z"
    weather: WeatherEntry = WeatherEntry()
    workload: WorkloadEntry = WorkloadEntry()
    faults: list[FaultEntry] = []
    wear_pace: float = 0.0
    grid: GridEntry = GridEntry()
    policies: dict[str, Literal["off", "advise", "approve", "act"]] = {}
    more_racks: MoreRacksEntry | None = None
    sweep: SweepEntry | None = None


@dataclass(frozen=True)
class Scenario:
    """A scenario of one site, checked; entities are indices. `policies` overrides their authority."""

    name: str
    seed: int = 0
    duration_s: float = 3600.0
    dt_s: float = 1.0
    start_ns: int = 1_767_261_600 * NS  # 2026-01-01 10:00 UTC
    weather: Weather = field(default_factory=Weather)
    workload: Mix = field(default_factory=Mix)
    faults: tuple[Script, ...] = ()
    prices: Prices = field(default_factory=Prices)
    policies: dict[str, str] = field(default_factory=dict)
    more_racks: MoreRacksEntry | None = None
    swept: bool = False  # the base case of a file with a sweep

    @classmethod
    def ordinary(cls, hours: float = 1.0, seed: int = 0) -> Scenario:
        """Return an ordinary day from ten in the morning: jobs of every kind, mild weather, no fault.

        The same as a scenario file that says no more than a name, a seed and hours.
        """
        begin_s = float(cls.start_ns // NS % int(DAY_S))
        return cls(
            "an ordinary day",
            seed,
            hours * 3600.0,
            weather=Weather(begin_s=begin_s, seed=seed),
            workload=Mix(hour_at_start=begin_s / 3600.0),
        )

    @property
    def hours(self) -> float:
        """Return the length of the run, h."""
        return self.duration_s / 3600.0

    def remarks(self, seconds: float) -> list[str]:
        """Return notes on what a run of this length omits: half a step, a sweep, faults after its end."""
        out, run_s = [], round(seconds / self.dt_s) * self.dt_s
        if abs(run_s - seconds) > 1e-6 * self.dt_s:
            out.append(f"{seconds:g} s is no whole number of steps of {self.dt_s:g} s: {run_s:g} s are run")
        if self.swept:
            out.append(
                "the scenario has a sweep: only its base case is run; `racktwin simulation whatif` runs all"
            )
        late = [f"{f.kind} ({f.begin_s:g} s)" for f in self.faults if f.begin_s >= run_s]
        if late:
            more = f" and {len(late) - 5} more" if len(late) > 5 else ""
            out.append(
                f"the run ends after {run_s:g} s, before these faults begin: {', '.join(late[:5])}{more}"
            )
        return out

    def scripts(self, site: Site) -> tuple[Script, ...]:
        """Return its faults on this site. Raises ValueError if `site` is a smaller one."""
        for f in self.faults:
            if f.entity >= site.sizes[f.table]:
                raise ValueError(f"{site.file.site} has no {f.table} {f.entity}")
        return self.faults


def scenario_of(tree: Any, site: Site, file_name: str = "scenario.yaml") -> Scenario:
    """Return the scenario of a parsed file; checks only the form of a sweep in it.

    Raises ConfigError with every fault, each `file: $.path: expected ..., got ...`.
    """
    file, faults = salvage(ScenarioFile, tree)
    problems = list(faults.problems)
    if file is None:
        raise ConfigError(first_problems([f"{file_name}: {p}" for p in problems], file_name))
    # An unreadable part of a pair is reported once, by its form
    broken = {p.split(":", 1)[0] for p in problems}
    problems += [p for p in _judge(file, site) if p.split(":", 1)[0] not in broken]
    if problems:
        raise ConfigError(first_problems([f"{file_name}: {p}" for p in problems], file_name))
    return _made(file, site)


def cases_of(
    tree: Any, site: Site, file_name: str = "scenario.yaml"
) -> list[tuple[dict[str, Any], Scenario]]:
    """Return (varied values, scenario) of every case of a sweep; one case without a sweep.

    Raises ConfigError if the file is wrong, or a varied value is.
    """
    scenario_of(tree, site, file_name)
    file = msgspec.convert(tree, ScenarioFile)
    sweep = file.sweep or SweepEntry()
    seeds = list(sweep.seeds) or [file.seed + i for i in range(sweep.count or 1)]
    plain = {k: v for k, v in tree.items() if k != "sweep"}
    problems: list[str] = []
    cases: list[tuple[dict[str, Any], Scenario]] = []
    for values in product(*sweep.vary.values()):
        varied = dict(zip(sweep.vary, values, strict=True))
        case = copy.deepcopy(plain)
        for path, value in varied.items():
            put(ScenarioFile, case, path, value)
        for seed in seeds:
            case["seed"] = seed
            try:
                made = scenario_of(case, site, f"{file_name} with {_words(varied)}" if varied else file_name)
            except ConfigError as error:
                problems += error.problems
                break
            cases.append((({"seed": seed} if len(seeds) > 1 else {}) | varied, made))
    if problems:
        raise ConfigError(first_problems(problems, file_name))
    return cases


def _words(varied: dict[str, Any]) -> str:
    return ", ".join(f"{k} = {short(v)}" for k, v in varied.items())


def _judge(file: ScenarioFile, site: Site) -> list[str]:
    """Return the errors in the meaning of a well-formed file."""
    out: list[str] = []
    if (file.hours is None) == (file.duration_s is None):
        got = "neither" if file.hours is None else "both"
        out.append(f"$.hours: expected one of hours and duration_s, got {got}")
    out += in_range("$.hours", file.hours, 0.0, MAX_HOURS, open_low=True)
    out += in_range("$.duration_s", file.duration_s, 0.0, MAX_HOURS * 3600.0, open_low=True)
    out += in_range("$.dt_s", file.dt_s, *DT_S)
    for key, given, unit_s in (("hours", file.hours, 3600.0), ("duration_s", file.duration_s, 1.0)):
        if given is not None and 0.0 < given * unit_s < file.dt_s:
            out.append(f"$.{key}: expected at least a step of dt_s ({file.dt_s:g} s), got {short(given)}")
    out += in_range("$.seed", file.seed, 0, 2**63 - 1)
    out += in_range("$.wear_pace", file.wear_pace, 0.0, MAX_PACE)
    if not file.name or len(file.name) > 100:
        out.append(f"$.name: expected a name of 1 to 100 characters, got {short(file.name)}")
    if _start_ns(file.start) is None:
        out.append(
            f"$.start: expected an instant such as 2026-01-01T10:00:00Z or ns, got {short(file.start)}"
        )
    w = file.weather
    out += in_range("$.weather.outdoor_mean_c", w.outdoor_mean_c, -50.0, 55.0)
    out += in_range("$.weather.swing_k", w.swing_k, 0.0, 25.0)
    out += in_range("$.weather.rh_pu", w.rh_pu, 0.0, 1.0)
    out += in_range("$.weather.fronts_k", w.fronts_k, 0.0, 15.0)
    out += in_range("$.grid.price_usd_per_kwh", file.grid.price_usd_per_kwh, -5.0, 20.0)
    out += in_range("$.grid.carbon_g_per_kwh", file.grid.carbon_g_per_kwh, 0.0, 3000.0)
    out += _judge_workload(file.workload)
    known = file_policies(site)
    for name in file.policies:
        if name not in known:
            has = ", ".join(known) or "none"
            out.append(f"$.policies.{short(name)[1:-1]}: expected a policy of the site ({has})")
    if (more := file.more_racks) is not None:
        out += in_range("$.more_racks.count", more.count, 1, MAX_MORE_RACKS)
        out += in_range("$.more_racks.load_pu", more.load_pu, 0.0, 1.0)
        if site.entity("rack", more.beside) is None:
            out.append(f"$.more_racks.beside: expected a rack of the site, got {short(more.beside)}")
    if len(file.faults) > MAX_FAULTS:
        out.append(f"$.faults: expected at most {MAX_FAULTS}, got {len(file.faults)}")
    for i, entry in enumerate(file.faults[:MAX_FAULTS]):
        out += judge_fault(f"$.faults[{i}]", entry, site, i < MAX_GUESSED)
    return out + (_judge_sweep(file) if file.sweep else [])


def file_policies(site: Site) -> list[str]:
    """Return the names of the policies in the site file, in its order."""
    return list(site.file.policies)


def _judge_workload(w: WorkloadEntry) -> list[str]:
    out: list[str] = []
    for name in ("training_pu", "inference_pu", "batch_pu", "constant_pu", "swing_pu", "diurnal_pu"):
        out += in_range(f"$.workload.{name}", getattr(w, name), 0.0, 1.0)
    total = w.training_pu + w.inference_pu + w.batch_pu
    if not out and total > 1.0 + 1e-9:
        out.append(f"$.workload: expected shares of 1 or less together, got {total:g}")
    for name, most in (("job_hours", MAX_HOURS), ("checkpoint_interval_s", 1e6)):
        pair = getattr(w, name)
        if not all(0.0 < x <= most for x in pair) or pair[0] > pair[1]:
            out.append(
                f"$.workload.{name}: expected [lowest, highest] above 0, at most {most:g}, got {short(pair)}"
            )
    return out


def _judge_sweep(file: ScenarioFile) -> list[str]:
    sweep, out = file.sweep, []
    assert sweep is not None
    if sweep.seeds and sweep.count is not None:
        out.append("$.sweep.count: expected one of seeds and count, got both")
    if sweep.count is not None:
        out += in_range("$.sweep.count", sweep.count, 1, MAX_CASES)
    for i, seed in enumerate(sweep.seeds):
        out += in_range(f"$.sweep.seeds[{i}]", seed, 0, 2**63 - 1)
    if len(set(sweep.seeds)) < len(sweep.seeds):
        twice = min(s for s, n in Counter(sweep.seeds).items() if n > 1)
        out.append(f"$.sweep.seeds: expected each seed once, got {twice} more than once")
    cases = max(1, len(sweep.seeds) or (sweep.count or 1))
    tree = msgspec.to_builtins(file)
    for path, values in sweep.vary.items():
        cases *= len(values)
        if not values:
            out.append(f"$.sweep.vary.{path}: expected at least one value, got none")
        try:
            if path.partition(".")[0] in ("sweep", "seed", "name"):
                raise KeyError(path)
            put(ScenarioFile, copy.deepcopy(tree), path, None)
        except (KeyError, IndexError, TypeError, ValueError):
            out.append(
                f"$.sweep.vary: expected a path of this file such as faults[0].severity, got {short(path)}"
            )
    if cases > MAX_CASES:
        out.append(f"$.sweep: expected at most {MAX_CASES} cases, got {cases}")
    return out


def _start_ns(start: str | int) -> int | None:
    """Return nanoseconds since 1970; an instant without a zone is UTC. None for an invalid one."""
    if isinstance(start, int):
        return start if 0 <= start < 2**62 else None
    try:
        at = datetime.fromisoformat(start)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    seconds = int((at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds())
    return seconds * NS if 0 <= seconds < 2**62 // NS else None


def _made(file: ScenarioFile, site: Site) -> Scenario:
    start_ns = _start_ns(file.start)
    assert start_ns is not None
    begin_s = start_ns // NS % int(DAY_S)
    w, jobs = file.weather, file.workload
    return Scenario(
        name=file.name,
        seed=file.seed,
        duration_s=file.duration_s if file.hours is None else file.hours * 3600.0,  # type: ignore[arg-type]
        dt_s=file.dt_s,
        start_ns=start_ns,
        weather=Weather(w.outdoor_mean_c, w.swing_k, w.rh_pu, float(begin_s), w.fronts_k, file.seed),
        workload=Mix(
            training_pu=jobs.training_pu,
            inference_pu=jobs.inference_pu,
            batch_pu=jobs.batch_pu,
            constant_pu=jobs.constant_pu,
            swing_pu=jobs.swing_pu,
            diurnal_pu=jobs.diurnal_pu,
            hour_at_start=begin_s / 3600.0,
            job_hours=jobs.job_hours,
            checkpoint_interval_s=jobs.checkpoint_interval_s,
        ),
        faults=(*(script_of(fault, site) for fault in file.faults), *_wear(file, site)),
        prices=Prices(file.grid.price_usd_per_kwh, file.grid.carbon_g_per_kwh),
        policies=dict(file.policies),
        more_racks=file.more_racks,
        swept=file.sweep is not None,
    )


def _wear(file: ScenarioFile, site: Site) -> tuple[Script, ...]:
    return wear_scripts(site, file.seed, file.wear_pace) if file.wear_pace > 0.0 else ()


def put(kind: type[msgspec.Struct], tree: dict[str, Any], path: str, value: Any) -> None:
    """Set what stands at a path of a tree of this kind; sections that the tree leaves out are made.

    Raises KeyError, IndexError, TypeError or ValueError where the kind has no such place, or a list of the
    tree is too short.
    """
    steps = _steps(path)
    inner: Any = kind
    at: Any = tree
    for step in steps[:-1]:
        inner = _inside(inner, step)
        at = at[step] if isinstance(step, int) else at.setdefault(step, {})
    _inside(inner, steps[-1])
    at[steps[-1]] = value


def _steps(path: str) -> list[str | int]:
    """Return the steps of a path: `faults[0].severity` -> ["faults", 0, "severity"]."""
    out: list[str | int] = []
    for part in path.split("."):
        head, *indices = part.split("[")
        out.append(head)
        for index in indices:
            digits = index.removesuffix("]")
            if not (index.endswith("]") and digits.isascii() and digits.isdigit() and len(digits) < 6):
                raise ValueError(path)
            out.append(int(digits))
    return out


def _inside(kind: Any, step: str | int) -> Any:
    """Return the kind one step below this kind."""
    origin = getattr(kind, "__origin__", None)
    if origin is list and isinstance(step, int):
        return kind.__args__[0]
    if origin is dict and isinstance(step, str):
        return kind.__args__[1]
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        raise KeyError(step)
    return {f.name: f.type for f in msgspec.structs.fields(kind)}[str(step)]


MAX_HOURS = 24.0 * 366.0
MAX_GUESSED = 20  # faults whose place is guessed at
MAX_NAMED, MAX_COMPARED = 50_000, 2000  # names looked through for one, and compared with it


class FaultEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One fault. `entity` is a path of the site; without `end_s` it lasts. `part` of a pair: 1, 2 or both."""

    kind: str
    begin_s: float
    entity: str = ""
    end_s: float | None = None
    severity: float = 1.0
    ramp_s: float = 0.0
    signal: str = ""
    amount: float = 0.0
    part: Literal["1", "2", "both"] = "1"


def judge_fault(path: str, f: FaultEntry, site: Site, guess: bool) -> list[str]:
    """Return the errors of one fault at this path of the file; `guess`: with suggestions of names."""
    out: list[str] = []
    out += in_range(f"{path}.begin_s", f.begin_s, 0.0, MAX_HOURS * 3600.0)
    out += in_range(f"{path}.severity", f.severity, 0.0, 1.0)
    out += in_range(f"{path}.ramp_s", f.ramp_s, 0.0, MAX_HOURS * 3600.0)
    out += in_range(f"{path}.amount", f.amount, -1e12, 1e12)
    if f.end_s is not None and not f.begin_s < f.end_s <= MAX_HOURS * 3600.0:
        out.append(f"{path}.end_s: expected an instant after begin_s ({f.begin_s:g}), got {f.end_s:g}")
    if f.kind not in FAULT_KINDS:
        return [*out, f"{path}.kind: expected one of {', '.join(FAULT_KINDS)}, got {short(f.kind)}"]
    if f.part != "1" and f.kind not in KINDS_IN_PARTS:
        out.append(f"{path}.part: expected none, as a {f.kind} has no second part, got {short(f.part)}")
    found = place_of(f, site)
    tables = FAULT_KINDS[f.kind].tables
    if found is None:
        at, hint = " or ".join(tables), _near(f.entity, tables, site) if guess else ""
        out.append(
            f"{path}.entity: expected the path of a {at} of {site.file.site}, got {short(f.entity)}{hint}"
        )
        return out
    if f.kind.startswith("sensor_"):
        signals = PUBLISHED[found[0]]
        if f.signal not in signals:
            out.append(f"{path}.signal: expected one of {', '.join(signals)}, got {short(f.signal)}")
        if f.amount == 0.0 and f.kind in ("sensor_biased", "sensor_spiking"):
            out.append(f"{path}.amount: expected how far it is off, in the unit of the signal, got 0")
    elif f.signal:
        out.append(f"{path}.signal: expected none, as a {f.kind} is of no sensor, got {short(f.signal)}")
    return out


def place_of(f: FaultEntry, site: Site) -> tuple[str, int] | None:
    """Return (table, index) of a fault's path among the tables of its kind."""
    for table in FAULT_KINDS[f.kind].tables:
        if table == "site":
            if f.entity in ("", site.file.site):
                return "site", 0
        elif (entity := site.entity(table, f.entity)) is not None:
            return table, entity
    return None


def script_of(f: FaultEntry, site: Site) -> Script:
    """Return the script of a checked fault."""
    place = place_of(f, site)
    assert place is not None
    return Script(f.kind, place[0], place[1], f.begin_s, f.end_s, f.severity, f.ramp_s, f.signal, f.amount,
                  PARTS[f.part])  # fmt: skip


def _near(wanted: str, tables: tuple[str, ...], site: Site) -> str:
    """Return a suggestion: the names nearest to a wrong one, or that the site has none."""
    if "site" in tables:
        return f"; such as {site.file.site}"
    names = [site.name(t, i) for t in tables for i in range(min(site.sizes[t], MAX_NAMED))]
    if not names:
        return "; this site has none"
    above = wanted.rpartition("/")[0]
    nearby = [n for n in names if above and n.rpartition("/")[0].endswith(above)]
    some = (nearby or names)[:MAX_COMPARED]
    found = get_close_matches(wanted[:200], some, 3, 0.4) or some[:3]
    return f"; such as {', '.join(found)}"


def in_range(path: str, value: float | None, low: float, high: float, open_low: bool = False) -> list[str]:
    """Return a problem if a value lies outside the range; None is no value."""
    if value is None or (low <= value <= high and not (open_low and value == low)):
        return []
    words = f"above {low:g} and at most {high:g}" if open_low else f"of {low:g} to {high:g}"
    return [f"{path}: expected a number {words}, got {short(value)}"]
