"""View of a policy on the made-up fleet: a View on a real site of 1,024 nodes, without telemetry.

Jobs, verdicts, failures, service and forecasts only; of loads and temperatures as much as who works says.
What forecasts and lemons rest on is what happened so far, by the same code as in the daemon; the truth of
the fleet is nowhere in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.failure import FailureHistory, SelfExciting, baseline, failure_history, probability, shock_rate
from twin.catalogue import F32, F64, I32, I64, NS, U8, Bool, find_signal
from twin.config import spec_of
from twin.contracts import (
    DEGRADED,
    FAILED,
    HEALTHY,
    PAIRED,
    PARTS,
    UNTESTED,
    FailureLog,
    Fault,
    Forecast,
    Health,
    LoadTarget,
    NodeFeatures,
    Service,
    action,
    gamma_factors,
)
from twin.health import LemonCounts, score
from twin.site import Envelope, Limit, Site, build_site
from twin.telemetry import GOOD, MISSING, JobSlots

START_NS = 1_700_000_000 * NS
DAY_NS = 86_400 * NS
SPANS_S = (3600.0, 86_400.0, 7 * 86_400.0, 30 * 86_400.0)
FIT_EVERY_S, LOOK_EVERY_S, LEMON_EVERY_S = 7 * 86_400.0, 3600.0, 6 * 3600.0  # source: estimate
LEMON_DAYS = 28
BUSY_W, IDLE_W = 8000.0, 1900.0  # of a node. source: estimate; the idle one as in the profile
RECURS = 8.0  # source: twin.health.recurring, from here on it raises an alarm
PROFILE = "hgx-h100"


def quarter_site(halls: int = 4, racks: int = 32) -> Site:
    """Halls of racks of eight nodes of eight GPUs; the last rack of each stands by; CDUs, feeds of eight."""
    made = [_hall(f"h{h + 1}", racks, [{"name": f"r{racks}", "profile": PROFILE, "nodes": 8, "spare": True}])
            for h in range(halls)]  # fmt: skip
    return build_site(spec_of({"site": "quarter", "halls": made}, None, "quarter"), "quarter")


def plain_site(n: int) -> Site:
    """One hall of so many nodes, eight to a rack, none of which stands by."""
    racks, rest = -(-n // 8), (n - 1) % 8 + 1
    made = [_hall("h1", racks, [{"name": f"r{racks}", "profile": PROFILE, "nodes": rest}])]
    return build_site(spec_of({"site": "log", "halls": made}, None, "log"), "log")


def _hall(name: str, racks: int, last: list[dict[str, Any]]) -> dict[str, Any]:
    eights = [(i // 8 + 1, f"r[{i + 1}-{min(i + 8, racks)}]") for i in range(0, racks, 8)]
    full = [{"name": f"r[1-{racks - 1}]", "profile": PROFILE, "nodes": 8}] if racks > 1 else []
    return {
        "name": name, "racks": full + last,
        "cdus": [{"name": f"cdu{i}", "serves": [some]} for i, some in eights],
        "feeders": [{"name": f"{side.lower()}{i}", "side": side, "budget_w": 1_200_000, "serves": [some]}
                    for i, some in eights for side in "AB"],
    }  # fmt: skip


class Rows:
    """Failures so far, as the daemon would have logged them; bounded by what a quarter has."""

    def __init__(self) -> None:
        self.node: list[int] = []
        self.start_ns: list[int] = []
        self.end_ns: list[int] = []
        self.shared: list[bool] = []
        self.open: dict[int, int] = {}
        self._log: FailureLog | None = None

    def begin(self, node: int, now_ns: int, shared: bool = False) -> None:
        """A node failed."""
        if node not in self.open:
            self.open[node] = len(self.node)
            self.node.append(node)
            self.start_ns.append(now_ns)
            self.end_ns.append(0)
            self.shared.append(shared)
            self._log = None

    def end(self, node: int, now_ns: int) -> None:
        """It is back."""
        row = self.open.pop(node, None)
        if row is not None:
            self.end_ns[row] = now_ns
            self._log = None

    def forget(self, node: int) -> None:
        """Another one stands there: these rows tell nothing of it."""
        for row, owner in enumerate(self.node):
            if owner == node:
                self.shared[row] = True
        self._log = None

    def log(self, begin_ns: int) -> FailureLog:
        """All of it."""
        if self._log is None:
            k = len(self.node)
            self._log = FailureLog(
                np.array(self.node, np.int32), np.array(self.start_ns, np.int64),
                np.array(self.end_ns, np.int64), np.zeros(k, np.uint8), np.array(self.shared, np.bool_),
                ("other",), begin_ns,
            )  # fmt: skip
        return self._log


class FleetView:
    """Implements `twin.contracts.contracts.View`. Whoever runs the fleet writes into its plain columns.

    `level`, `placement` [n]: as they are read back; `told` [n]: nodes of which the health says that they
    should be drained; `down` [n]: nodes that failed and are not back.
    """

    def __init__(self, site: Site, jobs: JobSlots, sure_pu: float = 0.67, begin_ns: int = START_NS,
                 dt_s: float = 600.0) -> None:  # fmt: skip
        n = site.sizes["node"]
        self.site, self.jobs, self.begin_ns, self.now_ns, self.dt_s = site, jobs, begin_ns, begin_ns, dt_s
        self.requests: tuple[Any, ...] = ()
        self.forecasts: Mapping[tuple[str, float], Forecast] = {}
        self.rows, self.sure_pu = Rows(), sure_pu
        self.level: F32 = np.zeros(n, np.float32)
        self.placement: F32 = np.zeros(n, np.float32)
        self.down: Bool = np.zeros(n, np.bool_)
        self.told: Bool = np.zeros(n, np.bool_)
        self.since_ns: I64 = np.zeros(n, np.int64)
        self.lemon: Bool = np.zeros(n, np.bool_)
        self.result = np.full(n, UNTESTED, np.int8)
        self.ns = {k: np.zeros(n, np.int64) for k in ("began", "ended", "repaired", "replaced")}
        self.diagnosed: tuple[Fault, ...] = ()
        self.verdicts: dict[str, Health] = {}
        self._fit: dict[str, np.ndarray] | None = None
        self._fit_faults = 0.0
        self._due_ns = {"fit": begin_ns + round(FIT_EVERY_S * NS), "look": 0, "lemon": 0}

    def refresh(self, now_ns: int, changed: bool = True) -> None:
        """Forecasts and lemons as of now, where they are due: after a failure or return, else by the hour."""
        self.now_ns = now_ns
        n = self.site.sizes["node"]
        if not changed and now_ns < self._due_ns["look"]:
            return
        self._due_ns["look"] = now_ns + round(LOOK_EVERY_S * NS)
        past = failure_history(self.rows.log(self.begin_ns), n, now_ns)
        if now_ns >= self._due_ns["fit"]:
            self._due_ns["fit"] = now_ns + round(FIT_EVERY_S * NS)
            self._fit, self._fit_faults = SelfExciting().fit(past.own, past.now_d), float(past.own.k)
        if now_ns >= self._due_ns["lemon"]:
            self._due_ns["lemon"] = now_ns + round(LEMON_EVERY_S * NS)
            self._judge_lemons(past)
        spans_d = tuple(s / 86_400.0 for s in SPANS_S)
        said = baseline(past, spans_d, None if self._fit is None else self._fit["theta"], self._fit_faults)
        low, high = gamma_factors(said.shape)
        shock, forecasts = shock_rate(past), {}
        for i, span_s in enumerate(SPANS_S):
            three = [
                np.where(past.down, np.nan, probability(said.hazard[i] * x + shock * spans_d[i]))
                for x in (np.ones(n), low, high)
            ]
            mean, lo, hi = (x.astype(np.float32) for x in three)
            forecasts["node.failure_pu", span_s] = Forecast(
                "node.failure_pu", span_s, mean, lo, hi, "fleet@1"
            )
        self.forecasts = forecasts

    def _judge_lemons(self, past: FailureHistory) -> None:
        """As the daemon judges them, by what failed within 28 days."""
        own, day = past.own, past.now_d
        lately = own.start_d > day - LEMON_DAYS
        count = np.bincount(own.node[lately], minlength=own.n).astype(np.int64)
        watched = np.full(own.n, min(day, float(LEMON_DAYS)))
        begun = max(day - LEMON_DAYS, 0.0)
        out = np.clip(np.minimum(own.end_d, day) - np.maximum(own.start_d, begun), 0.0, None)
        days = np.maximum(watched - own.per_node(out), 0.0)
        none = np.zeros(own.n, np.int64)
        self.lemon = score(LemonCounts(count, count, days, none, none)).lemon

    def value(self, key: str) -> F32:
        """Levels of service, heat that nobody needs to fear, and power by who works; the rest is unknown."""
        busy = self.jobs.job_of_node >= 0
        power_w = np.where(busy, BUSY_W, IDLE_W)
        if key == "node.service_level_state":
            return self.level
        if key == "node.placement_state":
            return self.placement
        if key == "node.power_w":
            return power_w.astype(np.float32)
        racks_w = np.bincount(self.site.rack_of_node, power_w, self.site.sizes["rack"])
        if key == "rack.power_w":
            return racks_w.astype(np.float32)
        if key == "feeder.power_w":
            _, below = self.site.below_feeder()
            return (0.5 * below.sums(racks_w.astype(np.float64))).astype(np.float32)
        if key == "gpu.temp_c":
            return np.where(busy, 60.0, 35.0)[self.site.node_of_gpu].astype(np.float32)
        signal = find_signal(key)
        assert signal is not None, key
        return np.full(self.site.sizes[signal.table], np.nan, np.float32)

    believed = worst = value  # all is fresh and true

    def quality(self, key: str) -> U8:
        """Good where something is known."""
        return np.where(np.isnan(self.value(key)), MISSING, GOOD).astype(np.uint8)

    def age_s(self, key: str) -> F64:
        """None has any age, or was never heard."""
        return np.where(np.isnan(self.value(key)), np.inf, 0.0)

    def total(self, key: str) -> I64:
        """Counters are not told."""
        return np.zeros(len(self.value(key)), np.int64)

    def envelope(self, control: str) -> Envelope:
        """Of the site."""
        return self.site.envelopes[control]

    def limit(self, key: str) -> Limit | None:
        """Of the site."""
        return self.site.limits.get(key)

    def beyond(self, key: str) -> I32:
        """Nothing is too hot."""
        return np.zeros(0, np.int32)

    def commanded(self, control: str) -> F64:
        """Leases are not kept here: the read-back says all."""
        table = control.partition(".")[0]
        return np.full(self.site.sizes[table], np.nan)

    def targets(self, request: Any) -> I32:
        """Nobody asks for anything."""
        return np.zeros(0, np.int32)

    def readback(self, control: str) -> F64:
        """The level of service and the order of nodes; nothing else is read back."""
        if control in ("node.service_level", "node.placement"):
            return self.value(f"{control}_state").astype(np.float64)
        return self.commanded(control)

    def series(self, key: str) -> tuple[I64, F32] | None:
        """No history."""
        return None

    def budget_w(self) -> F64:
        """Of the site's file."""
        return self.site.budget_w

    def load_targets(self) -> tuple[LoadTarget, ...]:
        return ()

    def outlook(self, quantity: str, at_ns: int) -> F64:
        """Nothing was told ahead."""
        return np.full(self.site.sizes[quantity.partition(".")[0]], np.nan)

    def maintenance(self, table: str) -> Bool | None:
        """Nowhere."""
        return None

    def vacant(self, table: str) -> Bool | None:
        """Every device is where it was."""
        return None

    def protected_nodes(self) -> Bool:
        """Of jobs of unknown kind; here none."""
        return self.jobs.protected_nodes()

    def residual(self, name: str) -> None:
        """Nothing is compared."""
        return

    def faults(self) -> tuple[Fault, ...]:
        """Return the faults that were put here."""
        return self.diagnosed

    def health(self, part: str) -> Health:
        """Nodes that are down have failed, those that are told of should be drained, all else is well."""
        if part in self.verdicts:
            return self.verdicts[part]
        n = self.site.sizes[PARTS[part]] * (2 if part in PAIRED else 1)
        level, act = np.full(n, HEALTHY, np.uint8), np.zeros(n, np.uint8)
        since, sure = np.zeros(n, np.int64), np.ones(n, np.float32)
        if part == "node":
            level[self.told], level[self.down] = DEGRADED, FAILED
            act[self.told], act[self.down] = action("drain"), action("run_diagnostics")
            since = np.where(self.told | self.down, self.since_ns, since)
            sure[self.told & ~self.down] = self.sure_pu
        return Health(part, level, since, act, sure, np.zeros(n, np.uint8))

    def node_features(self) -> NodeFeatures:
        """Lemons, and nodes with recurring trouble."""
        recurs = np.where(self.told, RECURS, 0.0)
        values = np.stack([self.lemon.astype(np.float64), recurs], axis=1).astype(np.float32)
        return NodeFeatures(("lemon", "recurs"), values)

    def failures(self) -> FailureLog:
        """So far."""
        return self.rows.log(self.begin_ns)

    def service(self) -> Service:
        """Tests, repairs and exchanges so far."""
        return Service(self.result, **{f"{k}_ns": v for k, v in self.ns.items()})
