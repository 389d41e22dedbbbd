"""power_curve: learns the share of a job's time that depends on the clock, while caps move.

The time per unit of progress is a (1 + c x), where x = 1/clock - 1 follows from what the caps of the job's
GPUs leave of the power that they want (domain.md B). Each reading of progress is set against the mean x since
the one before; c has a distribution on a grid, and a mean and a band are stated where that says something:
not before caps moved, and not of a job that goes at its own whim. A job that begins in a slot begins afresh.
The power at which its work takes the least energy follows from the same readings (`energy_minimum`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from models.energy_minimum import (
    GRID,
    N_BIN,
    SCATTER_PU,
    SHAPE,
    STATIC_MOST_PU,
    WORTH,
    bin_of,
    cover_powers,
    fits_of,
    least_energy_pu,
)
from twin.catalogue import F64, I32, I64, NS, Bool, ContractError, digest
from twin.contracts import Forecast, View
from twin.physics import CLOCK_MIN_PU, EXPONENT, clock_of_share_pu
from twin.telemetry import GOOD, Columns, ColumnSpec

KEY, LEAST_KEY = "job.compute_pu", "job.least_energy_w"
PROGRESS, POWER, CONTROL = "job.progress_per_s", "gpu.power_w", "gpu.power_cap_w"
AT_CAP_PU = 0.93  # of its cap: a GPU that draws more may want more. source: estimate
AT_MOST_PU = 0.999  # of the highest cap; a device may round
CLEAR_PU = 1.05  # of what a GPU wants: a cap beyond does not touch it. source: estimate
STATIC_PU = 0.28  # of the highest cap, where a profile does not say: the median of measured sweeps of P100
WANTS_S = 600.0  # time constant of what a GPU wants, while no cap touches it. source: estimate
FORGET_S = 6 * 3600.0  # time constant of what was learned: jobs go through phases. source: estimate
MOVE = 0.02  # of x: a cap has moved. Readings between two moves count once. source: estimate
MOST_SPREAD = 0.1  # of x within one reading, which is then a mixture. source: estimate
LEAST_REPORTING_PU = 0.5  # of a job's GPUs
GROSS = 4.0  # times the usual scatter: a save or a stop, not a clock; left out. source: estimate
MOST_ODD = 4.0  # of these in a row: the job goes otherwise now, and all begins afresh. source: estimate
NARROW_PU = 0.6  # a 90 % band narrower than this says something; knowing nothing it is 0.9 wide
LOW, HIGH = 0.05, 0.95
MOST_SETTLED = 100  # jobs whose least energy is worked out in one call; the others wait. source: estimate
LONGEST_S = 1800.0  # between two readings of progress: beyond, nobody knows what happened. source: estimate
# Sums over readings: of 1, x, y, x x, x y, y y; then of moves; and x at the last reading
N, X, Y, XX, XY, YY, MOVES, LAST_X = range(8)
FIRST = np.array([0.0] * LAST_X + [np.nan])  # the first reading is no move
MEMORY = Columns(
    job={
        "generation": ColumnSpec("i4", -1),
        "started_ns": "i8",
        "read_ns": "i8",
        "looks": "f8",
        "sum_x": "f8",
        "sum_xx": "f8",
        "unit_s": ColumnSpec("f8", np.nan),
        "odd": "f8",
        "sums": ColumnSpec("f8", FIRST, trail=(len(FIRST),)),
        "bins": ColumnSpec("f8", trail=(N_BIN, 3)),  # of `energy_minimum`
        "least_w": ColumnSpec("f8", np.nan, trail=(3,)),  # of least energy: mean, low, high
        "due": "b1",  # least_w does not follow from the newest reading yet
    },
    gpu={"wants_w": ColumnSpec("f8", np.nan), "slot_of": ColumnSpec("i4", -1)},
    scalars={"now_ns": "i8"},
)


class PowerCurve:
    """The share of time that waits for the clock, and the power of a GPU at which work takes least energy.

    Per job slot, with a 90 % band; NaN where not known.
    """

    name: ClassVar[str] = "power_curve"
    period_s: ClassVar[float] = 10.0
    fit_every_s: ClassVar[float] = 0.0

    def __init__(self) -> None:
        self._begin(0, 0)

    def _begin(self, n_job: int, n_gpu: int) -> None:
        self._kept = MEMORY.fresh({"job": n_job, "gpu": n_gpu})
        self._now_ns = 0

    @property
    def _sums(self) -> F64:
        return self._kept["sums"]

    def update(self, view: View) -> None:
        """Take in what GPUs draw under which caps, and progress that was read since."""
        n_job, n_gpu = view.site.sizes["job"], view.site.sizes["gpu"]
        if n_job != len(self._sums) or n_gpu != len(self._kept["wants_w"]):
            self._begin(n_job, n_gpu)
        since_s = (view.now_ns - self._now_ns) / NS if self._now_ns else self.period_s
        self._now_ns = view.now_ns
        if not n_gpu:
            return
        self._meet(view)
        x, known = self._slowed(view, max(since_s, 0.0))
        slots = self._kept
        slots["looks"] += known
        slots["sum_x"] += np.where(known, x, 0.0)
        slots["sum_xx"] += np.where(known, x * x, 0.0)
        fades = np.exp(-max(since_s, 0.0) / FORGET_S)
        self._sums[:, :LAST_X] *= fades
        slots["bins"] *= fades
        self._observe(view)
        self._settle(view)

    def _meet(self, view: View) -> None:
        """Forget slots that are free or have another job, and what GPUs wanted for another one."""
        jobs, slots = view.jobs, self._kept
        other = (jobs.generation != slots["generation"]) | (jobs.started_ns != slots["started_ns"])
        other |= ~jobs.alive
        if other.any():
            for name, spec in MEMORY.columns.items():
                if spec.table == "job":
                    slots[name][other] = spec.fill
            slots["generation"][other] = np.where(jobs.alive, jobs.generation, -1)[other]
            slots["started_ns"][other] = np.where(jobs.alive, jobs.started_ns, 0)[other]
        slot_of = jobs.job_of_node[view.site.node_of_gpu]
        changed = (slot_of != self._kept["slot_of"]) | np.append(other, False)[slot_of]
        self._kept["wants_w"][changed] = np.nan
        self._kept["slot_of"] = slot_of.astype(np.int32)

    def _slowed(self, view: View, since_s: float) -> tuple[F64, Bool]:
        """Return (x = 1/clock - 1 of each job, mask of known ones) [n_job], from the drawn and wanted
        power of its GPUs."""
        site, n_job = view.site, len(self._sums)
        if (self._kept["slot_of"] < 0).all():  # no GPU works for a job
            return np.zeros(n_job), np.zeros(n_job, np.bool_)
        power_w = np.where(view.quality(POWER) == GOOD, view.value(POWER), np.nan).astype(np.float64)
        work = view.maintenance("node")
        if work is not None:
            power_w[work[site.node_of_gpu]] = np.nan
        most_w = view.envelope(CONTROL).high
        cap_w = np.fmin(view.readback(CONTROL), view.commanded(CONTROL))  # some devices report no cap
        # The highest cap is none: what is lost there cannot be won back
        cap_w = np.where(np.isfinite(cap_w) & (cap_w < AT_MOST_PU * most_w), cap_w, np.inf)
        wants = self._kept["wants_w"]
        held = np.isfinite(power_w) & (self._kept["slot_of"] >= 0)
        free = held & (power_w < AT_CAP_PU * cap_w) & ~(cap_w < CLEAR_PU * wants)
        share = 1.0 - np.exp(-since_s / WANTS_S)
        moved = np.where(np.isfinite(wants), wants + share * (power_w - wants), power_w)
        wants = np.where(free, moved, wants)
        wants = np.where(held & (power_w > wants), power_w, wants)  # it wants that much at least
        self._kept["wants_w"] = wants
        static_w = self._static_w(view)
        bound = np.flatnonzero(held & ((power_w >= AT_CAP_PU * cap_w) | (cap_w < wants)))
        dynamic = np.maximum(wants - static_w, 1.0)[bound]
        left = (np.minimum(power_w, cap_w) - static_w)[bound] / dynamic
        clock = np.maximum(clock_of_share_pu(np.clip(left, 0.0, 1.0), EXPONENT), CLOCK_MIN_PU)
        slower = np.zeros(len(power_w))
        slower[bound] = 1.0 / clock - 1.0
        reporting = held & np.isfinite(wants)
        return self._of_jobs(view, slower, reporting, n_job)

    @staticmethod
    def _static_w(view: View) -> F64:
        """Return the power of each GPU without work, W, from its profile [n_gpu]."""
        idle_w = view.site.design.gpu_idle_w[view.site.rack_of_gpu]
        return np.where(np.isfinite(idle_w), idle_w, STATIC_PU * np.nan_to_num(view.envelope(CONTROL).high))

    def _of_jobs(self, view: View, slower: F64, reporting: Bool, n_job: int) -> tuple[F64, Bool]:
        """Return the pace of each job [n_job]: of the slowest GPU of a synchronous job, otherwise the
        mean."""
        has = self._kept["slot_of"] >= 0
        size = np.bincount(self._kept["slot_of"][has], minlength=n_job)
        slot = self._kept["slot_of"][reporting]
        count = np.bincount(slot, minlength=n_job)
        mean = np.bincount(slot, slower[reporting], n_job) / np.maximum(count, 1)
        slowest = np.zeros(n_job)
        np.maximum.at(slowest, slot, slower[reporting])
        known = (count > 0) & (count >= LEAST_REPORTING_PU * size)
        return np.where(view.jobs.synchronous, slowest, mean), known

    def _observe(self, view: View) -> None:
        """Set each new reading of progress against the mean x since the one before."""
        slots = self._kept
        good = view.jobs.alive & (view.quality(PROGRESS) == GOOD)
        age_s = np.where(good, view.age_s(PROGRESS), 0.0)
        read_ns = view.now_ns - np.round(age_s * NS).astype(np.int64)
        new = good & (read_ns > slots["read_ns"] + NS // 2)
        if not new.any():
            return
        since_s = (read_ns - slots["read_ns"]) / NS
        speed = view.value(PROGRESS).astype(np.float64)
        looks = np.maximum(slots["looks"], 1.0)
        x = slots["sum_x"] / looks
        spread = np.sqrt(np.maximum(slots["sum_xx"] / looks - x * x, 0.0))
        whole = (slots["looks"] > 0) & (slots["read_ns"] > 0) & (since_s <= LONGEST_S)
        steady = np.flatnonzero(new & whole & (spread <= MOST_SPREAD) & (speed > 0.0))
        if len(steady):
            self._learn(steady, x[steady], 1.0 / speed[steady])
        slots["read_ns"][new] = read_ns[new]
        for name in ("looks", "sum_x", "sum_xx"):
            slots[name][new] = 0.0

    def _learn(self, at: I64, x: F64, unit_s: F64) -> None:
        """Learn one more reading of the slots `at`: x and the time per unit of progress."""
        slots, sums = self._kept, self._sums[at]
        first = ~np.isfinite(slots["unit_s"][at])
        slots["unit_s"][at[first]] = unit_s[first]  # the measure of all later ones: sums stay about 1
        y = unit_s / slots["unit_s"][at]
        weight, left = _posterior(sums)
        share = weight @ GRID
        scale = _scale(sums, share)
        usual = np.sqrt((WORTH * SCATTER_PU**2 + left) / (WORTH + sums[:, N]))
        off = np.abs(y - scale * (1.0 + share * x))
        sane = first | (off <= GROSS * usual * np.maximum(scale, 1.0) + np.abs(x - _mean_x(sums)))
        odd = np.where(sane, 0.0, slots["odd"][at] + 1.0)
        another = odd >= MOST_ODD
        sums[another] = FIRST
        slots["unit_s"][at[another]] = np.nan
        slots["bins"][at[another]] = 0.0
        slots["least_w"][at[another]] = np.nan
        slots["odd"][at] = np.where(another, 0.0, odd)
        for place, more in ((N, 1.0), (X, x), (Y, y), (XX, x * x), (XY, x * y), (YY, y * y)):
            sums[:, place] += sane * more
        sums[:, MOVES] += sane & (np.abs(x - sums[:, LAST_X]) > MOVE)
        sums[:, LAST_X] = np.where(sane, x, sums[:, LAST_X])
        self._sums[at] = sums
        slots["bins"][at, bin_of(x)] += sane[:, None] * np.column_stack([np.ones(len(x)), x, y])
        slots["due"][at] |= sane

    def _settle(self, view: View) -> None:
        """Recompute the power of least energy of jobs with new readings, at most MOST_SETTLED of them."""
        slots, site = self._kept, view.site
        slots["due"] &= cover_powers(slots["bins"])
        at = _some_of(slots["due"], view.now_ns, MOST_SETTLED)
        if not len(at):
            return
        place = np.full(len(slots["due"]) + 1, -1)
        place[at] = np.arange(len(at))
        of_gpu = place[slots["slot_of"]]
        gpus = np.flatnonzero((of_gpu >= 0) & np.isfinite(slots["wants_w"]))
        of_gpu, beside = of_gpu[gpus], site.beside_gpu_w(gpus)
        count, wants_w, static_w, beside_w = (
            np.bincount(of_gpu, each, len(at))
            for each in (None, slots["wants_w"][gpus], self._static_w(view)[gpus], beside)
        )
        some, total_w = count > 0, np.maximum(wants_w, 1.0)
        least = least_energy_pu(
            slots["bins"][at], np.minimum(static_w / total_w, STATIC_MOST_PU), beside_w / total_w
        )
        mean_w = np.where(some, wants_w / np.maximum(count, 1.0), np.nan)
        slots["least_w"][at] = least * mean_w[:, None]
        slots["due"][at] = False

    def predict(self, view: View) -> list[Forecast]:
        """Return the present state, NaN where nothing was learned."""
        n_job = len(self._sums)
        mean, low, high = (np.full(n_job, np.nan, np.float32) for _ in range(3))
        at = np.flatnonzero(self._sums[:, MOVES] > 0.0)
        if len(at):
            weight, _ = _posterior(self._sums[at])
            below = np.cumsum(weight, axis=1)
            lo = GRID[(below >= LOW).argmax(axis=1)]
            hi = GRID[(below >= HIGH).argmax(axis=1)]
            narrow = hi - lo < NARROW_PU
            centre = np.clip(weight @ GRID, lo, hi)
            for out, column in ((mean, centre), (low, lo), (high, hi)):
                out[at[narrow]] = column[narrow]
        known = int(np.isfinite(mean).sum())
        basis = f"progress of {known} jobs while caps moved" if known else "no job's caps moved enough"
        least = np.where(np.isfinite(mean)[:, None], self._kept["least_w"], np.nan).astype(np.float32)
        by = f"{self.name}@{VERSION}"
        return [
            Forecast(KEY, 0.0, mean, low, high, by, basis),
            Forecast(LEAST_KEY, 0.0, least[:, 0], least[:, 1], least[:, 2], by, basis),
        ]

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        """Return nothing: this model learns while it runs."""
        return {}

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Load nothing. Raises ContractError for any parameters."""
        if parameters:
            raise ContractError(f"{next(iter(parameters))} is not a parameter of {self.name}, which has none")

    def parameters(self) -> dict[str, np.ndarray]:
        """Return no parameters."""
        return {}

    def memory(self) -> dict[str, np.ndarray]:
        """Return the sums of each slot, and the wanted power of each GPU."""
        return {name: array.copy() for name, array in self._kept.items()} | {"now_ns": np.array(self._now_ns)}

    def restore(self, memory: Mapping[str, np.ndarray]) -> None:
        """Take over what `memory` gave. Raises ContractError if it is of another shape."""
        sizes = {"job": len(memory["sums"]), "gpu": len(memory["wants_w"])}
        now_ns = int(np.max(memory["now_ns"]))  # of one element in earlier snapshots
        fresh = MEMORY.fresh(sizes)  # for columns that earlier snapshots do not have
        self._kept = MEMORY.checked({**fresh, **memory, "now_ns": now_ns}, sizes)
        self._now_ns = now_ns

    def remap(self, old_of_new: Mapping[str, I32]) -> None:
        """Move the learned state to the new places; slots keep their jobs."""
        before = {"job": len(self._sums), "gpu": len(self._kept["wants_w"])}
        known = {table: np.where(old_of_new[table] < n, old_of_new[table], -1) for table, n in before.items()}
        self._kept = MEMORY.moved(self._kept, known, {table: len(old) for table, old in known.items()})


def _mean_x(sums: F64) -> F64:
    return np.asarray(sums[:, X] / np.maximum(sums[:, N], 1e-12))


def _some_of(due: Bool, now_ns: int, most: int) -> I64:
    """At most `most` slots that are due, ascending: from another one on at each instant, so that none waits
    for ever."""
    at = np.flatnonzero(due)
    if len(at) > most:
        # By the high bits: the low ones of instants that are ten seconds apart repeat. source: Knuth, The Art
        # of Computer Programming 3, section 6.4
        begin = now_ns // NS * 2_654_435_761 % 2**32 * len(due) >> 32
        at = np.sort(np.roll(at, -int(np.searchsorted(at, begin)))[:most])
    return at


def _scale(sums: F64, share: F64) -> F64:
    """Return the time per unit without a cap, given c [n]."""
    size = sums[:, N] + 2.0 * share * sums[:, X] + share**2 * sums[:, XX]
    return np.asarray((sums[:, Y] + share * sums[:, XY]) / np.maximum(size, 1e-12))


def _posterior(sums: F64) -> tuple[F64, F64]:
    """Return (weights of GRID [n, n_grid], squares left at the best c [n]).

    Readings count as often as caps moved: between two moves they say the same, and what drifts meanwhile is
    no noise that averages out.
    """
    fits, left = fits_of(sums[:, :MOVES], np.minimum(sums[:, N], 1.0 + sums[:, MOVES]))
    weight = np.exp(fits - fits.max(axis=1, keepdims=True))
    weight /= weight.sum(axis=1, keepdims=True)
    return weight, left.min(axis=1)


VERSION = digest([GRID, EXPONENT, SCATTER_PU, FORGET_S, SHAPE])[:12]
