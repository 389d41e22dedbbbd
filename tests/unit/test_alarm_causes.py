"""Alarms of silence get the names of their sources, and what has one cause is one alarm."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from policies.operator import Operator
from tests.support.builders import Twin, two_racks
from tests.support.in_process_daemon import Pod, serve
from twin.catalogue import NS
from twin.contracts import Finding
from twin.control import DONE
from twin.daemon.alarm_causes import PREFIXES, AlarmCauses
from twin.sources import SourceLedger
from twin.telemetry import Reading

FIRST = np.arange(144) < 72  # the GPUs of the first rack
LINK = "part/mqtt"


class Hearing:
    """Two racks, whose readings sources carry: `carry(source, table, entities, signals)`; then `run`."""

    def __init__(self) -> None:
        self.twin = Twin(two_racks())
        self.ledger = SourceLedger(self.twin.site.sizes, lambda *_: (0, 0), lambda: self.twin.now_ns)
        self.causes = AlarmCauses()
        self.stopped: set[str] = set()
        self._carried: list[tuple[str, str, list[int], tuple[str, ...]]] = []

    def carry(self, source: str, table: str, entities: range | list[int], *signals: str) -> Hearing:
        self._carried.append((source, table, list(entities), signals))
        return self

    def stop(self, source: str, table: str, signal: str) -> None:
        """It carries this no more."""
        self._carried = [
            (name, of, index, tuple(s for s in signals if (name, of, s) != (source, table, signal)))
            for name, of, index, signals in self._carried
        ]

    def run(self, seconds: int) -> dict[str, Finding]:
        """So many seconds; what is found then, as it is shown."""
        out: dict[str, Finding] = {}
        for _ in range(seconds):
            values: dict[str, np.ndarray] = {}
            at_ns = self.twin.now_ns + NS
            for source, table, entities, signals in self._carried:
                if source in self.stopped:
                    continue
                self.ledger.account(source, outside=not source.startswith(("exporter", "BMC"))).stage(
                    [Reading(table, i, s, 50.0, at_ns) for i in entities for s in signals], at_ns
                )
                for signal in signals:
                    none = np.full(self.twin.site.sizes[table], np.nan)
                    values.setdefault(f"{table}.{signal}", none)[entities] = 50.0
            decision = self.twin.tick(values)
            found = self.causes.named(decision.findings, self.twin.engine, self.ledger)
            out = {f.id: f for f in found if f.id.startswith(PREFIXES)}
        return out

    def relations(self, *waiting: str) -> Mapping[str, str]:
        """Return the cause of each alarm that has one, while these parts are away."""
        self.causes.down(waiting)
        return {
            identity: cause for identity, (cause, _) in self.causes.of(["to-agents", "heartbeat"]).items()
        }


def rack_of(source: str) -> Hearing:
    """One source carries the GPUs of the first rack, another one those of the second; the first stops."""
    hearing = (
        Hearing()
        .carry(source, "gpu", range(72), "temp_c")
        .carry("BMS gateway r2", "gpu", range(72, 144), "temp_c")
    )
    hearing.run(30)
    hearing.stopped.add(source)
    return hearing


@pytest.mark.parametrize(
    ("source", "words", "action"),
    [
        ("BMS gateway cdu-gw-1", "BMS gateway cdu-gw-1", "this gateway"),
        ("exporter http://n3:9400/metrics", "exporter http://n3:9400/metrics", "this exporter runs"),
        ("topic telegraf/node7", "topic telegraf/node7", "program that publishes there"),
        ("Sparkplug node pod/edge1", "Sparkplug node pod/edge1", "this node"),
    ],
)
def test_a_source_that_stops_gives_its_name_to_the_outage(source: str, words: str, action: str) -> None:
    hearing = rack_of(source)
    last = hearing.twin.now_ns
    (found,) = hearing.run(20).values()
    since = np.datetime64(last, "ns").astype(str)[11:19]
    assert found.title == f"No data from {words} since {since} UTC: 72 signals of rack lab/h/r1"
    assert action in found.action


def test_many_sources_are_counted_and_the_place_stays_the_name() -> None:
    hearing = Hearing().carry("BMS gateway r2", "gpu", range(72, 144), "temp_c")
    agents = [f"agent lab/h/r1/node{i}" for i in range(18)]
    for i, agent in enumerate(agents):
        hearing.carry(agent, "gpu", range(4 * i, 4 * i + 4), "temp_c")
    hearing.run(30)
    hearing.stopped.update(agents)
    (found,) = hearing.run(20).values()
    assert found.title.startswith("No data from rack lab/h/r1 since ")
    assert found.evidence[1].endswith(" and 12 more")


def test_all_that_publish_are_the_broker_or_its_network() -> None:
    """The link to the broker is up, and nothing comes over it; what is scraped goes on."""
    hearing = Hearing().carry("exporter http://n0:9400", "node", range(36), "power_w")
    agents = [f"agent lab/h/r{rack}" for rack in (1, 2)] + ["BMS gateway gw"]
    hearing.carry(agents[0], "gpu", range(72), "temp_c").carry(agents[1], "gpu", range(72, 144), "temp_c")
    hearing.carry(agents[2], "rack", [0, 1], "power_w").run(30)
    hearing.stopped.update(agents)
    (found,) = hearing.run(20).values()
    assert found.title.startswith("No data from all 3 publishers on the broker since ")
    assert ": 146 signals of " in found.title
    assert "network between it and its publishers" in found.action


def one_node(*sources: tuple[str, str, tuple[str, ...]]) -> Hearing:
    """Sources of the first node (name, table, signals); others carry the same of the rest, and live."""
    hearing, mine = Hearing(), {"node": [0], "gpu": [0, 1, 2, 3]}
    for source, table, signals in sources:
        rest = range(len(mine[table]), hearing.twin.site.sizes[table])
        hearing.carry(source, table, mine[table], *signals).carry(
            f"BMS gateway {table}", table, rest, *signals
        )
    hearing.run(30)
    return hearing


def test_an_agent_that_stops_is_named_and_not_its_node() -> None:
    agent = "agent lab/h/r1/node0"
    hearing = one_node((agent, "node", ("power_w", "inlet_temp_c")), (agent, "gpu", ("temp_c",)))
    hearing.stopped.add(agent)
    found = hearing.run(30)["fault/node_silent/lab/h/r1/node0"]
    assert found.title.startswith("No data from agent lab/h/r1/node0 since ")
    assert found.title.endswith(": 6 signals of node lab/h/r1/node0")


@pytest.mark.parametrize("signals", [("power_w",), ("power_w", "fan_hz")])
def test_a_bmc_that_stops_is_named_and_not_its_sensors(signals: tuple[str, ...]) -> None:
    hearing = one_node(("agent a", "node", ("inlet_temp_c",)), ("BMC 10.0.0.3", "node", signals))
    hearing.stopped.add("BMC 10.0.0.3")
    (found,) = hearing.run(30).values()
    assert found.title.startswith("No data from BMC 10.0.0.3 since ")
    n = "1 signal" if len(signals) == 1 else "2 signals"
    assert f": {n} of " in found.title
    assert found.title.endswith("node lab/h/r1/node0")
    assert found.action.startswith("Check that this BMC answers")


def test_a_sensor_that_stops_while_its_source_speaks_is_the_sensor() -> None:
    hearing = one_node(("BMS gateway gw", "node", ("power_w", "inlet_temp_c")))
    hearing.stop("BMS gateway gw", "node", "inlet_temp_c")
    (found,) = hearing.run(30).values()
    assert found.title == "A sensor of lab/h/r1/node0 no longer reports: inlet temperature"


def test_a_gpu_whose_own_source_stops_is_not_said_to_have_fallen_off_the_bus() -> None:
    hearing = Hearing().carry("agent a", "node", range(36), "power_w")
    hearing.carry("exporter http://n0:9400", "gpu", [0], "temp_c")
    hearing.carry("BMS gateway g", "gpu", range(1, 144), "temp_c")
    hearing.run(30)
    hearing.stopped.add("exporter http://n0:9400")
    found = [f for f in hearing.run(60).values() if f.id.startswith("fault/")]
    assert [f.severity for f in found] == ["warning"]
    assert found[0].title.startswith("No data from exporter http://n0:9400 since ")


@pytest.mark.parametrize(
    ("source", "part"), [("agent lab/h/r1/node0", "mqtt"), ("exporter http://x:9400", "scrape-0")]
)
def test_what_a_part_brings_follows_from_its_alarm_while_it_is_away(source: str, part: str) -> None:
    hearing = rack_of(source)
    hearing.causes.part_of = {"exporter http://x:9400": "scrape-0"}
    (identity,) = hearing.run(20)
    assert identity not in hearing.relations(), "the part is well: its source stopped"
    assert hearing.causes.down(["other", part]) == {part}, "its alarm is due now"
    relations = hearing.relations(part)
    assert relations[identity] == f"part/{part}"
    assert relations["part/heartbeat"] == relations["sink/agents"] == relations["part/to-agents"] == LINK
    assert hearing.relations()[identity] == f"part/{part}", "until its data are back"
    assert hearing.causes.of([])[identity][1] > 30.0, "as long as its next data may take"


def test_alarms_of_one_source_are_one() -> None:
    gateway = "BMS gateway gw-1"
    hearing = one_node((gateway, "node", ("power_w",)), (gateway, "gpu", ("temp_c",)))
    hearing.carry(gateway, "cdu", [0], "flow_lpm", "supply_temp_c").run(30)
    hearing.stopped.add(gateway)
    found = hearing.run(40)
    assert sorted(found) == ["fault/node_silent/lab/h/r1/node0", "silence/lab/h/cdu1/cdu"]
    assert all(f.title.startswith("No data from BMS gateway gw-1 since ") for f in found.values())
    (child,) = hearing.relations().keys() & found.keys()
    assert {child, hearing.relations()[child]} == set(found)


def test_a_part_that_is_down_says_what_it_brought() -> None:
    hearing = one_node(("exporter http://n0:9400", "gpu", ("temp_c", "power_w")))
    hearing.causes.part_of = {
        "exporter http://n0:9400": "scrape-0",
        "exporter b": "b",
        "bmc 1": "c",
        "bmc 2": "c",
    }

    def title(part: str) -> str:
        outages = hearing.twin.engine.diagnosis.silence.outages
        return (hearing.causes.part_down(part, "broker b:1883", hearing.ledger, outages) or ("none",))[0]

    assert title("scrape-0").startswith("No data from exporter http://n0:9400 since ")
    assert title("scrape-0").endswith(": 8 signals of 4 GPUs of node lab/h/r1/node0")
    assert title("b") == "No answer from exporter b"
    assert title("c") == "none", "of several sources none is the one"
    assert title("mqtt").startswith("No data from broker b:1883 since ")
    assert title("mqtt").endswith(": 280 signals of 140 GPUs of hall lab/h")


def test_silent_signals_are_listed_on_request_with_their_ages(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for _ in range(30):
            pod.tick({"gpu.temp_c": 50.0})
        for _ in range(20):
            pod.tick({"gpu.temp_c": np.where(FIRST, np.nan, 50.0)})
            await asyncio.sleep(0)
        status, tree = await pod.ask("GET", "/api/v1/alarms/silence/lab/h/r1/children?limit=2")
        assert status == 200
        assert (tree["total"], tree["next_offset"]) == (72, 2)
        first = tree["silent"][0]
        assert (first["table"], first["name"]) == ("gpu", "lab/h/r1/node0/gpu0")
        assert first["age_s"]["temp_c"] == 20.0
        assert (await pod.ask("GET", "/api/v1/alarms/silence/none/children"))[0] == 404
        _, page = await pod.ask("GET", "/api/v1/summary")
        assert page["heard"]["gpu"]["silent"] == 72
        assert page["heard"]["gpu"]["heard"] == 72, "all are heard only while nothing is silent"
        assert [r["silent_s"] for r in page["racks"]] == [20.0, None]
        assert [r["ages_s"] for r in page["racks"]] == [{"gpu_temp_c_max": 20.0}, {}]
        assert [r["gpu_temp_c_max"] for r in page["racks"]] == [50.0, 50.0], "with its age, it is shown"
        _, table = await pod.ask("GET", "/api/v1/state/gpu?signals=temp_c&names=lab/h/r1/node0/gpu0")
        column = table["signals"]["temp_c"]
        assert (column["late"], column["age_s"]) == ([True], [20.0])

    serve(tmp_path, check)


def test_a_node_that_a_policy_switched_off_is_not_to_be_started_at_once() -> None:
    """Receivers get the action with the alarm, so the finding has it before anybody is notified."""
    twin = Twin(two_racks(), [Operator()], authority={"operator": "act"})
    ledger = SourceLedger(twin.site.sizes, lambda *_: (0, 0), lambda: twin.now_ns)
    causes, engine = AlarmCauses(), twin.engine
    nodes = tuple(twin.site.name("node", i) for i in (3, 4))
    action = "Check its supply, then start it."

    def shown(*entities: str) -> str:
        found = Finding(f"fault/node_down/{entities[0]}", "critical", "off", entities, (), 0.99, action)
        (one,) = causes.named([found], engine, ledger)
        assert causes.named([found], engine, ledger)[0] is one, "an alarm that stays is not taken anew"
        return one.action

    assert shown(nodes[0]) == action
    lease, policy = engine.arbiter.leases["node.power_state"], engine.policies[0].name
    lease.value[3], lease.state[3], lease.owner[3] = 2.0, DONE, 0
    assert shown(nodes[0]) == f"{policy} switched it off: start it only once the cause of that is over."
    assert shown(*nodes) == (
        f"{policy} switched off {nodes[0]}: start it only once the cause of that is over. "
        f"For the rest: {action}"
    )
    lease.value[4], lease.state[4], lease.owner[4] = 2.0, DONE, 0
    assert shown(*nodes) == f"{policy} switched them off: start them only once the cause of that is over."
    lease.value[3:5] = 0.0
    assert shown(nodes[0]) == action
