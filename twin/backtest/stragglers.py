"""Straggler analysis: how long a training job's steps would take if some of its operations were not slow.

The ideal duration of an operation is what its kind takes over all workers and steps: the mean of a
computation, the median of a transfer. A case gives each operation either its recorded or its ideal duration;
the step's time follows from the step graph. Slowdown S = T / T_ideal; S of an operation kind, stage, rank or
worker is the same with only its durations recorded; what it explains is (T - T_mended) / (T - T_ideal), with
only its durations ideal. After arXiv 2505.05713, equations 1 to 5; here each worker is a case of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from twin.backtest.step_graph import Rendezvous, StepGraph, TraceCells, cells_of, moves
from twin.backtest.step_trace import (
    CODE,
    COMMUNICATION,
    KINDS,
    NEGATIVE_S,
    OPTIMIZER,
    P2P,
    StepTrace,
    read_step_trace,
)
from twin.catalogue import F64, Bool, ConfigError

BATCH_BYTES = 64 << 20  # of the ends of one operation over all cases that are worked out at once
NAMED_PU = (
    0.5  # of the slowdown, for a worker, rank or stage to be named as its cause; source: the paper, 5.1
)
SLOW_PU = 1.05  # below, a job has no straggler to speak of; source: estimate
TOP_PERCENT = 3  # of the workers, whose repair M_W counts; source: the paper, equation 5
LIMIT_PU = 0.02  # by which a published result may be missed


class DurationCase(NamedTuple):
    """Operations [kind, stage, rank] that have their recorded durations; the others have ideal ones."""

    name: str
    recorded: Bool


@dataclass(frozen=True)
class WhatIf:
    """A trace that is ready for cases."""

    graph: StepGraph
    stops: list[Rendezvous]
    duration_s: F64  # [template, step, rank]: of computing, or of moving once all are there
    ideal_s: F64  # [template]
    cells: TraceCells

    @property
    def shape(self) -> tuple[int, int, int]:
        """Kinds, stages, ranks."""
        return len(KINDS), self.graph.stages, self.duration_s.shape[2]

    def step_times(self, cases: list[DurationCase]) -> F64:
        """Time of each step in each case [case, step]."""
        _, steps, ranks = self.duration_s.shape
        room = max(1, BATCH_BYTES // (8 * steps * ranks * 32))
        parts = [cases[i : i + room] for i in range(0, len(cases), room)]
        return np.concatenate([self._run(np.stack([s.recorded for s in part])) for part in parts])

    def _run(self, recorded: Bool) -> F64:
        ends: dict[int, F64] = {}
        uses = np.zeros(len(self.graph.templates), np.int64)
        for waits in self.graph.waits:
            np.add.at(uses, waits, 1)
        zero = np.zeros((len(recorded), *self.duration_s.shape[1:]))
        last = np.zeros(zero.shape[:2])
        closes = any(t.kind == OPTIMIZER for t in self.graph.templates)
        for stop in self.stops:
            begun = zero
            for before in stop.waits:
                for i in before:
                    begun = np.maximum(begun, ends[i])
                    uses[i] -= 1
                    if not uses[i]:
                        del ends[i]
            if stop.across:
                begun = begun.max(axis=2, keepdims=True)
            for i in stop.members:
                t = self.graph.templates[i]
                kept = recorded[:, CODE[t.kind], t.stage][:, None, :]
                end = begun + np.where(kept, self.duration_s[i], self.ideal_s[i])
                if uses[i]:
                    ends[i] = end
                if t.kind == OPTIMIZER or not closes:
                    np.maximum(last, end.max(axis=2), out=last)
        return last


def what_if(trace: StepTrace) -> WhatIf:
    """Prepare a trace. Gradients are exchanged if there is more than one rank."""
    cells = cells_of(trace)
    parallel = cells.start_s.shape[2] > 1
    graph = StepGraph(cells.templates, parallel)
    stops, duration = graph.order(), cells.duration_s.copy()
    for stop in stops:
        if not moves(graph.templates[stop.members[0]].kind, parallel):
            continue
        begun = cells.start_s[list(stop.members)].max(axis=0)
        begun = begun.max(axis=1, keepdims=True) if stop.across else begun
        for i in stop.members:
            moved = cells.start_s[i] + cells.duration_s[i] - begun
            duration[i] = np.where(moved <= -NEGATIVE_S, 0.0, moved)
    kinds = np.array([CODE[t.kind] for t in graph.templates])
    ideal = np.zeros(len(kinds))
    for kind in np.unique(kinds):
        some = duration[kinds == kind]
        ideal[kinds == kind] = np.median(some) if KINDS[kind] in COMMUNICATION else some.mean()
    return WhatIf(graph, stops, duration, ideal, cells)


def _cases(case: WhatIf) -> list[DurationCase]:
    """All recorded, all ideal; each kind, stage, rank and worker alone, and all but it."""
    _, stages, ranks = case.shape
    places: dict[str, tuple[Any, Any, Any]] = {}
    every = slice(None)
    present = dict.fromkeys(t.kind for t in case.graph.templates)
    for kind in present:
        name = f"{kind.partition('-')[0]}-pp-comm" if kind in P2P else kind
        codes = [CODE[k] for k in present if k == kind or (kind in P2P and k in P2P and k[:7] == kind[:7])]
        places[f"kind {name}"] = (codes, every, every)
    places |= {f"stage {s}": (every, s, every) for s in range(stages)}
    places |= {f"rank {r}": (every, every, r) for r in range(ranks)}
    places |= {f"worker {s},{r}": (every, s, r) for s in range(stages) for r in range(ranks)}
    out = [
        DurationCase("recorded", np.ones(case.shape, np.bool_)),
        DurationCase("ideal", np.zeros(case.shape, np.bool_)),
    ]
    for name, place in places.items():
        alone = np.zeros(case.shape, np.bool_)
        alone[place] = True
        out += [DurationCase(f"only {name}", alone), DurationCase(f"mended {name}", ~alone)]
    return out


def analyse_trace(path: Path, gpus_per_worker: int = 1) -> dict[str, Any]:
    """Result for one trace as plain data. Raises ConfigError."""
    case = what_if(read_step_trace(path))
    found = _summary(case)
    cells = case.cells
    took_s = (cells.start_s + cells.duration_s).max(axis=(0, 2)) - cells.start_s.min(axis=(0, 2))
    workers = case.shape[1] * case.shape[2]
    wasted_s = (found["step_s"] - found["ideal_s"]) * len(cells.steps)
    return {
        "trace": str(path),
        "steps": len(cells.steps),
        "steps_dropped": cells.dropped,
        "stages": case.shape[1],
        "dp_ranks": case.shape[2],
        "gpus": workers * gpus_per_worker,
        "recorded_s": float(took_s.mean()),
        "graph_error_pu": float(took_s.mean() / found["step_s"] - 1.0),
        "wasted_gpu_h": wasted_s * workers * gpus_per_worker / 3600.0,
        **found,
    }


def _summary(case: WhatIf) -> dict[str, Any]:
    cases = _cases(case)
    mean = dict(zip([s.name for s in cases], case.step_times(cases).mean(axis=1).tolist(), strict=True))
    step_s, ideal_s = mean["recorded"], mean["ideal"]
    lost_s = step_s - ideal_s
    tables: dict[str, list[dict[str, Any]]] = {"kind": [], "stage": [], "rank": [], "worker": []}
    for name, time_s in mean.items():
        if name.startswith("only "):
            table, _, what = name[5:].partition(" ")
            explained = (step_s - mean[f"mended {name[5:]}"]) / lost_s if lost_s > 0.0 else 0.0
            tables[table].append({"name": what, "slowdown": time_s / ideal_s, "explains_pu": explained})
    for rows in tables.values():
        rows.sort(key=lambda row: -row["slowdown"])
    scores = {f"{s},{r}": min(_slowdown(tables["stage"], s), _slowdown(tables["rank"], r))
              for s in range(case.shape[1]) for r in range(case.shape[2])}  # fmt: skip
    # Workers of equal score are taken in the order of ranks, as the paper's artifact does
    order = sorted(scores, key=lambda name: -scores[name])[: -(-len(scores) * TOP_PERCENT // 100)]
    last = np.zeros(case.shape, np.bool_)
    last[:, -1] = True
    worst = np.zeros(case.shape, np.bool_)
    for name in order:
        stage, rank = map(int, name.split(","))
        worst[:, stage, rank] = True
    mended = case.step_times([DurationCase("M_W", ~worst), DurationCase("M_S", ~last)]).mean(axis=1)
    m_w, m_s = ((step_s - mended) / lost_s).tolist() if lost_s > 0.0 else (0.0, 0.0)
    return {
        "step_s": step_s,
        "ideal_s": ideal_s,
        "slowdown": step_s / ideal_s,
        "cause": _cause(tables, step_s / ideal_s, m_w),
        "workers_explain_pu": m_w,
        "last_stage_explains_pu": m_s,
        "worst_workers": order,
        **{f"by_{name}": rows for name, rows in tables.items()},
    }


def _slowdown(rows: list[dict[str, Any]], name: int) -> float:
    return float(next(row["slowdown"] for row in rows if row["name"] == str(name)))


def _cause(tables: Mapping[str, list[dict[str, Any]]], slowdown: float, m_w: float) -> str:
    """The smallest part that explains half of the slowdown, in words."""
    if slowdown < SLOW_PU:
        return "none: no straggler to speak of"
    for table, words in (
        ("worker", "worker (stage, rank)"),
        ("rank", "data-parallel rank"),
        ("stage", "stage"),
    ):
        row = max(tables[table], key=lambda row: row["explains_pu"])
        if row["explains_pu"] >= NAMED_PU and len(tables[table]) > 1:
            return f"{words} {row['name']}"
    if m_w >= NAMED_PU:
        return "a few workers"
    return "no fixed place: durations vary from step to step"


def compare_published(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Deviations from `result-NAME.json`, `mw-NAME.json` and `ms-NAME.json` of a trace `...-NAME.ending`."""
    name = Path(found["trace"]).name.partition(".")[0].rpartition("-")[2]
    published: dict[str, Any] = {}
    for part in ("result", "mw", "ms"):
        file = folder / f"{part}-{name}.json"
        try:
            published[part] = msgspec.json.decode(file.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}; expected a published result") from error
    result = published["result"]
    deviations = {"slowdown": found["slowdown"] / result["blocking_slowdown"] - 1.0}
    pairs = {"by_kind": "optype", "by_stage": "stage", "by_rank": "dp_rank"}
    for table, key in pairs.items():
        theirs = result[f"blocking_decompose_by_{key}"]
        ours = {row["name"]: row["slowdown"] for row in found[table]}
        missing = theirs.keys() ^ ours.keys()
        if missing:
            raise ConfigError(
                f"{folder}: {key} {', '.join(sorted(missing))}: expected in both the trace and the result"
            )
        deviations[table] = max((ours[k] / theirs[k] - 1.0 for k in theirs), key=abs)
    first = all(
        found[table][0]["name"] == next(iter(result[f"blocking_decompose_by_{key}"]))
        for table, key in pairs.items()
    )
    return {
        "name": name,
        "slowdown": result["blocking_slowdown"],
        "deviations_pu": deviations,
        "cause_agrees": first,
        "workers_explain_pu": published["mw"]["Mw"],
        "last_stage_explains_pu": published["ms"]["Ms"],
    }
