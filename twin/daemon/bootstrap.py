"""Bootstrap: from a configuration to an engine that continues the last run, with its run folder locked.

It refuses to start on a wrong site, on `act` where that is not allowed, or on a folder in use.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from twin.api import open_tokens, server_tls
from twin.catalogue import NS, ConfigError, StorageError
from twin.config import Loaded, arming_faults, load_site, make_engine, make_policies
from twin.daemon.authority import AuthorityBook
from twin.engine import Engine
from twin.run import Keeping, Quarantine, Recorder, StartAnew, mend_unticked, never_ticked, resume
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import AuthorityChanged, EpochChanged, Event, SiteChanged, TicksSkipped

log = logging.getLogger(__name__)
ARMED = ("approve", "act")


@dataclass
class OpenedRun:
    """The state that a daemon starts from. `events` belong into its first frame."""

    engine: Engine
    spec: SiteSpec
    recorder: Recorder
    folder: Path
    authority: AuthorityBook
    last_tick: int
    last_ns: int
    events: list[Event] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    _lock: IO[str] | None = None

    def close(self) -> None:
        """Release the lock of the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def load_checked(loaded: Loaded, more: Sequence[str] = ()) -> tuple[SiteSpec, Site, dict[str, str]]:
    """(spec, site, configured authority). Raises ConfigError with every fault, arming and `more` included."""
    path = loaded.site_file
    if not path.exists():
        raise ConfigError(
            f"{loaded.path}: $.site: {path}: no such file; expected the site file, which says what stands "
            "where: `racktwin site discover` makes one"
        )
    spec, site = load_site(path)
    _, configured = make_policies(site.file)
    faults = [*more, *(f"{path}: {fault}" for fault in arming_faults(spec, site))]
    for policy, level in configured.items():
        if level in ARMED and (why := unarmed_because(loaded)):
            faults.append(f"{path}: $.policies.{policy}.authority: {level}, but {why}")
    if loaded.config.api is not None:
        for check in (server_tls, _tokens):
            try:
                check(loaded)
            except ConfigError as error:
                faults += [p for p in error.problems if p not in faults]
    if faults:
        raise ConfigError(faults)
    return spec, site, configured


def _tokens(loaded: Loaded) -> None:
    """Check that a configured tokens file is readable. The default file is created when needed."""
    if loaded.config.api is not None and loaded.config.api.tokens_file is not None:
        open_tokens(loaded)


def unarmed_because(loaded: Loaded) -> str | None:
    """Return the reason why this configuration forbids commands; None if it allows them."""
    if loaded.config.broker == "embedded" and not loaded.config.simulated:
        return (
            "the embedded broker knows no identities, so anybody on this host could command; expected a "
            "broker of yours (`broker: {host: ...}`), or `simulated: true` for the simulated pod"
        )
    return None


def open_run(loaded: Loaded) -> OpenedRun:
    """Open everything that the first tick needs. Raises ConfigError, StorageError."""
    spec, site, configured = load_checked(loaded)
    state = loaded.state
    lock = _hold(state)
    try:
        book = AuthorityBook(state, configured)
        if unarmed_because(loaded):  # whatever was set while another configuration held
            book.levels = {p: "advise" if v in ARMED else v for p, v in book.levels.items()}
        folder = state / "run"
        if never_ticked(folder):
            opened = _new_run(loaded, spec, site, folder, book)
        else:
            try:
                opened = _resumed(loaded, spec, site, folder, book)
            except StartAnew as error:
                opened = _new_run(loaded, spec, site, folder, book)
                opened.faults.insert(0, str(error))
                for poison in error.poisons:
                    opened.recorder.note(poison.record, sync=True)
    except OSError as error:
        lock.close()
        raise StorageError(
            f"{error.filename or state}: {error.strerror}; expected a file system with free space, and every "
            f"file below {state} to belong to the user of the daemon (uid {os.geteuid()})"
        ) from error
    except BaseException:
        lock.close()
        raise
    opened._lock = lock
    return opened


def _new_run(loaded: Loaded, spec: SiteSpec, site: Site, folder: Path, book: AuthorityBook) -> OpenedRun:
    """A run that begins; what starts left that ended before their first tick is mended."""
    faults: list[str] = []
    last_tick, last_ns = mend_unticked(folder, faults)
    events: list[Event] = []
    if last_tick >= 0:
        events.append(TicksSkipped(count=_missed_ticks(loaded, last_ns), why="restart"))
    engine = make_engine(site, book.levels)
    recorder = Recorder(engine, spec, folder, Keeping.of(loaded.config))
    return OpenedRun(engine, spec, recorder, folder, book, last_tick, last_ns, events, faults)


def _resumed(loaded: Loaded, spec: SiteSpec, site: Site, folder: Path, book: AuthorityBook) -> OpenedRun:
    resumed = resume(folder, lambda s: make_engine(build_site(s), book.levels), present=spec)
    # Authority and epoch come with the term that this process wins.
    replayed = [*resumed.bridge(), *resumed.pending]
    events: list[Event] = [e for e in replayed if not isinstance(e, AuthorityChanged | EpochChanged)]
    if not any(isinstance(e, TicksSkipped) for e in events):
        events.insert(0, TicksSkipped(count=_missed_ticks(loaded, resumed.last_ns), why="restart"))
    if site.spec_hash != resumed.engine.site.spec_hash:
        change = SiteChanged(site_hash=site.spec_hash, spec=spec.packed())
        if (poison := Quarantine(folder).record_of(change)) is not None:
            raise ConfigError(
                f"{loaded.site_file}: the engine failed on the change to this site "
                f"({poison.error}; {folder / poison.file}); expected the site file of before"
            )
        events.append(change)
    engine, how = resumed.engine, resumed.as_manifest()
    recorder = Recorder(engine, resumed.spec, folder, Keeping.of(loaded.config), how)
    for poison in resumed.poisons:
        recorder.note(poison.record, sync=True)
    last_tick, last_ns, faults = resumed.last_tick, resumed.last_ns, list(resumed.faults)
    return OpenedRun(engine, spec, recorder, folder, book, last_tick, last_ns, events, faults)


def _missed_ticks(loaded: Loaded, last_ns: int) -> int:
    """Return the number of ticks that were missed while no daemon ran."""
    return max(1, round((time.time_ns() - last_ns) / NS / loaded.config.tick_s) - 1)


def _hold(state: Path) -> IO[str]:
    """Lock the state folder for this process. Raises StorageError that names its owner."""
    try:
        # The recordings are for those who have a token, not for all on this host
        state.mkdir(0o700, parents=True, exist_ok=True)
        file = (state / "daemon.lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{state}: the state folder cannot be used: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read(40).strip()
        file.close()
        raise StorageError(
            f"{state}: is in use by process {owner or 'unknown'}; expected one daemon per state folder: stop "
            "that one, or give this one another `state`"
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
