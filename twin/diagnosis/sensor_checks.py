"""Sensor checks: finds sensors that are stuck or jump, each by its own usual behaviour.

Every meter of a physical quantity has noise: one that repeats its last digit far longer than it ever did
stands still. A jump is a reading far from both of its neighbours, farther than these are from each other: a
step that lasts is none, although what steps may swing back some of the way. These checks do not find *wrong*
readings: only relations to other meters can. Gauges of all small tables lie side by side in one bank:
learning costs a few calls for all cells, and rare tests run only on the few that may be odd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from twin import kernels
from twin.catalogue import F32, F64, I32, I64, TABLES, Bool
from twin.diagnosis.alarm_budget import AlarmBudget, rare_count, run_log, widening
from twin.diagnosis.deviations import NewReadings
from twin.telemetry import GOOD, OWN, EntityState, Sizes, State, column, part

# Gauges that a healthy device reports on and on, and whose last digit moves.
WATCHED: dict[str, tuple[str, ...]] = {
    "gpu": ("power_w", "temp_c", "hbm_temp_c", "sm_clock_hz"),
    "node": ("power_w", "cpu_power_w", "inlet_temp_c", "outlet_temp_c", "psu1_power_w", "psu2_power_w"),
    "rack": ("power_w", "supply_temp_c", "return_temp_c", "flow_lpm", "diff_pressure_pa", "valve_pu",
             "inlet_temp_c"),
    "cdu": ("supply_temp_c", "return_temp_c", "flow_lpm", "supply_pressure_pa", "return_pressure_pa",
            "diff_pressure_pa", "filter_diff_pressure_pa", "facility_supply_temp_c",
            "facility_return_temp_c", "facility_flow_lpm", "facility_supply_pressure_pa",
            "facility_return_pressure_pa", "facility_valve1_pu", "facility_valve2_pu", "pump1_speed_pu",
            "pump2_speed_pu"),
    "hall": ("cold_aisle_temp_c", "hot_aisle_temp_c"),
    "loop": ("supply_temp_c", "return_temp_c", "flow_lpm"),
    "feeder": ("power_w", "voltage_v", "current_a", "apparent_power_va"),
    "site": ("outdoor_temp_c", "outdoor_wet_bulb_c"),
}  # fmt: skip
# Positions and settings without noise: they may stand still, and move when the process does.
NOISELESS = ("valve_pu", "facility_valve1_pu", "facility_valve2_pu", "pump1_speed_pu", "pump2_speed_pu")
# Read in such coarse steps that they often repeat themselves: only comparisons show that they stand still.
COARSE = ("sm_clock_hz", "temp_c", "hbm_temp_c", "inlet_temp_c", "outlet_temp_c", "cpu_power_w")
# Temperatures that leap with the power of their GPU follow its work: memory is warm as long as it is read
FOLLOWS = {"gpu": {"temp_c": "power_w", "hbm_temp_c": "power_w"}}
# Fewest readings without a change; others 12. Meters of idle devices often repeat themselves.
RUN_LEAST = {"gpu": 100, "node": 60, "site": 12}
RUN_LEAST_OTHERS = 12
# Of a GPU's temperature in whole degrees: readings and usual changes missed, as multiples of -ln of the
# chance to err. In the middle of a step it repeats itself twelve times in thirteen; source: estimate
COARSE_RUN, COARSE_MOVES, COARSE_LIVELY = 12.5, 1.67, 0.15
# Noise of a gauge that is read in steps, by the share of its changes that are of another size than the change
# before: chance that a reading in the middle of a step is as the one before. One whose changes are all of one
# size may rest there for ever. source: simulated Gaussian noise of 0 to 5 steps
VARIED = (0.0, 0.02, 0.05, 0.11, 0.17, 0.32, 0.50, 0.70, 0.80)
RESTS = (1.0, 0.954, 0.904, 0.79, 0.683, 0.525, 0.383, 0.197, 0.0)
OTHER_SIZE = 0.25  # a change of another size differs by this share of it
# Below, the noise of a meter, a share of its reading, drowns in its last digit: of powers by table, of
# currents in steps of 0.1 A, and of flows in steps of 0.1 l/min; source: estimate
LEAST_POWER_W = {"gpu": 150.0, "node": 500.0, "rack": 5000.0, "feeder": 5000.0}
LEAST_CURRENT_A, LEAST_FLOW_LPM = 50.0, 25.0
USUAL_PER_READING = 0.01  # how fast the usual share of changes is learned
CELLS = 12_288  # of a table that are looked at in one tick
JUMP_SCALES = 6.0  # a jump is so many times the usual one (root mean square)
FAR_BACK = 1e15  # keeps squares finite
JUMPS_KEPT = 0.96  # far ones are counted among about the last 25 readings
# Share of the readings of a healthy gauge that leap so far where no work makes them; source: estimate, as
# simulated healthy plants had none in 3.4 million readings
LEAP_PU = 2.5e-5
LEAP_MEAN = LEAP_PU / (1.0 - JUMPS_KEPT)  # of the count
# Degrees of freedom that a reading gives the mean square of leaps there and back; source: simulated noise
FREEDOM = 0.34
LEAST_JUMPS = 1.5  # one alone is none
# A jump is at least this large: in kelvin, or as a share of the value for anything else.
LEAST_JUMP_K, LEAST_JUMP_GPU_K, LEAST_JUMP_PU = 1.0, 3.0, 0.04
LIVELY = 0.5  # share of changes from which standing still is odd in itself
STILL = 4.0  # so many times as long without a change as usual
NEVER = 2**30
MOST_REPEATS = 0.999  # one that repeats itself more often is never called frozen for that alone
SETTLED = 100  # readings from which USUAL_PER_READING is the larger share
# By number of readings: a mean square of jumps from few readings may be larger
WIDENING = widening(SETTLED, LEAP_PU, FREEDOM).astype(np.float32)


class CheckLogs(NamedTuple):
    """-ln of the chances that a test calls a healthy gauge frozen, or jumping."""

    frozen: float = 20.0
    spiking: float = 20.0


USUAL_LOGS = CheckLogs()


def traits_of(table: str, logs: CheckLogs = USUAL_LOGS) -> dict[str, Any]:
    """Return the test limits of each watched gauge of a table, by name [k]."""
    names = WATCHED[table]
    warm = np.array([name.endswith("temp_c") for name in names])
    # The air and the CPUs of a node follow its work, its supplies the feeds: they may jump
    rough = (*COARSE, "psu1_power_w", "psu2_power_w") if table == "node" else ()
    fine = np.array([name not in (*COARSE, *NOISELESS) for name in names])
    coarse = np.array([table == "gpu" and name == "temp_c" for name in names])
    power_w = LEAST_POWER_W.get(table, 0.0)
    least = {"w": power_w, "va": power_w, "a": LEAST_CURRENT_A, "lpm": LEAST_FLOW_LPM}
    drowned = [least.get(name.rpartition("_")[2], -np.inf) for name in names]
    leaders = [FOLLOWS.get(table, {}).get(name, name) for name in names]
    run_least = RUN_LEAST.get(table, RUN_LEAST_OTHERS)
    coarse_run = round(COARSE_RUN * logs.frozen)
    least_k = LEAST_JUMP_GPU_K if table == "gpu" else LEAST_JUMP_K
    return {
        "least_k": np.where(warm, least_k, 0.0).astype(np.float32),
        "least_pu": np.where(warm, 0.0, LEAST_JUMP_PU).astype(np.float32),
        "noisy": np.array([name not in (*NOISELESS, *rough) for name in names]),
        "coarse": coarse,
        "leader": np.array([names.index(leader) - k for k, leader in enumerate(leaders)], np.int64),
        "least": np.array(drowned, np.float32),
        "run_log": np.full(len(names), logs.frozen, np.float32),
        "run_least": np.full(len(names), run_least, np.int32),
        "least_run": np.where(fine, run_least, np.where(coarse, coarse_run, NEVER)).astype(np.int32),
        "jumps": np.full(len(names), max(rare_count(logs.spiking, LEAP_MEAN), LEAST_JUMPS), np.float32),
    }


class GaugeState(EntityState):
    """The learned usual behaviour of gauges [k, n], and the suspect ones."""

    last: F32 = column(OWN, "f4", np.nan, lead=("k",))
    before: F32 = column(OWN, "f4", np.nan, lead=("k",))
    run: I32 = column(OWN, "i4", lead=("k",))  # readings without a change
    moves: F32 = column(OWN, "f4", 1.0, lead=("k",))  # usual share of readings that change
    count: I32 = column(OWN, "i4", lead=("k",))
    change: F32 = column(OWN, "f4", lead=("k",))  # size of the last one
    varied: F32 = column(OWN, "f4", lead=("k",))  # usual share of changes that are of another size
    jump: F32 = column(OWN, "f4", lead=("k",))  # mean square of leaps there and back
    jumps: F32 = column(OWN, "f4", lead=("k",))  # far ones among about the last 25
    frozen: Bool = column(OWN, "?", lead=("k",))
    jumping: Bool = column(OWN, "?", lead=("k",))


class Bank(GaugeState):
    """Monitored gauges side by side: arrays [k, n]; a tick updates a part of the columns.

    `traits` [k], or [n] where all lies in one row (k = 1): the limits of the tests, see `traits_of`.
    """

    def __init__(self, k: int, n: int, traits: dict[str, Any], flat: bool) -> None:
        super().__init__({"k": k, "cell": n}, "cell")
        self.n, self.traits, self.flat = n, traits, flat
        self.settled = set[int]()  # begins of parts all of whose cells have been read often
        self.calm = set[int]()  # begins of parts in which no jump counts
        self.odd = False
        shape = (1, -1) if flat else (-1, 1)
        self._jumps = traits["jumps"].reshape(shape) if traits else np.zeros((1, n))
        # Cells from a gauge to the one that it follows; 0: none
        self._lead = traits["leader"] if traits else np.zeros(0, np.int64)
        if not flat:
            self._lead = self._lead * n
        self._at = np.zeros((2, 0), np.int64)

    def refresh(self) -> None:
        """Refresh the views after a write to the arrays from outside."""
        self.settled.clear()
        self.calm.clear()
        self._refresh()

    def _refresh(self) -> None:
        self.odd = bool(self.frozen.any() or self.jumping.any())

    def update(self, value: F32, new: Bool | None, part: slice) -> None:
        """Take in values [k, w] of a part of the columns where they are new; None: everywhere."""
        if self._at.shape[1] < value.size:
            self._at = np.empty((2, value.size), np.int64)
        count, settled = self.count[:, part], part.start in self.settled
        if not settled and count.min() >= SETTLED:  # before counting, as after a restart
            settled = True
            self.settled.add(part.start)
        still, leapt = kernels.watch_gauges(
            value,
            new,
            self.last[:, part],
            self.before[:, part],
            self.run[:, part],
            self.moves[:, part],
            count,
            self.jump[:, part],
            self.frozen[:, part],
            self.change[:, part],
            self.varied[:, part],
            self.traits["least_run"],
            self.traits["least_k"],
            self.traits["least_pu"],
            self.traits["noisy"],
            WIDENING,
            settled,
            self.odd,
            USUAL_PER_READING,
            STILL,
            JUMP_SCALES**2,
            FAR_BACK,
            OTHER_SIZE,
            self._at[0],
            self._at[1],
        )
        if still:
            self._freeze(value, new, *self._cells(self._at[0, :still], value.shape[1], part))
        if leapt or part.start not in self.calm:
            self._count_jumps(new, self._cells(self._at[1, :leapt], value.shape[1], part)[1], part)
        if not settled:
            count += 1 if new is None else new
        if self.odd:
            self._refresh()

    def _cells(self, at: I64, w: int, part: slice) -> tuple[I64, I64]:
        """Return positions within a part of w columns, and within the whole bank."""
        return at, at if w == self.n else at + (at // w) * (self.n - w) + part.start

    def _led(self, far: I64) -> Bool:
        """Return the jumping cells whose reference signal jumped with them."""
        lead = self._lead[far if self.flat else far // self.n]
        now, then = (column.reshape(-1)[far + lead] for column in (self.last, self.before))
        moved: Bool = np.abs(now - then) > LEAST_JUMP_PU * np.maximum(np.abs(now), np.abs(then))
        led: Bool = (lead != 0) & moved
        return led

    def _trait(self, name: str, cells: I64) -> np.ndarray:
        trait: np.ndarray = self.traits[name][cells if self.flat else cells // self.n]
        return trait

    def _freeze(self, value: F32, new: Bool | None, at: I64, cells: I64) -> None:
        """Return the standing cells that never stood so long before."""
        if new is not None:
            some = new.reshape(-1)[at]
            at, cells = at[some], cells[some]
        run = self.run.reshape(-1)[cells]
        moves, here = self.moves.reshape(-1)[cells], value.reshape(-1)[at]
        log, count = self._trait("run_log", cells), self.count.reshape(-1)[cells]
        repeats = _repeats(run, moves, count, self.varied.reshape(-1)[cells])
        usual = np.where(repeats < MOST_REPEATS, log / -np.log(np.minimum(repeats, MOST_REPEATS)), NEVER)
        odd = run >= np.maximum(self._trait("run_least", cells), usual)
        odd &= (here != 0.0) & (here >= self._trait("least", cells)) & (moves > LIVELY)
        coarse = (run >= log * np.maximum(COARSE_RUN, COARSE_MOVES / moves)) & (moves > COARSE_LIVELY)
        odd = np.where(self._trait("coarse", cells), coarse, odd)
        self.frozen.reshape(-1)[cells[odd]] = True
        self.odd |= bool(odd.any())

    def _count_jumps(self, new: Bool | None, far: I64, part: slice) -> None:
        """Count jumps among about the last 25 readings: `far` cells of the bank have just leapt."""
        jumps, jumping = self.jumps[:, part], self.jumping[:, part]
        before = np.nonzero(jumps)
        read = before if new is None else tuple(axis[new[before]] for axis in before)
        jumps[read] *= np.float32(JUMPS_KEPT)
        far = far[~self._led(far)]
        self.jumps.reshape(-1)[far] += 1.0
        left = jumps[read]
        left[left < 0.05] = 0.0
        jumps[read] = left
        at = np.nonzero(jumps) if len(far) else before
        if new is not None:
            at = tuple(axis[new[at]] for axis in at)
        limit = np.broadcast_to(self._jumps[:, part] if self.flat else self._jumps, jumps.shape)
        jumping[at] = jumps[at] >= limit[at]
        self.odd = bool(self.frozen.any() or self.jumping.any())
        (self.calm.discard if len(far) or jumps[before].any() else self.calm.add)(part.start)


def _repeats(run: I32, moves: F32, count: I32, varied: F32) -> F64:
    """Return the chance that a healthy gauge repeats its last reading, by its changes and noise in steps."""
    # Moves of a gauge before it stood still may have been luck, or the edge of a step
    before = np.where(count < SETTLED, np.maximum(count - run, 0), SETTLED)
    repeats = 1.0 - moves + 1.0 / (before + 1.0)
    return np.asarray(np.maximum(repeats, np.interp(varied, VARIED, RESTS)), np.float64)


class Meters(GaugeState):
    """The monitored gauges of a table: arrays [k, n], views of a bank's."""

    def __init__(self, table: str, n: int, bank: Bank, begin: int, logs: CheckLogs) -> None:
        self.table, self.n, self.names, self.bank, self.logs = table, n, WATCHED[table], bank, logs
        k = len(self.names)
        super().__init__({"k": k, table: n}, table)
        self.rows = np.array([TABLES[table].by_name[name].row for name in self.names], np.int32)
        self.cells = slice(begin, begin + k * n)  # of a flat bank
        self.parts = 1 if bank.flat else -(-n * k // CELLS)
        for name in bank.declared:
            whole = getattr(bank, name)
            setattr(self, name, whole[0, self.cells].reshape(k, n) if bank.flat else whole)
        self.anything = False
        self._known, self._groups = b"", list[tuple[int, Any]]()

    def groups(self, state: State) -> list[tuple[int, Any]]:
        """Return the signals that are read together: a row of them, and their places here."""
        of_row = state.tables[self.table].partition.group_of_row
        if (known := of_row.tobytes()) != self._known:
            mine = of_row[self.rows]
            self._known, self._groups = known, []
            for group in sorted(set(mine.tolist())):
                at = np.flatnonzero(mine == group)
                which = slice(None) if len(at) == len(mine) else at
                self._groups.append((int(self.rows[at[0]]), which))
        return self._groups

    def fresh(self, state: State, readings: NewReadings, part: slice, out: Bool) -> Bool | None:
        """Return the cells with a good new reading [k, w], written in `out`; None: all cells."""
        column, every = state.tables[self.table], True
        for row, which in self.groups(state):
            new, _ = readings.fresh(state, self.table, row)
            every &= new is None
            out[which] = True if new is None else new[part]
        if column.bad_count[self.rows].any():
            out &= column.quality[self.rows, part] == GOOD
            return out
        return None if every else out

    def settle(self, in_maintenance: Bool | None) -> None:
        """Update after new readings; returns True if a gauge is suspect. Gauges under maintenance are not."""
        odd = self.bank.odd
        if odd and in_maintenance is not None:
            self.frozen[:, in_maintenance], self.jumping[:, in_maintenance] = False, False
        self.anything = odd and bool(self.frozen.any() or self.jumping.any())

    def derive(self) -> None:
        """The bank's columns were written through the views."""
        self.bank.refresh()
        self.anything = bool(self.frozen.any() or self.jumping.any())

    def index(self, name: str) -> int:
        return self.names.index(name)

    def last_of(self, name: str) -> F32:
        """Return the last readings of a gauge [n]; NaN without one."""
        return np.asarray(self.last[self.index(name)])

    def surprise(self, k: int, entity: int) -> float:
        """-ln of the chance that a healthy gauge stands still for as long as it has. In steps that hide its
        noise it may for ever; but the whole degrees of a GPU follow its work: the changes that it missed.
        """
        run, moves = self.run[k, entity], self.moves[k, entity]
        if self.table == "gpu" and self.names[k] == "temp_c":
            return float(run * moves)
        repeats = float(_repeats(run, moves, self.count[k, entity], self.varied[k, entity]))
        return float(-run * np.log(min(repeats, 1.0)))


class SensorChecks(EntityState):
    """The meters of all tables."""

    meters: dict[str, Meters] = part()

    def __init__(self, sizes: Sizes, budget: AlarmBudget) -> None:
        super().__init__({t: sizes[t] for t in WATCHED if sizes.get(t, 0)})
        self.budget, self.logs = budget, _logs(self.sizes, budget)
        small = [t for t, n in self.sizes.items() if n * len(WATCHED[t]) <= CELLS]
        each = [{k: np.repeat(v, sizes[t]) for k, v in traits_of(t, self.logs[t]).items()} for t in small]
        for t, traits in zip(small, each, strict=True):
            traits["leader"] *= sizes[t]
        traits = {k: np.concatenate([e[k] for e in each]) for k in (each[0] if each else ())}
        cells = sum(sizes[t] * len(WATCHED[t]) for t in small)
        flat = Bank(1, cells, traits, True)
        self._value, self._new = np.zeros((1, cells), np.float32), np.zeros((1, cells), np.bool_)
        self.meters: dict[str, Meters] = {}
        begin = 0
        for t, n in self.sizes.items():
            k = len(WATCHED[t])
            bank = flat if t in small else Bank(k, n, traits_of(t, self.logs[t]), False)
            self.meters[t] = Meters(t, n, bank, begin, self.logs[t])
            begin += k * n * (t in small)
        self.flat = flat

    def update(self, state: State, readings: NewReadings, in_maintenance: dict[str, Bool]) -> None:
        """Take in the readings of this tick; of a large table a part."""
        counts: dict[str, int] = {}
        for table, meters in self.meters.items():
            counts[table] = sum(readings.fresh(state, table, row)[1] for row, _ in meters.groups(state))
        with np.errstate(all="ignore"):
            self._side_by_side(state, readings, counts)
            for table, meters in self.meters.items():
                if not meters.bank.flat and counts[table]:
                    self._part(meters, state, readings)
        for table, meters in self.meters.items():
            if counts[table]:
                meters.settle(in_maintenance.get(table))

    def stands(self, key: str) -> bool:
        """Return True if a gauge of this signal, such as `node.power_w`, stands still."""
        table, _, name = key.partition(".")
        meters = self.meters.get(table)
        return meters is not None and meters.anything and bool(meters.frozen[meters.index(name)].any())

    def _side_by_side(self, state: State, readings: NewReadings, counts: dict[str, int]) -> None:
        """Update all small tables at once."""
        every, some = True, False
        for table, m in self.meters.items():
            if not m.bank.flat:
                continue
            new = self._new[0, m.cells].reshape(-1, m.n)
            if not counts[table]:
                new.fill(False)
                every = False
                continue
            some = True
            every &= m.fresh(state, readings, slice(0, m.n), new) is None
            value = self._value[0, m.cells].reshape(-1, m.n)
            np.take(state.tables[table].value, m.rows, axis=0, out=value, mode="clip")
        if some:
            self.flat.update(self._value, None if every else self._new, slice(0, self.flat.n))

    @staticmethod
    def _part(m: Meters, state: State, readings: NewReadings) -> None:
        """Update a part of a large table."""
        at = state.tick % m.parts
        part = slice(at * m.n // m.parts, (at + 1) * m.n // m.parts)
        new = m.fresh(state, readings, part, np.empty((len(m.rows), part.stop - part.start), np.bool_))
        if new is None or new.any():
            m.bank.update(state.tables[m.table].value[m.rows, part], new, part)

    def __getstate__(self) -> tuple[Sizes, AlarmBudget, dict[str, Any]]:
        """Return the state for a copy: separately copied pieces of a bank would no longer share its
        arrays."""
        return self.sizes, self.budget, self.dump()

    def __setstate__(self, known: tuple[Sizes, AlarmBudget, dict[str, Any]]) -> None:
        self.__init__(*known[:2])  # type: ignore[misc]
        self.restore(known[2])


def _logs(sizes: Sizes, budget: AlarmBudget) -> dict[str, CheckLogs]:
    """Return the chances of the tests of each table, by the number of gauges and of tests."""
    periods_s = {t: min(budget.period_s(t, name) for name in WATCHED[t]) for t in sizes}
    frozen = spiking = 0.0
    for table, n in sizes.items():
        traits = traits_of(table)
        frozen += n * periods_s[table] * np.count_nonzero(traits["least_run"] < NEVER)
        spiking += n * periods_s[table] * np.count_nonzero(traits["noisy"])
    return {
        table: CheckLogs(
            run_log(budget.chance("frozen", frozen, period_s)),
            run_log(budget.chance("spiking", spiking, period_s)),
        )
        for table, period_s in periods_s.items()
    }
