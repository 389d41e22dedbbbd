"""persistence: predicts the present value; the reference for every other model.

The mean forecast is the last good value. The band comes from fitted quantiles of past changes over the same
horizon; before a fit, from the changes seen so far over one step, widened by the square root of time as a
random walk would. There is none before so many spans of the horizon's length were seen as a band needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from models.half_widths import LEAST_SPANS, SIDE_SPANS, never_shrinking
from twin.catalogue import F32, I32, ContractError, digest, find_signal, signal_of
from twin.contracts import Z90, Forecast, View, read_only
from twin.telemetry import EntityState, Sizes, keyed

HORIZONS_S = (60.0, 300.0, 900.0, 3600.0)
SIGNALS = ("rack.power_w",)
LOW, HIGH = 0.05, 0.95
_BAND = re.compile(r"[0-9.e+]+:(low|high)")
MEMORY_STEPS = 600.0  # effective number of steps in the running variance


class _Seen(EntityState):
    """By signal, of each entity [n]: the last value, and the running variance of so many steps."""

    last: dict[str, F32] = keyed("f4", np.nan)
    variance: dict[str, F32] = keyed("f4")
    steps: dict[str, F32] = keyed("f4")

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__(sizes or {})


class Persistence:
    """Last value, with a 90 % band."""

    name: ClassVar[str] = "persistence"
    period_s: ClassVar[float] = 10.0
    fit_every_s: ClassVar[float] = 3600.0

    def __init__(
        self, signals: tuple[str, ...] = SIGNALS, horizons_s: tuple[float, ...] = HORIZONS_S
    ) -> None:
        self.signals, self.horizons_s = signals or SIGNALS, horizons_s or HORIZONS_S
        for key in self.signals:
            if find_signal(key) is None:
                raise ContractError(f"{key} is no signal of the catalogue; the model `load` also takes sums")
        self._seen = _Seen()
        self._t_ns = 0
        self._step_s = self.period_s
        self._fitted: dict[str, np.ndarray] = {}
        self._version = "unfitted"

    def update(self, view: View) -> None:
        """Learn the size of one step's change, per entity."""
        for key in self.signals:
            value = view.value(key)
            last = self._seen.last.get(key)
            if last is None or len(last) != len(value):
                self._seen.variance[key], self._seen.steps[key] = (
                    np.zeros(len(value), np.float32),
                    np.zeros(len(value), np.float32),
                )
            else:
                change = value - last
                known = np.isfinite(change)
                steps = self._seen.steps[key] + known
                share = 1.0 / np.clip(steps, 1.0, MEMORY_STEPS)
                square = np.where(known, change, 0.0) ** 2
                grown = self._seen.variance[key] + share * (square - self._seen.variance[key])
                self._seen.variance[key] = np.where(known, grown, self._seen.variance[key]).astype(np.float32)
                self._seen.steps[key] = steps.astype(np.float32)
            self._seen.last[key] = np.array(value, np.float32)
        if self._t_ns:
            self._step_s = max((view.now_ns - self._t_ns) / 1e9, 1e-3)
        self._t_ns = view.now_ns

    def predict(self, view: View) -> list[Forecast]:
        """Return the last value at every horizon."""
        out = []
        for key in self.signals:
            mean = self._seen.last[key]
            signal = signal_of(key)
            horizons_s = sorted(self.horizons_s)
            edges = np.array([self._edges(key, horizon_s) for horizon_s in horizons_s], np.float64)
            # Round their own middle: where values drift, both edges may lie on one side of the last one.
            middle, half = edges.mean(axis=1), never_shrinking(0.5 * (edges[:, 1] - edges[:, 0]))
            low_of, high_of = (x.astype(np.float32) for x in (middle - half, middle + half))
            for horizon_s, low, high in zip(horizons_s, low_of, high_of, strict=True):
                out.append(
                    Forecast(
                        key,
                        horizon_s,
                        read_only(mean),
                        np.maximum(mean + low, signal.low).astype(np.float32),
                        np.minimum(mean + high, signal.high).astype(np.float32),
                        f"{self.name}@{self._version}",
                    )
                )
        return out

    def _edges(self, key: str, horizon_s: float) -> tuple[F32, F32]:
        """Return the edges of the band, as differences from the last value [n]."""
        low, high = (self._fitted.get(f"{key}@{horizon_s:g}:{edge}") for edge in ("low", "high"))
        if low is not None and high is not None and len(low) == len(self._seen.last[key]):
            return low, high
        spread = Z90 * np.sqrt(self._seen.variance[key] * max(horizon_s / self._step_s, 1.0))
        enough = self._seen.steps[key] >= max(2.0, LEAST_SPANS * horizon_s / self._step_s)
        spread = np.where(enough, spread, np.nan).astype(np.float32)
        return -spread, spread

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        """Return quantiles of past changes per horizon and entity; `series` holds `t_ns` [n_time] and
        columns.

        A column with fewer than 20 changes, or SIDE_SPANS spans, keeps no quantiles. Deterministic: `seed` is
        not needed.
        """
        out: dict[str, np.ndarray] = {}
        t_ns = series["t_ns"]
        for key in self.signals:
            values = series.get(key)
            if values is None or len(t_ns) < 2:
                continue
            step_ns = float(np.median(np.diff(t_ns)))
            for horizon_s in self.horizons_s:
                lag = max(1, round(horizon_s * 1e9 / step_ns))
                least = max(20, SIDE_SPANS * lag)
                if len(values) - lag < least:
                    continue
                change = values[lag:] - values[:-lag]
                enough = np.isfinite(change).sum(axis=0) >= least
                low, high = np.full(values.shape[1], np.nan), np.full(values.shape[1], np.nan)
                if enough.any():
                    low[enough], high[enough] = np.nanquantile(change[:, enough], [LOW, HIGH], axis=0)
                out[f"{key}@{horizon_s:g}:low"] = low.astype(np.float32)
                out[f"{key}@{horizon_s:g}:high"] = high.astype(np.float32)
        return out

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Load fitted quantiles. Raises ContractError for anything else."""
        for name, column in parameters.items():
            key, _, rest = name.partition("@")
            known = key in self.signals and _BAND.fullmatch(rest) is not None
            if (
                not known
                or not isinstance(column, np.ndarray)
                or column.ndim != 1
                or column.dtype.kind != "f"
            ):
                raise ContractError(f"{name} is not a parameter of {self.name}")
        self._fitted = {name: np.array(column) for name, column in sorted(parameters.items())}
        self._name_version()

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the fitted quantiles, if any."""
        return dict(self._fitted)

    def memory(self) -> dict[str, np.ndarray]:
        """Return the last values and the running variances."""
        out: dict[str, np.ndarray] = {"t_ns": np.array([self._t_ns]), "step_s": np.array([self._step_s])}
        for name, columns in self._seen.dump().items():
            out |= {f"{key}:{name}": column for key, column in columns.items()}
        return out

    def restore(self, memory: Mapping[str, np.ndarray]) -> None:
        """Take over what `memory` gave."""
        self._t_ns, self._step_s = int(memory["t_ns"][0]), float(memory["step_s"][0])
        for name in self._seen.declared:
            columns = {key: f"{key}:{name}" for key in self.signals if f"{key}:{name}" in memory}
            getattr(self._seen, name).update({key: np.array(memory[at]) for key, at in columns.items()})

    def remap(self, old_of_new: Mapping[str, I32]) -> None:
        """Move the learned state to the new slots."""
        seen, self._seen = self._seen, _Seen({table: len(old) for table, old in old_of_new.items()})
        self._seen.adopt(seen, old_of_new)
        for name in list(self._fitted):
            source = old_of_new[name.partition(".")[0]]
            if len(source) and source.max(initial=-1) < len(self._fitted[name]):
                moved = np.full(len(source), np.nan, np.float32)
                kept = np.flatnonzero(source >= 0)
                moved[kept] = self._fitted[name][source[kept]]
                self._fitted[name] = moved
        self._name_version()

    def _name_version(self) -> None:
        self._version = digest(self._fitted)[:12] if self._fitted else "unfitted"
