"""Demand of a power test site: a recorded demand for GPUs, and jobs that make it up.

They are drawn from a seed, minute by minute, the same for every arm. Nodes of high priority hold services and
training, the others training and batch work; a training job's GPUs all dip together while it exchanges
gradients. What share of a job's time scales with the clock is its own and not told to anybody. Reads files.
"""

from __future__ import annotations

import csv
import io
import lzma
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.evaluation.power.site import PowerSite
from twin.catalogue import F64, I32, ConfigError, StorageError
from twin.telemetry import JobKind

RECORDED_GPUS = 856  # of the cluster. source: SOURCE.md of the recording
COLUMN, MOST_FILES, MOST_BYTES, HOUR_MIN, DAY_H = "running_gpu_num", 1000, 2**26, 60, 24
TRAINING, INFERENCE, BATCH = range(3)
KINDS: tuple[JobKind, ...] = ("training", "inference", "batch")
# Of the nodes of high priority and of the others: shares of training, inference and batch. source: estimate
MIX = ((0.5, 0.5, 0.0), (0.75, 0.0, 0.25))
SIZES = (1, 2, 4, 8, 16)  # nodes of a job
# The rate of each, by kind. source: estimate
SIZE_PU = ((0.15, 0.25, 0.25, 0.20, 0.15), (0.3, 0.4, 0.3, 0.0, 0.0), (0.8, 0.2, 0.0, 0.0, 0.0))
HOURS = (8.0, 48.0, 2.0)  # median of a job's length; source: estimate
HOURS_SIGMA = 0.8
# Share of a GPU's range that it draws while it computes; how much of its time scales with its clock; exponent
# of its dynamic power. Lowest and highest. source: estimate after domain.md B and D. source of the last: B
LEVEL = ((0.92, 1.00), (0.75, 1.00), (0.50, 1.00))
COMPUTE_PU = ((0.60, 0.90), (0.20, 0.50), (0.40, 0.90))
GAMMA = (2.5, 3.0)
PERIOD_S, DIP_S, DIP_PU = (5.0, 60.0), (1.0, 3.0), (0.15, 0.45)  # as twin.plant.jobs has them
NOISE, NOISE_KEPT = (0.0, 0.15, 0.08), 0.9  # of a node's load from one minute to the next. source: estimate
DAY_SWING, PEAK_HOUR, SERVED_PU = 0.35, 15.0, 0.65  # of services. source: estimate
IMBALANCE = 0.01  # between GPUs of a job. source: estimate


class Demand(NamedTuple):
    """`job` [minute, node]: which job runs there, -1 = none; `level` [minute, node]: the share of their range
    that its GPUs draw while they compute. Of jobs [n_job]: kind, high (or not), share of compute, exponent,
    and period, phase and length of dips and the depth to which they go. `spread` [n_gpu] of single GPUs."""

    running_pu: F64  # [hour]
    job: I32
    level: F64
    kind: I32
    high: I32
    compute_pu: F64
    gamma: F64
    period_s: F64
    phase_s: F64
    dip_s: F64
    dip_pu: F64
    spread: F64

    @property
    def minutes(self) -> int:
        return len(self.job)

    def part(self, first: int, last: int) -> Demand:
        """The minutes from `first` until before `last`, as if it all began there."""
        return self._replace(
            job=self.job[first:last], level=self.level[first:last], phase_s=self.phase_s + 60.0 * first
        )


def recorded(path: Path) -> F64:
    """Share of the recorded cluster's GPUs that run, hour by hour; NaN where the log has a gap.

    `path`: one CSV file, or a folder with one for each virtual cluster, also compressed. Raises ConfigError,
    StorageError.
    """
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("*/cluster_sequence_vc.csv"), *path.glob("*/cluster_sequence_vc.csv.xz")])
        files = files[:MOST_FILES]
    if not files:
        raise ConfigError(f"{path}: no */cluster_sequence_vc.csv[.xz]; expected the recorded demand for GPUs "
                          "(racktwin trace fetch gpu-demand-helios-earth)")  # fmt: skip
    total: F64 | None = None
    for file in files:
        running = _column(file)
        if total is not None and len(total) != len(running):
            raise ConfigError(f"{file}: {len(running):,} rows, {files[0].parent.name} has {len(total):,}: "
                              "expected the same minutes in all files")  # fmt: skip
        total = running if total is None else total + running
    assert total is not None
    hours = total[: len(total) // HOUR_MIN * HOUR_MIN].reshape(-1, HOUR_MIN)
    if not len(hours) or hours.max() <= 0:
        raise ConfigError(
            f"{path}: {len(total)} minutes of demand; expected an hour or more, and GPUs that run"
        )
    # Nothing runs at all for a minute and more: a gap of the log and not an idle cluster, says its source
    return np.where((hours <= 0).any(axis=1), np.nan, hours.mean(axis=1) / RECORDED_GPUS)


def _column(path: Path) -> F64:
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
            data = bytes(stream.read(MOST_BYTES + 1))
    except (OSError, EOFError, lzma.LZMAError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"{path}: {why}; expected the recorded demand, a whole CSV file") from error
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path}: more than {MOST_BYTES:,} bytes, expected at most so many")
    rows = csv.reader(io.StringIO(data.decode("utf-8", "replace")))
    head = next(rows, [])
    if COLUMN not in head:
        raise ConfigError(f"{path}: no column {COLUMN}; expected minutes of demand with one")
    at = head.index(COLUMN)
    out: list[float] = []
    for line, row in enumerate(rows, 2):
        try:
            value = float(row[at])
        except (IndexError, ValueError):
            value = math.nan
        if not 0 <= value < 1e6:
            raise ConfigError(f"{path}: line {line}: {COLUMN}: expected a number of GPUs, 0 or more")
        out.append(value)
    return np.array(out, np.float64)


def weeks_of(running_pu: F64, hours: int) -> list[int]:
    """Hours at which a day begins and from where on so many have no gap."""
    ok = np.isfinite(running_pu)
    return [h for h in range(0, len(ok) - hours + 1, DAY_H) if ok[h : h + hours].all()]


def draw(site: PowerSite, running_pu: F64, seed: int, hours: int, scale: float = 1.0) -> Demand:
    """Jobs that make up the recorded demand times `scale` on a site, from a day that the seed chooses.

    Raises ConfigError where the recording has no such span without a gap.
    """
    rng = np.random.default_rng([7, seed])
    span = min(hours, len(running_pu))
    starts = weeks_of(running_pu, span)
    if not starts or span < hours:
        raise ConfigError(f"the recorded demand has no {hours} hours without a gap: expected fewer --days")
    # Days near the end are no starts of whole weeks; the same days are drawn from, however long a run is
    whole = [s for s in starts if s in set(weeks_of(running_pu, 7 * DAY_H))] or starts
    begin = whole[int(rng.integers(len(whole)))]
    wanted = np.minimum(running_pu[begin : begin + hours] * scale, 1.0)
    floor = _Floor(rng, hours * HOUR_MIN, site.nodes)
    for high in (1, 0):
        nodes = np.flatnonzero(site.high == bool(high))
        for hour, share in enumerate(wanted.tolist()):
            floor.hour(hour, nodes, round(share * len(nodes)), high)
    return floor.demand(wanted, begin, site.gpus)


class _Floor:
    """Jobs on nodes while they are drawn."""

    def __init__(self, rng: np.random.Generator, minutes: int, nodes: int) -> None:
        self.rng, self.job = rng, np.full((minutes, nodes), -1, np.int32)
        self.kind: list[int] = []
        self.high: list[int] = []
        self.running: list[dict[int, tuple[float, list[int]]]] = [{}, {}]  # (end in hours, nodes) by job
        self.free_from = np.zeros(nodes, np.int64)  # minute

    def hour(self, hour: int, nodes: I32 | np.ndarray, wanted: int, high: int) -> None:
        """End and begin jobs until so many nodes are busy."""
        running, rng = self.running[high], self.rng
        busy = sum(len(of) for _, of in running.values())
        for job, (end, of) in sorted(running.items(), key=lambda x: x[1][0]):
            if end <= hour or busy > wanted:
                at = hour * HOUR_MIN + int(rng.integers(HOUR_MIN))
                self.job[at:, of] = -1
                self.free_from[of] = at
                busy -= len(of)
                del running[job]
        free = nodes[self.job[min((hour + 1) * HOUR_MIN, len(self.job)) - 1, nodes] < 0]
        while busy < wanted and len(free):
            share = np.bincount([self.kind[j] for j in running for _ in running[j][1]], minlength=3)
            kind = int(np.argmax(np.array(MIX[1 - high]) * max(busy, 1) - share))
            size = min(int(rng.choice(SIZES, p=SIZE_PU[kind])), wanted - busy, len(free))
            first = int(rng.integers(len(free)))
            of = [int(n) for n in np.roll(free, -first)[:size]]
            free = free[~np.isin(free, of)]
            begin = max(hour * HOUR_MIN + int(rng.integers(HOUR_MIN)), int(self.free_from[of].max()))
            self.job[begin:, of] = len(self.kind)
            running[len(self.kind)] = (hour + HOURS[kind] * float(rng.lognormal(0.0, HOURS_SIGMA)), of)
            self.kind.append(kind)
            self.high.append(high)
            busy += size

    def demand(self, running_pu: F64, begin_h: int, gpus: int) -> Demand:
        """All of it, with what each job is like."""
        rng, kind = self.rng, np.array(self.kind, np.int32)
        n = len(kind)

        def of_kind(bounds: tuple[tuple[float, float], ...]) -> F64:
            low, high = np.array(bounds, np.float64)[kind].reshape(-1, 2).T
            return np.asarray(rng.uniform(low, high), np.float64)

        usual = of_kind(LEVEL)
        compute_pu, gamma = of_kind(COMPUTE_PU), rng.uniform(*GAMMA, n)
        period_s, dip_s, dip_pu = rng.uniform(*PERIOD_S, n), rng.uniform(*DIP_S, n), rng.uniform(*DIP_PU, n)
        phase_s = rng.uniform(0.0, 1.0, n) * period_s
        steady = kind != TRAINING
        dip_s[steady], dip_pu[steady] = 0.0, 1.0
        minutes, nodes = self.job.shape
        at = np.maximum(self.job, 0)
        sigma = np.array(NOISE)[kind] if n else np.zeros(1)
        hour = (begin_h + np.arange(minutes) / HOUR_MIN) % DAY_H
        day = SERVED_PU * (1.0 + DAY_SWING * np.cos(2.0 * np.pi * (hour - PEAK_HOUR) / DAY_H))
        service = kind == INFERENCE
        level = np.zeros((minutes, nodes))
        if n:
            z, fresh = rng.standard_normal(nodes), math.sqrt(1.0 - NOISE_KEPT**2)
            for minute in range(minutes):
                z = NOISE_KEPT * z + fresh * rng.standard_normal(nodes)
                job = at[minute]
                level[minute] = usual[job] * np.exp(sigma[job] * z) * np.where(service[job], day[minute], 1.0)
        level = np.where(self.job >= 0, np.clip(level, 0.05, 1.0), 0.0)
        spread = 1.0 - IMBALANCE * np.abs(rng.standard_normal(gpus))
        return Demand(running_pu, self.job, level, kind, np.array(self.high, np.int32), compute_pu, gamma,
                      period_s, phase_s, dip_s, dip_pu, np.clip(spread, 0.9, 1.0))  # fmt: skip
