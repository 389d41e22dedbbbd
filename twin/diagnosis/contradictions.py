"""Contradictions: readings that other readings of the same device or its parts exclude.

Each law is a quantity of one entity that its physics keeps in a narrow range whatever the load: the sum of
two supplies over the power of their node, the apparent power over voltage times current, the memory of a GPU
over its chip, or 1 while a state says what a reading refutes. The range of each entity is learned, and a
quantity far outside of it accuses the reading that stands still or jumps, or else the one that has moved most
since it was inside. The distances are effect sizes that noise does not reach: the comparisons of the
estimator find what is smaller. An entity that never kept a law is not judged by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import KW_ONLY, dataclass

import numpy as np

from twin.catalogue import F32, F64, I64, NS, TABLES, Bool
from twin.diagnosis.cause import Cause
from twin.diagnosis.reconciliation import WRONG
from twin.diagnosis.sensor_checks import Meters, SensorChecks
from twin.diagnosis.signature import LEAST_CLOCK_HZ
from twin.diagnosis.topology import Topology
from twin.diagnosis.verdict import amount
from twin.telemetry import GOOD, EntityState, State, keyed, records

EVERY = 5  # ticks between two looks at a table of one slice
SLICE = 2_048  # entities of a larger table that are looked at in a tick
# Looks at new readings in which a law was kept before it judges: five minutes; source: estimate
LEARNS = 60
SEEN_PU = 1.25  # of a load, within which a law that was learned at it holds; source: estimate
SETTLES = 0.1  # of the way from the load of late to the load of now, in `EVERY` ticks; source: estimate
LEAST_LOAD_W = 20.0  # less is as much as nothing: a smoothed load never gets to 0; source: estimate
FADES = 0.25  # of the looks that were off, in each that is not: a meter that leaps is off half of the time
FORGETS, WIDENS = 0.002, 0.1  # of the range, in a look: towards a reading inside, and one just outside of it
TOGETHER_NS = 10 * NS  # readings that are farther apart in time are not compared
NAMED, CLEAR_S = 50, 60.0  # accused of a law at once; seconds for which an accusation stands by itself
BUSY_PU, FLOWS_PU, CARRIES_PU = 0.25, 0.3, 0.2  # of a GPU's and a rack's power, and of a nominal flow
NONE_PU, SOME_PU = 0.02, 0.1  # of an activity, as good as none, and certainly some
SHUT_PU = 0.01  # of a valve
LEAST_NODE_W, LEAST_CPU_W = 300.0, 1.0  # source: estimate
LEAST_VA, LEAST_V = 5e3, 50.0  # below, digits of a meter weigh more than its law
LEAST_HZ = 40.0  # of a grid; source: estimate
LEAST_RH_PU = 0.02
LEAST_SET_C = TABLES["cdu"].control_by_name["supply_temp_target_c"].low
LOOP_MOST_PU, LOOP_LEAST_PU = 0.8, 5e-4  # of the power of its racks, for their cooling; source: estimate
MOST_LIMIT_PU = 1.05  # of the highest limit that a GPU takes
COUNTED_S = 15.0  # energy that is counted more seldom is compared with no single power
# -ln of the chance that a healthy gauge of a broken law stands still for so long; source: estimate
STANDS_LOG = 7.0
# Longest waits for growth after which a counter stands still; share by which a shorter wait shortens it
STALLS, FORGETS_WAIT = 2.0, 0.05


class TableReadings:
    """Good readings of a part of a table, by the names of its signals; NaN elsewhere. `rates`: growth of its
    counters, thousandths of a unit per second. `watch`: the checks that know gauges that stand still."""

    def __init__(
        self, state: State, topology: Topology, table: str, part: slice, watch: SensorChecks | None = None
    ) -> None:
        self.state, self.topology, self.table, self.part, self.watch = state, topology, table, part, watch
        self.column, self.rates = state.tables[table], dict[str, F64]()
        self._read: dict[str, F64] = {}
        self._sums: dict[str, tuple[F64, F64]] = {}

    def __getitem__(self, name: str) -> F64:
        if name not in self._read:
            row = TABLES[self.table].by_name[name].row
            value = self.column.value[row, self.part].astype(np.float64)
            if self.column.bad_count[row]:
                value[self.column.quality[row, self.part] != GOOD] = np.nan
            self._read[name] = value
        return self._read[name]

    def busy(self) -> Bool:
        """Return the GPUs whose power shows that they work."""
        rated_w = self.topology.site.design.gpu_max_w[self.topology.site.rack_of_gpu[self.part]]
        out: Bool = self["power_w"] > BUSY_PU * rated_w
        return out

    def is_frozen(self, name: str, k: int) -> bool:
        """Return True if a gauge stands still for longer than a healthy one would. One that reads 0 reads
        wrong."""
        meters, at = self._meters(name), self.part.start + k
        if meters is None or self[name][k] == 0.0:
            return False
        gauge = meters.index(name)
        return bool(meters.frozen[gauge, at]) or meters.surprise(gauge, at) > STANDS_LOG

    def is_jumping(self, name: str, k: int) -> bool:
        """Return True if a gauge jumps more often than a healthy one would."""
        meters = self._meters(name)
        return meters is not None and bool(meters.jumping[meters.index(name), self.part.start + k])

    def _meters(self, name: str) -> Meters | None:
        meters = None if self.watch is None else self.watch.meters.get(self.table)
        return meters if meters is not None and name in meters.names else None

    def mean(self, key: str) -> F64:
        """Return the mean of a signal over the entities of another table below."""
        sums, counts = self._below(key)
        out: F64 = sums / counts
        return out

    def moved(self, name: str) -> F64:
        """Return the readings of a suspect, a counter's growth, or the mean of a `table.signal` below."""
        if "." in name:
            return self.mean(name)
        return self.rates[name] if name in self.rates else self[name]

    def total(self, key: str) -> F64:
        """Return the sum of a signal over the entities of another table below."""
        return self._below(key)[0]

    def _below(self, key: str) -> tuple[F64, F64]:
        """Return the sum and the count of a signal over the entities of another table below; NaN for none."""
        if key not in self._sums:
            child, _, name = key.partition(".")
            value = TableReadings(self.state, self.topology, child, slice(None))[name]
            at, n = self.topology.above(child, self.table), self.topology.sizes[self.table]
            known = np.isfinite(value) & (at >= 0)
            sums, counts = np.bincount(at[known], value[known], n), np.bincount(at[known], None, n)
            self._sums[key] = (
                np.where(sums > 0, sums, np.nan)[self.part], np.where(counts > 0, counts, np.nan)[self.part],
            )  # fmt: skip
        return self._sums[key]


@dataclass(frozen=True, slots=True)
class Law:
    """Quantity [n] that stays within `slack` of its observed range; `relative`: slack as a factor.

    `suspects` are the readings that may be wrong, `beside` those that must be known as well. A law of a
    `flag` is broken where its quantity is 1. `looks`: how often it must be broken. `load` [n]: what moves the
    quantity, too; beyond the loads in which the range was learned, the law learns anew. `mean`: key of the
    signal below whose mean takes part. Where that mean moved most, no suspect is accused. `alike`: its
    suspects move in proportion, so that the one that moved unlike the others is accused.
    """

    table: str
    name: str
    suspects: tuple[str, ...]
    beside: tuple[str, ...]
    quantity: Callable[[TableReadings], F64]
    words: str
    _: KW_ONLY
    slack: float = 0.5
    relative: bool = False
    flag: bool = False
    looks: float = 3.0
    load: Callable[[TableReadings], F64] | None = None
    mean: str = ""
    alike: bool = False

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}"

    @property
    def moving(self) -> tuple[str, ...]:
        """Return the readings of which one moved if the law breaks; none where there is no choice."""
        every = (*self.suspects, self.mean) if self.mean else self.suspects
        return every if len(every) > 1 else ()


def _flag(
    table: str, suspect: str, beside: tuple[str, ...], broken: Callable[[TableReadings], Bool], words: str
) -> Law:
    """Return a law that a state or a position violates by its reading."""
    name = f"{suspect}/flag"
    return Law(table, name, (suspect,), beside, lambda at: broken(at).astype(np.float64), words, flag=True)


def _ratio(above: F64, below: F64, least: float) -> F64:
    """Return a ratio; NaN where both values are small."""
    floor = np.maximum(np.abs(below), least)
    return np.where(np.fmax(np.abs(above), np.abs(below)) < least, np.nan, above / floor)


def _volts_and_amperes(at: TableReadings) -> F64:
    live = at["voltage_v"] > LEAST_V  # a feed that is lost carries nothing, and breaks no law
    return np.where(
        live, _ratio(at["voltage_v"] * at["current_a"], at["apparent_power_va"], LEAST_VA), np.nan
    )


def _flows(at: TableReadings, name: str, nominal: F64) -> Bool:
    out: Bool = at[name] > FLOWS_PU * nominal[at.part]
    return out


def _runs(at: TableReadings) -> Bool:
    pump = np.fmax(at["pump1_speed_pu"], np.nan_to_num(at["pump2_speed_pu"]))
    return _flows(at, "flow_lpm", at.topology.site.design.cdu_flow_lpm) & (pump > SOME_PU)


def _draws(at: TableReadings) -> Bool:
    out: Bool = at["power_w"] > CARRIES_PU * at.topology.site.design.rack_max_w[at.part]
    return out


def _energy(at: TableReadings) -> F64:
    return _ratio(at.rates["energy_mj"], at["power_w"], 50.0)


def _loop_share(at: TableReadings, above: bool) -> Bool:
    """Find loops whose plant draws more than the cooling of its racks needs, or nothing while its water
    flows."""
    sums_w = at.total("rack.power_w"), at.total("node.power_w")  # one of them may be of meters that lie
    if above:
        return at["power_w"] > LOOP_MOST_PU * np.fmax(*sums_w)
    moves = at["flow_lpm"] > FLOWS_PU * at.topology.site.design.loop_flow_lpm[at.part]
    out: Bool = moves & (at["power_w"] < LOOP_LEAST_PU * np.fmin(*sums_w))
    return out


_WORKS, _FLOWING = "while it works", "while coolant flows"
_ENERGY = "its energy and its power disagree"


def _within(load: F64, low: F32, high: F32) -> Bool:
    out: Bool = (load >= low / SEEN_PU) & (load <= high * SEEN_PU)
    return out


def _own_power(at: TableReadings) -> F64:
    return at["power_w"]


LAWS: tuple[Law, ...] = (
    _flag("gpu", "sm_active_pu", ("power_w",), lambda at: (
        at.busy() & (at["sm_active_pu"] < NONE_PU)
        & (np.fmax(at["tensor_active_pu"], at["util_pu"]) > SOME_PU)), _WORKS),
    _flag("gpu", "util_pu", ("power_w", "sm_active_pu"), lambda at: (
        at.busy() & (at["util_pu"] < NONE_PU) & (at["sm_active_pu"] > SOME_PU)), _WORKS),
    _flag("gpu", "sm_clock_hz", ("power_w", "sm_active_pu"), lambda at: (
        at.busy() & (at["sm_clock_hz"] < LEAST_CLOCK_HZ) & (at["sm_active_pu"] > SOME_PU)), _WORKS),
    _flag("gpu", "power_limit_w", (), lambda at: (
        at["power_limit_w"] > MOST_LIMIT_PU * at.topology.site.envelopes["gpu.power_cap_w"].high[at.part]),
        "above its maximum"),
    Law("gpu", "memory over chip", ("hbm_temp_c", "temp_c"), (),
        lambda at: at["hbm_temp_c"] - at["temp_c"], "its chip and its memory disagree", slack=12.0,
        load=_own_power),
    Law("gpu", "energy", ("energy_mj", "power_w"), (), _energy, _ENERGY, slack=3.0, relative=True,
        looks=6.0),
    Law("node", "supplies", ("psu1_power_w", "psu2_power_w", "power_w"), (),
        lambda at: _ratio(at["psu1_power_w"] + at["psu2_power_w"], at["power_w"], LEAST_NODE_W),
        "its supplies and its power disagree", slack=0.12, relative=True, alike=True),
    _flag("node", "cpu_power_w", ("power_w",), lambda at: (
        (at["power_w"] > LEAST_NODE_W) & (at["cpu_power_w"] < LEAST_CPU_W)), _WORKS),
    # The warming of its air follows work and fans, which no range of late bounds
    Law("node", "air", ("inlet_temp_c", "outlet_temp_c"), (),
        lambda at: np.minimum(at["outlet_temp_c"] - at["inlet_temp_c"], 0.0),
        "its air leaves colder than it enters", slack=12.0),
    Law("node", "inlet", ("inlet_temp_c",), (), lambda at: at["inlet_temp_c"], "air cannot change so fast",
        slack=15.0),
    Law("rack", "air", ("inlet_temp_c",), (), lambda at: at["inlet_temp_c"] - at.mean("node.inlet_temp_c"),
        "its nodes disagree", slack=10.0, mean="node.inlet_temp_c"),
    _flag("rack", "valve_pu", ("flow_lpm",), lambda at: (
        _flows(at, "flow_lpm", at.topology.site.design.rack_flow_lpm) & (at["valve_pu"] < SHUT_PU)),
        _FLOWING),
    _flag("rack", "liquid_isolation_state", ("flow_lpm",), lambda at: (
        _flows(at, "flow_lpm", at.topology.site.design.rack_flow_lpm)
        & (at["liquid_isolation_state"] == 1.0)),
        _FLOWING),
    _flag("rack", "electrical_isolation_state", ("power_w",), lambda at: (
        _draws(at) & (at["electrical_isolation_state"] == 1.0)), "while it draws power"),
    _flag("rack", "leak_sensor_fault_state", (), lambda at: at["leak_sensor_fault_state"] == 1.0,
          "it reports a fault of itself"),
    _flag("cdu", "running_state", ("flow_lpm", "pump1_speed_pu"), lambda at: (
        _runs(at) & (at["running_state"] == 0.0)), "while its pumps turn and its coolant flows"),
    _flag("cdu", "facility_valve1_pu", ("facility_flow_lpm",), lambda at: (
        _flows(at, "facility_flow_lpm", at.topology.site.design.cdu_flow_lpm)
        & (np.fmax(at["facility_valve1_pu"], at["facility_valve2_pu"]) < SHUT_PU)), "while its water flows"),
    Law("cdu", "pressures", ("supply_pressure_pa", "return_pressure_pa", "diff_pressure_pa"), (),
        lambda at: at["supply_pressure_pa"] - at["return_pressure_pa"] - at["diff_pressure_pa"],
        "its pressures disagree", slack=60e3),
    _flag("cdu", "supply_temp_setpoint_c", (), lambda at: (
        at["supply_temp_setpoint_c"] < LEAST_SET_C), "colder than any set point"),
    _flag("loop", "power_w", (), lambda at: _loop_share(at, True), "more than its racks need"),
    Law("loop", "rest", ("power_w",), ("flow_lpm",), lambda at: _loop_share(at, False).astype(np.float64),
        "while its water flows", flag=True),
    Law("feeder", "volts and amperes", ("voltage_v", "current_a", "apparent_power_va"), (),
        _volts_and_amperes, "its voltage, current and apparent power disagree", slack=0.3, relative=True),
    Law("feeder", "power factor", ("power_w", "apparent_power_va", "power_factor_pu"), (),
        lambda at: _ratio(np.abs(at["power_factor_pu"]) * at["apparent_power_va"], at["power_w"], LEAST_VA),
        "its power, apparent power and power factor disagree", slack=0.3, relative=True),
    _flag("feeder", "frequency_hz", ("voltage_v",), lambda at: (
        (at["voltage_v"] > LEAST_V) & (at["frequency_hz"] < LEAST_HZ)), "while it has voltage"),
    Law("feeder", "energy", ("energy_mj", "power_w"), (), _energy, _ENERGY, slack=3.0, relative=True,
        looks=6.0),
    Law("hall", "cold aisle", ("cold_aisle_temp_c",), (),
        lambda at: at["cold_aisle_temp_c"] - at.mean("rack.inlet_temp_c"), "its racks disagree", slack=10.0,
        mean="rack.inlet_temp_c"),
    Law("hall", "aisles", ("hot_aisle_temp_c", "cold_aisle_temp_c"), (),
        lambda at: at["hot_aisle_temp_c"] - at["cold_aisle_temp_c"], "its aisles disagree", slack=12.0,
        load=lambda at: at.total("rack.power_w")),
    _flag("hall", "cold_aisle_rh_pu", (), lambda at: at["cold_aisle_rh_pu"] < LEAST_RH_PU,
          "drier than hall air can be"),
)  # fmt: skip
SUSPECTS = {law.key: law.suspects for law in LAWS}


@dataclass(slots=True)
class Accusation:
    """A law that an entity violates, the suspected signal, and the evidence."""

    law: str
    table: str
    entity: int
    signal: str
    words: str
    kind: str = "sensor_biased"
    more: int = 0  # of the same signal that are not accused each

    @property
    def key(self) -> tuple[str, int]:
        return self.law, self.entity


class Contradictions(EntityState):
    """The learned ranges of all laws, and the present violations."""

    # Lowest and highest quantity, and looks that were off; negative as long as it learns [3, n]
    ranges: dict[str, F32] = keyed("f4", np.nan, lead=(3,))
    # Lowest and highest load of a range, and the smoothed load [3, n]
    loads: dict[str, F32] = keyed("f4", np.nan, lead=(3,))
    held: dict[str, F32] = keyed("f4", np.nan)  # each suspect of several, when it last kept the law
    heard_ns: dict[str, I64] = keyed("i8")
    total: dict[str, F64] = keyed("f8", np.nan)  # of counters, and when it was read first
    total_ns: dict[str, I64] = keyed("i8")
    wait_s: dict[str, F64] = keyed("f8", np.nan)  # for a counter to grow, the longest of late
    accused: dict[tuple[str, int], Accusation] = records(Accusation)

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology.sizes)
        self.topology = topology
        self.laws: dict[str, list[Law]] = {}
        for law in LAWS:
            if topology.sizes.get(law.table, 0):
                self.laws.setdefault(law.table, []).append(law)
        self._slices = {t: -(-topology.sizes[t] // SLICE) for t in self.laws}

    def causes(
        self,
        state: State,
        in_maintenance: Mapping[str, Bool],
        watch: SensorChecks | None = None,
        wrong: Set[tuple[str, str, int, str]] = frozenset(),
    ) -> list[Cause]:
        """Return the suspected sensors of one table, or of a part of a large one.

        `wrong`: sensors (kind, table, entity, signal) that are reported to be wrong: what breaks a law with
        them accuses no other, and of one that stands still or jumps it says nothing more.
        """
        for turn, (table, laws) in enumerate(self.laws.items()):
            parts, n = self._slices[table], self.topology.sizes[table]
            at, rest = (state.tick % parts, 0) if parts > 1 else (0, (state.tick + turn) % EVERY)
            if rest:
                continue
            part = slice(at * n // parts, (at + 1) * n // parts)
            with np.errstate(all="ignore"):
                look = TableReadings(state, self.topology, table, part, watch)
                self._look(look, laws, in_maintenance.get(table))
        return [
            Cause(a.kind, a.table, a.entity, a.signal, 0.95, (a.words,), 1, 0.0, CLEAR_S, more=a.more)
            for a in self.accused.values()
            if a.kind != "sensor_biased"
            or not any(
                (kind, a.table, a.entity, name) in wrong
                for name in SUSPECTS[a.law]
                for kind in (WRONG if name == a.signal else (*WRONG, a.kind))
            )
        ]

    def _look(self, look: TableReadings, laws: Iterable[Law], in_maintenance: Bool | None) -> None:
        news: dict[tuple[int, ...], Bool] = {}  # by the groups of messages that a law needs
        for law in laws:
            signals = [TABLES[law.table].by_name[name] for name in (*law.suspects, *law.beside)]
            gauges = [s for s in signals if s.kind != "counter"]
            if any(look.column.bad_count[s.row] == look.column.n for s in gauges):
                continue
            for s in signals:
                if s.kind == "counter":
                    look.rates[s.name] = self._rate(look, s.name)
            rows = {look.column.freshness.row_of(s) for s in signals}
            groups = tuple(sorted({int(look.column.partition.group_of_row[row]) for row in rows}))
            if groups not in news:
                news[groups] = self._new(look, groups, in_maintenance)
            quantity = law.quantity(look)
            new = news[groups] & np.isfinite(quantity)
            for s in gauges:
                if look.column.bad_count[s.row]:
                    new &= np.isfinite(look[s.name])
            if law.load is not None:
                new = self._at_load(law, look.part, law.load(look), new)
            self._judge(look, law, quantity, new)

    def _new(self, look: TableReadings, groups: tuple[int, ...], in_maintenance: Bool | None) -> Bool:
        """Return the entities all of whose messages of these groups arrived together since the last look
        [k]."""
        key = f"{look.table}.{'.'.join(map(str, groups))}"
        if key not in self.heard_ns:
            self.heard_ns[key] = np.zeros(look.column.n, np.int64)
        received_ns = [look.column.t_ns[group, look.part] for group in groups]
        first_ns = received_ns[0] if len(received_ns) == 1 else np.minimum.reduce(received_ns)
        known = self.heard_ns[key][look.part]
        new: Bool = first_ns > known
        if len(received_ns) > 1:
            new &= np.maximum.reduce(received_ns) - first_ns <= TOGETHER_NS
        np.maximum(known, first_ns, out=known)
        return new if in_maintenance is None else new & ~in_maintenance[look.part]

    def _rate(self, look: TableReadings, name: str) -> F64:
        """Return the growth of a counter per second, in thousandths of its unit [k].

        A source may repeat a total that it reads more seldom than it is asked. So the growth counts from the
        last total that differed. Without growth it is NaN, and 0 after `STALLS` times the usual wait.
        """
        column, key = look.column, f"{look.table}.{name}"
        signal, n = TABLES[look.table].by_name[name], self.topology.sizes[look.table]
        total = self.total.setdefault(key, np.full(n, np.nan))[look.part]
        total_ns = self.total_ns.setdefault(key, np.zeros(n, np.int64))[look.part]
        wait_s = self.wait_s.setdefault(key, np.full(n, np.nan))[look.part]
        now, now_ns = (
            column.total[signal.row, look.part].astype(np.float64),
            column.received_ns(signal)[look.part],
        )
        span_s, moved = (now_ns - total_ns) / NS, now != total
        grown = moved & (span_s > 0.0) & np.isfinite(total)
        rate = np.where(grown & (span_s <= COUNTED_S), (now - total) / span_s / 1e3, np.nan)
        rate[~moved & (span_s > STALLS * wait_s)] = 0.0
        late = np.where(wait_s > span_s, wait_s + FORGETS_WAIT * (span_s - wait_s), span_s)
        np.copyto(wait_s, late, where=grown)
        np.copyto(total, now, where=moved)
        np.copyto(total_ns, now_ns, where=moved)
        return rate

    def _at_load(self, law: Law, part: slice, load: F64, new: Bool) -> Bool:
        """Entities whose load is known and steady: fans and metal follow a step late. A load that was not
        seen before begins their learning anew."""
        if law.key not in self.loads:
            self.loads[law.key] = np.full((3, self.topology.sizes[law.table]), np.nan, np.float32)
        low, high, late = self.loads[law.key][:, part]
        new, load = new & np.isfinite(load), np.maximum(load, LEAST_LOAD_W)
        parts = self._slices[law.table]
        share = 1.0 - (1.0 - SETTLES) ** (parts / EVERY if parts > 1 else 1.0)
        late[new] = np.where(np.isnan(late), load, late + share * (load - late))[new]
        steady = new & _within(load, late, late)
        beyond = steady & ~_within(load, low, high)
        if beyond.any():
            np.fmin(low, load, out=low, where=beyond, casting="unsafe")
            np.fmax(high, load, out=high, where=beyond, casting="unsafe")
            if law.key in self.ranges:
                self.ranges[law.key][2, part][beyond] = -LEARNS
        return steady

    def _judge(self, look: TableReadings, law: Law, quantity: F64, new: Bool) -> None:
        """Count who is outside of its range, and move the ranges of the others."""
        if law.key not in self.ranges:
            self.ranges[law.key] = np.full((3, self.topology.sizes[law.table]), np.nan, np.float32)
            self.ranges[law.key][2] = -LEARNS
        low, high, count = self.ranges[law.key][:, look.part]
        if law.flag and not count.any() and not quantity.any():
            return  # as nearly always
        if np.isnan(count).any():
            count[np.isnan(count)] = -LEARNS  # of a device that was replaced
        q, learns = quantity.astype(np.float32), new & (count < 0.0)
        if learns.any():
            np.fmin(low, q, out=low, where=learns)
            np.fmax(high, q, out=high, where=learns)
            count[learns] = np.minimum(count[learns] + 1.0, 0.0)
            new = new & ~learns
        slack = np.float32(law.slack)
        above = q > (high * (1 + slack) if law.relative else high + slack)
        if not law.flag:
            above |= q < (low / (1 + slack) if law.relative else low - slack)
        off = new & above
        odd = bool(off.any())
        if odd or count.max(initial=0.0) > 0.0:
            count += np.where(off, 1.0, np.where(new & (count > 0.0), -FADES, 0.0)).astype(np.float32)
            np.clip(count, -LEARNS, 2.0 * law.looks, out=count)
            np.copyto(count, 0.0, where=(count < 0.0) & new)
        if not law.flag:
            kept = (new | learns) & ~off
            np.copyto(low, low + np.where(q < low, WIDENS, FORGETS) * (q - low), where=kept, casting="unsafe")
            np.copyto(
                high, high + np.where(q > high, WIDENS, FORGETS) * (q - high), where=kept, casting="unsafe"
            )
            self._hold(look, law, kept)
        broken = count >= law.looks
        if odd or self.accused:
            self._accuse(look, law, broken, off)

    def _hold(self, look: TableReadings, law: Law, kept: Bool) -> None:
        """Keep the readings of several as they were when they kept the law."""
        for name in law.moving:
            value = look.moved(name)
            held = self._last_values(law, name)[look.part]
            np.copyto(held, value, where=kept, casting="unsafe")

    def _last_values(self, law: Law, suspect: str) -> F32:
        key = f"{law.key}/{suspect}"
        if key not in self.held:
            self.held[key] = np.full(self.topology.sizes[law.table], np.nan, np.float32)
        return self.held[key]

    def _accuse(self, look: TableReadings, law: Law, broken: Bool, off: Bool) -> None:
        """Update the violations of a law in this part."""
        begin = look.part.start
        for law_key, entity in list(self.accused):
            inside = law_key == law.key and begin <= entity < look.part.stop
            if inside and not broken[entity - begin]:
                del self.accused[law_key, entity]
        at = np.flatnonzero(broken & off)
        suspects = self._suspects(look, law, at)
        first: dict[str, Accusation] = {}
        for k, suspect in zip(at[:NAMED].tolist(), suspects, strict=False):
            odd, kind = self._odd(look, law, k)
            if (name := odd or suspect) != law.mean:
                words = self._words(look, law, name, kind, k)
                accusation = Accusation(law.key, law.table, begin + k, name, words, kind)
                self.accused[accusation.key] = accusation
                first.setdefault(name, accusation)
        for k, suspect in zip(at[NAMED:].tolist(), suspects[NAMED:], strict=True):
            if suspect in first and (law.key, begin + k) not in self.accused:
                first[suspect].more += 1

    @staticmethod
    def _odd(look: TableReadings, law: Law, k: int) -> tuple[str, str]:
        """Return the suspect that stands still or jumps, "" for none, and the kind of the fault."""
        for kind, is_odd in (("sensor_frozen", look.is_frozen), ("sensor_spiking", look.is_jumping)):
            for name in law.suspects:
                if is_odd(name, k):
                    return name, kind
        return "", "sensor_biased"

    def _suspects(self, look: TableReadings, law: Law, at: I64) -> list[str]:
        """Return of each of these the reading with the largest change since the law held."""
        if not law.moving:
            return [law.suspects[0]] * len(at)
        changes = np.empty((len(law.moving), len(at)))
        for change, name in zip(changes, law.moving, strict=True):
            value = np.asarray(look.moved(name), np.float64)[at]
            held = np.asarray(self._last_values(law, name)[look.part], np.float64)[at]
            change[:] = value - held
            if not name.endswith("temp_c"):
                change[:] = np.log(np.maximum(np.abs(value), 1e-3) / np.maximum(np.abs(held), 1e-3))
            if law.alike:
                change[(value == 0.0) & (held == 0.0)] = np.nan  # a supply that is off moves with nothing
        if law.alike:
            known = np.isfinite(changes).all(axis=0)
            changes[:, known] -= np.median(changes[:, known], axis=0)
        moved = np.nan_to_num(np.abs(changes), nan=-1.0)
        return [law.moving[i] for i in np.argmax(moved, axis=0).tolist()]

    @staticmethod
    def _words(look: TableReadings, law: Law, suspect: str, kind: str, k: int) -> str:
        if kind == "sensor_spiking":
            return f"it jumps beyond its noise: {law.words}"
        if suspect in look.rates:
            grows = amount(f"{law.table}.power_w", float(look.rates[suspect][k]))
            return f"it grows by {grows}: {law.words}"
        reads = amount(f"{law.table}.{suspect}", float(look[suspect][k]))
        return f"it {'stands still at' if kind == 'sensor_frozen' else 'reads'} {reads}: {law.words}"
