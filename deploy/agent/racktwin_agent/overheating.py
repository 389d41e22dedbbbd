"""Overheating: GPUs beyond their guard that warm up as only plates without flow do, seen by the agent alone.

C dT/dt = P - q: where a plate still cools, more heat leaves the warmer it is, and a load that steps up has
settled long before the guard. One sensor that lies moves nothing: two GPUs must rise, or one whose hardware
slows it down for heat. Pure: samples and time are passed in. Imports the agent's clock and devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from racktwin_agent.clock import NS, Instant
from racktwin_agent.devices import HW_THERMAL, Column, Sample

SAMPLES = 3  # of a rise that is a trigger
MOST_SAMPLES = 8  # of the rise by which the time to the shutdown is told
LEAST_S, MOST_S = 0.9, 5.0  # between two of them: sensors have whole kelvins; a gap begins anew
# source: estimate: without flow a plate warms by 4-8 K/s at full power and near 1 K/s at the lowest cap; one
# with flow, within 5 K of where it settles, by less than 1 K/s
RATE_K_PER_S = 1.0
RESOLUTION_K = 1.0  # of the sensor, source: NVML, whole degrees
LEAST_RISE_K = 2.0  # below, it may be the resolution
WITNESSES = 2  # GPUs; one that its own hardware slows down counts for two
COOLER_K = 5.0  # so far below the guard it is over
MARGIN_K = 2.0  # below the temperature of the shutdown: errors of the sensor, and what it rises meanwhile
# Until the first GPU shuts itself down; source: as the policy thermal_guard has them
STOP_LEAD_S, OFF_LEAD_S = 45.0, 8.0
UNKNOWN = -inf


@dataclass(slots=True)
class Overheating:
    """Temperatures of the last seconds. `evidence` says in words why GPUs overheat, or ""."""

    guard_c: float
    evidence: str = ""
    _samples: list[tuple[int, Column]] = field(default_factory=list)  # since boot, temperatures
    _shutdown_c: Column = field(default_factory=list)
    _hot: set[int] = field(default_factory=set)  # GPUs that began it

    def take(self, sample: Sample, at: Instant) -> None:
        """Note a sample, and judge it."""
        temps = sample.gpu.get("temp_c", [])
        if self._samples:
            gap_s = (at.boot_ns - self._samples[-1][0]) / NS
            if gap_s < LEAST_S:
                return
            if gap_s > MOST_S or len(temps) != len(self._samples[-1][1]):
                self._samples.clear()
        self._samples = [*self._samples[1 - MOST_SAMPLES :], (at.boot_ns, temps)]
        self._shutdown_c = sample.shutdown_c
        bits = sample.gpu.get("clock_event_bits", [])
        slowed = {i for i, value in enumerate(bits) if int(value or 0) & HW_THERMAL}
        rising = {i: rate for i, rate in self._rising(SAMPLES).items() if rate >= RATE_K_PER_S}
        if len(rising) + len(slowed & rising.keys()) >= WITNESSES:
            self._hot |= rising.keys()
            of = ", ".join(f"gpu{i}" for i in list(rising)[:8])
            self.evidence = f"{of} beyond {self.guard_c:g} C, by {max(rising.values()):.1f} K/s warmer"
        self._hot = {i for i in self._hot if _number(temps, i) >= self.guard_c - COOLER_K}
        self.evidence = self.evidence if self._hot else ""

    def restart(self) -> None:
        """The caps have changed: what rose before says nothing of what follows."""
        self._samples.clear()

    def left_s(self) -> float:
        """Seconds until the first GPU shuts itself down, by the rise since `restart`; inf if too few rise."""
        rising = self._rising(len(self._samples)) if len(self._samples) >= SAMPLES else {}
        if len(rising) < WITNESSES:
            return inf
        return min(self._room_k(gpu) / rate for gpu, rate in rising.items())

    def _room_k(self, gpu: int) -> float:
        """Kelvins until a GPU shuts itself down; inf where nobody says at which temperature."""
        shutdown_c = _number(self._shutdown_c, gpu)
        if shutdown_c <= self.guard_c:
            return inf
        return max(shutdown_c - MARGIN_K - _number(self._samples[-1][1], gpu), 0.0)

    def _rising(self, count: int) -> dict[int, float]:
        """GPU -> K/s over so many samples, of those beyond their guard that did not fall in them."""
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


def _number(column: Column, at: int) -> float:
    value = column[at] if at < len(column) else None
    return UNKNOWN if value is None else float(value)
