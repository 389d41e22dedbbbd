"""Changes of the site file: reporting equipment that the file lacks, shown as a diff and approved.

A person approves the very lines that were shown. The daemon writes the file where it may, and reads it again;
a service that systemd guards may not, and then `racktwin site apply` writes it with that person's own rights.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web

from twin.api.access import author
from twin.api.actions import outlasting, reloaded
from twin.api.answers import Refused, answer, body_of, known_query, live_of
from twin.api.request_bodies import reason_text
from twin.api.runtime import Runtime
from twin.catalogue import ConfigError, clean
from twin.contracts import SiteFileRecord
from twin.run import atomic_write
from twin.wiring import SiteChange, propose

MAX_LINES = 200  # of a change that the journal keeps
MAX_DIFF = 200_000  # characters that are shown
_ONE = asyncio.Lock()  # each reads the whole site anew
_APPROVING = asyncio.Lock()


class NewSiteChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Approve the change whose diff has this digest. `writer` terminal: the client writes the file."""

    digest: str
    reason: str
    profile: str | None = None
    writer: Literal["daemon", "terminal"] = "daemon"


async def proposed(request: web.Request) -> web.Response:
    """Return the missing lines of the site file as a unified diff, with notes to check.

    `writable`: the daemon may write the file itself once the change is approved.
    """
    known_query(request, "profile")
    live = live_of(request)
    change = await _change(live, request.query.get("profile"))
    diff = change.diff()
    return answer({
        "file": str(change.path), "diff": diff[:MAX_DIFF], "digest": change.digest if diff else None,
        "cut": len(diff) > MAX_DIFF, "profile": change.profile, "profiles": change.profiles,
        "notes": [clean(n, 500) for n in change.notes], "problems": [clean(p, 500) for p in change.problems],
        "writable": _is_writable(change.path), "points": len(live.describe().points),
    })  # fmt: skip


async def approve(request: web.Request) -> web.Response:
    """Approve a change of the site's file. It is written and read again, whole or not at all."""
    body, live = await body_of(request, NewSiteChange), live_of(request)
    reason_text(body.reason)
    return answer(await outlasting(_approved(live, body, author(request))))


async def _approved(live: Runtime, body: NewSiteChange, name: str) -> dict[str, Any]:
    """Carry out an approval; one at a time, as a later one must not restore what an earlier one changed."""
    async with _APPROVING:
        change = await _change(live, body.profile)
        if not change.diff() or change.digest != body.digest:
            raise Refused(
                409, "the file or the reported equipment changed after this diff was shown: look again"
            )
        if change.problems:
            raise Refused(409, "; ".join(change.problems))
        if body.writer == "daemon" and not _is_writable(change.path):
            raise Refused(
                409,
                f"the daemon has no write access to {change.path}; use `racktwin site apply` on its host",
            )
        problems = await _write(live, change, name) if body.writer == "daemon" else []
    lines = [clean(line, 300) for line in change.added()]
    left = len(lines) - MAX_LINES
    live.note(
        SiteFileRecord(
            author=name,
            reason=reason_text(body.reason),
            digest=change.digest,
            lines=(*lines[:MAX_LINES], *([f"and {left} more"] if left > 0 else [])),
            writer=body.writer,
            refused=tuple(problems[:20]),
        )
    )
    if problems:
        raise Refused(409, f"the old file is kept: {'; '.join(problems)}")
    out: dict[str, Any] = {"done": True, "file": str(change.path), "lines": len(lines)}
    if body.writer == "terminal":
        out |= {"before": change.before, "after": change.after}
    return out


async def _change(live: Runtime, profile: str | None) -> SiteChange:
    """The change that is proposed now. Raises Refused for an unknown profile."""
    description, path = live.describe(), live.loaded.site_file
    try:
        async with _ONE:
            return await asyncio.to_thread(propose, path, description, profile)
    except ConfigError as error:
        raise Refused(400, "; ".join(error.problems)) from None


def _is_writable(path: Path) -> bool:
    real = path.resolve()
    return os.access(real, os.W_OK) and os.access(real.parent, os.W_OK)


async def _write(live: Runtime, change: SiteChange, name: str) -> list[str]:
    """Write the file and read it again; returns the problems, with the old file restored."""
    path = change.path.resolve()
    mode = path.stat().st_mode & 0o777
    try:
        await asyncio.to_thread(atomic_write, path, change.after, mode)
    except OSError as error:
        return [f"{path}: cannot be written: {error.strerror}"]
    problems = await reloaded(live, name)
    if problems:
        await asyncio.to_thread(atomic_write, path, change.before, mode)
    return problems
