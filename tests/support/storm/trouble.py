"""Trouble: what goes wrong in a storm, one thing after the other, drawn by its seed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.support.storm.broker import Weather
from twin.catalogue import NS
from twin.telemetry import events as ev

if TYPE_CHECKING:
    from tests.support.storm.storm import Process, Storm

CAP = "gpu.power_cap_w"


class Trouble:
    """Draws and undoes. `KINDS` in a shape's `trouble` choose among them."""

    def __init__(self, storm: Storm) -> None:
        self.storm, self.dice = storm, random.Random(storm.dice.random())
        self._count = 0
        self._past: list[tuple[str, bytes]] = []
        every: dict[str, Callable[[], Any]] = {
            "weather": self._weather, "cut": self._cut, "broker": self._broker, "reset": self._reset,
            "etcd": self._etcd, "disk": self._disk, "full": self._full, "kill": self._kill,
            "power": self._power, "freeze": self._freeze, "agents": self._agents, "clock": self._clock,
            "forge": self._forge, "refuse": self._refuse, "feed": self._feed,
        }  # fmt: skip
        chosen = storm.shape.trouble
        self.kinds = {k: v for k, v in every.items() if not chosen or k in chosen}

    async def brew(self, seconds: float) -> None:
        """For so long; some lasts while other begins. Then all of it is over."""
        loop, watch = self.storm.loop, self.storm.watch
        self.storm.broker.heard.append(self._remember)
        people = asyncio.ensure_future(self._people())
        end_s = loop.time() + seconds
        running: set[asyncio.Future[None]] = set()
        await asyncio.sleep(10.0)
        while (left_s := end_s - loop.time()) > 0:
            await asyncio.sleep(min(left_s, self.dice.expovariate(1 / self.storm.shape.every_s)))
            if loop.time() >= end_s or not self.kinds:
                continue
            kind = self.dice.choice(sorted(self.kinds))
            task = asyncio.ensure_future(self.kinds[kind]())
            running.add(task)
            task.add_done_callback(running.discard)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._mend()
        watch.note("calm")
        await people

    def _mend(self) -> None:
        storm = self.storm
        storm.broker.weather, storm.broker.is_down = Weather(), False
        storm.broker.cut.clear()
        storm.etcd.cut.clear()
        storm.etcd.down.clear()
        storm.etcd.lost_answer, storm.etcd.delay_s, storm.etcd.deposed = 0.0, 0.004, None
        for process in storm.processes:
            disk = process.disk
            disk.fsync_fails = disk.write_fails = disk.short = 0.0
            disk.free_bytes, disk.job_s = None, 0.004
        for device in storm.field.devices:
            device.refuses = False

    def _note(self, text: str) -> None:
        self.storm.watch.note(text)

    def _one(self) -> Process:
        return self.dice.choice(self.storm.processes)

    async def _lasting(self, least_s: float, most_s: float) -> None:
        await asyncio.sleep(self.dice.uniform(least_s, most_s))

    # -- the network

    async def _weather(self) -> None:
        dice = self.dice
        weather = Weather(
            delay_s=dice.choice((0.003, 0.05, 0.5)), lost=dice.choice((0.0, 0.05, 0.5)),
            doubled=dice.choice((0.0, 0.3)), shuffled=dice.choice((0.0, 0.2)),
            slow_s=dice.choice((0.5, 5.0, 40.0)),
        )  # fmt: skip
        self._note(f"weather {weather}")
        self.storm.broker.weather = weather
        await self._lasting(5, 60)
        self.storm.broker.weather = Weather()

    async def _cut(self) -> None:
        host = self.dice.choice(["agents", "plant", *(p.name for p in self.storm.processes)])
        self._note(f"{host} is cut off from the broker")
        self.storm.broker.cut_off(host)
        await self._lasting(0.5, 90)
        self.storm.broker.cut.discard(host)

    async def _broker(self) -> None:
        self._note("the broker is down")
        self.storm.broker.fail()
        await self._lasting(0.2, 40)
        self.storm.broker.is_down = False

    async def _reset(self) -> None:
        client = self.dice.choice(sorted(self.storm.broker.sessions) or ["nobody"])
        self._note(f"the connection of {client} breaks")
        self.storm.broker.reset(client)

    def _remember(self, topic: str, payload: bytes) -> None:
        if "/Request/" in topic:
            self._past.append((topic, payload))
            del self._past[:-500]

    async def _forge(self) -> None:
        """A request that was on its way for long comes again."""
        if self._past:
            topic, payload = self.dice.choice(self._past)
            self._note(f"a request of epoch {json.loads(payload)['epoch']} comes again")
            for session in self.storm.broker.sessions.values():
                if any(fits(topic) for fits in session.filters.values()):
                    from tests.support.storm.broker import Sent

                    self.storm.broker._send(session, Sent(topic, payload, 1, False))

    # -- the election

    async def _etcd(self) -> None:
        from tests.support.storm.storm import ENDPOINTS

        etcd, dice = self.storm.etcd, self.dice
        match dice.randrange(5):
            case 0:
                host = self._one().name
                cut = {(host, e) for e in dice.sample(ENDPOINTS, dice.randint(1, 3))}
                self._note(f"etcd: cut {sorted(cut)}")
                etcd.cut |= cut
                await self._lasting(0.5, 20)
                etcd.cut -= cut
            case 1:
                down = set(dice.sample(ENDPOINTS, dice.randint(1, 3)))
                self._note(f"etcd: down {sorted(down)}")
                etcd.down |= down
                await self._lasting(0.5, 10)
                etcd.down -= down
            case 2:
                self._note("etcd: answers are lost")
                etcd.lost_answer = 0.4
                await self._lasting(2, 20)
                etcd.lost_answer = 0.0
            case 3:
                self._note("etcd: slow")
                etcd.delay_s = dice.choice((0.1, 0.5))
                await self._lasting(2, 20)
                etcd.delay_s = 0.004
            case 4:
                member = dice.choice(ENDPOINTS)
                self._note(f"etcd: leadership moves away from {member}")
                etcd.move_leadership(member)

    # -- disks

    async def _disk(self) -> None:
        disk, name = self._one().disk, self.dice.choice(("fsync", "write", "short", "slow"))
        self._note(f"disk of {disk.folder.rpartition('/')[2]}: {name}")
        match name:
            case "fsync":
                disk.fsync_fails = self.dice.choice((0.02, 0.3))
            case "write":
                disk.write_fails = 0.02
            case "short":
                disk.short = 0.3
            case "slow":
                disk.job_s = self.dice.choice((0.1, 1.0, 4.0))
        await self._lasting(1, 30)
        disk.fsync_fails = disk.write_fails = disk.short = 0.0
        disk.job_s = 0.004

    async def _full(self) -> None:
        disk = self._one().disk
        self._note(f"disk of {disk.folder.rpartition('/')[2]} is full")
        disk.free_bytes = self.dice.randint(0, 200_000)
        await self._lasting(1, 40)
        disk.free_bytes = None

    # -- processes

    async def _kill(self) -> None:
        self._kill_within(self._one(), 1500, 40)

    async def _power(self) -> None:
        process = self._one()
        process.with_power_loss = True
        self._kill_within(process, 300, 20)

    def _kill_within(self, process: Process, steps: int, calls: int) -> None:
        """Kill a process at one of its next callbacks, or in one of its next calls of the disk."""
        if self.dice.random() < 0.5:
            process.life.kill_at = process.life.steps + self.dice.randint(1, steps)
        else:
            process.disk.kill_at = process.disk.calls + self.dice.randint(1, calls)

    async def _freeze(self) -> None:
        process = self._one()
        seconds = self.dice.choice((0.5, 3.0, 12.0, 45.0)) * self.dice.uniform(0.5, 1.0)
        self._note(f"{process.name} stands still for {seconds:.1f} s")
        self.storm.loop.freeze(process.life, seconds)

    async def _agents(self) -> None:
        field = self.storm.field
        if field.agent_life.is_dead:
            return
        if self.dice.random() < 0.4:
            seconds = self.dice.uniform(0.5, 20.0)
            self._note(f"the agents stand still for {seconds:.1f} s")
            self.storm.loop.freeze(field.agent_life, seconds)
            return
        self._note("the agents are killed")
        life = field.agent_life
        life.kill()
        self.storm.loop.bury(life)
        session = self.storm.broker.sessions.get("agents")
        if session is not None and session.end is not None:
            self.storm.broker.disconnect(session.end, with_will=True)
        try:
            await self._lasting(0.5, 20)
        finally:
            field.start_agents()

    async def _clock(self) -> None:
        process = self._one()
        step_s = self.dice.choice((0.3, 1.0, 5.0, 60.0)) * self.dice.choice((-1, 1))
        self._note(f"the clock of {process.name} steps by {step_s:g} s")
        process.host.step_ns += round(step_s * NS)
        await self._lasting(5, 60)
        process.host.step_ns -= round(step_s * NS)

    async def _refuse(self) -> None:
        device = self.dice.choice(self.storm.field.devices)
        self._note("a node's devices refuse")
        device.refuses = True
        await self._lasting(2, 40)
        device.refuses = False

    async def _feed(self) -> None:
        """A feed is lost, or a pump trips."""
        kind, table = self.dice.choice((("feed_lost", "feeder"), ("pump_trip", "cdu")))
        self._note(f"plant: {kind}")
        self.storm.field.load_pu = 1.0
        self.storm.field.strike(kind, table, 0, self.dice.uniform(60, 240))

    # -- people

    async def _people(self) -> None:
        loop = self.storm.loop
        until_s = loop.time() + self.storm.shape.hours * 3600.0 - 30.0
        while loop.time() < until_s:
            await asyncio.sleep(self.dice.expovariate(1 / self.storm.shape.people_s))
            for process in self.storm.processes:
                daemon = process.daemon
                if daemon is None or not daemon.live.ready or process.life.frozen_until_s > loop.time():
                    continue
                event = self._request(process)
                if process.does(lambda d, e=event: d.leadership.veto(e) is None and d.live.put_event(e)):
                    break

    def _request(self, process: Process) -> ev.Event:
        dice, site = self.dice, self.storm.field.site
        self._count += 1
        roll = dice.random()
        if roll < 0.05:
            return ev.Held(id=f"h{self._count}", author="eve")
        if roll < 0.18:
            return ev.Resumed(id=f"r{self._count}", author="eve")
        if roll < 0.2:
            return ev.Released(id=f"l{self._count}", author="eve")
        if roll < 0.25:
            level: Any = dice.choice(("off", "advise", "act", "act"))
            return ev.AuthorityChanged(id=f"a{self._count}", author="eve", policy="operator", authority=level)
        names = [site.name("gpu", i) for i in range(site.sizes["gpu"])]
        chosen = tuple(sorted(dice.sample(names, dice.randint(1, len(names)))))
        lo = dice.uniform(0.0, 1300.0)
        return ev.OperatorRequest(
            id=f"q{self._count}", author="ada", control=CAP, names=chosen, lo=lo,
            hi=lo + dice.uniform(0.0, 300.0), reason="a storm",
            expires_ns=process.host.wall_ns() + round(dice.uniform(5.0, 120.0) * NS),
        )  # fmt: skip
