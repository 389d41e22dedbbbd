"""The case of one NVLink on five GB200 racks, rebuilt as sweeps and faults from a public report.

Known (marin-community/marin, issues 9086 and 8934): sweeps of `nvidia-smi nvlink -e` over 320 GPUs of five
racks, 18 links each, found every error counter at zero but one: link 14 of GPU 0 of one node had 505
recoveries in its life, 3 more within 21 minutes and 1 more later that day. Five days later that GPU reported
`Xid 149, NETIR_LINK_DOWN Fatal XC0 i0 Link 14`; the other 63 GPUs of its rack reported Xid 145, which follows
from it. The node was the only one that was taken out of service.

Assumed: a rack has 16 nodes of 4 GPUs, since 64 GPUs of a rack reported; the node is the third of the fourth
rack; the fourth recovery came six hours after the first sweep; no counter moved otherwise; Xid 145 was
`Nonfatal` and came within the same second; heat, power and clocks are those of a healthy site.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.recurring_devices import Living
from twin.site import Site
from twin.telemetry import FaultReported, NvlinksCounted

RACKS, NODES, GPUS, LINKS = 5, 16, 4, 18
TREE: dict[str, Any] = {
    "site": "lab",
    "halls": [{"name": "h", "racks": [
        {"name": f"r[1-{RACKS}]", "profile": "gb200-nvl72", "nodes": NODES}]}],
}  # fmt: skip
NODE, GPU, LINK = 3 * NODES + 2, (3 * NODES + 2) * GPUS, 14
LIFETIME, MORE, SWEEP_S = 505, 3, 21 * 60.0
DAYS_TO_FAILURE = 5.0


def sweep(site: Site, recoveries: int, node: int = NODE, link: int = LINK) -> list[NvlinksCounted]:
    """The counts of all links, as the agents tell them: those of one link, the others at zero."""
    out = []
    for i in range(site.sizes["node"]):
        mine: dict[str, Any] = {}
        if i == node and recoveries:
            mine = {"gpu": (0,), "link": (link,), "recoveries": (recoveries,), "failures": (0,)}
        out.append(NvlinksCounted(name=site.name("node", i), read=(LINKS,) * GPUS, **mine))
    return out


class LinkCase(Living):
    """The five racks, and the sweeps over them."""

    def __init__(self, tree: dict[str, Any] | None = None) -> None:
        super().__init__(TREE if tree is None else tree)

    def sweeps(self, recoveries: int, dt_s: float, *events: Any) -> list[str]:
        """A sweep that finds so many recoveries on the link; the ids of the alarms."""
        total = np.zeros(self.site.sizes["gpu"], np.int64)
        total[GPU] = recoveries
        counts = {"gpu.nvlink_recovery_count": total, "gpu.nvlink_error_count": np.zeros_like(total)}
        self.look(*sweep(self.site, recoveries), *events, counts=counts, dt_s=dt_s)
        return self.alarms()

    def alarms(self) -> list[str]:
        """Ids of the findings that stand, without those that only inform."""
        return sorted(f.id for f in self.decision.findings if f.severity != "info")

    def passes(self, hours: float) -> set[str]:
        """So many hours without anything new, a tick every three hours; ids of alarms at any of them."""
        seen: set[str] = set()
        for _ in range(round(hours / 3.0)):
            self.look(dt_s=3 * 3600.0)
            seen |= set(self.alarms())
        return seen

    def dies(self, others: Sequence[int] = (), severity: str = "Nonfatal") -> list[str]:
        """The fatal XID of the link, and those that follow from it on other GPUs; the ids of the alarms."""
        faults = [self._xid(GPU, 149, f"NETIR_LINK_DOWN Fatal XC0 i0 Link {LINK}")]
        faults += [self._xid(gpu, 145, f"RLW_RXPIPE {severity} XC0 i0 Link {LINK}") for gpu in others]
        self.look(*faults, dt_s=10.0)
        return self.alarms()

    def _xid(self, gpu: int, code: int, detail: str) -> FaultReported:
        name = self.site.name("gpu", gpu)
        return FaultReported(table="gpu", name=name, code=code, detail=detail, at_ns=self.now_ns)
