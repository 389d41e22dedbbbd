"""Jobs that save, and a model that says of each node what a test tells it to, for tests of checkpoints.

twin = saving({"a": ("r1/node0", "r1/node1")})
twin.chance(0.5)                    # of each node within a day, and by rate within an hour
twin.told("a", interval_s=1800.0, save_s=60.0, ago_s=300.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from policies.checkpointing import Checkpoint, SaveTerms, interruption_rates, job_nodes
from policies.checkpointing.costs import PRIOR_SOFT
from policies.checkpointing.texts import INTERVAL, LOCAL, SINCE
from policies.operator import Operator
from tests.support.builders import Twin, two_racks
from twin.catalogue import NS
from twin.contracts import Forecast, View
from twin.telemetry import events as ev

DAY_S, HOUR_S = 86_400.0, 3600.0
MOST = 1.0 - 1e-9  # of a chance: one has no rate
EIGHT = tuple(f"r1/node{i}" for i in range(8))
OTHERS = tuple(f"r2/node{i}" for i in range(8))
N_NODE = 36
# Of a job that saves far too often: it is told another interval whatever is best
RESTLESS = {"checkpoint_interval_s": 20.0, "checkpoint_save_s": 60.0, "checkpoint_restart_s": 600.0}


class Says:
    """Forecasts of node failure, as told: mean, low and high chance within a day; within an hour by rate."""

    name: ClassVar[str] = "failure"
    period_s: ClassVar[float] = 1.0
    fit_every_s: ClassVar[float] = 0.0

    def __init__(self) -> None:
        self.day: Any = None
        self.hour: Any = None
        self.shape: Any = 4.0
        self.forecasts: list[Forecast] = []

    def predict(self, view: View) -> list[Forecast]:
        if self.day is None:
            return []
        n = view.site.sizes["node"]
        day = np.broadcast_to(np.asarray(self.day, np.float64), (n,))
        hour = (
            -np.expm1(np.log1p(-np.minimum(day, MOST)) / 24.0)
            if self.hour is None
            else np.broadcast_to(self.hour, (n,))
        )
        out = []
        for horizon_s, mean in ((HOUR_S, hour), (DAY_S, day)):
            rate = -np.log1p(-np.minimum(mean, MOST))
            high = -np.expm1(-rate * _quantile(self.shape))
            three = (np.asarray(x, np.float32) for x in (mean, 0.0 * high, high))
            out.append(Forecast("node.failure_pu", horizon_s, *three, "failure@test"))
        return out

    def update(self, view: View) -> None:
        pass

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        return {}

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        pass

    def parameters(self) -> dict[str, np.ndarray]:
        return {}

    def memory(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, memory: Mapping[str, np.ndarray]) -> None:
        pass

    def remap(self, old_of_new: Mapping[str, np.ndarray]) -> None:
        pass


def _quantile(shape: Any) -> Any:
    """95 % of a Gamma of mean 1, after Wilson and Hilferty."""
    step = 1.6448536269514722 / (3.0 * np.sqrt(shape))
    return (1.0 - 1.0 / (9.0 * shape) + step) ** 3


class Saving(Twin):
    """A twin with the policy, an operator and jobs."""

    def __init__(
        self, jobs: Mapping[str, tuple[str, ...]], authority: str = "act", kind: str = "training",
        policy: Checkpoint | None = None, told: Mapping[str, float] | None = None,
        tree: dict[str, Any] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        self.says = Says()
        names = {"checkpoint": authority, "operator": "act"}
        super().__init__(
            tree or two_racks(**more), [policy or Checkpoint(), Operator()], [self.says], authority=names
        )
        given: Any = {"checkpoint_interval_s": 7200.0, "checkpoint_save_s": 60.0,
                      "checkpoint_restart_s": 600.0} if told is None else told  # fmt: skip
        events = [
            ev.JobStarted(id=name, job=name, nodes=nodes, kind=kind, **given)  # type: ignore[arg-type]
            for name, nodes in jobs.items()
        ]
        self.tick(None, *events)

    def told(self, job: str, ago_s: float = 0.0, **said: Any) -> None:
        """A report of a job, in a tick of its own; its save began `ago_s` ago."""
        began_ns = {"began_ns": self.now_ns + NS - round(ago_s * NS)} if ago_s else {}
        self.tick(None, ev.CheckpointTold(job=job, at_ns=self.now_ns + NS, **began_ns, **said))

    def wait(self, seconds: float, values: Any = None, dt_s: float = 5.0) -> None:
        """Ticks of five seconds."""
        for _ in range(round(seconds / dt_s)):
            self.tick(values, dt_s=dt_s)

    def often(self, job: str) -> float:
        """The interval that is commanded."""
        return float(self.lease(INTERVAL)[self.engine.jobs.slot_of[job]])

    def local(self, job: str) -> float:
        """The interval between saves to memory that is commanded."""
        return float(self.lease(LOCAL)[self.engine.jobs.slot_of[job]])

    def since(self, job: str) -> float:
        """Seconds ago at the earliest that a save must have begun that is asked for; NaN = none is."""
        return float(self.now_ns / NS - self.lease(SINCE)[self.engine.jobs.slot_of[job]])

    def why(self, control: str) -> list[str]:
        """Reasons that the policy gives now."""
        return [p.reason for p in self.engine.in_force["checkpoint"] if p.control == control]


def terms(per_s: float, shape: float = np.inf, nodes: int = 8, block_s: float = 60.0, flush_s: float = 0.0,
          restart_s: float = 600.0, ran_s: float = 10.0) -> SaveTerms:  # fmt: skip
    """Of one job, as the policy should see it."""
    soft = 1.0 / (DAY_S / (PRIOR_SOFT * nodes) + ran_s)
    numbers = (block_s, flush_s, restart_s, np.nan, np.nan, shape, per_s, soft)
    return SaveTerms(*(np.array([x]) for x in numbers))


def chances(least: float = 0.001, **of_node: float) -> np.ndarray:
    """The least of each node but these: `n3` is the fourth node of the first rack."""
    out = np.full(N_NODE, least)
    for name, chance in of_node.items():
        out[int(name[1:])] = chance
    return out


def saved(twin: Saving, job: str = "a", ago_s: float = 1200.0) -> None:
    """The job says that its last save began so long ago; its interval is two hours."""
    twin.told(job, ago_s=ago_s, interval_s=7200.0, save_s=60.0)


def rates_now(twin: Saving) -> Any:
    """Rates of the first job."""
    view = twin.engine.view(1.0)
    return interruption_rates(view, job_nodes(view, np.array([0], np.int32)))


def drain(name: str = "d", level: float = 3.0, node: str = "r1/node3") -> ev.OperatorRequest:
    return ev.OperatorRequest(id=name, author="ada", control="node.service_level", names=(node,), lo=level,
                              hi=level, want=level, reason="repair")  # fmt: skip
