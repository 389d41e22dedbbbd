"""load: forecasts power, heat, jobs, requests, price and carbon, from a minute to a day ahead.

Two grids of rows: minutes for horizons up to an hour, quarters of an hour beyond. On each the experts of
`models.load.forecasters`, and those of `models.load.schedule`, are combined online as in a backtest. A
row is the mean of what was measured in its time; one without a reading is a gap, and a forecast is of a
row's mean. Fits run in a worker on the rows gathered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from models.load import schedule
from models.load.blend import Blend, KeptRows
from models.load.calendar import hours_of_day
from models.load.expert_aggregation import with_expert
from models.load.fits import FIT_LEAST_S, GRIDS, KNOWN, between_fits_s, fit_all, grids_of, training_series
from models.load.forecaster import Forecaster, ForecastGrid
from models.load.forecasters import DEFAULT_EXPERTS, FORECASTERS
from twin.catalogue import F64, I32, NS, ContractError, digest, find_quantity
from twin.contracts import Forecast, View, measured

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
HORIZONS_S = (60.0, 300.0, 900.0, 3600.0, 21600.0, 86400.0)
# Ticks so much longer or shorter are of another kind once so many came in a row; a pause, an overload or the
# tick behind an urgent one is none. source: estimate
UNUSUAL, UNUSUAL_TICKS = 1.5, 5


class Load:
    """Forecasts of quantities, by a blend of experts.

    `experts` names them, separated by commas (default: all); `zone` is the time zone by which
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
        if not isinstance(experts, str) or not isinstance(zone, str):
            raise ContractError(f"experts and zone: expected text, got {experts!r} and {zone!r}")
        self.signals, self.horizons_s, self.zone = signals or SIGNALS, tuple(horizons_s or HORIZONS_S), zone
        if len(set(self.signals)) < len(self.signals):
            raise ContractError(f"signals: expected each once, got {', '.join(self.signals)}")
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
        # Each row needs a look.
        steps_s = [grid.step_s for grid in self.grids(0.0).values()]
        self.period_s = min([Load.period_s, *steps_s])  # type: ignore[misc]
        self._parameters: dict[str, np.ndarray] = {}
        self._version = "unfitted"
        self._begin()

    def _begin(self) -> None:
        """Nothing was taken in yet."""
        self._dt_s, self._unusual = 0.0, 0
        self._blends: dict[str, Blend] = {}
        self._slices: dict[str, slice] = {}
        self._sums: dict[str, F64] = {}  # of the rows not yet complete: sums, and how many each took in
        self._counts: dict[str, F64] = {}
        self._rows: dict[str, int] = {}
        self._due: list[str] = []  # grids with a new row of which nothing was said yet, the longest first
        self._said: dict[str, F64] = {}  # low, median, high [n_horizon, n, 3] from the newest row
        self._present = np.zeros(0)

    def settings(self) -> dict[str, object]:
        """Arguments that make an equal model."""
        return {
            "signals": self.signals,
            "horizons_s": self.horizons_s,
            "experts": ",".join(self.expert_names),
            "zone": self.zone,
        }

    def grids(self, dt_s: float) -> dict[str, ForecastGrid]:
        """The grids for ticks of this length."""
        return grids_of(self.horizons_s, dt_s)

    def _experts(self, name: str, grid: ForecastGrid) -> list[Forecaster]:
        made = [FORECASTERS[expert](grid) for expert in self.expert_names]
        for expert in made:
            prefix = f"{name}/{expert.name}/"
            expert.load(
                {k.removeprefix(prefix): v for k, v in self._parameters.items() if k.startswith(prefix)}
            )
        return made

    def _shape(self, dt_s: float, sizes: Mapping[str, int]) -> None:
        """Begin with empty rows for series of these sizes, key -> n."""
        self._begin()
        self._dt_s, begin = dt_s, 0
        for key in self.signals:
            self._slices[key] = slice(begin, begin + sizes[key])
            begin += sizes[key]
        rows = {name: kept for name, _, kept, _ in GRIDS}
        grids = self.grids(dt_s)
        try:
            _ = [self._experts(name, grid) for name, grid in grids.items()]
        except ContractError:  # they were fitted for rows of another length
            self._parameters, self._version = {}, "unfitted"
        for name, grid in grids.items():
            kept = KeptRows(rows[name], self.zone, KNOWN)
            blend = Blend(grid, begin, kept, self._experts(name, grid), schedule.EXPERTS)
            self._blends[name], self._rows[name] = blend, -1
            self._sums[name], self._counts[name] = np.zeros(begin), np.zeros(begin)
        self._present, self._due = np.full(begin, np.nan), []

    def update(self, view: View) -> None:
        """Take the present measurements."""
        values = [measured(view, key) for key in self.signals]
        self._follow(view.dt_s, {k: len(v) for k, v in zip(self.signals, values, strict=True)})
        self._present = now = np.concatenate(values) if values else np.zeros(0)
        known = np.isfinite(now)
        for name, blend in self._blends.items():
            # A tick at the end of a row is about the time before it.
            row = (view.now_ns - 1) // blend.step_ns
            if row > self._rows[name] > blend.row:
                self._close(name, view)
            if row <= blend.row:
                continue  # it is complete already
            self._rows[name] = row
            self._sums[name] += np.where(known, now, 0.0)
            self._counts[name] += known
            # The last look at a row completes it: what is said at its end does not wait for the next one.
            next_ns = view.now_ns + round(max(self._dt_s, self.period_s) * NS)
            if (next_ns - 1) // blend.step_ns > row:
                self._close(name, view)
        self._speak(view)

    def _follow(self, dt_s: float, sizes: Mapping[str, int]) -> None:
        """Follow the usual length of ticks; after a change, rows restart if they must."""
        if self._dt_s == 0.0 or any(sizes[k] != s.stop - s.start for k, s in self._slices.items()):
            self._shape(dt_s, sizes)
            return
        usual = self._dt_s / UNUSUAL <= dt_s <= self._dt_s * UNUSUAL
        self._unusual = 0 if usual else self._unusual + 1
        if self._unusual >= UNUSUAL_TICKS:
            if self.grids(dt_s) != self.grids(self._dt_s):
                self._shape(dt_s, sizes)
            self._dt_s, self._unusual = dt_s, 0

    def _speak(self, view: View) -> None:
        """Forecast the new row of one grid; another one waits for the next call, so that no tick is long.

        All speak where a row is shorter than two calls.
        """
        between_s = max(self.period_s, self._dt_s)
        unhurried = all(blend.grid.step_s >= 2 * between_s for blend in self._blends.values())
        now = self._due[:1] if unhurried else self._due
        self._due = self._due[len(now) :]
        for name in now:
            blend = self._blends[name]
            self._said[name] = blend.say(self._from_outside(blend, view), self._ahead(blend, view))

    def _close(self, name: str, view: View) -> None:
        count = self._counts[name]
        mean = np.where(count > 0, self._sums[name] / np.maximum(count, 1.0), np.nan)
        blend = self._blends[name]
        blend.append(self._rows[name], mean, np.concatenate([measured(view, key) for key in KNOWN]))
        self._sums[name], self._counts[name] = np.zeros_like(mean), np.zeros_like(count)
        self._due += [name] if blend.n and name not in self._due else []

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
                    unsaid = np.full((series.stop - series.start, 3), np.nan)
                    part = unsaid if said is None else said[i, series]
                    out.append(self._forecast(key, rows * blend.grid.step_s, part, blend.basis(i, series)))
        return out

    def _forecast(self, key: str, horizon_s: float, said: F64, basis: str) -> Forecast:
        what = find_quantity(key)
        assert what is not None
        within = np.clip(said, what.low, what.high)
        centre = np.where(np.isnan(said[:, 1]), self._present[self._slices[key]], within[:, 1])
        mean, low, high = (x.astype(np.float32) for x in (centre, within[:, 0], within[:, 2]))
        model = f"{self.name}@{self._version}"
        return Forecast(key, round(horizon_s, 3), mean, low, high, model, basis)

    def _from_outside(self, blend: Blend, view: View) -> dict[str, F64]:
        """Points of the experts that do not read rows [n_horizon, n]."""
        # From the end of the newest row to the middle of the one that is forecast.
        horizons_s = tuple((rows - 0.5) * blend.grid.step_s for rows in blend.grid.horizons)
        falls = schedule.load_drops(view, horizons_s)
        newest = blend.panel(1).values[-1]
        planned = np.full((len(horizons_s), blend.n), np.nan)
        outlooks = np.full((len(horizons_s), blend.n), np.nan)
        for key, series in self._slices.items():
            if key in falls:
                # Where no job ends it would be the last value once more: it sleeps
                ends = falls[key] > 0.0
                planned[:, series] = np.where(ends, np.maximum(newest[series] - falls[key], 0.0), np.nan)
            for i, horizon_s in enumerate(horizons_s):
                outlooks[i, series] = view.outlook(
                    key, (blend.row + 1) * blend.step_ns + round(horizon_s * NS)
                )
        return {"schedule": planned, "outlook": outlooks}

    def next_fit_s(self) -> float:
        """Seconds from one fit to the next: soon at first, rarely once there is much past."""
        if "fit_every_s" in self.__dict__ or not self._blends:  # a site said otherwise
            return self.fit_every_s
        steps_s = [blend.grid.step_s for blend in self._blends.values()]
        past_s = max(
            min(blend.panel().n_time, blend.rows) * blend.grid.step_s for blend in self._blends.values()
        )
        return between_fits_s(steps_s[0], past_s)

    def awaits_ns(self, key: str, entity: int = 0) -> dict[float, int]:
        """Return the instants at which the bands of an entity begin if it keeps reporting, by horizon [s]."""
        out: dict[float, int] = {}
        for name, blend in self._blends.items():
            for i, rows in enumerate(blend.grid.horizons):
                row = blend.awaits_row(i, self._slices[key].start + entity, self._rows[name])
                if row is not None:
                    out[round(rows * blend.grid.step_s, 3)] = (row + 1) * blend.step_ns
        return out

    def training(self) -> dict[str, np.ndarray]:
        """The rows that a fit learns from, per grid; empty while there are none."""
        out: dict[str, np.ndarray] = {}
        for name, blend in self._blends.items():
            if blend.row >= 0 and blend.n:
                panel = blend.panel()
                out[f"{name}/values"] = panel.values[
                    :, training_series(panel.values, list(self._slices.values()))
                ].astype(np.float32)
                past = [panel.known[key][: panel.n_time] for key in KNOWN]
                out[f"{name}/known"] = np.array(past, np.float32)
                out[f"{name}/grid"] = np.array([blend.grid.step_s, *blend.grid.horizons])
                out[f"{name}/start_ns"] = np.array([panel.start_ns], np.int64)
        return out

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        """Parameters of every expert on every grid from what `training` gave."""
        return fit_all(series, seed, self.expert_names, self.zone)

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Use fitted experts. Raises ContractError for anything else, and keeps those before."""
        before, self._parameters = self._parameters, {k: np.array(parameters[k]) for k in sorted(parameters)}
        try:
            made = self._checked(parameters)
            for name, blend in self._blends.items():
                if (name, blend.grid) not in made:
                    made[name, blend.grid] = self._experts(name, blend.grid)
        except (ContractError, ValueError, TypeError, KeyError, IndexError) as error:
            self._parameters = before
            raise ContractError(str(error)) from error
        for name, blend in self._blends.items():
            blend.experts = tuple(made[name, blend.grid])
        self._version = digest(self._parameters)[:12] if self._parameters else "unfitted"

    def _checked(
        self, parameters: Mapping[str, np.ndarray]
    ) -> dict[tuple[str, ForecastGrid], list[Forecaster]]:
        """Experts with these parameters, by the grids that they name. Raises ContractError."""
        made: dict[tuple[str, ForecastGrid], list[Forecaster]] = {}
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
            grid = ForecastGrid(float(shape[0]), tuple(int(h) for h in shape[1:]))
            made[name, grid] = self._experts(name, grid)
        return made

    def parameters(self) -> dict[str, np.ndarray]:
        """The fitted parameters, if any."""
        return dict(self._parameters)

    def memory(self) -> dict[str, np.ndarray]:
        """Return the rows, the learned state and the incomplete rows. None of the arrays is written to
        later."""
        if not self._blends:
            return {}
        out: dict[str, np.ndarray] = {
            "made": self.made(),
            "dt_s": np.array([self._dt_s, self._unusual]),
            "sizes": np.array([s.stop - s.start for s in self._slices.values()], np.int64),
            "present": self._present,
            "due": np.array([list(self._blends).index(name) for name in self._due], np.int64),
        }
        for name, blend in self._blends.items():
            out |= {f"{name}/{key}": array for key, array in blend.memory().items()}
            out[f"{name}/sum"], out[f"{name}/count"] = self._sums[name].copy(), self._counts[name].copy()
            if name in self._said:
                out[f"{name}/said"] = self._said[name]
            out[f"{name}/open_row"] = np.array([self._rows[name]], np.int64)
        return out

    def restore(self, memory: Mapping[str, np.ndarray]) -> None:
        """Take over what `memory` gave; begins afresh where it is of other settings or another version.

        Memory of all experts but one is no other: that one slept until now.
        """
        if "dt_s" not in memory:
            return
        try:
            made = memory.get("made", np.zeros(0))
            if not np.array_equal(made, self.made()):
                names = enumerate(self.expert_names)
                new = [place for place, name in names if np.array_equal(made, self.made(without=name))]
                if not new:
                    raise ContractError("of other settings")
                memory = with_expert(memory, new[0])
            self._take_over(memory)
        except (ContractError, ValueError, TypeError, KeyError, IndexError):
            self._begin()
            self._parameters, self._version = {}, "unfitted"

    def made(self, without: str = "") -> np.ndarray:
        """A name for these settings, as bytes; `without` one of the experts."""
        settings = self.settings() | {"experts": ",".join(x for x in self.expert_names if x != without)}
        return np.frombuffer(digest(repr(sorted(settings.items()))).encode(), np.uint8)

    def _take_over(self, memory: Mapping[str, np.ndarray]) -> None:
        dt_s, unusual = memory["dt_s"].tolist()
        self._shape(dt_s, dict(zip(self.signals, memory["sizes"].tolist(), strict=True)))
        self._unusual = int(unusual)
        held = [memory["present"], *(memory[f"{k}/{w}"] for k in self._blends for w in ("sum", "count"))]
        if any(np.shape(array) != self._present.shape for array in held):
            raise ContractError("of other sizes")
        self._present = np.array(memory["present"])
        for name, blend in self._blends.items():
            prefix = f"{name}/"
            blend.restore({k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)})
            self._sums[name] = np.array(memory[f"{name}/sum"])
            self._counts[name] = np.array(memory[f"{name}/count"])
            self._rows[name] = int(memory[f"{name}/open_row"][0])
            if f"{name}/said" in memory:
                self._said[name] = np.array(memory[f"{name}/said"])
        self._due = [list(self._blends)[place] for place in memory["due"]]

    def forget(self, table: str, entity: int) -> None:
        """Clear the learned state of a replaced device."""
        for key, series in self._slices.items():
            if key.partition(".")[0] != table:
                continue
            at = series.start + entity
            for name, blend in self._blends.items():
                old_of_new = np.arange(blend.n, dtype=np.int32)
                old_of_new[at] = -1
                blend.remap(old_of_new)
                self._sums[name][at] = self._counts[name][at] = 0.0
                if name in self._said:
                    said = self._said[name].copy()  # a snapshot may still be reading the one before
                    said[:, at] = np.nan
                    self._said[name] = said

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
