"""Estimator: the expected value beside each reading, with the learned noise of their difference.

Composes the parts of `twin.estimation`: GPUs, nodes and racks from power and coolant, CDUs and loops from
each other and the weather, the power tree from its sums. An expectation uses no reading of the same
quantity from the same device that is younger than a minute; learned parameters come into use that much
later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.catalogue import F64, I64, Bool, ConfigError
from twin.contracts import Residual, Windows, confidence_of
from twin.estimation import exchanger, heat, hydraulics, loops, power_tree
from twin.estimation.comparisons import Board
from twin.estimation.gpus import GpuEstimator
from twin.estimation.heat import RACK_NAMES, RackHeat
from twin.estimation.hydraulics import CDU_NAMES, Cooled, HydraulicsEstimator
from twin.estimation.loops import LOOP_NAMES, SITE_NAMES, Loops
from twin.estimation.nodes import NodeEstimator
from twin.estimation.noise import ResidualNoise
from twin.estimation.parameter import Parameter
from twin.estimation.power_tree import BALANCE, Balance, PowerTreeEstimator, balances_of
from twin.estimation.readings import Lag, Latest, Readings, Steps
from twin.physics import COOLANTS
from twin.site import Site
from twin.telemetry import EntityState, OldOfNew, State, part, scalar

__all__ = ["Balance", "Estimator", "balances_of"]
HEAT = "rack.heat"
AWAY_S = 5.0  # without ticks, at least, between an end and a restart; source: estimate


class Estimator(EntityState):
    """Residuals and learned parameters of a site."""

    board: Board = part()
    lags: dict[str, Lag] = part()
    steps: dict[str, Steps] = part()  # by table
    hydraulics: HydraulicsEstimator = part()
    gpus: GpuEstimator = part()
    nodes: NodeEstimator = part()
    step_s: float = scalar(0.0)  # usual time between two ticks, the longest of the last ones

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        if site.file.coolant not in COOLANTS:
            raise ConfigError(f"$.coolant: expected one of {', '.join(COOLANTS)}, got {site.file.coolant!r}")
        self.site, self.coolant = site, COOLANTS[site.file.coolant]
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = [row for part in (heat, hydraulics, exchanger, loops) for row in part.rows(site)]
        self.balances = balances_of(site)  # the sums that the power tree offers
        self.board = Board(rows + power_tree.rows(site, self.balances))
        self.tree = PowerTreeEstimator(site, self.balances)
        cooled = Cooled(site)
        self.heat, self.hydraulics = RackHeat(site, self.coolant), HydraulicsEstimator(site, cooled)
        self.exchange, self.loops = exchanger.Exchange(site, self.coolant, cooled), Loops(site)
        self.lags = {
            "plates": self.heat.plates,
            "tank": self.heat.tank,
            "mix": self.heat.mix,
            "other": self.heat.other,
            "legs": self.exchange.legs,
            "loop": self.loops.tank,
            "calm": self.loops.calm,
            "aim": self.loops.aim,
            "feeders": self.tree.moved,
        }
        self._rack, self._cdu = Latest("rack", RACK_NAMES), Latest("cdu", CDU_NAMES)
        self._loop, self._weather = Latest("loop", LOOP_NAMES), Latest("site", SITE_NAMES)
        self.steps = {
            latest.table: Steps(len(latest.at), site.sizes, latest.table)
            for latest in (self._rack, self._cdu, self._loop, self._weather)
        }
        self._feeder = Latest("feeder", ("power_w",))
        self.gpus, self.nodes = GpuEstimator(site), NodeEstimator(site)
        self.residuals: dict[str, Residual] = {}
        self.frozen = False  # nothing is learned any more

    def update(self, state: State, dt_s: float, windows: Windows | None = None) -> None:
        """Compare, then learn. Uses only good readings; other readings give NaN.

        Nothing is learned of what people work at, nor of sums that contain it.
        """
        for latest in (self._rack, self._cdu, self._loop, self._weather, self._feeder):
            latest.take(state, self.steps.get(latest.table))
        board, now_ns, readings = self.board, state.now_ns, Readings(state)
        untouched = np.zeros(board.n, np.bool_) if self.frozen else self._spared(windows)
        seen_s = self._seen_s(dt_s)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            board.begin(now_ns)
            self.heat.update(self._rack, readings, board, now_ns, seen_s)
            self.hydraulics.update(self._rack, self._cdu, board)
            self.exchange.update(self._rack, self._cdu, self._loop, board, now_ns, seen_s)
            self.loops.update(self._weather, self._cdu, self._loop, board, now_ns, seen_s)
            self.tree.moves_below(self.nodes.lately_w())
            self.tree.update(self._feeder, self._rack, board, now_ns, seen_s)
            board.settle(dt_s, untouched)
        for row in board.rows:
            self.residuals[row.name] = board.residual(row.name)
        self._devices(readings, dt_s, windows)

    def _seen_s(self, dt_s: float) -> float:
        """Return the seconds of a step that its readings cover: the usual step after a time without ticks."""
        usual_s, self.step_s = self.step_s, max(dt_s, 0.5 * self.step_s)
        return usual_s if usual_s > 0.0 and dt_s > max(AWAY_S, 2.0 * usual_s) else dt_s

    def _devices(self, readings: Readings, dt_s: float, windows: Windows | None) -> None:
        """Compare GPUs, nodes, and racks by the power of their nodes."""
        tables = ("gpu", "node", "rack")
        touched = {} if windows is None else {t: m for t in tables if (m := windows.mask(t)) is not None}
        if self.frozen:
            touched = {t: np.ones(self.site.sizes[t], np.bool_) for t in tables}
        self.residuals |= self.gpus.update(readings, dt_s, touched.get("gpu"))
        self.residuals |= self.nodes.update(readings, dt_s, touched)

    @property
    def air_drift(self) -> F64:
        """Return the drift of the resistances of a GPU's neighbours in air [n_gpu]; 0 in coolant."""
        return self.gpus.temp.air_drift()

    @property
    def clogged_pu(self) -> F64:
        """Return the filter's head beyond its early drop, over the design's head [n_cdu]."""
        return self.hydraulics.clogged_pu

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Return the learned parameters, by name such as `cdu.ua`."""
        out: dict[str, Parameter] = {}
        for row in self.board.rows:
            if row.parameter:
                value, var, early, early_var = (
                    self.board.learned(row.name, k) for k in ("value", "var", "reference", "reference_var")
                )
                sure = confidence_of(value - early, np.sqrt(var + early_var))
                out[row.parameter] = Parameter(row.parameter, row.table, value, early, np.sqrt(var), sure)
        return out | self.gpus.parameters() | self.nodes.parameters()

    def learning_left(self, name: str) -> tuple[F64, I64]:
        """Return what a comparison still needs until its band is learned [n]: seconds, and then readings
        while what it expects stands still.
        """
        if name in self.nodes.relations:
            return self.nodes.relations[name].learning_left()
        return self.board.learning_left(name) if name in self.board.cells else self.gpus.learning_left(name)

    def _spared(self, windows: Windows | None) -> Bool | None:
        """Return the cells of the board outside maintenance; None without maintenance."""
        if windows is None:
            return None
        touched = {t: windows.mask(t) for t in ("rack", "cdu", "loop", "feeder")}
        touched["rack"] = windows.racks_touched()
        if all(mask is None for mask in touched.values()):
            return None
        touched["balance"] = self.tree.touched(touched["feeder"], touched["rack"])
        cells = np.ones(self.board.n, np.bool_)
        for row in self.board.rows:
            if (mask := touched[row.table]) is not None:
                cells[self.board.cells[row.name]] = ~mask
        return cells

    def freeze(self) -> None:
        """Freeze learning and use the learned parameters from now on, so that the following time can be
        scored."""
        self.board.use_now()
        self.frozen = True

    @property
    def balance_noise(self) -> ResidualNoise:
        """Return the noise of the balances."""
        return self.board.noise_of(BALANCE)

    @property
    def heat_noise(self) -> ResidualNoise:
        """Return the noise of the racks' return temperatures. Read only."""
        return self.board.noise_of(HEAT)

    @property
    def heat_received_ns(self) -> I64:
        """Return the instant of the oldest reading of each rack's heat balance [n_rack]; each teaches
        once."""
        return self.board.taught_ns[self.board.cells[HEAT]]

    @property
    def balance_received_ns(self) -> I64:
        """Return the instant of the oldest reading of each balance."""
        return self.board.taught_ns[self.board.cells[BALANCE]]

    @property
    def capture(self) -> F64:
        """Return the learned share of a rack's power that its liquid carries [n_rack]; it comes into use
        later."""
        return self.board.learned(HEAT)

    @property
    def capture_var(self) -> F64:
        """Return the variance of the capture."""
        return self.board.learned(HEAT, "var")

    @property
    def capture_count(self) -> I64:
        """Return the number of readings behind the capture."""
        return self.board.count[self.board.cells[HEAT]]

    def liquid_capture(self) -> F64:
        """Return the share of each rack's electric power that its liquid carries [n_rack]; NaN if unknown."""
        return np.where(self.capture_count > 0, self.capture, np.nan)

    @property
    def loop_steps_k(self) -> F64:
        """Return 1 sigma of each loop's supply from the resolution of its readings, K [n_loop]."""
        return self._loop.step_sigma("supply_temp_c")

    @property
    def loop_aim_c(self) -> F64:
        """Return the coldest set point of each loop's CDUs [n_loop]; NaN if unknown."""
        return self.loops.aim_c

    def balances_with(self, feeders: Bool | None, racks: Bool | None) -> Bool:
        """Return the balances that contain one of these [n_balance]."""
        return self.tree.touched(feeders, racks)

    def tree_residual_pu(self) -> tuple[float | None, bool]:
        """Return (deviation of the outermost complete balances over their load, True if an edge was
        guessed)."""
        return self.tree.off_pu(self.residuals.get(BALANCE))

    def remapped(self, site: Site, old_of_new: OldOfNew) -> Estimator:
        """Return the learned state for a changed site; balances are learned again, because their members
        changed."""
        out = Estimator(site)
        out.adopt(self, old_of_new)
        return out

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave; until snapshot format 4 a board kept most columns in a dict."""
        board = data.get("board", {})
        super().restore({**data, "board": {**board, **board.get("kept", {})}} if "kept" in board else data)
