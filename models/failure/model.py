"""failure: probability that each node fails within an hour, a day, a week, a month; and the site's total.

From the first minute a baseline on the log of failures alone, see `models.failure.rates`. A hazard on
telemetry learns beside it (`models.failure.cases`, `models.failure.live_hazard`) and takes its place
horizon by horizon, once what it really said was better beyond chance. A failure is one by a node's own
doing, as `view.failures()` reports; those with a cause in common are a rate of their own that all nodes
share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from models.failure import rates
from models.failure.cases import CaseLog
from models.failure.fits import Fitted, fit_all, training_of
from models.failure.fleet_rate import LEAST_DAYS, TOO_WIDE
from models.failure.priors import parse_prior
from models.failure.rates import FailureHistory, failure_history
from twin.catalogue import F32, F64, I32, NS, Bool, ContractError, digest, duration
from twin.contracts import UNKNOWN, FailureLog, Forecast, NodeFeatures, View, gamma_factors
from twin.health import QUIET, TELEMETRY

HORIZONS_S = (3600.0, 86_400.0, 604_800.0, 2_592_000.0)
MOST_HORIZONS, SHORTEST_S = 8, 600.0
NODE, SITE = "node.failure_pu", "site.node_failure_count"
SIGNALS = (NODE, SITE)
ANEW_NS = 600 * NS  # a baseline is worked out anew after this, and when the log has changed
# Between two fits: a day, later a quarter of the time gathered so far, at most a week. source: estimate
FIT_LEAST_S, FIT_GROWTH, FIT_MOST_S = 86_400.0, 0.25, 604_800.0
NEVER_S = 30 * 86_400.0
LEAST_FAILURES = 10  # before a fit is asked for. source: estimate
KEPT = ("hazard", "shape", "mine", "blank", "under", "odd", "counts")  # arrays of a snapshot


class Failure:
    """Probabilities of failure per node, and the number of failures of a site.

    NaN for a node that is down or that people work at. Raises ContractError for other signals and horizons.
    """

    name: ClassVar[str] = "failure"
    period_s: ClassVar[float] = 60.0
    fit_every_s: ClassVar[float] = FIT_LEAST_S

    def __init__(
        self,
        signals: tuple[str, ...] = SIGNALS,
        horizons_s: tuple[float, ...] = HORIZONS_S,
        prior: str = "",
    ) -> None:
        self.signals, self.horizons_s = signals or SIGNALS, tuple(horizons_s or HORIZONS_S)
        if not set(self.signals) <= set(SIGNALS):
            raise ContractError(f"signals: expected some of {', '.join(SIGNALS)}, got {self.signals}")
        rising = all(a < b for a, b in zip(self.horizons_s, self.horizons_s[1:], strict=False))
        within = min(self.horizons_s) >= SHORTEST_S and max(self.horizons_s) <= NEVER_S
        if not rising or not within or len(self.horizons_s) > MOST_HORIZONS:
            raise ContractError(
                f"horizons_s: expected up to {MOST_HORIZONS} that rise, from {SHORTEST_S:g} s to 30 days, "
                f"got {self.horizons_s}"
            )
        self.prior = parse_prior(prior) if prior else None
        self.spans_d = tuple(h / 86_400.0 for h in self.horizons_s)
        self.fitted = Fitted({}, self.horizons_s)
        self._begin()

    def _begin(self) -> None:
        """Nothing was taken in yet."""
        self.begun_ns = self.now_ns = self.anew_ns = 0
        self.cases = CaseLog(0, (), 2 * len(self.horizons_s))
        self._log_mark = b""
        self._log: FailureLog | None = None
        self._counts = np.full((len(self.horizons_s), 4), np.nan)  # what it is of, mean, low, high
        self._said: list[Forecast] = []
        self._resize(0)

    def _resize(self, n: int) -> None:
        """Nothing is worked out of n nodes yet."""
        # Expected failures [n_horizon, n], how surely [n], what the hazard says [n_horizon, n]; nodes of
        # which nothing is known, at which people work, and that showed anything unusual at the last look.
        self._hazard, self._shape = np.zeros((len(self.horizons_s), n)), np.ones(n)
        self._mine = np.full((len(self.horizons_s), n), np.nan)
        self._blank, self._under, self._odd = (np.zeros(n, np.bool_) for _ in range(3))
        self._log_mark = b""
        self._band: tuple[F64, F64, F64] | None = None  # of the baseline, until it is worked out anew

    def settings(self) -> dict[str, object]:
        """Return the arguments that create an equal model."""
        prior = self.prior.text if self.prior else ""
        return {"signals": self.signals, "horizons_s": self.horizons_s, "prior": prior}

    def update(self, view: View) -> None:
        """Take in the failures and the features of now, and say what follows."""
        before_ns, self.now_ns, self._said = self.now_ns, view.now_ns, []
        n = view.site.sizes["node"]
        if not n:
            return
        log, features = view.failures(), view.node_features()
        if not self.begun_ns:
            if not len(log.node) and not _has_telemetry(features):
                return
            self.begun_ns = view.now_ns
        if self.cases.n != n:
            self.cases = CaseLog(n, features.names, 2 * len(self.horizons_s))
        elif features.names and self.cases.names != features.names:
            self.cases.rename(features.names)
        if len(self._shape) != n:
            self._resize(n)
        self._log = log
        past = failure_history(log, n, view.now_ns)
        self._rest(past, log, features, view.now_ns)
        work = view.maintenance("node")
        under = np.zeros(n, np.bool_) if work is None else np.array(work)
        fresh = np.flatnonzero(under & ~self._under)
        if fresh.size:
            self.cases.lose(fresh, view.now_ns)  # people who work there end what can be seen of it
        self._under = under
        for began_ns, ended_ns in log.unwatched_ns.tolist():
            if ended_ns > before_ns:  # what became of them then nobody saw
                self.cases.lose(np.arange(n), began_ns)
        self.cases.settle(log.node, log.start_ns, rates.own_failures(log), view.now_ns)
        self._challenge(features, view.now_ns, ~(past.down | under))
        if NODE in self.signals:
            self._say_nodes(past, past.down | under)
        if SITE in self.signals:
            self._say_site(past)

    def _rest(self, past: FailureHistory, log: FailureLog, features: NodeFeatures, now_ns: int) -> None:
        """Return the baseline; recomputed if due."""
        rows = [getattr(log, name) for name in ("node", "start_ns", "end_ns", "shared", "kind")]
        mark = digest([*rows, log.begin_ns, log.unwatched_ns, self.fitted.version]).encode()
        mark += self.prior.text.encode() if self.prior else b""
        if mark == self._log_mark and now_ns - self.anew_ns < ANEW_NS:
            return
        self._log_mark, self.anew_ns, self._band = mark, now_ns, None
        hazard, shape = rates.baseline(past, self.spans_d, self.fitted.theta, self.fitted.faults, self.prior)
        self._blank = blank = _blank(features, past)
        wide, wide_shape = rates.unknown_node(past, self.spans_d, self.prior)
        self._hazard = np.where(blank, wide[:, None], hazard)
        self._shape = np.where(blank, wide_shape, shape)

    def _baseline(self) -> tuple[F64, F64, F64]:
        """Return mean, low and high of the baseline's probabilities [n_horizon, n]."""
        if self._band is None:
            low, high = gamma_factors(self._shape)
            mean, low, high = (rates.probability(self._hazard * factor) for factor in (1.0, low, high))
            self._band = mean, low, high
        return self._band

    def _challenge(self, features: NodeFeatures, now_ns: int, up: Bool) -> None:
        """Return the hazard's forecast; takes cases with their forecasts at the begin of a slot."""
        values, hazards = features.values, self.fitted.hazards
        signs = np.zeros(len(values), np.int64)
        for column, name in enumerate(features.names):
            if name in QUIET:
                signs += values[:, column] > QUIET[name]
        look = self.cases.due(now_ns) and self.cases.names == features.names
        ready = hazards.n_feature == values.shape[1] and self.fitted.names == "\n".join(features.names)
        if not ready or not hazards.places:
            if np.isfinite(self._mine).any():
                self._mine = np.full_like(self._mine, np.nan)
        elif look or any(c.hazard for c in self.fitted.champions):
            # Quiet nodes change slowly: between slots only those are asked about that show something.
            whole = look or not np.isfinite(self._mine[hazards.places[0]]).all()
            at = np.arange(len(values)) if whole else np.flatnonzero(self._odd | (signs > 0))
            mine = self._mine.copy()
            said = hazards.say(values[at], self._baseline()[0][:, at])
            mine[np.array(hazards.places)[:, None], at] = said
            self._mine = mine
        self._odd = signs > 0
        if look:
            forecasts: F32 = np.concatenate([self._baseline()[0], self._mine]).T.astype(np.float32)
            self.cases.sample(now_ns, values, signs, forecasts, up & ~self._blank)

    def _say_nodes(self, past: FailureHistory, out: Bool) -> None:
        shock, places = rates.shock_rate(past), self.fitted.hazards.places
        baseline = self._baseline()
        least = np.zeros((3, len(out)))
        for i, horizon_s in enumerate(self.horizons_s):
            three = tuple(part[i] for part in baseline)
            if self._is_by_hazard(i):
                three = self._mine[i], *self.fitted.hazards.band(places.index(i), self._mine[i])
            spared = np.exp(-shock * self.spans_d[i])
            # A node that fails within an hour fails within a day.
            least = np.maximum(least, 1.0 - (1.0 - np.stack(three)) * spared)
            mean, low, high = (np.where(out, np.nan, x).astype(np.float32) for x in least)
            version = f"{self.name}@{self.fitted.version}"
            self._said.append(Forecast(NODE, horizon_s, mean, low, high, version, self._basis(i, past)))

    def _is_by_hazard(self, i: int) -> bool:
        """Return True if the champion is the hazard, and it knows the features."""
        return self.fitted.champions[i].hazard and bool(np.isfinite(self._mine[i]).all())

    def _basis(self, i: int, past: FailureHistory) -> str:
        """Return the basis of a forecast, as a sentence."""
        champion, k, days = self.fitted.champions[i], past.own.k, past.now_d
        if self._is_by_hazard(i):
            since = np.datetime64(champion.since_ns // NS, "s")
            text = f"telemetry, since {since}Z: better than the failure rates alone by {champion.gain:.2g} "
            text += f"of log loss per failure on {champion.failures} failures"
        elif k:
            text = f"failure rates of this fleet: {k} failure{'' if k == 1 else 's'} in {_span(days)}"
            text += ", and the prior of other fleets" if self.prior else ""
        elif self.prior:
            text = f"failure rates of other fleets, {1e3 * self.prior.rate_per_d:.2g} per 1000 node-days: "
            text += f"this fleet had no failure in {_span(days)}"
        else:
            text = f"published failure rates, {1e3 * rates.PRIOR_RATE:.2g} per 1000 node-days "
            text += f"(arXiv 2410.21680): this fleet had no failure in {_span(days)}"
        if champion.hazard and not self._is_by_hazard(i):
            text += "; telemetry has more signals since the last fit, and the next one takes it in"
        elif not champion.hazard and champion.failures:
            text += f"; telemetry made it no better so far, on {champion.failures} failures"
        if len(past.shock_d):
            text += f"; {len(past.shock_d)} shocks that struck several"
        n_blank = int(self._blank.sum())
        if n_blank:
            text += f"; {n_blank} nodes of which nothing is known: the fleet's rate"
        return text

    def _say_site(self, past: FailureHistory) -> None:
        days = rates.daily_counts(past)
        whole = len(days) >= LEAST_DAYS
        # A forecast that rests on whole days changes once a day, one horizon at a time: no tick is long.
        stamp = float(int(past.now_d)) if whole else self.anew_ns / NS
        due = np.flatnonzero(self._counts[:, 0] != stamp)
        if np.isfinite(self._counts[:, :2]).all() and whole:
            due = due[:1]
        if due.size:
            self._counts = self._counts.copy()
        for i in due.tolist():
            self._counts[i] = stamp, *rates.fleet_count(past, days, self.spans_d[i], self.prior)
        basis = f"daily counts of {len(days)} days"
        if not whole:
            source = "of other fleets" if self.prior else "from the literature"
            count = len(past.all_d)
            seen = f"{count} failure{'s' * (count != 1)} in {_span(past.now_d)}"
            basis = f"{seen} and a rate {source}"
        for i, horizon_s in enumerate(self.horizons_s):
            _, mean, low, high = (np.array([x], np.float32) for x in self._counts[i])
            version = f"{self.name}@{self.fitted.version}"
            # Of few nodes most spans see no failure: whole quantiles may leave the mean out
            low, high = np.minimum(low, np.floor(mean)), np.maximum(high, np.ceil(mean))
            says = basis if np.isfinite(low[0]) else f"{basis}; {TOO_WIDE}"
            self._said.append(Forecast(SITE, horizon_s, mean, low, high, version, says))

    def predict(self, view: View) -> list[Forecast]:
        """Return the forecasts of `update`; none for a site without data."""
        return list(self._said)

    def next_fit_s(self) -> float:
        """Return the seconds from one fit to the next: long while there is nothing to learn from."""
        if "fit_every_s" in self.__dict__:  # a site said otherwise
            return self.fit_every_s
        if self._log is None or len(self._log.node) < LEAST_FAILURES:
            return NEVER_S
        past_s = (self.now_ns - self.begun_ns) / NS
        if self.fitted.hazards.places and self.fitted.names != "\n".join(self.cases.names):
            return FIT_LEAST_S  # other features than those that were learned
        return min(max(FIT_LEAST_S, FIT_GROWTH * past_s), FIT_MOST_S)

    def training(self) -> dict[str, np.ndarray]:
        """Return the log of failures and the cases, as copies; empty without a failure."""
        if self._log is None or not rates.own_failures(self._log).any():
            return {}
        return training_of(self._log, self.cases, self.fitted.champions, self.now_ns)

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        """Return strengths of the baseline, trees per horizon, and the champions. Raises ContractError."""
        return fit_all(series, self.horizons_s, seed)

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Load these parameters. Raises ContractError for anything else, and keeps the earlier ones."""
        self.fitted = Fitted(parameters, self.horizons_s)
        self._mine = np.full_like(self._mine, np.nan)

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the fitted parameters, if any."""
        return dict(self.fitted.parameters)

    def memory(self) -> dict[str, np.ndarray]:
        """Return the cases, the present forecasts and their basis; these arrays are not written later."""
        out = {f"cases/{key}": array for key, array in self.cases.memory().items()}
        out["at"] = np.array([self.begun_ns, self.now_ns, self.anew_ns], np.int64)
        out["horizons_s"] = np.array(self.horizons_s)
        out["log_mark"] = np.frombuffer(self._log_mark, np.uint8)
        return out | {name: getattr(self, f"_{name}") for name in KEPT}

    def restore(self, memory: Mapping[str, np.ndarray]) -> None:
        """Take over what `memory` gave; begins afresh where it is of other horizons or another version."""
        self._begin()
        try:
            if not np.array_equal(memory["horizons_s"], self.horizons_s):
                return
            cases = CaseLog.restored({k[6:]: v for k, v in memory.items() if k.startswith("cases/")})
            self._resize(len(memory["shape"]))
            for name in KEPT:
                held, fresh = np.array(memory[name]), getattr(self, f"_{name}")
                if held.shape != fresh.shape or held.dtype != fresh.dtype:
                    raise ContractError(f"{name}: of another kind")
                setattr(self, f"_{name}", held)
            self.begun_ns, self.now_ns, self.anew_ns = (int(at) for at in memory["at"])
            self.cases, self._log_mark = cases, bytes(memory["log_mark"])
        except (ContractError, KeyError, IndexError, ValueError, TypeError):
            self._begin()

    def forget(self, table: str, entity: int) -> None:
        """Drop the open outcomes of a replaced node."""
        if table == "node" and entity < self.cases.n:
            self.cases.lose(np.array([entity]), self.now_ns)
            self._log_mark = b""

    def remap(self, old_of_new: Mapping[str, I32]) -> None:
        """Move cases with their nodes; those of removed nodes still teach. The rest is recomputed."""
        was, under = old_of_new["node"], self._under
        if self.cases.n:
            self.cases = self.cases.remapped(was, self.now_ns)
        self._resize(len(was))
        kept = was[was >= 0]
        if len(under):
            self._under[was >= 0] = under[kept]
        self._said = []


def _has_telemetry(features: NodeFeatures) -> bool:
    """Return True if anything is known of any node."""
    at = [i for i, name in enumerate(features.names) if name in TELEMETRY]
    return bool(np.isfinite(features.values[:, at]).any())


def _blank(features: NodeFeatures, past: FailureHistory) -> Bool:
    """Return the nodes without any data: never reported, and never failed [n]."""
    out = np.ones(past.own.n, np.bool_)
    out[past.own.node] = False
    for column, name in enumerate(features.names):
        if name == "level":
            out &= features.values[:, column] == UNKNOWN
        elif name in TELEMETRY:
            out &= np.isnan(features.values[:, column])
    return out


def _span(days: float) -> str:
    """Return a time in words."""
    return f"{days:.3g} days" if days >= 2.0 else duration(days * 86_400.0)
