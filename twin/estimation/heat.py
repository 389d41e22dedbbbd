"""Heat of racks: the expected return temperature of their coolant, and the flow that their heat implies.

The learned share of a rack's power that its liquid carries heats the coolant: q = capture * P, through the
mass of the cold plates (first-order) and the water that the rack holds (a mixed tank that the flow passes).
Both lags run free, driven by other readings. Cold plates take nearly all that GPUs draw and less of the rest,
so the share falls with the load: it is learned as that at full load, and weighs the power of now.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64
from twin.estimation.comparisons import Board, Row
from twin.estimation.readings import UNIFORM, Lag, Latest, Readings, filled, joint, share_of
from twin.physics import Coolant, heat_rate_w_per_k
from twin.site import CDU_VOLUME_MIN, GPU_TAU_LIQUID_S, RACK_VOLUME_MIN, Site

# Prior of the liquid's share of a rack's heat: NVL72 about 115 of 132 kW by vendors' figures, wide because
# sites differ; source: estimate.
CAPTURE_PRIOR, CAPTURE_SIGMA = 0.90, 0.10
# The share may drift this much per root second (valves, air flow); source: estimate.
CAPTURE_DRIFT_PER_SQRT_S = 2e-4
CAPTURE_ERROR = 0.02  # of one reading: flow and temperatures err by about 2 % of the heat; source: estimate
# Of what a GPU draws, into its cold plate; source: estimate, plates with direct contact take 90-98 %
PLATE_PU = 0.95
# 1 sigma of the share of all else that liquid carries, and the time in which the learned share follows it
# where the load has changed; source: estimate, what capture at full load being known to 5 % leaves of it
REST_SPREAD, FOLLOWED_S = 0.15, 600.0
MIN_RISE_K = 1.0  # below, the rise drowns in the sensors' error: no learning
MIN_FLOW_LPM = 1.0  # a stream that stands still carries nothing, whatever the rise
MIN_POWER_W = 1000.0  # a rack that idles below this says nothing about its liquid
HEAT_NOISE_K = 0.02  # half the last digit of the capture's sensors and more
FLOW_NOISE_PU = 0.005  # a flow meter's share of its reading; source: estimate
SENSOR_K = 0.1  # two temperature sensors against each other; source: estimate
CLOSURE = "rack.flow_lpm/heat"
RACK_NAMES = ("power_w", "flow_lpm", "supply_temp_c", "return_temp_c", "diff_pressure_pa", "valve_pu",
              "supply_valve_state", "return_valve_state", "liquid_isolation_state")  # fmt: skip


def rows(site: Site) -> list[Row]:
    """Return the relations of this part."""
    n = site.sizes["rack"]
    return [
        Row("rack.heat", "rack", n, HEAT_NOISE_K, "rack.capture", CAPTURE_PRIOR, CAPTURE_SIGMA, CAPTURE_ERROR,
            CAPTURE_DRIFT_PER_SQRT_S, 0.0, 1.2, hold_s=20.0),
        Row(CLOSURE, "rack", n, 1.0, hold_s=30.0),
    ]  # fmt: skip


class RackHeat:
    """The lags of heat between racks and the coolant's return."""

    def __init__(self, site: Site, coolant: Coolant) -> None:
        n, design = site.sizes["rack"], site.design
        self.coolant = coolant
        self.plates, self.tank = Lag(1, site.sizes, "rack"), Lag(3, site.sizes, "rack")
        self._plate_tau_s = np.where(design.liquid, design.gpu_tau_s, GPU_TAU_LIQUID_S)
        self._plate_tau_s = np.where(np.isfinite(self._plate_tau_s), self._plate_tau_s, GPU_TAU_LIQUID_S)
        self._nominal_lpm = design.rack_flow_lpm
        self._tau_s = np.full(n, 60.0 * RACK_VOLUME_MIN)
        self._n, self._full_w = n, design.rack_max_w
        gpus = np.diff(site.gpu_start_of_node[site.node_start_of_rack]).astype(np.float64)
        self._site, self._any = site, bool((gpus > 0).any())
        # See `_weigh`; and the part in the liquid's heat of what GPUs do not draw, lately
        self.mix, self.other = Lag(1, site.sizes, "rack"), Lag(1, site.sizes, "rack")
        capture, full_w = design.capture_pu, np.where(gpus > 0, gpus * design.gpu_max_w, np.nan)
        capture = np.where(capture > 0.0, capture, np.nan)
        rest = (capture * design.rack_max_w - PLATE_PU * full_w) / (design.rack_max_w - full_w)
        self._rest_pu, self._plate_pu = np.clip(rest, 0.0, 1.0) / capture, PLATE_PU / capture
        self._capture_pu = capture

    def _weigh(self, readings: Readings, power_w: F64, dt_s: float) -> tuple[F64, F64]:
        """(Power of each rack [n_rack] over what a full one of the same capture would draw, by what of it its
        GPUs draw; share by which that is not known, as other devices draw another part than they did).

        Where the GPUs' power is not known the part stays; where it never was, it is the power itself.
        """
        if not (self._any and readings.known("gpu", "power_w")):
            return power_w, np.zeros(len(power_w))
        gpu_w = self._site.sum_by_rack("gpu", readings.lately("gpu", "power_w"))
        other_w = np.maximum(power_w - gpu_w, 0.0)
        mixed = self._plate_pu * gpu_w + self._rest_pu * other_w
        now = readings.now_ns, dt_s
        self.mix.toward((mixed / power_w)[None], np.ones(1), now)
        before, part = self.other.level[0].copy(), other_w / (self._capture_pu * mixed)
        self.other.toward(part[None], share_of(dt_s, np.full(1, FOLLOWED_S)), now)
        share, unknown = self.mix.level[0], REST_SPREAD * np.abs(part - before)
        return np.where(np.isfinite(share), share * power_w, power_w), filled(unknown)

    def update(self, rack: Latest, readings: Readings, board: Board, now_ns: int, dt_s: float) -> None:
        """Update the expected return temperature and flow of each rack."""
        power_w, flow_lpm, supply_c, return_c = (rack[k] for k in RACK_NAMES[:4])
        flowing = np.where(flow_lpm >= MIN_FLOW_LPM, flow_lpm, np.nan)
        rate = heat_rate_w_per_k(self.coolant, flowing, supply_c)
        loading = np.where(power_w >= MIN_POWER_W, power_w, np.nan)
        loading, unknown_pu = self._weigh(readings, loading, dt_s)
        now = now_ns, dt_s
        heat_w = self.plates.toward(loading[None], share_of(dt_s, self._plate_tau_s)[None], now)[0]
        # Without a profile the nominal flow is not known: then it takes as long as where it flows nominally
        ratio = flowing / self._nominal_lpm
        tau_s = np.where(np.isfinite(ratio), self._tau_s / ratio, self._tau_s)
        usual = share_of(dt_s, self._tau_s)
        aims = np.stack([supply_c, heat_w / rate, heat_w])
        shares = np.stack([usual, share_of(dt_s, tau_s), usual])
        behind = np.stack([np.zeros(self._n), *(2 * [self.plates.unknown[0]])])
        entered_c, rise_k, carried_w = self.tank.toward(aims, shares, now, behind)

        capture = board.parameter("rack.heat")
        expected_k = capture * rise_k
        # The load before the observation is unknown
        span_k = UNIFORM * np.fmax(capture * self._full_w / rate, np.abs(expected_k))
        unseen_k, unseen_pu = self.tank.unknown[1:] * np.stack([span_k, span_k / expected_k])
        expected_c = np.where(expected_k >= MIN_RISE_K, entered_c + expected_k, np.nan)
        risen_k = return_c - entered_c
        teaching = (return_c - supply_c >= MIN_RISE_K) & np.isfinite(expected_c)
        read_ns = rack.received_ns(*RACK_NAMES[:4])
        off_k = np.abs(aims[1] - rise_k) + np.abs(supply_c - entered_c)
        steps_k = joint(rack.step_sigma("supply_temp_c"), rack.step_sigma("return_temp_c"))
        board.put(
            "rack.heat",
            expected_c,
            return_c,
            read_ns,
            implied=np.where(teaching, risen_k / rise_k, np.nan),
            slope=np.where(teaching, rise_k, 0.0),
            loose=np.where(off_k > 0.5, 0.25 * off_k, 0.0) + unknown_pu * np.abs(expected_k) + unseen_k,
            steps=steps_k,
        )

        warm = risen_k >= MIN_RISE_K
        per_lpm = heat_rate_w_per_k(self.coolant, np.ones_like(risen_k), supply_c)
        expected_lpm = np.where(warm, capture * carried_w / (per_lpm * risen_k), np.nan)
        off_pu = np.abs(heat_w - carried_w) / carried_w
        board.put(
            CLOSURE,
            expected_lpm,
            flow_lpm,
            read_ns,
            level=expected_lpm * (FLOW_NOISE_PU + SENSOR_K / risen_k),
            loose=(np.where(off_pu > 0.05, 0.25 * off_pu, 0.0) + unknown_pu + unseen_pu) * expected_lpm,
            steps=joint(expected_lpm * steps_k / risen_k),
        )


def cdu_tau_s(flow_lpm: F64, nominal_lpm: F64) -> F64:
    """Time for a third of the water that a CDU and its pipes hold to pass [n]: hot leg, cold leg, pipes."""
    tau_s = 60.0 * CDU_VOLUME_MIN / 3.0
    ratio = np.maximum(flow_lpm / nominal_lpm, 0.05)
    return np.where(np.isfinite(ratio), tau_s / ratio, tau_s)
