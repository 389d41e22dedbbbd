"""Reconciliation: readings that other readings clearly contradict, and the implied values that replace them.

A grid's state estimation finds bad data by its largest normalized residual, takes that meter out and looks
again (Monticelli 1999, State Estimation in Electric Power Systems, chapter 7). Here the comparisons of the
estimator are the residuals, and `FaultIsolation` takes the sensor that accounts for most of them, beside
faults of devices that account for them as well. One reading is enough; the diagnosis reports the sensor once
it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I32, NS, Bool, counted, find_signal, quantity, signal_of, signal_words
from twin.contracts import Finding, Residual
from twin.diagnosis.cause import Cause
from twin.diagnosis.common_mode import CommonMode
from twin.diagnosis.isolation import FaultIsolation
from twin.diagnosis.signature import HYPOTHESES, TickValues, measured_signal
from twin.site import Site, noun_key
from twin.telemetry import EntityState, part, records

BIASED = "sensor_biased"
# Signals that others can contradict. A GPU's own temperature is believed however odd: it is protected by it.
RECONCILED = frozenset(
    f"{h.table}.{h.signal}"
    for h in HYPOTHESES
    if h.kind == BIASED and (h.table, h.signal) != ("gpu", "temp_c")
)
# A reading that is off by less is left as it is: in kelvin, or as a share of the value; source: estimate
LEAST_K, LEAST_PU = 3.0, 0.1
LEAST_FLOW_PU = 0.2
# No GPU draws so many times its rated power, not even for the instant of a peak; no rack so many times that
# of its parts, although there may be others in it that no profile knows. source: estimate
# And no feeder as many times that of all racks below, with what cools them.
MOST_RATED_PU = {"gpu.power_w": 1.5, "rack.power_w": 4.0, "feeder.power_w": 2.0}
# Seconds for which a doubt lasts before it counts: loss of flow cannot wait for the meters beside it, which
# may have been read before. source: estimate
HOLD_S = {"rack.flow_lpm": 2.0}
# For so long a power that stays as far off is doubted without another sign: while a meter moves, what others
# say of it is doubted as well. Coolant is believed as soon as nothing contradicts it. source: estimate
APART_S = 10.0
# For so long a meter of power that comes back is suspected: one that leaps loosens its own comparisons, so
# that the second leap stands out less. source: estimate
SUSPECT_S = 60.0
LASTING_S = 2.0  # from when on people are notified; source: estimate
WRONG = ("sensor_frozen", "sensor_spiking")
DoubtKey = tuple[str, int, str]  # table, entity, signal


class RowMasks(NamedTuple):
    """Rows of comparisons without further evidence: those that any fault covers, to be worked out on demand,
    and those that faults of devices stir."""

    covered: Callable[[], Callable[[str, int], Bool | None]]
    stirred: Callable[[str, int], Bool | None]


@dataclass(slots=True)
class Doubt:
    """An untrusted reading `read`, the implied value with its 1 sigma, and the instant since which it is
    untrusted.

    A reading whose doubt is not `active` is believed again, and its meter suspected. `times`: how often the
    doubt became active.
    """

    table: str
    entity: int
    signal: str
    read: float
    value: float
    sigma: float
    first_ns: int
    last_ns: int
    active: bool = True
    times: int = 1

    @property
    def signal_key(self) -> str:
        return f"{self.table}.{self.signal}"

    @property
    def key(self) -> DoubtKey:
        return self.table, self.entity, self.signal


class Reconciliation(EntityState):
    """The untrusted readings of this tick."""

    doubts: dict[DoubtKey, Doubt] = records(Doubt)
    common: CommonMode = part()

    def __init__(self, site: Site) -> None:
        super().__init__({})
        self.site, self.common = site, CommonMode(site)
        design, of_gpu = site.design, site.rack_of_gpu
        feeder, rack = self._served = site.served_racks()
        below_w = np.bincount(feeder, design.rack_max_w[rack], site.sizes["feeder"])
        self._most = {
            "gpu.power_w": design.gpu_max_w[of_gpu],
            "rack.power_w": design.rack_max_w,
            "feeder.power_w": np.where(below_w > 0, below_w, np.nan),
        }
        self._part = 1.0 / np.maximum(np.diff(site.feeders_of_rack.start), 1)  # of a rack's power, by feed
        self._by_signal: dict[str, list[Doubt]] | None = None

    def update(
        self,
        isolation: FaultIsolation,
        residuals: dict[str, Residual],
        now: TickValues,
        masks: RowMasks,
        reported: Iterable[Cause],
    ) -> None:
        """Check the readings of this tick."""
        self._by_signal = None
        now_ns, found = now.state.now_ns, dict[DoubtKey, tuple[float, float, float]]()
        for key, most in self._most.items():
            self._beyond_rated(key, most, residuals, now, found)
        for cause in reported:
            if cause.kind in WRONG:
                _replaced(cause, residuals, now, found)
        far = isolation.outliers(residuals, now, masks.covered, self._suspects(), masks.stirred)
        for fault in far:
            h, key = fault.hypothesis, fault.hypothesis.key
            if h.kind == BIASED and key in RECONCILED and fault.alone:
                read = float(now[key][fault.entity])
                if abs(fault.size) >= _least(key, read - fault.size):
                    found[h.table, fault.entity, h.signal] = read, read - fault.size, fault.sigma
        common = self.common.find(now)
        for at, (read, value, sigma) in (found | common).items():
            known = self.doubts.get(at)
            first_ns, times = (now_ns, 1) if known is None else (known.first_ns, known.times)
            if at in common:  # rests on no reading that may come later
                first_ns = min(first_ns, now_ns - round(HOLD_S.get(f"{at[0]}.{at[2]}", 0.0) * NS))
            times += known is not None and not known.active
            self.doubts[at] = Doubt(*at, read, max(value, 0.0), sigma, first_ns, now_ns, times=times)
        for at, doubt in list(self.doubts.items()):
            key = doubt.signal_key
            away = abs(now[key][doubt.entity] - doubt.value) >= _least(key, doubt.value)
            is_power = key.endswith("power_w")
            age_ns = now_ns - doubt.last_ns
            doubt.active &= bool(away) and age_ns <= (APART_S if is_power else 0.0) * NS
            if not doubt.active and age_ns > (SUSPECT_S if is_power else -1.0) * NS:
                del self.doubts[at]

    def _suspects(self) -> dict[tuple[str, str], I32]:
        """Return the entities with a contradicted power meter within the last minute, by table and signal."""
        out: dict[tuple[str, str], list[int]] = {}
        for doubt in self.doubts.values():
            if doubt.signal == "power_w":
                out.setdefault((doubt.table, doubt.signal), []).append(doubt.entity)
        return {key: np.array(at, np.int32) for key, at in out.items()}

    def _beyond_rated(
        self,
        key: str,
        most: F64,
        residuals: dict[str, Residual],
        now: TickValues,
        found: dict[DoubtKey, tuple[float, float, float]],
    ) -> None:
        """Return powers beyond the expected or rated maximum of the device."""
        read = now[key]
        far = np.flatnonzero(read > MOST_RATED_PU[key] * most)
        table, _, signal = key.partition(".")
        if not len(far):
            return
        expected = residuals[key].expected if key in residuals else None
        if table == "feeder":
            of, rack = self._served
            expected = np.bincount(of, (self._part * now.drawn_w())[rack], len(read)).astype(np.float64)
        for at in far.tolist():
            rated = float(most[at])
            likely = rated if expected is None else float(np.fmin(expected[at], rated))
            found[table, at, signal] = float(read[at]), likely, LEAST_PU * rated

    def of(self, key: str, now_ns: int) -> tuple[I32, F64, F64] | None:
        """Entities [k] whose reading of a signal is not believed, the values that others imply, and 1 sigma
        of these; None where all are believed."""
        if not self.doubts:
            return None
        if self._by_signal is None:
            self._by_signal = {}
            for doubt in self.doubts.values():
                if doubt.active:
                    self._by_signal.setdefault(doubt.signal_key, []).append(doubt)
        hold_ns = HOLD_S.get(key, 0.0) * NS
        mine = [d for d in self._by_signal.get(key, ()) if now_ns - d.first_ns >= hold_ns]
        if not mine:
            return None
        index = np.array([d.entity for d in mine], np.int32)
        return index, np.array([d.value for d in mine]), np.array([d.sigma for d in mine])

    def findings(self, now_ns: int, reported: Iterable[Cause]) -> list[Finding]:
        """Return readings that are untrusted for a while without a named fault, one finding for each
        signal."""
        if not self.doubts:
            return []
        named = {(cause.table, cause.entity, cause.signal) for cause in reported}
        some: dict[str, list[Doubt]] = {}
        for at, doubt in self.doubts.items():
            lasts = now_ns - doubt.first_ns >= LASTING_S * NS
            if at not in named and lasts and (doubt.active or doubt.times > 1):
                some.setdefault(doubt.signal_key, []).append(doubt)
        return [self._finding(key, mine) for key, mine in some.items()]

    def _finding(self, key: str, doubts: list[Doubt]) -> Finding:
        names = tuple(self.site.name(d.table, d.entity) for d in doubts)
        signal, first = signal_of(key), doubts[0]
        read, others = (quantity(value, signal.unit, 4) for value in (first.read, first.value))
        who = names[0] if len(names) == 1 else counted(noun_key(self.site, first.table), len(names))
        return Finding(
            f"doubt/{key}",
            "info",
            f"The {signal_words(signal.name)} of {who} is not trusted: other readings contradict it",
            names,
            (f"{names[0]}: read {read}, others imply {others}",),
            0.9,
            "Policies use the value that the others imply. If this lasts, an alarm names the sensor.",
            len(names),
        )

    def derive(self) -> None:
        """The doubts were written."""
        self._by_signal = None


def _least(key: str, value: float) -> float:
    """Return the least error of a signal that matters for its users."""
    if key.endswith("temp_c"):
        return LEAST_K
    return (LEAST_FLOW_PU if key.endswith("flow_lpm") else LEAST_PU) * abs(value)


def _replaced(
    cause: Cause,
    residuals: dict[str, Residual],
    now: TickValues,
    found: dict[DoubtKey, tuple[float, float, float]],
) -> None:
    """Return the expected value, if any, for a sensor that is reported as stuck or jumping."""
    key = f"{cause.table}.{cause.signal}"
    if key not in RECONCILED:
        return
    for name, residual in residuals.items():
        table = name.partition(".")[0]
        if table != cause.table or measured_signal(name) != cause.signal or not len(residual.expected):
            continue
        expected, sigma = (float(column[cause.entity]) for column in (residual.expected, residual.sigma))
        read = float(now[key][cause.entity])
        if np.isfinite(expected) and np.isfinite(sigma) and np.isfinite(read):
            found[cause.table, cause.entity, cause.signal] = read, expected, sigma
            return


def danger_sign(key: str) -> float:
    """Return -1 for a signal whose low values are dangerous, otherwise 1."""
    signal = find_signal(key)
    return -1.0 if signal is not None and signal.danger == "low" else 1.0
