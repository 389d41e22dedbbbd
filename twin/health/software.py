"""Exceptions and page faults that several nodes of one job report at about the same time: the job's own.

source: rule of thumb of operators: XID 31 on different GPUs of one job is software. May import jobs, the
site, frames and what the fault book counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.frame import I32, NS, Bool
from twin.health.fault_counts import Batch
from twin.jobs import Jobs
from twin.site import Site

CODES = (13, 31)  # source: NVIDIA XID catalogue: mostly the application's
TOGETHER_S, NODES = 600.0, 2  # source: estimate
HELD_S = 86_400.0  # for which such a fault speaks of the job. source: estimate


class SoftwareFaults:
    """When each node and GPU last reported one, for which job, and which of them were the job's own."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._node_ns = np.zeros(site.sizes["node"], np.int64)
        self._slot = np.full(site.sizes["node"], -1, np.int32)
        self._generation = np.zeros(site.sizes["node"], np.int32)
        self._gpu_ns = np.zeros(site.sizes["gpu"], np.int64)
        self._own_ns = np.zeros(site.sizes["gpu"], np.int64)

    def hear(self, batch: Batch, fresh: Bool, jobs: Jobs | None, now_ns: int) -> None:
        """Take in faults of GPUs [k]; those which are `fresh` count."""
        if jobs is None:
            return
        some = np.flatnonzero(np.isin(batch.code, CODES) & fresh & (now_ns - batch.at_ns < TOGETHER_S * NS))
        gpu = batch.entity[some]
        node = self.site.node_of_gpu[gpu]
        slot = jobs.job_of_node[node]
        of_job = slot >= 0
        if not of_job.any():
            return
        gpu, node, slot, at_ns = gpu[of_job], node[of_job], slot[of_job], batch.at_ns[some][of_job]
        np.maximum.at(self._node_ns, node, at_ns)
        np.maximum.at(self._gpu_ns, gpu, at_ns)
        self._slot[node], self._generation[node] = slot, jobs.generation[slot]
        recent = np.flatnonzero((self._slot >= 0) & (now_ns - self._node_ns < TOGETHER_S * NS))
        recent = recent[self._slot[recent] < jobs.n]
        recent = recent[jobs.generation[self._slot[recent]] == self._generation[recent]]
        nodes = np.bincount(self._slot[recent], minlength=jobs.n)
        own = np.zeros(len(self._slot), np.bool_)
        own[recent] = nodes[self._slot[recent]] >= NODES
        self._own_ns[own[self.site.node_of_gpu] & (now_ns - self._gpu_ns < TOGETHER_S * NS)] = now_ns

    def gpus(self, now_ns: int) -> Bool:
        """GPUs whose faults of these codes were their job's own [n_gpu]."""
        return (self._own_ns > 0) & (now_ns - self._own_ns < HELD_S * NS)

    def forget(self, gpu: int) -> None:
        """Another GPU sits in this slot."""
        self._gpu_ns[gpu] = self._own_ns[gpu] = 0

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> SoftwareFaults:
        """The same for another site."""
        out = SoftwareFaults(site)
        for table, names in (("node", ("_node_ns", "_slot", "_generation")), ("gpu", ("_gpu_ns", "_own_ns"))):
            kept = np.flatnonzero(old_of_new[table] >= 0)
            for name in names:
                getattr(out, name)[kept] = getattr(self, name)[old_of_new[table][kept]]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum: of those that ever reported one."""
        node, gpu = np.flatnonzero(self._node_ns), np.flatnonzero(self._gpu_ns)
        return {
            "node": node, "node_ns": self._node_ns[node], "slot": self._slot[node],
            "generation": self._generation[node],
            "gpu": gpu, "gpu_ns": self._gpu_ns[gpu], "own_ns": self._own_ns[gpu],
        }  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        node, gpu = data["node"], data["gpu"]
        self._node_ns[node], self._slot[node] = data["node_ns"], data["slot"]
        self._generation[node] = data["generation"]
        self._gpu_ns[gpu], self._own_ns[gpu] = data["gpu_ns"], data["own_ns"]
