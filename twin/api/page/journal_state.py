"""Journal state: how far back the journal goes, its last hash, and whether its chain holds at the end.

The end is walked with each question; the command named here walks all of it.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from twin.api.page.decision_search import lines_in_memory
from twin.api.runtime import Runtime
from twin.catalogue import NS, StorageError
from twin.run import OPEN, closed_segments, journal_begin, line_hash, line_head, newest_line, verify_tail

WALKED_BYTES = 4 * 2**20  # of the end of the chain; source: estimate, a tenth of a second of a core
DAY_NS = 86_400 * NS


def journal_state(live: Runtime) -> dict[str, Any]:
    """Return as JSON the instants and numbers of the first and last line, the chain, and the command that
    verifies it."""
    site = live.engine.site.file.site
    if not live.run_dir:
        lines, _ = lines_in_memory(live)
        since_ns = lines[-1].now_ns if lines else 0
        return {"site": site, "folder": "", "first_ns": since_ns, "last_ns": lines[0].now_ns if lines else 0,
                "lines": len(lines), "head": None, "chain": None, "verify": None, "kept": None}  # fmt: skip
    folder = Path(live.run_dir)
    paths = [*closed_segments(folder), folder / OPEN]
    size = sum(path.stat().st_size for path in paths if path.is_file())
    verdict, first = verify_tail(folder, WALKED_BYTES)
    newest = newest_line(folder)
    if not newest:
        raise StorageError(f"{folder}: the journal holds no line yet")
    last = line_head(newest)
    first_seq, begin_ns = journal_begin(folder)
    quota = live.loaded.config.quotas.journal_mb * 10**6
    span_ns = last.now_ns - begin_ns
    days = quota / size * span_ns / DAY_NS if size and span_ns > DAY_NS else None
    return {
        "site": site, "folder": str(folder), "first_ns": begin_ns, "first_line": first_seq + 1,
        "last_ns": last.now_ns, "lines": last.seq - first_seq + 1,
        "head": line_hash(newest),
        "chain": {"holds": verdict.fault is None, "lines": verdict.lines,
                  "since_ns": first.now_ns if first is not None else None,
                  "fault": verdict.fault},
        "verify": f"racktwin journal verify {shlex.quote(str(folder))}",
        "kept": {"bytes": size, "quota_bytes": quota, "segments": len(paths), "days": days},
    }  # fmt: skip
