"""Endurance: the seconds that a GPU which warms up has until it shuts itself down, at any power.

C dT/dt = P - q. Temperature and power are measured and the heat capacity C was learned, so they tell the heat
q that leaves the plate; at another power p the rate is (p - q)/C. A flow meter that lies changes nothing in
this, and q hardly moves when a cap cuts the power. Until q is measured, the law of the plate gives it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I32, NS, Bool
from twin.contracts import Memory, View
from twin.physics import resistance_k_per_w
from twin.site import CONVECTIVE_SHARE, FLOW_EXPONENT
from twin.telemetry import GOOD

# Of a new sample in the mean of q, once it has some: a step of 1 K a second is 250 W of it; source: estimate
NEW_PU = 0.3
MOST_SAMPLES = 100
LOST_S = 5.0  # between two readings of a GPU, above which its q begins anew
# Below the temperature of the shutdown: errors of the sensor, and what it rises between two readings
MARGIN_K = 2.0
TREND = ("trend_c", "trend_ns", "leaves_w", "samples")  # columns of the memory
STAGNANT_PU = 0.5  # of nominal flow: below, plates feel the warm coolant of their rack


@dataclass(frozen=True, slots=True)
class Endurance:
    """Of the GPUs `gpu` [k]: temperature, power, heat that leaves, and heat capacity.

    `measured`: the temperature was read within LOST_S, in good quality.
    """

    gpu: I32
    temp_c: F64
    power_w: F64
    leaves_w: F64
    capacity_j_per_k: F64
    shutdown_c: F64
    measured: Bool

    def rate_k_per_s(self, power_w: F64) -> F64:
        """Kelvins a second at this power [k]; NaN where something is unknown."""
        return (power_w - self.leaves_w) / self.capacity_j_per_k

    def left_s(self, power_w: F64) -> F64:
        """Seconds until the shutdown at this power [k]; inf where it does not come nearer or is unknown.

        By the present rate: as a warmer plate loses more, the true time is longer.
        """
        room_k = np.maximum(self.shutdown_c - MARGIN_K - self.temp_c, 0.0)
        rate = self.rate_k_per_s(power_w)
        with np.errstate(invalid="ignore", divide="ignore"):
            left_s = np.where(room_k > 0, room_k / rate, 0.0)
        return np.where(rate > 0, left_s, np.inf)


def endurance(view: View, memory: Memory, gpu: I32) -> tuple[Endurance, Memory]:
    """The endurance of some GPUs, and the columns of the memory that follow from it."""
    temp, power = (view.value(key)[gpu].astype(np.float64) for key in ("gpu.temp_c", "gpu.power_w"))
    age_s = view.age_s("gpu.temp_c")[gpu]
    heard_ns = (view.now_ns - np.minimum(age_s * NS, 2.0**62)).astype(np.int64)
    measured = (view.quality("gpu.temp_c")[gpu] == GOOD) & (age_s <= LOST_S)
    capacity, law_w = _capacity(view, gpu), _law_w(view, gpu, temp)
    before_c, before_ns, leaves_w, samples = (memory[k][gpu] for k in TREND)
    gap_s = (heard_ns - before_ns) / NS
    new = gap_s > 0
    begins = new & ((gap_s > LOST_S) | np.isnan(leaves_w))
    with np.errstate(divide="ignore", invalid="ignore"):
        sample_w = power - capacity * (temp - before_c) / gap_s
    # At rest no more leaves than is drawn; the law may rest on a flow meter that lies
    first_w = np.fmin(law_w, power)
    new_pu = np.maximum(NEW_PU, 1.0 / (samples + 1.0))
    mixed = leaves_w + new_pu * (np.maximum(sample_w, 0.0) - leaves_w)
    taught = new & ~begins & np.isfinite(mixed)
    leaves_w = np.where(begins, first_w, np.where(taught, mixed, leaves_w))
    samples = np.where(begins, 1, np.minimum(samples + taught, MOST_SAMPLES))
    shutdown_c = view.site.design.gpu_shutdown_c[view.site.rack_of_gpu[gpu]]
    found = Endurance(gpu, temp, power, leaves_w, capacity, shutdown_c, measured)
    after = {k: memory[k].copy() for k in TREND}
    after["trend_c"][gpu] = np.where(new, temp, before_c)
    after["trend_ns"][gpu] = np.where(new, heard_ns, before_ns)
    after["leaves_w"][gpu] = leaves_w
    after["samples"][gpu] = samples
    return found, after


def _capacity(view: View, gpu: I32) -> F64:
    """Heat capacity, J/K [k]: time constant over resistance, as learned, else as designed."""
    design, rack = view.site.design, view.site.rack_of_gpu[gpu]
    tau_s, resistance = view.parameter("gpu.tau_s"), view.parameter("gpu.resistance")
    by_design: F64 = design.gpu_tau_s[rack] / design.gpu_resistance_k_per_w[rack]
    if tau_s is None or resistance is None:
        return by_design
    with np.errstate(divide="ignore", invalid="ignore"):
        learned = tau_s[gpu] / resistance[gpu]
    return np.where(np.isfinite(learned) & (learned > 0), learned, by_design)


def _law_w(view: View, gpu: I32, temp_c: F64) -> F64:
    """Heat through the plate by the flow of its rack, W [k]; NaN where flow or coolant is unknown."""
    site = view.site
    rack = site.rack_of_gpu[gpu]
    flow, supply, back = (
        view.value(f"rack.{key}")[rack].astype(np.float64)
        for key in ("flow_lpm", "supply_temp_c", "return_temp_c")
    )
    ratio = flow / site.design.rack_flow_lpm[rack]
    coolant_c = np.where(ratio < STAGNANT_PU, np.fmax(supply, back), supply)
    learned = view.parameter("gpu.resistance")
    nominal = site.design.gpu_resistance_k_per_w[rack] if learned is None else learned[gpu]
    law: F64 = (temp_c - coolant_c) / resistance_k_per_w(nominal, ratio, CONVECTIVE_SHARE, FLOW_EXPONENT)
    return law
