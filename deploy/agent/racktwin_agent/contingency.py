"""Contingency: caps applied on a local trigger without the daemon, from a plan delivered in advance, and the
lowest caps on overheating, which needs no plan.

Says which ceilings stand and why; `settings.py` puts them in force. Only ever lowers. Pure: time and
triggers are passed in. Imports the agent's clock, stored and wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from racktwin_agent.clock import NS, Deadline, Instant
from racktwin_agent.stored import deadline, seconds, table, text, whole
from racktwin_agent.wire import Plan

HEAT = "overheating"  # goes before any trigger of a plan
HEAT_HOLD_S = 60.0  # so long after it the caps stay; source: as the policy thermal_guard
MAX_PLAN_NS = 400 * 86_400 * NS


@dataclass(slots=True)
class Armed:
    """The plan of this node."""

    epoch: int
    issued_ns: int
    until: Deadline
    triggers: tuple[str, ...]
    hold_s: float
    caps: dict[str, float]  # name within the node -> watts


@dataclass(frozen=True, slots=True)
class Change:
    """Result of a step: ceilings to put in force (empty: to remove), and a sentence for the log."""

    caps: dict[str, float]
    text: str
    began: str = ""  # the trigger that began it


@dataclass(slots=True)
class Contingency:
    """The plan of a node and its state: `trigger` is the trigger that put it in force, `quiet_ns` the time
    since which no trigger is present.

    `lowest` gives the lowest caps of the devices.
    """

    lowest: Callable[[], dict[str, float]] = dict
    plan: Armed | None = None
    trigger: str = ""
    quiet_ns: int | None = None
    caps: dict[str, float] = field(default_factory=dict)

    def take(self, plan: Plan, caps: dict[str, float], at: Instant, epoch: int) -> str | None:
        """Arm a plan. Returns the reason for a refusal, or None. `caps` are those of this node, `epoch`
        the highest so far."""
        if plan.epoch < epoch:
            return f"epoch {plan.epoch} is older than {epoch}: another daemon leads"
        span = plan.expires_ns - plan.issued_ns
        if not 0 < span <= MAX_PLAN_NS:
            return f"a plan for {span / NS:g} s; expected up to {MAX_PLAN_NS // NS} s"
        if plan.expires_ns <= at.wall_ns:
            return "the plan has expired"
        held = self.plan
        if held is not None and (plan.epoch, plan.issued_ns) < (held.epoch, held.issued_ns):
            return "a newer plan is armed"
        if held is not None and (plan.epoch, plan.issued_ns) == (held.epoch, held.issued_ns):
            return None  # retained: it comes again with every connection
        until = Deadline.after(plan.expires_ns - at.wall_ns, span, at)
        self.plan = Armed(plan.epoch, plan.issued_ns, until, plan.triggers, plan.hold_s, dict(caps))
        return None

    def withdraw(self) -> None:
        """Withdraw the plan; caps in force stay until their trigger is gone."""
        self.plan = None

    def step(self, present: Mapping[str, str], at: Instant) -> Change | None:
        """Return the changes of a step. Takes the triggers that are present, each with its evidence."""
        if self.plan is not None and self.plan.until.over(at) and not self.trigger:
            self.plan = None
        if HEAT in present and self.trigger != HEAT:
            return self._start(HEAT, self.lowest(), present)
        if not self.trigger:
            return self._begin(present)
        own: tuple[str, ...] = (self.trigger,)
        hold_s = HEAT_HOLD_S if self.trigger == HEAT else 0.0
        if self.trigger != HEAT and self.plan is not None:
            own, hold_s = self.plan.triggers, self.plan.hold_s
        if any(t in own for t in present):
            self.quiet_ns = None
        elif self.quiet_ns is None:
            self.quiet_ns = at.boot_ns
        if self.quiet_ns is not None and at.boot_ns - self.quiet_ns >= hold_s * NS:
            text = f"contingency over: {self.trigger} gone for {hold_s:g} s"
            self.trigger, self.quiet_ns, self.caps = "", None, {}
            return self._begin(present) or Change({}, text)
        if self.trigger != HEAT and self.plan is not None and self.plan.caps != self.caps:
            self.caps = dict(self.plan.caps)
            return Change(self.caps, "contingency: caps of a new plan")
        return None

    def _begin(self, present: Mapping[str, str]) -> Change | None:
        if self.plan is None or not self.plan.caps:
            return None
        trigger = next((t for t in self.plan.triggers if t in present), None)
        return None if trigger is None else self._start(trigger, self.plan.caps, present)

    def _start(self, trigger: str, caps: Mapping[str, float], present: Mapping[str, str]) -> Change:
        self.trigger, self.quiet_ns, self.caps = trigger, None, dict(caps)
        text = f"contingency: {trigger} ({present[trigger]}), {len(caps)} caps in force"
        return Change(self.caps, text, trigger)

    @property
    def state(self) -> str:
        """Return the state for the agent's status."""
        if self.trigger:
            return f"active:{self.trigger}"
        return "armed" if self.plan is not None and self.plan.caps else "none"

    def dump(self) -> dict[str, Any]:
        """Return the state that a restart needs."""
        plan = self.plan
        armed = plan and [plan.epoch, plan.issued_ns, list(plan.until), plan.triggers, plan.hold_s, plan.caps]
        return {"plan": armed, "trigger": self.trigger, "quiet_ns": self.quiet_ns, "caps": self.caps}

    def restore(self, data: Mapping[str, Any], at: Instant, same_boot: bool) -> None:
        """Restore the state from `dump`. Raises KeyError, TypeError or ValueError if it is invalid."""
        if data["plan"] is not None:
            epoch, issued_ns, until, triggers, hold_s, caps = data["plan"]
            names = tuple(text(t) for t in triggers)
            ends = deadline(until, at, same_boot, MAX_PLAN_NS)
            self.plan = Armed(whole(epoch), whole(issued_ns), ends, names, seconds(hold_s), table(caps))
        if same_boot:  # a reboot gave the devices their defaults back; a trigger that lasts fires again
            quiet_ns = data["quiet_ns"]
            self.trigger, self.caps = text(data["trigger"]), table(data["caps"])
            self.quiet_ns = None if quiet_ns is None else whole(quiet_ns)
