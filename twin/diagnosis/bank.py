"""Meter bank: the usual noise and jumps of many meters, learned side by side, and the meters that stand still
or jump.

Learning costs a few calls for all cells; rare tests run only on the few cells that may be odd.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.catalogue import F32, I32, I64, Bool
from twin.telemetry import OWN, EntityState, column

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
# A jump is at least this large: in kelvin, or as a share of the value for anything else.
LEAST_JUMP_K, LEAST_JUMP_GPU_K, LEAST_JUMP_PU = 1.0, 3.0, 0.04
LIVELY = 0.5  # share of changes from which standing still is odd in itself
STILL = 4.0  # so many times as long without a change as usual
NEVER = 2**30
SETTLED = 100  # readings from which USUAL_PER_READING is the larger share


def traits_of(table: str) -> dict[str, Any]:
    """Return the test limits of each watched gauge of a table, by name [k]."""
    names = WATCHED[table]
    warm = np.array([name.endswith("temp_c") for name in names])
    # The air and the CPUs of a node follow its work, its supplies the feeds: they may jump
    rough = (*COARSE, "psu1_power_w", "psu2_power_w") if table == "node" else ()
    fine = np.array([name not in (*COARSE, *NOISELESS) for name in names])
    coarse = np.array([table == "gpu" and name == "temp_c" for name in names])
    powers = np.array([name.endswith("power_w") for name in names])
    run_least = RUN_LEAST.get(table, RUN_LEAST_OTHERS)
    run_log, known = (RUN_LOG_SITE, KNOWN_SITE) if table == "site" else (RUN_LOG, KNOWN_READINGS)
    least_k = LEAST_JUMP_GPU_K if table == "gpu" else LEAST_JUMP_K
    return {
        "least_k": np.where(warm, least_k, 0.0).astype(np.float32),
        "least_pu": np.where(warm, 0.0, LEAST_JUMP_PU).astype(np.float32),
        "noisy": np.array([name not in (*NOISELESS, *rough) for name in names]),
        "coarse": coarse,
        "least_w": np.where(powers, LEAST_POWER_W.get(table, 0.0), -np.inf).astype(np.float32),
        "run_log": np.full(len(names), run_log, np.float32),
        "run_least": np.full(len(names), run_least, np.int32),
        "least_run": np.where(fine, run_least, np.where(coarse, COARSE_RUN, NEVER)).astype(np.int32),
        "known": np.full(len(names), known, np.int32),
    }


class GaugeState(EntityState):
    """The usual behaviour of gauges, as learned [k, n], and those that are odd now."""

    last: F32 = column(OWN, "f4", np.nan, lead=("k",))
    before: F32 = column(OWN, "f4", np.nan, lead=("k",))
    run: I32 = column(OWN, "i4", lead=("k",))  # readings without a change
    moves: F32 = column(OWN, "f4", 1.0, lead=("k",))  # usual share of readings that change
    count: I32 = column(OWN, "i4", lead=("k",))
    jump: F32 = column(OWN, "f4", lead=("k",))  # mean square of leaps there and back
    jumps: F32 = column(OWN, "f4", lead=("k",))  # far ones among about the last 25
    frozen: Bool = column(OWN, "?", lead=("k",))
    jumping: Bool = column(OWN, "?", lead=("k",))


class Bank(GaugeState):
    """Watched gauges side by side: arrays [k, n], of which a part of the columns is updated in a tick.

    `traits` [k], or [n] where all lies in one row (k = 1): the limits of the tests, see `traits_of`.
    """

    def __init__(self, k: int, n: int, traits: dict[str, Any], flat: bool) -> None:
        super().__init__({"k": k, "cell": n}, "cell")
        self.n, self.traits, self.flat = n, traits, flat
        self.settled = set[int]()  # begins of parts all of whose cells have been read often
        self.odd = self.any_jumps = False
        self._scratch: tuple[np.ndarray, ...] = ()
        self._stood = np.zeros(0)  # readings without a change, as a multiple of what is usual
        self._rate = np.zeros(0, np.float32)
        self._least_run = (
            traits["least_run"].reshape((1, -1) if flat else (-1, 1)) if traits else np.zeros((1, n))
        )

    def wake(self) -> None:
        """After its arrays were written from outside."""
        self.settled.clear()
        self._refresh()

    def _refresh(self) -> None:
        self.odd = bool(self.frozen.any() or self.jumping.any())
        self.any_jumps = bool(self.jumps.any())

    def update(self, value: F32, new: Bool | None, part: slice) -> None:
        """Take in values [k, w] of a part of the columns where they are new; None: everywhere."""
        if not self._scratch or self._scratch[0].shape != value.shape:
            self._scratch = tuple(np.empty(value.shape, kind) for kind in ("f4", "f4", "f4", "?"))
            self._stood, self._rate = np.empty(value.shape), np.empty(value.shape, np.float32)
        up, down, _, odd = self._scratch
        last, before = self.last[:, part], self.before[:, part]
        run, moves, count = self.run[:, part], self.moves[:, part], self.count[:, part]
        np.not_equal(value, last, out=odd)
        run += 1
        if new is not None:
            odd &= new
            run -= ~new  # no reading: it stays as it was
        np.copyto(run, 0, where=odd)
        rate: Any = np.float32(USUAL_PER_READING)
        settled = part.start in self.settled
        if not settled and count.min() >= SETTLED:  # asked before counting, as a restart has to ask it
            settled = True
            self.settled.add(part.start)
        if not settled:
            rate = np.add(count, 1, out=self._rate, dtype=np.float32, casting="unsafe")
            np.divide(np.float32(1.0), rate, out=rate)
            np.maximum(rate, np.float32(USUAL_PER_READING), out=rate)
        if new is not None:
            rate = np.multiply(rate, new, out=self._rate)
        # A share of changes learned while it stands still would make standing still usual.
        np.subtract(odd, moves, out=up)
        up *= rate
        stood = self._stood
        np.multiply(run, moves, out=stood)
        np.copyto(up, 0.0, where=np.greater_equal(stood, STILL, out=odd))
        moves += up
        if self.odd:
            np.copyto(self.frozen[:, part], False, where=True if new is None else new)
        np.greater_equal(run, self._least_run, out=odd)
        if odd.any():
            self._freeze(value, new, *self._cells(odd, part))
        # A jump: both steps, to the last reading and from it, go the same way
        np.subtract(last, before, out=up)
        np.subtract(last, value, out=down)
        self._leap(value, new, rate, part)
        if not settled:
            count += 1 if new is None else new
        if self.odd:
            self._refresh()
        where: Any = True if new is None else new
        np.copyto(before, last, where=where)
        np.copyto(last, value, where=where)

    def _cells(self, where: Bool, part: slice) -> tuple[I64, I64]:
        """Return the positions of the set cells within the part and within the whole bank."""
        at = where.reshape(-1).nonzero()[0]
        w = where.shape[1]
        return at, at if w == self.n else at + (at // w) * (self.n - w) + part.start

    def _trait(self, name: str, cells: I64) -> np.ndarray:
        trait: np.ndarray = self.traits[name][cells if self.flat else cells // self.n]
        return trait

    def _freeze(self, value: F32, new: Bool | None, at: I64, cells: I64) -> None:
        """Of some that stand still: which never did so long."""
        if new is not None:
            some = new.reshape(-1)[at]
            at, cells = at[some], cells[some]
        run = self.run.reshape(-1)[cells]
        moves, here = self.moves.reshape(-1)[cells], value.reshape(-1)[at]
        usual = self._trait("run_log", cells) / -np.log1p(-np.minimum(moves, np.float32(0.999)))
        odd = run >= np.maximum(self._trait("run_least", cells), usual)
        odd &= (here != 0.0) & (here >= self._trait("least_w", cells)) & (moves > LIVELY)
        coarse = (run >= np.maximum(COARSE_RUN, COARSE_MOVES / moves)) & (moves > COARSE_LIVELY)
        odd = np.where(self._trait("coarse", cells), coarse, odd)
        odd &= self.count.reshape(-1)[cells] >= self._trait("known", cells)
        self.frozen.reshape(-1)[cells[odd]] = True
        self.odd |= bool(odd.any())

    def _leap(self, value: F32, new: Bool | None, rate: Any, part: slice) -> None:
        """Learn how far readings usually leap and come back, and count those that leap farther."""
        up, down, back, odd = self._scratch
        np.minimum(up, down, out=back)
        np.maximum(up, down, out=up)
        np.negative(up, out=up)
        np.maximum(back, up, out=back)
        np.fmax(back, np.float32(0.0), out=back)
        if new is not None:
            back *= new
        np.minimum(back, FAR_BACK, out=back)
        jump = self.jump[:, part]
        np.multiply(back, back, out=up)
        np.multiply(jump, np.float32(JUMP_SCALES**2), out=down)
        at, cells = self._cells(np.greater(up, down, out=odd), part)
        far = cells[:0]
        if len(at):
            here = np.abs(value.reshape(-1)[at])
            least = self._trait("least_k", cells) + self._trait("least_pu", cells) * here
            some = (back.reshape(-1)[at] > least) & self._trait("noisy", cells)
            some &= self.count.reshape(-1)[cells] >= self._trait("known", cells)
            at, far = at[some], cells[some]
        up -= jump
        up *= rate
        up.reshape(-1)[at if len(far) else far] = 0.0
        jump += up
        if len(far) or self.any_jumps:
            jumps = self.jumps[:, part]
            where: Any = True if new is None else new
            np.multiply(jumps, np.float32(JUMPS_KEPT), out=jumps, where=where)
            self.jumps.reshape(-1)[far] += 1.0
            jumps[jumps < 0.05] = 0.0
            np.copyto(self.jumping[:, part], jumps >= JUMPS, where=where)
            self._refresh()
