"""Calibration: the learned parameters of entities beside their nominal values, with bands and drift.

A view of what the estimator holds. Nothing is learned here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I8, I64, Bool
from twin.contracts import Z90
from twin.estimation.comparisons import SETTLED_COUNT, Board
from twin.estimation.estimator import Estimator
from twin.estimation.gpu_power import EXPONENT_SPREAD
from twin.estimation.gpu_temp import LAG, LAG_SPREAD_PU, OFFSET, OFFSET_K, SPREAD_PU
from twin.estimation.gpus import GpuEstimator
from twin.estimation.nodes import NODE, PSU1, RACK, NodeEstimator
from twin.estimation.parameter import Parameter
from twin.physics import ACTIVITY_WEIGHTS, EXPONENT

NOTHING_LEARNED, LEARNING, LEARNED = 0, 1, 2
STATES = ("unknown", "learning", "learned")
# A parameter without a reference is learned when its uncertainty is below this share of the prior's;
# source: estimate
KNOWN_SHARE = 0.5
# Sensors of GPUs err by no more than so many sigmas of the prior; source: estimate
OFFSET_SIGMAS = 2.0


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """A parameter in the words of the field.

    `bias` is 1 sigma of the error that more readings do not lessen: that of meters, and for full activity
    that SMs, tensor cores and memory, busy together, cannot be distinguished. `healthy` is the drift that no
    healthy device exceeds; 0 where drift is not followed. source of both: estimate, meters of class 0.5,
    sensors of 0.05 K.
    Both are shares of the value, or in its unit where `absolute`. `nominal` says where the nominal value is
    from: the profile, the design that follows from it, what is usual, or an ideal device.
    """

    name: str
    text: str
    unit: str
    nominal: str
    bias: float
    healthy: float
    rises: str  # meaning of a drift upwards
    falls: str
    absolute: bool = False

    @property
    def table(self) -> str:
        """Return the table of the parameter's entities."""
        return self.name.partition(".")[0]


_SENSORS = "one of its two sensors drifts: compare them with a third"
_METERS = "one of the meters that it compares drifts"
_KINDS = (
    ParameterKind("gpu.resistance", "thermal resistance over the coolant or air", "K/W", "profile", 0.0, 0.05,
        "its plate or heat sink fouls, or its thermal paste ages",
        "it was cleaned or mounted anew, or its sensor reads less than it did"),
    ParameterKind("gpu.offset_k", "temperature at no power minus the inlet's", "K", "ideal", 0.0, 0.0, "", "",
        True),
    ParameterKind("gpu.tau_s", "thermal time constant", "s", "profile", 0.0, 0.0, "", ""),
    ParameterKind("gpu.exponent", "exponent of power over clock", "1", "usual", 0.0, 0.0, "", ""),
    ParameterKind("gpu.idle_w", "power when idle", "W", "profile", 0.0, 0.06,
        "it leaks more or its regulators lose more: it ages",
        "its firmware saves more when idle, or its power sensor reads less"),
    ParameterKind("gpu.dynamic_w", "power at full activity, over idle", "W", "profile", 0.08, 0.04,
        "the same work draws more: it ages, or its activity is counted otherwise",
        "the same work draws less: it is slowed, or its power sensor reads less"),
    ParameterKind("node.other_w", "power beside GPUs and CPUs", "W", "profile", 0.0, 0.15,
        "fans, NICs or disks draw more", "a fan, NIC or disk is off or gone"),
    ParameterKind("node.loss_factor", "power over that of GPUs and CPUs", "1", "profile", 0.0, 0.03,
        "its power supplies or regulators lose more", "its power meter reads less than it did"),
    ParameterKind("node.psu1_share", "share of supply 1 in its power", "1", "ideal", 0.003, 0.03,
        "supply 2 carries less: it weakens or its feed does",
        "supply 1 carries less: it weakens or its feed does", True),
    ParameterKind("rack.overhead", "power beside its nodes", "W", "profile", 0.0, 0.15,
        "switches, shelves or fans draw more", "something beside its nodes is off"),
    ParameterKind("rack.loss_factor", "power over that of its nodes", "1", "ideal", 0.0, 0.03,
        "its shelves lose more, or its meter reads more", "its meter reads less than it did"),
    ParameterKind("rack.capture", "share of its power that its liquid carries", "1", "profile", 0.01, 0.05,
        "less heat goes into the air, or a meter reads more",
        "more heat goes into the air: look at its plates and at its air", True),
    ParameterKind("rack.branch", "hydraulic resistance of its branch", "Pa min2/l2", "none", 0.011, 0.05,
        "its branch clogs: hoses, couplings, plates or its valve",
        "its valve opens more, or a coupling leaks"),
    ParameterKind("rack.drop_ratio", "pressure across it over that across its CDU's circuit", "1", "ideal",
        0.004, 0.02, "a pressure sensor drifts", "the manifold on the way to it clogs, or a sensor drifts"),
    ParameterKind("rack.supply_offset", "its supply minus its CDU's", "K", "ideal", 0.07, 0.3,
        "a sensor drifts, or the pipe to it warms up", "a sensor drifts", True),
    ParameterKind("cdu.flow_ratio", "its flow over the sum of its racks'", "1", "ideal", 0.007, 0.02,
        "a flow meter drifts, or coolant leaves on the way to the racks", "a flow meter drifts"),
    ParameterKind("cdu.pump_head", "head of its pumps over the design's", "1", "ideal", 0.01, 0.02,
        "it was repaired, or a pressure sensor drifts", "a pump wears"),
    ParameterKind("cdu.filter", "hydraulic resistance of its filter", "Pa min2/l2", "design", 0.011, 0.08,
        "the filter clogs: it wants to be changed", "the filter was changed or is bypassed"),
    ParameterKind("cdu.return_offset", "its return minus the mix of its racks'", "K", "ideal", 0.1, 0.3,
        _SENSORS, _SENSORS, True),
    ParameterKind("cdu.ua", "conductance of its heat exchanger at nominal flows", "W/K", "design", 0.05, 0.04,
        "it was cleaned, or a sensor drifts", "the exchanger fouls: it wants to be cleaned"),
    ParameterKind("cdu.supply_error", "its supply minus its set point", "K", "ideal", 0.05, 0.3,
        "its control or valve no longer holds the set point", "its control or valve holds it too cold", True),
    ParameterKind("cdu.closure", "heat into the facility water over heat from the racks", "1", "ideal", 0.01,
        0.03, _METERS, _METERS),
    ParameterKind("cdu.valve_full_lpm", "facility flow with its valve open", "l/min", "design", 0.007, 0.05,
        "there is more pressure on the facility side", "the facility side clogs or has less pressure"),
    ParameterKind("cdu.facility_offset", "its facility supply minus the loop's", "K", "ideal", 0.07, 0.3,
        "a sensor drifts, or the pipe to it warms up", "a sensor drifts", True),
    ParameterKind("loop.approach", "its supply minus the outdoor air", "K", "none", 0.1, 3.0,
        "coolers foul, a fan is out, or the load is higher",
        "coolers were cleaned, or the load is lower", True),
    ParameterKind("loop.bypass", "flow past its CDUs over the nominal flow", "1", "usual", 0.005, 0.05,
        "a bypass opens further", "a bypass closes", True),
    ParameterKind("loop.flow_ratio", "its flow over the sum of its CDUs'", "1", "ideal", 0.007, 0.02,
        _METERS, _METERS),
    ParameterKind("feeder.odds", "its power over that of the feeds beside it", "1", "none", 0.003, 0.1,
        "it carries more of what they share: a supply or feed on the other side weakens",
        "it carries less of what they share: a supply or feed on this side weakens"),
)  # fmt: skip
PARAMETER_KINDS = {kind.name: kind for kind in _KINDS}


@dataclass(frozen=True, slots=True)
class Calibration:
    """One learned parameter of all entities of its table [n]; NaN is unknown.

    `sigma` includes the kind's bias, `drift_sigma` does not: it does not drift. `shared` is the
    part of the drift that its neighbours have as well.
    """

    kind: ParameterKind
    state: I8  # NOTHING_LEARNED, LEARNING or LEARNED
    value: F64
    sigma: F64
    nominal: F64
    readings: F64 | None  # taken in; or else
    taught_s: F64 | None  # seconds of readings taken in, by their weight
    reference: F64
    since_ns: I64  # instant of the reference; 0 is unknown
    drift_sigma: F64
    shared: F64 | float = 0.0

    @property
    def drift(self) -> F64:
        """Return the distance of the value from the reference, in its unit."""
        return self.value - self.reference

    @property
    def drift_band(self) -> F64:
        """Return half of the band that contains the drift of nine of ten healthy devices, in the unit of
        the value."""
        healthy = self.kind.healthy * (1.0 if self.kind.absolute else np.abs(self.reference))
        return np.asarray(np.hypot(healthy, Z90 * self.drift_sigma), np.float64)

    @property
    def own_drift(self) -> F64:
        """Return the drift that the neighbours do not share."""
        return np.asarray(self.drift - self.shared, np.float64)

    @property
    def drifted(self) -> Bool:
        """Return a mask of entities with an own drift beyond the band."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(self.own_drift) > self.drift_band, np.bool_)

    def meaning(self, row: int) -> str:
        """Return the meaning of an entity's drift in words; "" within the band."""
        if self.drifted[row]:
            return self.kind.rises if self.own_drift[row] > 0.0 else self.kind.falls
        if abs(self.drift[row]) > self.drift_band[row]:
            return "its neighbours drift alike: it is what they share, such as their air"
        return ""


def calibrations(estimator: Estimator, table: str) -> list[Calibration]:
    """Return the present learned parameters of a table's entities."""
    site = estimator.site
    if not site.sizes.get(table):
        return []
    capture_pu = site.design.capture_pu
    nominal = {"rack.capture": np.where(capture_pu > 0.0, capture_pu, np.nan)}
    with np.errstate(invalid="ignore", divide="ignore"):
        gpus = _of_gpus(estimator.gpus) if table == "gpu" else ()
        return [*gpus, *_of_nodes(estimator.nodes, table), *_of_board(estimator.board, table, nominal)]


def _joint(kind: ParameterKind, value: F64, sigma: F64) -> F64:
    """Return 1 sigma of a value, with its bias."""
    bias = kind.bias * (1.0 if kind.absolute else np.abs(value))
    return np.asarray(np.hypot(sigma, bias), np.float64)


def _of_board(board: Board, table: str, nominal: dict[str, F64]) -> Iterator[Calibration]:
    for row in board.rows:
        if not row.parameter or row.table != table:
            continue
        kind = PARAMETER_KINDS[row.parameter]
        value, var, in_use, early, early_var = (
            board.learned(row.name, kept) for kept in ("value", "var", "in_use", "reference", "reference_var")
        )
        at = board.cells[row.name]
        count = board.count[at]
        state = np.where(count >= SETTLED_COUNT, LEARNED, LEARNING).astype(np.int8)
        state[(count == 0) & np.isnan(early)] = NOTHING_LEARNED
        # A parameter that changed for a known reason waits for its first reading
        value = np.where(np.isfinite(value), value, in_use)
        prior = nominal.get(kind.name, np.broadcast_to(np.asarray(row.prior, np.float64), row.n))
        sigma = _joint(kind, value, np.sqrt(var))
        yield Calibration(kind, state, value, sigma, prior, count.astype(np.float64), None, early,
                          board.settled_ns[at], np.sqrt(var + early_var))  # fmt: skip


def _by_reference(parameter: Parameter, taught_s: F64) -> I8:
    state = np.where(np.isfinite(parameter.reference), LEARNED, LEARNING).astype(np.int8)
    state[taught_s <= 0.0] = NOTHING_LEARNED
    return state


def _by_sigma(sigma: F64, prior: F64 | float, taught: Bool) -> I8:
    state = np.where(sigma <= KNOWN_SHARE * prior, LEARNED, LEARNING).astype(np.int8)
    state[~taught] = NOTHING_LEARNED
    return state


def _of_gpus(gpus: GpuEstimator) -> Iterator[Calibration]:
    temp, power, known = gpus.temp, gpus.power, gpus.parameters()
    none, never = np.full(gpus.n, np.nan), np.zeros(gpus.n, np.int64)
    tau_s, heated_s, drawn_s = temp.trays.spread(temp.tau_s), temp.fit.taught_s, power.fit.taught_s
    nominal = {"gpu.resistance": temp.resistance, "gpu.idle_w": power.idle_w,
               "gpu.dynamic_w": sum(ACTIVITY_WEIGHTS) * power.span_w}  # fmt: skip
    # No sensor errs by more: it is a resistance that was learned as an offset, where readings are too seldom
    # to follow the power
    bent_k = np.maximum(np.abs(known["gpu.offset_k"].value) - OFFSET_SIGMAS * OFFSET_K, 0.0)
    bent = bent_k / temp.full_w
    for name, of, taught_s, more in (
        ("gpu.resistance", temp.reference, heated_s, bent),
        ("gpu.idle_w", power.reference, drawn_s, 0.0),
        ("gpu.dynamic_w", power.reference, drawn_s, 0.0),
    ):
        kind, p = PARAMETER_KINDS[name], known[name]
        sigma = np.hypot(p.sigma, more)
        shared = temp.air_drift() * p.reference if of is temp.reference and not temp.all_liquid else 0.0
        state = _by_reference(p, taught_s)
        state[(state == LEARNED) & (more > KNOWN_SHARE * SPREAD_PU * nominal[name])] = LEARNING
        yield Calibration(kind, state, p.value, _joint(kind, p.value, sigma), nominal[name], None, taught_s,
                          p.reference, of.settled_ns, sigma, np.nan_to_num(shared))  # fmt: skip
    rows, taught = slice(None), heated_s > 0.0
    offset = np.hypot(np.sqrt(temp.covariance.variance(OFFSET, rows)), bent_k)
    lag_pu = np.hypot(np.sqrt(temp.covariance.variance(LAG, rows)), bent) / temp.resistance
    exponent = known["gpu.exponent"].sigma
    for name, sigma, prior, before, seen in (
        ("gpu.offset_k", offset, OFFSET_K, np.zeros(gpus.n), taught),
        ("gpu.tau_s", tau_s * lag_pu, LAG_SPREAD_PU * tau_s, tau_s, taught),
        ("gpu.exponent", exponent, EXPONENT_SPREAD, np.full(gpus.n, EXPONENT), exponent < EXPONENT_SPREAD),
    ):
        kind, value = PARAMETER_KINDS[name], known[name].value
        state, spent_s = _by_sigma(sigma, prior, seen), None if name == "gpu.exponent" else heated_s
        yield Calibration(kind, state, value, _joint(kind, value, sigma), before, None, spent_s, none, never,
                          none)  # fmt: skip


def _of_nodes(nodes: NodeEstimator, table: str) -> Iterator[Calibration]:
    known, site = nodes.parameters(), nodes.site
    stated = {"node.loss_factor": 1.0 + site.design.node_loss_pu[site.rack_of_node]}
    for name, relation, k in (
        ("node.other_w", NODE, 0),
        ("node.loss_factor", NODE, 1),
        ("node.psu1_share", PSU1, 0),
        ("rack.overhead", RACK, 0),
        ("rack.loss_factor", RACK, 1),
    ):
        of, kind, p = nodes.relations[relation], PARAMETER_KINDS[name], known[name]
        if kind.table != table:
            continue
        taught_s = of.fit.taught_s
        yield Calibration(kind, _by_reference(p, taught_s), p.value, _joint(kind, p.value, p.sigma),
                          stated.get(name, of.prior[k]), None, taught_s, p.reference, of.reference.settled_ns,
                          p.sigma)  # fmt: skip
