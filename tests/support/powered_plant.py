"""A small plant in a closed loop with an engine: GPUs draw what they want up to their caps, racks and feeders
add it up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.builders import Twin
from twin.contracts import Policy
from twin.telemetry import Event

CAP = "gpu.power_cap_w"
OTHER_W = 20_000.0  # of a rack beside its GPUs
LOSS_PU = 0.05  # of its GPUs' power on the way to them


class Loop:
    """`wants_w` [n_gpu] may be set between ticks; `dead` feeders carry nothing; `silent` keys are mute,
    `deaf` GPUs follow no cap; `more` are further readings. `late`: for so many ticks a building's meters tell
    what was so before. `supplies`: nodes tell what each of their supplies delivers."""

    def __init__(
        self, tree: dict[str, Any], policies: Sequence[Policy], late: int = 0, supplies: bool = False
    ) -> None:
        self.twin = Twin(tree, policies, act=True)
        self.site = self.twin.site
        self.most_w = self.site.envelopes[CAP].high.copy()
        n = self.site.sizes["gpu"]
        self.wants_w, self.cap_w = np.full(n, 300.0), np.nan_to_num(self.most_w, nan=np.inf)
        self.dead = np.zeros(self.site.sizes["feeder"], np.bool_)
        self.silent: set[str] = set()
        self.deaf = np.zeros(n, np.bool_)
        self.worst_w = np.zeros(self.site.sizes["feeder"])
        self.late, self.supplies = late, supplies
        self.more: dict[str, Any] = {}
        self._building: deque[dict[str, Any]] = deque(maxlen=late + 1)

    @property
    def gpu_w(self) -> np.ndarray:
        return np.minimum(self.wants_w, np.where(self.deaf, np.inf, self.cap_w))

    @property
    def rack_w(self) -> np.ndarray:
        return self.site.sum_by_rack("gpu", self.gpu_w) * (1.0 + LOSS_PU) + OTHER_W

    @property
    def feeder_w(self) -> np.ndarray:
        """Two feeders side by side share all racks; what is dead leaves it to the other."""
        alive = ~self.dead
        return np.where(alive, self.rack_w.sum() / max(alive.sum(), 1), 0.0)

    def tick(self, *events: Event, urgent: bool = False, dt_s: float = 1.0) -> None:
        self._building.append({
            "rack.power_w": self.rack_w, "feeder.power_w": self.feeder_w,
            "feeder.energised_state": self.dead.astype(np.float64),
        })  # fmt: skip
        values: dict[str, Any] = {"gpu.power_w": self.gpu_w, "gpu.power_limit_w": self.cap_w}
        values |= self._building[0] | self.more
        if self.supplies:
            values |= self._supplies()
        heard = {k: v for k, v in values.items() if k not in self.silent}
        self.worst_w = np.maximum(self.worst_w, self.feeder_w)
        self.twin.tick(heard, *events, urgent=urgent, dt_s=dt_s)
        lease = self.twin.lease(CAP)
        self.cap_w = np.where(np.isfinite(lease), lease, self.cap_w)
        for batch in self.twin.commands(CAP):
            self.cap_w[batch.index] = batch.value

    def _supplies(self) -> dict[str, Any]:
        """Supplies 1 and 2 of a node hang on the first and the second feeder, and share what both feed."""
        node_w = np.bincount(self.site.node_of_gpu, self.gpu_w, self.site.sizes["node"]) + 500.0
        alive = ~self.dead[:2]
        one, two = (node_w * (alive[k] / max(alive.sum(), 1)) for k in (0, 1))
        return {"node.power_w": node_w, "node.psu1_power_w": one, "node.psu2_power_w": two}

    def run(self, seconds: int, dt_s: float = 1.0) -> None:
        for _ in range(round(seconds / dt_s)):
            self.tick(dt_s=dt_s)
