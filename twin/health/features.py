"""Failure features: numbers of each node that may predict a failure.

A node's GPUs and links are folded into the worst or the sum of them. NaN = unknown, which may itself predict:
a GPU that falls off the bus is first of all silent. A signal that was never reported costs nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.catalogue import F32, F64, I64, NS, Bool
from twin.contracts import BY_FACILITY, BY_ITSELF, UNKNOWN, WATCH, FailureLog, NodeFeatures, is_failure
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.health.fault_codes import CLASSES
from twin.health.lemons import SIGNALS
from twin.health.rates import Rates
from twin.health.recurring import STREAMS, Recurring
from twin.health.rules import DeviceRecords
from twin.health.thermal_history import ThermalHistory
from twin.health.verdicts import Verdicts
from twin.site import Site

COUNTERS = (
    "gpu.ecc_sbe_count", "gpu.ecc_dbe_count", "gpu.row_remap_count", "gpu.pcie_replay_count",
    "gpu.nvlink_error_count", "gpu.nvlink_replay_count", "gpu.nvlink_recovery_count",
)  # fmt: skip
THROTTLED = ("gpu.throttle_thermal_ns", "gpu.throttle_power_ns")
STATES = ("gpu.row_remap_pending_state", "gpu.row_remap_failed_state", "gpu.recovery_action_state",
          "gpu.health_state")  # fmt: skip
SPANS_S = (600.0, 86_400.0, 2_419_200.0)
HALF_LIVES_D = (7.0, 30.0)
# Of the ratio of a place's failures to the fleet's: the terms that `models.lives.frailty` assumes
PLACE_SHAPE, PLACE_HALF_LIFE_D = 10.0, 90.0
LEAST_COUNT = 0.01  # of a fading sum; less is nothing
DAY_NS = 86_400 * NS
HOUR_NS = 3600 * NS


def _short(key: str) -> str:
    return key.partition(".")[2].removesuffix("_count").removesuffix("_state").removesuffix("_ns")


NAMES = (
    "level", "action", "gpu_level", "gpu_action", "psu_level", "link_level", "throttled_own",
    "throttled_by_facility", "gpu_open_action", "node_open_action", "node_faults_86400s",
    *(f"gpu_faults_{span_s:g}s" for span_s in SPANS_S),
    *(f"{_short(key)}_{when}" for key in COUNTERS for when in ("recent", "daily")),
    *(f"{_short(key)}_pu" for key in THROTTLED), "reboots_recent", "reboots_daily",
    *(_short(key) for key in STATES), "gpu_gap_pu", "node_gap_pu", "temp_z", "power_z", "clock_deficit_pu",
    "margin_k", "hbm_temp_c", "busy_pu", "has_job", "links_down", "link_errors_daily", "psu_unlike_pu",
    "lemon", *(f"lemon_{name}" for name in SIGNALS), "failed_7d", "failed_30d", "since_failure_d",
    "since_return_d", "slot", "rack_on_cdu", "rack_failed_ratio", "slot_failed_ratio", "cdu_failed_ratio",
    "age_d", "youngest_gpu_d", "temp_day_c", "thermal_cycles",
    *(f"faults_{name}" for name in CLASSES), "recurs",
    *(f"recurs_{s.key.replace('.', '_').removesuffix('_count')}" for s in STREAMS),
)  # fmt: skip

# At least one of these is known for any node that reports
TELEMETRY = ("gpu_gap_pu", "node_gap_pu", "busy_pu", "margin_k", "hbm_temp_c", "temp_z")
# A node is quiet while none of these is above its value. source: estimate
QUIET = {
    "level": float(UNKNOWN), "gpu_level": float(UNKNOWN), "psu_level": float(UNKNOWN),
    "link_level": float(WATCH), "throttled_own": 0.0, "gpu_open_action": 0.0, "node_open_action": 0.0,
    "node_faults_86400s": 0.0, "gpu_faults_86400s": 0.0, "ecc_sbe_recent": 0.0, "ecc_sbe_daily": 0.5,
    "ecc_dbe_daily": 0.0, "row_remap_daily": 0.0, "pcie_replay_recent": 1.0, "nvlink_error_recent": 1.0,
    "nvlink_replay_recent": 1.0, "nvlink_recovery_daily": 0.0, "throttle_thermal_pu": 0.05,
    "reboots_daily": 0.0, "row_remap_pending": 0.0, "row_remap_failed": 0.0, "recovery_action": 0.0,
    "health": 0.0, "gpu_gap_pu": 0.05, "node_gap_pu": 0.05, "temp_z": 4.0, "clock_deficit_pu": 0.05,
    "links_down": 0.0, "recurs": 2.0,
}  # fmt: skip


def unusual(features: NodeFeatures) -> Bool:
    """Return the nodes with any unusual feature [n_node]."""
    out = np.zeros(len(features.values), np.bool_)
    for column, name in enumerate(features.names):
        limit = QUIET.get(name)
        if limit is not None:
            out |= features.values[:, column] > limit  # False for NaN
    return out


def node_features(
    now: HealthContext, records: DeviceRecords, verdicts: Verdicts, failures: FailureLog
) -> NodeFeatures:
    """Return the features of all nodes now, by NAMES [n_node, n_feature]."""
    n = now.n("node")
    if not n:
        return NodeFeatures(NAMES, np.zeros((0, len(NAMES)), np.float32))
    columns = _Columns(NAMES, n)
    fold = _Fold(now.site)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        _judged(columns, fold, now, verdicts)
        _reported(columns, fold, records.book)
        _add_counters(columns, fold, records.rates)
        _measured(columns, fold, now)
        _links(columns, now, records.rates)
        columns.put("lemon", records.lemons.is_lemon())
        for name, signal in zip(SIGNALS, records.lemons.signals().T, strict=True):
            columns.put(f"lemon_{name}", signal)
        _past(columns, now, failures)
    if records.recurring is not None:
        _recurring(columns, records.recurring)
    if records.thermal is not None:
        _thermal(columns, fold, records.thermal, now.now_ns)
    _placed(columns, now, failures)
    columns.put("age_d", (now.now_ns - records.lemons.since_ns) / DAY_NS)
    return NodeFeatures(NAMES, columns.finished().T)


class _Columns:
    """Columns by name; kept column by column, so that one is written in a piece."""

    def __init__(self, names: tuple[str, ...], n: int) -> None:
        self.row = {name: i for i, name in enumerate(names)}
        self.values: F32 = np.empty((len(names), n), np.float32)
        self._missing = set(range(len(names)))

    def finished(self) -> F32:
        """Return all columns [n_name, n]; columns without a value are unknown."""
        self.values[sorted(self._missing)] = np.nan
        return self.values

    def column(self, name: str) -> F32:
        """Return a column to be written in full [n]."""
        self._missing.discard(self.row[name])
        column: F32 = self.values[self.row[name]]
        return column

    def put(self, name: str, values: Any) -> None:
        np.copyto(self.column(name), values, casting="unsafe")

    def put_log(self, name: str, values: Any) -> None:
        """Write log(1 + x); zeros, which most values are, need no logarithm."""
        row = self.column(name)
        np.copyto(row, values, casting="unsafe")
        some = (row > 0).nonzero()[0]
        if len(some):
            row[some] = np.log1p(row[some])


class _Fold:
    """Reduces a column of GPUs [n_gpu] to nodes [n_node]; NaN where no GPU has a value."""

    def __init__(self, site: Site) -> None:
        self.node_of_gpu, self.n = site.node_of_gpu, site.sizes["node"]
        size = np.diff(site.gpu_start_of_node)
        self.size = size
        self.nothing: F32 = np.where(size > 0, np.float32(0.0), np.float32(np.nan))
        self.filled = np.flatnonzero(size)
        self.start = site.gpu_start_of_node[:-1][self.filled]
        alike = len(size) and int(size[0]) > 0 and bool((size == size[0]).all())
        self.width = int(size[0]) if alike else 0

    def _over(self, how: np.ufunc, values: Any, none: float) -> Any:
        if self.width:
            grid = values.reshape(self.n, self.width)
            out = grid[:, 0].copy()
            for i in range(1, self.width):
                how(out, grid[:, i], out=out)
            return out
        out = np.full(self.n, none, values.dtype if values.dtype.kind == "f" else np.float32)
        if len(self.filled):
            out[self.filled] = how.reduceat(values[: len(self.node_of_gpu)], self.start)
        return out

    def most(self, values: F32 | F64) -> Any:
        """Return the largest known value."""
        return self._over(np.fmax, values, np.nan)

    def least(self, values: F32 | F64) -> Any:
        """Return the smallest known value."""
        return self._over(np.fmin, values, np.nan)

    def grid_sum(self, values: F32) -> F64:
        """Return the sum where all nodes have as many GPUs."""
        grid = values.reshape(self.n, self.width)
        out = grid[:, 0].astype(np.float64)
        for i in range(1, self.width):
            out += grid[:, i]
        return out

    def sum(self, values: Any) -> Any:
        """Return the sum; adds the few nonzero values one by one."""
        some = values.nonzero()[0]
        if 8 * len(some) < len(values):
            return np.bincount(self.node_of_gpu[some], values[some].astype(np.float64), self.n)
        if self.width:
            return self._over(np.add, values.astype(np.float64), 0.0)
        return np.bincount(self.node_of_gpu, values.astype(np.float64), self.n)

    def none(self, reporting: Bool) -> F32:
        """Return zero where any GPU reports, NaN elsewhere."""
        if reporting.all():
            return self.nothing.copy()
        some = np.bincount(self.node_of_gpu, reporting, self.n)
        return np.where(some > 0, np.float32(0.0), np.float32(np.nan))

    def worst(self, values: Any) -> Any:
        """Return the largest of whole numbers >= 0, mostly 0; NaN for a node without GPUs."""
        some = np.flatnonzero(values)
        out = self.nothing.copy()
        if 8 * len(some) < len(values):
            np.maximum.at(out, self.node_of_gpu[some], values[some].astype(np.float32))
            return out
        return self.most(values.astype(np.float32))


def _judged(columns: _Columns, fold: _Fold, now: HealthContext, verdicts: Verdicts) -> None:
    node, gpu = verdicts.health("node"), verdicts.health("gpu")
    columns.put("level", node.level)
    columns.put("action", node.action)
    columns.put("gpu_level", fold.worst(gpu.level))
    columns.put("gpu_action", fold.worst(gpu.action))
    columns.put("psu_level", verdicts.health("psu").level.reshape(-1, 2).max(axis=1))
    columns.put("throttled_own", fold.sum(gpu.lowered == BY_ITSELF))
    columns.put("throttled_by_facility", fold.sum(gpu.lowered == BY_FACILITY))
    level = verdicts.health("link").level
    if len(level):
        worst = np.full(now.n("node"), np.nan, np.float32)
        known = now.site.node_of_link >= 0
        np.fmax.at(worst, now.site.node_of_link[known], level[known].astype(np.float32))
        columns.put("link_level", worst)


def _reported(columns: _Columns, fold: _Fold, book: FaultBook) -> None:
    columns.put("gpu_open_action", fold.worst(book.open_action("gpu")))
    columns.put("node_open_action", book.open_action("node"))
    columns.put_log("node_faults_86400s", book.within("node", 86_400.0))
    for span_s in SPANS_S:
        found = book.within("gpu", span_s)
        columns.put_log(f"gpu_faults_{span_s:g}s", fold.sum(found))
    some = found.nonzero()[0]  # of the longest span: of the others there is no class either
    if not len(some):
        for name in CLASSES:
            columns.put(f"faults_{name}", 0.0)
        return
    classes, by_class = book.by_class()
    if fold.width and 8 * len(some) >= len(found):  # of a storm
        mask = found > 0
        for name, counts in zip(classes, by_class, strict=True):  # class by class, as a row fits the cache
            known = counts.any()
            columns.put(f"faults_{name}", fold.grid_sum(counts * mask) if known else 0.0)
        return
    node = fold.node_of_gpu[some]
    for name, counts in zip(classes, by_class, strict=True):
        mine = counts[some]
        columns.put(f"faults_{name}", np.bincount(node, mine, fold.n) if mine.any() else 0.0)


def _add_counters(columns: _Columns, fold: _Fold, rates: Rates) -> None:
    for key in COUNTERS:
        for when in ("recent", "daily"):
            found = _fastest_growth(fold, rates, key, when == "recent")
            if found is not None:
                columns.put_log(f"{_short(key)}_{when}", found)
    for key in THROTTLED:
        found = _fastest_growth(fold, rates, key, True)
        if found is not None:
            columns.put(f"{_short(key)}_pu", found / HOUR_NS)
    if "node.reboot_count" in rates.counters:
        columns.put_log("reboots_recent", rates.recent_per_h("node.reboot_count"))
        columns.put_log("reboots_daily", 24.0 * rates.daily_per_h("node.reboot_count"))
    columns.put("gpu_gap_pu", fold.most(rates.gap_pu("gpu")))
    columns.put("node_gap_pu", rates.gap_pu("node"))


def _fastest_growth(fold: _Fold, rates: Rates, key: str, recent: bool) -> Any:
    """Return the largest growth per hour among the GPUs of each node [n_node]; None if no GPU reports."""
    counter = rates.counters.get(key)
    if counter is None or not (counter.whole or counter.heard.any()):
        return None
    some = rates.above(key, LEAST_COUNT, recent)
    per_h = rates.recent_per_h if recent else rates.daily_per_h
    if 8 * len(some) >= len(counter.heard):
        return fold.most(per_h(key))
    out = fold.nothing.copy() if counter.whole else fold.none(counter.heard)
    if len(some):
        np.fmax.at(out, fold.node_of_gpu[some], per_h(key)[some])
    return out


def _measured(columns: _Columns, fold: _Fold, now: HealthContext) -> None:
    for key in STATES:
        if now.ever_reported(key):
            columns.put(_short(key), fold.most(now.good(key)))
    for name, which, how in (("temp_z", "gpu.temp_c", fold.most), ("power_z", "gpu.power_w", fold.least)):
        residual = now.residual(which)
        if residual is not None and now.ever_reported(which):
            columns.put(name, how((residual.measured - residual.expected) / residual.sigma))
    clock = now.residual("gpu.sm_clock_hz")
    if clock is not None and now.ever_reported("gpu.sm_clock_hz"):
        columns.put("clock_deficit_pu", fold.most(1.0 - clock.measured / clock.expected))
    if now.ever_reported("gpu.thermal_margin_k"):
        columns.put("margin_k", fold.least(now.good("gpu.thermal_margin_k")))
    if now.ever_reported("gpu.hbm_temp_c"):
        columns.put("hbm_temp_c", fold.most(now.good("gpu.hbm_temp_c")))
    if now.ever_reported("gpu.util_pu"):
        columns.put("busy_pu", fold.most(now.good("gpu.util_pu")))
    elif now.ever_reported("gpu.power_w") and now.ever_reported("gpu.power_limit_w"):
        columns.put("busy_pu", fold.most(now.good("gpu.power_w") / now.good("gpu.power_limit_w")))
    if now.jobs.known:
        columns.put("has_job", now.jobs.job_of_node >= 0)
    if now.ever_reported("node.psu1_power_w") and now.ever_reported("node.psu2_power_w"):
        one, two = now.good("node.psu1_power_w"), now.good("node.psu2_power_w")
        columns.put("psu_unlike_pu", np.abs(one - two) / (one + two))


def _links(columns: _Columns, now: HealthContext, rates: Rates) -> None:
    site = now.site
    known = np.flatnonzero(site.node_of_link >= 0)
    if not len(known):
        return
    node = site.node_of_link[known]
    if now.ever_reported("link.up_state"):
        states = now.good("link.up_state")[known]
        down = np.bincount(node, states > 0.5, now.n("node"))
        reporting = np.bincount(node, np.isfinite(states), now.n("node"))
        columns.put("links_down", np.where(reporting > 0, down, np.nan))
    if now.ever_reported("link.error_count"):
        worst = np.full(now.n("node"), np.nan, np.float32)
        np.fmax.at(worst, node, rates.daily_per_h("link.error_count")[known])
        columns.put_log("link_errors_daily", worst)


def _recurring(columns: _Columns, recurring: Recurring) -> None:
    """Write the evidence that each kind of trouble recurs, of the device that has most of it."""
    columns.put("recurs", recurring.score())
    for s in STREAMS:
        row = columns.column(f"recurs_{s.key.replace('.', '_').removesuffix('_count')}")
        row[:] = 0.0
        index, score = recurring.of(s.key)
        if len(index):
            np.maximum.at(row, recurring.node_of(s.table, index), score.astype(np.float32))


def _past(columns: _Columns, now: HealthContext, log: FailureLog) -> None:
    """Write the features of a node's own failures: those with a cause in common are left out."""
    own = ~log.shared & is_failure(log)
    node, n = log.node[own], now.n("node")
    age_d = np.maximum(now.now_ns - log.start_ns[own], 0) / DAY_NS
    for half_life_d in HALF_LIVES_D:
        columns.put(f"failed_{half_life_d:g}d", np.bincount(node, 0.5 ** (age_d / half_life_d), n))
    since = np.full((2, n), np.nan)
    np.fmin.at(since[0], node, age_d)
    ended = log.end_ns[own] > 0
    np.fmin.at(since[1], node[ended], np.maximum(now.now_ns - log.end_ns[own][ended], 0) / DAY_NS)
    columns.put("since_failure_d", since[0])
    columns.put("since_return_d", since[1])


def _thermal(columns: _Columns, fold: _Fold, thermal: ThermalHistory, now_ns: int) -> None:
    columns.put("youngest_gpu_d", fold.least(thermal.age_d(now_ns)))
    columns.put("temp_day_c", fold.most(thermal.mean_c))
    columns.put_log("thermal_cycles", fold.most(thermal.cycles))


def _places(site: Site) -> tuple[I64, F32]:
    """Return the slot of each node in its rack, from below if known, and the place of its rack on the CDU,
    NaN if unknown."""
    rack, n = site.rack_of_node, np.diff(site.node_start_of_rack)
    slot = np.arange(len(rack)) - site.node_start_of_rack[rack]
    slot = np.where(site.upward_of_rack[rack] < 0, n[rack] - 1 - slot, slot)
    on_cdu = np.full(len(n), np.nan, np.float32)
    for cdu in np.unique(site.cdu_of_rack[site.cdu_of_rack >= 0]).tolist():
        mine = np.flatnonzero(site.cdu_of_rack == cdu)
        on_cdu[mine] = np.arange(len(mine))
    return slot.astype(np.int64), on_cdu[rack]


def _placed(columns: _Columns, now: HealthContext, log: FailureLog) -> None:
    """Write where a node sits, and how often others of its rack, slot and CDU failed beside the fleet.

    The ratio is (a + N) / (a + M) of N faded failures where the fleet's rate expects M, own ones left out.
    """
    site = now.site
    slot, on_cdu = site.derived("health places", lambda: _places(site))
    columns.put("slot", slot)
    columns.put("rack_on_cdu", on_cdu)
    own = ~log.shared & is_failure(log)
    age_d = np.maximum(now.now_ns - log.start_ns[own], 0) / DAY_NS
    failed = np.bincount(log.node[own], 0.5 ** (age_d / PLACE_HALF_LIFE_D), len(slot))
    rack = site.rack_of_node
    for name, group in (("rack", rack), ("slot", slot), ("cdu", site.cdu_of_rack[rack])):
        # Nodes without a CDU form a group too, but their comparison has no meaning
        others = np.bincount(group + 1)[group + 1] - 1
        came = np.bincount(group + 1, failed)[group + 1] - failed
        ratio = (PLACE_SHAPE + came) / (PLACE_SHAPE + others * failed.mean())
        columns.put(f"{name}_failed_ratio", np.where(group >= 0, ratio, np.nan))
