"""Health records: verdicts with their evidence, features of nodes, and past failures.

Data only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from twin.catalogue import F32, I32, I64, U8, Bool
from twin.telemetry import nothing


@dataclass(frozen=True, slots=True)
class Evidence:
    """One reason for a verdict: the rule that found it, in a sentence with its figures, and since when."""

    rule: str
    level: int  # of twin.contracts.health_levels
    text: str
    since_ns: int
    sure_pu: float  # that it is the part itself
    source: str  # of the rule


@dataclass(frozen=True, slots=True)
class Health:
    """Verdicts on all parts of one kind [n]. To be read only.

    Pumps and supplies come in pairs: the part 2 * entity + side belongs to that CDU or node.
    """

    part: str
    level: U8  # of twin.contracts.health_levels; what is not known is never healthy
    since_ns: I64  # at this level
    action: U8  # place in twin.contracts.health_levels.ACTIONS
    sure_pu: F32  # of what speaks for the level; where healthy, the share of evidence that is reported
    lowered: U8  # place in ATTRIBUTIONS: whose doing a lowered clock is; zeros but for GPUs


@dataclass(frozen=True, slots=True)
class NodeFeatures:
    """Numbers that may predict a failure [n_node, n_feature]; NaN = unknown. To be read only."""

    names: tuple[str, ...]
    values: F32


@dataclass(frozen=True, slots=True)
class FailureLog:
    """Nodes that became unusable, oldest first [k]; bounded. To be read only.

    `end_ns` is 0 while one lasts. `kind` is a place in `classes`. `shared`: the failure had a cause in common
    with others (a feed, a loop, a job), and says nothing about the node itself. Nobody watched in the gaps
    that began and ended at `unwatched_ns` [g, 2]: that nothing was seen to fail then says nothing.
    """

    node: I32
    start_ns: I64
    end_ns: I64
    kind: U8
    shared: Bool
    classes: tuple[str, ...]
    begin_ns: int  # since when anybody watched; 0 = not yet
    unwatched_ns: I64 = field(default_factory=nothing)
