"""Nodes on their way out, as a policy of the name `replacement` would hold them: memory set by the test.

policy = Leaving()
pod = ...                      # a twin with this policy
policy.set("phase", {3: OUT})  # in the memory of the next call
policy.say({"what": "gate", "node": ...})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from policies.node_replacement import Replacement
from policies.node_replacement.phases import LEVEL, OUT
from twin.catalogue import NS
from twin.contracts import Memory, Proposal, View

SERVICE = "node.service_level"


class Leaving(Replacement):
    """Proposes the service level of each node's phase; its memory and accounts are what it was told."""

    controls: ClassVar[tuple[str, ...]] = (SERVICE,)
    period_s: ClassVar[float] = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, Mapping[int, Any]]] = []
        self.said: list[dict[str, Any]] = []

    def set(self, column: str, values: Mapping[int, Any]) -> None:
        """From the next call on, of these nodes."""
        self.told.append((column, values))

    def say(self, *accounts: dict[str, Any]) -> None:
        """Account for this in the next call."""
        self.said += accounts

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Apply the values that `set` queued, and propose the levels that follow from the phases."""
        out = {name: column.copy() for name, column in memory.items()}
        for column, values in self.told:
            for node, value in values.items():
                out[column][node if out[column].ndim else ()] = value
        self.told = []
        level = LEVEL[out["phase"]].astype(np.float64)
        index = np.flatnonzero(level > 0).astype(np.int32)
        if not len(index):
            return [], out
        at = level[index]
        return [Proposal(SERVICE, index, at, at, at, "row remaps fail; its job saved a minute ago")], out

    def accounts(self, view: View, before: Memory, after: Memory) -> list[dict[str, Any]]:
        """Return the accounts that `say` queued."""
        said, self.said = self.said, []
        return said


def outed(policy: Leaving, node: int, now_ns: int, phase: int = OUT) -> None:
    """One node taken out an hour ago for its memory, with everything that was weighed."""
    hour_ns = 3600 * NS
    for column, value in {
        "phase": phase, "cause": 1, "option": 3, "action": 4, "entered_ns": now_ns - hour_ns,
        "evidence_ns": now_ns - 2 * hour_ns, "deadline_ns": now_ns + 7 * 24 * hour_ns,
        "suspected_ns": now_ns - 2 * hour_ns,
        "withdrawn_ns": now_ns - hour_ns, "chance_1h_pu": 0.12, "chance_24h_pu": 0.61, "sure_pu": 0.9,
        "watch_gpu_h": 410.0, "cordon_gpu_h": 212.0, "next_gpu_h": 88.0, "save_gpu_h": 41.5,
        "once_gpu_h": 120.0, "prediction_act_gpu_h": 41.5, "prediction_wait_gpu_h": 410.0,
        "prediction_act_pu": 0.03, "prediction_wait_pu": 0.61,
        "prediction_ns": now_ns - hour_ns, "offences": 1, "failed_tests": 2,
    }.items():  # fmt: skip
        policy.set(column, {node: value})
