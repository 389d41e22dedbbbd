"""Fits of the model `failure`: training data, strengths, trees per horizon, and the champion.

`fit_all` runs in a worker; `Fitted` is what the daemon then holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.failure.cases import CaseLog
from models.failure.live_hazard import KEYS, NOBODY, Champion, Hazards, choose, fit_horizon
from models.failure.rates import failure_history
from models.failure.self_exciting import SelfExciting
from twin.catalogue import F64, ContractError, digest
from twin.contracts import FailureLog

# Strengths of a version before, of other parts: until the next fit the assumed ones stand in for them
FORMER_PARTS = 14
LOG = ("node", "start_ns", "end_ns", "kind", "shared")


def training_of(
    log: FailureLog, cases: CaseLog, champions: Sequence[Champion], now_ns: int
) -> dict[str, np.ndarray]:
    """Return the training data of a fit, as copies."""
    out: dict[str, Any] = {f"log/{name}": np.array(getattr(log, name)) for name in LOG}
    out["log/classes"] = np.frombuffer("\n".join(log.classes).encode(), np.uint8)
    out["log/n_begin_now"] = np.array([cases.n, log.begin_ns, now_ns], np.int64)
    out["log/unwatched_ns"] = np.array(log.unwatched_ns)
    out["champions"] = np.array([c.array() for c in champions])
    return out | {f"cases/{key}": array for key, array in cases.memory(recent=False).items()}


def fit_all(
    series: Mapping[str, np.ndarray], horizons_s: Sequence[float], seed: int
) -> dict[str, np.ndarray]:
    """Return parameters from `training_of`. Raises ContractError for anything else."""
    try:
        n, begin_ns, now_ns = series["log/n_begin_now"].tolist()
        classes = tuple(bytes(series["log/classes"]).decode().split("\n"))
        columns = {name: series[f"log/{name}"] for name in LOG}
        gaps = series["log/unwatched_ns"]
        log = FailureLog(**columns, classes=classes, begin_ns=begin_ns, unwatched_ns=gaps)
        cases = CaseLog.restored({k[6:]: v for k, v in series.items() if k.startswith("cases/")})
        before = [Champion.of(numbers) for numbers in series["champions"]]
    except KeyError as error:
        raise ContractError(f"failure: {error} is missing from what a fit learns from") from error
    past = failure_history(log, n, now_ns)
    base = SelfExciting().fit(past.own, past.now_d, seed)
    out = {"theta": base["theta"], "faults": np.array([float(past.own.k)])}
    out["names"] = cases.named()
    columns = {name: cases.get(name) for name in cases.columns}
    champions = []
    for i, horizon_s in enumerate(horizons_s):
        fitted = fit_horizon(columns, cases.settled_ns, horizon_s, i, seed)
        out |= {f"{horizon_s:g}/{key}": array for key, array in fitted.items()}
        chosen = choose(columns, cases.settled_ns, horizon_s, i, before[i], seed)
        since_ns = (chosen.since_ns or now_ns) if chosen.hazard and fitted else 0
        champions.append(chosen._replace(hazard=chosen.hazard and bool(fitted), since_ns=since_ns))
    return out | {"champions": np.array([c.array() for c in champions])}


class Fitted:
    """Parameters in use. Without any, the baseline's strengths are assumed, and there is no hazard."""

    def __init__(self, parameters: Mapping[str, np.ndarray], horizons_s: Sequence[float]) -> None:
        """Raises ContractError for what is no parameter of a model with these horizons."""
        known = {
            "theta",
            "faults",
            "names",
            "champions",
            *(f"{h:g}/{key}" for h in horizons_s for key in KEYS),
        }
        for key, array in parameters.items():
            if key not in known or not isinstance(array, np.ndarray):
                raise ContractError(f"{key} is not a parameter of failure")
            if array.dtype.kind not in "biuf":
                raise ContractError(f"{key}: expected numbers (text as its bytes), got {array.dtype}")
        self.theta: F64 | None = None
        self.faults, self.names, self.version = 0.0, "", "unfitted"
        self.champions, self.hazards = (NOBODY,) * len(horizons_s), Hazards({})
        self.parameters = {k: np.array(parameters[k]) for k in sorted(parameters)}
        if not parameters:
            return
        try:
            self._read(parameters, horizons_s)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise ContractError(f"failure: {error}") from error
        self.version = digest(self.parameters)[:12]

    def _read(self, parameters: Mapping[str, np.ndarray], horizons_s: Sequence[float]) -> None:
        theta = np.array(parameters["theta"], np.float64)
        if theta.shape != (FORMER_PARTS,):
            SelfExciting().load({"theta": theta})  # which refuses what are no strengths
            self.theta, self.faults = theta, float(parameters["faults"][0])
        self.champions = tuple(Champion.of(numbers) for numbers in parameters["champions"])
        fitted = {
            i: {key: parameters[f"{h:g}/{key}"] for key in KEYS}
            for i, h in enumerate(horizons_s)
            if f"{h:g}/line" in parameters
        }
        self.hazards, self.names = Hazards(fitted), bytes(parameters["names"]).decode()
        if len(self.champions) != len(horizons_s) or not self.faults >= 0:
            raise ContractError("champions, faults: of other horizons")
        if any(c.hazard and i not in fitted for i, c in enumerate(self.champions)):
            raise ContractError("champions: in force without trees")
