"""Measured sweeps of power limits, and power curves learned from a few of their limits.

Each limit is one measurement of a job's time and mean power. A curve of a job has eight parameters that a
handful of numbers does not fix: all of 4,096 curves that are drawn evenly are weighed by how well they fit,
three times over, each time from a narrower range; what they say together is the prediction. Part of the
shell; reads files; NumPy.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I64, ConfigError, clean
from twin.physics import CLOCK_MIN_PU

NAMED_BY = ("dataset", "network", "optimizer", "batch_size")
NUMBERS = ("power_limit", "time_per_epoch", "average_power")
PREFIX = "summary_power_"
MOST_BYTES, MOST_JOBS, MOST_LIMITS, MOST_PROBLEMS = 16 * 2**20, 2000, 64, 10

# The ranges that parameters are drawn from; watts are over the highest limit. source: estimate, and the same
# for all GPU models; chosen on the sweeps of the P100, but the knee, which no limit of that one reaches
BOX: Mapping[str, tuple[float, float]] = {
    "demand_log": (math.log(0.2), math.log(1.6)),  # ln of the power that kernels want
    "busy_pu": (0.0, 1.0),  # share of the time that the GPU works at all
    "compute_pu": (0.0, 1.0),  # share of that which waits for the clock
    "gamma": (1.5, 4.0),
    "static_pu": (0.1, 0.45),  # without work, and between kernels
    "softness_log": (math.log(4.0), math.log(40.0)),  # how sharply a limit bites: kernels differ
    "held_pu": (0.88, 1.0),  # of the limit, that is drawn where it binds
    "knee_pu": (0.3, 0.9),  # clock below which the voltage falls no more
}
OF_MODEL = ("static_pu", "held_pu", "knee_pu")  # constants of the GPU model, not of the job
MIDDLE = (0.1, 0.9)  # quantiles of what other jobs' curves say of them, between which they are sought
DRAWS, ROUNDS = 4096, 3
LEAST_DRAWS = 100  # that a narrower range rests on
REACH = 2.2  # standard deviations that it keeps to either side
# Scatter of a measurement before any is known, and the number of measurements that this prior is worth
TIME_PU, POWER_PU, WORTH = 0.015, 0.03, 3
# Measurements nearer than this, in ln of time and of power, count as two together, however many they are: the
# many at limits that hardly touch a job must not rule how it goes at low ones. source: chosen on the sweeps
# of P100 and V100
ALIKE, ALIKE_WORTH = 0.25, 2.0
# Share of the error at the limits beside that carries over to the one between them
OF_TIME, OF_POWER = 0.5, 1.0


class Sweep(NamedTuple):
    """A job on a GPU model: s per epoch and mean W at each limit [n_limit]."""

    job: tuple[str, ...]  # by NAMED_BY
    time_s: F64
    power_w: F64

    @property
    def energy_j(self) -> F64:
        return self.time_s * self.power_w


class Sweeps(NamedTuple):
    """The jobs of a GPU model that ran at all its limits, ascending; `left_out` did not."""

    gpu: str
    limit_w: F64
    jobs: tuple[Sweep, ...]
    left_out: int


def read_sweeps(folder: Path) -> list[Sweeps]:
    """Every `summary_power_GPU.csv` of a folder. Raises ConfigError for what the operator can mend."""
    files = sorted(folder.glob(f"{PREFIX}*.csv"))
    if not files:
        raise ConfigError(f"{folder}: expected files {PREFIX}GPU.csv of measured power limits")
    return [_read(path) for path in files]


def _read(path: Path) -> Sweeps:
    gpu, problems = path.stem.removeprefix(PREFIX), []
    found: dict[tuple[str, ...], dict[float, list[float]]] = {}
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path}: expected at most {MOST_BYTES:,} bytes")
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in (*NAMED_BY, *NUMBERS) if name not in (rows.fieldnames or [])]
            if missing:
                raise ConfigError(f"{path}: no column {', '.join(missing)}")
            for row in rows:
                job = tuple(clean(str(row[name]), 60) for name in NAMED_BY)
                try:
                    limit_w, *measured = (float(row[name]) for name in NUMBERS)
                    if not all(math.isfinite(x) and x > 0.0 for x in (limit_w, *measured)):
                        raise ValueError
                except (TypeError, ValueError):
                    problems.append(f"{path}: line {rows.line_num}: expected {', '.join(NUMBERS)} above 0")
                    continue
                if limit_w in found.setdefault(job, {}):
                    problems.append(
                        f"{path}: line {rows.line_num}: a second row of {limit_w:g} W of this job"
                    )
                found[job][limit_w] = measured
                if len(found) > MOST_JOBS:
                    raise ConfigError(f"{path}: expected at most {MOST_JOBS:,} jobs")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {clean(str(error), 200)}") from error
    if problems:
        raise ConfigError(problems[:MOST_PROBLEMS])
    limits = sorted({limit for sweep in found.values() for limit in sweep})
    if not 4 <= len(limits) <= MOST_LIMITS:
        raise ConfigError(f"{path}: {len(limits)} different limits: expected 4 to {MOST_LIMITS}")
    whole = {
        job: np.array([sweep[x] for x in limits]) for job, sweep in found.items() if len(sweep) == len(limits)
    }
    jobs = tuple(Sweep(job, values[:, 0], values[:, 1]) for job, values in whole.items())
    if not jobs:
        raise ConfigError(f"{path}: expected at least one job that ran at all of {len(limits)} limits")
    return Sweeps(gpu, np.array(limits), jobs, len(found) - len(jobs))


def _halton(n: int, n_column: int) -> F64:
    """Points [n, n_column] that fill the unit cube evenly (Halton, Numerische Mathematik 2, 1960)."""
    out = np.zeros((n, n_column))
    for column, prime in enumerate((2, 3, 5, 7, 11, 13, 17, 19)[:n_column]):
        left, scale = np.arange(1, n + 1), 1.0
        while left.any():
            scale /= prime
            out[:, column] += scale * (left % prime)
            left = left // prime
    return out


_POINTS = _halton(DRAWS, len(BOX))


def sweep_curve(limit_pu: F64, drawn: F64) -> tuple[F64, F64]:
    """ln of (time, mean power) [n, n_limit] of curves of these parameters [n, 8] at these limits.

    Time is over that at the highest clock, watts over the highest limit. A busy GPU wants its demand; a limit
    bites the softer the more its kernels differ; what it then draws sets the clock, as in
    `twin.physics.gpu_power`, down to the lowest. Between kernels it draws its static power.
    """
    log_demand, busy, share, gamma, static, log_soft, held, knee = (drawn[:, [j]] for j in range(len(BOX)))
    demand, soft = np.exp(log_demand), np.exp(log_soft)
    dynamic = np.maximum(demand - static, 1e-3)
    power = (demand**-soft + (held * limit_pu) ** -soft) ** (-1.0 / soft)
    ratio = np.clip((power - static) / dynamic, 0.0, 1.0)
    at_knee = knee**gamma
    clock = np.where(ratio < at_knee, knee * ratio / at_knee, np.maximum(ratio, at_knee) ** (1.0 / gamma))
    least = static + dynamic * at_knee * CLOCK_MIN_PU / knee  # the knee lies above the lowest clock
    power = np.where(clock < CLOCK_MIN_PU, least, power)
    longer = busy * (share / np.maximum(clock, CLOCK_MIN_PU) + 1.0 - share)
    time = longer + 1.0 - busy
    return np.log(time), np.log((longer * power + (1.0 - busy) * static) / time)


class _Learned(NamedTuple):
    weight: F64  # [n]
    drawn: F64  # [n, 8]
    scale: F64  # [n] ln s
    said: tuple[F64, F64]  # ln of time and power [n, n_limit], as `course`


def _learn(
    limit_w: F64, sweep: Sweep, train: I64, box: Mapping[str, tuple[float, float]], thin: bool
) -> _Learned:
    """The curves that the measurements at the limits `train` leave; `thin`: those alike count as few."""
    low, high = np.array(list(box.values())).T
    at, to = low, high
    time, power = np.log(sweep.time_s[train]), np.log(sweep.power_w[train] / limit_w[-1])
    worth = _worth(time, power) if thin else np.ones(len(train))
    n = worth.sum()
    for round_ in range(ROUNDS):
        drawn = at + (to - at) * _POINTS
        said = sweep_curve(limit_w / limit_w[-1], drawn)
        off = time - said[0][:, train]
        scale = off @ worth / n
        time_ss = (off - scale[:, None]) ** 2 @ worth
        power_ss = (power - said[1][:, train]) ** 2 @ worth
        # Scatter of unknown size, about as large as thought: Student's t; time has spent one on its scale
        fits = -0.5 * (n - 1 + WORTH) * np.log(WORTH * TIME_PU**2 + time_ss)
        fits -= 0.5 * (n + WORTH) * np.log(WORTH * POWER_PU**2 + power_ss)
        weight = _weights(fits, 1.0)
        if round_ == ROUNDS - 1:
            return _Learned(weight, drawn, scale, said)
        heat = 1.0
        while 1.0 / (weight @ weight) < LEAST_DRAWS and heat > 1e-3:
            heat *= 0.7
            weight = _weights(fits, heat)
        mean = weight @ drawn
        spread = np.sqrt(weight @ (drawn - mean) ** 2)
        at, to = np.maximum(low, mean - REACH * spread), np.minimum(high, mean + REACH * spread)
    raise AssertionError


def _worth(time: F64, power: F64) -> F64:
    """The number of independent measurements that each one counts as [n], by how many others are alike."""
    apart = (time[:, None] - time) ** 2 + (power[:, None] - power) ** 2
    return np.asarray(np.minimum(1.0, ALIKE_WORTH / np.exp(-apart / ALIKE**2).sum(axis=1)))


def _weights(fits: F64, heat: float) -> F64:
    weight = np.exp(heat * (fits - fits.max()))
    return np.asarray(weight / weight.sum())


def model_ranges(sweeps: Sweeps, jobs: Sequence[Sweep]) -> dict[str, tuple[float, float]]:
    """The box with the constants of the GPU model narrowed to what the sweeps of these jobs say of them."""
    box = dict(BOX)
    whole = np.arange(len(sweeps.limit_w))
    if not jobs:
        return box
    means = []
    for sweep in jobs:
        learned = _learn(sweeps.limit_w, sweep, whole, BOX, False)
        means.append(learned.weight @ learned.drawn)
    for name, column in zip(BOX, np.array(means).T, strict=True):
        if name in OF_MODEL:
            low, high = np.quantile(column, MIDDLE).tolist()
            box[name] = low, max(high, low + 1e-3)
    return box


def predict(
    limit_w: F64, sweep: Sweep, train: I64, box: Mapping[str, tuple[float, float]]
) -> tuple[F64, F64]:
    """(s, J) at every limit [n_limit], of which those in `train` alone were looked at, ascending."""
    learned = _learn(limit_w, sweep, train, box, True)
    time = learned.weight @ (learned.scale[:, None] + learned.said[0])
    power = learned.weight @ learned.said[1] + math.log(limit_w[-1])
    energy = np.log(learned.weight @ np.exp(learned.scale[:, None] + learned.said[0] + learned.said[1]))
    energy += math.log(limit_w[-1])
    for said, seen, part in ((time, sweep.time_s, OF_TIME), (power, sweep.power_w, OF_POWER)):
        rest = np.log(seen[train]) - said[train]
        carried = part * np.interp(limit_w, limit_w[train], rest)
        said += carried
        energy += carried
    return np.exp(time), np.exp(energy)
