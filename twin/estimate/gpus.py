"""GPUs: expected power, temperature and clock beside what they report, and what is learned of each.

All are compared in every tick; learning takes its turn over parts of them, so that a tick of a hundred
thousand GPUs stays cheap. May import the models of power and temperature, noise, parameters, readings,
contracts and the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.confidence import Residual
from twin.estimate.gpu_power import MOVE_PU, GpuPower
from twin.estimate.gpu_temp import LAG, RESISTANCE, GpuTemp
from twin.estimate.noise import Noise, confidence_of
from twin.estimate.parameter import MOVE_S, Parameter, parts_of
from twin.estimate.reading import Readings
from twin.frame import F64, I32, I64, Bool
from twin.site import Site

PART = 10_001  # GPUs that learn in one tick, at most: the rest have their turn in the next ones
NOISE_AFTER_MOVES = 3  # of what was learned, before differences are called noise
CLOCK_NOISE_PU = 0.01  # floor: DCGM's step of 15 MHz; source: estimate
HOT_K = 4.0  # below the slowdown temperature, from here on heat may lower a clock; source: estimate
# A drift below these shares is not told from the weather of a model; source: estimate.
RESISTANCE_DRIFT_PU, IDLE_DRIFT_PU, DYNAMIC_DRIFT_PU = 0.02, 0.03, 0.015
POWER, TEMP, CLOCK = "gpu.power_w", "gpu.temp_c", "gpu.sm_clock_hz"


class GpuEstimator:
    """Residuals and learned parameters of the GPUs of a site."""

    def __init__(self, site: Site) -> None:
        self.site, self.n = site, site.sizes["gpu"]
        n = self.n
        self.power, self.temp = GpuPower(site), GpuTemp(site)
        self.clock_noise = Noise(n, np.full(n, CLOCK_NOISE_PU))
        self.clock_sigma = np.full(n, np.nan)
        self.hot_c = site.design.gpu_slowdown_c[site.rack_of_gpu] - HOT_K
        self.taught_ns = np.zeros((2, n), np.int64)  # newest reading of power and temperature taken in
        self.parts = parts_of(n, PART)
        count = len(self.parts)
        self.turn = 0
        self.elapsed_s, self.since_s = np.zeros(count), np.zeros(count)
        self.moves = np.zeros(count, np.int64)
        self.residuals: dict[str, Residual] = {}
        self._heard = False
        self._told: dict[str, Parameter] | None = None  # parameters, until something moves

    def update(self, readings: Readings, dt_s: float, touched: Bool | None = None) -> dict[str, Residual]:
        """Compare all, then learn from a part; nothing of GPUs that are `touched` [n]."""
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

    def _move(self, part: int) -> None:
        rows = self.parts[part]
        if part == 0:
            self.power.refresh_pool()
            self.temp.refresh_pool(self.power.group, self.power.n_group)
        self.power.move(rows)
        self.temp.move(rows)
        for reference, in_use, share in (
            (self.temp.reference, self.temp.set.in_use[RESISTANCE : RESISTANCE + 1, rows],
             np.array([[RESISTANCE_DRIFT_PU]])),
            (self.power.reference, self._power_values(rows), np.array([[IDLE_DRIFT_PU], [DYNAMIC_DRIFT_PU]])),
        ):  # fmt: skip
            early = reference.value[:, rows]
            sigma = np.sqrt(reference.sigma[:, rows] ** 2 + (share * early) ** 2)
            reference.confidence[:, rows] = confidence_of(in_use - early, sigma)
        self.since_s[part] = 0.0
        self.moves[part] += 1
        self._told = None

    def _power_values(self, rows: slice) -> F64:
        in_use = self.power.set.in_use
        return np.stack([in_use[0, rows], in_use[1:4, rows].sum(axis=0)])

    def _compare(self, readings: Readings, measured: list[tuple[F64, I64]], dt_s: float) -> None:
        power, temp = self.power, self.temp
        before = power.expected
        power.expected = power.expect(readings)
        temp.expected = temp.drive(readings, measured[0][0], dt_s)
        hot = measured[1][0] >= self.hot_c
        clock = power.expect_clock(readings, hot)
        moved = np.abs(power.expected - before)
        np.copyto(moved, 0.0, where=~np.isfinite(moved))
        moved *= MOVE_PU
        moved += power.sigma
        doubt = temp.doubt()
        doubt += temp.sigma
        found = ((POWER, power.expected, moved), (TEMP, temp.expected, doubt),
                 (CLOCK, clock, self.clock_sigma * clock))  # fmt: skip
        self.residuals = {}
        for (name, expected, sigma), (value, _) in zip(found, measured, strict=True):
            self.residuals[name] = Residual(name, expected, value, sigma)

    def _learn(
        self, part: int, readings: Readings, measured: list[tuple[F64, I64]], touched: Bool | None
    ) -> None:
        rows, dt_s = self.parts[part], float(self.elapsed_s[part])
        settled = self.moves[part] >= NOISE_AFTER_MOVES
        free = None if touched is None else ~touched[rows]
        fresh = []
        for k in (0, 1):
            heard = measured[k][1][rows]
            new = heard > self.taught_ns[k, rows]
            self.taught_ns[k, rows] = heard
            fresh.append(new if free is None else new & free)
        (power_w, power_ns), (temp_c, temp_ns), (_, clock_ns) = measured
        self.power.learn(rows, readings, power_w, power_ns, fresh[0], dt_s)
        self.temp.learn(rows, temp_c, temp_ns, fresh[1], dt_s)
        if not settled:
            return
        for name, noise, sigma, new, heard_ns in (
            (POWER, self.power.noise, self.power.sigma, fresh[0], power_ns),
            (TEMP, self.temp.noise, self.temp.sigma, fresh[1], temp_ns),
            (CLOCK, self.clock_noise, self.clock_sigma, fresh[0], clock_ns),
        ):
            residual = self.residuals[name]
            off = residual.measured[rows] - residual.expected[rows]
            if name == CLOCK:
                off = off / residual.expected[rows]
            elif name == TEMP:  # what the model's movement accounts for is no noise
                doubt = self.temp.doubt()[rows]
                off = np.sign(off) * np.maximum(np.abs(off) - doubt, 0.0)
            noise.learn(np.where(new, off, np.nan), heard_ns[rows], dt_s, rows)
            sigma[rows] = noise.sigma(rows)

    def parameters(self) -> dict[str, Parameter]:
        """What is learned of each GPU [n], as now in use; to be read only."""
        if self._told is None:
            self._told = self._tell()
        return self._told

    def _tell(self) -> dict[str, Parameter]:
        temp, power = self.temp, self.power
        resistance = temp.set.in_use[RESISTANCE]
        with np.errstate(invalid="ignore", divide="ignore"):
            lag_pu = 1.0 + temp.set.in_use[LAG] / resistance
            tau_s = temp.trays.spread(temp.tau_s) * lag_pu
        none = np.full(self.n, np.nan)
        value = self._power_values(slice(None))
        out = [
            Parameter("gpu.resistance", "gpu", resistance, temp.reference.value[0],
                      temp.reference.sigma[0], temp.reference.confidence[0]),
            Parameter("gpu.tau_s", "gpu", tau_s, none, none, none),
            Parameter("gpu.exponent", "gpu", power.set.in_use[4], none, np.sqrt(power.gamma_var), none),
        ]  # fmt: skip
        for k, name in enumerate(("gpu.idle_w", "gpu.dynamic_w")):
            reference = power.reference
            out.append(Parameter(name, "gpu", value[k], reference.value[k], reference.sigma[k],
                                 reference.confidence[k]))  # fmt: skip
        return {p.name: p for p in out}

    def forget(self, entity: int) -> None:
        """Another GPU sits in this slot: what was learned of the old one is not true of it."""
        self.power.reset(entity)
        self.temp.reset(entity)
        self.clock_noise.forget(entity)
        self._told = None
        self.clock_sigma[entity] = np.nan
        self.taught_ns[:, entity] = 0

    def remapped(self, site: Site, old_of_new: Mapping[str, I32]) -> GpuEstimator:
        """What was learned, for a changed site; nothing where it is not said where GPUs were."""
        out = GpuEstimator(site)
        if "gpu" not in old_of_new or "node" not in old_of_new:
            return out
        kept = np.flatnonzero(old_of_new["gpu"] >= 0)
        nodes = np.flatnonzero(old_of_new["node"] >= 0)
        source = old_of_new["gpu"][kept]
        out.power.adopt(self.power, kept, source)
        out.temp.adopt(self.temp, kept, source, (nodes, old_of_new["node"][nodes]))
        out.clock_noise.adopt(self.clock_noise, kept, source)
        out.clock_sigma[kept] = self.clock_sigma[source]
        out.taught_ns[:, kept] = self.taught_ns[:, source]
        out._heard, out._told = self._heard, None
        out.moves[:] = int(self.moves.min(initial=0))
        return out

    def dump(self) -> dict[str, Any]:
        """Everything learned, for a snapshot or a checksum."""
        return {
            "power": self.power.dump(), "temp": self.temp.dump(), "clock_noise": self.clock_noise.dump(),
            "clock_sigma": self.clock_sigma, "taught_ns": self.taught_ns, "turn": self.turn,
            "elapsed_s": self.elapsed_s, "since_s": self.since_s, "moves": self.moves, "heard": self._heard,
        }  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.power.restore(data["power"])
        self.temp.restore(data["temp"])
        self.clock_noise.restore(data["clock_noise"])
        for name in ("clock_sigma", "taught_ns", "elapsed_s", "since_s", "moves"):
            setattr(self, name, np.array(data[name]))
        self.turn, self._heard, self._told = int(data["turn"]), bool(data["heard"]), None
