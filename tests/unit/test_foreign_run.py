"""A run folder from elsewhere brings no code: each site that it describes is asked, not the first alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.builders import eight_nodes, spec_of
from twin.cli.main import main
from twin.engine import snapshot
from twin.run.quarantine import Quarantine, find_poison
from twin.run.trace import FORMAT, MAGIC, Header, TraceEncoder, record
from twin.site import SiteSpec
from twin.telemetry import Frame, TicksSkipped

POISON = Frame(21, 21_000_000_000, 1.0, (), (), (TicksSkipped(id="x", count=1),), False)


def segment(folder: Path, number: int, spec: SiteSpec, first_tick: int) -> None:
    """A segment of the trace, without a frame."""
    encoder = TraceEncoder()
    header = encoder.header(Header(FORMAT, spec.digest(), spec.packed(), first_tick))
    frame = encoder.encode(Frame(first_tick, first_tick * 10**9, 1.0, (), (), (), False))
    (folder / f"trace-{number:06}.rt").write_bytes(MAGIC + record(header) + record(frame))


@pytest.mark.parametrize("verb", [("replay", "--trace"), ("quarantine",)])
def test_a_plug_in_of_a_later_segment_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "brought_along.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = {"kind": "brought_along:Policy", "authority": "advise"}
    hostile = spec_of(eight_nodes(policies={"x": policy}))
    segment(folder, 0, spec_of(eight_nodes()), 5)
    segment(folder, 1, hostile, 20)
    (folder / "snapshot-19.rts").write_bytes(snapshot.encode({"site_hash": hostile.digest()}))
    store = Quarantine(folder)
    poison = find_poison(None, POISON, lambda _, f: "no" if f.events else "")  # type: ignore[arg-type]
    store.keep(poison, POISON, hostile.digest(), hostile.packed())
    again = ["--again"] if verb == ("quarantine",) else []
    assert main(["trace", *verb, str(folder), *again]) != 0 or again
    said = "".join(capsys.readouterr())
    assert "loads code from outside racktwin" in said.replace("\n", " ")
    assert "brought_along" not in sys.modules
