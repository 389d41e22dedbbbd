"""Snapshots: the engine as plain data and arrays, and back; with the trace after it, the only start-up path.

Holds state, memories, leases and parameters, not the history rings (a restart reads that much trace before
the snapshot) and not the site, which is named by hash and must be the one the engine was made with. May
import the core; writes no file.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from twin.contracts import Forecast, Proposal
from twin.errors import ContractError, StorageError
from twin.jobs import TOLD
from twin.trace import CATALOGUE
from twin.tree import digest, pack, unpack

if TYPE_CHECKING:
    from twin.engine import Engine

FORMAT = 3
READS = (2, 3)  # formats that this version reads
MAX_BYTES = 8 * 2**30
_MAGIC = b"rtsnap01"


def dump_engine(engine: Engine) -> dict[str, Any]:
    """Everything that decides what the engine does next."""
    return {
        "site_hash": engine.site.spec_hash,
        "tick": engine.state.tick,
        "now_ns": engine.state.now_ns,
        "unwatched_ns": engine.state.unwatched_ns,
        "tables": {name: table.arrays() for name, table in engine.state.tables.items()},
        "jobs": engine.jobs.dump(),
        "arbiter": engine.arbiter.dump(),
        "estimator": engine.estimator.dump(),
        "diagnosis": engine.diagnosis.dump(),
        "health": engine.health.dump(),
        "findings": engine.findings.dump(),
        "intake": engine.intake.dump(),
        "windows": engine.windows.dump(),
        "book": engine.book.dump(),
        "memory": engine.memory,
        "in_force": {name: [_proposal(p) for p in some] for name, some in engine.in_force.items()},
        "ran_ns": engine.ran_ns,
        "fitted_ns": engine.fitted_ns,
        "suspended": engine.suspended,
        "usual_dt_s": engine.usual_dt_s,
        "models": {n: {"parameters": m.parameters(), "memory": m.memory()} for n, m in engine.models.items()},
        "forecasts": [
            [f.signal, f.horizon_s, f.mean, f.lo, f.hi, f.model, f.basis] for f in engine.forecasts.values()
        ],
    }


def _proposal(p: Proposal) -> list[Any]:
    return [p.control, p.index, p.lo, p.hi, p.want, p.reason]


def restore_engine(engine: Engine, data: dict[str, Any]) -> None:
    """Put an engine, made for the same site and plug-ins, into the state that `dump_engine` took."""
    if data["site_hash"] != engine.site.spec_hash:
        raise StorageError(f"snapshot is of site {data['site_hash']}, this is {engine.site.spec_hash}")
    # One that speaks after all others begins afresh: leases name their owners by place
    missing = sorted(set(data["memory"]) ^ {p.name for p in engine.policies[: len(data["memory"])]})
    if missing:
        raise StorageError(f"snapshot and configuration differ in policies: {', '.join(missing)}")
    engine.state.tick, engine.state.now_ns = data["tick"], data["now_ns"]
    if "unwatched_ns" in data:
        engine.state.unwatched_ns = np.array(data["unwatched_ns"])
    for name, arrays in data["tables"].items():
        engine.state.tables[name].restore(arrays)
    engine.jobs.restore(data["jobs"])
    engine.arbiter.restore(data["arbiter"])
    engine.estimator.restore(data["estimator"])
    if "diagnosis" in data:  # one of a version before has none: faults are found again
        engine.diagnosis.restore(data["diagnosis"])
    if "health" in data:
        engine.health.restore(data["health"])
    engine.findings.restore(data["findings"])
    engine.intake.restore(data["intake"])
    engine.windows.restore(data["windows"])
    if "book" in data:
        engine.book.restore(data["book"])
    engine.memory |= {  # a column that is new to the snapshot begins as it does in a new run
        p: engine.memory[p] | {k: np.array(v) for k, v in columns.items()}
        for p, columns in data["memory"].items()
    }
    engine.in_force |= {name: [Proposal(*p) for p in some] for name, some in data["in_force"].items()}
    engine.ran_ns, engine.fitted_ns = dict(data["ran_ns"]), dict(data["fitted_ns"])
    engine.suspended = dict(data["suspended"])
    engine.usual_dt_s = float(data["usual_dt_s"])
    for name, held in data["models"].items():
        if name not in engine.models:
            continue  # a model that came or went, as with another version, begins afresh: it only forecasts
        with contextlib.suppress(ContractError):  # of another version: it begins afresh too
            if held["parameters"]:
                engine.models[name].load(held["parameters"])
            engine.models[name].restore(held["memory"])
    forecasts = [Forecast(*f) for f in data["forecasts"]]
    engine.forecasts = {
        (f.signal, f.horizon_s): f for f in forecasts if f.model.partition("@")[0] in engine.models
    }


def encode(data: dict[str, Any]) -> bytes:
    """The snapshot as bytes, with a check over all of it."""
    body = zstandard.ZstdCompressor(level=1).compress(
        pack({"format": FORMAT, "catalogue": CATALOGUE, "data": data})
    )
    return _MAGIC + digest(body).encode() + body


def decode(raw: bytes) -> dict[str, Any]:
    """What `encode` made. Raises StorageError for anything else."""
    if raw[:8] != _MAGIC:
        raise StorageError("not a racktwin snapshot")
    body = raw[40:]
    if digest(body).encode() != raw[8:40]:
        raise StorageError("snapshot is damaged: its check does not match")
    try:
        size = zstandard.frame_content_size(body)
        if not 0 <= size <= MAX_BYTES:
            raise StorageError(f"snapshot claims to hold {size} bytes; expected at most {MAX_BYTES}")
        tree = unpack(zstandard.ZstdDecompressor().decompress(body))
    except zstandard.ZstdError as error:
        raise StorageError(f"snapshot cannot be decompressed: {error}") from error
    found = tree.get("format") if isinstance(tree, dict) else None
    if found not in READS or not isinstance(tree.get("data"), dict):
        later = ", which a later version wrote" if isinstance(found, int) and found > FORMAT else ""
        raise StorageError(f"snapshot format {found}{later}; expected {' or '.join(map(str, READS))}")
    if tree.get("catalogue") != CATALOGUE:  # columns are rows of the catalogue
        raise StorageError(f"snapshot of the catalogue {tree.get('catalogue')}; this version has {CATALOGUE}")
    data: dict[str, Any] = tree["data"]
    return data if found == FORMAT else _from_2(data)


def _from_2(data: dict[str, Any]) -> dict[str, Any]:
    """A snapshot of format 2, which knew neither windows nor takeovers and less of jobs, as format 3."""
    jobs, out = data.get("jobs"), {"windows": {"windows": [], "ended_ns": {}}, **data}
    if isinstance(jobs, dict):
        n = len(jobs["names"])
        out["jobs"] = {
            "accounts": [""] * n,
            "known": bool(np.any(jobs["generation"])),
            "unslotted": [],
            **{name: np.zeros(n) for name in TOLD},
            **jobs,
        }
    if isinstance(data.get("arbiter"), dict):
        out["arbiter"] = {"settling": {}, **data["arbiter"]}
    return out
