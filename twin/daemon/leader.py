"""Election: decides which daemon may act, and the number of its term, which every command carries.

`Election` is the interface; the file lock here, which the kernel releases when its holder dies, serves one
host, and `twin.daemon.etcd` serves several.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from twin.catalogue import StorageError
from twin.config import Broker, Loaded
from twin.run import atomic_write
from twin.site import HALL_BUDGET, Site

log = logging.getLogger(__name__)

POLL_S = 1.0  # how often a standby looks whether the place is free
MAX_HEAD = 16_384  # characters
MAX_EPOCH = 2**53
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")


@dataclass(frozen=True, slots=True)
class Term:
    """Term of a leader. `predecessor` is the former leader with its epoch and head; empty without one."""

    epoch: int
    name: str
    predecessor: str = ""
    predecessor_epoch: int = 0
    predecessor_head: str = ""


OnChange = Callable[[Term | None], None]


class Election(Protocol):
    """Interface that states whether the daemon leads."""

    term: Term | None

    async def run(self, on_change: OnChange) -> None:
        """Contend until cancelled, then resign. `on_change` is called with each term won; None: it is
        over."""
        ...

    def may_act(self, now_s: float | None = None) -> bool:
        """Return True if this daemon's term certainly holds at `now_s` of `clock_s` (default: now)."""
        ...

    def publish_head(self, head: str, soon: bool = False) -> None:
        """Keep the handover for a successor, stored at a modest rate; `soon`: without waiting."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the status for display: kind, role, epoch, leader."""
        ...


def clock_s() -> float:
    """Return the seconds of a clock that cannot be set and counts while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def pause(seconds: float, unless: asyncio.Event) -> None:
    """Sleep until the time is over or `unless` is set; clear `unless`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await unless.wait()
    unless.clear()


class EpochFile:
    """File of the highest epoch known to this state folder. The epoch never decreases.

    The seconds since 1970 are its floor, so that a lost file costs no order unless the clock is wrong too.
    """

    def __init__(self, path: Path, wall_s: Callable[[], float] = time.time) -> None:
        self.path, self._wall_s = path, wall_s
        self.highest = 0

    def next(self, seen: int = 0) -> int:
        """Return an epoch above all known ones and above `seen`, without storing it."""
        self.highest = max(self.highest, self._read())
        return max(self.highest + 1, seen + 1, int(self._wall_s()))

    def store(self, epoch: int) -> None:
        """Store `epoch` on disk. Raises StorageError."""
        if epoch <= max(self.highest, self._read()):
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, f"{epoch}\n")
        except OSError as error:
            raise StorageError(
                f"{self.path}: the epoch cannot be stored: {error}; nobody can lead"
            ) from error
        self.highest = epoch

    def _read(self) -> int:
        try:
            text = self.path.read_text(encoding="ascii")
        except FileNotFoundError:
            return 0
        except (OSError, UnicodeDecodeError) as error:
            log.warning("%s: cannot be read: %s; the epoch is taken from the clock", self.path, error)
            return 0
        found = re.fullmatch(r"(\d{1,16})\n?", text)
        if found is None or int(found[1]) > MAX_EPOCH:
            log.warning("%s: holds no epoch; the epoch is taken from the clock", self.path)
            return 0
        return int(found[1])


class HostElection:
    """A lock per host: of several daemons for one site on one host, each with a state folder of its own, one
    leads and the others stand by. Two hosts do not see each other.

    The lock's file also hands on the last epoch, name and head, as far as this user may write it.
    """

    def __init__(self, path: Path, name: str, epochs: EpochFile) -> None:
        self.path, self.name, self._epochs = path, name, epochs
        self.term: Term | None = None
        self._file: int | None = None
        self._head, self._error = "", ""
        self._stored: str | None = None

    async def run(self, on_change: OnChange) -> None:
        """Contend until cancelled. Raises StorageError when lock or epoch cannot be kept."""
        while True:
            while not self._take():
                await asyncio.sleep(POLL_S)
            try:
                self._enter()
                on_change(self.term)
                while self.may_act():
                    await asyncio.sleep(POLL_S)
                    self._write()
            finally:
                self._leave()
            self._error = f"{self.path} was removed or replaced while it was locked"
            log.error("%s; the term is over", self._error)
            on_change(None)

    def may_act(self, now_s: float | None = None) -> bool:
        """True while the lock is held, by the name under which others look for it."""
        if self.term is None or self._file is None:
            return False
        return self._is_ours(self._file)

    def publish_head(self, head: str, soon: bool = False) -> None:
        """Keep `head` for the successor; written once a second, or at once."""
        if len(head) <= MAX_HEAD:
            self._head = head
            if soon:
                self._write()

    def status(self) -> dict[str, Any]:
        """Return the status for display."""
        return {
            "kind": "host", "role": "leader" if self.may_act() else "standby", "name": self.name,
            "epoch": self.term.epoch if self.term else 0, "lock": str(self.path),
            "holder_pid": os.getpid() if self.term else self._read().get("pid", 0), "error": self._error,
        }  # fmt: skip

    def _take(self) -> bool:
        """Try to get the lock. The file is never removed: another process may wait on it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self._open()
        except PermissionError:
            if not self._error:
                self._error = f"{self.path} belongs to another user; remove it if no daemon of theirs runs"
                log.error("%s; until then this daemon stands by", self._error)
            return False
        except OSError as error:
            raise StorageError(f"{self.path}: the lock cannot be opened: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_ours(file):
                self._file = file
                return True
        except BlockingIOError:
            pass
        except OSError as error:
            os.close(file)
            raise StorageError(f"{self.path}: cannot be locked: {error}") from error
        os.close(file)
        return False

    def _open(self) -> int:
        """Open the file for writing if allowed. A read-only daemon can lock it, but leaves no handover."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        for _ in range(3):
            # Without O_CREAT first: Linux may refuse that on another's file in a shared folder.
            with contextlib.suppress(FileNotFoundError):
                try:
                    return os.open(self.path, os.O_RDWR | flags)
                except OSError:
                    return os.open(self.path, os.O_RDONLY | flags)
            with contextlib.suppress(FileExistsError):
                return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o640)
        raise FileNotFoundError(2, "comes and goes", str(self.path))

    def _is_ours(self, file: int) -> bool:
        try:
            here, named = os.fstat(file), os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (here.st_dev, here.st_ino) == (named.st_dev, named.st_ino)

    def _enter(self) -> None:
        before = self._read()
        last = before.get("epoch", 0)
        epoch = self._epochs.next(last)
        self._epochs.store(epoch)
        self.term = Term(epoch, self.name, before.get("name", ""), last, before.get("head", ""))
        # Until we publish, what the one before left is the newest for a successor.
        self._head, self._stored, self._error = before.get("head", ""), None, ""
        self._write()

    def _leave(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                self._write(file)
            os.close(file)
        self.term = None

    def _read(self) -> dict[str, Any]:
        """Read the handover of the last leader; empty if another program wrote it."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return {}
        try:
            trusted = os.fstat(file).st_uid in (0, os.geteuid())
            return parse_record(os.pread(file, 4 * MAX_HEAD, 0)) if trusted else {}
        except OSError:
            return {}
        finally:
            os.close(file)

    def _write(self, file: int | None = None) -> None:
        """Write the handover in place, since a new file would not be the locked one."""
        file = self._file if file is None else file
        if file is None or self.term is None or self._head == self._stored:
            return
        body = {"name": self.name, "epoch": self.term.epoch, "head": self._head, "pid": os.getpid()}
        data = json.dumps(body).encode()
        with contextlib.suppress(OSError):
            os.pwrite(file, data, 0)
            os.ftruncate(file, len(data))
        self._stored = self._head


def parse_record(data: bytes) -> dict[str, Any]:
    """Parse a record {name, epoch, head, pid}; malformed fields are left out."""
    try:  # behind the first object may be the rest of a longer one, if its writer was killed
        tree, _ = json.JSONDecoder().raw_decode(data.decode())
    except (ValueError, RecursionError):
        return {}
    if not isinstance(tree, dict):
        return {}
    out: dict[str, Any] = {}
    for key, kind in (("name", str), ("epoch", int), ("head", str), ("pid", int)):
        value = tree.get(key)
        if isinstance(value, kind) and not isinstance(value, bool):
            fits = len(value) <= MAX_HEAD if isinstance(value, str) else 0 <= value <= MAX_EPOCH
            if fits:
                out[key] = value
    return out


def daemon_name(loaded: Loaded) -> str:
    """Return the name of this daemon among those of a site; default: the host name."""
    return loaded.config.leader.name or socket.gethostname().partition(".")[0] or "daemon"


def election_name(site: Site) -> str:
    """The name under which daemons elect the one that acts: of the site, or of a part of a split site.

    Parts act side by side. A part is called after a rack of its own: all its daemons have that in their site
    file, whatever their configurations say, and no other part has it. One without racks is called after
    a hall.
    """
    name = site.file.site
    is_part = bool(site.elsewhere) and not np.isfinite(site.envelopes[HALL_BUDGET].safe).any()
    racks = site.names["rack"] or site.names["hall"]
    return f"{name}/parts/{min(racks).removeprefix(f'{name}/')}" if is_part else name


def lock_path(loaded: Loaded, site: str) -> Path:
    """One lock per host, site and broker, whatever the state folder and the user: in /run/lock, which every
    user may write on Debian and Ubuntu; else in the service's or the user's own run folder; else beside the
    state folder. An embedded broker belongs to one daemon, and so does its lock.
    """
    broker = loaded.config.broker
    if not isinstance(broker, Broker):
        return loaded.state.resolve() / "leader.lock"
    host = broker.host.lower().rstrip(".")
    where = f"{'loopback' if host in _LOOPBACK else host}:{broker.port}"
    digest = hashlib.blake2b(f"{site}\0{where}".encode(), digest_size=6).hexdigest()
    name = f"racktwin-{re.sub(r'[^A-Za-z0-9_-]', '_', site)[:40]}-{digest}.lock"
    run = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    for folder in ("/run/lock", run, os.environ.get("XDG_RUNTIME_DIR", "")):
        if folder and (os.access(folder, os.W_OK | os.X_OK) or os.path.exists(f"{folder}/{name}")):
            return Path(folder) / name
    loaded.state.mkdir(0o700, parents=True, exist_ok=True)
    return loaded.state.resolve().parent / name
