"""A while on the simulated plant in which a policy has something to say, once as advice and once as commands.

The same site, seed and trouble.

story = played("power_cap", "hgx", seed=1)
story.first_advice == story.first_commands
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np

from policies import REGISTRY
from tests.support.builders import site_of
from tests.support.contract_plugins import Seer
from twin.catalogue import find_control
from twin.contracts import ASLEEP, CommandBatch, Decision
from twin.engine import Engine
from twin.plant import scenario_of
from twin.simulation import Simulation
from twin.telemetry import AuthorityChanged, Event, Frame, OperatorRequest, Reading

CAP, SERVICE = "gpu.power_cap_w", "node.service_level"
ALL = "all"
ROOMY = {"site_share": 1.0, "rack_share": 1.0, "domain_share": 1.0, "job_share": 1.0}
WET = {"kind": "leak", "entity": "r1/node0", "begin_s": 5.0, "severity": 0.5}
HOT = {"kind": "sensor_biased", "entity": "r1/node1/gpu1", "signal": "temp_c", "begin_s": 5.0, "amount": 45.0}
WARM = HOT | {"begin_s": 20.0}
ILL = {"kind": "xid_burst", "entity": "r1/node0/gpu0", "begin_s": 5.0, "severity": 0.3, "amount": 79}


@dataclass(frozen=True)
class Trouble:
    """Causes that make a policy speak: faults, settings, and the load of a feeder over its budget."""

    use_pu: float = 0.5
    faults: tuple[dict[str, Any], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    wet: bool = False  # only where there is coolant
    least_s: int = 75  # until it has spoken for a while


TROUBLES = {
    "thermal_guard": Trouble(faults=(HOT,)),
    "leak_guard": Trouble(faults=(WET,), wet=True, least_s=120),
    "operator": Trouble(),
    "power_guard": Trouble(1.02),
    "power_cap": Trouble(0.87, settings={"failover": False, "margin_pu": 0.2}),
    "replacement": Trouble(faults=(ILL,), settings=ROOMY),
    "checkpoint": Trouble(faults=(ILL,)),
    "cooling_setpoint": Trouble(faults=(HOT, HOT | {"entity": "r1/node1/gpu2"}), wet=True),
    "idle_power": Trouble(0.2),
    # All policies together, as a site begins: they share one shadow
    ALL: Trouble(1.02, faults=(WARM, ILL)),
}
TRAINING = {"training_pu": 1.0, "inference_pu": 0.0, "batch_pu": 0.0, "job_hours": [40, 48]}


def _tree(budget_w: float, profile: str, *, racks: int = 2, nodes: int = 2, pdus: bool = False,
          sides: str = "AB", liquid: bool = True) -> dict[str, Any]:  # fmt: skip
    names = [f"r{i + 1}" for i in range(racks)]
    feeders: list[dict[str, Any]] = []
    for side in sides:
        below = [f"p{side.lower()}"] if pdus else names
        feeders.append({"name": side.lower(), "side": side, "budget_w": budget_w, "serves": below})
        if pdus:
            feeders.append({"name": below[0], "side": side, "budget_w": budget_w, "serves": names})
    hall: dict[str, Any] = {
        "name": "h",
        "racks": [{"name": n, "profile": profile, "nodes": nodes} for n in names],
        "feeders": feeders,
    }
    if liquid:
        hall["cdus"] = [{"name": "cdu1", "loop": "fw1", "serves": names}]
    tree: dict[str, Any] = {"site": "lab", "halls": [hall], "max_jobs": 8}
    if liquid:
        tree["loops"] = [{"name": "fw1"}]
    return tree | {"controls": {SERVICE: {"blast_radius": 8}, "rack.liquid_isolation": {"blast_radius": 2},
                                "rack.electrical_isolation": {"blast_radius": 2}}}  # fmt: skip


SITES: dict[str, dict[str, Any]] = {
    "hgx": {"profile": "hgx-h100", "liquid": False},
    "nvl72": {"profile": "gb300-nvl72"},
    "one_feeder": {"profile": "gb200-nvl72", "racks": 1, "nodes": 3, "sides": "A"},
    "pdus": {"profile": "gb200-nvl72", "pdus": True},
    "air": {"profile": "air-8gpu", "racks": 1, "nodes": 3, "liquid": False},
}


def policies_of(name: str) -> list[str]:
    """The policies of a story."""
    return sorted(REGISTRY) if name == ALL else [name]


@cache
def _load_w(where: str, seed: int) -> float:
    """Load of a feeder at full work."""
    sim = _simulation("operator", where, "off", seed, 1e9)
    for _ in range(5):
        sim.step()
    return float(sim.plant.truth.feeder_power_w.max())


def _simulation(name: str, where: str, authority: str, seed: int, budget_w: float) -> Simulation:
    site, trouble = site_of(_tree(budget_w, **SITES[where])), TROUBLES[name]
    power = name.startswith("power") or name == ALL or budget_w >= 1e9
    tree = {
        "name": "advice", "hours": 1, "seed": seed,
        "workload": {"constant_pu": 1.0} if power else TRAINING, "faults": list(trouble.faults),
    }  # fmt: skip
    names = policies_of(name)
    policies = [REGISTRY[n](**TROUBLES[n].settings) for n in names]
    engine = Engine(site, policies, [Seer()], dict.fromkeys(names, authority))
    sim = Simulation.of(engine, seed=seed, scenario=scenario_of(tree, site))
    if name == "idle_power":
        sim.plant.standby.level[1] = ASLEEP
    if name == "operator":
        sim.inject(_request("q1", CAP, 0.6), _request("q2", SERVICE, 0.5))
    return sim


def _request(name: str, control: str, share: float) -> Event:
    table, found = control.partition(".")[0], find_control(control)
    assert found is not None
    names = ("r1/node1/gpu1", "r1/node0/gpu0") if table == "gpu" else ("r1/node1",)
    high = 2.0 if table == "node" else 600.0 * share
    return OperatorRequest(id=name, author="ann", control=control, names=names, lo=0.0, hi=high, want=high)


Values = dict[tuple[str, int], tuple[float, str]]


def told(batches: tuple[CommandBatch, ...]) -> Values:
    """(value, reason) of new commands or advice, by control and entity."""
    return {
        (b.control, int(i)): (float(v), b.reason)
        for b in batches
        if not b.renewal
        for i, v in zip(b.index, b.value, strict=True)
    }


class _Heard:
    """New commands and advice of each tick."""

    def __init__(self) -> None:
        self.commands: list[Values] = []
        self.advice: list[Values] = []

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        self.commands.append(told(decision.commands))
        self.advice.append(told(decision.advice))


class Story:
    """A policy that advises beside one that acts, and what both came to."""

    def __init__(self, name: str, where: str, seed: int, seconds: int) -> None:
        self.name = name
        budget_w = _load_w(where, seed) / TROUBLES[name].use_pu
        self.advises, self.acts = (
            _simulation(name, where, authority, seed, budget_w) for authority in ("advise", "act")
        )
        self.first_advice: Values = {}
        self.first_commands: Values = {}
        self.commanded_by_advice = 0
        # By control: the mean share advised and acted, each second; and the most of each entity
        self.levels: dict[str, list[tuple[float, float]]] = {}
        self.most: dict[str, np.ndarray] = {}
        self.said = [0, 0]  # how often something new was advised, and commanded
        for _ in range(seconds):
            self.second()

    def second(self) -> None:
        """Both go on for a second, in which an urgent tick may come before the last one."""
        advises, acts = _Heard(), _Heard()
        for sim, heard in ((self.advises, advises), (self.acts, acts)):
            sim.observers = (heard,)
            if self.name == "idle_power":  # more jobs wait than find room
                for signal, count in (("gpu_running_count", 8.0), ("gpu_pending_count", 500.0)):
                    sim.inbox.put(Reading("site", 0, signal, count, sim.now_ns), sim.now_ns)
            sim.step()
        for one, other in zip_longest(advises.advice, acts.commands, fillvalue={}):
            if not (self.first_advice or self.first_commands):
                self.first_advice, self.first_commands = one, other
        self.commanded_by_advice += sum(map(len, advises.commands))
        self.said[0] += sum(map(bool, advises.advice))
        self.said[1] += sum(map(bool, acts.commands))
        spoken = (self.first_commands, *advises.advice, *acts.commands)
        for control in {c for values in spoken for c, _ in values} | set(self.levels):
            sides = ((self.advises, True), (self.acts, False))
            both = np.array([self.shares(sim, control, shadow) for sim, shadow in sides])
            most = self.most.setdefault(control, np.zeros_like(both))
            np.fmax(most, both, out=most)
            advised, acted = np.nanmean(both, axis=1)
            self.levels.setdefault(control, []).append((float(advised), float(acted)))

    def leases(self, sim: Simulation, control: str, shadow: bool) -> np.ndarray:
        """Values of the leases of a control, the shadow's or the real ones; NaN: none."""
        arbiter = sim.engine.arbiter
        table = arbiter.shadow.get(control) if shadow else arbiter.leases[control]
        return arbiter.leases[control].value if table is None else table.value

    def shares(self, sim: Simulation, control: str, shadow: bool) -> np.ndarray:
        """Distance of each value from its free end [n], 0..1 of the range; 0 without a lease."""
        envelope, spec = sim.engine.site.envelopes[control], find_control(control)
        assert spec is not None
        free = envelope.high if spec.protective == "low" else envelope.low
        value = self.leases(sim, control, shadow)
        with np.errstate(invalid="ignore", divide="ignore"):
            away = np.abs(np.where(np.isnan(value), free, value) - free)
            shares: np.ndarray = away / (envelope.high - envelope.low)
        return shares

    def level(self, sim: Simulation, control: str, shadow: bool) -> float:
        """Mean of these shares."""
        return float(np.nanmean(self.shares(sim, control, shadow)))

    def armed(self) -> tuple[Simulation, Simulation]:
        """The next second of the one that advises, and of the same one armed in it."""
        stays, arms = self.advises.fork(), self.advises.fork()
        for name in policies_of(self.name):
            arms.inject(AuthorityChanged(author="ann", policy=name, authority="act"))
        stays.step()
        arms.step()
        return stays, arms


@lru_cache(maxsize=len(TROUBLES) + 2)
def played(name: str, where: str, seed: int, seconds: int = 0) -> Story:
    """The story, played once, for so long or at least as long as its policy needs to speak."""
    return Story(name, where, seed, max(seconds, TROUBLES[name].least_s))


def wheres(name: str) -> list[str]:
    """The sites on which a policy can have something to say."""
    return [w for w, site in SITES.items() if site.get("liquid", True) or not TROUBLES[name].wet]
