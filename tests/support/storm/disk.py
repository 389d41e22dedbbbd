"""Simulated disk: the files of a host in a real folder, through system calls that fail by seed.

It knows what is durable: of a file, what was there at its last fsync; of a folder, the names at its last
fsync. A loss of power takes the rest, or a part of it, in the order in which it was written. Descriptors are
those of a life: a process that is killed leaves none open.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.storm.hosts import LIFE, Killed, Life

_REAL: dict[str, Any] = {
    name: getattr(os, name)
    for name in ("open", "close", "dup", "fsync", "rename", "replace", "unlink", "remove", "truncate",
                 "ftruncate", "posix_fallocate")
}  # fmt: skip
_REAL_OPEN = io.open


class SimulatedDisk:
    """The disk of one host. Chances are per call; `free_bytes` is None while there is plenty."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice = str(folder), dice
        self.shadow = folder.with_name(f".{folder.name}.gone")  # what a loss of power may bring back
        self.shadow.mkdir()
        self.free_bytes: int | None = None
        self.fsync_fails = self.write_fails = self.short = 0.0
        self.job_s = 0.004
        self.calls = 0
        self.kill_at = -1  # the number of the call in whose midst the process is killed
        self.durable: dict[int, int] = {}  # inode -> bytes
        self.pending: dict[str, list[Callable[[], None]]] = {}  # folder -> how to undo what is not durable
        self._saved = 0

    def has(self, path: Any) -> bool:
        """True for a file on this disk."""
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)

    def call(self, life: Life) -> bool:
        """Count a call; True where the process is killed in its midst."""
        life.check()
        self.calls += 1
        return self.calls == self.kill_at

    def durable_bytes(self, path: Path) -> int:
        """Bytes at the beginning of a file that a loss of power leaves."""
        found = os.stat(path)
        return self.durable.get(found.st_ino, found.st_size)

    def note(self, folder: str, undo: Callable[[], None]) -> None:
        """A change of names that is not durable yet."""
        self.pending.setdefault(folder, []).append(undo)

    def save(self, path: str) -> str:
        """Another name for a file that is about to lose its own."""
        self._saved += 1
        kept = str(self.shadow / str(self._saved))
        os.link(path, kept)
        return kept

    def synced(self, fd: int) -> None:
        """An fsync has succeeded."""
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            self.pending.pop(os.readlink(f"/proc/self/fd/{fd}"), None)
        else:
            self.durable[found.st_ino] = found.st_size

    def lose_power(self) -> None:
        """Drop all that is not durable, but for a part of it, the oldest first."""
        for undos in self.pending.values():
            for undo in reversed(undos[self.dice.randint(0, len(undos)) :]):
                with contextlib.suppress(FileNotFoundError):
                    undo()
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                found = os.stat(path)
                kept = self.durable.get(found.st_ino, found.st_size)
                if found.st_size > kept:
                    _REAL["truncate"](path, self.dice.choice((kept, self.dice.randint(kept, found.st_size))))
        self.durable.clear()
        self.pending.clear()


class _File(io.FileIO):
    """A file that is written without a buffer."""

    def __init__(self, disk: SimulatedDisk, life: Life, file: Any, mode: str, closefd: bool = True) -> None:
        self.disk, self.life = disk, life
        super().__init__(file, mode, closefd=closefd)
        disk.durable.setdefault(os.fstat(self.fileno()).st_ino, os.fstat(self.fileno()).st_size)

    def write(self, data: Any) -> int:  # type: ignore[override]
        disk, dice = self.disk, self.disk.dice
        dies, size = disk.call(self.life), len(data)
        if dies:
            super().write(memoryview(data)[: dice.randint(0, size)])
            self.life.kill()
            raise Killed
        if disk.free_bytes is not None:
            if size > disk.free_bytes:
                part = max(0, min(size, disk.free_bytes))
                disk.free_bytes = 0
                super().write(memoryview(data)[:part])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), disk.folder)
            disk.free_bytes -= size
        if dice.random() < disk.write_fails:
            super().write(memoryview(data)[: dice.randint(0, size)])
            raise OSError(errno.EIO, os.strerror(errno.EIO), disk.folder)
        if size > 1 and dice.random() < disk.short:
            return super().write(memoryview(data)[: dice.randint(1, size - 1)]) or 0
        return super().write(data) or 0


class _Calls:
    """The system calls of all lives. `disks` by host."""

    def __init__(self, disks: dict[str, SimulatedDisk]) -> None:
        self.disks = disks
        self.open_fds: dict[int, Life] = {}
        self.files: dict[int, tuple[Life, Any]] = {}

    def of(self, path: Any) -> tuple[SimulatedDisk, Life] | None:
        life = LIFE.get()
        disk = None if life is None else self.disks.get(life.host.name)
        if life is None or disk is None or not disk.has(path):
            return None
        return disk, life

    def open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        found = self.of(path)
        if found is None:
            return int(_REAL["open"](path, flags, mode, **more))
        disk, life = found
        begun = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        if disk.call(life):
            self._die(life)
        fd = int(_REAL["open"](path, flags, mode, **more))
        self.open_fds[fd] = life
        if begun:
            self._created(disk, os.fspath(path))
        return fd

    def _created(self, disk: SimulatedDisk, path: str) -> None:
        disk.durable[os.stat(path).st_ino] = 0
        disk.note(os.path.dirname(path), lambda: _REAL["unlink"](path))

    def file(
        self, file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
        newline: Any = None, closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        by_number = isinstance(file, int) and file in self.open_fds
        found = (
            (self.disks[self.open_fds[file].host.name], self.open_fds[file]) if by_number else self.of(file)
        )
        if found is None:
            return _REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
        disk, life = found
        life.check()
        plain = mode.replace("b", "").replace("t", "")
        if plain in ("r", "a+", "r+"):
            out = _REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if plain != "r":
                self.files[id(out)] = (life, out)
            return out
        begun = not by_number and not os.path.lexists(file)
        if disk.call(life):
            self._die(life)
        raw = _File(disk, life, file, plain, closefd)
        if by_number:
            del self.open_fds[file]
        if begun:
            self._created(disk, os.fspath(file))
        self.files[id(raw)] = (life, raw)
        if buffering == 0:
            return raw
        writer = io.BufferedWriter(raw)
        return writer if "b" in mode else io.TextIOWrapper(writer, encoding, errors, newline)

    @staticmethod
    def _die(life: Life) -> None:
        life.kill()
        raise Killed

    def close(self, fd: int) -> None:
        life = LIFE.get()
        if life is not None:
            life.check()
        self.open_fds.pop(fd, None)
        _REAL["close"](fd)

    def dup(self, fd: int) -> int:
        out, life = int(_REAL["dup"](fd)), LIFE.get()
        if life is not None:
            self.open_fds[out] = life
        return out

    def fsync(self, fd: int) -> None:
        life = LIFE.get()
        disk = None if life is None else self.disks.get(life.host.name)
        if life is None or disk is None:
            return
        if disk.call(life):
            self._die(life)
        if disk.dice.random() < disk.fsync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO), disk.folder)
        disk.synced(fd)

    def replace(self, source: Any, target: Any, **more: Any) -> None:
        found = self.of(source)
        if found is None:
            _REAL["replace"](source, target, **more)
            return
        disk, life = found
        if disk.call(life):
            self._die(life)
        old, new = os.fspath(source), os.fspath(target)
        kept = disk.save(new) if os.path.lexists(new) else None
        _REAL["replace"](old, new)

        def undo() -> None:
            _REAL["replace"](new, old)
            if kept is not None:
                _REAL["replace"](kept, new)

        disk.note(os.path.dirname(new), undo)

    def unlink(self, path: Any, **more: Any) -> None:
        found = self.of(path)
        if found is None:
            _REAL["unlink"](path, **more)
            return
        disk, life = found
        if disk.call(life):
            self._die(life)
        name = os.fspath(path)
        if not os.path.lexists(name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        if disk.free_bytes is not None:
            disk.free_bytes += os.stat(name).st_size
        kept = disk.save(name)
        _REAL["unlink"](name)
        disk.note(os.path.dirname(name), lambda: _REAL["replace"](kept, name))

    def truncate(self, path: Any, length: int) -> None:
        found = self.of(path)
        if found is not None and found[0].call(found[1]):
            self._die(found[1])
        _REAL["truncate"](path, length)
        if found is not None:
            inode = os.stat(path).st_ino
            found[0].durable[inode] = min(found[0].durable.get(inode, length), length)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        life = LIFE.get()
        disk = None if life is None else self.disks.get(life.host.name)
        if disk is not None and disk.free_bytes is not None:
            if length > disk.free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), disk.folder)
            disk.free_bytes -= length
        _REAL["posix_fallocate"](fd, offset, length)

    def forget(self, life: Life) -> None:
        """A process has ended: what it had open is closed."""
        for fd in [fd for fd, owner in self.open_fds.items() if owner is life]:
            del self.open_fds[fd]
            with contextlib.suppress(OSError):
                _REAL["close"](fd)
        for key in [key for key, (owner, _) in self.files.items() if owner is life]:
            _, file = self.files.pop(key)
            with contextlib.suppress(OSError, ValueError):
                file.close()


@contextlib.contextmanager
def simulated_disks(disks: dict[str, SimulatedDisk]) -> Iterator[Callable[[Life], None]]:
    """Inside the block lives reach their files through these disks; yields what closes a life's files."""
    calls = _Calls(disks)
    new: dict[str, Any] = {
        "open": calls.open, "close": calls.close, "dup": calls.dup, "fsync": calls.fsync,
        "rename": calls.replace, "replace": calls.replace, "unlink": calls.unlink, "remove": calls.unlink,
        "truncate": calls.truncate, "posix_fallocate": calls.fallocate,
    }  # fmt: skip
    try:
        for name, function in new.items():
            setattr(os, name, function)
        io.open = builtins.open = calls.file  # type: ignore[assignment]
        yield calls.forget
    finally:
        for name in new:
            setattr(os, name, _REAL[name])
        io.open = builtins.open = _REAL_OPEN
