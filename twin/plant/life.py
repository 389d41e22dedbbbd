"""The life of a simulated fleet as data: every stroke that befalls it, in order, and which nodes fail.

A stroke changes one thing at one instant, so that months of a fleet are a list that is read once from front
to back. May import NumPy and array types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from twin.frame import F64, I32, U8, Bool
from twin.plant.failure_classes import CLASSES

KINDS = (*CLASSES, "rack", "feed")  # the last two are causes in common of several nodes

Act = Literal["count", "hold", "free", "xid", "work", "replace"]


class Stroke(NamedTuple):
    """What changes at `time_s`.

    `count`: counter `field` of the truth grows by `value`. `hold`: field `field` of the Disturbance takes
    `value` on behalf of `cause`, until that cause's `free`. `xid`: GPU `at` reports code `value`. `work`:
    people begin to work on node `at`, for `value` s. `replace`: another device sits in slot `at` of `field`.
    """

    time_s: float
    act: Act
    field: str
    at: int | tuple[int, int]
    value: float = 0.0
    cause: int = 0


@dataclass(frozen=True, slots=True)
class Fallen:
    """Failures by their beginning [k]: a node becomes unusable at `begin_s` and is back at `end_s`.

    `kind` is a place in KINDS. `shows`: it has precursors, from `precursor_s` on (NaN without). `shared`: a
    cause in common, which no precursor tells of. `device`: the GPU or node that fails. `again`: a repair did
    not cure it.
    """

    node: I32
    kind: U8
    device: I32
    begin_s: F64
    end_s: F64
    shows: Bool
    precursor_s: F64
    shared: Bool
    again: Bool
    replaced: Bool

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True)
class Life:
    """What befalls a site within `days`; `reboots` are (node, begin_s, end_s) of restarts, no failures."""

    days: float
    seed: int
    strength: float
    strokes: tuple[Stroke, ...]  # by time
    fallen: Fallen
    lemons: Bool  # [n_node]
    reboots: tuple[tuple[int, float, float], ...] = ()

    def down(self, time_s: float, n_node: int) -> Bool:
        """Nodes that are unusable at an instant [n_node]."""
        f, out = self.fallen, np.zeros(n_node, np.bool_)
        out[f.node[(f.begin_s <= time_s) & (time_s < f.end_s)]] = True
        return out
