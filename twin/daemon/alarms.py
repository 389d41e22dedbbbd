"""Alarm book: active alarms with their causes, acknowledgements and shelves, after ISA-18.2 / IEC 62682.

The book follows the engine's findings and the conditions of the daemon itself. An incident rings once. An
alarm that follows from another one is suppressed while that lasts; one that chatters is held. The book
decides nothing and the engine never reads it. It is kept in `alarms.json`, so that acknowledgements, shelves
and incidents survive a restart. What findings changed since then is in `alarms.recent.json`: a loss of power
may take that file, and no acknowledgement with it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from twin.catalogue import NS, StorageError
from twin.contracts import AlarmRecord, Finding, JournalRecord, goes_on, trouble_of
from twin.run import atomic_write

log = logging.getLogger(__name__)

FORMAT = 1
READS = (1,)
MAX_ALARMS = 12_000  # the engine's own bound and some more
MAX_CONDITIONS = 1000
KEPT_CLEARED = 500
FLAPS, FLAP_WINDOW_S = 5, 600.0  # raised more often than this, within this time, is flapping
MAX_SHELF_S = 30 * 86_400.0
EASED_S = 120.0  # for which an alarm must be less grave before that is shown; source: estimate
SAVE_EVERY_S = 10.0
RETURN_S = 60.0  # after a restart, so long a condition of the shell may take to show again
MAX_TEXT, MAX_LISTED = 500, 32
SEVERITIES = ("info", "warning", "critical")
# A flood is ten alarms in ten minutes for one operator, and ends below five; source: ISA-18.2, 16.5
FLOOD_WINDOW_S, FLOOD_BEGINS, FLOOD_ENDS = 600.0, 10, 5
BURST_S = 60.0  # after so long without another one an alarm is the first of its burst; source: estimate
MISSED_S = 86_400.0  # an alarm that is over is still shown where nobody acknowledged it. source: estimate
STALE_S = 86_400.0  # an alarm active for longer is stale; source: ISA-18.2, 16.5
HOUR_S = 3600.0
MAX_RAISES = 10_000

What = Literal[
    "raised", "again", "cleared", "severity", "flapping", "calm", "shelved", "returned", "acknowledged",
    "suppressed",
]  # fmt: skip


class Alarm(msgspec.Struct):
    """One alarm. `times` is how often it was raised; a flapping one counts as active until it is calm.

    `cause` is the id of the alarm that it follows from. `first_up`: it began a burst of alarms. `raised_ns`
    is the beginning of its incident, `gravest` the severity of that at its worst, `rung`: it rang. `again`:
    it was over and goes on. `eased_ns`: since when its finding is less grave than is shown.
    """

    id: str
    severity: str
    title: str
    entities: list[str]
    evidence: list[str]
    action: str
    count: int
    confidence_pu: float
    raised_ns: int
    changed_ns: int
    own: bool = False  # a condition of the shell, not a finding of the engine
    active: bool = True
    times: int = 1
    cleared_ns: int = 0
    flapping: bool = False
    raises_ns: list[int] = []
    ack_author: str = ""
    ack_note: str = ""
    ack_ns: int = 0
    shelved_until_ns: int = 0
    shelf_author: str = ""
    shelf_reason: str = ""
    cause: str = ""
    first_up: bool = False
    again: bool = False
    rung: bool = False
    gravest: str = ""
    eased_ns: int = 0

    @property
    def state(self) -> str:
        """cleared, shelved, suppressed, flapping, acknowledged or raised."""
        if self.shelved_until_ns:
            return "shelved"
        if self.cause and (self.active or self.flapping):
            return "suppressed"
        if self.flapping:
            return "flapping"
        if not self.active:
            return "cleared"
        return "acknowledged" if self.ack_ns else "raised"

    @property
    def visible(self) -> bool:
        """Return True while receivers should see it as active."""
        return (self.active or self.flapping) and not self.shelved_until_ns and not self.cause


class AlarmChange(msgspec.Struct, frozen=True):
    """A change that receivers are notified of; `alarm` is as it was at that moment."""

    what: What
    alarm: Alarm
    now_ns: int


class _File(msgspec.Struct):
    format: int
    alarms: list[Alarm]
    saved_ns: int = 0


class AlarmLoad:
    """The load on an operator: alarms that ring, and floods of them."""

    def __init__(self) -> None:
        self.raised = dict.fromkeys(SEVERITIES, 0)
        self.flood, self.floods, self.flood_ns = False, 0, 0
        self._rings: deque[int] = deque(maxlen=MAX_RAISES)
        self._looked_ns = 0

    def ring(self, now_ns: int, severity: str) -> bool:
        """Count an alarm; return True for the first one of a burst."""
        first = not self._rings or now_ns - self._rings[-1] > BURST_S * NS
        self._rings.append(now_ns)
        self.raised[severity] += 1
        return first

    def within(self, seconds: float, now_ns: int) -> int:
        """Alarms that rang in the last seconds."""
        return sum(now_ns - t <= seconds * NS for t in self._rings)

    def watch(self, now_ns: int) -> None:
        """Begin or end a flood."""
        while self._rings and now_ns - self._rings[0] > HOUR_S * NS:
            self._rings.popleft()
        if self.flood:
            self.flood_ns += now_ns - self._looked_ns
        recent = self.within(FLOOD_WINDOW_S, now_ns)
        if not self.flood and recent >= FLOOD_BEGINS:
            self.floods += 1
        self.flood = recent >= (FLOOD_ENDS if self.flood else FLOOD_BEGINS)
        self._looked_ns = now_ns


class AlarmBook:
    """All alarms by id. Every method belongs on the loop; `update` is called after each tick."""

    def __init__(self, folder: Path, note: Callable[[JournalRecord], None] | None = None) -> None:
        self.path, self.recent = folder / "alarms.json", folder / "alarms.recent.json"
        self.note = note  # where the journal's notes of what people did go
        self.alarms: dict[str, Alarm] = {}  # active, flapping or shelved
        self.gone: dict[str, Alarm] = {}  # cleared, oldest first
        self.counts = {"dropped": 0, "not_saved": 0}
        self.now_ns = 0
        self.fault = ""  # why the file could not be read or written
        self._conditions: dict[str, Finding] = {}
        self._seen: dict[str, Finding] = {}
        self._changes: list[AlarmChange] = []  # made between two updates
        self._since_ns = 0
        self._saved_ns, self._dirty = 0, False
        self._causes: Mapping[str, tuple[str, float]] = {}
        self._graver: dict[str, int] = {}  # alarms with suppressed ones -> rank of the gravest of these
        self.load = AlarmLoad()
        self._load()

    # -- what is wrong

    def condition(
        self, identity: str, severity: str, title: str, evidence: Iterable[str] = (), action: str = ""
    ) -> None:
        """Raise an alarm about the daemon itself, until `clear`."""
        if identity not in self._conditions and len(self._conditions) >= MAX_CONDITIONS:
            self.counts["dropped"] += 1
            return
        finding = Finding(identity, severity, title, (), tuple(evidence), 1.0, action)
        if self._conditions.get(identity) != finding:
            self._conditions[identity] = finding

    def clear(self, identity: str) -> None:
        """End the alarm of a condition, if there is one."""
        self._conditions.pop(identity, None)

    def update(
        self, findings: Iterable[Finding], now_ns: int, causes: Mapping[str, tuple[str, float]] | None = None
    ) -> list[AlarmChange]:
        """Apply the present findings; return the changes for receivers since the last update.

        `causes`: id of an alarm -> id of the one that it follows from, and for how many seconds it may
        outlast that one.
        """
        self.now_ns, self._causes = now_ns, causes or {}
        self._since_ns = self._since_ns or now_ns
        present = {f.id: f for f in findings}
        present.update(self._conditions)
        if len(present) > MAX_ALARMS:
            present = self._gravest(present)
        for identity, finding in present.items():
            alarm = self.alarms.get(identity)
            if self._seen.get(identity) is not finding or (alarm is not None and alarm.eased_ns):
                self._take(finding, identity in self._conditions)
        for identity, alarm in list(self.alarms.items()):
            if alarm.active and identity not in present and not self._expected(alarm):
                self._end(alarm)
        self._seen = present
        self._relate()
        self._settle()
        self.load.watch(now_ns)
        changes, self._changes = self._changes, []
        return changes

    def is_due(self) -> bool:
        """Return True if the book is to be written: it changed, and was last written 10 s ago or earlier."""
        return self._dirty and self.now_ns - self._saved_ns >= SAVE_EVERY_S * NS

    def save_if_due(self) -> None:
        """Write the book if it is due.

        Receivers' queues are stored first: an alarm that the file holds is not announced after a restart.
        """
        if self.is_due():
            self._save(sync=bool(self.fault))  # what people said may wait for it

    def _gravest(self, present: dict[str, Finding]) -> dict[str, Finding]:
        """Return as many findings as there is room for, the gravest, and one that counts the others."""
        order = sorted(present.values(), key=lambda f: -_rank(f.severity))  # stable: those that were first
        kept, rest = order[: MAX_ALARMS - 1], order[MAX_ALARMS - 1 :]
        self.counts["dropped"] += len(rest)
        more = Finding(
            "alarms/more", rest[0].severity, "There are more alarms than are kept", (),
            ("the gravest are kept; the others are in the list of findings",), 1.0,
            "Look for a common cause before you look at a single one.", len(rest),
        )  # fmt: skip
        return {f.id: f for f in (*kept, more)}

    def _expected(self, alarm: Alarm) -> bool:
        """A condition from before a restart, which its source has had no time to state again."""
        return alarm.own and alarm.id not in self._seen and self.now_ns - self._since_ns < RETURN_S * NS

    def _take(self, finding: Finding, own: bool) -> None:
        alarm = self.alarms.get(finding.id)
        if alarm is None:
            if len(self.alarms) >= 2 * MAX_ALARMS:  # with those that end now, are shelved or flap
                self.counts["dropped"] += 1
                return
            alarm = self.gone.pop(finding.id, None)
            if alarm is None:
                alarm = Alarm(finding.id, finding.severity, "", [], [], "", 1, 1.0, 0, 0, own)
                alarm.times = 0
            self.alarms[finding.id] = alarm
            alarm.active = False
        if not alarm.active:
            self._recall(alarm, finding)
        # An alarm is as grave as the gravest that it suppresses
        severity = SEVERITIES[max(_rank(finding.severity), self._graver.get(finding.id, 0))]
        severity = self._eased(alarm, severity)
        moved = alarm.active and severity != alarm.severity
        rose = moved and _rank(severity) > _rank(alarm.gravest or alarm.severity)
        alarm.again = (alarm.again or (moved and _rank(severity) > _rank(alarm.severity))) and not rose
        alarm.severity = severity
        alarm.gravest = SEVERITIES[max(_rank(severity), _rank(alarm.gravest or severity))]
        alarm.title, alarm.action = finding.title[:MAX_TEXT], finding.action[:MAX_TEXT]
        alarm.entities = [e[:MAX_TEXT] for e in finding.entities[:MAX_LISTED]]
        alarm.evidence = [e[:MAX_TEXT] for e in finding.evidence[:MAX_LISTED]]
        alarm.count, alarm.confidence_pu = finding.count, float(finding.confidence_pu)
        if not alarm.active:
            self._begin(alarm)
        elif moved:
            alarm.changed_ns, self._dirty = self.now_ns, True
            if rose:  # worse than what people knew of, or put aside
                alarm.ack_author, alarm.ack_note, alarm.ack_ns = "", "", 0
                if alarm.shelved_until_ns:
                    self._off_shelf(alarm)
                    return
            self._say("severity", alarm)

    def _recall(self, alarm: Alarm, finding: Finding) -> None:
        """Assign a new alarm to its former incident, to that of a sibling, or to a new one."""
        trouble = trouble_of(finding.id)
        known = [alarm]
        if trouble != finding.id:
            known += [a for a in (*self.alarms.values(), *self.gone.values()) if trouble_of(a.id) == trouble]
        for one in known:
            ended_ns = self.now_ns if one.active else one.cleared_ns
            gravest = one.gravest or one.severity
            if one.rung and goes_on(finding, one.entities, gravest, ended_ns, self.now_ns):
                alarm.again, alarm.rung, alarm.gravest = True, True, gravest
                alarm.raised_ns = one.raised_ns
                return
        alarm.again, alarm.rung, alarm.gravest = False, False, ""
        alarm.ack_author, alarm.ack_note, alarm.ack_ns = "", "", 0

    def _eased(self, alarm: Alarm, severity: str) -> str:
        """Return the displayed severity. An alarm gets less severe only after a while."""
        if not alarm.active or _rank(severity) >= _rank(alarm.severity):
            alarm.eased_ns = 0
            return severity
        alarm.eased_ns = alarm.eased_ns or self.now_ns
        if self.now_ns - alarm.eased_ns < EASED_S * NS:
            return alarm.severity
        alarm.eased_ns = 0
        return severity

    def _cause_of(self, identity: str) -> str:
        """The active alarm that this one follows from; none for what causes itself."""
        cause, linger_s = self._causes.get(identity, ("", 0.0))
        root = self.alarms.get(cause) or self.gone.get(cause)
        if cause == identity or root is None or root.cause:
            return ""
        return cause if root.active or self.now_ns - root.cleared_ns < linger_s * NS else ""

    def _relate(self) -> None:
        """Suppress what follows from another alarm, and say what no longer does."""
        gravest: dict[str, int] = {}
        for alarm in self.alarms.values():
            if alarm.active and alarm.cause:
                gravest[alarm.cause] = max(gravest.get(alarm.cause, 0), _rank(alarm.severity))
            if alarm.active and (cause := self._cause_of(alarm.id)) != alarm.cause:
                before, alarm.cause, self._dirty = alarm.cause, cause, True
                if cause:
                    self._say("suppressed", alarm)
                elif before:
                    if not alarm.again:
                        self._ring(alarm)
                    self._say("returned", alarm)

        for identity in self._graver.keys() | gravest.keys():
            self._graver[identity] = gravest.get(identity, 0)
            root, finding = self.alarms.get(identity), self._seen.get(identity)
            if root is not None and root.active and finding is not None:
                self._take(finding, root.own)
        self._graver = gravest

    def _ring(self, alarm: Alarm) -> None:
        """Notify the operator of an alarm."""
        if not alarm.shelved_until_ns and not alarm.cause:
            alarm.rung = True
            alarm.first_up = self.load.ring(self.now_ns, alarm.severity)

    def _begin(self, alarm: Alarm) -> None:
        now_ns, self._dirty = self.now_ns, True
        alarm.cause = self._cause_of(alarm.id)
        alarm.active, alarm.cleared_ns, alarm.times = True, 0, alarm.times + 1
        alarm.changed_ns = now_ns
        alarm.raises_ns = [
            t for t in [*alarm.raises_ns, now_ns][-FLAPS - 1 :] if now_ns - t <= FLAP_WINDOW_S * NS
        ]
        if alarm.flapping:
            return
        if not alarm.again:
            alarm.raised_ns = now_ns
        if len(alarm.raises_ns) > FLAPS:
            alarm.flapping = True
            self._say("flapping", alarm)
        elif alarm.again:
            self._say("again", alarm)
        else:
            self._ring(alarm)
            self._say("raised", alarm)

    def _end(self, alarm: Alarm) -> None:
        alarm.active, alarm.changed_ns, alarm.cleared_ns, self._dirty = False, self.now_ns, self.now_ns, True
        if alarm.flapping:
            return
        self._say("cleared", alarm)
        alarm.cause = ""
        if not alarm.shelved_until_ns:
            self._put_away(alarm)

    def _put_away(self, alarm: Alarm) -> None:
        self.alarms.pop(alarm.id, None)
        self.gone[alarm.id] = alarm
        while len(self.gone) > KEPT_CLEARED:
            del self.gone[next(iter(self.gone))]

    def _settle(self) -> None:
        """Apply changes by time alone: a flapping alarm that has settled, a shelf that ends."""
        for alarm in [a for a in self.alarms.values() if a.flapping or a.shelved_until_ns]:
            if alarm.flapping and self.now_ns - alarm.changed_ns >= FLAP_WINDOW_S * NS:
                alarm.flapping, alarm.raises_ns, self._dirty = False, [], True
                self._say("calm" if alarm.active else "cleared", alarm)
                if not alarm.active and not alarm.shelved_until_ns:
                    self._put_away(alarm)
            if 0 < alarm.shelved_until_ns <= self.now_ns:
                self._off_shelf(alarm)

    def _off_shelf(self, alarm: Alarm) -> None:
        alarm.shelved_until_ns, alarm.shelf_author, alarm.shelf_reason = 0, "", ""
        self._dirty = True
        if alarm.active or alarm.flapping:
            self._say("returned", alarm)
        else:
            self._put_away(alarm)

    def _say(self, what: What, alarm: Alarm) -> None:
        if alarm.cause:  # receivers may show it as a consequence, and are notified that it is over
            what = "cleared" if what == "cleared" else "suppressed"
        if not alarm.shelved_until_ns or what == "shelved":
            self._changes.append(AlarmChange(what, msgspec.structs.replace(alarm), self.now_ns))
            del self._changes[: -2 * MAX_ALARMS]

    # -- what people do; each returns the record for the journal

    def acknowledge(self, identity: str, author: str, note: str = "") -> AlarmRecord:
        """Acknowledge an alarm, active or over. Raises KeyError for an unknown one."""
        alarm = self.alarms.get(identity) or self.gone[identity]
        alarm.ack_author, alarm.ack_note = author[:MAX_TEXT], note[:MAX_TEXT]
        alarm.ack_ns = max(1, self.now_ns)
        if alarm.active or alarm.flapping:
            self._say("acknowledged", alarm)
        return self._noted("acknowledged", alarm, author=alarm.ack_author, note=alarm.ack_note)

    def shelve(self, identity: str, until_ns: int, author: str, reason: str) -> AlarmRecord:
        """Shelve an alarm until an instant, or until it gets worse. Raises KeyError or ValueError."""
        alarm = self.alarms[identity]
        if not self.now_ns < until_ns <= self.now_ns + MAX_SHELF_S * NS:
            raise ValueError(f"expected an instant within the next {MAX_SHELF_S / 86_400:g} days")
        alarm.shelved_until_ns = until_ns
        alarm.shelf_author, alarm.shelf_reason = author[:MAX_TEXT], reason[:MAX_TEXT]
        self._say("shelved", alarm)
        return self._noted(
            "shelved", alarm, author=alarm.shelf_author, reason=alarm.shelf_reason, until_ns=until_ns
        )

    def unshelve(self, identity: str, author: str) -> AlarmRecord:
        """Unshelve an alarm. Raises KeyError if it is not shelved."""
        alarm = self.alarms[identity]
        if not alarm.shelved_until_ns:
            raise KeyError(identity)
        self._off_shelf(alarm)
        return self._noted("unshelved", alarm, author=author[:MAX_TEXT])

    def _noted(self, what: str, alarm: Alarm, **more: Any) -> AlarmRecord:
        record = AlarmRecord(what=what, id=alarm.id, severity=alarm.severity, **more)
        self._dirty = True  # if the disk refuses now, it is tried again
        self._save()
        if self.note is not None:
            self.note(record)
        return record

    # -- what is shown and kept

    def active(self) -> list[Alarm]:
        """Active alarms, suppressed ones as well, for a receiver that begins to listen."""
        every = self.alarms.values()
        return [msgspec.structs.replace(a) for a in every if a.visible or a.state == "suppressed"]

    def listing(self, cleared: bool = False) -> list[dict[str, Any]]:
        """Alarms as plain data, the gravest first, then the newest; with `cleared`, also what is over."""
        every = sorted(self.alarms.values(), key=lambda a: (-_rank(a.severity), -a.raised_ns, a.id))
        return [_shown(a) for a in [*every, *(reversed(self.gone.values()) if cleared else ())]]

    def missed(self) -> list[dict[str, Any]]:
        """Warnings and graver that rang within a day, are over, and nobody acknowledged; newest first."""
        since_ns, least = self.now_ns - round(MISSED_S * NS), _rank("warning")
        return [
            _shown(a)
            for a in reversed(self.gone.values())
            if a.rung and not a.ack_ns and a.cleared_ns > since_ns and _rank(a.gravest or a.severity) >= least
        ]

    def figures(self) -> dict[str, float]:
        """The measures of ISA-18.2: alarms of the last hour, floods; stale and chattering alarms."""
        every = self.alarms.values()
        stale = (a for a in every if a.active and self.now_ns - a.raised_ns > STALE_S * NS)
        return {
            "last_hour": self.load.within(HOUR_S, self.now_ns),
            "last_ten_minutes": self.load.within(FLOOD_WINDOW_S, self.now_ns),
            "stale": sum(1 for _ in stale),
            "chattering": sum(a.flapping for a in every),
            "suppressed": sum(a.state == "suppressed" for a in every),
            "flood": float(self.load.flood),
            "floods": self.load.floods,
            "flood_s": self.load.flood_ns / NS,
        }

    def save(self) -> None:
        """Write the book, at the end of a run."""
        if self._dirty:
            self._save()

    def _save(self, sync: bool = True) -> None:
        """Write the file atomically. If the disk fails, the book in memory stays valid.

        What people said is forced to the disk; what findings say comes again by itself.
        """
        self._saved_ns = self.now_ns
        book = _File(FORMAT, [*self.alarms.values(), *self.gone.values()], self.now_ns)
        path = self.path if sync else self.recent
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, msgspec.json.encode(book), sync=sync)
        except OSError as error:
            self.counts["not_saved"] += 1
            if not self.fault:
                log.error(
                    "%s: cannot be written: %s; acknowledgements and shelves end with this process",
                    path,
                    error,
                )
            self.fault = f"{path}: cannot be written: {error}"
            return
        self.fault, self._dirty = "", False

    def _load(self) -> None:
        book, recent = self._read(), _read_recent(self.recent)
        # One without its instant is of an earlier version, or of people who spoke before the first tick
        if book is None or (recent is not None and 0 < book.saved_ns < recent.saved_ns):
            book = recent
        for alarm in [] if book is None else book.alarms[: MAX_ALARMS + KEPT_CLEARED]:
            open_ = alarm.active or alarm.flapping or alarm.shelved_until_ns
            (self.alarms if open_ else self.gone)[alarm.id] = alarm

    def _read(self) -> _File | None:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error}") from error
        try:
            version = msgspec.json.decode(data, type=_Format).format
            if version not in READS:
                raise StorageError(
                    f"{self.path}: alarms of format {version}; expected {', '.join(map(str, READS))}: "
                    "start the version that wrote it, or move the file away"
                )
            return msgspec.json.decode(data, type=_File)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            kept = _aside(self.path)
            self.fault = f"{self.path}: damaged ({error}); moved to {kept.name}; acknowledgements are lost"
            log.error("%s", self.fault)
            return None


class _Format(msgspec.Struct):
    format: int


def _read_recent(path: Path) -> _File | None:
    """Read the book; return None if it is missing, or incomplete after a power loss."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.format in READS else None


def _aside(path: Path) -> Path:
    number = 0
    while (kept := path.with_name(f"{path.stem}.damaged" + (f".{number}" if number else ""))).exists():
        number += 1
    path.replace(kept)
    return kept


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else 1


def _shown(alarm: Alarm) -> dict[str, Any]:
    out: dict[str, Any] = msgspec.to_builtins(alarm)
    for own in ("raises_ns", "rung", "gravest", "eased_ns"):
        del out[own]
    return out | {"state": alarm.state}
