"""Failure draws of a fleet: which nodes fail when and how, which causes are shared, which nodes are lemons.

Every failure, sign and kind of benign event has a source of chance of its own, so that the same failures
come at every strength.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.evaluation.health.failure_classes import (
    AGAIN_S,
    AGAIN_SPREAD,
    DAY_S,
    FAILURES,
    FEEDER_DAY_RATE,
    KINDS,
    LEMON_FACTOR,
    LEMON_OWN_PU,
    LEMON_PU,
    NODE_DAY_RATE,
    OUTAGE_S,
    OUTAGE_SPREAD,
    RACK_DAY_RATE,
    REPAIR_S,
    REPAIR_SPREAD,
    TRIAGE_S,
    UNCURED_PU,
)
from twin.catalogue import Bool
from twin.plant import FailureTable
from twin.site import Site

FAILING, SHARED = 31, 32  # words of the seeds

_CASES = np.array([c.cases for c in FAILURES])
SHARES_PU = _CASES / _CASES.sum()
# A repair that cures nothing leads to another failure, a lemon to many: what is left is the rate of the rest
FIRST_PER_DAY = NODE_DAY_RATE * (1.0 - UNCURED_PU) / (1.0 + LEMON_PU * (LEMON_FACTOR - 1.0))


@dataclass(slots=True)
class Failing:
    """One failure as it was drawn. `cause` numbers what it holds; `nodes` are several where it is shared."""

    node: int
    kind: int
    device: int
    begin_s: float
    off_s: float  # when the node is switched off
    end_s: float
    precursor_s: float = np.nan
    code: int = 0
    again: bool = False
    replaced: bool = False
    feeder: int = -1
    shared: bool = False


def draw_failing(site: Site, seed: int, days: float) -> tuple[list[Failing], Bool]:
    """Failures of single nodes by node and time, and who is a lemon [n_node]."""
    rng = np.random.default_rng([seed, FAILING])
    n, until_s = site.sizes["node"], days * DAY_S
    gpus = np.diff(site.gpu_start_of_node)
    lemons: Bool = rng.random(n) < LEMON_PU
    out: list[Failing] = []
    for node in range(n):
        if not gpus[node]:
            continue
        per_s = FIRST_PER_DAY * (LEMON_FACTOR if lemons[node] else 1.0) / DAY_S
        own = (_kind(rng), _gpu(site, node, rng))
        at_s = float(rng.exponential(1.0 / per_s))
        free_s = 0.0  # when it was last back
        while at_s < until_s:
            kind, gpu = (
                own if lemons[node] and rng.random() < LEMON_OWN_PU else (_kind(rng), _gpu(site, node, rng))
            )
            again = False
            while at_s < until_s:
                one = _one(node, kind, gpu, at_s, free_s, again, rng)
                out.append(one)
                free_s = at_s = one.end_s
                cured = one.replaced or rng.random() >= UNCURED_PU / (1.0 - FAILURES[kind].replaced_pu)
                if cured:
                    break
                again = True
                at_s += _lognormal(AGAIN_S, AGAIN_SPREAD, rng)
            at_s = max(at_s, free_s) + float(rng.exponential(1.0 / per_s))
    return out, lemons


def _kind(rng: np.random.Generator) -> int:
    return int(rng.choice(len(FAILURES), p=SHARES_PU))


def _gpu(site: Site, node: int, rng: np.random.Generator) -> int:
    return int(rng.integers(site.gpu_start_of_node[node], site.gpu_start_of_node[node + 1]))


def _one(
    node: int, kind: int, gpu: int, at_s: float, free_s: float, again: bool, rng: np.random.Generator
) -> Failing:
    """A failure at an instant, of a node that was last repaired at `free_s`."""
    of = FAILURES[kind]
    shows = rng.random() < of.shows_pu
    lead_s = _lognormal(of.lead_s, of.lead_spread, rng)
    off_s = at_s + float(rng.uniform(*TRIAGE_S))
    repair_s = _lognormal(REPAIR_S, REPAIR_SPREAD, rng)
    return Failing(
        node, kind, gpu if of.table == "gpu" else node, at_s, off_s, max(off_s, at_s + repair_s),
        max(at_s - lead_s, free_s) if shows else np.nan,
        int(rng.choice(of.codes)) if of.codes else 0, again, bool(rng.random() < of.replaced_pu),
    )  # fmt: skip


def draw_shared(site: Site, seed: int, days: float, single: list[Failing]) -> list[Failing]:
    """Nodes that a loss of their rack or of a feed takes; those that are down already are left out."""
    rng = np.random.default_rng([seed, SHARED])
    out: list[Failing] = []
    for table, per_day in (("rack", RACK_DAY_RATE), ("feeder", FEEDER_DAY_RATE)):
        for entity in range(site.sizes[table]):
            for _ in range(int(rng.poisson(per_day * days))):
                at_s = float(rng.uniform(0.0, days * DAY_S))
                end_s = at_s + _lognormal(OUTAGE_S, OUTAGE_SPREAD, rng)
                feeder = entity if table == "feeder" else -1
                kind = KINDS.index("feed" if feeder >= 0 else "rack")
                racks = _dark_without(site, feeder) if feeder >= 0 else [entity]
                down = [f.node for f in [*single, *out] if f.begin_s <= at_s < f.end_s]
                nodes = [
                    i
                    for r in racks
                    for i in range(site.node_start_of_rack[r], site.node_start_of_rack[r + 1])
                ]
                out += [
                    Failing(i, kind, i, at_s, at_s, end_s, feeder=feeder, shared=True)
                    for i in nodes
                    if i not in down
                ]
    return out


def _dark_without(site: Site, feeder: int) -> list[int]:
    """Racks that no other feed reaches."""
    below = set(site.racks_below(feeder).tolist())
    return [r for r in sorted(below) if all(_fed_by(site, f, feeder) for f in site.feeders_of_rack.of_row(r))]


def _fed_by(site: Site, feeder: int, other: int) -> bool:
    at = int(feeder)
    while at >= 0 and at != other:
        at = int(site.parent_of_feeder[at])
    return at == other


def failure_table(failing: list[Failing]) -> FailureTable:
    """The table of failures, by their beginning."""
    f = sorted(failing, key=lambda x: (x.begin_s, x.node))
    precursor_s = np.array([x.precursor_s for x in f], np.float64)
    return FailureTable(
        np.array([x.node for x in f], np.int32), np.array([x.kind for x in f], np.uint8),
        np.array([x.device for x in f], np.int32), np.array([x.begin_s for x in f], np.float64),
        np.array([x.end_s for x in f], np.float64), np.isfinite(precursor_s), precursor_s,
        np.array([x.shared for x in f], np.bool_), np.array([x.again for x in f], np.bool_),
        np.array([x.replaced for x in f], np.bool_),
    )  # fmt: skip


def _lognormal(median: float, spread: float, rng: np.random.Generator) -> float:
    return median * float(np.exp(spread * rng.standard_normal()))
