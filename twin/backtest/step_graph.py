"""Step graph: what each operation of a training step waits for, learned from one step of one pipeline.

All steps and all data-parallel ranks share it. Rules, after section 3 of arXiv 2505.05713: an operation waits
for the one before it in its stream (compute, each direction of sending and receiving, data-parallel
collectives); a pass waits for its receipt, a send for its pass; a receipt is posted once the pass before its
own is done; the optimizer waits for all gradients. Members of a transfer or collective wait for the last of
them to begin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from twin.backtest.step_trace import (
    BACKWARD,
    CLIP,
    COLLECTOR,
    DATA_PARALLEL,
    EMBEDDING,
    FORWARD,
    GATHER,
    KINDS,
    NORM,
    OPTIMIZER,
    P2P,
    SCATTER,
    SEPARATE,
    Ints,
    StepTrace,
)
from twin.catalogue import F64, ConfigError

# A receipt that begins later than the last pass, or a send that ends before the first, moved nothing: clocks
# of hosts differ by less. source: arXiv 2505.05713's artifact
CLOCK_S = 5e-5
PEER = {"forward-send": "forward-recv", "backward-send": "backward-recv"}


@dataclass(frozen=True)
class Operation:
    """An operation as each step of each pipeline has it."""

    stage: int
    kind: str
    seq: int
    chunk: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Rendezvous:
    """Operations that end together, or one alone; `across` = together with those of all ranks."""

    members: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]  # of each member: the operations before it
    across: bool


@dataclass(frozen=True)
class TraceCells:
    """A trace as arrays [template, step, rank]; `dropped`: steps that lack an operation."""

    templates: tuple[Operation, ...]
    steps: Ints
    start_s: F64
    duration_s: F64
    dropped: int


def cells_of(trace: StepTrace) -> TraceCells:
    """Arrange a trace; steps that lack operations which most have are dropped. Raises ConfigError."""
    names, place = np.unique(np.stack((trace.stage, trace.kind, trace.seq)), axis=1, return_inverse=True)
    steps, step = np.unique(trace.step, return_inverse=True)
    ranks = int(trace.dp_rank.max()) + 1
    shape = (names.shape[1], len(steps), ranks)
    count, chunk = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    start, duration = np.zeros(shape), np.zeros(shape)
    at = (place.reshape(-1), step.reshape(-1), trace.dp_rank)
    np.add.at(count, at, 1)
    start[at], duration[at], chunk[at] = trace.start_s, trace.duration_s, trace.chunk
    usual = np.mean(count == 1, axis=(1, 2)) > 0.5
    whole = np.all(count == usual[:, None, None], axis=(0, 2))
    if not whole.any():
        raise ConfigError(
            "no step has every operation once on every data-parallel rank; expected one such step"
        )
    start, duration, chunk = (x[usual][:, whole] for x in (start, duration, chunk))
    templates = tuple(
        Operation(int(stage), KINDS[kind], int(seq), int(chunk[i, 0, 0]), float(start[i, 0, 0]),
                 float(start[i, 0, 0] + duration[i, 0, 0]))
        for i, (stage, kind, seq) in enumerate(names[:, usual].T.tolist())
    )  # fmt: skip
    return TraceCells(templates, steps[whole], start, duration, int(np.count_nonzero(~whole)))


@dataclass
class StepGraph:
    """Operations, what each waits for, and which end together."""

    templates: tuple[Operation, ...]
    parallel: bool  # data-parallel ranks exchange gradients
    waits: list[list[int]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waits = [[] for _ in self.templates]
        self.stages = 1 + max(t.stage for t in self.templates)
        self._of: dict[tuple[int, str], list[int]] = {}
        for i, t in enumerate(self.templates):
            self._of.setdefault((t.stage, t.kind), []).append(i)
        self.passes: list[list[int]] = []
        for stage in range(self.stages):
            passes = self._in_time(self.of(stage, FORWARD) + self.of(stage, BACKWARD))
            if not passes:
                raise ConfigError(f"pipeline stage {stage}: no forward or backward pass in the trace")
            self.passes.append(passes)
            self._chain(passes)
            for kind in P2P:
                self._chain(self._in_time(self.of(stage, kind)))
            if self.parallel:
                self._chain(self._in_time(self.of(stage, GATHER) + self.of(stage, SCATTER)))
            self._end(stage)
        self._transfers()
        self._collectives()

    def of(self, stage: int, kind: str) -> list[int]:
        """Operations of a kind in a stage, by their number."""
        return sorted(self._of.get((stage, kind), []), key=lambda i: self.templates[i].seq)

    def _in_time(self, some: list[int]) -> list[int]:
        at = self.templates
        return sorted(some, key=lambda i: (at[i].start_s, at[i].seq, at[i].kind))

    def _chain(self, some: list[int]) -> None:
        for before, after in pairwise(some):
            self.waits[after].append(before)

    def _end(self, stage: int) -> None:
        """Weights before the first pass of a chunk; what follows the last pass, up to the optimizer."""
        at, passes = self.templates, self.passes[stage]
        overlap = any(t.kind == SEPARATE for t in self.templates)
        gathers, scatters = (self.of(stage, kind) for kind in (GATHER, SCATTER))
        if self.parallel:
            for i in {at[i].chunk: i for i in gathers}.values():  # the last one of each chunk
                first = [p for p in passes if at[p].kind == FORWARD and at[i].chunk in (-1, at[p].chunk)]
                if first:
                    self.waits[first[0]].append(i)
            if overlap:
                for i in {at[i].chunk: i for i in reversed(scatters)}.values():
                    last = [p for p in passes if at[p].kind == BACKWARD and at[i].chunk in (-1, at[p].chunk)]
                    if last:
                        self.waits[i].append(max(last, key=lambda p: at[p].end_s))
        last_pass = max(passes, key=lambda p: at[p].end_s)
        one = [i for kind in (NORM, EMBEDDING) for i in self.of(stage, kind)]
        shared = [] if not self.parallel else self.of(stage, SEPARATE) if overlap else scatters
        tail = [*self.of(stage, COLLECTOR), *one, *shared, *self.of(stage, CLIP), *self.of(stage, OPTIMIZER)]
        self._chain([last_pass, *tail])
        after = tail[len(self.of(stage, COLLECTOR)) :]
        if self.parallel and overlap and scatters and after:
            self.waits[after[0]].append(scatters[-1])

    def _transfers(self) -> None:
        """Pair sends with receipts, and tie both to their passes."""
        moving: dict[tuple[int, str], list[int]] = {}
        for stage in range(self.stages):
            for kind in P2P:
                moving[stage, kind] = self._tie(stage, kind)
            for kind in ("backward-send", "backward-recv"):
                self._post_early(stage, kind)
        for send, receive in PEER.items():
            step = 1 if send.startswith("forward") else -1
            for stage in range(self.stages):
                there = (stage + step) % self.stages
                out, into = moving[stage, send], moving[there, receive]
                if len(out) != len(into):
                    raise ConfigError(
                        f"stage {stage} has {len(out)} of {send}, stage {there} {len(into)} of {receive}; "
                        "expected as many"
                    )
                self.groups += [list(pair) for pair in zip(out, into, strict=True)]

    def _tie(self, stage: int, kind: str) -> list[int]:
        """Tie the transfers of a kind to their passes; those that have a peer, in order."""
        at, passes = self.templates, self.of(stage, FORWARD if kind.startswith("forward") else BACKWARD)
        receives, real = kind.endswith("recv"), []
        begin = max((at[p].start_s for p in passes), default=-np.inf) + CLOCK_S
        end = min((at[p].end_s for p in passes), default=np.inf) - CLOCK_S
        ordered = self._in_time(self.of(stage, kind))
        true = [i for i in ordered if (at[i].start_s <= begin if receives else at[i].end_s >= end)]
        skip = int(receives and len(true) + 1 == len(passes))
        if len(true) not in (0, len(passes) - 1, len(passes)):
            raise ConfigError(
                f"stage {stage}: {len(true)} of {kind} for {len(passes)} passes; "
                "expected as many, one less or none"
            )
        chunks = 1 + max(0, *(t.chunk for t in at))
        first, last = 0, self.stages * chunks - 1
        for i, n in zip(true, range(skip, len(passes)), strict=False):
            part = max(at[passes[n]].chunk, 0) * self.stages + stage  # in the order of layers
            if receives:
                self.waits[passes[n]].append(i)
                if n:
                    self.waits[i].append(passes[n - 1])
            else:
                self.waits[i].append(passes[n])
            # Schedules of several chunks also count transfers beyond the model's ends, which move nothing
            if part != (first if kind in ("forward-recv", "backward-send") else last):
                real.append(i)
        return real

    def _post_early(self, stage: int, kind: str) -> None:
        """Post the first backward transfer once the pass but one before the first backward pass is done."""
        order = [self.templates[p].kind for p in self.passes[stage]]
        first = order.index(BACKWARD) if BACKWARD in order else 0
        some = self.of(stage, kind)
        if first >= 2 and some:
            self.waits[some[0]].append(self.passes[stage][first - 2])

    def _collectives(self) -> None:
        for kind in DATA_PARALLEL if self.parallel else ():
            self.groups += [[i] for stage in range(self.stages) for i in self.of(stage, kind)]
        for kind in (EMBEDDING, CLIP):
            by_seq: dict[int, list[int]] = {}
            for stage in range(self.stages):
                for i in self.of(stage, kind):
                    by_seq.setdefault(self.templates[i].seq, []).append(i)
            self.groups += by_seq.values()

    def order(self) -> list[Rendezvous]:
        """All operations such that each comes after what it waits for. Raises ConfigError for a circle."""
        moved = {i for group in self.groups for i in group}
        lone_moves = [i for i, t in enumerate(self.templates) if t.kind in P2P and i not in moved]
        # A transfer without a peer still ends by its own duration
        groups = [*self.groups, *([i] for i in lone_moves)]
        grouped = {i: g for g, group in enumerate(groups) for i in group}
        groups += [[i] for i in range(len(self.templates)) if i not in grouped]
        grouped |= {group[0]: g for g, group in enumerate(groups) if group[0] not in grouped}
        left = [
            len({grouped[w] for i in group for w in self.waits[i]} - {g}) for g, group in enumerate(groups)
        ]
        after: list[set[int]] = [set() for _ in groups]
        for g, group in enumerate(groups):
            for i in group:
                for w in self.waits[i]:
                    if grouped[w] != g:
                        after[grouped[w]].add(g)
        ready, out = [g for g, n in enumerate(left) if not n], []
        while ready:
            g = ready.pop()
            kind = self.templates[groups[g][0]].kind
            across = kind == CLIP or (kind in DATA_PARALLEL and self.parallel)
            out.append(Rendezvous(tuple(groups[g]), tuple(tuple(self.waits[i]) for i in groups[g]), across))
            for h in after[g]:
                left[h] -= 1
                if not left[h]:
                    ready.append(h)
        if len(out) < len(groups):
            stuck = next(self.templates[groups[g][0]] for g, n in enumerate(left) if n)
            raise ConfigError(
                f"operations wait for each other in a circle, among them {stuck.kind} {stuck.seq} of stage "
                f"{stuck.stage}: expected clocks of workers within {CLOCK_S * 1e6:.0f} us"
            )
        return out


def moves(kind: str, parallel: bool) -> bool:
    """Return True if the duration of a kind counts from when the last member begins."""
    return kind in (*P2P, EMBEDDING, CLIP) or (kind in DATA_PARALLEL and parallel)
