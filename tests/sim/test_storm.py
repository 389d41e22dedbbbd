"""A seeded storm over a small site: devices fail, lie, fall silent and are replaced, racks come and go, and
people ask for things, work at racks and take over. Checkers look at every command that leaves, not at what
the engine says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.golden_story import engine_for, spec
from tests.support.sampled_cases import sampled
from twin.catalogue import NS, TABLES, find_control
from twin.contracts import CommandBatch, Decision
from twin.engine import Engine
from twin.run import Arrival, TraceReader, replay_arrivals, replay_frames, verify_journal
from twin.site import Site, build_site
from twin.telemetry import Block, Frame, Reading, events as ev

START_NS = 1_700_000_000 * NS
CAP = "gpu.power_cap_w"
SITES = (["r1"], ["r0", "r1"], ["r1", "r2"], ["r0", "r1", "r2"])
SITE_CHANGES_S = 100  # whatever is drawn, the site changes in this second
WILD = (np.nan, -1e30, 1e30, 0.0, -5.0, 3e38, 1e-30, 300.0)


class Storm:
    """The source of a run: what devices and people send, much of it wrong, drawn from one generator."""

    def __init__(self, seed: int, seconds: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.spec = spec(SITES[0], models={}, controls={CAP: {"blast_radius": 6}})
        self.site: Site = build_site(self.spec)
        self.seconds = seconds
        self.acks: list[ev.Event] = []
        self.count, self.epoch = 0, 5

    def __iter__(self) -> Iterator[Arrival]:
        for second in range(self.seconds):
            t_ns = START_NS + second * NS
            items: list[Any] = list(self._events(t_ns))
            for ack in self.acks:
                if self.rng.random() < 0.8:  # some are lost, some come twice
                    items += [ack] * int(self.rng.integers(1, 3))
            self.acks = []
            yield Arrival(t_ns + int(self.rng.integers(0, NS)), items + self._readings(t_ns))

    def _readings(self, t_ns: int) -> list[Any]:
        rng, n = self.rng, self.site.sizes["gpu"]
        out: list[Any] = []
        hot = rng.random() < 0.3
        for first in range(0, n, 8):
            if rng.random() < 0.15:
                continue  # a rack drops out
            rows = np.stack([rng.uniform(200, 1100, 8), rng.uniform(40, 95 if hot else 70, 8)]).astype(
                np.float32
            )
            wild = rng.random(rows.shape) < 0.02
            rows[wild] = rng.choice(WILD, int(wild.sum())).astype(np.float32)
            counts = rng.integers(-1, 2**40, (1, 8))
            late_ns = int(rng.choice([0, 0, 0, 5 * NS, -9 * NS, 3600 * NS]))
            names = ("power_w", "temp_c")
            out.append(Block("gpu", first, names, rows, ("energy_mj",), counts, t_ns - late_ns))
        for rack in range(self.site.sizes["rack"]):
            for signal, mean in (("power_w", 9e3), ("flow_lpm", 60.0), ("supply_temp_c", 34.0)):
                value = float(rng.choice(WILD)) if rng.random() < 0.02 else mean * rng.uniform(0.7, 1.2)
                out.append(Reading("rack", rack, signal, value, t_ns, bool(rng.random() > 0.03)))
        out.append(Reading("rack", int(rng.integers(-2, 9)), "leak_state", float(rng.random() < 0.01), t_ns))
        return out

    def _name(self, table: str) -> str:
        n = self.site.sizes[table]
        if n == 0 or self.rng.random() < 0.1:
            return "golden/nowhere/x"
        return self.site.name(table, int(self.rng.integers(0, n)))

    def _events(self, t_ns: int) -> Iterator[ev.Event]:
        rng = self.rng
        self.count += 1
        key = f"{self.count}"
        roll = rng.random() if self.count != SITE_CHANGES_S else 0.175
        if roll < 0.02:
            yield ev.EntityReplaced(id=f"r{key}", table="gpu", name=self._name("gpu"), serial=key)
        elif roll < 0.05:
            lo, width = rng.uniform(-100, 1500), rng.uniform(0, 500)
            yield ev.OperatorRequest(
                id=f"q{int(rng.integers(0, 30))}-{key}",
                author="ada",
                control=CAP,
                names=(self._name("gpu"),),
                lo=lo,
                hi=lo + width,
                want=lo + width / 2,
                expires_ns=t_ns + 40 * NS,
            )
        elif roll < 0.07:
            yield ev.OperatorRequest(
                id=f"s{key}",
                author="bob",
                control="node.service_level",
                names=(self._name("node"),),
                lo=2.0,
                hi=4.0,
                want=3.0,
                expires_ns=t_ns + 60 * NS,
            )
        elif roll < 0.10:
            yield ev.JobStarted(
                job=f"job{rng.integers(0, 6)}", nodes=(self._name("node"), self._name("node"))
            )
        elif roll < 0.12:
            yield ev.JobEnded(job=f"job{rng.integers(0, 6)}")
        elif roll < 0.13:
            yield ev.Held(author="eve")
        elif roll < 0.15:
            yield ev.Resumed(author="eve")
        elif roll < 0.155:
            yield ev.Released(author="eve")
        elif roll < 0.16:
            yield ev.EpochChanged(epoch=int(rng.integers(0, 5)))
        elif roll < 0.17:
            level: Any = str(rng.choice(["off", "advise", "act", "act", "act"]))
            yield ev.AuthorityChanged(
                author="eve", policy=str(rng.choice(["operator", "x"])), authority=level
            )
        elif roll < 0.18:
            names = SITES[int(rng.integers(0, len(SITES)))]
            later = spec(names, models={}, controls={CAP: {"blast_radius": 6}})
            self.site = build_site(later)
            yield ev.SiteChanged(id=f"c{key}", site_hash=later.digest(), spec=later.packed())
        elif roll < 0.2:
            yield from self._people(key, t_ns)
        elif roll < 0.205:
            self.epoch += int(rng.integers(1, 3))
            yield ev.EpochChanged(epoch=self.epoch, head=key, adopt=bool(rng.random() < 0.5))
        elif roll < 0.215:
            yield ev.CommandAcked(
                control=str(rng.choice([CAP, "x.y"])),
                name=self._name("gpu"),
                generation=9,
                command=str(rng.choice(["1-1", "garbage", "9" * 40 + "-1"])),
                state="done",
            )

    def _people(self, key: str, t_ns: int) -> Iterator[ev.Event]:
        """Maintenance windows that begin, some of them wrongly, and end before their time."""
        rng = self.rng
        if rng.random() < 0.3:
            yield ev.MaintenanceEnded(author="ann", window=f"m{int(rng.integers(1, self.count + 1))}")
            return
        table = str(rng.choice(["hall", "rack", "node", "gpu", "cdu", "feeder", "job"]))
        until_ns = t_ns + int(rng.integers(-5, 60)) * NS
        yield ev.MaintenanceBegun(
            id=f"m{key}", author="ann", table=table, names=(self._name(table),), until_ns=until_ns
        )


@dataclass
class Checker:
    """Invariants of every command, whatever happened before it."""

    storm: Storm
    commands: int = 0
    changed: int = 0
    renewed_ns: dict[tuple[str, str], int] = field(default_factory=dict)

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        if any(isinstance(e, ev.SiteChanged) for e in frame.events):
            self.changed += 1
        new: dict[str, int] = {}
        for batch in decision.commands:
            self._one(engine, frame, batch)
            new[batch.control] = new.get(batch.control, 0) + self._unprotective(engine, batch)
            self._answer(engine, batch)
        for key, count in new.items():
            assert count <= engine.site.envelopes[key].blast_radius, (frame.tick, key, count)
        self._leases(engine, frame)
        assert engine.suspended == {}

    def _one(self, engine: Engine, frame: Frame, batch: CommandBatch) -> None:
        control = find_control(batch.control)
        assert control is not None
        envelope = engine.site.envelopes[batch.control]
        n = engine.site.sizes[control.table]
        self.commands += len(batch.index)
        assert (np.diff(batch.index) > 0).all()
        assert 0 <= batch.index.min() <= batch.index.max() < n
        assert (batch.value >= envelope.low[batch.index]).all(), (frame.tick, batch)
        assert (batch.value <= envelope.high[batch.index]).all(), (frame.tick, batch)
        alive = engine.state.tables[control.table].generation[batch.index]
        assert (batch.generation == alive).all(), "a command for a device that is gone"
        assert batch.epoch == engine.arbiter.epoch
        assert batch.expires_ns > frame.now_ns or batch.final
        assert engine.arbiter.mode != "released"
        worked_at = engine.windows.mask(control.table)
        assert worked_at is None or not worked_at[batch.index].any(), (frame.tick, "people work there")

    @staticmethod
    def _unprotective(engine: Engine, batch: CommandBatch) -> int:
        """New commands that raise a cap, by a policy (what goes back to what was found is nobody's wish)."""
        if batch.renewal or batch.policy == "arbiter" or batch.control != CAP:
            return 0
        lease = engine.arbiter.leases[batch.control]
        return int((batch.value > lease.found[batch.index]).sum())

    def _answer(self, engine: Engine, batch: CommandBatch) -> None:
        if batch.final or engine.site.spec_hash != self.storm.site.spec_hash:
            return
        table = batch.control.partition(".")[0]
        for k, entity in enumerate(batch.index.tolist()):
            state: Any = str(self.storm.rng.choice(["accepted", "done", "done", "failed"]))
            self.storm.acks.append(
                ev.CommandAcked(
                    control=batch.control,
                    name=engine.site.name(table, entity),
                    generation=int(batch.generation[k]),
                    command=f"{batch.epoch}-{batch.command[k]}",
                    state=state,
                )
            )

    def _leases(self, engine: Engine, frame: Frame) -> None:
        for key, lease in engine.arbiter.leases.items():
            running = np.flatnonzero(lease.running())
            if len(running) == 0:
                continue
            assert (lease.expires_ns[running] > frame.now_ns).all(), (frame.tick, key, "outlived its expiry")
            longest = frame.now_ns + round(lease.control.lease_s * NS)
            assert (lease.expires_ns[running] <= longest).all()
            table = engine.state.tables[key.partition(".")[0]]
            assert (lease.generation[running] == table.generation[running]).all()


def weather(seed: int, seconds: int, folder: Path) -> Checker:
    """One storm, recorded, checked tick by tick, and made again from its trace."""
    storm = Storm(seed, seconds)
    checker = Checker(storm)
    engine = engine_for(storm.spec)
    outcome = replay_arrivals(engine, storm.spec, storm, 1.0, folder, (checker,))  # type: ignore[arg-type]
    assert verify_journal(folder / "journal.jsonl").fault is None
    again = engine_for(storm.spec)
    made = replay_frames(again, TraceReader(folder), folder / "journal.jsonl")
    assert made.damage == []
    assert made.ticks == outcome.ticks
    assert made.journal_head == outcome.journal_head
    assert again.checksum() == engine.checksum()
    assert set(TABLES) >= {"gpu", "rack"}
    return checker


@pytest.mark.long
@pytest.mark.parametrize("seed", sampled([0, 2], 2))
def test_a_short_storm(tmp_path: Path, seed: int) -> None:
    checker = weather(seed, 250, tmp_path / "run")
    assert checker.commands > 50
    assert checker.changed >= 1


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(100, 112))
def test_a_long_storm(tmp_path: Path, seed: int) -> None:
    checker = weather(seed, 3000, tmp_path / "run")
    assert checker.commands > 500
    assert checker.changed >= 5
