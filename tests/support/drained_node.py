"""A node that the replacement policy took out, and the names that its tests share."""

from __future__ import annotations

from typing import Any

from tests.support.replacement_site import Replacing

NODE0 = "lab/h/r1/node0"
QUICK: dict[str, Any] = {"queue_h": 0.05}  # other nodes are free at once: so that to drain is cheap
WHOLE = tuple(f"r1/node{i}" for i in range(18)) + tuple(f"r2/node{i}" for i in range(18))


def drained(**settings: Any) -> Replacing:
    """A node that was idle, bad and taken out."""
    twin = Replacing(**settings)
    twin.bad(0)
    twin.wait(120)
    assert twin.level[0] >= 3
    return twin
