"""The gauge of the last XID: where no agent reads the kernel's log, a new value in it is a fault reported.

DCGM holds the last XID and clears it only when it starts anew (field 230). A value that was there before
anybody watched tells neither when it came nor whether it is cured, and one that goes tells of a restart of
the GPU, its node, or DCGM alone. May import events, the moment, the site, the catalogue of codes and frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.events import FaultReported
from twin.frame import F32, I32, I64, NS, Bool
from twin.health.catalogue import CATALOGUE
from twin.health.now import Now
from twin.signals import find_signal
from twin.site import Site

KEY = "gpu.xid_code"
NEVER = -1.0
DOUBT_S = 86_400.0  # for which a GPU is watched whose grave XID went; source: estimate
MOST = 1000  # faults of one look; the rest is told at the next ones
ONLINE = 0.0  # of node.agent_state


class XidGauge:
    """What the gauge of each GPU last held [n_gpu]; NEVER: nothing."""

    def __init__(self, site: Site) -> None:
        n = site.sizes["gpu"]
        self.site = site
        self.last: F32 = np.full(n, NEVER, np.float32)
        self.before: I32 = np.zeros(n, np.int32)  # grave, there when first heard or gone lately; 0 = none
        self.gone_ns: I64 = np.zeros(n, np.int64)  # when it went; 0 = it is held still
        self.gone: I32 = np.zeros(0, np.int32)  # GPUs whose grave XID went at this look

    def update(self, now: Now) -> list[FaultReported]:
        """New values since the last look, as faults; none of GPUs whose faults an agent tells."""
        self.gone = self.gone[:0]
        if self.gone_ns.any():
            lapsed = (self.gone_ns > 0) & (now.now_ns - self.gone_ns > DOUBT_S * NS)
            self.before[lapsed] = self.gone_ns[lapsed] = 0
        signal = find_signal(KEY)
        assert signal is not None
        column = now.state.tables["gpu"]
        if column.n == 0 or not now.heard(KEY):
            return []
        value = column.value[signal.row]
        moved = np.flatnonzero(value != self.last)
        moved = moved[np.isfinite(value[moved])][:MOST]
        if not len(moved):
            return []
        code, old = value[moved].astype(np.int64), self.last[moved]
        self.last[moved] = value[moved]
        grave = CATALOGUE.grave[CATALOGUE.rows(code, "gpu")]
        known = _agents(now)
        spared = np.zeros(len(moved), np.bool_) if known is None else known[moved]
        was = np.maximum(old, 0).astype(np.int64)
        went = (code == 0) & CATALOGUE.grave[CATALOGUE.rows(was, "gpu")] & ~spared
        self.gone = moved[went].astype(np.int32)
        self.before[moved] = np.where(went, was, np.where((old == NEVER) & grave & ~spared, code, 0))
        self.gone_ns[moved] = np.where(went, now.now_ns, 0)
        told = (old != NEVER) & (code > 0) & ~spared
        return [
            FaultReported(table="gpu", name=self.site.name("gpu", int(i)), code=int(c),
                          detail="the last XID, as the gauge holds it")
            for i, c in zip(moved[told].tolist(), code[told].tolist(), strict=True)
        ]  # fmt: skip

    def forget(self, gpu: int) -> None:
        """Another GPU sits in this slot."""
        self.last[gpu], self.before[gpu], self.gone_ns[gpu] = NEVER, 0, 0

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> XidGauge:
        """The same for another site."""
        out, source = XidGauge(site), old_of_new["gpu"]
        kept = np.flatnonzero(source >= 0)
        for name in ("last", "before", "gone_ns"):
            getattr(out, name)[kept] = getattr(self, name)[source[kept]]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {"last": self.last, "before": self.before, "gone_ns": self.gone_ns}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.last, self.before = np.array(data["last"], np.float32), np.array(data["before"], np.int32)
        self.gone_ns = np.array(data["gone_ns"], np.int64)


def _agents(now: Now) -> Bool | None:
    """GPUs of nodes whose agent is online: it reads the log itself [n_gpu]; None: there is no agent."""
    if not now.heard("node.agent_state"):
        return None
    online: Bool = now.good("node.agent_state") == ONLINE
    return online[now.site.node_of_gpu]
