"""Arms in trouble on a power test site: readings and commands that come late or not at all.

Silence is no reading at all, and what is late has the time of its making. Our caps lapse to their safe value
as the agents of nodes do it, and those agents may be gone, as the daemon itself. Rivals' caps stay, and they
go by the last reading that came.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.evaluation.power.arms import CAP, LEASE_S, START_NS, Arm, Ours
from tests.evaluation.power.plant import Reading
from tests.evaluation.power.rivals import Proportional, Thresholds
from tests.evaluation.power.site import GPU_MAX_W, PowerSite
from tests.evaluation.power.troubles import ASKED_S, Troubles
from twin.catalogue import F64, I64, NS, Bool
from twin.telemetry import Block, Event, LoadTargetSet, TicksSkipped

WAYS_S = 4  # a reading that is out of order takes less than this. source: estimate


class Parcel(NamedTuple):
    """Readings of entities `start` and on, made in a second: values [signal, n]."""

    table: str
    start: int
    values: F64
    made_s: int


class Instruments:
    """Delays, losses and errors of readings on their way."""

    def __init__(self, troubles: Troubles) -> None:
        self.troubles = troubles
        self._stuck: dict[int, F64] = {}
        self._way: list[tuple[int, Parcel]] = []

    def heard(self, read: Reading, second: int) -> list[Parcel]:
        """Return the parcels that arrive now, in order of arrival."""
        read = self._shown(read, second)
        rng = np.random.default_rng([29, self.troubles.seed, second])
        mixed = bool(self.troubles.at(second, "disordered"))
        for table, values in _tables(read).items():
            late_s = np.zeros(values.shape[1], np.int64)
            for t in self.troubles.at(second, "late"):
                late_s[getattr(t, table)] = round(t.amount)
            for t in self.troubles.at(second, "racks_silent", "all_silent", "agents_gone", "hung_node"):
                late_s[getattr(t, table)] = -1
            for start, end in _runs(late_s):
                if late_s[start] < 0:
                    continue
                parcel = Parcel(table, start, values[:, start:end], second)
                for _ in range(2 if mixed else 1):
                    way_s = int(late_s[start]) + (int(rng.integers(WAYS_S)) if mixed else 0)
                    self._way.append((second + way_s, parcel))
        due = [p for at, p in self._way if at <= second]
        self._way = [(at, p) for at, p in self._way if at > second]
        return [due[i] for i in rng.permutation(len(due))] if mixed else due

    def _shown(self, read: Reading, second: int) -> Reading:
        """Return a reading with the errors of its faulty meters."""
        out = {"gpu": read.gpu_w, "rack": read.rack_w, "feeder": read.feeder_w}
        of_kind = {"gpu_sensors": "gpu", "rack_meter": "rack", "feeder_meter": "feeder"}
        for i, t in enumerate(self.troubles.listed):
            if t.kind not in of_kind or not t.begin_s <= second < t.end_s:
                continue
            table = of_kind[t.kind]
            of, now_w = getattr(t, table), out[table]
            shown_w = now_w * (1.0 + t.amount)
            if t.mode == "noisy":
                rng = np.random.default_rng([31, self.troubles.seed, i, second])
                shown_w = now_w * (1.0 + t.amount * rng.standard_normal(len(now_w)))
            elif t.mode in ("", "stuck"):
                shown_w = self._stuck.setdefault(i, now_w)
            out[table] = np.where(of, shown_w, now_w)
        return read._replace(gpu_w=out["gpu"], rack_w=out["rack"], feeder_w=out["feeder"])


def _tables(read: Reading) -> dict[str, F64]:
    """Signals of each table [signal, n], in the order of `_SIGNALS`."""
    return {
        "gpu": np.array([read.gpu_w, read.cap_w]),
        "rack": np.array([read.rack_w]),
        "feeder": np.array([read.feeder_w, read.dead, read.tripped], np.float64),
    }


def _runs(value: I64) -> list[tuple[int, int]]:
    """From where until where it stays the same."""
    edges = [0, *(np.flatnonzero(np.diff(value)) + 1).tolist(), len(value)]
    return list(itertools.pairwise(edges))


class Agents:
    """Caps as the agents of nodes hold them [n_gpu], by the rules of `racktwin_agent`: the last command
    holds until its lease ends, and then `lapse_w` (NaN: it stays)."""

    def __init__(self, lapse_w: F64) -> None:
        self.lapse_w = lapse_w
        self.cap_w = np.full(len(lapse_w), GPU_MAX_W)
        self.until_s = np.full(len(lapse_w), np.inf)
        self.lapsed = 0

    def take(self, index: I64, value_w: F64, until_s: float) -> None:
        """A command, or its renewal; `until_s` inf: the last one of a lease that is over."""
        self.cap_w[index], self.until_s[index] = value_w, until_s

    def lapse(self, second: int, alive: Bool) -> None:
        """Leases that are over, of agents that are there [n_gpu]."""
        over = alive & (self.until_s <= second)
        self.cap_w[over] = self.lapse_w[over]
        self.until_s[over] = np.inf
        self.lapsed += int(over.sum())


class _Floor:
    """Common part of both sorts of arms: the way of readings and commands, and nodes that do not obey."""

    def __init__(self, site: PowerSite, troubles: Troubles, lapse_w: F64) -> None:
        self.site, self.troubles = site, troubles
        self.instruments, self.agents = Instruments(troubles), Agents(lapse_w)
        self.sent_w = np.full(site.gpus, GPU_MAX_W)

    def mask(self, second: int, *kinds: str) -> Bool:
        """GPUs that troubles of these kinds befall now [n_gpu]."""
        out = np.zeros(self.site.gpus, np.bool_)
        for t in self.troubles.at(second, *kinds):
            out |= t.gpu
        return out

    def heard(self, read: Reading, second: int) -> list[Parcel]:
        """Parcels that arrive; a node that does not obey tells the cap that it was given."""
        deaf = self.mask(second, "deaf_node")
        return self.instruments.heard(
            read._replace(cap_w=np.where(deaf, self.agents.cap_w, read.cap_w)), second
        )

    def changed(self, second: int) -> F64 | None:
        """Caps for the plant [n_gpu]; None where they are as before."""
        now_w = np.where(self.mask(second, "deaf_node"), GPU_MAX_W, self.agents.cap_w)
        if (now_w == self.sent_w).all():
            return None
        self.sent_w = now_w
        return now_w.copy()


class TroubledOurs(Ours):
    """Our arm where readings and commands may be lost, and the daemon itself."""

    def __init__(self, site: PowerSite, troubles: Troubles) -> None:
        super().__init__(site)
        self.floor = _Floor(site, troubles, site.site.envelopes[CAP].safe.astype(np.float64))
        self.missed: list[Event] = []
        self.away_s, self.asked = 0, set[int]()

    def decide(self, read: Reading, second: int, dt_s: int, events: Sequence[Event]) -> F64 | None:
        """One tick, or none while the daemon is gone. Raises RuntimeError as `Ours` does."""
        floor, agents = self.floor, self.floor.agents
        now_ns, lease = START_NS + (second + 1) * NS, self.engine.arbiter.leases[CAP]
        parcels = floor.heard(read, second)
        alive = ~floor.mask(second, "agents_gone", "hung_node")
        reached = alive & ~floor.mask(second, "commands_lost")
        self.missed += [*events, *self._asked(second)]
        if floor.troubles.at(second, "daemon_gone"):
            agents.lapse(second, alive)
            self.away_s += dt_s
            return floor.changed(second)
        if self.away_s:
            self.missed.append(TicksSkipped(count=self.away_s, why="restart"))
        elif dt_s > 1:  # renewed in between as a daemon that ticks each second would
            running = lease.running()
            lease.expires_ns[running] = now_ns + round(LEASE_S * NS)
            agents.until_s[running & reached & np.isfinite(agents.until_s)] = second + LEASE_S
        agents.lapse(second, alive)
        for parcel in parcels:
            self.inbox.put_block(_block(parcel), now_ns)
        for event in self.missed:
            self.inbox.put_event(event)
        frame = self.inbox.take(self.ticks, now_ns, float(dt_s + self.away_s))
        self.ticks, self.away_s, self.missed = self.ticks + 1, 0, []
        decision = self.engine.tick(frame)
        if self.engine.suspended:
            told = [f.evidence for f in decision.findings if f.id.startswith("suspended/")]
            raise RuntimeError(f"a policy broke its contract in second {second}: {told}")
        for batch in decision.commands:
            if batch.control == CAP:
                there = reached[batch.index]
                until_s = np.inf if batch.final else (batch.expires_ns - START_NS) / NS - 1.0
                agents.take(batch.index[there].astype(np.int64), batch.value[there], until_s)
        return floor.changed(second)

    def _asked(self, second: int) -> list[Event]:
        """That a PDU may carry less, told once."""
        out: list[Event] = []
        for i, t in enumerate(self.floor.troubles.listed):
            if t.kind != "derated" or i in self.asked or second < t.begin_s - ASKED_S:
                continue
            self.asked.add(i)
            at = int(np.flatnonzero(t.feeder)[0])
            out.append(LoadTargetSet(
                author="facility", target=f"derated-{i}", kind="operator",
                limit_w=float((1.0 - t.amount) * self.floor.site.budget_w[at]),
                feeders=(self.floor.site.site.name("feeder", at),), end_ns=START_NS + (t.end_s + 1) * NS,
            ))  # fmt: skip
        return out


_SIGNALS = {
    "gpu": ("power_w", "power_limit_w"),
    "rack": ("power_w",),
    "feeder": ("power_w", "energised_state", "breaker_state"),
}


def _block(parcel: Parcel) -> Block:
    n = parcel.values.shape[1]
    values, made_ns = parcel.values.astype(np.float32), START_NS + (parcel.made_s + 1) * NS
    return Block(
        parcel.table, parcel.start, _SIGNALS[parcel.table], values, (), np.empty((0, n), np.int64), made_ns
    )


class TroubledRival:
    """Another arm in the same trouble: it goes by the last reading that came."""

    def __init__(self, arm: Arm, site: PowerSite, troubles: Troubles) -> None:
        self.arm, self.name, self.still = arm, arm.name, arm.still
        self.floor, self.known = _Floor(site, troubles, np.full(site.gpus, np.nan)), dict[str, F64]()
        self.wanted_w = np.full(site.gpus, GPU_MAX_W)

    def decide(self, read: Reading, second: int, dt_s: int, events: Sequence[Event]) -> F64 | None:
        """Its caps, as far as they arrive."""
        floor = self.floor
        if not self.known:
            self.known = _tables(read)
        for parcel in floor.heard(read, second):
            end = parcel.start + parcel.values.shape[1]
            self.known[parcel.table][:, parcel.start : end] = parcel.values
        if isinstance(self.arm, Proportional | Thresholds):
            limit_w = floor.troubles.limit_w(floor.site, second + ASKED_S)
            self.arm.site = floor.site._replace(budget_w=limit_w)
        if not floor.troubles.at(second, "daemon_gone"):
            gpu, rack, feeder = (self.known[table].copy() for table in ("gpu", "rack", "feeder"))
            seen = Reading(gpu[0], gpu[1], rack[0], feeder[0], feeder[1] > 0, feeder[2] > 0)
            cap_w = self.arm.decide(seen, second, dt_s, events)
            self.wanted_w = self.wanted_w if cap_w is None else cap_w
        reached = np.flatnonzero(~floor.mask(second, "agents_gone", "hung_node", "commands_lost"))
        floor.agents.take(reached, self.wanted_w[reached], np.inf)
        return floor.changed(second)


def troubled(arm: Arm, site: PowerSite, troubles: Troubles) -> Arm:
    """The same arm, fresh, in this trouble."""
    return TroubledOurs(site, troubles) if isinstance(arm, Ours) else TroubledRival(arm, site, troubles)
