"""A recorded run of which the beginning may be pruned: where a replay of it can start. Part of the shell."""

from __future__ import annotations

from pathlib import Path

import msgspec

from twin import snapshot
from twin.app.compare import Since
from twin.app.run_files import segments_of
from twin.app.startup import EngineFactory, Resumed, frames_since, warm
from twin.app.storage import read_holes
from twin.engine import Engine
from twin.errors import ConfigError, StorageError
from twin.journal import GENESIS
from twin.site import SiteSpec
from twin.state import State


def open_recorded(folder: Path, engine_factory: EngineFactory) -> tuple[Engine, SiteSpec, Since | None]:
    """An engine to replay a whole run with: new, or, where the beginning was pruned, at the oldest snapshot
    that the trace follows. Touches no file. Raises StorageError if there is no such snapshot.
    """
    faults: list[str] = []
    segments = segments_of(folder, faults)
    if not segments:
        raise StorageError(f"{folder}: no readable trace segments (trace-*.rt) here")
    spec = msgspec.json.decode(segments[0].header.spec, type=SiteSpec)
    if segments[0].header.first_tick == 0:
        return engine_factory(spec), spec, None
    specs = {s.header.site_hash: s.header.spec for s in segments}
    holes = read_holes(folder)
    for path in sorted(folder.glob("snapshot-*.rts")):
        tick = int(path.stem[9:])
        begun = [s for s in segments if s.header.first_tick <= tick + 1]
        if not begun or any(first <= tick + 1 <= last for first, last in holes):
            continue
        try:
            data = snapshot.decode(path.read_bytes())
            spec = msgspec.json.decode(specs.get(data["site_hash"], b""), type=SiteSpec)
            engine = engine_factory(spec)
            snapshot.restore_engine(engine, data)
        except (StorageError, ConfigError, OSError, msgspec.MsgspecError) as error:
            faults.append(f"{path.name}: {error}")
            continue
        out = Resumed(engine, spec, tick, engine.state.now_ns, tick)
        scratch = State(engine.site.sizes)
        for frame in frames_since(segments, out, mend=False):
            if frame.tick > tick:
                break
            warm(engine, scratch, frame)
        place = data.get("journal", {})
        return engine, spec, Since(tick, place.get("seq", 0), place.get("head", GENESIS))
    raise StorageError(
        f"{folder}: begins at tick {segments[0].header.first_tick}: what was before is pruned, and no "
        f"snapshot that is followed by trace is left to start at{': ' if faults else ''}{'; '.join(faults)}"
    )
