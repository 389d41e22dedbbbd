"""GPU estimator: expected power, temperature and clock beside the readings, and the learned parameters of
each GPU.

All are compared in every tick; learning takes its turn over parts of them, so that a tick of a hundred
thousand GPUs stays cheap.
"""

from __future__ import annotations

import numpy as np

from twin import kernels
from twin.catalogue import F64, I64, Bool
from twin.contracts import Residual, confidence_of
from twin.estimation.gpu_power import CAP_MOVE_PU, MOVE_PU, GpuPower
from twin.estimation.gpu_temp import LAG, OFFSET, RESISTANCE, GpuTemp
from twin.estimation.noise import ResidualNoise
from twin.estimation.parameter import (
    ASKED_SIGMAS,
    KNOWN_SIGMAS,
    MOVE_S,
    NOISE_AFTER_MOVES,
    Parameter,
    moves_left_s,
    parts_of,
)
from twin.estimation.readings import Readings, filled
from twin.site import Site
from twin.telemetry import EntityState, OldOfNew, column, part, scalar

PART = 10_001  # GPUs that learn in one tick, at most: the rest have their turn in the next ones
CLOCK_NOISE_PU = 0.01  # floor: DCGM's step of 15 MHz; source: estimate
HOT_K = 4.0  # below the slowdown temperature, from here on heat may lower a clock; source: estimate
# A drift below these shares is within the error of the model; source: estimate.
RESISTANCE_DRIFT_PU, IDLE_DRIFT_PU, DYNAMIC_DRIFT_PU = 0.02, 0.03, 0.015
POWER, TEMP, CLOCK = "gpu.power_w", "gpu.temp_c", "gpu.sm_clock_hz"


class GpuEstimator(EntityState):
    """Residuals and learned parameters of the GPUs of a site."""

    clock_sigma: F64 = column("gpu", "f8", np.nan)
    taught_ns: I64 = column("gpu", "i8", lead=(2,))  # newest reading of power and temperature taken in
    elapsed_s: F64 = column("part", "f8")
    since_s: F64 = column("part", "f8")
    moves: I64 = column("part", "i8")
    turn: int = scalar(0)
    _heard: bool = scalar(False)
    power: GpuPower = part()
    temp: GpuTemp = part()
    clock_noise: ResidualNoise = part()

    def __init__(self, site: Site) -> None:
        n = self.n = site.sizes["gpu"]
        self.parts = parts_of(n, PART)
        super().__init__({"gpu": n, "part": len(self.parts)})
        self.site = site
        self.power, self.temp = GpuPower(site), GpuTemp(site)
        self.clock_noise = ResidualNoise(n, np.full(n, CLOCK_NOISE_PU), "gpu")
        self.hot_c = site.design.gpu_slowdown_c[site.rack_of_gpu] - HOT_K
        self.residuals: dict[str, Residual] = {}
        self._scratch = np.empty(n, np.int64)
        self._parameters: dict[str, Parameter] | None = None  # parameters, until something moves

    def update(self, readings: Readings, dt_s: float, touched: Bool | None = None) -> dict[str, Residual]:
        """Compare all GPUs, then learn from a part, except GPUs that are `touched` [n]."""
        if not self.n:
            return {}
        self._heard = self._heard or any(
            readings.known("gpu", k) for k in ("power_w", "temp_c", "sm_active_pu", "util_pu")
        )
        if not self._heard:
            return self._unknown()
        self.elapsed_s += dt_s
        self.since_s += dt_s
        part = self.turn % len(self.parts)
        self.turn += 1
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if self.since_s[part] >= MOVE_S:
                self._move(part)
            measured = [readings.good("gpu", k) for k in ("power_w", "temp_c", "sm_clock_hz")]
            self._compare(readings, measured, dt_s)
            self._learn(part, readings, measured, touched)
        self.elapsed_s[part] = 0.0
        return self.residuals

    def _unknown(self) -> dict[str, Residual]:
        none = np.full(self.n, np.nan)
        return {k: Residual(k, none, none, none) for k in (POWER, TEMP, CLOCK)}

    def learning_left(self, name: str) -> tuple[F64, I64]:
        """See `Estimator.learning_left`."""
        wait_s = moves_left_s(self.parts, self.moves, self.since_s)
        noise = {POWER: self.power.noise, TEMP: self.temp.noise, CLOCK: self.clock_noise}[name]
        return wait_s, noise.readings_left()

    def _move(self, part: int) -> None:
        rows = self.parts[part]
        if part == 0:
            self.power.refresh_pool()
            self.temp.refresh_pool(self.power.group, self.power.n_group)
        self.power.move(rows, self.taught_ns[0, rows])
        self.temp.move(rows, self.taught_ns[1, rows])
        for reference, in_use, share in (
            (
                self.temp.reference,
                self.temp.set.in_use[RESISTANCE : RESISTANCE + 1, rows],
                np.array([[RESISTANCE_DRIFT_PU]]),
            ),
            (self.power.reference, self._power_values(rows), np.array([[IDLE_DRIFT_PU], [DYNAMIC_DRIFT_PU]])),
        ):
            early = reference.value[:, rows]
            sigma = np.sqrt(reference.sigma[:, rows] ** 2 + (share * early) ** 2)
            reference.confidence[:, rows] = confidence_of(in_use - early, sigma)
        self.since_s[part] = 0.0
        self.moves[part] += 1
        self._parameters = None

    def _power_values(self, rows: slice) -> F64:
        in_use = self.power.set.in_use
        return np.stack([in_use[0, rows], in_use[1:4, rows].sum(axis=0)])

    def _compare(self, readings: Readings, measured: list[tuple[F64, I64]], dt_s: float) -> None:
        power, temp = self.power, self.temp
        before = power.expected
        power.expected = power.expect(readings)
        temp.expected = temp.drive(readings, *measured[0], dt_s)
        clock = power.expect_clock(readings, measured[1][0], self.hot_c)
        doubt = temp.doubt()
        doubt += temp.sigma
        # Rare: only deviating GPUs need the uncertainty of their parameters at the present load
        sigma, capped = power.sigma + power.leak_doubt_w(), power.capped
        # A cap that was moved and the power under it are not of one instant
        sigma[capped] += (CAP_MOVE_PU - MOVE_PU) * filled(np.abs(power.expected[capped] - before[capped]))
        moved, given = np.empty(self.n), (power.expected, before, sigma, measured[0][0])
        at = self._scratch[: kernels.doubt_moves(*given, MOVE_PU, ASKED_SIGMAS, moved, self._scratch)].copy()
        moved[at] = np.hypot(moved[at], power.parameter_sigma(at))
        at = self._off(measured[1][0], temp.expected, doubt)
        doubt[at] = np.hypot(doubt[at], temp.parameter_sigma(at))
        expected = temp.expected
        if not temp.all_liquid:
            temp.share_air(at, measured[1][0])
            expected = expected + temp.common_k
            doubt += temp.common_doubt()
        compared = (
            (POWER, power.expected, moved),
            (TEMP, expected, doubt),
            (CLOCK, clock, self.clock_sigma * clock + power.clock_doubt_hz),
        )
        self.residuals = {}
        for (name, expected, sigma), (value, _) in zip(compared, measured, strict=True):
            self.residuals[name] = Residual(name, expected, value, sigma)

    def _off(self, measured: F64, expected: F64, sigma: F64) -> I64:
        """Return the GPUs whose reading deviates by more than ASKED_SIGMAS."""
        found = kernels.far_off(measured, expected, sigma, ASKED_SIGMAS, self._scratch)
        return self._scratch[:found].copy()

    def _learn(
        self, part: int, readings: Readings, measured: list[tuple[F64, I64]], touched: Bool | None
    ) -> None:
        rows, dt_s = self.parts[part], float(self.elapsed_s[part])
        settled = self.moves[part] >= NOISE_AFTER_MOVES
        free = None if touched is None else ~touched[rows]
        fresh = []
        for k in (0, 1):
            read_ns = measured[k][1][rows]
            new = read_ns > self.taught_ns[k, rows]
            self.taught_ns[k, rows] = read_ns
            fresh.append(new if free is None else new & free)
        (power_w, power_ns), (temp_c, temp_ns), (_, clock_ns) = measured
        self.power.learn(rows, readings, power_w, power_ns, fresh[0], dt_s)
        self.temp.learn(rows, temp_c, temp_ns, fresh[1], dt_s)
        if not settled:
            return
        for name, noise, sigma, new, received_ns in (
            (POWER, self.power.noise, self.power.sigma, fresh[0], power_ns),
            (TEMP, self.temp.noise, self.temp.sigma, fresh[1], temp_ns),
            (CLOCK, self.clock_noise, self.clock_sigma, fresh[0], clock_ns),
        ):
            residual = self.residuals[name]
            off, expected = np.empty(len(new)), residual.expected[rows]
            kernels.unaccounted(residual.measured[rows], expected, self._accounted(name, rows), new, off)
            if name == CLOCK:
                off /= expected
            noise.learn(off, received_ns[rows], dt_s, rows)
            sigma[rows] = noise.sigma(rows)

    def _accounted(self, name: str, rows: slice) -> F64:
        """Return the part [m] of a difference that is no noise: a model's movement or uncertainty explains
        it."""
        if name == CLOCK:
            return self.power.clock_doubt_hz[rows]
        if name == POWER:
            return KNOWN_SIGMAS * self.power.unknown_w[rows] + self.power.leak_doubt_w(rows)
        temp = self.temp
        return KNOWN_SIGMAS * temp.unknown_k[rows] + temp.doubt(rows) + temp.common_doubt(rows)

    def parameters(self) -> dict[str, Parameter]:
        """Return the learned parameters of each GPU [n], as now in use; to be read only."""
        if self._parameters is None:
            self._parameters = self._collect()
        return self._parameters

    def _collect(self) -> dict[str, Parameter]:
        temp, power = self.temp, self.power
        resistance = temp.set.in_use[RESISTANCE]
        with np.errstate(invalid="ignore", divide="ignore"):
            lag_pu = 1.0 + temp.set.in_use[LAG] / resistance
            tau_s = temp.trays.spread(temp.tau_s) * lag_pu
        none = np.full(self.n, np.nan)
        value = self._power_values(slice(None))
        out = [
            Parameter(
                "gpu.resistance",
                "gpu",
                resistance,
                temp.reference.value[0],
                temp.reference.sigma[0],
                temp.reference.confidence[0],
            ),
            Parameter("gpu.offset_k", "gpu", temp.set.in_use[OFFSET], none, none, none),
            Parameter("gpu.tau_s", "gpu", tau_s, none, none, none),
            Parameter("gpu.exponent", "gpu", power.set.in_use[4], none, np.sqrt(power.gamma_var), none),
        ]
        for k, name in enumerate(("gpu.idle_w", "gpu.dynamic_w")):
            reference = power.reference
            out.append(
                Parameter(
                    name, "gpu", value[k], reference.value[k], reference.sigma[k], reference.confidence[k]
                )
            )
        return {p.name: p for p in out}

    def derive(self) -> None:
        """Collect the parameters again."""
        self._parameters = None

    def adopt(self, old: GpuEstimator, old_of_new: OldOfNew) -> None:
        """Take over the learned state of another site; nothing without the places of its GPUs."""
        if "gpu" in old_of_new and "node" in old_of_new:
            super().adopt(old, old_of_new)
            self.turn, self.moves[:] = 0, int(old.moves.min(initial=0))
