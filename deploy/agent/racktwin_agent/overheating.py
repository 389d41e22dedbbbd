"""Overheating: detects GPUs that warm up as only plates without flow do, or that slow down because of heat.

Seen by the agent alone. C dT/dt = P - q: where a plate still cools, more heat leaves the warmer it is, and a
load that steps up has settled long before the guard. Before the guard, it would settle at T + tau dT/dt: what
would settle beyond its shutdown has lost its flow. One sensor that lies moves nothing: it takes two witnesses
of GPUs that rise, GPUs that their hardware slows down for heat (which one that rises may be as well), and
coolant at the inlet that rises. Pure: samples and time are passed in. Imports the agent's clock and devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from racktwin_agent.clock import NS, Instant
from racktwin_agent.devices import HW_THERMAL, INLET, Column, Sample

SAMPLES = 3  # of a rise that is a trigger
MOST_SAMPLES = 8  # of the rise from which the time to the shutdown is estimated
LEAST_S, MOST_S = 0.9, 5.0  # between two of them: sensors have whole kelvins; a gap begins anew
# source: estimate: without flow a plate warms by 4-8 K/s at full power and near 1 K/s at the lowest cap; one
# with flow, within 5 K of where it settles, by less than 1 K/s
RATE_K_PER_S = 1.0
TAU_S = 5.0  # the shortest time constant of a cold plate with flow; source: estimate, 5-9 s
# Coolant at the inlet, over MOST_SAMPLES: a set point moves by less than 0.1 K/s, a loop without flow warms
# by 0.8 to 1.7
INLET_K_PER_S = 0.4  # source: estimate, between the two
RESOLUTION_K = 1.0  # of the sensor, source: NVML, whole degrees
LEAST_RISE_K = 2.0  # below, it may be the resolution
WITNESSES = 2
COOLER_K = 5.0  # so far below the guard it is over
UNREAD_S = 60.0  # so long a GPU that was hot and cannot be read counts as hot; then it is dead
MARGIN_K = 2.0  # below the temperature of the shutdown: errors of the sensor, and what it rises meanwhile
# Until the first GPU shuts itself down; source: as the policy thermal_guard has them
STOP_LEAD_S, OFF_LEAD_S = 45.0, 8.0
UNKNOWN = -inf


@dataclass(slots=True)
class Overheating:
    """Temperatures of the last seconds. `evidence` explains why GPUs overheat, or is ""."""

    guard_c: float
    evidence: str = ""
    _samples: list[tuple[int, Column]] = field(default_factory=list)  # since boot, temperatures
    _inlet: list[float] = field(default_factory=list)  # of the same samples
    _shutdown_c: Column = field(default_factory=list)
    _hot: dict[int, int] = field(default_factory=dict)  # GPUs that began it: last read as hot, since boot

    def take(self, sample: Sample, at: Instant) -> None:
        """Add a sample, and evaluate it."""
        temps = sample.gpu.get("temp_c", [])
        if self._samples:
            gap_s = (at.boot_ns - self._samples[-1][0]) / NS
            if gap_s < LEAST_S:
                return
            if gap_s > MOST_S or len(temps) != len(self._samples[-1][1]):
                self.restart()
        self._samples = [*self._samples[1 - MOST_SAMPLES :], (at.boot_ns, temps)]
        self._inlet = [*self._inlet[1 - MOST_SAMPLES :], _number(sample.node.get(INLET, []), 0)]
        self._shutdown_c = sample.shutdown_c
        bits = sample.gpu.get("clock_event_bits", [])
        slowed = {
            i
            for i, bit in enumerate(bits)
            if int(bit or 0) & HW_THERMAL and _number(temps, i) >= self.guard_c
        }
        surging = self._surging()
        rising = {i: rate for i, rate in self._rising(SAMPLES).items() if rate >= RATE_K_PER_S} | surging
        hot = rising.keys() | slowed
        if hot and len(rising) + len(slowed) + self._inlet_rises() >= WITNESSES:
            self._hot |= dict.fromkeys(hot, at.boot_ns)
            self.evidence = self._words(rising, slowed)
        cooler_c = self.guard_c - COOLER_K
        for gpu, hot_ns in list(self._hot.items()):
            temp_c = _number(temps, gpu)
            if temp_c >= cooler_c or gpu in surging:
                self._hot[gpu] = at.boot_ns
            elif temp_c > UNKNOWN or at.boot_ns - hot_ns > UNREAD_S * NS:
                del self._hot[gpu]
        self.evidence = self.evidence if self._hot else ""

    def _words(self, rising: dict[int, float], slowed: set[int]) -> str:
        words = []
        if rising:
            temp_c = max(_number(self._samples[-1][1], i) for i in rising)
            words.append(f"{_names(rising)} at {temp_c:g} C, by {max(rising.values()):.1f} K/s warmer")
        if slowed:
            words.append(f"{_names(slowed)} slowed down for heat beyond {self.guard_c:g} C")
        if self._inlet_rises():
            words.append(f"coolant at {self._inlet[-1]:g} C and warmer")
        return "; ".join(words)

    def _surging(self) -> dict[int, float]:
        """Return GPU -> K/s of those that would settle beyond their shutdown even with flow."""
        if len(self._samples) < SAMPLES:
            return {}
        span, out = self._samples[-SAMPLES:], {}
        for gpu in range(len(span[-1][1])):
            temps = [_number(column, gpu) for _, column in span]
            if min(temps) == UNKNOWN:
                continue
            # Of each part, so that one jump is no rise; a kelvin of the whole may be the resolution
            parts = [(b - a) * NS / (t1 - t0) for (t0, _), (t1, _), a, b in _pairs(span, temps)]
            rate = min(*parts, (temps[-1] - temps[0] - RESOLUTION_K) * NS / (span[-1][0] - span[0][0]))
            shutdown_c = _number(self._shutdown_c, gpu)
            if rate >= RATE_K_PER_S and self.guard_c < shutdown_c <= temps[-1] + TAU_S * rate:
                out[gpu] = rate
        return out

    def _inlet_rises(self) -> bool:
        """Return True if the inlet coolant warms up as only in a loop without flow."""
        if len(self._inlet) < MOST_SAMPLES or min(self._inlet) == UNKNOWN:
            return False
        seconds = (self._samples[-1][0] - self._samples[0][0]) / NS
        half = len(self._inlet) // 2
        goes_on = min(self._inlet[half:]) > min(self._inlet[:half]) and self._inlet[-1] == max(self._inlet)
        return goes_on and (self._inlet[-1] - self._inlet[0]) / seconds >= INLET_K_PER_S

    def restart(self) -> None:
        """Forget earlier samples: after a change of caps they do not predict the rise."""
        self._samples.clear()
        self._inlet.clear()

    def left_s(self) -> float:
        """Return the seconds until the first GPU shuts itself down, by the rise since `restart`; inf if
        too few rise."""
        rising = self._rising(len(self._samples)) if len(self._samples) >= SAMPLES else {}
        if len(rising) < WITNESSES:
            return inf
        return min(self._room_k(gpu) / rate for gpu, rate in rising.items())

    def _room_k(self, gpu: int) -> float:
        """Return the kelvins until a GPU shuts itself down; inf if its shutdown temperature is unknown."""
        shutdown_c = _number(self._shutdown_c, gpu)
        if shutdown_c <= self.guard_c:
            return inf
        return max(shutdown_c - MARGIN_K - _number(self._samples[-1][1], gpu), 0.0)

    def _rising(self, count: int) -> dict[int, float]:
        """Return GPU -> K/s over this many samples, of GPUs beyond their guard whose temperature did not
        fall."""
        if len(self._samples) < count:
            return {}
        span = self._samples[-count:]
        seconds, out = (span[-1][0] - span[0][0]) / NS, {}
        for gpu in range(len(span[-1][1])):
            temps = [_number(column, gpu) for _, column in span]
            rise_k = temps[-1] - temps[0] if min(temps) > UNKNOWN else 0.0
            fell_k = max(a - b for a, b in pairwise(temps))
            if fell_k <= RESOLUTION_K and temps[-1] >= self.guard_c and rise_k >= LEAST_RISE_K:
                out[gpu] = rise_k / seconds
        return out


def _names(gpus: Iterable[int]) -> str:
    return ", ".join(f"gpu{i}" for i in sorted(gpus)[:8])


def _pairs(
    span: list[tuple[int, Column]], temps: list[float]
) -> Iterator[tuple[tuple[int, Column], tuple[int, Column], float, float]]:
    """Yield each sample with the one before it, and their temperatures."""
    return ((a, b, x, y) for (a, b), (x, y) in zip(pairwise(span), pairwise(temps), strict=True))


def _number(column: Column, at: int) -> float:
    value = column[at] if at < len(column) else None
    return UNKNOWN if value is None else float(value)
