"""One version up and one down: an older snapshot is read with defaults, a newer one refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zstandard

from policies.node_replacement import Replacement
from tests.support.builders import Twin, Wish, eight_nodes
from tests.support.journal_bodies import bodies_of
from twin.catalogue import StorageError, digest, pack
from twin.engine import snapshot
from twin.telemetry import TOLD, events as ev

CAP = "gpu.power_cap_w"


def sealed(data: dict[str, Any], number: int) -> bytes:
    """A snapshot as a version with this format would have written it."""
    tree = {"format": number, "catalogue": snapshot.CATALOGUE_HASH, "data": data}
    body = zstandard.ZstdCompressor().compress(pack(tree))
    return b"rtsnap01" + digest(body).encode() + body


def as_of_2(data: dict[str, Any]) -> dict[str, Any]:
    """What format 2 held of it."""
    out = {**data, "jobs": dict(data["jobs"]), "arbiter": dict(data["arbiter"])}
    del out["windows"], out["arbiter"]["settling"]
    for name in ("accounts", "known", "unslotted", *TOLD):
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


def test_formats_that_cannot_be_read_say_so() -> None:
    data = Twin(eight_nodes()).engine.dump()
    later = snapshot.FORMAT + 1
    with pytest.raises(StorageError, match=f"format {later}, which a later version wrote; expected"):
        snapshot.decode(sealed(data, later))
    with pytest.raises(StorageError, match="format 1; expected 2 or 3 or 4"):
        snapshot.decode(sealed(data, 1))


@pytest.mark.slow
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
    from twin.run.storage import read_snapshot

    engine, _ = record(tmp_path, 60)
    for path in tmp_path.glob("snapshot-*.rts"):
        path.unlink()
    for name in TOLD:  # nobody told that version anything of checkpoints
        getattr(engine.jobs, name)[:] = 0.0
    data = engine.dump()
    (tmp_path / "snapshot-000000059.rts").write_bytes(sealed(as_of_2(data), 2))
    assert read_snapshot(tmp_path)[0] is not None
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
