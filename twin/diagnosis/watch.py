"""Sensors by themselves: which fell silent, stand still, or jump, judged by how each usually behaves.

Every meter of a physical quantity has noise: one that repeats its last digit far longer than it ever did
stands still. A jump is a reading far from both of its neighbours. Nothing here says what is right: that a
reading is *wrong* only its relations to others can say. May import frames and the state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.diagnosis.tracks import Readings
from twin.frame import F32, F64, I32, NS, Bool
from twin.signals import TABLES
from twin.state import GOOD, State

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
NOISELESS = (
    "valve_pu",
    "facility_valve1_pu",
    "facility_valve2_pu",
    "pump1_speed_pu",
    "pump2_speed_pu",
)
# Read in such coarse steps that they often repeat themselves: only comparisons tell that they stand still.
COARSE = ("sm_clock_hz", "temp_c", "hbm_temp_c", "inlet_temp_c", "outlet_temp_c", "cpu_power_w")
# Chance that a healthy sensor repeats itself so often is below e^-20; never fewer than this many readings.
RUN_LOG, RUN_LOG_SITE = 20.0, 12.0  # weather is told once a minute: there are fewer chances to err
RUN_LEAST = {"gpu": 100, "node": 60, "site": 12}  # others 12; meters of idle devices often repeat themselves
RUN_LEAST_OTHERS = 12
# Of a GPU's temperature in whole degrees, which in the middle of a step repeats itself nine times in ten
COARSE_RUN, COARSE_MOVES, COARSE_LIVELY = 300, 40.0, 0.15
# Below, the noise of a power meter, a share of its reading, drowns in its last digit; source: estimate
LEAST_POWER_W = {"gpu": 150.0, "node": 500.0, "rack": 5000.0, "feeder": 5000.0}
USUAL_PER_READING = 0.01  # how fast the usual share of changes is learned
KNOWN_READINGS, KNOWN_SITE = 30, 15  # before anything is called unusual
CELLS = 12_288  # of a table that are looked at in one tick
JUMP_SCALES = 6.0  # a jump is so many times the usual one (root mean square)
FAR_BACK = np.float32(1e15)  # keeps squares finite
JUMPS_KEPT, JUMPS = 0.96, 2.5  # so many among about the last 25
SILENT_PERIODS, SILENT_LEAST_S = 4.0, 6.0
# A jump is at least this large: in kelvin, or as a share of the value for anything else.
LEAST_JUMP_K, LEAST_JUMP_GPU_K, LEAST_JUMP_PU = 1.0, 3.0, 0.04
LIVELY = 0.5  # share of changes from which standing still is odd in itself
COLUMNS = ("last", "before", "run", "moves", "count", "jump", "jumps")


class Meters:
    """The watched gauges of a table: arrays [k, n]."""

    def __init__(self, table: str, n: int) -> None:
        spec = TABLES[table]
        self.table, self.n = table, n
        self.names = WATCHED[table]
        self.rows = np.array([spec.by_name[name].row for name in self.names], np.int32)
        k = len(self.rows)
        self.last, self.before = np.full((k, n), np.nan, np.float32), np.full((k, n), np.nan, np.float32)
        self.run, self.count = np.zeros((k, n), np.int32), np.zeros((k, n), np.int32)
        self.moves, self.jump = np.ones((k, n), np.float32), np.zeros((k, n), np.float32)
        self.jumps = np.zeros((k, n), np.float32)
        self.period_s = np.full(k, np.nan)  # between readings, as learned
        self.heard_s = 0.0
        self.silent: Bool = np.zeros((k, n), np.bool_)
        self.frozen: Bool = np.zeros((k, n), np.bool_)
        self.jumping: Bool = np.zeros((k, n), np.bool_)
        warm = np.array([name.endswith("temp_c") for name in self.names])[:, None]
        least_k = LEAST_JUMP_GPU_K if table == "gpu" else LEAST_JUMP_K
        self.least_k = np.where(warm, least_k, 0.0).astype(np.float32)
        self.least_pu = np.where(warm, 0.0, LEAST_JUMP_PU).astype(np.float32)
        # The air and the CPUs of a node follow its work, its supplies the feeds: they may jump
        rough = (*COARSE, "psu1_power_w", "psu2_power_w") if table == "node" else ()
        self.noisy = np.array([name not in (*NOISELESS, *rough) for name in self.names])[:, None]
        fine = np.array([name not in COARSE for name in self.names])[:, None]
        self.fine = fine & np.array([name not in NOISELESS for name in self.names])[:, None]
        powers = np.array([name.endswith("power_w") for name in self.names])[:, None]
        self.least_w = np.where(powers, LEAST_POWER_W.get(table, 0.0), -np.inf).astype(np.float32)
        self.run_log, self.known = (
            (RUN_LOG_SITE, KNOWN_SITE) if table == "site" else (RUN_LOG, KNOWN_READINGS)
        )
        self.run_least = RUN_LEAST.get(table, RUN_LEAST_OTHERS)
        self.anything = self.any_silent = False

    def update(self, state: State, readings: Readings, spared: Bool | None, dt_s: float) -> None:
        """Take in the readings of this tick; of a large table a part."""
        column = state.tables[self.table]
        parts = max(1, -(-self.n * len(self.rows) // CELLS))
        at = state.tick % parts
        part = slice(at * self.n // parts, (at + 1) * self.n // parts)
        new = np.ones((len(self.rows), part.stop - part.start), np.bool_)
        share = np.empty(len(self.rows))
        for k, row in enumerate(self.rows.tolist()):
            fresh = readings.fresh(state, self.table, row)
            share[k] = 1.0
            if fresh is not None:
                new[k] = fresh[part]
                share[k] = np.count_nonzero(fresh) / self.n
        self._silence(state, share, spared, dt_s)
        self.anything |= self.any_silent
        if any(column.bad_count[row] for row in self.rows.tolist()):
            new &= column.quality[self.rows, part] == GOOD
        if not new.any():
            return
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            self._behaviour(column.value[self.rows, part], new, part)
        if spared is not None:
            self.frozen[:, spared], self.jumping[:, spared] = False, False
        odd = self.frozen[:, part].any() or self.jumping[:, part].any()
        if odd or self.anything:
            odd = odd or self.frozen.any() or self.jumping.any()
        self.anything = bool(odd or self.any_silent)

    def _behaviour(self, value: F32, new: Bool, part: slice) -> None:
        last, before = self.last[:, part], self.before[:, part]
        run, count, moves = self.run[:, part], self.count[:, part], self.moves[:, part]
        same = value == last
        run += 1
        run *= same | ~new
        run -= ~new  # no reading: it stays as it was
        # A share of changes learned while it stands still would make standing still usual.
        rate = np.maximum(USUAL_PER_READING, 1.0 / (count + 1.0)).astype(np.float32)
        rate *= new
        moves += rate * (run * moves < 4.0) * (~same - moves)
        known = new & (count >= self.known)
        frozen = self.frozen[:, part]
        if frozen.any() or run.max(initial=0) >= self.run_least:
            need = np.maximum(self.run_least, self.run_log / -np.log1p(-np.minimum(moves, 0.999)))
            odd = (
                known
                & (value != 0.0)
                & (value >= self.least_w)
                & (moves > LIVELY)
                & self.fine
                & (run >= need)
            )
            if self.table == "gpu":
                k = self.index("temp_c")
                long_run = run[k] >= np.maximum(COARSE_RUN, COARSE_MOVES / moves[k])
                odd[k] = known[k] & (moves[k] > COARSE_LIVELY) & long_run
            np.copyto(frozen, odd, where=new)
        up, down = last - before, last - value
        back = np.where(up * down > 0.0, np.minimum(np.abs(up), np.abs(down)), np.float32(0.0))
        back[~new] = 0.0
        least = self.least_k + self.least_pu * np.abs(value)
        far = known & (back > least) & (back * back > JUMP_SCALES**2 * self.jump[:, part]) & self.noisy
        jump, jumps = self.jump[:, part], self.jumps[:, part]
        rate *= ~far
        jump += rate * (np.minimum(back, FAR_BACK) ** 2 - jump)
        if far.any() or self.jumps.any():
            jumps *= np.where(new, np.float32(JUMPS_KEPT), np.float32(1.0))
            jumps += far
            jumps[jumps < 0.05] = 0.0
            self.jumping[:, part] = jumps >= JUMPS
        count += new
        np.copyto(before, last, where=new)
        np.copyto(last, value, where=new)

    def _silence(self, state: State, share: F64, spared: Bool | None, dt_s: float) -> None:
        column = state.tables[self.table]
        self.heard_s = min(self.heard_s + dt_s, 1e6)
        rate = max(0.01, min(1.0, dt_s / self.heard_s))
        per_s = share / dt_s
        known = np.isfinite(self.period_s)
        usual = np.where(known, 1.0 / np.where(known, self.period_s, 1.0), per_s)
        usual += rate * (per_s - usual)
        with np.errstate(divide="ignore"):
            self.period_s = 1.0 / usual
        some, oldest = False, dict[int, int]()
        for k, row in enumerate(self.rows.tolist()):
            if not np.isfinite(self.period_s[k]):
                continue
            group = int(column.partition.group_of_row[row])
            if group not in oldest:
                oldest[group] = int(column.t_ns[group].min(initial=state.now_ns))
            late_ns = state.now_ns - round(max(SILENT_PERIODS * self.period_s[k] + 2.0, SILENT_LEAST_S) * NS)
            t_ns = column.t_ns[group]
            if not column.bad_count[row] and oldest[group] >= late_ns:
                if self.any_silent:
                    self.silent[k] = False
                continue
            since = np.where(column.quality[row] == GOOD, t_ns, column.good_ns[row])
            silent = (since > 0) & (since < late_ns) & np.isfinite(column.value[row])
            if spared is not None:
                silent &= ~spared
            self.silent[k] = silent
            some |= bool(silent.any())
        self.any_silent = some

    def forget(self, entity: int) -> None:
        """Another device sits in this slot."""
        fresh = Meters(self.table, 1)
        for name in COLUMNS:
            getattr(self, name)[:, entity] = getattr(fresh, name)[:, 0]

    def index(self, name: str) -> int:
        return self.names.index(name)


class Watch:
    """The meters of all tables."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.meters = {t: Meters(t, sizes[t]) for t in WATCHED if sizes.get(t, 0)}

    def update(self, state: State, readings: Readings, spared: dict[str, Bool], dt_s: float) -> None:
        """Take in a tick."""
        for table, meters in self.meters.items():
            meters.update(state, readings, spared.get(table), dt_s)

    def forget(self, table: str, entity: int) -> None:
        if table in self.meters:
            self.meters[table].forget(entity)

    def remapped(self, old_of_new: dict[str, I32], sizes: dict[str, int]) -> Watch:
        """What was learned of each meter, for a changed site."""
        out = Watch(sizes)
        for table, meters in out.meters.items():
            old, source = self.meters.get(table), old_of_new.get(table)
            if old is None or source is None:
                continue
            kept = np.flatnonzero(source >= 0)
            for name in COLUMNS:
                getattr(meters, name)[:, kept] = getattr(old, name)[:, source[kept]]
            meters.period_s, meters.heard_s = old.period_s.copy(), old.heard_s
        return out

    def dump(self) -> dict[str, Any]:
        """Everything learned."""
        kept = (*COLUMNS, "period_s", "heard_s", "silent", "frozen", "jumping")
        return {t: {name: getattr(m, name) for name in kept} for t, m in self.meters.items()}

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        for table, held in data.items():
            meters = self.meters.get(table)
            if meters is None or np.shape(held["last"]) != meters.last.shape:
                continue
            for name, value in held.items():
                setattr(meters, name, float(value) if name == "heard_s" else np.array(value))
            meters.any_silent = bool(meters.silent.any())
            meters.anything = bool(meters.any_silent or meters.frozen.any() or meters.jumping.any())
