"""One version up and one down: an older snapshot is read with defaults, a newer one refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from policies.node_replacement import Replacement
from tests.support.builders import Twin, Wish, eight_nodes, two_racks
from tests.support.journal_bodies import bodies_of
from twin.catalogue import StorageError, digest, pack
from twin.contracts import Windows
from twin.engine import snapshot
from twin.telemetry import STATED_FIELDS, events as ev

CAP = "gpu.power_cap_w"


def sealed(data: dict[str, Any], number: int) -> bytes:
    """A snapshot as a version with this format would have written it."""
    tree = {"format": number, "catalogue": snapshot.CATALOGUE_HASH, "data": data}
    body = zstandard.ZstdCompressor().compress(pack(tree))
    return b"rtsnap01" + digest(body).encode() + body


BOARD = ("value", "var", "waiting", "waiting_var", "in_use", "in_use_var", "reference", "reference_var",
         "fast", "slow", "held")  # fmt: skip


def xids_of_4(rings: dict[str, Any]) -> dict[str, Any]:
    """The filled places of each ring, the oldest first."""
    slots, many = len(rings["code"]), rings["many"].tolist()
    at = [(n % slots, row) for row, m in enumerate(many) for n in range(max(0, m - slots), m)]
    at_ns, code = ([rings[name][place] for place in at] for name in ("at_ns", "code"))
    return {"gpu": rings["index"], "kept": np.minimum(many, slots), "burst_ns": rings["burst_ns"],
            "at_ns": np.array(at_ns, np.int64), "code": np.array(code, np.int32)}  # fmt: skip


def as_of_4(data: dict[str, Any]) -> dict[str, Any]:
    """The same as format 4 laid it out."""
    board, findings, of = data["estimator"]["board"], dict(data["findings"]), dict(data["diagnosis"])
    kept = {"kept": {name: board[name] for name in BOARD}}
    board = {name: column for name, column in board.items() if name not in BOARD} | kept
    findings |= {"told": findings.pop("journaled"), "unheard": findings.pop("never_reported")}
    seen_ns = [(name.split("."), t_ns) for name, t_ns in of["readings"]["seen_ns"].items()]
    of |= {
        "format": 5,
        "readings": [[table, int(group), t_ns] for (table, group), t_ns in seen_ns],
        "tracks": of["tracks"]["tracks"],
        "watch": {t: {**m, "heard_s": 9.0, "period_s": np.ones(4)} for t, m in of["watch"]["meters"].items()},
        "wake": [[row[:4], row[4:]] for row in of.pop("downstream")["causes"]],
        "growth": {**of["growth"], "xids": xids_of_4(of["growth"]["xids"])},
        "drifts": [[name, *columns] for name, columns in of["drifts"].items()],
        "book": {"waiting": [[row[:4], row[4:]] for row in of["book"]["waiting"]],
                 "told": [[*row[:9], list(row[9].items()), *row[10:]] for row in of["book"]["reported"]]},
    }  # fmt: skip
    return {**data, "estimator": {**data["estimator"], "board": board}, "findings": findings, "diagnosis": of}


def as_of_2(data: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a snapshot that format 2 held."""
    data = as_of_4(data)
    out = {**data, "jobs": dict(data["jobs"]), "arbiter": dict(data["arbiter"])}
    del out["windows"], out["arbiter"]["settling"]
    for name in ("accounts", "queues", "known", "unslotted", *STATED_FIELDS):
        del out["jobs"][name]
    return out


@pytest.mark.parametrize("events", [(), (ev.JobStarted(job="j", nodes=("r1/node0",), kind="batch"),)])
def test_the_format_before_is_read_with_defaults(events: tuple[ev.Event, ...]) -> None:
    wish = Wish()
    twin = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0], 200, 300, 300)
    twin.tick({"gpu.power_limit_w": 350.0}, *events)
    twin.run(3, {"gpu.power_limit_w": 300.0})
    data = snapshot.decode(sealed(as_of_2(twin.engine.dump()), 2))
    back = Twin(eight_nodes(), [wish])
    back.engine.restore(data)
    back.now_ns, back.number = twin.now_ns, twin.number
    assert back.engine.checksum() == twin.engine.checksum()
    assert back.engine.jobs.known == bool(events)
    for _ in range(20):
        one, other = (t.tick({"gpu.power_limit_w": 300.0}) for t in (twin, back))
        assert digest(bodies_of(one)) == digest(bodies_of(other))


def test_faults_and_what_was_learned_are_read_from_format_4() -> None:
    twin = Twin(two_racks())
    values = {"gpu.power_w": 700.0, "node.psu1_power_w": 2000.0, "node.psu2_power_w": 2000.0,
              "rack.power_w": 1e5, "rack.flow_lpm": 80.0, "rack.supply_temp_c": 25.0}  # fmt: skip
    twin.run(40, values | {"rack.return_temp_c": 42.0})
    alone = np.where(np.arange(36) == 3, 0.0, 2000.0)
    twin.run(6, values | {"node.psu2_power_w": alone, "rack.leak_state": np.array([1.0, 0.0])})
    errors = [ev.FaultReported(id=f"x{k}", table="gpu", name="r1/node0/gpu1", code=c)
              for k, c in enumerate((94, 79, 13))]  # fmt: skip
    twin.tick(values | {"node.psu2_power_w": np.where(np.arange(36) == 9, 0.0, alone)}, *errors)
    diagnosis = twin.engine.diagnosis
    assert sorted(c.kind for c in diagnosis.book.reported.values()) == ["leak", "psu_lost", "xid_burst"]
    assert ("psu_lost", "node", 9, "") in diagnosis.book.waiting
    assert diagnosis.downstream.causes
    assert twin.engine.findings.active
    back = Twin(two_racks())
    back.engine.restore(snapshot.decode(sealed(as_of_4(twin.engine.dump()), 4)))
    back.now_ns, back.number = twin.now_ns, twin.number
    assert back.engine.diagnosis.faults == diagnosis.faults
    assert back.engine.checksum() == twin.engine.checksum()
    for _ in range(5):
        one, other = (t.tick(values) for t in (twin, back))
        assert digest(bodies_of(one)) == digest(bodies_of(other))
    assert back.engine.checksum() == twin.engine.checksum()


def test_formats_that_cannot_be_read_say_so() -> None:
    data = Twin(eight_nodes()).engine.dump()
    later = snapshot.FORMAT + 1
    with pytest.raises(StorageError, match=f"format {later}, which a later version wrote; expected"):
        snapshot.decode(sealed(data, later))
    with pytest.raises(StorageError, match="format 1; expected 2 or 3 or 4"):
        snapshot.decode(sealed(data, 1))


@pytest.mark.long
def test_after_a_downgrade_the_trace_is_enough(tmp_path: Path) -> None:
    """The snapshot of a later version is refused by name and left as it is; put away, all is made again."""
    from tests.support.golden_story import engine_for, record
    from twin.run import resume

    engine, _ = record(tmp_path, 60)
    for path in tmp_path.glob("snapshot-*.rts"):
        path.unlink()
    later = sealed(engine.dump(), snapshot.FORMAT + 1)
    path = tmp_path / "snapshot-000000059.rts"
    path.write_bytes(later)
    with pytest.raises(StorageError, match=f"snapshot format {snapshot.FORMAT + 1}"):
        resume(tmp_path, engine_for)
    assert path.read_bytes() == later
    path.unlink()
    back = resume(tmp_path, engine_for)
    assert back.snapshot_tick == -1
    assert back.engine.checksum() == engine.checksum()


@pytest.mark.slow
def test_after_an_upgrade_a_start_goes_on_from_the_older_snapshot(tmp_path: Path) -> None:
    from tests.support.golden_story import engine_for, record
    from twin.run import resume

    engine, _ = record(tmp_path, 60)
    for path in tmp_path.glob("snapshot-*.rts"):
        path.unlink()
    for name in STATED_FIELDS:  # nobody told that version anything of checkpoints, nor of nodes that slept
        getattr(engine.jobs, name)[:] = 0.0
    engine.windows = Windows(engine.site)
    data = engine.dump()
    (tmp_path / "snapshot-000000059.rts").write_bytes(sealed(as_of_2(data), 2))
    back = resume(tmp_path, engine_for)
    assert back.snapshot_tick == engine.state.tick
    assert back.engine.checksum() == engine.checksum()


def test_a_column_that_a_policy_did_not_have_yet_begins_afresh() -> None:
    before = Twin(eight_nodes(), [Replacement()])
    before.tick()
    data = before.engine.dump()
    data["memory"]["replacement"]["phase"][3] = 1
    for name in list(data["memory"]["replacement"]):
        if name != "phase":
            del data["memory"]["replacement"][name]
    after = Twin(eight_nodes(), [Replacement()])
    after.engine.restore(snapshot.decode(snapshot.encode(data)))
    after.now_ns, after.number = before.now_ns, before.number
    assert after.engine.memory["replacement"]["phase"][3] == 1
    after.run(12)
    assert after.engine.suspended == {}
