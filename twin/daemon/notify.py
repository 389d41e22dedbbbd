"""Notifier: sends changes of alarms to Alertmanager or to a webhook, and retries until they are taken.

`offer` never waits. Changes that a receiver has not taken wait in a bounded queue, from which the least
severe and oldest goes first; a dead receiver delays nothing but itself. What webhooks have still to take is
kept in `notify.json`, so that a restart loses none of it. Alertmanager is sent all that is active anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from connectors.backoff import Backoff
from twin.catalogue import NS, ConfigError, text
from twin.config import Loaded, Notify
from twin.daemon.alarms import SAVE_EVERY_S, SEVERITIES, Alarm, AlarmChange
from twin.daemon.supervision import is_stopped
from twin.run import atomic_write

log = logging.getLogger(__name__)

MAX_PENDING, BATCH = 15_000, 200
RESEND_S, EXPIRES_S = 60.0, 300.0  # Alertmanager holds an alert for active until it expires
FORMAT = 1
TIMEOUT_S, FIRST_RETRY_S, LAST_RETRY_S = 10.0, 1.0, 60.0
TRY_AGAIN = (
    401,
    403,
    408,
    425,
    429,
)  # and what begins with 5: mended at the other end, or in the token's file


class _Failed(Exception):
    """A receiver refused a message; `final` if a retry is useless."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


class WaitingChanges(msgspec.Struct):
    """Changes that a webhook has still to take, in the order they are sent, and the alarms it holds active.

    `receiver` identifies it by a digest, as its URL may be a secret.
    """

    receiver: str
    changes: list[dict[str, Any]]
    active: list[str]


class _File(msgspec.Struct):
    format: int
    waiting: list[WaitingChanges]


class Receiver:
    """One receiver: its queue of changes, and the task that sends them."""

    def __init__(self, target: Notify, loaded: Loaded, site: str, clock: Callable[[], int]) -> None:
        parts = urlsplit(target.url)
        if parts.username or parts.password:
            raise ConfigError(
                f"{loaded.path}: $.notify: a URL with a name or password in it; expected `token_file`"
            )
        self.target, self.loaded, self.site, self.clock = target, loaded, site, clock
        self.name = f"{target.kind} {parts.hostname or ''}:{parts.port or ''}".rstrip(":")
        self.digest = hashlib.sha256(target.url.encode()).hexdigest()
        self.url = target.url.rstrip("/") + ("/api/v2/alerts" if target.kind == "alertmanager" else "")
        self.counts = {"sent": 0, "dropped": 0, "refused": 0, "failed": 0}
        self.fault = ""  # why the last attempt failed
        self.revision = 0  # of what waits
        self._token = loaded.secret(target.token_file)
        self._ssl = True if target.tls is None else loaded.trust(target.tls, "notify.tls")
        self._least = SEVERITIES.index(target.min_severity)
        self._firing: dict[str, dict[str, Any]] = {}  # by alarm, as last said
        # By severity, the gravest first; in each by what it is about, the oldest first.
        self._queues: dict[str, dict[str, dict[str, Any]]] = {s: {} for s in reversed(SEVERITIES)}
        self._numbers = 0
        self._most = BATCH  # changes in one body; fewer while the receiver refuses some of them
        self._wake = asyncio.Event()

    def offer(self, change: AlarmChange) -> None:
        """Queue a change."""
        self.revision += 1
        alarm = change.alarm
        grave = SEVERITIES.index(alarm.severity) >= self._least
        old = self._firing.pop(alarm.id, None)
        fires = alarm.visible and change.what != "shelved"
        if self.target.kind == "alertmanager":
            fires |= alarm.state == "suppressed"  # it inhibits by the label `cause`
        if self.target.kind == "webhook":
            if grave or old is not None:
                self._numbers += 1
                key = f"{self.clock()}-{self._numbers}"
                self._put(key, {"severity": alarm.severity, "event": _event(key, change)})
            if fires and grave:
                self._firing[alarm.id] = {}
            return
        new = _alert(alarm, self.site) if fires and grave else None
        if old is not None and (new is None or new["labels"] != old["labels"]):
            ended = {**old, "ended_ns": self.clock()}
            self._put(_key(old), ended)
        if new is not None:
            self._firing[alarm.id] = new
            self._put(_key(new), new)

    def waiting(self) -> WaitingChanges:
        """Return what a webhook has still to take."""
        changes = [item for queue in self._queues.values() for item in queue.values()]
        return WaitingChanges(self.digest, changes, list(self._firing))

    def inherit(self, waiting: WaitingChanges) -> None:
        """Take what waits for a webhook that this one replaces. Raises KeyError, TypeError if it is none."""
        self._firing |= {alarm: {} for alarm in waiting.active}
        for key, item in [(item["event"]["id"], item) for item in waiting.changes if _alarm_of(item)]:
            self._put(key, item)

    @property
    def pending(self) -> int:
        """Number of changes that the receiver has still to take."""
        return sum(map(len, self._queues.values()))

    def _put(self, key: str, item: dict[str, Any]) -> None:
        queue = self._queues[item["severity"]]
        self.revision += 1
        queue.pop(key, None)
        queue[key] = item
        if self.pending > MAX_PENDING:
            least = next(q for q in reversed(self._queues.values()) if q)
            del least[next(iter(least))]
            self.counts["dropped"] += 1
        self._wake.set()

    def _batch(self) -> dict[str, dict[str, Any]]:
        ordered = (entry for queue in self._queues.values() for entry in queue.items())
        return dict(itertools.islice(ordered, self._most))

    def _resend(self) -> None:
        """Repeat active alerts, since Alertmanager forgets alerts that are not repeated."""
        if self.target.kind == "alertmanager":
            for alert in list(self._firing.values()):
                if _key(alert) not in self._queues[alert["severity"]]:
                    self._put(_key(alert), alert)

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Send until cancelled."""
        backoff, resend_s = Backoff(FIRST_RETRY_S, LAST_RETRY_S, (0.5, 1.0)), time.monotonic() + RESEND_S
        while True:
            if not self.pending:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, resend_s - time.monotonic())):
                        await self._wake.wait()
            self._wake.clear()
            if time.monotonic() >= resend_s:
                resend_s = time.monotonic() + RESEND_S
                self._resend()
            batch = self._batch()
            if not batch:
                continue
            try:
                await self._post(session, list(batch.values()))
            except _Failed as failed:
                if failed.final and len(batch) > 1:  # halved until the one that it refuses is found
                    self._most = len(batch) // 2
                    continue
                self._say(str(failed))
                if failed.final:
                    self.counts["refused"] += 1
                    log.error("%s refused the alarm %s: %s", self.name, _alarm_of(*batch.values()), failed)
                    self._done(batch)
                else:
                    self.counts["failed"] += 1
                await asyncio.sleep(backoff.next_s())
                continue
            self.counts["sent"] += len(batch)
            self._say("")
            backoff.reset()
            self._most = min(BATCH, 2 * self._most)
            self._done(batch)

    def _done(self, batch: dict[str, dict[str, Any]]) -> None:
        """Take a batch out of its queues, but not what changed while it was sent."""
        self.revision += 1
        for key, item in batch.items():
            queue = self._queues[item["severity"]]
            if queue.get(key) is item:
                del queue[key]

    def _say(self, fault: str) -> None:
        if fault and not self.fault:
            log.warning("%s does not accept alarms: %s; retrying", self.name, fault)
        elif self.fault and not fault:
            log.info("%s accepts alarms again", self.name)
        self.fault = fault

    async def _post(self, session: aiohttp.ClientSession, items: list[dict[str, Any]]) -> None:
        headers = {"Content-Type": "application/json"}
        if self.target.token_file is not None:
            try:
                self._token = self._token or self.loaded.secret(self.target.token_file)
            except ConfigError as error:
                raise _Failed(str(error)) from None
            if not (self._token or "").isprintable():
                self._token = None  # read anew
                raise _Failed(f"{self.loaded.file(self.target.token_file)}: expected a token of one line")
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            async with session.post(
                self.url, data=self._body(items), headers=headers, allow_redirects=False, ssl=self._ssl
            ) as response:
                status = response.status
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise _Failed(f"{type(error).__name__}: {error}"[:300]) from None
        if 200 <= status < 300:
            return
        if status in (401, 403):
            self._token = None  # read anew: it may have been replaced
        raise _Failed(f"answered {status}", final=not (status in TRY_AGAIN or status >= 500))

    def _body(self, items: list[dict[str, Any]]) -> bytes:
        if self.target.kind == "webhook":
            tree: Any = {"version": 1, "site": self.site, "events": [i["event"] for i in items]}
        else:
            now_ns = self.clock()
            tree = [
                {
                    "labels": i["labels"],
                    "annotations": i["annotations"],
                    "startsAt": _time(i["begun_ns"]),
                    "endsAt": _time(i.get("ended_ns") or now_ns + round(EXPIRES_S * NS)),
                }
                for i in items
            ]
        return msgspec.json.encode(tree)


class Notifier:
    """All receivers of a configuration; one service of the daemon."""

    def __init__(self, loaded: Loaded, site: str, clock: Callable[[], int] = time.time_ns) -> None:
        self.receivers = [Receiver(target, loaded, site, clock) for target in loaded.config.notify]
        self.path = loaded.state / "notify.json"
        self._saved_ns, self._fault = 0, ""
        self._saved: list[int] | None = None  # revisions of webhooks in the file; None if unknown

    def offer(self, changes: Iterable[AlarmChange]) -> None:
        """Queue changes for all receivers. Never waits."""
        for change in changes:
            for receiver in self.receivers:
                receiver.offer(change)

    def prime(self, alarms: Iterable[Alarm], now_ns: int) -> None:
        """Queue alarms active before a restart: Alertmanager lets an alarm expire that is not repeated."""
        for alarm in alarms:
            for receiver in self.receivers:
                if receiver.target.kind == "alertmanager":
                    receiver.offer(AlarmChange("returned", alarm, now_ns))

    def take_over(self, before: Notifier) -> None:
        """Send what waits for the receivers of an earlier configuration.

        Each goes to the receiver with its address, or else to the next new one of its kind: that is where a
        wrong address was put right. Alertmanager is told of all that is active anyway.
        """
        self._inherit([r.waiting() for r in before._webhooks()])

    def _webhooks(self) -> list[Receiver]:
        return [r for r in self.receivers if r.target.kind == "webhook"]

    def _inherit(self, waiting: list[WaitingChanges]) -> None:
        new = self._webhooks()
        at = {r.digest: r for r in reversed(new)}
        fresh = iter([r for r in new if r.digest not in {w.receiver for w in waiting}])
        for changes in waiting:
            heir = at.get(changes.receiver) or next(fresh, None)
            if heir is not None:
                heir.inherit(changes)

    def load(self) -> None:
        """Queue what webhooks had still to take when the process before this one ended.

        A file that is missing, damaged or of another format is passed over: the alarms themselves are in the
        book, and on the page.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            log.error("%s: cannot be read: %s; what waited in it is not sent", self.path, error)
            return
        try:
            found = msgspec.json.decode(data, type=_File)
            if found.format != FORMAT:
                raise ValueError(f"format {found.format}; expected {FORMAT}")
            self._inherit(found.waiting)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.error("%s: damaged (%s); what waited in it is not sent", self.path, error)

    def save_if_due(self, now_ns: int, at_once: bool) -> None:
        """Write what waits, `at_once` or if it was last written 10 s ago or earlier."""
        if at_once or now_ns - self._saved_ns >= SAVE_EVERY_S * NS:
            self._saved_ns = now_ns
            self.save()

    def save(self) -> None:
        """Write what waits for webhooks, if that changed. A power loss may take the file."""
        revisions = [r.revision for r in self._webhooks()]
        if revisions == self._saved:
            return
        waiting = [r.waiting() for r in self._webhooks()]
        if not any(w.changes or w.active for w in waiting) and not self.path.exists():
            return
        data = msgspec.json.encode(_File(FORMAT, waiting))
        try:
            atomic_write(self.path, data, sync=False)
        except OSError as error:
            if not self._fault:
                log.error("%s: cannot be written: %s; what waits ends with this process", self.path, error)
            self._fault = str(error)
            return
        self._saved, self._fault = revisions, ""

    def faults(self) -> dict[str, str]:
        """Return the receivers that fail at present, with the reason."""
        return {r.name: r.fault for r in self.receivers if r.fault}

    async def run(self) -> None:
        """Send until cancelled; a receiver that fails concerns no other."""
        if not self.receivers:
            await asyncio.Event().wait()
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=TIMEOUT_S / 2)
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            asyncio.TaskGroup() as group,
        ):
            for receiver in self.receivers:
                group.create_task(_keep(receiver, session))


async def _keep(receiver: Receiver, session: aiohttp.ClientSession) -> None:
    """Run a receiver until cancelled, and again whenever it fails, so that it disturbs no other."""
    backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S, (0.5, 1.0))
    while True:
        try:
            await receiver.run(session)
        except asyncio.CancelledError:
            if is_stopped():
                raise
            log.warning("%s: something that it waited for was cancelled; it sends again", receiver.name)
        except Exception as error:
            receiver.fault = f"{type(error).__name__}: {error}"[:300]
            log.exception("%s failed; it sends again", receiver.name)
        await asyncio.sleep(backoff.next_s())


def _alert(alarm: Alarm, site: str) -> dict[str, Any]:
    """Return an alert for Alertmanager. Labels identify it, so they never change while it lasts."""
    labels = {
        "alertname": f"racktwin_{alarm.id.partition('/')[0]}",
        "alarm": alarm.id,
        "severity": alarm.severity,
        "site": site,
    }
    # An alarm that follows from another has its id as cause: Alertmanager's inhibition rule goes by these two
    labels["cause"] = alarm.cause or alarm.id
    if alarm.cause:
        labels["suppressed"] = "true"
    if alarm.again:
        labels["again"] = "true"
    if entity := next((e for e in alarm.entities if alarm.id.endswith(f"/{e}")), None):
        labels["entity"] = entity
    annotations = {
        "summary": alarm.title + (" (flapping)" if alarm.flapping else ""),
        "description": "; ".join(_beside_title(alarm)),
        "action": alarm.action,
        "entities": ", ".join(alarm.entities),
        "acknowledged": f"{alarm.ack_author}: {alarm.ack_note}" if alarm.ack_ns else "",
        "first_up": "the first of its burst" if alarm.first_up else "",
    }
    return {
        "severity": alarm.severity,
        "labels": {k: _plain(v) for k, v in labels.items()},
        "annotations": {k: _plain(v) for k, v in annotations.items() if v},
        "begun_ns": alarm.raised_ns,
    }


def _alarm_of(item: dict[str, Any]) -> str:
    """Return the id of the alarm of a queued change."""
    return str(item["event"]["alarm"]["id"] if "event" in item else item["labels"]["alarm"])


def _key(alert: dict[str, Any]) -> str:
    return "\0".join(f"{k}={v}" for k, v in sorted(alert["labels"].items()))


def _event(key: str, change: AlarmChange) -> dict[str, Any]:
    """For a webhook; `id` stays the same when it is sent again."""
    a = change.alarm
    return {
        "id": key,
        "what": change.what,
        "at": _time(change.now_ns),
        "alarm": {
            "id": _plain(a.id),
            "severity": a.severity,
            "state": a.state,
            "title": _plain(a.title),
            "entities": [_plain(e) for e in a.entities],
            "evidence": [_plain(e) for e in _beside_title(a)],
            "action": _plain(a.action),
            "count": a.count,
            "times": a.times,
            "cause": _plain(a.cause),
            "first_up": a.first_up,
            "again": a.again,
            "raised_at": _time(a.raised_ns),
        },
    }


def _beside_title(alarm: Alarm) -> list[str]:
    """Return the evidence that the title does not state already."""
    return [e for e in alarm.evidence if not text.is_stated(e, alarm.title)]


def _plain(words: str) -> str:
    """Return text that every receiver can read, without invalid Unicode."""
    return words[:1000].encode("utf-8", "replace").decode()


def _time(now_ns: int) -> str:
    try:
        return datetime.fromtimestamp(now_ns / NS, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC).isoformat(timespec="milliseconds")
