"""Jobs of a simulated site, drawn at random from a mix of kinds of work.

Nodes are split into contiguous regions (training, inference, batch, idle) and those into berths, each of
which holds one job after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from twin.site import Site
from twin.telemetry import JobStarted

Kind = Literal["training", "inference", "batch"]
BERTHS_MAX: dict[Kind, int] = {"training": 16, "inference": 4, "batch": 16}
NODES_PER_BERTH: dict[Kind, int] = {"training": 8, "inference": 4, "batch": 2}  # at least, on average
# Kernels of training, of serving and of the rest: lowest and highest sm, tensor and dram activity in
# their compute phases; source: estimate after public DCGM profiles of such jobs.
ACTIVITY: dict[Kind, tuple[tuple[float, float], ...]] = {
    "training": ((0.85, 0.98), (0.45, 0.70), (0.35, 0.60)),
    "inference": ((0.80, 0.95), (0.15, 0.40), (0.55, 0.85)),
    "batch": ((0.40, 0.90), (0.05, 0.35), (0.15, 0.55)),
}
IMBALANCE_PU: dict[Kind, float] = {"training": 0.01, "inference": 0.05, "batch": 0.05}  # source: estimate
# While all members wait for the slowest all-reduce its kernels still spin; source: estimate
DIP_PU = ((0.15, 0.40), (0.00, 0.05), (0.10, 0.30))  # of the activity, lowest and highest: sm, tensor, dram
ACTIVITY_MAX = 1.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the nodes that each kind of work holds (the rest is idle), and how that work behaves.

    `constant_pu` set: no jobs, every GPU at this activity for ever. `swing_pu` scales the depth of all-reduce
    dips: 0 makes training steady. Raises ValueError if the shares exceed all nodes.
    """

    training_pu: float = 0.60
    inference_pu: float = 0.25
    batch_pu: float = 0.12
    constant_pu: float | None = None
    swing_pu: float = 1.0
    swing_period_s: tuple[float, float] = (5.0, 60.0)
    dip_s: tuple[float, float] = (1.0, 3.0)
    checkpoint_interval_s: tuple[float, float] = (600.0, 1800.0)
    checkpoint_save_s: tuple[float, float] = (10.0, 40.0)
    restart_s: tuple[float, float] = (120.0, 600.0)
    job_hours: tuple[float, float] = (0.5, 48.0)
    diurnal_pu: float = 0.35  # how far the load of inference swings about its mean over a day
    hour_at_start: float = 8.0

    def __post_init__(self) -> None:
        shares = (self.training_pu, self.inference_pu, self.batch_pu)
        if min(shares) < 0 or sum(shares) > 1.0 + 1e-9:
            raise ValueError("expected shares of no less than 0 that are 1 or less together")


@dataclass(slots=True)
class Berth:
    """Nodes [first, last) that hold one job after another."""

    kind: Kind
    first: int
    last: int


@dataclass(slots=True)
class PlantJob:
    """A drawn job; `first`..`last` are its nodes. Work is in GPU-seconds at the highest clock."""

    name: str
    kind: Kind
    first: int
    last: int
    gpus: int
    goal_gpu_s: float
    activity: tuple[float, float, float]
    dip: tuple[float, float, float]
    period_s: float
    phase_s: float
    dip_s: float
    interval_s: float
    save_s: float
    restart_s: float
    own_interval_s: float = 0.0  # before any advice

    def __post_init__(self) -> None:
        self.own_interval_s = self.own_interval_s or self.interval_s

    def again(self, first: int, last: int, gpus: int) -> PlantJob:
        """Return the same job on other nodes after a failure; each attempt has its own name."""
        name, _, attempt = self.name.partition(".")
        again = replace(self, name=f"{name}.{int(attempt or 0) + 1}", interval_s=self.own_interval_s)
        again.first, again.last, again.gpus = first, last, gpus
        return again

    def started(self, site: Site) -> JobStarted:
        """Return the event that reports the start."""
        training = self.kind == "training"
        return JobStarted(
            job=self.name,
            nodes=tuple(site.name("node", i) for i in range(self.first, self.last)),
            kind=self.kind,
            coupling="synchronous" if training else "independent",
            priority=10 if self.kind == "inference" else 0,
            tenant="team-" + self.name.partition(".")[0][-1],
            checkpoint_interval_s=self.interval_s if training else 0.0,
            checkpoint_save_s=self.save_s if training else 0.0,
            checkpoint_restart_s=self.restart_s if training else 0.0,
        )


def berths_of(nodes: NDArray[np.intp], mix: Mix, rng: np.random.Generator) -> list[Berth]:
    """Return berths over the nodes with GPUs (ascending); none for a constant mix.

    A berth never spans a gap between nodes, such as a rack of switches leaves none of.
    """
    if mix.constant_pu is not None or not len(nodes):
        return []
    n, at, found = len(nodes), 0, []
    shares: tuple[tuple[Kind, float], ...] = (
        ("training", mix.training_pu),
        ("inference", mix.inference_pu),
        ("batch", mix.batch_pu),
    )
    total = 0.0
    for kind, share in shares:
        total += share
        size = min(n, round(n * total)) - at
        count = min(max(size // NODES_PER_BERTH[kind], 1), BERTHS_MAX[kind]) if size else 0
        weight = rng.lognormal(0.0, 0.6, count) if kind == "training" else np.ones(count)
        cuts = at + np.round(np.cumsum(weight) / weight.sum() * size).astype(int) if count else []
        for cut in cuts:
            for run in np.split(nodes[at:cut], np.flatnonzero(np.diff(nodes[at:cut]) > 1) + 1):
                if len(run):
                    found.append(Berth(kind, int(run[0]), int(run[-1]) + 1))
            at = int(cut)
    return found


def job_of(
    berth: Berth,
    number: int,
    nodes: tuple[int, int],
    gpus: int,
    mix: Mix,
    rng: np.random.Generator,
) -> PlantJob:
    """Return a job of the berth's kind on these nodes."""
    training = berth.kind == "training"
    low_h, high_h = mix.job_hours
    hours = float(np.exp(rng.uniform(np.log(low_h), np.log(high_h))))
    period_s = float(np.exp(rng.uniform(*np.log(mix.swing_period_s))))
    sm, tensor, dram = (float(rng.uniform(*x)) for x in ACTIVITY[berth.kind])
    dip = tuple(1.0 - mix.swing_pu * (1.0 - float(rng.uniform(*x))) for x in DIP_PU)
    return PlantJob(
        name=f"{berth.kind}-{number:05d}",
        kind=berth.kind,
        first=nodes[0],
        last=nodes[1],
        gpus=gpus,
        goal_gpu_s=np.inf if berth.kind == "inference" else gpus * hours * 3600.0,
        activity=(sm, tensor, dram),
        dip=(dip[0], dip[1], dip[2]),
        period_s=period_s,
        phase_s=float(rng.uniform(0.0, period_s)),
        # No dip takes more than a third of its period
        dip_s=min(float(rng.uniform(*mix.dip_s)), period_s / 3.0) if training else 0.0,
        interval_s=float(rng.uniform(*mix.checkpoint_interval_s)),
        save_s=float(rng.uniform(*mix.checkpoint_save_s)),
        restart_s=float(rng.uniform(*mix.restart_s)),
    )


def longest_run(healthy: NDArray[np.bool_]) -> tuple[int, int]:
    """Return [first, last) of the longest run of True, the first of equals; (0, 0) for none."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], healthy, [False]))))
    if not len(edges):
        return 0, 0
    runs = edges.reshape(-1, 2)
    best = int(np.argmax(runs[:, 1] - runs[:, 0]))
    return int(runs[best, 0]), int(runs[best, 1])
