"""DSX Flex input: load targets that the grid side sets over MQTT, as events of the twin.

`grid/v1/isv/{identifier}/loadtarget/set` carries CloudEvents in JSON, whose data is signed. Each target
becomes an event for each of its feeds, named `{correlationid}/{feed}`; what it covers of its speaker's
earlier targets on that feed is withdrawn, and a constraint of null ends what runs. A message counts once.
What is held is asked of `held`, so that a restart forgets nothing.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import msgspec

from connectors.allowance import Allowance
from connectors.dsx.flex_keys import KeySet
from connectors.dsx.flex_wire import (
    ISV,
    MAX_PAYLOAD,
    SET,
    CloudEvent,
    TargetEntry,
    decode_data,
    decode_envelope,
    entries_of,
)
from twin.catalogue import NS, BadMessage
from twin.contracts import MAX_AHEAD_S, ReadTargets
from twin.telemetry import Ignored, LoadTargetSet, LoadTargetWithdrawn, Message

TOPIC = "grid/v1/isv/+/loadtarget/set"
STEM, LEAF = "grid/v1/isv/", "/loadtarget/set"
MAX_KNOWN = 10_000  # ids and signings that are remembered
MAX_EVENTS = 1_000  # of one message: as many as targets can be held
MAX_MADE = 4 * MAX_EVENTS  # events that one message may come to, as removals cut what is held in two
MAX_PROBLEMS = 100  # of one message that are reported
FUTURE_S = 300.0  # by which a sender's clock may be ahead of ours. source: estimate
LATE_S = (
    86_400.0  # beyond this a message is no news: a broker may hold it while we are away. source: estimate
)
# Allowance of events that sets may cause: a day's schedule for ten feeds at once, then this many a second
BURST, PER_S = 2**20, 2**9
EVENT_BYTES = 400  # of one event on record. source: estimate
UNSEEN_NS = 30 * NS  # within which a target that was set must appear among those that are held

_Events = list[LoadTargetSet | LoadTargetWithdrawn]
_K = TypeVar("_K")
_V = TypeVar("_V")


class Own(NamedTuple):
    """A target in force: its begin and end (ns; None: until withdrawn), and its values."""

    start_ns: int
    end_ns: int | None
    limit_w: float
    best_effort: bool

    def runs(self, t_ns: int) -> bool:
        """Return True if it is in force at `t_ns`."""
        return self.start_ns <= t_ns and (self.end_ns is None or t_ns < self.end_ns)


@dataclass(slots=True)
class _Speaker:
    """An ISV while one of its messages is decoded, at `now_ns`: its targets, and names that others hold."""

    author: str
    own: dict[str, Own]
    others: set[str]
    now_ns: int


@dataclass(frozen=True, kw_only=True)
class FlexTrust:
    """The ISVs that may set targets (no `isvs`: any with a valid signature), and the accepted messages.

    `unsigned` accepts plain data, `copies` the same signing under another id.
    """

    isvs: Sequence[str] = ()
    unsigned: Literal["refuse", "accept"] = "refuse"
    copies: Literal["refuse", "accept"] = "refuse"


class FlexDecoder:
    """Decodes the load targets of ISVs. `feeds` maps tags to feeders ("" is the site's racks together).

    `held`: the targets that the twin holds; `seen`: ids of the events that it took in. `counts` are of fixed
    names.
    """

    def __init__(
        self,
        feeds: Mapping[str, str],
        keys: KeySet | None,
        targets: ReadTargets,
        event_ids: Callable[[], Iterable[str]] = tuple,
        trust: FlexTrust | None = None,
    ) -> None:
        trust = trust or FlexTrust()
        self.feeds, self.keys, self.isvs = dict(feeds), keys, frozenset(trust.isvs)
        self.unsigned, self.copies = trust.unsigned, trust.copies
        self._held, self._seen = targets, event_ids
        self._recalled = False
        self.counts = dict.fromkeys(
            ("sets", "events", "again", "copies", "refused", "unsigned", "part_refused"), 0
        )
        self.faults: list[str] = []  # inside messages that were taken all the same, at most 100
        self.traces: OrderedDict[str, tuple[str, str]] = OrderedDict()  # correlation -> traceparent, -state
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._marks: OrderedDict[bytes, str] = OrderedDict()
        self._newest: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._sent: OrderedDict[tuple[str, str], tuple[int, Own | None]] = OrderedDict()
        self._allowance = Allowance("load targets", BURST, PER_S)

    def decode(self, message: Message) -> _Events | Ignored:
        """Return the events of one message; Ignored for a repeated one. Raises BadMessage for an invalid
        one."""
        try:
            return self._decode(message)
        except BadMessage:
            self.counts["refused"] += 1
            raise

    def _decode(self, message: Message) -> _Events | Ignored:
        topic = message.topic
        isv = topic[len(STEM) : -len(LEAF)]
        if not (topic.startswith(STEM) and topic.endswith(LEAF) and 0 < len(isv) <= 200) or "/" in isv:
            return Ignored("grid", "not a topic of load targets")
        if not isv.isprintable():
            raise BadMessage(f"{isv[:80]!r}: expected an identifier of printable characters")
        if len(message.payload) > MAX_PAYLOAD:
            raise BadMessage(f"{len(message.payload)} bytes; expected at most {MAX_PAYLOAD}")
        envelope = decode_envelope(message.payload)
        if envelope.type != SET:
            raise BadMessage(f"type {envelope.type[:80]!r}; expected {SET} on this topic")
        if envelope.source != f"{ISV}{isv}":
            raise BadMessage(f"source {envelope.source[:200]!r}; expected {ISV}{isv}, as its topic says")
        if self.isvs and isv not in self.isvs:
            raise BadMessage(f"{isv[:80]!r} may not set load targets here; expected one of power.flex.isvs")
        # Nothing is remembered of what is not signed: nobody uses up the ids of another
        payload, mark = self._plaintext(envelope, isv)
        key = f"{isv}#{envelope.id}"
        self._recall()
        if key in self._ids:
            self.counts["again"] += 1
            return Ignored("loadtarget", "duplicate: an event with this id came before")
        if mark and self._marks.get(mark, key) != key and self.copies == "refuse":
            self.counts["copies"] += 1
            raise BadMessage(
                "data: replayed: the same signature came before under another id; expected a new signature"
            )
        self._check_time(envelope, message.t_ns)
        known, problems = self._resolve(entries_of(decode_data(payload), message.t_ns), message.t_ns)
        if not known:
            raise BadMessage("; ".join(problems[:4])[:600])
        if len(known) > MAX_EVENTS:
            raise BadMessage(f"comes to more than {MAX_EVENTS} targets of feeds; expected no more")
        known_isv = isv in self.isvs or (self.keys is not None and isv in self.keys.speakers)
        self._allowance.spend(isv if known_isv else "other ISVs", EVENT_BYTES * len(known), message.t_ns)
        # Each with an id: by it a message, and its signing, are known after a restart
        sent = self._sent.copy()
        try:
            made = self._events(envelope, isv, known, message.t_ns, problems)
        except BadMessage:
            self._sent = sent
            raise
        events: _Events = [
            msgspec.structs.replace(e, id=f"{key}~{mark.hex()}#{n}") for n, e in enumerate(made)
        ]
        _remember(self._ids, key, None)
        if mark:
            _remember(self._marks, mark, key)
        if problems:
            self.counts["part_refused"] += 1
            self.faults += [f"{isv[:80]}: {p}" for p in problems[: 100 - len(self.faults)]]
        self.counts["sets"] += 1
        self.counts["events"] += len(events)
        _remember(self.traces, envelope.correlation, (envelope.traceparent, envelope.tracestate))
        return events

    def _recall(self) -> None:
        """Recall, once, the messages that were accepted before this process began."""
        if self._recalled:
            return
        self._recalled = True
        for name in self._seen():
            key, tilde, rest = name.rpartition("~")
            if tilde:
                _remember(self._ids, key, None)
                mark = rest.partition("#")[0]
                if len(mark) == 32 and all(c in "0123456789abcdef" for c in mark):
                    _remember(self._marks, bytes.fromhex(mark), key)

    def _plaintext(self, envelope: CloudEvent, isv: str) -> tuple[bytes, bytes]:
        """Return (payload in JSON, the mark of its signature or b"")."""
        if isinstance(envelope.data, str):
            if self.keys is None:
                raise BadMessage("data is signed, but no keys are configured; expected power.flex.keys_file")
            signed = self.keys.verify(envelope.data, isv)
            return signed.payload, signed.mark
        self.counts["unsigned"] += 1
        if self.unsigned == "refuse":
            raise BadMessage(
                "data is not signed; expected a JWS in compact form (or power.flex.unsigned: accept)"
            )
        return bytes(envelope.data), b""

    def _check_time(self, envelope: CloudEvent, now_ns: int) -> None:
        ahead_s = (envelope.time_ns - now_ns) / NS
        if ahead_s > FUTURE_S:
            raise BadMessage(f"time is {ahead_s:.0f} s ahead of our clock; expected at most {FUTURE_S:g} s")
        if ahead_s < -LATE_S:
            raise BadMessage(f"is {-ahead_s:.0f} s old; expected at most {LATE_S:g} s")

    def _resolve(
        self, entries: list[TargetEntry], now_ns: int
    ) -> tuple[list[tuple[TargetEntry, str]], list[str]]:
        """Return (each target with each of its feeds, rejected entries with reasons)."""
        out: list[tuple[TargetEntry, str]] = []
        problems: list[str] = []
        for entry in entries:
            if len(out) > MAX_EVENTS:
                raise BadMessage(f"comes to more than {MAX_EVENTS} targets of feeds; expected no more")
            where, fault = f"targets[{entry.number}]", entry.fault
            if not fault and entry.start_ns - now_ns > MAX_AHEAD_S * NS:
                fault = "begins in more than a year"
            elif not fault and entry.end_ns is not None and entry.end_ns <= now_ns:
                fault = f"over already, {(now_ns - entry.end_ns) / NS:.0f} s ago"
            feeds = () if fault else dict.fromkeys(entry.feeds or self.feeds)
            out += [(entry, feed) for feed in feeds if feed in self.feeds]
            unknown = [feed for feed in feeds if feed not in self.feeds]
            room = MAX_PROBLEMS - len(problems)
            faults = [f"no feed {feed[:80]!r}; expected one of {self._known()}" for feed in unknown[:room]]
            problems += [f"{where}: {text}" for text in ([fault] if fault else faults)[:room]]
        return out, problems

    def _known(self) -> str:
        return ", ".join(list(self.feeds)[:8])

    def _events(
        self,
        envelope: CloudEvent,
        isv: str,
        known: list[tuple[TargetEntry, str]],
        now_ns: int,
        problems: list[str],
    ) -> _Events:
        author, out = f"{ISV}{isv}", _Events()
        speaker = _Speaker(author, self._own(author, now_ns), self._others(author), now_ns)
        own, was = speaker.own, len(speaker.own)
        for feed in dict.fromkeys(feed for _, feed in known):
            mine = {self.name(envelope.correlation, feed, e.number): e for e, f in known if f == feed}
            late = envelope.time_ns < self._newest.get((isv, feed), 0)
            before = dict.fromkeys(n for n in own if feed_of(n) == feed and n not in mine)
            if not late:  # what was set anew under the same correlation is set as a whole
                for name in [n for n in before if correlation_of(n) == envelope.correlation]:
                    out.append(self._withdraw(speaker, name))
                    del before[name]
            for name, entry in mine.items():
                if name in speaker.others:  # a correlation is no secret, and not signed
                    problems.append(f"targets[{entry.number}]: another holds a target of this correlationid")
                    continue
                if late and (entry.limit_w is None or name in own):
                    problems.append(f"targets[{entry.number}]: older than the target in force")
                    continue
                if not late:
                    left = [n for n in before if n in own]
                    made = self._make_room(speaker, feed, entry, left)
                    before |= dict.fromkeys(e.target for e in made)  # what is left behind a removal, too
                    out += made
                if entry.limit_w is not None:
                    given = Own(entry.start_ns, entry.end_ns, entry.limit_w, entry.best_effort)
                    out.append(self._set(speaker, feed, name, given))
                elif name in own:
                    out.append(self._withdraw(speaker, name))
                if len(out) > MAX_MADE:
                    raise BadMessage(
                        f"comes to more than {MAX_MADE} changes of targets; send the event in parts"
                    )
        room = MAX_EVENTS - sum(t.kind == "flex" and t.author != author for t in self._held())
        if len(own) > max(room, was):  # what is left behind a removal must not be what finds no room
            raise BadMessage(f"comes to {len(own)} targets in force; expected at most {max(room, 0)}")
        for feed in dict.fromkeys(feed for _, feed in known):
            newest = max(self._newest.get((isv, feed), 0), envelope.time_ns)
            _remember(self._newest, (isv, feed), newest)
        return out

    def _make_room(self, speaker: _Speaker, feed: str, entry: TargetEntry, before: list[str]) -> _Events:
        """Return the changes to earlier targets of the sender on its feed; updates `own`.

        A target withdraws those of which it covers all that is left. Null ends those that have begun by its
        start, and lets them go on behind its end; what begins later stays. What earlier removals left of a
        target is still one target, in pieces, and began when the whole did.
        """
        own, out, pieces = speaker.own, _Events(), dict[str, list[str]]()
        for name in before:
            pieces.setdefault(_stem(name), []).append(name)
        for names in pieces.values():
            if entry.limit_w is not None:
                if all(_covers(entry, own[name], speaker.now_ns) for name in names):
                    out += [self._withdraw(speaker, name) for name in names]
            elif min(_begin_of(name, own[name]) for name in names) <= max(entry.start_ns, speaker.now_ns):
                for name in names:
                    out += self._cut(speaker, feed, name, entry)
        return out

    def _cut(self, speaker: _Speaker, feed: str, name: str, gap: TargetEntry) -> _Events:
        """Take the time of a removal out of one piece of a target."""
        old, out = speaker.own[name], _Events()
        if not _overlap(old, gap):
            return out
        front = gap.start_ns > max(old.start_ns, speaker.now_ns)
        if front:
            out.append(self._set(speaker, feed, name, old._replace(end_ns=gap.start_ns)))
        else:
            out.append(self._withdraw(speaker, name))
        if gap.end_ns is not None and (old.end_ns is None or old.end_ns > gap.end_ns):
            behind = _free_name(name, _begin_of(name, old), speaker.own.keys() | speaker.others)
            out.append(self._set(speaker, feed, behind, old._replace(start_ns=gap.end_ns)))
        return out

    def _others(self, author: str) -> set[str]:
        """Return the names of targets that others hold, or have just set."""
        names = {t.name for t in self._held() if t.author != author or t.kind != "flex"}
        return names | {n for (who, n), (_, sent) in self._sent.items() if who != author and sent is not None}

    def _own(self, author: str, now_ns: int) -> dict[str, Own]:
        """Return present and future targets of a sender, with those just set and not held yet."""
        out = {
            t.name: Own(t.start_ns, t.end_ns, t.limit_w, t.best_effort)
            for t in self._held()
            if t.author == author and t.kind == "flex"
        }
        for (speaker, name), (t_ns, sent) in list(self._sent.items()):
            if now_ns - t_ns > UNSEEN_NS:
                del self._sent[speaker, name]
            elif speaker == author and sent is None:
                out.pop(name, None)
            elif speaker == author and sent is not None:
                out[name] = sent
        return {name: o for name, o in out.items() if o.end_ns is None or o.end_ns > now_ns}

    def _set(self, speaker: _Speaker, feed: str, name: str, given: Own) -> LoadTargetSet:
        speaker.own[name] = given
        _remember(self._sent, (speaker.author, name), (speaker.now_ns, given))
        feeder = self.feeds[feed]
        return LoadTargetSet(
            author=speaker.author,
            target=name,
            limit_w=given.limit_w,
            kind="flex",
            feeders=(feeder,) if feeder else (),
            start_ns=given.start_ns,
            end_ns=given.end_ns or 0,
            best_effort=given.best_effort,
        )

    def _withdraw(self, speaker: _Speaker, name: str) -> LoadTargetWithdrawn:
        speaker.own.pop(name, None)
        _remember(self._sent, (speaker.author, name), (speaker.now_ns, None))
        return LoadTargetWithdrawn(author=speaker.author, target=name)

    @staticmethod
    def name(correlation: str, feed: str, number: int) -> str:
        """Return the name of a target: the first of a message by its correlation and feed, others
        numbered."""
        return f"{correlation}/{feed}" + (f"/{number}" if number else "")


def _covers(entry: TargetEntry, old: Own, now_ns: int) -> bool:
    """Return True if an entry lasts for the rest of a piece."""
    lasts = entry.end_ns is None or (old.end_ns is not None and old.end_ns <= entry.end_ns)
    return lasts and entry.start_ns <= max(old.start_ns, now_ns)


def _overlap(old: Own, gap: TargetEntry) -> bool:
    return (old.end_ns is None or gap.start_ns < old.end_ns) and (
        gap.end_ns is None or old.start_ns < gap.end_ns
    )


def _stem(name: str) -> str:
    """Return the name under which a target was set, from any of its pieces."""
    return name.partition("+")[0]


def _free_name(name: str, begin_ns: int, taken: set[str]) -> str:
    """Return an unused name for the piece of a target behind a removal, which includes the target's begin."""
    stem, begin = _stem(name), f"@{begin_ns:x}"
    return next(free for n in itertools.count(1) if (free := f"{stem}+{n}{begin}") not in taken)


def _begin_of(name: str, piece: Own) -> int:
    """Return the begin of the target of a piece."""
    of_whole = name.partition("+")[2].partition("@")[2]
    return int(of_whole, 16) if of_whole else piece.start_ns


def feed_of(name: str) -> str:
    """Return the feed in a target's name; "" for a foreign name."""
    parts = _stem(name).split("/")
    return parts[1] if len(parts) in (2, 3) else ""


def correlation_of(name: str) -> str:
    """Return the correlation in a target's name."""
    return name.partition("/")[0]


def _remember(known: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Put a key last, and forget the oldest beyond MAX_KNOWN."""
    known[key] = value
    known.move_to_end(key)
    while len(known) > MAX_KNOWN:
        known.popitem(last=False)
