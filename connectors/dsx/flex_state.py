"""DSX Flex output: reports on feeds, as a state machine without input, output or clock.

Each look is given what every feed draws and may draw, and answers with what is to be published: a snapshot of
all feeds for each change of one of them, and now and then without one; and a breach from when it is found
(active) over when it grows or lasts (escalated) to its end (resolved). A load that is not known is never
within a limit, and proves no breach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from connectors.dsx.flex_wire import BREACH, STATUS, text_of, watts
from twin.catalogue import NS

CRITICAL_PU = 0.20  # beyond this excess a breach is critical. source: dsx-flex.yaml 1.7.0
BREACH_PU = 0.01  # of a limit: as much as meters err. source: estimate; class 1 of IEC 62053-21
GRACE_S = 15.0  # in which the load may come down to a new limit. source: estimate; 10 s are aimed at
ESCALATE_S = 60.0  # a breach that lasts so long is escalated. source: estimate
RESOLVE_S = 5.0  # within the limit for so long: resolved. source: estimate
RAMP_UP_S = 900.0  # after which a ramp up is over in any case. source: estimate
MAX_SHOWN = 200  # targets of a feed in a snapshot
SHOWN_FOR = ("active", "escalated")

Flight = Literal["", "down", "up"]


class FeedTarget(NamedTuple):
    """A present or future target of a feed; `end_ns` None: until it is withdrawn."""

    correlation: str
    limit_w: float
    start_ns: int
    end_ns: int | None
    best_effort: bool = False

    def runs(self, now_ns: int) -> bool:
        """Return True if the target is in force."""
        return self.start_ns <= now_ns and (self.end_ns is None or now_ns < self.end_ns)


class FeedNow(NamedTuple):
    """A feed at this moment: its load (NaN unknown), the least and the most that it can be, its targets, and
    whether devices below it are still held back."""

    load_w: float
    minimum_w: float
    maximum_w: float
    targets: tuple[FeedTarget, ...]
    held_back: bool


class Hint(NamedTuple):
    """A node that could draw less: `priority` 1 is shed first; `target_w` is its cap."""

    node: str
    priority: int
    target_w: float


class FlexPublication(NamedTuple):
    """A publication: a type of event and its data; `correlation` is of the command it answers."""

    kind: str
    data: dict[str, Any]
    correlation: str = ""


@dataclass(slots=True)
class _Breach:
    id: str
    since_ns: int
    target: FeedTarget
    severity: str
    escalated: bool = False
    within_ns: int = 0  # since when the load is within the limit again; 0: it is not


@dataclass(slots=True)
class _Feed:
    targets: tuple[FeedTarget, ...]
    limit_w: float
    tightened_ns: int
    flight: Flight = ""
    flight_ns: int = 0
    event_ns: int = 0  # since when a target is in force or ramps go on; 0: none
    breach: _Breach | None = None
    events: list[str] = field(default_factory=list)
    changed: str = ""  # the correlation of a target that was just set


Hints = Callable[[str, float], Sequence[Hint]]  # (feed, excess in W) -> nodes, the first to be shed first


class FlexAgent:
    """The published state of each feed. `new_id` makes UUIDs.

    `last_resort` are actions for others, named where a critical breach has been escalated.
    """

    def __init__(
        self, new_id: Callable[[], str], heartbeat_s: float = 60.0, last_resort: Sequence[str] = ()
    ) -> None:
        self._new_id, self._heartbeat_s, self._last_resort = new_id, heartbeat_s, tuple(last_resort)
        self._feeds: dict[str, _Feed] = {}
        self._published_ns: int | None = None

    def publications(self, now_ns: int, feeds: Mapping[str, FeedNow], hints: Hints) -> list[FlexPublication]:
        """Return the publications that are due now, in order."""
        for tag in self._feeds.keys() - feeds.keys():
            del self._feeds[tag]
        for tag, now in feeds.items():
            self._follow(tag, now, now_ns)
        rounds = max((len(f.events) for f in self._feeds.values()), default=0)
        out = [self._snapshot(feeds, n, now_ns) for n in range(rounds)]
        due = self._published_ns is None or not 0 <= now_ns - self._published_ns < self._heartbeat_s * NS
        if not out and due and feeds:
            out = [self._snapshot(feeds, 0, now_ns)]
        if out:
            self._published_ns = now_ns
        for tag, now in feeds.items():
            out += self._breach(tag, now, now_ns, hints)
        return out

    def _follow(self, tag: str, now: FeedNow, now_ns: int) -> None:
        """Update the state of a feed, and its events since the last look."""
        limit_w = limit_of(now.targets, now_ns)
        feed = self._feeds.get(tag)
        if feed is None:
            feed = self._feeds[tag] = _Feed(now.targets, limit_w, now_ns)
            feed.event_ns = now_ns if math.isfinite(limit_w) else 0
            return
        feed.events, feed.changed = [], ""
        left = [t for t in feed.targets if t.end_ns is None or now_ns < t.end_ns]
        known, present = set(feed.targets), set(now.targets)
        fresh = [t for t in now.targets if t not in known]
        if fresh or not present.issuperset(left):
            feed.events.append("target_set")
            feed.changed = fresh[-1].correlation if fresh else ""
        feed.targets = now.targets
        if limit_w < feed.limit_w:
            feed.events.append("start_ramp_down")
            feed.flight, feed.flight_ns, feed.tightened_ns = "down", now_ns, now_ns
            feed.event_ns = feed.event_ns or now_ns
        elif limit_w > feed.limit_w:
            feed.events.append("start_ramp_up")
            feed.flight, feed.flight_ns = "up", now_ns
        elif feed.flight == "down" and now.load_w <= limit_w:
            feed.events.append("end_ramp_down")
            feed.flight = ""
        elif feed.flight == "up" and (not now.held_back or now_ns - feed.flight_ns >= RAMP_UP_S * NS):
            feed.events.append("end_ramp_up")
            feed.flight = ""
        feed.limit_w = limit_w
        if not feed.flight and not math.isfinite(limit_w):
            feed.event_ns = 0

    def _snapshot(self, feeds: Mapping[str, FeedNow], number: int, now_ns: int) -> FlexPublication:
        states, correlation = {}, ""
        for tag, now in feeds.items():
            feed = self._feeds[tag]
            event = feed.events[number] if number < len(feed.events) else "periodic"
            if event == "target_set" and feed.changed:
                correlation = feed.changed
            states[tag] = _state(feed, now, event, now_ns)
        return FlexPublication(STATUS, {"snapshot_time": text_of(now_ns), "feeds": states}, correlation)

    def _breach(self, tag: str, now: FeedNow, now_ns: int, hints: Hints) -> list[FlexPublication]:
        feed = self._feeds[tag]
        breach, known = feed.breach, math.isfinite(now.load_w)
        # A best-effort target that is not met is no breach; the snapshot shows it as not complied with
        firm = [t for t in now.targets if t.runs(now_ns) and not t.best_effort]
        target = min(firm, key=lambda t: t.limit_w, default=None)
        excess_w = now.load_w - target.limit_w if target is not None else -math.inf
        over = target is not None and known and excess_w > BREACH_PU * target.limit_w
        if breach is None:
            if not over or target is None or now_ns - feed.tightened_ns < GRACE_S * NS:
                return []
            breach = feed.breach = _Breach(self._new_id(), now_ns, target, _severity(excess_w, target))
            return [self._alert(tag, breach, "active", now, now_ns, hints(tag, excess_w))]
        if target is not None and not known:
            breach.within_ns = 0
            return []
        if target is None or excess_w <= 0:
            breach.within_ns = breach.within_ns or now_ns
            if target is not None and now_ns - breach.within_ns < RESOLVE_S * NS:
                return []
            feed.breach = None
            return [self._alert(tag, breach, "resolved", now, now_ns, ())]
        breach.target, breach.within_ns = target, 0
        # What meters err by proves nothing, nor does a load that still comes down to a new limit
        if not over or now_ns - feed.tightened_ns < GRACE_S * NS:
            return []
        severity = _severity(excess_w, target)
        worse = severity == "critical" and breach.severity != "critical"
        lasts = not breach.escalated and now_ns - breach.since_ns >= ESCALATE_S * NS
        breach.severity = severity if worse or not breach.escalated else breach.severity
        if not worse and not lasts:
            return []
        breach.escalated = True
        return [self._alert(tag, breach, "escalated", now, now_ns, hints(tag, excess_w))]

    def _alert(
        self, tag: str, breach: _Breach, status: str, now: FeedNow, now_ns: int, hints: Sequence[Hint]
    ) -> FlexPublication:
        times = {"breach_id": breach.id, "detected_at": text_of(breach.since_ns)}
        if status == "resolved":
            times["resolved_at"] = text_of(now_ns)
        drastic = status == "escalated" and breach.severity == "critical"
        load_w = now.load_w if math.isfinite(now.load_w) else now.maximum_w
        data: dict[str, Any] = {
            "feed_tag": tag,
            "status": status,
            "severity": breach.severity,
            "breach": times,
            "target": {
                "correlation_id": breach.target.correlation,
                "load_constraint": watts(breach.target.limit_w),
            },
            "measured_load": watts(load_w),
            "infrastructure_actions": list(self._last_resort) if drastic else [],
        }
        if status in SHOWN_FOR:
            data["shed_hints"] = [
                {
                    "resource_id": h.node,
                    "resource_type": "node",
                    "action": "power_cap",
                    "priority": h.priority,
                    "target_power": watts(h.target_w),
                }
                for h in hints
            ]
        return FlexPublication(BREACH, data, breach.target.correlation)


def limit_of(targets: Sequence[FeedTarget], now_ns: int) -> float:
    """Return the lowest of the targets in force, W; inf without one."""
    return min((t.limit_w for t in targets if t.runs(now_ns)), default=math.inf)


def _severity(excess_w: float, target: FeedTarget) -> str:
    return "critical" if excess_w > CRITICAL_PU * target.limit_w else "warning"


def _state(feed: _Feed, now: FeedNow, event: str, now_ns: int) -> dict[str, Any]:
    """Return a feed as in a snapshot; an unknown load counts as its maximum."""
    load_w = now.load_w if math.isfinite(now.load_w) else now.maximum_w
    bound = math.isfinite(feed.limit_w)
    out: dict[str, Any] = {
        "metadata": {
            "power_minimum": watts(now.minimum_w),
            "power_maximum": watts(now.maximum_w),
            "default_constraint": watts(now.maximum_w),
        },
        "targets": [_target(t, now_ns) for t in now.targets[:MAX_SHOWN]],
        "calculated_load": watts(load_w),
        "in_flight": feed.flight != "",
        "event": event,
        "compliant": not bound or (math.isfinite(now.load_w) and now.load_w <= feed.limit_w),
    }
    if feed.event_ns:
        out["power_event_start_time"] = text_of(feed.event_ns)
    return out


def _target(target: FeedTarget, now_ns: int) -> dict[str, Any]:
    interval = {"start_time": text_of(target.start_ns)}
    if target.end_ns is not None:
        interval["end_time"] = text_of(target.end_ns)
    return {
        "active": target.runs(now_ns),
        "load_constraint": watts(target.limit_w),
        "interval": interval,
        "strategy": {"best_effort": target.best_effort},
        "correlation_id": target.correlation,
    }
