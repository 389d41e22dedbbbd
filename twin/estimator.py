"""The estimator: what a reading ought to be, beside what it is, with the noise of their difference learned.

Composes the parts of `twin.estimate`: GPUs, nodes and racks from power and coolant, CDUs and loops from each
other and the weather, the power tree from its sums. An expectation uses no reading of the same quantity from
the same device that is younger than a minute; learned parameters come into use that much later. May import
the parts, the state, the site, maintenance windows and contracts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.confidence import Residual
from twin.errors import ConfigError
from twin.estimate import exchanger, heat, hydraulics, loops, power_tree
from twin.estimate.board import Board
from twin.estimate.gpus import GpuEstimator
from twin.estimate.heat import RACK_NAMES, RackHeat
from twin.estimate.hydraulics import CDU_NAMES, Cooled, Hydraulics
from twin.estimate.latest import Lag, Latest
from twin.estimate.loops import LOOP_NAMES, SITE_NAMES, Loops
from twin.estimate.nodes import NodeEstimator
from twin.estimate.noise import Noise, confidence_of
from twin.estimate.parameter import Parameter
from twin.estimate.power_tree import BALANCE, Balance, PowerTree, balances_of
from twin.estimate.reading import Readings
from twin.frame import F64, I32, I64, Bool
from twin.maintenance import Windows
from twin.physics.liquid import COOLANTS
from twin.site import Site
from twin.state import State

__all__ = ["Balance", "Estimator", "balances_of"]
HEAT = "rack.heat"


class Estimator:
    """Residuals and learned parameters of a site."""

    def __init__(self, site: Site) -> None:
        if site.file.coolant not in COOLANTS:
            raise ConfigError(f"$.coolant: expected one of {', '.join(COOLANTS)}, got {site.file.coolant!r}")
        self.site, self.coolant = site, COOLANTS[site.file.coolant]
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = [row for part in (heat, hydraulics, exchanger, loops) for row in part.rows(site)]
        self.balances = balances_of(site)  # the sums that the power tree offers
        self.board = Board(rows + power_tree.rows(site, self.balances))
        self.tree = PowerTree(site, self.balances)
        cooled = Cooled(site)
        self.heat, self.hydraulics = RackHeat(site, self.coolant), Hydraulics(site, cooled)
        self.exchange, self.loops = exchanger.Exchange(site, self.coolant, cooled), Loops(site)
        self._rack, self._cdu = Latest("rack", RACK_NAMES), Latest("cdu", CDU_NAMES)
        self._loop, self._weather = Latest("loop", LOOP_NAMES), Latest("site", SITE_NAMES)
        self._feeder = Latest("feeder", ("power_w",))
        self.gpus, self.nodes = GpuEstimator(site), NodeEstimator(site)
        self.residuals: dict[str, Residual] = {}
        self.frozen = False  # nothing is learned any more

    def update(self, state: State, dt_s: float, windows: Windows | None = None) -> None:
        """Compare, then learn. Uses only good readings; anything else gives NaN.

        Nothing is learned of what people work at, nor of sums that contain it.
        """
        for readings in (self._rack, self._cdu, self._loop, self._weather, self._feeder):
            readings.take(state)
        board, now_ns = self.board, state.now_ns
        untouched = np.zeros(board.n, np.bool_) if self.frozen else self._spared(windows)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            board.begin(now_ns)
            self.heat.update(self._rack, board, now_ns, dt_s)
            self.hydraulics.update(self._rack, self._cdu, board)
            self.exchange.update(self._rack, self._cdu, self._loop, board, now_ns, dt_s)
            self.loops.update(self._weather, self._cdu, self._loop, board, now_ns, dt_s)
            self.tree.update(self._feeder, self._rack, board)
            board.settle(dt_s, untouched)
        for row in board.rows:
            self.residuals[row.name] = board.residual(row.name)
        self._devices(state, dt_s, windows)

    def _devices(self, state: State, dt_s: float, windows: Windows | None) -> None:
        """GPUs, nodes, and racks by the power of their nodes."""
        readings = Readings(state)
        tables = ("gpu", "node", "rack")
        touched = {} if windows is None else {t: m for t in tables if (m := windows.mask(t)) is not None}
        if self.frozen:
            touched = {t: np.ones(self.site.sizes[t], np.bool_) for t in tables}
        self.residuals |= self.gpus.update(readings, dt_s, touched.get("gpu"))
        self.residuals |= self.nodes.update(readings, dt_s, touched)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """What is learned, by name such as `cdu.ua`."""
        out: dict[str, Parameter] = {}
        for row in self.board.rows:
            if row.parameter:
                kept = {
                    k: self.board.learned(row.name, k) for k in ("value", "var", "reference", "reference_var")
                }
                sigma = np.sqrt(kept["var"])
                moved = kept["value"] - kept["reference"]
                sure = confidence_of(moved, np.sqrt(kept["var"] + kept["reference_var"]))
                out[row.parameter] = Parameter(
                    row.parameter, row.table, kept["value"], kept["reference"], sigma, sure
                )
        return out | self.gpus.parameters() | self.nodes.parameters()

    def _spared(self, windows: Windows | None) -> Bool | None:
        """Cells of the board that nobody works at; None where nobody works anywhere."""
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
        """Nothing more is learned; what was, is used from now on: so that what follows can be scored."""
        self.board.use_now()
        self.frozen = True

    @property
    def balance_noise(self) -> Noise:
        """Of the balances."""
        return self.board.noise_of(BALANCE)

    @property
    def heat_noise(self) -> Noise:
        """Of the racks' return temperatures, to be read."""
        return self.board.noise_of(HEAT)

    @property
    def heat_heard_ns(self) -> I64:
        """Instant of the oldest reading of each rack's heat balance [n_rack]: one is learned from once."""
        return self.board.taught_ns[self.board.cells[HEAT]]

    @property
    def balance_heard_ns(self) -> I64:
        """Instant of the oldest reading of each balance."""
        return self.board.taught_ns[self.board.cells[BALANCE]]

    @property
    def capture(self) -> F64:
        """Share of a rack's power that its liquid carries, as learned by now [n_rack]; used later."""
        return self.board.learned(HEAT)

    @property
    def capture_var(self) -> F64:
        """Its variance."""
        return self.board.learned(HEAT, "var")

    @property
    def capture_count(self) -> I64:
        """Readings that it was learned from."""
        return self.board.count[self.board.cells[HEAT]]

    def liquid_capture(self) -> F64:
        """Share of each rack's electric power that its liquid carries [n_rack]; NaN while unknown."""
        return np.where(self.capture_count > 0, self.capture, np.nan)

    def balances_with(self, feeders: Bool | None, racks: Bool | None) -> Bool:
        """Balances of which one of these is a member [n_balance]."""
        return self.tree.touched(feeders, racks)

    def tree_residual_pu(self) -> tuple[float | None, bool]:
        """(difference of the outermost complete balances over their load, whether an edge was guessed)."""
        return self.tree.off_pu(self.residuals.get(BALANCE))

    def _lags(self) -> dict[str, tuple[str, Lag]]:
        return {
            "plates": ("rack", self.heat.plates), "tank": ("rack", self.heat.tank),
            "legs": ("cdu", self.exchange.legs), "loop": ("loop", self.loops.tank),
        }  # fmt: skip

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot: what was learned of the old one is not true of it."""
        self.board.forget(table, entity)
        self.nodes.forget(table, entity)
        if table == "gpu":
            self.gpus.forget(entity)
        for of, lag in self._lags().values():
            if of == table:
                lag.forget(entity)

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Estimator:
        """What was learned, for a changed site; balances are learned afresh, since their members changed."""
        out = Estimator(site)
        out.board.adopt(
            self.board, {t: old_of_new[t] for t in ("rack", "cdu", "loop", "feeder") if t in old_of_new}
        )
        out.gpus, out.nodes = self.gpus.remapped(site, old_of_new), self.nodes.remapped(site, old_of_new)
        mine = self._lags()
        for name, (table, lag) in out._lags().items():
            if table in old_of_new:
                kept = np.flatnonzero(old_of_new[table] >= 0)
                source = old_of_new[table][kept]
                lag.level[:, kept] = mine[name][1].level[:, source]
                lag.known_ns[:, kept] = mine[name][1].known_ns[:, source]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything learned, for a snapshot or a checksum."""
        return {
            "board": self.board.dump(), "lags": {k: lag.dump() for k, (_, lag) in self._lags().items()},
            "gpus": self.gpus.dump(), "nodes": self.nodes.dump(),
        }  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave; what an older version did not keep is learned afresh."""
        if "gpus" in data:
            self.gpus.restore(data["gpus"])
            self.nodes.restore(data["nodes"])
        if "board" in data and self.board.restore(data["board"]):
            for name, (_, lag) in self._lags().items():
                lag.restore(data["lags"][name])
        elif "capture" in data:
            self._restore_first(data)

    def _restore_first(self, data: Mapping[str, Any]) -> None:
        """From a version that knew racks' heat and balances only."""
        at = self.board.cells[HEAT]
        for name in ("value", "waiting", "in_use"):
            self.board.learned(HEAT, name)[:] = data["capture"]
        for name in ("var", "waiting_var", "in_use_var"):
            self.board.learned(HEAT, name)[:] = data["capture_var"]
        self.board.count[at], self.board.taught_ns[at] = data["capture_count"], data["heat_heard_ns"]
        self.board.taught_ns[self.board.cells[BALANCE]] = data["balance_heard_ns"]
        for row, kept in ((HEAT, "heat_noise"), (BALANCE, "balance_noise")):
            for name in ("variance", "count", "off_ns"):
                getattr(self.board.noise, name)[self.board.cells[row]] = data[kept][name]
