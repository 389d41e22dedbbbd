"""A serving pod whose GPUs obey their caps, for tests of what people are told about power.

async with serving(tmp_path, tree=lab(150_000), more=guards()) as pod:
    Rig(pod).run(60, 1100.0, job("big", range(4)))
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from policies.power_capping import PowerCap, PowerGuard
from tests.support.builders import two_racks
from tests.support.in_process_daemon import Pod
from tests.support.powered_plant import CAP, LOSS_PU, OTHER_W
from twin.contracts import Policy
from twin.daemon.policy_accounts import PolicyAccounts
from twin.telemetry import Event, JobStarted


def lab(budget_w: float = 150_000) -> dict[str, Any]:
    """Two racks under feeders A and B of this budget each."""
    tree = two_racks()
    for feeder in tree["halls"][0]["feeders"]:
        feeder["budget_w"] = budget_w
    return tree


def guards(high_priority: int = 5) -> list[Policy]:
    """Both policies of power."""
    return [PowerGuard(high_priority=high_priority), PowerCap(high_priority=high_priority)]


def job(name: str, nodes: Iterable[int], **more: Any) -> JobStarted:
    """A job on these nodes of 36."""
    given = {"kind": "training", "priority": 0, "coupling": "independent"} | more
    names = tuple(f"lab/h/r{1 + n // 18}/node{n % 18}" for n in nodes)
    return JobStarted(id=name, job=name, nodes=names, **given)


class Rig:
    """Drives a pod second by second in a closed loop; `account`: the folder of the accounts."""

    def __init__(self, pod: Pod, account: Path | None = None) -> None:
        self.pod, self.site = pod, pod.twin.site
        self.cap_w = np.nan_to_num(self.site.envelopes[CAP].high.copy(), nan=np.inf)
        self.want_w = np.full(self.site.sizes["gpu"], 300.0)
        self.silent: set[str] = set()
        pod.live.accounts.clear()
        self.accounts = PolicyAccounts(pod.live, account)

    def run(self, seconds: int, want_w: Any = None, *events: Event) -> None:
        """So long; the events come first."""
        if want_w is not None:
            self.want_w[:] = want_w
        self.pod._events += list(events)
        for _ in range(seconds):
            gpu_w = np.minimum(self.want_w, self.cap_w)
            rack_w = self.site.sum_by_rack("gpu", gpu_w) * (1.0 + LOSS_PU) + OTHER_W
            n = self.site.sizes["feeder"]
            values = {"gpu.power_w": gpu_w, "gpu.power_limit_w": self.cap_w, "rack.power_w": rack_w,
                      "feeder.power_w": np.full(n, rack_w.sum() / max(n, 1)), "gpu.temp_c": 60.0,
                      "rack.flow_lpm": 96.0}  # fmt: skip
            self.pod.tick({k: v for k, v in values.items() if k not in self.silent})
            for batch in self.pod.twin.commands(CAP):
                self.cap_w[batch.index] = batch.value
            self.accounts.observe()
