"""An estimator that can be driven by plain values, without the rest of an engine: fast enough for hours.

desk = Desk(two_racks())
desk.tick({"rack.flow_lpm": [80.0, 90.0]})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.builders import START_NS, site_of
from twin.catalogue import F64, NS, find_signal
from twin.estimation import Estimator
from twin.site import Site
from twin.telemetry import Block, Inbox, State


def put(inbox: Inbox, site: Site, values: Mapping[str, Any], now_ns: int) -> None:
    """Give an inbox values by signal: a number, or one per entity."""
    for key, value in values.items():
        signal = find_signal(key)
        assert signal is not None, key
        n = site.sizes[signal.table]
        column = np.broadcast_to(np.asarray(value, np.float32), (n,)).reshape(1, n)
        none = np.empty((0, n), np.int64)
        inbox.put_block(Block(signal.table, 0, (signal.name,), column, (), none, now_ns), now_ns)


class Desk:
    """A site's state and estimator."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.site = site_of(tree)
        self.state, self.estimator = State(self.site.sizes), Estimator(self.site)
        self.inbox = Inbox(self.site.sizes)
        self.now_ns, self.number = START_NS, 0

    def tick(self, values: Mapping[str, Any], dt_s: float = 1.0) -> None:
        """One tick later, with these values: a number or one per entity."""
        self.now_ns += round(dt_s * NS)
        put(self.inbox, self.site, values, self.now_ns)
        self.state.apply(self.inbox.take(self.number, self.now_ns, dt_s))
        self.number += 1
        self.estimator.update(self.state, dt_s)

    def run(self, ticks: int, values: Mapping[str, Any]) -> Desk:
        """So many ticks of a second with the same values."""
        for _ in range(ticks):
            self.tick(values)
        return self

    def expected(self, name: str) -> F64:
        """Of a relation, at the last tick [n]."""
        return self.estimator.residuals[name].expected

    def z(self, name: str) -> F64:
        """The difference in sigmas [n]."""
        r = self.estimator.residuals[name]
        return np.asarray(r.difference / r.sigma, np.float64)
