"""A site whose health is judged by hand: what tests of rules are built from.

ward = Ward(two_racks())
ward.look({"gpu.temp_c": 60.0}, counts={"gpu.ecc_sbe_count": 0})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.builders import START_NS, site_of
from twin.catalogue import NS, find_signal
from twin.contracts import Evidence, Fault, Residual, Windows
from twin.diagnosis import FAULT_KINDS
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.health.rates import Rates
from twin.health.rules import DeviceRecords
from twin.health.verdicts import Verdicts
from twin.telemetry import (
    Block,
    Event,
    FaultReported,
    Inbox,
    JobSlots,
    MaintenanceBegun,
    MaintenanceEnded,
    State,
)

# Readings of a healthy site
WELL: dict[str, float] = {
    "gpu.temp_c": 60.0, "gpu.power_w": 700.0, "gpu.sm_clock_hz": 1.9e9, "gpu.util_pu": 0.9,
    "gpu.clock_event_bits": 0.0, "gpu.row_remap_failed_state": 0.0, "gpu.row_remap_pending_state": 0.0,
    "gpu.health_state": 0.0, "gpu.recovery_action_state": 0.0, "gpu.xid_code": 0.0,
    "node.power_w": 4000.0, "node.psu1_power_w": 2000.0, "node.psu2_power_w": 2000.0,
    "node.power_on_state": 1.0, "node.cpu_temp_c": 60.0,
}  # fmt: skip


def fault(kind: str, table: str, entity: int, signal: str = "", sure: float = 0.95) -> Fault:
    """Return a fault as the diagnosis would report it."""
    severity = FAULT_KINDS[kind].severity
    return Fault(kind, table, entity, signal, severity, sure, START_NS, (f"{kind} was seen",))


class Ward:
    """State, book, rates and verdicts of a site; estimator, diagnosis, lemons and wear are as a test says."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.site = site_of(tree)
        self.state = State(self.site.sizes, self.site.file.periods_s)
        self.inbox = Inbox(self.site.sizes)
        self.jobs = JobSlots(self.site.sizes["job"], self.site.sizes["node"])
        self.windows = Windows(self.site)
        self.book, self.rates, self.verdicts = FaultBook(self.site), Rates(self.site), Verdicts(self.site)
        self.lemons: Any = SimpleNamespace(
            is_lemon=lambda: np.zeros(self.site.sizes["node"], np.bool_), evidence=lambda node: ()
        )
        self.wear: Any = SimpleNamespace(remaining=tuple, evidence=lambda table, entity: ())
        self.now_ns, self.ticks, self.looked_ns = START_NS, 0, 0
        self.residuals: dict[str, Residual] = {}

    def take(self, values: Mapping[str, Any], counts: Mapping[str, Any], dt_s: float) -> None:
        """Readings of one tick `dt_s` later: a number, or one per entity (NaN: no reading)."""
        self.now_ns += round(dt_s * NS)
        for key, value in [*values.items(), *counts.items()]:
            signal = find_signal(key)
            assert signal is not None, key
            n, counter = self.site.sizes[signal.table], signal.kind == "counter"
            kind, name = (np.int64 if counter else np.float32), (signal.name,)
            column = np.broadcast_to(np.asarray(value, kind), (n,)).reshape(1, n)
            none, nothing = np.empty((0, n), np.int64), np.empty((0, n), np.float32)
            block = (Block(signal.table, 0, (), nothing, name, column, self.now_ns) if counter
                     else Block(signal.table, 0, name, column, (), none, self.now_ns))  # fmt: skip
            self.inbox.put_block(block, self.now_ns)
        self.state.apply(self.inbox.take(self.ticks, self.now_ns, dt_s))
        self.ticks += 1

    def look(
        self,
        values: Mapping[str, Any] | None = None,
        *events: Event,
        counts: Mapping[str, Any] | None = None,
        faults: Sequence[Fault] = (),
        dt_s: float = 10.0,
    ) -> None:
        """One look `dt_s` later at a healthy site but for these values, events and faults."""
        self.take(WELL | dict(values or {}), counts or {}, dt_s)
        self.judge(*events, faults=faults)

    def judge(self, *events: Event, faults: Sequence[Fault] = ()) -> None:
        """Judge what was taken in."""
        self.windows.expire(self.now_ns)
        for event in events:
            if isinstance(event, MaintenanceBegun):
                assert self.windows.begin(event, self.now_ns) is None
            elif isinstance(event, MaintenanceEnded):
                assert self.windows.end(event, self.now_ns) is None
        heard = [event for event in events if isinstance(event, FaultReported)]
        self.book.receive(heard, self.now_ns, self.jobs)
        dt_s = (self.now_ns - self.looked_ns) / NS if self.looked_ns else 0.0
        told: Any = SimpleNamespace(
            faults=tuple(faults), silence=SimpleNamespace(outages=SimpleNamespace(masks={}))
        )
        known: Any = SimpleNamespace(residuals=self.residuals, parameters={})
        now = HealthContext(self.site, self.state, known, told, self.jobs, self.windows, dt_s)
        self.looked_ns = self.now_ns
        self.rates.update(now)
        self.verdicts.update(now, DeviceRecords(self.book, self.rates, self.lemons, self.wear))

    def run(self, looks: int, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        """So many looks alike."""
        for _ in range(looks):
            self.look(values, **more)

    def level(self, part: str, index: int) -> int:
        return int(self.verdicts.health(part).level[index])

    def action(self, part: str, index: int) -> int:
        return int(self.verdicts.health(part).action[index])

    def evidence(self, part: str, index: int) -> dict[str, Evidence]:
        """By rule, without what is missing and the past."""
        told = self.verdicts.evidence(part, index)
        return {e.rule: e for e in told if not e.rule.startswith("missing:") and e.rule != "history"}

    def xid(self, gpu: int, code: int, **more: Any) -> FaultReported:
        return FaultReported(
            table="gpu", name=self.site.name("gpu", gpu), code=code, at_ns=self.now_ns, **more
        )


def on(n: int, index: Any, value: float, rest: float = 0.0) -> np.ndarray:
    """`rest` everywhere but for `value` at these places [n]."""
    out = np.full(n, rest)
    out[np.atleast_1d(np.asarray(index, np.int64))] = value
    return out
