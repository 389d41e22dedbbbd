"""Watch over a storm: the invariants of safety, held against the wire, the disk, the agents and the plant.

It asks nothing of the daemon but whether it may act; what it knows otherwise is what left, what is durable,
and what the devices are set to.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from racktwin_agent.devices import GPU_CAP

from tests.support.storm.broker import Weather
from tests.support.storm.disk import SimulatedDisk
from tests.support.storm.etcd import SimulatedEtcd
from tests.support.storm.field import HIGH_W, LOW_W, Field
from tests.support.storm.hosts import LIFE, Life
from twin.catalogue import NS, StorageError, TwinError, find_control
from twin.contracts import column
from twin.run import closed_segments
from twin.telemetry import GOOD

SAME_W = 1.0  # an agent does not write a smaller change
AWAKE_S = 1.0  # after agents stood still
LATE_S = 0.5  # of a lease's end at an agent
LEASE_S = 30.0  # of gpu.power_cap_w
CLOCKS_S = 1.0  # by which clocks of hosts may differ where nobody set them
EXCESS_S = 30.0  # longest time over a budget while a daemon leads undisturbed; source: estimate
REQUEST = "/Request/"


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class DurableJournal:
    """Commands that the durable part of a journal tells of, read on from where it was."""

    folder: Path
    disk: SimulatedDisk
    known: dict[tuple[int, int], tuple[str, float]] = field(default_factory=dict)
    epochs: set[int] = field(default_factory=set)
    twice: list[str] = field(default_factory=list)  # numbers of two commands
    _read: dict[int, int] = field(default_factory=dict)

    def look(self) -> None:
        """Read what has become durable since."""
        for path in (*closed_segments(self.folder), self.folder / "journal.jsonl"):
            if not path.exists():
                continue
            inode = path.stat().st_ino
            begin, end = self._read.get(inode, 0), self.disk.durable_bytes(path)
            if end <= begin:
                continue
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read(end - begin)
            whole = data.rfind(b"\n") + 1
            self._read[inode] = begin + whole
            for line in data[:whole].splitlines():
                if b'"kind":"command"' in line or b'"kind":"leader"' in line:
                    self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        body = line["body"]
        if line["kind"] == "leader":
            self.epochs |= {body["epoch"]} if "epoch" in body else set()
            return
        if line["kind"] != "command":
            return
        values = column(body["value"]).tolist()
        for k, value in enumerate(values):
            number = body["epoch"], body["first_command"] + k
            told = self.known.setdefault(number, (body["control"], value))
            if told != (body["control"], value):
                self.twice.append(f"command {number} is {told}, and later {body['control']} = {value:g}")


class Watch:
    """All invariants of one storm. `faults` are the violations; `notes` the last things that happened."""

    def __init__(self, field_: Field, journals: dict[str, DurableJournal], etcd: SimulatedEtcd) -> None:
        self.field, self.journals, self.etcd = field_, journals, etcd
        site = field_.site
        self.devices = {site.name("node", n): d for n, d in enumerate(field_.devices)}
        self.faults: list[str] = []
        self.notes: deque[str] = deque(maxlen=60)
        self.leads: dict[str, Any] = {}  # host -> the daemon that runs there
        self.requests = self.commands = self.looks = 0
        self.epoch_of: dict[int, Life] = {}
        self.calm_since_s = 0.0
        self._raised: dict[tuple[int, int, str], int] = defaultdict(int)
        self._given: dict[tuple[int, int, str], int] = defaultdict(int)
        self._over_s: dict[int, float] = {}
        self._last: dict[tuple[str, str], float] = {}  # what was commanded last
        self._loose_s: dict[str, float] = {}
        self._highest: dict[str, int] = defaultdict(int)  # node -> epoch that it obeyed
        field_.accepted = self.accepted

    def fault(self, text: str) -> None:
        """An invariant is violated."""
        self.faults.append(f"{self.field.loop.time():.3f} s: {text}")

    def note(self, text: str) -> None:
        """Note an event for the reader of a failure."""
        self.notes.append(f"{self.field.loop.time():.3f} s: {text}")

    # -- what leaves a daemon

    def leaves(self, life: Life, topic: str, payload: bytes) -> None:
        """A message leaves a daemon."""
        if REQUEST not in topic:
            return
        self.requests += 1
        body, host = json.loads(payload), life.host.name
        if life.is_dead:
            self.fault(f"{host} is dead and commands")
        self._one_leads(life, body)
        if host in self.leads and not life.is_dead:
            self._holds_its_lease(host)
        self._is_allowed(life, body)
        self._has_a_reason(host, body)
        self._in_time(life, body)
        self._inside(life, body)

    def _one_leads(self, life: Life, body: dict[str, Any]) -> None:
        epoch = body["epoch"]
        if self.epoch_of.setdefault(epoch, life) is not life:
            self.fault(f"epoch {epoch} is of two processes")
        if epoch < max(self.epoch_of):
            others = [h for h, d in self.leads.items() if h != life.host.name and self.acts(d)]
            if others:
                self.fault(f"{life.host.name} commands under epoch {epoch} while {others[0]} leads")

    def _holds_its_lease(self, host: str) -> None:
        """A daemon that may act has the key of the election, under a lease that runs in the cluster."""
        election = self.leads[host].leadership.election
        row = self.etcd.rows.get(election._office)
        left_s = self.etcd.left_s(row.lease) if row is not None and row.lease == election._lease else 0.0
        if left_s <= 0.0:
            self.fault(f"{host} acts, and its lease of the election has ended in the cluster")

    def _is_allowed(self, life: Life, body: dict[str, Any]) -> None:
        """It is of the present term, and people let the daemon act."""
        daemon = self.leads.get(life.host.name)
        if daemon is None:
            self.fault(f"{life.host.name} commands before it began")
            return
        term, state = daemon.leadership.term, daemon.engine.state
        if term is None or term.epoch != body["epoch"]:
            self.fault(f"{life.host.name} commands under epoch {body['epoch']}, its term is {term}")
        if daemon.engine.arbiter.mode == "released" and body["issued_ns"] == state.now_ns:
            self.fault(f"{life.host.name} commands, though it was released: {body}")

    @staticmethod
    def acts(daemon: Any) -> bool:
        """True if a daemon takes itself to be the leader, by the clock of its host."""
        token = LIFE.set(daemon.life)
        try:
            return bool(daemon.leadership.term is not None and daemon.leadership.may_act())
        finally:
            LIFE.reset(token)

    def _has_a_reason(self, host: str, body: dict[str, Any]) -> None:
        journal = self.journals[host]
        numbers = [(body["epoch"], number) for number in body["commands"]]
        if any(n not in journal.known for n in numbers):
            journal.look()
        if body["epoch"] not in journal.epochs:
            self.fault(f"{host} commands under epoch {body['epoch']}, which its journal does not tell of")
        for text in journal.twice:
            self.fault(f"{host}: {text}")
        for number, value in zip(numbers, body["values"], strict=True):
            self.commands += 1
            reason = journal.known.get(number)
            if reason is None:
                self.fault(f"command {number} of {host} left before it was durable in the journal: {body}")
            elif reason != (body["control"], value):
                self.fault(f"command {number} of {host} is {value:g}, the journal says {reason}")

    def _in_time(self, life: Life, body: dict[str, Any]) -> None:
        daemon = self.leads.get(life.host.name)
        now_ns = life.host.wall_ns() if daemon is None else daemon.clock.now_ns()
        late_s = (now_ns - body["expires_ns"]) / NS
        if late_s > CLOCKS_S and not body["final"]:
            self.fault(f"left {late_s:.2f} s after its lease had ended: {body}")
        span_s = (body["expires_ns"] - body["issued_ns"]) / NS
        if body["control"] == GPU_CAP and not 0 <= span_s <= LEASE_S:
            self.fault(f"a lease of {span_s:g} s: {body}")

    def _inside(self, life: Life, body: dict[str, Any]) -> None:
        site, control = self.field.site, body["control"]
        envelope = site.envelopes[control]
        table, path = control.partition(".")[0], body["path"]
        rises = gives = 0
        for name, value in zip(body["names"], body["values"], strict=True):
            full = f"{path}/{name}" if name else path
            at = site.entity(table, full)
            if at is None:
                self.fault(f"a command for {full}, which is no {table}")
                continue
            if not envelope.low[at] <= value <= envelope.high[at]:
                self.fault(f"{control} of {full} = {value:g}, outside its envelope")
            stands = max(self._last.get((control, full), HIGH_W), self._seen(life, control, at))
            if not body["renewal"] and body["policy"] not in ("", "arbiter"):
                rises += value > stands
            gives += body["policy"] == "arbiter" and body["reason"].startswith("no longer needed")
            self._last[control, full] = value
        if control == GPU_CAP:
            self._blast(body, rises, gives, envelope.blast_radius)

    def _seen(self, life: Life, control: str, at: int) -> float:
        """The value that the daemon reads back; a device that is not heard may stand at its highest."""
        daemon = self.leads.get(life.host.name)
        if daemon is None:
            return -np.inf
        view, spec = daemon.engine.view(0.0), find_control(control)
        assert spec is not None
        if view.quality(f"{spec.table}.{spec.readback}")[at] != GOOD:
            return np.inf
        return float(view.readback(control)[at])

    def _blast(self, body: dict[str, Any], rises: int, gives: int, most: int) -> None:
        key = (body["epoch"], body["issued_ns"], body["control"])
        for counts, new, what in ((self._raised, rises, "raised"), (self._given, gives, "given back")):
            counts[key] += new
            if counts[key] > most:
                self.fault(f"{counts[key]} limits {what} at once, {most} are allowed: {body}")

    def accepted(self, path: str, request: Any, answers: list[Any], at: Any) -> None:
        """Check the answer of a node to a request."""
        if all(a.state == "failed" for a in answers):
            return
        if request.epoch < self._highest[path]:
            self.fault(f"{path} obeys epoch {request.epoch} after {self._highest[path]}")
        self._highest[path] = max(self._highest[path], request.epoch)
        if at.wall_ns >= request.expires_ns:
            self.fault(f"{path} obeys a request {(at.wall_ns - request.expires_ns) / NS:.1f} s after its end")

    # -- what is so, looked at each second

    def look(self) -> None:
        """The state of all daemons, agents and devices."""
        self.looks += 1
        acting = [host for host, daemon in self.leads.items() if self.acts(daemon)]
        if len(acting) > 1:
            self.fault(f"{' and '.join(acting)} act at the same time")
        for host in acting:
            self._holds_its_lease(host)
        self._leases()
        self._devices()
        self._budgets(bool(acting))

    def _leases(self) -> None:
        if self._agents_are_away():
            return
        at = self.field.agent_instant()
        for path, key, lease in self.field.running():
            late_s = (at.boot_ns - lease.until.boot_ns) / NS
            if late_s > LATE_S and key not in self.devices[path].refused:
                self.fault(f"{path}/{key.name}: its lease ended {late_s:.2f} s ago and still runs")

    def _agents_are_away(self) -> bool:
        life = self.field.agent_life
        thawed_s = self.field.loop.time() - life.frozen_until_s
        return life.is_dead or thawed_s < AWAKE_S

    def _devices(self) -> None:
        """A limit that is not free is under a lease, was left by a lapse, or was given back."""
        site, now = self.field.site, self.field.loop.time()
        if self._agents_are_away():
            self._loose_s.clear()
            return
        safe = site.envelopes[GPU_CAP].safe
        leases = {(path, key): lease for path, key, lease in self.field.running()}
        for number, device in enumerate(self.field.devices):
            path = site.name("node", number)
            for key, value in device.values.items():
                if key.control != GPU_CAP:
                    continue
                name = f"{path}/{key.name}"
                if not LOW_W <= value <= HIGH_W:
                    self.fault(f"{name} is set to {value:g} W")
                at = site.entity("gpu", name)
                assert at is not None
                lease = leases.get((path, key))
                ceiling = self.field.nodes[path].settings.ceilings.get(key) if self.field.nodes else None
                if key in device.refused:
                    continue
                if lease is not None and ceiling is None and abs(value - lease.value) > SAME_W:
                    self._loose(name, f"is set to {value:g} W, its lease says {lease.value:g}", now)
                elif lease is None and ceiling is None and not self._left(path, key, value, safe[at]):
                    self._loose(name, f"is set to {value:g} W under no lease", now)
                else:
                    self._loose_s.pop(name, None)

    def _left(self, path: str, key: Any, value: float, safe: float) -> bool:
        lease = self.field.nodes[path].book.leases.get(key) if self.field.nodes else None
        if lease is None:
            return value == HIGH_W
        return any(w is not None and abs(value - w) <= SAME_W for w in (lease.lapse, lease.value, safe))

    def _loose(self, name: str, text: str, now: float) -> None:
        since = self._loose_s.setdefault(name, now)
        if now - since > 3.0:
            self.fault(f"{name} {text}, for {now - since:.0f} s")
            del self._loose_s[name]

    def _budgets(self, is_led: bool) -> None:
        truth, site, now = self.field.plant.truth, self.field.site, self.field.loop.time()
        if not is_led or self._is_troubled():
            self.calm_since_s = now
        for feeder in range(site.sizes["feeder"]):
            budget = float(site.budget_w[feeder])
            if float(truth.feeder_power_w[feeder]) <= budget * 1.001:
                self._over_s.pop(feeder, None)
                continue
            since = max(self._over_s.setdefault(feeder, now), self.calm_since_s)
            if now - since > EXCESS_S:
                over = truth.feeder_power_w[feeder] - budget
                self.fault(f"feeder {feeder}: {over:.0f} W over its budget for {now - since:.0f} s")

    def _is_troubled(self) -> bool:
        """Something keeps a daemon from hearing, deciding or acting, by no fault of its own."""
        broker = self.field.broker
        return (
            broker.is_down
            or bool(broker.cut)
            or broker.weather != Weather()
            or self._agents_are_away()
            or any(device.refuses for device in self.field.devices)
            or any(journal.disk.job_s > 0.01 for journal in self.journals.values())
            or any(daemon.engine.arbiter.mode != "normal" for daemon in self.leads.values())
            or any(daemon.life.host.step_ns for daemon in self.leads.values())
        )


class Complaints(logging.Handler):
    """Exceptions that a daemon logged and nobody planned."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.WARNING)
        self.watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        life = LIFE.get()
        if life is not None and life.is_dead:
            return
        text = record.getMessage()
        self.watch.note(f"{record.levelname.lower()}: {text[:200]}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, StorageError | OSError | TwinError):
            self.watch.fault(f"{record.name}: {text}: {error!r}")
