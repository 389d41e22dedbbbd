"""Two racks behind the gate of replacement, and its chances by the hour.

pod = Pod()
pod.open([0], CORDON)
pod.look(3600.0)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.node_replacement.cost_benefit import expected_outcome, terms_of_option
from policies.node_replacement.costs import Chances, stakes_of
from policies.node_replacement.predictions import (
    COLUMNS,
    SCORES,
    Prediction,
    prediction_accounts,
    record_predictions,
    settle,
)
from tests.support.builders import Twin, two_racks
from tests.support.scripted_health import Ailing, ailing
from twin.catalogue import NS
from twin.contracts import Columns
from twin.engine.plugin_checks import checked_accounts
from twin.telemetry import events as ev

HOUR, DAY = 3600.0, 86_400.0


def hour_of(day_pu: float) -> float:
    """The chance within an hour at the same rate."""
    return float(-np.expm1(np.log1p(-day_pu) / 24.0))


# ---------------------------------------------------------------- the terms
class Pod(Twin):
    """Two racks of 18 nodes of 4 GPUs; a training job on eight of them that says what its saves cost."""

    def __init__(self) -> None:
        super().__init__(two_racks())
        self.ill: Ailing = ailing(self.engine)
        self.memory = Columns(scalars=SCORES, node=COLUMNS).fresh({"node": 36})
        self.start("a", [f"r1/node{i}" for i in range(8)])
        self.tick(
            None,
            ev.CheckpointTold(
                job="a",
                at_ns=self.now_ns + NS,
                interval_s=3600.0,
                save_s=60.0,
                began_ns=self.now_ns + NS - 600 * NS,
            ),
        )

    def start(self, job: str, nodes: list[str]) -> None:
        self.tick(
            None,
            ev.JobStarted(
                id=f"{job}{self.number}",
                job=job,
                nodes=tuple(nodes),
                kind="training",
                coupling="synchronous",
                checkpoint_interval_s=3600.0,
                checkpoint_save_s=60.0,
                checkpoint_restart_s=300.0,
            ),
        )

    def view(self) -> Any:
        return self.engine.view(1.0)

    def look(self, seconds: float = 0.0, values: Any = None, *events: Any) -> list[dict[str, Any]]:
        """Some time later; what the gate tells of it."""
        if seconds:
            self.tick(values, *events, dt_s=seconds)
        before = self.memory
        self.memory = settle(self.view(), before)
        return checked_accounts(prediction_accounts(self.view(), before, self.memory))

    def open(self, nodes: list[int], course: int, day_pu: float = 0.6) -> list[dict[str, Any]]:
        before, view, at = self.memory, self.view(), np.array(nodes, np.int32)
        k = len(nodes)
        stakes = stakes_of(view, at, np.zeros(k, np.bool_))
        found = expected_outcome(
            terms_of_option(
                Chances(np.full(k, hour_of(day_pu)), np.full(k, day_pu), np.full(k, 0.8)),
                np.full(k, course, np.int8),
                stakes,
            )
        )
        made = Prediction(at, np.full(k, course, np.int8), found, stakes, np.full(k, 0.8))
        self.memory = record_predictions(view, before, made)
        return checked_accounts(prediction_accounts(view, before, self.memory))
