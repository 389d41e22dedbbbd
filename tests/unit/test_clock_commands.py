"""Wrong clocks of sources and of this host: nothing is commanded because of them, though all policies act,
and one sentence tells of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from policies.power_capping import PowerCap, PowerGuard
from policies.thermal_guard import ThermalGuard
from tests.support.builders import site_of, two_racks
from tests.support.sampled_cases import sampled
from twin.catalogue import NS, TABLES
from twin.daemon import Ingest
from twin.engine import Engine
from twin.telemetry import Block

TEMP = TABLES["gpu"].by_name["temp_c"]
T = 1_700_000_000 * NS
STEP_S, END_S = 30.0, 80
Shown = Callable[[float], float]  # what a clock shows at a time
NODE, GATEWAY = ("agent node1",), ("gateway r0",)
ALL: tuple[str, ...] = ()
CLOCKS: dict[str, tuple[Shown, tuple[tuple[str, ...], ...]]] = {
    "1 h behind since ever": (lambda t: t - 3600.0, (NODE, GATEWAY, ALL)),
    "10 s behind since ever": (lambda t: t - 10.0, (ALL,)),
    "1 h ahead since ever": (lambda t: t + 3600.0, (ALL,)),
    "set back by 10 s": (lambda t: t - 10.0 * (t >= STEP_S), (NODE, GATEWAY, ALL)),
    "set back by 1 h": (lambda t: t - 3600.0 * (t >= STEP_S), (NODE, GATEWAY, ALL)),
    "set forward by 1 h": (lambda t: t + 3600.0 * (t >= STEP_S), (GATEWAY, ALL)),
    "stands": (lambda t: min(t, 10.0), (NODE, ALL)),
}
SILENT = ("10 s behind since ever",)  # as much may be the way


class Room:
    """Four nodes in two racks, their agents and gateways, and a daemon whose policies act."""

    def __init__(self, shown: Shown, who: tuple[str, ...]) -> None:
        tree = two_racks()
        tree["halls"][0]["racks"][0]["nodes"] = 2
        policies = [ThermalGuard(), PowerGuard(), PowerCap()]
        self.site = site_of(tree)
        self.engine = Engine(self.site, policies, [], {p.name: "act" for p in policies})
        self.shown, self.who, self.time_s = shown, who, 0.0
        self.ingest = Ingest(self.site, {}, passed_ns=lambda: round(self.time_s * NS))
        self.rng = np.random.default_rng(3)
        self.why: set[str] = set()
        self.alarms: set[str] = set()
        self.told: set[str] = set()

    def hear(self, source: str, table: str, start: int, n: int, **ranges: tuple[float, float]) -> None:
        """A message of these signals of n entities, each between two values."""
        now_ns = T + round(self.time_s * NS)
        is_wrong = source in self.who or not self.who
        shown_s = self.shown(self.time_s) if is_wrong else self.time_s
        values = np.stack([self.rng.uniform(*r, n) for r in ranges.values()]).astype(np.float32)
        block = Block(
            table, start, tuple(ranges), values, (), np.zeros((0, n), np.int64), T + round(shown_s * NS) - 1
        )
        self.ingest.of(source, outside=True).stage([block], now_ns)

    def second(self) -> None:
        """All report, and the engine ticks."""
        site, self.time_s = self.site, self.time_s + 1.0
        for node in range(site.sizes["node"]):
            heat = {"temp_c": (48.0, 54.0), "power_w": (380.0, 420.0), "power_limit_w": (1200.0, 1200.0)}
            self.hear(f"agent node{node}", "gpu", int(site.gpu_start_of_node[node]), 4, **heat)
        for rack in range(site.sizes["rack"]):
            water = {"flow_lpm": (95.0, 97.0), "supply_temp_c": (29.0, 31.0), "return_temp_c": (38.0, 40.0)}
            self.hear(f"gateway r{rack}", "rack", rack, 1, power_w=(9e3, 9.5e3), **water)
        self.hear("gateway feeders", "feeder", 0, site.sizes["feeder"], power_w=(9e3, 9.5e3))
        now_ns, number = T + round(self.time_s * NS), round(self.time_s)
        decision = self.engine.tick(self.ingest.take(number, now_ns, 1.0))
        self.why |= {c.reason for c in decision.commands}
        known = [f for f in decision.findings if not f.id.startswith("unheard/") and f.severity != "info"]
        self.alarms |= {f.id for f in known}
        if number % 10 == 0:
            ledger = self.ingest.ledger
            told = ledger.wrong_clocks(now_ns) or ledger.odd_clocks(now_ns)
            self.told |= {text.partition(":")[0] for text in told}


CASES = [(clock, who) for clock in CLOCKS for who in CLOCKS[clock][1]]
HERE = (*((clock, ALL) for clock in CLOCKS), ("set back by 1 h", GATEWAY), ("stands", NODE))


@pytest.mark.parametrize(("clock", "who"), sampled(CASES, *HERE))
def test_nothing_is_commanded_because_of_a_clock_and_one_source_is_told(
    clock: str, who: tuple[str, ...]
) -> None:
    room = Room(CLOCKS[clock][0], who)
    for _ in range(END_S):
        room.second()
    assert room.why == set()
    assert room.alarms == set()
    assert room.told == (set() if clock in SILENT else set(who or ("this host",)))
    age_s = room.engine.state.tables["gpu"].age_s(TEMP, room.engine.state.now_ns)
    assert age_s.max() <= 10.5, "its readings count"
