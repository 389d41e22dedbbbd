"""Actions: requests of operators and administrators, as events of the next frame with their token as author.

The response waits for the tick that applies the event: 200, or 409 with the engine's reason. An
Idempotency-Key makes a repeated request harmless.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from aiohttp import web

from twin.api.access import TOKENS, WHO, author, other_hall
from twin.api.answers import Refused, answer, body_of, live_of, read_of, refusal
from twin.api.page import local_name
from twin.api.request_bodies import (
    NewApproval,
    NewAuthority,
    NewMaintenance,
    NewRequest,
    NewStory,
    NoBody,
    Note,
    Reason,
    Shelving,
    control_of,
    doubts,
    level,
    reason_text,
    until,
)
from twin.api.runtime import Runtime
from twin.api.scopes import expand, table_of
from twin.catalogue import NS, ConfigError, clean, did_you_mean
from twin.contracts import AlarmRecord, AuthorityRecord, ResumedRecord, StoryRecord
from twin.engine import first_commands
from twin.site import HALL_BUDGET
from twin.telemetry import events as ev

T = TypeVar("T")
# A request that is forgotten would switch a node on once a guard has let go of it
POWER, MOST_POWER_S = "node.power_state", 900.0
MAX_STORY = 500  # characters of a chapter's title and text
MAX_KEPT = 1000  # answers that a repeated question gets again
# Refusals of `Runtime.submit` that say nothing of what the engine thinks.
_PASSING = ("too many requests", "the queue of events", "no tick took")


class Kept:
    """Answers by (author, route, key), so that a repeated request acts once."""

    def __init__(self) -> None:
        self.held: OrderedDict[tuple[str, str, str], tuple[bytes, web.Response | None]] = OrderedDict()


KEPT: web.AppKey[Kept] = web.AppKey("kept", Kept)
Acting = Callable[[web.Request], Awaitable[web.Response]]


def once(act: Acting) -> Acting:
    """Answer a repeated request with the same Idempotency-Key once more, without a second action."""

    async def answered(request: web.Request) -> web.Response:
        key = request.headers.get("Idempotency-Key", "")
        if not key:
            return await act(request)
        if not (key.isascii() and key.isprintable() and len(key) <= 100):
            raise Refused(400, "Idempotency-Key: expected at most 100 printable characters")
        kept, name = request.app[KEPT].held, (author(request), f"{request.method} {request.path}", key)
        digest = hashlib.blake2b(await read_of(request), digest_size=16).digest()
        if name in kept:
            was, response = kept[name]
            if was != digest:
                raise Refused(409, "this Idempotency-Key was used for another request")
            if response is None:
                raise Refused(409, "this request is still running; ask again for its result")
            return web.Response(body=response.body, status=response.status, content_type="application/json")
        kept[name] = (digest, None)
        while len(kept) > MAX_KEPT:
            kept.popitem(last=False)
        try:
            response = await act(request)
        except Refused as error:
            # The engine has seen this id: what it refused for good stays refused under this key.
            if error.status != 409 or error.why.startswith(_PASSING):
                kept.pop(name, None)
                raise
            response = refusal(error.status, error.why)
        except BaseException:
            kept.pop(name, None)
            raise
        kept[name] = (digest, response)
        return response

    answered.__doc__, answered.__name__ = act.__doc__, act.__name__
    return answered


def new_id(request: web.Request) -> str:
    """Return an id from the server; a repeated request has the same id, also after a restart."""
    key = request.headers.get("Idempotency-Key", "")
    if not key:
        return uuid.uuid4().hex
    text = "\0".join((author(request), request.method, request.path, key))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


async def submit(request: web.Request, event: ev.Event, **more: Any) -> web.Response:
    """Put an event into the next frame; returns its outcome."""
    refused = await live_of(request).submit(event)
    if refused is not None:
        raise Refused(409, refused)
    return answer({"id": event.id, "done": True, "tick": live_of(request).engine.state.tick, **more})


def _end_of(
    live: Runtime, standing: ev.Event | None, for_s: float | None, instant_ns: int | None, needed: bool = True
) -> int:
    """The end of a request from a duration or an instant; of one that `standing` repeats, its end."""
    end_ns = until(live, for_s, instant_ns, needed)
    match standing:
        case ev.OperatorRequest() | ev.Approved() if for_s is not None:
            return standing.expires_ns
        case ev.MaintenanceBegun() if for_s is not None:
            return standing.until_ns
    return end_ns


async def ask(request: web.Request) -> web.Response:
    """Request that a control of some entities stays within bounds; the operator's policy proposes it."""
    body, live = await body_of(request, NewRequest), live_of(request)
    control = control_of(body.control)
    _own_halls(request, control.key, body.names)
    names = expand(live, control.table, body.names)
    if body.lo is None and body.hi is None and body.want is None:
        raise Refused(400, "lo, hi, want: expected at least one of them")
    if control.key == HALL_BUDGET and (body.hi is None or body.lo is not None or body.want is not None):
        raise Refused(400, "people can only narrow a budget that is lent to a hall; expected only `hi`")
    want = None if body.want is None else level(control, body.want, math.nan, "want")
    low, high = level(control, body.lo, -math.inf, "lo"), level(control, body.hi, math.inf, "hi")
    identity, needed = new_id(request), control.key == POWER
    standing = live.engine.intake.requests.get(identity)
    expires_ns = _end_of(live, standing, body.for_s, body.expires_ns, needed)
    if control.key == POWER and expires_ns - live.engine.state.now_ns > MOST_POWER_S * NS:
        raise Refused(400, f"for_s: a request for the power of nodes lasts at most {MOST_POWER_S:g} s")
    event = ev.OperatorRequest(
        id=identity, author=author(request), control=control.key, names=names,
        lo=low, hi=high, want=want, reason=reason_text(body.reason), expires_ns=expires_ns,
    )  # fmt: skip
    warnings = doubts(live, control, names, low, high, want)
    more = {"warnings": warnings} if warnings else {}
    return await submit(request, event, names=len(names), expires_ns=event.expires_ns, **more)


def _own_halls(request: web.Request, control: str, names: Iterable[str]) -> None:
    """Raise Refused for a token of some halls unless the request concerns only their budgets."""
    token, site = request[WHO], live_of(request).engine.site
    if not token.halls:
        return
    found = [site.entity("rack", name) for name in names]
    own = [rack is not None and local_name(site.name("rack", rack)) in token.halls for rack in found]
    if control != HALL_BUDGET or not own or not all(own):
        raise other_hall(request, token)


async def withdraw(request: web.Request) -> web.Response:
    """Withdraw a request."""
    identity = request.match_info["id"]
    found = live_of(request).engine.intake.requests.get(identity)
    _own_halls(request, "" if found is None else found.control, () if found is None else found.names)
    return await submit(
        request, ev.RequestWithdrawn(id=new_id(request), author=author(request), request=identity)
    )


async def approve(request: web.Request) -> web.Response:
    """Allow a policy with authority `approve` to act for a limited time."""
    body, live = await body_of(request, NewApproval), live_of(request)
    control = control_of(body.control)
    names, identity = expand(live, control.table, body.names), new_id(request)
    expires_ns = _end_of(live, live.engine.intake.approvals.get(identity), body.for_s, body.expires_ns)
    event = ev.Approved(
        id=identity, author=author(request), policy=body.policy, control=control.key, names=names,
        expires_ns=expires_ns, reason=reason_text(body.reason, needed=False),
    )  # fmt: skip
    if body.policy not in live.engine.intake.authority:
        known = ", ".join(live.engine.intake.authority)
        near = did_you_mean(body.policy, live.engine.intake.authority)
        raise Refused(404, f"no policy {clean(body.policy, 60)}; expected one of {known}{near}")
    level_now = live.engine.intake.authority.get(body.policy)
    if level_now is not None and level_now != "approve":
        raise Refused(
            409, f"the authority of {body.policy} is {level_now}; only `approve` waits for approvals"
        )
    return await submit(request, event, expires_ns=event.expires_ns)


async def disapprove(request: web.Request) -> web.Response:
    """Withdraw an approval."""
    identity = request.match_info["id"]
    return await submit(
        request, ev.ApprovalWithdrawn(id=new_id(request), author=author(request), approval=identity)
    )


async def hold(request: web.Request) -> web.Response:
    """Freeze the site: no new values; running leases are renewed, and protective commands still pass."""
    body = await body_of(request, Reason)
    return await submit(
        request, ev.Held(id=new_id(request), author=author(request), reason=reason_text(body.reason))
    )


async def release(request: web.Request) -> web.Response:
    """Let all leases lapse; nothing is commanded until `resume`."""
    body = await body_of(request, Reason)
    event = ev.Released(id=new_id(request), author=author(request), reason=reason_text(body.reason))
    return await submit(request, event)


async def resume(request: web.Request) -> web.Response:
    """End a hold or a release."""
    body = await body_of(request, NoBody)
    response = await submit(request, ev.Resumed(id=new_id(request), author=author(request)))
    if body.reason:
        live_of(request).note(ResumedRecord(author=author(request), reason=reason_text(body.reason)))
    return response


async def authority(request: web.Request) -> web.Response:
    """Set the authority of a policy; to let it act takes an acknowledgement in words."""
    body, live = await body_of(request, NewAuthority), live_of(request)
    if body.policy not in live.engine.intake.authority:
        known = ", ".join(live.engine.intake.authority)
        near = did_you_mean(body.policy, live.engine.intake.authority)
        raise Refused(404, f"no policy {clean(body.policy, 60)}; expected one of {known}{near}")
    sentence = f"{body.policy} may act on {live.engine.site.file.site}"
    if body.authority == "act" and body.acknowledge != sentence:
        policy = next(p for p in live.engine.policies if p.name == body.policy)
        first = first_commands(live.engine, policy)
        words = f'acknowledge: for the authority act, expected exactly "{sentence}"'
        raise Refused(400, f"{words}; {first}" if first else words)
    why = reason_text(body.reason)
    event = ev.AuthorityChanged(id=new_id(request), author=author(request), policy=body.policy,
                                authority=body.authority)  # fmt: skip
    response = await submit(request, event, policy=body.policy, authority=body.authority)
    live.note(
        AuthorityRecord(
            author=event.author,
            policy=body.policy,
            authority=body.authority,
            reason=why,
            event=event.id,
        )
    )
    return response


async def begin_maintenance(request: web.Request) -> web.Response:
    """Open a maintenance window: no alarms, commands or learning on these entities and below."""
    body, live = await body_of(request, NewMaintenance), live_of(request)
    if not body.names:
        raise Refused(400, "names: expected at least one entity")
    identity = new_id(request)
    window = live.engine.windows.windows.get(identity)
    until_ns = _end_of(live, None if window is None else window.event, body.for_s, body.until_ns)
    event = ev.MaintenanceBegun(
        id=identity, author=author(request), table=table_of(body.table), until_ns=until_ns,
        names=expand(live, body.table, body.names), reason=reason_text(body.reason),
    )  # fmt: skip
    return await submit(request, event, until_ns=until_ns)


async def end_maintenance(request: web.Request) -> web.Response:
    """Close a maintenance window early."""
    window = request.match_info["id"]
    return await submit(
        request, ev.MaintenanceEnded(id=new_id(request), author=author(request), window=window)
    )


def _alarm(request: web.Request, act: Callable[[Any, str], Any]) -> web.Response:
    """Change one alarm of the book, and journal the change unless the book does so itself."""
    live, identity = live_of(request), request.match_info["id"]
    if live.alarms is None:
        raise Refused(503, "this daemon keeps no alarms")
    try:
        noted = act(live.alarms, identity)
    except KeyError:
        if identity in getattr(live.alarms, "alarms", ()):
            raise Refused(409, f"{clean(identity, 200)} is not shelved; nothing was changed") from None
        raise Refused(404, f"no alarm {clean(identity, 200)}; it may have cleared") from None
    except ValueError as error:
        raise Refused(409, str(error)) from None
    if getattr(live.alarms, "note", None) is None:
        live.note(noted or AlarmRecord(id=identity, author=author(request)))
    return answer({"id": identity, "done": True})


async def set_story(request: web.Request) -> web.Response:
    """Show a chapter of a story until the next one; chapter 0 ends it. Only for simulated sites."""
    body, live = await body_of(request, NewStory), live_of(request)
    if not live.loaded.config.simulated:
        raise Refused(409, "this site is not simulated; expected `simulated: true` in the configuration")
    if not 0 <= body.chapter <= body.of or max(len(body.title), len(body.text)) > MAX_STORY:
        raise Refused(400, f"expected chapter 1 to `of`, and texts of at most {MAX_STORY} characters")
    title, text = clean(body.title, MAX_STORY), clean(body.text, MAX_STORY)
    story = live.story
    same = story is not None and story["chapter"] == body.chapter
    live.story = None
    if body.chapter:
        since_ns = story["since_ns"] if story is not None and same else live.engine.state.now_ns
        live.story = {"chapter": body.chapter, "of": body.of, "title": title, "text": text,
                      "since_ns": since_ns}  # fmt: skip
        live.note(StoryRecord(author=author(request), chapter=body.chapter, of=body.of, title=title,
                              text=text))  # fmt: skip
    return answer({"story": live.story})


async def acknowledge(request: web.Request) -> web.Response:
    """Acknowledge an alarm."""
    note = reason_text((await body_of(request, Note)).note, needed=False)
    return _alarm(request, lambda book, i: book.acknowledge(i, author(request), note))


async def shelve(request: web.Request) -> web.Response:
    """Shelve an alarm for a limited time."""
    body = await body_of(request, Shelving)
    until_ns, why = until(live_of(request), body.for_s, body.until_ns), reason_text(body.reason)
    return _alarm(request, lambda book, i: book.shelve(i, until_ns, author(request), why))


async def unshelve(request: web.Request) -> web.Response:
    """End the shelving of an alarm."""
    await body_of(request, NoBody)
    return _alarm(request, lambda book, i: book.unshelve(i, author(request)))


_LASTING: set[asyncio.Future[Any]] = set()


async def outlasting(work: Awaitable[T]) -> T:
    """Do work to its end, though the request or the server that began it should end before."""
    task = asyncio.ensure_future(work)
    _LASTING.add(task)
    task.add_done_callback(_LASTING.discard)
    return await asyncio.shield(task)


async def reload(request: web.Request) -> web.Response:
    """Read configuration, site and tokens again; a faulty file is refused, and the old one stays in force."""
    await body_of(request, NoBody)
    live = live_of(request)
    try:
        request.app[TOKENS].reload()
    except ConfigError as error:
        raise Refused(409, "; ".join(error.problems)) from None
    if live.reload is None:
        raise Refused(503, "this daemon cannot reload its configuration; its tokens were read again")
    problems = await reloaded(live, author(request))
    if problems:
        raise Refused(409, "; ".join(problems))
    return answer({"done": True})


async def reloaded(live: Runtime, name: str) -> list[str]:
    """Reload for a person; returns the problems of the new configuration, [] if it is valid."""
    if live.reload is None:
        return ["this daemon cannot reload its configuration"]
    # A change of the interface itself ends this very server
    return await outlasting(live.reload(name))


async def tokens(request: web.Request) -> web.Response:
    """List the tokens by name, with role and dates; neither their text nor their hashes."""
    entries = request.app[TOKENS].held
    return answer({"tokens": [{"name": t.name, "role": t.role, "created": t.created, "expires": t.expires,
                               "halls": t.halls}
                              for t in entries], "warnings": request.app[TOKENS].warnings})  # fmt: skip
