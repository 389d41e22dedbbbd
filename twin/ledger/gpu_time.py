"""GPU time: the class that each GPU is in now, and the nanoseconds of a look by class.

A GPU is in one class at a time, the first of these that holds: repair, failed, unknown, then restart and
checkpoint of its job, throttled, capped, busy, idle; free where no job holds its node. Seconds that a job
reports of a save or a restart, and those that a GPU counts as slowed, are taken out of idle and busy ones
of the same GPUs, so that each GPU-second stays in one class.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I64, NS, TABLES, Bool, Signal
from twin.contracts import FAILED, View
from twin.site import Site
from twin.telemetry import EntityState, State, column

TIME_CLASSES = (
    "free",
    "idle",
    "busy",
    "throttled",
    "capped",
    "checkpoint",
    "restart",
    "failed",
    "repair",
    "unknown",
)
FREE, IDLE, BUSY, THROTTLED, CAPPED, CHECKPOINT, RESTART, FAILED_TIME, REPAIR, UNKNOWN_TIME = range(10)
# States of a GPU without its job: places in the columns of `SeenTime.gpus`
SEEN = (REPAIR, FAILED_TIME, UNKNOWN_TIME, BUSY, IDLE)
ACTIVE_PU = 0.05  # activity from which on a GPU works; source: estimate
OUT_OF_SERVICE, LEAVING = 3.0, 1.0  # of node.service_level_state: drained; cordoned
# Reasons for a lower clock, DCGM field 112: hardware and both thermal slowdowns; power cap, power brake
THERMAL_BITS, POWER_BITS = 0x8 | 0x20 | 0x40, 0x4 | 0x80
LOWERED_W = 1.0  # a limit lower than the highest by more is a cap
GPU = TABLES["gpu"].by_name


class SeenTime(NamedTuple):
    """GPUs of each node as a look sees them: how many are in each class of `SEEN` [n_node, 5], and ns in
    which they were slowed by heat, and by a lowered limit, since the last look [n_node].
    """

    gpus: I64
    throttled_ns: I64
    capped_ns: I64


class ThrottleTime(EntityState):
    """Readings of the GPUs' counters of slowed time at the last look."""

    thermal_ns: I64 = column("gpu", "i8", -1)
    power_ns: I64 = column("gpu", "i8", -1)

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self._site = site

    def unseen(self) -> SeenTime:
        """Return all GPUs in the class unknown, for time without observation."""
        gpus = np.zeros((self._site.sizes["node"], len(SEEN)), np.int64)
        gpus[:, SEEN.index(UNKNOWN_TIME)] = np.diff(self._site.gpu_start_of_node)
        none = np.zeros(len(gpus), np.int64)
        return SeenTime(gpus, none, none)

    def observe(self, state: State, view: View, span_ns: int) -> SeenTime:
        """Return the present classes, and the slowed time in the last `span_ns`."""
        site = self._site
        n_node, node = site.sizes["node"], site.node_of_gpu
        seen = _seen(state, view, site)
        gpus = np.bincount(node * len(SEEN) + seen, minlength=n_node * len(SEEN))
        working = seen == SEEN.index(BUSY)
        bits = state.tables["gpu"].value[GPU["clock_event_bits"].row]
        lowered: Bool | None = None
        out = []
        for column_, signal, mask in (
            (self.thermal_ns, GPU["throttle_thermal_ns"], THERMAL_BITS),
            (self.power_ns, GPU["throttle_power_ns"], POWER_BITS),
        ):
            slowed_ns = _growth(state, signal, column_, bits, mask, span_ns)
            if slowed_ns is None:
                out.append(np.zeros(n_node, np.int64))
                continue
            if mask == POWER_BITS:
                lowered = _lowered(view)
                working = working & lowered
            of_node = np.bincount(node[working], slowed_ns[working], n_node)
            out.append(of_node.astype(np.int64))
        return SeenTime(gpus.reshape(n_node, len(SEEN)).astype(np.int64), out[0], out[1])


def _seen(state: State, view: View, site: Site) -> np.ndarray:
    """Return the place of each GPU in SEEN [n_gpu]."""
    now_ns, table, nodes = state.now_ns, state.tables["gpu"], state.tables["node"]
    active = np.zeros(table.n, np.bool_)
    known = np.zeros(table.n, np.bool_)
    for name in ("sm_active_pu", "util_pu"):
        signal = GPU[name]
        if not table.ever_good(signal.row):
            continue
        current = table.current(signal, now_ns)
        known |= current
        active |= current & (table.value[signal.row] >= ACTIVE_PU)
    out = np.where(active, SEEN.index(BUSY), SEEN.index(IDLE)).astype(np.int64)
    out[~known] = SEEN.index(UNKNOWN_TIME)
    node_signals = TABLES["node"].by_name
    off = nodes.value[node_signals["power_on_state"].row] == 0.0
    failed = (view.health("node").level == FAILED) | off
    level = nodes.value[node_signals["service_level_state"].row]
    away = level >= OUT_OF_SERVICE
    away |= (level >= LEAVING) & (view.jobs.job_of_node < 0)
    gpu_failed = view.health("gpu").level == FAILED
    if failed.any():
        gpu_failed = gpu_failed | failed[site.node_of_gpu]
    out[gpu_failed] = SEEN.index(FAILED_TIME)
    repair: Bool | None = away[site.node_of_gpu] if away.any() else None
    for mask in (view.maintenance("gpu"), view.vacant("gpu")):
        if mask is not None:
            repair = mask if repair is None else repair | mask
    if repair is not None:
        out[repair] = SEEN.index(REPAIR)
    return out


def _growth(state: State, signal: Signal, seen: I64, bits: np.ndarray, mask: int, span_ns: int) -> F64 | None:
    """Return the slowed time since the last look [n_gpu], by the counter, or by the bits without one;
    None: none."""
    table = state.tables["gpu"]
    total, counts = table.total[signal.row], table.raw[signal.row] >= 0
    known = counts & (seen >= 0)
    grown = np.where(known, total - seen, 0) if known.any() else None
    np.copyto(seen, np.where(counts, total, -1))
    if not counts.all() and table.ever_good(GPU["clock_event_bits"].row):
        set_ = (np.nan_to_num(bits).astype(np.int64) & mask) != 0
        of_bits = np.where(set_ & ~counts, span_ns, 0)
        grown = of_bits if grown is None else grown + of_bits
    if grown is None or not grown.any():
        return None
    return np.clip(grown, 0, span_ns).astype(np.float64)


def _lowered(view: View) -> Bool:
    """Return the GPUs with a power limit below its highest value, or under a cap of racktwin [n_gpu]."""
    high_w = view.envelope("gpu.power_cap_w").safe
    limit_w = view.readback("gpu.power_cap_w")
    with np.errstate(invalid="ignore"):
        return np.asarray(
            (limit_w < high_w - LOWERED_W) | np.isfinite(view.commanded("gpu.power_cap_w")), np.bool_
        )


class ReportedSpans(NamedTuple):
    """A job's report of a save or a restart: `began_ns` of the save, `at_ns` of the report."""

    tier: int
    began_ns: int
    at_ns: int
    save_s: float
    restart_s: float


class JobTime(EntityState):
    """Time in saves and restarts that jobs reported, not yet subtracted from their GPU time."""

    owed_ns: I64 = column("job", "i8", trail=(2,))  # per GPU: checkpoint, restart
    generation: np.ndarray = column("job", "i4")
    saved_ns: I64 = column("job", "i8", trail=(2,))  # of the last save that was counted, by tier
    restarted_ns: I64 = column("job", "i8")

    def receive(self, slot: int, generation: int, spans: ReportedSpans) -> None:
        """Count each save and each restart of a job once."""
        if self.generation[slot] != generation:
            self.generation[slot] = generation
            self.owed_ns[slot], self.saved_ns[slot], self.restarted_ns[slot] = 0, 0, 0
        if spans.save_s > 0.0 and spans.began_ns > self.saved_ns[slot, spans.tier]:
            self.saved_ns[slot, spans.tier] = spans.began_ns
            self.owed_ns[slot, 0] += round(spans.save_s * NS)
        if spans.restart_s > 0.0 and spans.at_ns > self.restarted_ns[slot]:
            self.restarted_ns[slot] = spans.at_ns
            self.owed_ns[slot, 1] += round(spans.restart_s * NS)
