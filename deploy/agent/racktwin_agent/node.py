"""One node: its leases, its contingency and its devices together. Messages and samples in, messages out.

The same for a real agent and for each node of a simulated fleet. No thread, no socket: `agent.py` and
`fleet.py` drive it. Imports the agent's deciding parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from racktwin_agent.clock import NS, Instant, current_instant
from racktwin_agent.contingency import HEAT, Change, Contingency
from racktwin_agent.devices import GPU_CAP, GPU_LOCK, POWER, Devices, Key, Sample, readbacks, settings
from racktwin_agent.leases import RUNNING, Answer, LeaseBook
from racktwin_agent.overheating import OFF_LEAD_S, STOP_LEAD_S
from racktwin_agent.power import LEVELS, NODE_POWER, OFF, ON, STOP, Power
from racktwin_agent.publish import Out, fault_of, frame_of, result_of, sample_of, status_of
from racktwin_agent.settings import Settings
from racktwin_agent.store import Store
from racktwin_agent.triggers import Watch
from racktwin_agent.wire import Plan, Refused, Request, read_plan, read_request

STATUS_EVERY_S = 60.0
SAY_AGAIN_S, MAX_TEXTS = 60, 200
LOCK_LEAD_S = 900.0  # nothing more is lowered for what is further away; source: as the policy thermal_guard
FORMAT = 1
# Beyond every XID and SXID: what the agent itself did. `detail` says it in words.
CODE_OF_TRIGGER = {"psu_lost": 1_000_001, "power_brake": 1_000_002, "broker_gone": 1_000_003, HEAT: 1_000_004}
ENDED = 1_000_005  # it stopped its node, or switched it off, by itself


def _silent(text: str) -> None:
    """Drop the sentence: nobody listens."""


class Node:
    """One node at `path` (`site/hall/rack/node`). `say` is called with a sentence for the log."""

    def __init__(
        self,
        path: str,
        devices: Devices,
        store: Store,
        watch: Watch,
        boot: str,
        integration: str = "racktwin",
        say: Callable[[str], None] = _silent,
        clock: Callable[[], Instant] = current_instant,
        power: Power | None = None,
    ) -> None:
        self.path, self.integration, self.boot, self.say, self.clock = path, integration, boot, say, clock
        self.rack, _, self.name = path.rpartition("/")
        self.devices, self.store, self.watch = devices, store, watch
        self.controls = {key.control for key in settings(devices)} | {POWER}
        self.power = power or Power()
        self.settings = Settings(devices, self.power)
        self.book = LeaseBook(self.settings, self._save)
        self.contingency = Contingency(self._lowest)
        self._logged_ns: dict[str, int] = {}
        self._status_ns = 0

    def topics(self) -> list[str]:
        """Return the topics that this node subscribes to."""
        return [
            *(f"IT/v1/{self.integration}/Request/{c}/{self.rack}" for c in sorted(self.controls)),
            f"IT/v1/{self.integration}/Contingency/{self.rack}",
        ]

    def resume(self, at: Instant) -> None:
        """Take over what an earlier run stored. Raises ValueError if it cannot be understood."""
        state = self.store.load()
        if state is None:
            return
        try:
            if state["format"] != FORMAT or state["path"] != self.path:
                raise ValueError(f"is of {state['path']}, format {state['format']}")
            same_boot = state["boot"] == self.boot != "unknown"
            self.book.restore(state["book"], at, same_boot)
            self.contingency.restore(state["contingency"], at, same_boot)
            if self.contingency.quiet_ns is None:
                self.watch.resume(self.contingency.trigger, at)
            if same_boot:
                self.settings.restore(state["settings"])
                for key in self.settings.ceilings:
                    lease = self.book.leases.get(key)
                    if lease is not None and lease.phase == RUNNING:
                        self.settings.held[key] = lease.value
                ordered = self.book.leases.get(NODE_POWER)
                if ordered is not None and ordered.value in self.power.commands:
                    self.power.level = round(ordered.value)  # its system is stopping since
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the stored state cannot be understood: {error!r}") from error
        locks = {key: low for key, low in self.settings.ceilings.items() if key.control == GPU_LOCK}
        ceilings = self._ceilings(self.contingency.caps) | locks
        failed = self.settings.lower(ceilings) if self.contingency.caps else []
        for text in failed + self.book.reassert(at):
            self.say(text)
        self.say(f"resumed {self.book.running()} leases, epoch {self.book.epoch}, {self.contingency.state}")

    def _save(self, durable: bool) -> None:
        state: dict[str, Any] = {
            "format": FORMAT,
            "path": self.path,
            "boot": self.boot,
            "book": self.book.dump(),
            "contingency": self.contingency.dump(),
            "settings": self.settings.dump(),
        }
        self.store.save(state, durable)

    def _try_save(self, durable: bool) -> None:
        try:
            self._save(durable)
        except OSError as error:
            self.say_once(f"state cannot be stored: {error.strerror or error}")

    def take(self, topic: str, payload: bytes, at: Instant) -> list[Out]:
        """A message from one of our topics: what to publish for it. Raises Refused for what is none of
        ours."""
        parts = topic.split("/", 4)
        if len(parts) != 5 or parts[:3] != ["IT", "v1", self.integration]:
            raise Refused(f"{topic[:100]!r} is no topic of ours")
        if parts[3] == "Contingency":
            rack = topic.split("/", 4)[4]
            if rack != self.rack:
                raise Refused("speaks to another rack")
            return self.arm(read_plan(rack, payload) if payload else None, at)
        control, _, rack = parts[4].partition("/")
        if parts[3] != "Request" or rack != self.rack:
            raise Refused("speaks to another rack")
        return self.obey(read_request(control, rack, payload), at)

    def obey(self, request: Request, at: Instant) -> list[Out]:
        """Carry out what a request wants of this node: the answers, and the settings as they now are."""
        orders = request.orders.get(self.name)
        if not orders:
            # Orders for others all the same show which daemon leads.
            is_new = request.epoch > self.book.epoch
            if self.book.age_ns(request, at) < request.span_ns and is_new:
                self.book.epoch = request.epoch
                self._try_save(True)
            return []
        answers = self.book.take(request, orders, at)
        out = [result_of(self.path, self.integration, request.control, request.epoch, at.wall_ns, answers)]
        refused = [a for a in answers if a.state == "failed"]
        if refused:
            self.say_once(
                f"{request.control}: {len(refused)} refused, first {refused[0].name}: {refused[0].detail}"
            )
        return [*self._echo({request.control}), *out]

    def arm(self, plan: Plan | None, at: Instant) -> list[Out]:
        """Keep a contingency plan, or drop the one there is."""
        if plan is None:
            self.contingency.withdraw()
            self._try_save(True)
            return [self.status("online", at)]
        caps = plan.caps.get(self.name, {})
        why = self._refuse_caps(caps) or self.contingency.take(plan, caps, at, self.book.epoch)
        if why is not None:
            self.say_once(f"contingency plan refused: {why}")
            return []
        # Where nothing is commanded, a plan is how a node learns of a new leader.
        self.book.epoch = max(self.book.epoch, plan.epoch)
        self._try_save(True)
        return [self.status("online", at)]

    def _refuse_caps(self, caps: dict[str, float]) -> str | None:
        for name, cap in caps.items():
            limits = self.devices.limits(Key(GPU_CAP, name))
            if limits is None:
                return f"no {name or 'cap of the whole node'} here"
            if not limits[0] <= cap <= limits[1]:
                return (
                    f"{cap:g} W for {name} is outside {limits[0]:g}..{limits[1]:g}, the limits of the device"
                )
        return None

    def step(self, at: Instant) -> list[Out]:
        """Once a second and whenever a lease ends: lapses, triggers, and the state when it is due."""
        out: list[Out] = []
        before = self.book.counts["lapsed"]
        for text in self.book.lapse(at):
            self.say_once(text)
        out += self._failed_order(at)
        change = self.contingency.step(self.watch.present(at), at)
        if change is not None:
            out += self._change(change, at)
        out += self._rescue(at)
        waiting = len(self.settings.held)
        for text in self.settings.enforce():
            self.say_once(f"contingency cap not in force, or not given back: {text}")
        if self.book.counts["lapsed"] != before or change is not None or len(self.settings.held) != waiting:
            self._try_save(change is not None)
            out += self._echo(self.controls)
        if at.boot_ns - self._status_ns >= STATUS_EVERY_S * NS:
            out.append(self.status("online", at))
        return out

    def _failed_order(self, at: Instant) -> list[Out]:
        """Report that the program of an order on the power failed."""
        why, lease = self.power.failure(), self.book.leases.get(NODE_POWER)
        if not why:
            return []
        self.say(f"{POWER}: {why}")
        out = self._echo({POWER})
        if lease is not None:
            answer = Answer("", lease.generation, lease.command, "failed", why)
            out.append(result_of(self.path, self.integration, POWER, lease.epoch, at.wall_ns, [answer]))
        return out

    def _change(self, change: Change, at: Instant) -> list[Out]:
        if change.caps:
            ceilings = self._ceilings(change.caps)
            self.settings.remember(ceilings)
            self._try_save(True)  # killed half-way, the agent still knows what to give back
            failed = self.settings.lower(ceilings)
        else:
            failed = self.settings.release()
        if change.began == HEAT and self.watch.heat is not None:
            self.watch.heat.restart()
        self.say(change.text)
        for text in failed:
            self.say(f"{change.text}: {text}")
        out = [self.status("online", at)]
        if change.began:
            out.append(self._fault(CODE_OF_TRIGGER[change.began], change.began, change.text, at))
        return out

    def _fault(self, code: int, what: str, text: str, at: Instant) -> Out:
        event_id = f"{self.path}/{self.boot}/{what}/{at.boot_ns}"
        return fault_of(self.path, event_id, "node", "", code, text, at.wall_ns)

    def _rescue(self, at: Instant) -> list[Out]:
        """Lock the clocks of GPUs that even the lowest caps leave seconds; end this node, as far as that is
        enabled, if that does not do either or there is no time for it."""
        heat = self.watch.heat
        if heat is None or self.contingency.trigger != HEAT:
            return []
        left_s = heat.left_s()
        locks = self._locks()
        if left_s <= LOCK_LEAD_S and locks.keys() - self.settings.ceilings.keys():
            out = self._lock(locks, left_s)
            if left_s > OFF_LEAD_S:
                heat.restart()
                return out
        wanted = OFF if left_s <= OFF_LEAD_S else STOP if left_s <= STOP_LEAD_S else ON
        level = max((x for x in self.power.commands if x <= wanted), default=ON)
        if level <= self.power.level:
            return []
        self.power.set(NODE_POWER, level)
        text = f"{LEVELS[level]}: even at their lowest caps GPUs shut themselves down in {left_s:.0f} s"
        self.say(text)
        return [self._fault(ENDED, LEVELS[level], text, at), *self._echo({POWER})]

    def _locks(self) -> dict[Key, float]:
        """The lowest clock of each GPU that can be locked."""
        keys = [Key(GPU_LOCK, f"gpu{i}") for i in range(self.devices.gpus)]
        return {key: found[0] for key in keys if (found := self.devices.limits(key)) is not None}

    def _lock(self, locks: dict[Key, float], left_s: float) -> list[Out]:
        ceilings = self.settings.ceilings | locks
        self.settings.remember(ceilings)
        self._try_save(True)
        failed = self.settings.lower(ceilings)
        self.say(
            f"{len(locks)} clocks locked: at their lowest caps GPUs shut themselves down in {left_s:.0f} s"
        )
        for text in failed:
            self.say(f"clock not locked: {text}")
        return self._echo({GPU_LOCK})

    def _lowest(self) -> dict[str, float]:
        limits = {f"gpu{i}": self.devices.limits(Key(GPU_CAP, f"gpu{i}")) for i in range(self.devices.gpus)}
        return {name: found[0] for name, found in limits.items() if found is not None}

    def _ceilings(self, caps: dict[str, float]) -> dict[Key, float]:
        return {Key(GPU_CAP, name): cap for name, cap in caps.items()}

    def report(self, sample: Sample, at: Instant) -> Out:
        """A sample as a frame; its clock events and temperatures may be a trigger."""
        self.watch.clocks(sample.clock_bits(), at)
        if self.watch.heat is not None:
            self.watch.heat.take(sample, at)
        return sample_of(self.path, replace(sample, node={**sample.node, **self.power.columns()}))

    def status(self, state: str, at: Instant) -> Out:
        """The retained state."""
        self._status_ns = at.boot_ns
        return status_of(self.path, state, at.wall_ns, self.book.epoch, self.contingency.state)

    def next_ns(self) -> int | None:
        """Return the latest instant at which to call `step`, in ns since boot; None if no lease runs."""
        return self.book.next_end_ns()

    def _echo(self, controls: set[str]) -> list[Out]:
        """The settings as they are now; dated now, so that no older sample outdoes it."""
        gpu, node = readbacks(self.devices, controls & self.controls)
        if POWER in controls:
            node |= self.power.columns()
        return [frame_of(self.path, self.clock().wall_ns, gpu, node)] if gpu or node else []

    def say_once(self, text: str) -> None:
        """A sentence that may come each second: at most once a minute."""
        now_ns = self.clock().boot_ns
        if now_ns - self._logged_ns.get(text, -SAY_AGAIN_S * NS) >= SAY_AGAIN_S * NS:
            if len(self._logged_ns) >= MAX_TEXTS:
                self._logged_ns.clear()
            self._logged_ns[text] = now_ns
            self.say(text)
