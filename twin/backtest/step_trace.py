"""Step trace: operations of a synchronous training job, each with its worker, step, start and duration.

A worker is a pair of pipeline stage and data-parallel rank; its tensor-parallel GPUs go as one. The forms:
Chrome Trace Events (`.json`, also packed), a table as CSV, or as Parquet where pyarrow is installed. Kinds of
operations are those of Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis",
arXiv 2505.05713, whose traces have this form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from twin.catalogue import F64, ConfigError
from twin.tables import content_of

FORWARD, BACKWARD, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
P2P = ("forward-send", "forward-recv", "backward-send", "backward-recv")
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
DATA_PARALLEL = (GATHER, SCATTER, SEPARATE)
NORM, EMBEDDING, CLIP = "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad"
COLLECTOR = "gc"  # Python's garbage collection between the last backward pass and the reduction
KINDS = (FORWARD, BACKWARD, *P2P, *DATA_PARALLEL, NORM, EMBEDDING, CLIP, OPTIMIZER, COLLECTOR)
CODE = {kind: code for code, kind in enumerate(KINDS)}
COMMUNICATION = tuple(kind for kind in KINDS if kind not in (FORWARD, BACKWARD, OPTIMIZER, COLLECTOR))
COLUMNS = ("dp_rank", "stage", "step", "optype", "seq_id", "start_ts", "duration")  # in seconds
NEGATIVE_S = 0.01  # by clocks that differ, an operation may seem to end so long before it begins
_THREAD = re.compile(r"PP rank (\d+)")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StepTrace:
    """Operations [n]: where, when, of which kind (a place in KINDS); `chunk` of the model, -1 = not said."""

    step: Ints
    stage: Ints
    dp_rank: Ints
    kind: Ints
    seq: Ints
    chunk: Ints
    start_s: F64
    duration_s: F64


class _Args(msgspec.Struct):
    step: int | None = None
    seq_id: int | None = None
    model_chunk: int | None = None
    name: str = ""


class _TimelineEvent(msgspec.Struct):
    name: str
    ph: str
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: _Args = msgspec.field(default_factory=_Args)


def read_step_trace(path: Path) -> StepTrace:
    """Read a trace by the ending of its name. Raises ConfigError with file, place and what is expected."""
    names = [suffix.lower() for suffix in path.suffixes]
    if ".json" in names:
        columns = _timeline(path)
    elif ".csv" in names or ".parquet" in names:
        columns = _table(path, ".parquet" in names)
    else:
        raise ConfigError(f"{path}: expected a step trace as .json, .json.gz, .csv, .csv.gz or .parquet")
    return _checked(path, columns)


def _timeline(path: Path) -> dict[str, Any]:
    """Columns of Chrome Trace Events: pid is the data-parallel rank, a thread's name has its stage."""
    try:
        events = msgspec.json.decode(content_of(path), type=list[_TimelineEvent])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: expected a list of Chrome Trace Events: {error}") from error
    stages = {
        (e.pid, e.tid): int(found[1])
        for e in events
        if e.ph == "M" and e.name == "thread_name" and (found := _THREAD.search(e.args.name))
    }
    spans = [e for e in events if e.ph == "X"]
    unnamed = next((e for e in spans if (e.pid, e.tid) not in stages), None)
    if unnamed is not None:
        raise ConfigError(
            f"{path}: process {unnamed.pid}, thread {unnamed.tid}: expected a thread_name with 'PP rank N'"
        )
    return {
        "dp_rank": [e.pid for e in spans],
        "stage": [stages[e.pid, e.tid] for e in spans],
        "step": [-1 if e.args.step is None else e.args.step for e in spans],
        "optype": [e.name for e in spans],
        "seq_id": [-1 if e.args.seq_id is None else e.args.seq_id for e in spans],
        "mc": [-1 if e.args.model_chunk is None else e.args.model_chunk for e in spans],
        "start_ts": np.array([e.ts for e in spans]) * 1e-6,
        "duration": np.array([e.dur for e in spans]) * 1e-6,
    }


def _table(path: Path, parquet: bool) -> dict[str, Any]:
    import pandas as pd

    try:
        frame = pd.read_parquet(path) if parquet else pd.read_csv(path)
    except ImportError as error:
        raise ConfigError(
            f"{path}: Parquet needs pyarrow, which is not installed: install it, or convert the file to CSV"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    columns = {name: frame[name].to_numpy() for name in COLUMNS if name != "optype"}
    columns["mc"] = frame["mc"].to_numpy() if "mc" in frame.columns else np.full(len(frame), -1)
    return {**columns, "optype": frame["optype"].astype(str).tolist()}


def _checked(path: Path, columns: dict[str, Any]) -> StepTrace:
    """Return the trace, if its names are known and its numbers make sense."""
    names = columns["optype"]
    if not len(names):
        raise ConfigError(f"{path}: no operation in it")
    strange = sorted(set(names) - CODE.keys())
    if strange:
        known = ", ".join(KINDS)
        raise ConfigError(f"{path}: unknown operations {', '.join(strange[:5])}; expected some of {known}")
    try:
        ints = {
            name: np.asarray(columns[name]).astype(np.int64)
            for name in ("step", "stage", "dp_rank", "seq_id", "mc")
        }
        start_s, duration_s = (np.asarray(columns[n], np.float64) for n in ("start_ts", "duration"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: expected numbers: {error}") from error
    for name in ("step", "stage", "dp_rank", "seq_id"):
        if ints[name].min() < 0:
            raise ConfigError(f"{path}: operation {int(ints[name].argmin())} has no {name}; expected >= 0")
    bad = ~(np.isfinite(start_s) & (duration_s > -NEGATIVE_S) & np.isfinite(duration_s))
    if bad.any():
        raise ConfigError(f"{path}: operation {int(bad.argmax())}: expected a start, and a duration >= 0 s")
    kind = np.array([CODE[name] for name in names], np.int64)
    return StepTrace(ints["step"], ints["stage"], ints["dp_rank"], kind, ints["seq_id"], ints["mc"], start_s,
                     duration_s)  # fmt: skip
