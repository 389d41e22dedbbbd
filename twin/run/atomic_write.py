"""Atomic write: replaces a file as a whole, or leaves it as it was."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in it is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(
    path: Path,
    content: bytes | str,
    mode: int | None = None,
    sync: bool = True,
    owner: os.stat_result | None = None,
) -> None:
    """Write a file beside `path` and rename it, so that a reader sees it whole or not at all. Raises OSError.

    Without `mode` the umask decides who may read it. Without `sync` a power loss may bring the old file back,
    or leave less than the new one. It belongs to whom `owner` belongs, if we may give it away.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    # Exclusive, so that a link that lies in wait is not followed
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            if owner is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(content.encode("utf-8", errors="replace") if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
        if sync:
            sync_folder(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
