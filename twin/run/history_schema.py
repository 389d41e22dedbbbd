"""File of the embedded history: its tables and versions; opening it, and moving a faulty one aside.

The file is SQLite in WAL mode. An unusable file is kept beside it, as far as there is room for that.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from twin.catalogue import StorageError

FILE_NAME = "history.db"
PAGE_BYTES = 8192
WAL_BYTES = 32 * 2**20  # what the write-ahead log is cut back to
BUSY_S = 5.0
MAX_ASIDE = 20
# MIGRATIONS[k] takes a file from version k to k + 1; an empty file is of version 0.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE layout(id INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE)",
        # Names of a layout's entities in the order of their indices: zstd over lines.
        "CREATE TABLE names(layout INTEGER NOT NULL, tbl TEXT NOT NULL, names BLOB NOT NULL, "
        "PRIMARY KEY(layout, tbl))",
        "CREATE TABLE signal(id INTEGER PRIMARY KEY, key TEXT NOT NULL, kind TEXT NOT NULL, "
        "UNIQUE(key, kind))",
        # One tick of a table: rows of float32 gauges, then of int64 totals; `signals` is ids `1,2|3`.
        "CREATE TABLE sample(id INTEGER PRIMARY KEY, tbl TEXT NOT NULL, t_ns INTEGER NOT NULL, "
        "layout INTEGER NOT NULL, n INTEGER NOT NULL, signals TEXT NOT NULL, data BLOB NOT NULL)",
        "CREATE UNIQUE INDEX sample_t ON sample(tbl, t_ns)",
        *(
            text
            for name in ("chunk", "coarse")
            for text in (
                f"CREATE TABLE {name}(id INTEGER PRIMARY KEY, signal INTEGER NOT NULL, "
                "block INTEGER NOT NULL, layout INTEGER NOT NULL, t0 INTEGER NOT NULL, t1 INTEGER NOT NULL, "
                "data BLOB NOT NULL)",
                f"CREATE UNIQUE INDEX {name}_key ON {name}(signal, block, layout, t0, t1)",
                f"CREATE INDEX {name}_t0 ON {name}(t0)",
            )
        ),
    ),
)


def open_store(path: Path, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> sqlite3.Connection:
    """Open the file for writing, and migrate it to this version.

    Raises StorageError if it was written by a newer racktwin, sqlite3.Error if it cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        if _number(db, "page_count") == 0:
            db.execute(f"PRAGMA page_size={PAGE_BYTES}")
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        version = _number(db, "user_version")
        if version > len(migrations):
            raise StorageError(
                f"{path}: history of version {version}; this racktwin knows up to {len(migrations)}: use the "
                "racktwin that wrote it, or let this one begin a new file"
            )
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
        for at in range(version, len(migrations)):
            db.execute("BEGIN IMMEDIATE")
            for text in migrations[at]:
                db.execute(text)
            db.execute(f"PRAGMA user_version={at + 1}")
            db.execute("COMMIT")
        return db
    except BaseException:
        db.close()
        raise


def open_reader(path: Path) -> sqlite3.Connection:
    """Open the file read-only. Raises StorageError if it is missing or unreadable."""
    if not path.exists():
        raise StorageError(f"{path}: there is no history yet")
    try:
        return sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None
        )
    except sqlite3.Error as error:
        raise StorageError(f"{path}: cannot be opened: {error}") from error


def move_aside(path: Path, most_bytes: int) -> Path:
    """Rename a file that cannot be used, and what belongs to it; where it is now. Raises OSError.

    All files that were moved aside have `most_bytes` together: the oldest go, the newest stays.
    """
    earlier = _set_aside(path)
    number = earlier[-1][0] + 1 if earlier else 1
    kept = path.with_name(f"{path.stem}-aside{number}{path.suffix}")
    for end in ("-wal", "-shm"):
        beside = path.with_name(path.name + end)
        if beside.exists():
            beside.rename(kept.with_name(kept.name + end))
    path.rename(kept)
    total = sum(file_bytes(old) for _, old in earlier) + file_bytes(kept)
    for place, (_, old) in enumerate(earlier):
        if total <= most_bytes and len(earlier) - place < MAX_ASIDE:
            break
        total -= file_bytes(old)
        for end in ("-wal", "-shm", ""):
            old.with_name(old.name + end).unlink(missing_ok=True)
    return kept


def _set_aside(path: Path) -> list[tuple[int, Path]]:
    """Files that were moved aside, by their number, the oldest first."""
    found = re.compile(rf"{re.escape(path.stem)}-aside(\d{{1,9}}){re.escape(path.suffix)}")
    numbered = ((found.fullmatch(file.name), file) for file in path.parent.iterdir())
    return sorted((int(match[1]), file) for match, file in numbered if match is not None)


def is_damage(error: sqlite3.Error) -> bool:
    """True if the file is no database, or a broken one."""
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def file_bytes(path: Path) -> int:
    """Bytes of the file and its logs on the disk."""
    total = 0
    for end in ("", "-wal", "-shm"):
        try:
            total += path.with_name(path.name + end).stat().st_size
        except OSError:
            continue
    return total


def _number(db: sqlite3.Connection, pragma: str) -> int:
    return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])
