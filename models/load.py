"""load: what power, heat, jobs, requests, price and carbon will be, in a minute and in a day.

Two grids of rows: minutes for horizons up to an hour, quarters of an hour beyond. On each the experts of
`models.forecasters`, and those of `models.schedule`, are combined online as in a backtest. A row is the mean
of what was measured in its time; one that nobody heard is a gap, and a forecast is of a row's mean. Fits run
in a worker on the rows gathered here. May import models, contracts and quantities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from models import schedule
from models.blend import Blend
from models.calendar import hours_of_day
from models.forecaster import BANDS, LEVELS, MEDIAN, Forecaster, Grid
from models.forecasters import DEFAULT_EXPERTS, FORECASTERS
from models.panel import Panel
from twin.contracts import Forecast, View
from twin.errors import ContractError
from twin.frame import F64, I32, NS
from twin.quantities import find_quantity, measured
from twin.tree import digest

SIGNALS = (
    "rack.power_w",
    "cdu.power_w",
    "cdu.heat_w",
    "feeder.power_w",
    "site.power_w",
    "site.gpu_demand_count",
    "site.requests_per_s",
    "site.grid_price_usd_per_kwh",
    "site.grid_carbon_g_per_kwh",
)
# Measured until now and, where somebody tells an outlook, known ahead: what learned experts may look at.
KNOWN = ("site.outdoor_temp_c", "site.outdoor_wet_bulb_c")
HORIZONS_S = (60.0, 300.0, 900.0, 3600.0, 21600.0, 86400.0)
# (name, longest step, rows kept, longest horizon): 26 hours of minutes, four weeks of quarters of an hour, so
# that a day, and four times the same hour of the week, lie behind every origin. source: estimate
GRIDS = (("fine", 60.0, 1560, 3600.0), ("coarse", 900.0, 2688, 7 * 86400.0))
LOW, HIGH = BANDS["90"]
# Between two fits: at least this, and this many rows, and a quarter of the time gathered so far; at most a
# day, or this many rows. What changes faster is learned online. source: estimate
FIT_LEAST_S, FIT_LEAST_ROWS, FIT_GROWTH, FIT_MOST_S, FIT_MOST_ROWS = 3600.0, 120, 0.25, 86_400.0, 2000


class Load:
    """Forecasts of quantities, by a blend of experts.

    `experts` names them, separated by commas (default: all but the LSTM); `zone` is the time zone by which
    people there work. Raises ContractError for what it does not know.
    """

    name: ClassVar[str] = "load"
    period_s: ClassVar[float] = 10.0
    fit_every_s: ClassVar[float] = FIT_LEAST_S

    def __init__(
        self,
        signals: tuple[str, ...] = SIGNALS,
        horizons_s: tuple[float, ...] = HORIZONS_S,
        experts: str = ",".join(DEFAULT_EXPERTS),
        zone: str = "UTC",
    ) -> None:
        self.signals, self.horizons_s, self.zone = signals or SIGNALS, tuple(horizons_s or HORIZONS_S), zone
        self.expert_names = tuple(name.strip() for name in experts.split(",") if name.strip())
        for key in self.signals:
            if find_quantity(key) is None:
                raise ContractError(f"{key} is no quantity that can be forecast")
        unknown = [name for name in self.expert_names if name not in FORECASTERS]
        if unknown or not self.expert_names:
            raise ContractError(f"experts {unknown}: expected some of {', '.join(FORECASTERS)}")
        if not all(0 < h <= GRIDS[-1][3] for h in self.horizons_s):
            raise ContractError(f"horizons_s: expected seconds up to a week, got {self.horizons_s}")
        hours_of_day(np.zeros(1, np.int64), zone)  # an unknown zone is refused here
        self._dt_s = 0.0
        self._blends: dict[str, Blend] = {}
        self._slices: dict[str, slice] = {}
        self._sums: dict[str, F64] = {}  # of the rows not yet complete: sums, and how many each took in
        self._counts: dict[str, F64] = {}
        self._rows: dict[str, int] = {}
        self._said: dict[str, F64] = {}  # quantiles [n_horizon, n, n_level] from the newest row
        self._present = np.zeros(0)
        self._parameters: dict[str, np.ndarray] = {}
        self._version = "unfitted"

    def settings(self) -> dict[str, object]:
        """What makes another like this one."""
        return {
            "signals": self.signals,
            "horizons_s": self.horizons_s,
            "experts": ",".join(self.expert_names),
            "zone": self.zone,
        }

    def grids(self, dt_s: float) -> dict[str, Grid]:
        """The grids for ticks of this length: no row is shorter than a tick, and horizons are whole rows."""
        out, least_s = {}, 0.0
        for name, step_s, _, most_s in GRIDS:
            mine = [h for h in self.horizons_s if least_s < h <= most_s]
            least_s = most_s
            if mine:
                common_ms = int(np.gcd.reduce([max(1, round(h * 1000)) for h in mine]))
                step_s = max(min(step_s, common_ms / 1000), dt_s)
                rows = sorted({round(h / step_s) for h in mine if h >= step_s})
                if rows:
                    out[name] = Grid(step_s, tuple(rows))
        return out

    def _experts(self, name: str, grid: Grid) -> list[Forecaster]:
        made = [FORECASTERS[expert](grid) for expert in self.expert_names]
        for expert in made:
            prefix = f"{name}/{expert.name}/"
            expert.load(
                {k.removeprefix(prefix): v for k, v in self._parameters.items() if k.startswith(prefix)}
            )
        return made

    def _shape(self, dt_s: float, sizes: Mapping[str, int]) -> None:
        """Begin with empty rows for series of these sizes, key -> n."""
        self._dt_s, begin = dt_s, 0
        self._slices = {}
        for key in self.signals:
            self._slices[key] = slice(begin, begin + sizes[key])
            begin += sizes[key]
        rows = {name: kept for name, _, kept, _ in GRIDS}
        self._blends, self._sums, self._counts, self._rows, self._said = {}, {}, {}, {}, {}
        for name, grid in self.grids(dt_s).items():
            blend = Blend(
                grid, begin, rows[name], self._experts(name, grid), schedule.EXPERTS, self.zone, KNOWN
            )
            self._blends[name], self._rows[name] = blend, -1
            self._sums[name], self._counts[name] = np.zeros(begin), np.zeros(begin)
        self._present = np.full(begin, np.nan)

    def update(self, view: View) -> None:
        """Take in what is measured now."""
        values = [measured(view, key) for key in self.signals]
        if view.dt_s > 1.5 * self._dt_s:
            self._shape(view.dt_s, {k: len(v) for k, v in zip(self.signals, values, strict=True)})
        self._present = now = np.concatenate(values) if values else np.zeros(0)
        known = np.isfinite(now)
        for name, blend in self._blends.items():
            # A tick at the end of a row is about the time before it.
            row = (view.now_ns - 1) // blend.step_ns
            if row > self._rows[name] >= 0:
                self._close(name, view)
            self._rows[name] = max(row, self._rows[name])
            self._sums[name] += np.where(known, now, 0.0)
            self._counts[name] += known

    def _close(self, name: str, view: View) -> None:
        count = self._counts[name]
        mean = np.where(count > 0, self._sums[name] / np.maximum(count, 1.0), np.nan)
        blend = self._blends[name]
        blend.append(self._rows[name], mean, np.concatenate([measured(view, key) for key in KNOWN]))
        self._sums[name], self._counts[name] = np.zeros_like(mean), np.zeros_like(count)
        self._said[name] = blend.say(self._from_outside(blend, view), self._ahead(blend, view))

    @staticmethod
    def _ahead(blend: Blend, view: View) -> F64:
        """Outlooks of KNOWN in the rows that are forecast [largest horizon, n_known]; NaN elsewhere."""
        out = np.full((blend.grid.horizons[-1], len(KNOWN)), np.nan)
        for rows in blend.grid.horizons:
            at_ns = (blend.row + rows) * blend.step_ns + blend.step_ns // 2
            out[rows - 1] = [view.outlook(key, at_ns)[0] for key in KNOWN]
        return out

    def predict(self, view: View) -> list[Forecast]:
        """Forecasts from the newest row; before there is one, the present value without a band."""
        out = []
        for name, blend in self._blends.items():
            said = self._said.get(name)
            for i, rows in enumerate(blend.grid.horizons):
                for key, series in self._slices.items():
                    unsaid = np.full((series.stop - series.start, len(LEVELS)), np.nan)
                    part = unsaid if said is None else said[i, series]
                    out.append(self._forecast(key, rows * blend.grid.step_s, part, blend.basis(i, series)))
        return out

    def _forecast(self, key: str, horizon_s: float, said: F64, basis: str) -> Forecast:
        what = find_quantity(key)
        assert what is not None
        within = np.clip(said, what.low, what.high)
        centre = np.where(np.isnan(said[:, MEDIAN]), self._present[self._slices[key]], within[:, MEDIAN])
        mean, low, high = (x.astype(np.float32) for x in (centre, within[:, LOW], within[:, HIGH]))
        model = f"{self.name}@{self._version}"
        return Forecast(key, round(horizon_s, 3), mean, low, high, model, basis)

    def _from_outside(self, blend: Blend, view: View) -> dict[str, F64]:
        """Points of the experts that do not read rows [n_horizon, n]."""
        horizons_s = tuple(rows * blend.grid.step_s for rows in blend.grid.horizons)
        falls = schedule.falls(view, horizons_s)
        newest = blend.panel(1).values[-1]
        planned = np.full((len(horizons_s), blend.n), np.nan)
        told = np.full((len(horizons_s), blend.n), np.nan)
        for key, series in self._slices.items():
            if key in falls:
                planned[:, series] = np.maximum(newest[series] - falls[key], 0.0)
            for i, horizon_s in enumerate(horizons_s):
                told[i, series] = view.outlook(key, view.now_ns + round(horizon_s * NS))
        return {"schedule": planned, "outlook": told}

    def next_fit_s(self) -> float:
        """Seconds from one fit to the next: soon at first, rarely once there is much past."""
        if self.fit_every_s != Load.fit_every_s or not self._blends:  # a site said otherwise
            return self.fit_every_s
        steps_s = [blend.grid.step_s for blend in self._blends.values()]
        past_s = max(blend.panel().n_time * blend.grid.step_s for blend in self._blends.values())
        most_s = max(FIT_MOST_S, FIT_MOST_ROWS * steps_s[0])
        return min(max(FIT_LEAST_S, FIT_LEAST_ROWS * steps_s[0], FIT_GROWTH * past_s), most_s)

    def training(self) -> dict[str, np.ndarray]:
        """The rows that a fit learns from, per grid; empty while there are none."""
        out: dict[str, np.ndarray] = {}
        for name, blend in self._blends.items():
            if blend.row >= 0 and blend.n:
                panel = blend.panel()
                out[f"{name}/values"] = panel.values.astype(np.float32)
                past = [panel.known[key][: panel.n_time] for key in KNOWN]
                out[f"{name}/known"] = np.array(past, np.float32)
                out[f"{name}/grid"] = np.array([blend.grid.step_s, *blend.grid.horizons])
                out[f"{name}/start_ns"] = np.array([panel.start_ns], np.int64)
        return out

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        """Parameters of every expert on every grid from what `training` gave."""
        out: dict[str, np.ndarray] = {}
        for name, *_ in GRIDS:
            if f"{name}/values" not in series:
                continue
            shape = series[f"{name}/grid"]
            grid = Grid(float(shape[0]), tuple(int(h) for h in shape[1:]))
            start_ns = int(series[f"{name}/start_ns"][0])
            values, known = (series[f"{name}/{what}"].astype(np.float64) for what in ("values", "known"))
            ahead = dict(zip(KNOWN, known, strict=True))
            panel = Panel(start_ns, grid.step_s, values, zone=self.zone, known=ahead)
            out[f"{name}/grid"] = shape
            for expert in self.expert_names:
                if FORECASTERS[expert].fitted:
                    fitted = FORECASTERS[expert](grid).fit(panel, seed)
                    out |= {f"{name}/{expert}/{key}": array for key, array in fitted.items()}
        return out

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Use fitted experts. Raises ContractError for anything else, and keeps those before."""
        before, self._parameters = self._parameters, {k: np.array(parameters[k]) for k in sorted(parameters)}
        try:
            self._check(parameters)
            for name, blend in self._blends.items():
                blend.experts = tuple(self._experts(name, blend.grid))
        except (ContractError, ValueError) as error:
            self._parameters = before
            for name, blend in self._blends.items():
                blend.experts = tuple(self._experts(name, blend.grid))
            raise ContractError(str(error)) from error
        self._version = digest(self._parameters)[:12] if self._parameters else "unfitted"

    def _check(self, parameters: Mapping[str, np.ndarray]) -> None:
        names = [name for name, *_ in GRIDS]
        for key, array in parameters.items():
            name, _, rest = key.partition("/")
            expert = rest.partition("/")[0]
            known = name in names and (rest == "grid" or expert in FORECASTERS)
            if not known or not isinstance(array, np.ndarray):
                raise ContractError(f"{key} is not a parameter of {self.name}")
        for name in names:
            shape = parameters.get(f"{name}/grid")
            if shape is None:
                continue
            if shape.ndim != 1 or len(shape) < 2 or not np.isfinite(shape).all():
                raise ContractError(f"{name}/grid: expected a step and horizons, got {shape.shape}")
            self._experts(name, Grid(float(shape[0]), tuple(int(h) for h in shape[1:])))

    def parameters(self) -> dict[str, np.ndarray]:
        """What was fitted, if anything."""
        return dict(self._parameters)

    def memory(self) -> dict[str, np.ndarray]:
        """Rows, what they taught, and the rows not yet complete."""
        if not self._blends:
            return {}
        out: dict[str, np.ndarray] = {
            "dt_s": np.array([self._dt_s]),
            "sizes": np.array([s.stop - s.start for s in self._slices.values()], np.int64),
            "present": self._present.copy(),
        }
        for name, blend in self._blends.items():
            out |= {f"{name}/{key}": array for key, array in blend.memory().items()}
            out[f"{name}/sum"], out[f"{name}/count"] = self._sums[name].copy(), self._counts[name].copy()
            if name in self._said:
                out[f"{name}/said"] = self._said[name].copy()
            out[f"{name}/open_row"] = np.array([self._rows[name]], np.int64)
        return out

    def restore(self, memory: Mapping[str, np.ndarray]) -> None:
        """Take over what `memory` gave."""
        if "dt_s" not in memory:
            return
        self._shape(float(memory["dt_s"][0]), dict(zip(self.signals, memory["sizes"].tolist(), strict=True)))
        self._present = np.array(memory["present"])
        for name, blend in self._blends.items():
            prefix = f"{name}/"
            blend.restore({k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)})
            self._sums[name], self._counts[name] = (
                np.array(memory[f"{name}/sum"]),
                np.array(memory[f"{name}/count"]),
            )
            self._rows[name] = int(memory[f"{name}/open_row"][0])
            if f"{name}/said" in memory:
                self._said[name] = np.array(memory[f"{name}/said"])

    def remap(self, old_of_new: Mapping[str, I32]) -> None:
        """Move the series of entities that stayed; the others begin with nothing."""
        if not self._blends:
            return
        pieces, slices, begin = [], {}, 0
        for key, series in self._slices.items():
            was = old_of_new[key.partition(".")[0]]
            pieces.append(np.where(was >= 0, was + series.start, -1).astype(np.int32))
            slices[key] = slice(begin, begin + len(was))
            begin += len(was)
        moved = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
        there = np.flatnonzero(moved >= 0)
        for name, blend in self._blends.items():
            blend.remap(moved)
            for held in (self._sums, self._counts):
                column = np.zeros(begin)
                column[there] = held[name][moved[there]]
                held[name] = column
        present = np.full(begin, np.nan)
        present[there] = self._present[moved[there]]
        for name, said in self._said.items():
            kept = np.full((len(said), begin, said.shape[2]), np.nan)
            kept[:, there] = said[:, moved[there]]
            self._said[name] = kept
        self._slices, self._present = slices, present
