"""A seeded storm over two daemons and their etcd: killed, paused and started again while nodes heat and cool.

Checked at the agents, from the outside: commands of an earlier term never come after those of a later one,
and no limit of a device is above what was last commanded of it while its lease ran.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.daemon_process import RunningDaemon
from tests.support.standby_pair import HOT_C, SAFE_W, TOP_W, Eye, Pair, pair, role
from twin.run import verify_journal

NODES = 36
LEASE_S = 30.0


class Weather:
    """Draws what happens next, and sees to it that everything runs again at the end."""

    def __init__(self, two: Pair, seed: int) -> None:
        self.two, self.dice = two, random.Random(seed)
        self.told: list[str] = []
        assert two.etcd is not None
        self.member = two.etcd.members[0]

    def blow(self, seconds: float) -> None:
        """For so long, one thing after the other; some last while others begin."""
        end = time.monotonic() + seconds
        daemons = (self._kill, self._kill, self._freeze, self._freeze, self._stop)
        while time.monotonic() < end:
            self._warm()
            dice = self.dice.random()
            if dice < 0.6:
                one = self.two.a if self.dice.random() < 0.5 else self.two.b
                self.dice.choice(daemons)(one)
            elif dice < 0.8:
                self._etcd()
            else:
                self._forge()
            time.sleep(self.dice.uniform(0.2, 6.0))

    def _warm(self) -> None:
        node = self.dice.randrange(NODES)
        if self.dice.random() < 0.5:
            self.two.racks.heat(node, HOT_C)
        else:
            self.two.racks.cool(node)

    def _say(self, what: str) -> None:
        self.told.append(what)

    def _kill(self, one: RunningDaemon) -> None:
        self._say(f"kill {one.folder.name}")
        one.kill()
        time.sleep(self.dice.uniform(0.0, 5.0))
        one.start(wait=False)

    def _stop(self, one: RunningDaemon) -> None:
        self._say(f"stop {one.folder.name}")
        one.stop()
        one.start(wait=False)

    def _freeze(self, one: RunningDaemon) -> None:
        self._say(f"freeze {one.folder.name}")
        one.send(signal.SIGSTOP)
        time.sleep(self.dice.uniform(0.5, 7.0))
        one.send(signal.SIGCONT)

    def _etcd(self) -> None:
        if self.dice.random() < 0.5:
            self._say("freeze etcd")
            self.member.pause()
            time.sleep(self.dice.uniform(0.2, 6.0))
            self.member.go_on()
        else:
            self._say("kill etcd")
            self.member.stop(hard=True)
            time.sleep(self.dice.uniform(0.2, 6.0))
            self.member.start()

    def _forge(self) -> None:
        """A request of an earlier term, as if it had been on its way for long."""
        said = [m for m in self.two.client.heard if "/Request/" in m.topic]
        if not said:
            return
        body = said[0].body | {"issued_ns": time.time_ns(), "expires_ns": time.time_ns() + 30 * 10**9}
        if body["epoch"] < max(m.body["epoch"] for m in said if m.topic == said[0].topic):
            self._say("forge")
            self.two.client.say(said[0].topic, json.dumps(body).encode())


def never_out_of_order(eye: Eye) -> int:
    """Over all nodes, accepted epochs only rise; returns how many terms commanded."""
    last = None
    for taken in eye.taken:
        if not taken.orders:
            continue
        if last is not None:
            assert taken.epoch >= last.epoch, f"{taken} after {last}"
        last = taken
    return len(set(eye.epochs()))


def never_above_what_was_commanded(eye: Eye) -> int:
    """Each limit is what was last commanded; or the safe value, once no command came for most of a lease."""
    names = [(path, f"gpu{i}") for path, d in eye.racks.devices.items() for i in range(d.gpus)]
    said: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in names}
    for taken in eye.taken:
        for name, (_, value) in taken.orders.items():
            if (taken.node, name) in said:
                said[taken.node, name].append((taken.at_s, value))
    for number, key in enumerate(names):
        before = np.nan
        for at_s, caps in eye.seen:
            limit = float(caps[number])
            if limit == before:
                continue
            before = limit
            # A sample is taken within moments of the note.
            lately = {v for t, v in said[key] if at_s - 0.5 <= t <= at_s + 0.5}
            earlier = [(t, v) for t, v in said[key] if t <= at_s]
            last_s, last = earlier[-1] if earlier else (-np.inf, TOP_W)
            lapsed = limit == SAFE_W and at_s - last_s > LEASE_S / 2
            assert limit in lately or limit == last or lapsed, (key, limit, last, at_s - last_s)
    return sum(len(v) for v in said.values())


@pytest.mark.storm
@pytest.mark.parametrize("seed", [1, 2])
def test_no_two_terms_and_no_cap_above_the_command(
    server: Callable[..., Path], tmp_path: Path, seed: int
) -> None:
    with pair(server, tmp_path) as two:
        two.start()
        weather = Weather(two, seed)
        try:
            weather.blow(150)
            for one in (two.a, two.b):
                one.until(one.is_up, "it to answer")
            both = (two.a, two.b)
            two.a.until(lambda: sorted(role(d) for d in both) == ["leader", "standby"], "one leader")
            hot = [n for n in range(NODES) if two.racks.node(n).coolant_c == HOT_C]
            two.a.until(lambda: all(two.racks.caps(n).max() < SAFE_W for n in hot), "hot nodes capped")
        finally:
            print(f"\nseed {seed}: {', '.join(weather.told)}")
        terms, commands = never_out_of_order(two.eye), never_above_what_was_commanded(two.eye)
        won = [{int(n["body"]["epoch"]) for n in d.journal("leader") if "epoch" in n["body"]} for d in both]
        assert not won[0] & won[1], "an epoch is of one daemon"
        assert set(two.eye.epochs()) <= won[0] | won[1]
        for one in both:
            assert one.stop() == 0
            assert verify_journal(one.run_folder / "journal.jsonl").fault is None
        print(f"{terms} terms commanded, {commands} commands accepted")
        assert terms >= 3
