"""Set-up of the latency benchmark: the site, the number of samples, and the report of an outcome.

Apart from `bench_react`, which plays it and needs the agent's package.
"""

from __future__ import annotations

from typing import Any

import msgspec

TRAYS, PER_TRAY = 18, 4
PER_RACK = TRAYS * PER_TRAY
DROPS = (36.0, 12.0)  # l/min: each less than half of the flow before, each with a lower cap


class ReactionLoad(msgspec.Struct, frozen=True):
    """Numbers of samples of each kind, and the mean seconds between them."""

    port: int
    ordinary: int
    urgent: int
    state: str  # a folder for what agents keep
    ordinary_gap_s: float = 0.33
    urgent_gap_s: float = 0.7
    settle_s: float = 3.0

    @property
    def hot_racks(self) -> int:
        """Racks whose GPUs become hot, one after another, each once."""
        return -(-self.ordinary // PER_RACK)

    @property
    def racks(self) -> int:
        """With those that lose their flow, each twice."""
        return self.hot_racks + -(-self.urgent // len(DROPS))


class Outcome(msgspec.Struct):
    """Of one kind: seconds to the read-back, and of these, until the request was seen."""

    kind: str
    latency_s: list[float]
    request_s: list[float]
    unanswered: int


def site_tree(racks: int) -> dict[str, Any]:
    """The daemon's site for so many racks: armed, on liquid."""
    names = f"r[1-{racks}]"
    hall = {"name": "hall1", "racks": [{"name": names, "profile": "gb200-nvl72"}],
            "cdus": [{"name": "cdu1", "serves": [names]}]}  # fmt: skip
    armed = {"thermal_guard": {"authority": "act"}}
    return {"site": "bench", "halls": [hall], "policies": armed, "periods_s": {"gpu": 1.0}}
