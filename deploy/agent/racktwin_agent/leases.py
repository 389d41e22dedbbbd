"""The leases of one node: which request is carried out, and what happens when a lease ends.

The agent's core. Pure but for the settings that it is given: time is passed in. A command that is not renewed
lapses here, whoever is reachable. Imports the agent's clock, devices, settings, stored and wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from racktwin_agent.clock import NS, Deadline, Instant, SenderClock
from racktwin_agent.devices import DeviceError, Key
from racktwin_agent.power import NODE_POWER, ON
from racktwin_agent.settings import Settings
from racktwin_agent.stored import deadline, number, text, whole
from racktwin_agent.wire import Order, Request

MAX_SPAN_NS = 3600 * NS
RUNNING, ENDED = "running", "ended"


@dataclass(slots=True)
class Lease:
    """The last command of one setting. `ended` ones are kept, so that late repeats are known for what they
    are."""

    epoch: int
    command: int
    generation: int
    issued_ns: int
    value: float
    lapse: float | None
    policy: str
    until: Deadline
    phase: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of one order. `state` is accepted, done or failed, as racktwin knows them."""

    name: str
    generation: int
    command: int
    state: str
    detail: str = ""


def _keep_nothing(durable: bool) -> None:
    """For a book that need not outlive its process."""


class LeaseBook:
    """All leases of a node. `save` must have stored them when it returns; it is called before a device is
    set.

    `save(True)` asks for durability against a loss of power; it raises OSError.
    """

    def __init__(self, settings: Settings, save: Callable[[bool], None] = _keep_nothing) -> None:
        self.settings, self.save = settings, save
        self.epoch = 0
        self.leases: dict[Key, Lease] = {}
        self.sender = SenderClock()
        self.counts = dict.fromkeys(("applied", "renewed", "repeated", "refused", "lapsed"), 0)

    def take(self, request: Request, orders: list[Order], at: Instant) -> list[Answer]:
        """Carry out the orders of a request that are for this node; one answer each."""
        age_ns = self.age_ns(request, at)
        why = self._refuse(request, age_ns)
        if why is not None:
            self.counts["refused"] += len(orders)
            return [Answer(o.name, o.generation, o.command, "failed", why) for o in orders]
        newer_epoch = request.epoch > self.epoch
        self.epoch = max(self.epoch, request.epoch)
        until = Deadline.after(request.span_ns - age_ns, request.span_ns, at)
        answers: list[Answer] = []
        todo: list[tuple[Key, Order]] = []
        before: dict[Key, Lease | None] = {}
        fresh = newer_epoch
        for order in orders:
            key = Key(request.control, order.name)
            held = self.leases.get(key)
            if key == NODE_POWER and held is not None and _is_ordered(request, order, held):
                self.counts["repeated"] += 1
                answers.append(self._ordered(order))
            elif (refusal := self._refuse_order(request, order, held, age_ns)) is not None:
                self.counts["refused"] += 1
                answers.append(Answer(order.name, order.generation, order.command, "failed", refusal))
            elif held is not None and _is_repeat(request, order, held):
                self.counts["repeated"] += 1
                answers.append(self._repeat(order, key, held))
            else:
                same = held is not None and (held.epoch, held.command) == (request.epoch, order.command)
                fresh |= not same
                self.counts["renewed" if same else "applied"] += 1
                before[key] = held
                self.leases[key] = Lease(request.epoch, order.command, order.generation, request.issued_ns,
                                         order.value, order.lapse, request.policy, until,
                                         ENDED if request.final else RUNNING)  # fmt: skip
                todo.append((key, order))
        return answers + self._store_and_apply(todo, before, fresh)

    def _store_and_apply(
        self, todo: list[tuple[Key, Order]], before: Mapping[Key, Lease | None], fresh: bool
    ) -> list[Answer]:
        """Store first: what is not stored would not lapse after a restart, so it is not set either."""
        if todo or fresh:
            try:
                self.save(fresh)
            except OSError as error:
                if fresh:
                    for key, held in before.items():
                        if held is None:
                            del self.leases[key]
                        else:
                            self.leases[key] = held
                    why = f"the lease cannot be stored: {error.strerror or error}"
                    self.counts["refused"] += len(todo)
                    return [Answer(o.name, o.generation, o.command, "failed", why) for _, o in todo]
        return [self._apply(key, order) for key, order in todo]

    def _apply(self, key: Key, order: Order) -> Answer:
        try:
            if self.settings.put(key, order.value):
                begins = key == NODE_POWER and order.value > ON
                state = "accepted" if begins else "done"
                return Answer(order.name, order.generation, order.command, state)
        except DeviceError as error:
            return Answer(order.name, order.generation, order.command, "failed", str(error)[:300])
        ceiling = self.settings.ceilings[key]
        detail = f"held at {ceiling:g} by a contingency cap until its trigger is gone"
        return Answer(order.name, order.generation, order.command, "accepted", detail)

    def age_ns(self, request: Request, at: Instant) -> int:
        """Return how long a request was on its way; nothing is learned of a daemon that no longer leads."""
        return 0 if request.epoch < self.epoch else self.sender.age_ns(request.epoch, request.issued_ns, at)

    def _refuse(self, request: Request, age_ns: int) -> str | None:
        if request.epoch < self.epoch:
            return f"epoch {request.epoch} is older than {self.epoch}: another daemon leads"
        if request.span_ns <= 0 or request.span_ns > MAX_SPAN_NS:
            return f"a lease of {request.span_ns / NS:g} s; expected up to {MAX_SPAN_NS // NS} s"
        late_ns = age_ns - request.span_ns
        if late_ns >= 0:
            return f"expired {late_ns / NS:.1f} s ago by this node's clock"
        return None

    def _refuse_order(self, request: Request, order: Order, held: Lease | None, age_ns: int) -> str | None:
        key = Key(request.control, order.name)
        limits = self.settings.of(key).limits(key)
        if limits is None:
            return f"no {request.control} of {order.name or 'this node'} here"
        low, high = limits
        if not low <= order.value <= high:
            return f"{order.value:g} is outside {low:g}..{high:g}, the limits of the device"
        if order.lapse is not None and not request.final and not low <= order.lapse <= high:
            return f"its lapse to {order.lapse:g} is outside {low:g}..{high:g}, the limits of the device"
        if key == NODE_POWER and order.lapse is not None:
            return "the power of a node stays as it is when a lease ends; expected no lapse"
        if key == NODE_POWER and 0 < request.deadline_ns <= request.issued_ns + age_ns:
            return "its deadline is over: nothing is begun any more"
        if key == NODE_POWER and (why := self.settings.power.refuse(order.value)):
            return why
        # A lower number that was issued later is no straggler: the daemon lost its count with its disk.
        if (
            held is not None
            and request.epoch == held.epoch
            and order.command < held.command
            and request.issued_ns <= held.issued_ns
        ):
            return f"superseded by command {held.command}"
        return None

    def _repeat(self, order: Order, key: Key, held: Lease) -> Answer:
        if held.phase == RUNNING and order.value != held.value:
            return Answer(order.name, order.generation, order.command, "failed", "superseded by a renewal")
        wanted = self.settings.held.get(key, self.settings.of(key).get(key))
        state = "done" if wanted is not None and abs(wanted - order.value) <= 1.0 else "accepted"
        return Answer(order.name, order.generation, order.command, state, "already known")

    def _ordered(self, order: Order) -> Answer:
        """The answer to an order on the power that was carried out, in this boot or before it."""
        why = self.settings.power.why
        state, detail = (
            ("failed", why) if why else ("done", "already known: only a new command does it again")
        )
        return Answer(order.name, order.generation, order.command, state, detail)

    def lapse(self, at: Instant) -> list[str]:
        """End the leases that ran out; a sentence each. What a device refuses is tried again next time."""
        said = []
        for key, lease in self.leases.items():
            if lease.phase != RUNNING or not lease.until.over(at):
                continue
            what = f"{key.control} of {key.name or 'the node'}"
            try:
                if lease.lapse is not None:
                    self.settings.put(key, lease.lapse)
            except DeviceError as error:
                said.append(f"{what}: its lease ended and the lapse failed: {error}")
                continue
            lease.phase = ENDED
            self.counts["lapsed"] += 1
            end = "kept as it is" if lease.lapse is None else f"set to {lease.lapse:g}"
            said.append(f"{what}: the lease of command {lease.epoch}-{lease.command} ended, {end}")
        return said

    def reassert(self, at: Instant) -> list[str]:
        """After a restart: what runs is set again, as a driver that was loaded anew forgets; what failed.

        The power is not: who switched the node on again is not overruled.
        """
        failed = []
        for key, lease in self.leases.items():
            if key != NODE_POWER and lease.phase == RUNNING and not lease.until.over(at):
                try:
                    self.settings.put(key, lease.value)
                except DeviceError as error:
                    failed.append(str(error))
        return failed

    def next_end_ns(self) -> int | None:
        """Return when the next lease ends, in ns since boot; None if no lease runs."""
        return min((x.until.boot_ns for x in self.leases.values() if x.phase == RUNNING), default=None)

    def running(self) -> int:
        """Return the number of running leases."""
        return sum(x.phase == RUNNING for x in self.leases.values())

    def dump(self) -> dict[str, Any]:
        """Everything that a restart must know."""
        return {"epoch": self.epoch, "leases": [[*k, asdict(v)] for k, v in self.leases.items()]}

    def restore(self, data: Mapping[str, Any], at: Instant, same_boot: bool) -> None:
        """Take over what `dump` gave. Raises KeyError, TypeError or ValueError if it is none."""
        leases: dict[Key, Lease] = {}
        for control, name, fields in data["leases"]:
            until = deadline(fields["until"], at, same_boot, MAX_SPAN_NS)
            lapse = fields["lapse"]
            lease = Lease(
                whole(fields["epoch"]), whole(fields["command"]), whole(fields["generation"]),
                whole(fields["issued_ns"]), number(fields["value"]),
                None if lapse is None else number(lapse),
                text(fields["policy"]), until, text(fields["phase"]),
            )  # fmt: skip
            if lease.phase not in (RUNNING, ENDED):
                raise ValueError(f"phase {lease.phase!r}")
            leases[Key(text(control), text(name))] = lease
        self.epoch, self.leases = whole(data["epoch"]), leases


def _is_ordered(request: Request, order: Order, held: Lease) -> bool:
    """The same order on the power of the node again, also as the next leader renews it."""
    same = (order.command, order.value) == (held.command, held.value)
    return same and (request.epoch == held.epoch or request.renewal)


def _is_repeat(request: Request, order: Order, held: Lease) -> bool:
    """The same command again, or a renewal that came late: nothing that was not known."""
    same = (request.epoch, order.command) == (held.epoch, held.command)
    return same and request.issued_ns <= held.issued_ns
