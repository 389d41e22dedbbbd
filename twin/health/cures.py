"""Cures: restarts, resets and returns to service, by which what fault codes asked for is done.

A restart is learnt of late: by a counter, when the node speaks again. What was heard shortly before that is
of the new start and stays open. May import the moment, open actions, the site and frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.frame import I32, I64, NS
from twin.health.fault_actions import OpenActions
from twin.health.levels import action
from twin.health.now import Now
from twin.site import Site

STARTED_S = 120.0  # a server takes longer to start, and tells of it within this. source: estimate
UNKNOWN = -1
OFF, ON = 0, 1  # of node.power_on_state
IN_SERVICE, DRAINED = 0, 3  # of node.service_level_state
DBE = "gpu.ecc_dbe_count"
# `dbe`: what the counter of double-bit errors had come to when the GPU was last reset
_KEPT = {"reboots": "node", "power": "node", "service": "node", "recovery": "gpu", "dbe": "gpu"}


class Cures:
    """What nodes and GPUs last said of restarts and service [n]; UNKNOWN where they never did."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.last: dict[str, I64] = {
            name: np.full(site.sizes[table], UNKNOWN, np.int64) for name, table in _KEPT.items()
        }

    def update(self, now: Now, opened: Mapping[str, OpenActions]) -> None:
        """Close what is done since the last look."""
        restarted = self._restarted(now)
        self._close(now, opened, restarted, "reboot_node", now.now_ns - round(STARTED_S * NS))
        service, before = self._take("service", now.good("node.service_level_state"))
        back = np.flatnonzero((before >= DRAINED) & (service == IN_SERVICE)).astype(np.int32)
        # The furthest that it was out of service, until it is back
        self.last["service"] = np.where(service == IN_SERVICE, service, np.maximum(service, before))
        self._close(now, opened, back, "replace", now.now_ns)
        recovery, before = self._take("recovery", now.good("gpu.recovery_action_state"))
        reset = np.flatnonzero((before > 0) & (recovery == 0)).astype(np.int32)
        if len(reset):
            self._reset(now, reset)
            if "gpu" in opened:
                opened["gpu"].resolve(reset, action("reboot_node"), now.now_ns)

    def _restarted(self, now: Now) -> I32:
        power, before = self._take("power", now.good("node.power_on_state"))
        on = (before == OFF) & (power == ON)
        total = np.where(now.fresh("node.reboot_count"), now.total("node.reboot_count"), np.nan)
        reboots, before = self._take("reboots", total)
        return np.flatnonzero(on | ((before >= 0) & (reboots > before))).astype(np.int32)

    def _take(self, name: str, values: Any) -> tuple[I64, I64]:
        """(what is known now, what was known before); what is not heard stays as it was."""
        before = self.last[name]
        known = np.where(np.isfinite(values), np.nan_to_num(values), before).astype(np.int64)
        self.last[name] = known
        return known, before

    def _close(
        self, now: Now, opened: Mapping[str, OpenActions], nodes: I32, upto: str, until_ns: int
    ) -> None:
        """For these nodes and their GPUs."""
        if not len(nodes):
            return
        mine = np.zeros(now.n("node"), np.bool_)
        mine[nodes] = True
        gpus = np.flatnonzero(mine[self.site.node_of_gpu]).astype(np.int32)
        self._reset(now, gpus)
        for table, index in (("node", nodes), ("gpu", gpus)):
            if table in opened:
                opened[table].resolve(index, action(upto), until_ns)

    def _reset(self, now: Now, gpus: I32) -> None:
        """What these GPUs counted till now, their reset has undone."""
        self.last["dbe"][gpus] = now.total(DBE)[gpus]

    def forget(self, table: str, entity: int) -> None:
        """Another device sits here: its counts are its own."""
        for name, of in _KEPT.items():
            if of == table:
                self.last[name][entity] = UNKNOWN

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Cures:
        """The same for another site."""
        out = Cures(site)
        for name, table in _KEPT.items():
            kept = np.flatnonzero(old_of_new[table] >= 0)
            out.last[name][kept] = self.last[name][old_of_new[table][kept]]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return dict(self.last)

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.last |= {name: np.array(data[name]) for name in _KEPT if name in data}
