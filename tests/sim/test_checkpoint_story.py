"""A simulated GPU reports trouble for six minutes, then falls off the bus and takes its job down.

The whole loop in one process, all of it simulated: faults in the plant, the verdict, the policy, the arbiter,
the job that saves and says so. The same seed with the policy off is what it is compared with. The job saves
at an interval that is near the best for its usual rate of failures, so that only the save ahead differs.
"""

from __future__ import annotations

from functools import cache

import pytest

from models.failure import Failure
from policies.checkpointing import Checkpoint
from policies.checkpointing.texts import INTERVAL, SINCE
from tests.support.builders import eight_nodes, site_of, spec_of
from twin.contracts import CommandBatch
from twin.engine import Engine
from twin.plant import scenario_of
from twin.plant.workload import Workload
from twin.simulation import Case, Question, Simulation
from twin.simulation.whatif import ARMS, difference, run_arm

pytestmark = pytest.mark.slow
GPU = "r1/node3/gpu0"
TROUBLE_S, FAILS_S, END_S = 600.0, 960.0, 980.0
OFTEN_S = 12_000.0
CODE = 48  # XID: a memory error that is not corrected
SEED = 1


class Story:
    """A site of one synchronous job; what was commanded, and what the job lost."""

    def __init__(self, authority: str) -> None:
        site = site_of(eight_nodes())
        tree = {
            "name": "trouble", "hours": 1, "seed": SEED,
            "workload": {"training_pu": 1.0, "inference_pu": 0.0, "batch_pu": 0.0, "job_hours": [40, 48],
                         "checkpoint_interval_s": [OFTEN_S, OFTEN_S]},
            "faults": [
                {"kind": "xid_burst", "entity": GPU, "begin_s": TROUBLE_S, "severity": 0.3, "amount": CODE},
                {"kind": "gpu_off_bus", "entity": GPU, "begin_s": FAILS_S},
            ],
        }  # fmt: skip
        given = {"checkpoint": authority}
        made = scenario_of(tree, site)
        engine = Engine(site, [Checkpoint()], [Failure()], given)
        self.sim = Simulation.of(engine, seed=SEED, scenario=made)
        work = self.sim.plant.workload
        assert isinstance(work, Workload)
        self.work = work
        self.commands: list[tuple[float, CommandBatch]] = []
        self.advice: list[CommandBatch] = []
        for _ in range(round(END_S)):
            self.sim.step()
            self.commands += [(self.sim.time_s, c) for c in self.sim.decision.commands if not c.renewal]
            self.advice += self.sim.decision.advice
        assert self.sim.engine.suspended == {}

    @property
    def lost_gpu_s(self) -> float:
        return self.work.lost_work()


@cache
def story(authority: str) -> Story:
    return Story(authority)


@pytest.mark.long
def test_it_saves_ahead_once_the_trouble_is_known() -> None:
    asks = [(s, c) for s, c in story("act").commands if c.control == SINCE]
    assert asks
    at_s, first = asks[0]
    assert TROUBLE_S <= at_s <= TROUBLE_S + 120.0
    assert first.policy == "checkpoint"
    assert "one of its nodes is in bad health" in first.reason
    assert len([s for s, _ in asks if s < FAILS_S]) <= 2, "not one save after the other"
    intervals = [s for s, c in story("act").commands if c.control == INTERVAL and s < FAILS_S]
    assert not intervals, "that was well as it was"


@pytest.mark.long
def test_less_is_lost_than_without_it() -> None:
    without, ahead = story("off"), story("act")
    assert without.work.progress.interruptions == ahead.work.progress.interruptions == 1
    assert not without.commands
    cost = ahead.work.progress.saving_gpu_s - without.work.progress.saving_gpu_s
    assert ahead.lost_gpu_s + cost < 0.7 * without.lost_gpu_s


@pytest.mark.long
def test_a_what_if_shows_what_it_saves_and_what_it_costs() -> None:
    tree = {
        "name": "trouble", "duration_s": 620, "seed": 1,
        "workload": {"training_pu": 1.0, "inference_pu": 0.0, "batch_pu": 0.0, "job_hours": [40, 48],
                     "checkpoint_interval_s": [OFTEN_S, OFTEN_S]},
        "faults": [
            {"kind": "xid_burst", "entity": GPU, "begin_s": 300, "severity": 0.3, "amount": CODE},
            {"kind": "gpu_off_bus", "entity": GPU, "begin_s": 600},
        ],
    }  # fmt: skip
    spec = spec_of(eight_nodes(policies={"checkpoint": {"authority": "advise"}}))
    question, case = Question(spec, "site.yaml"), Case(0, {}, scenario_of(tree, site_of(eight_nodes())))
    acted, idle = (run_arm(question, case, arm).figures for arm in ARMS)
    change = {k: v or 0.0 for k, v in difference(acted, idle).items()}
    assert idle["commands"] == idle["checkpoint_gpu_h"] == 0.0 < change["commands"]
    assert idle["interrupted_jobs"] == acted["interrupted_jobs"] == 1.0
    assert idle["lost_work_gpu_h"] == pytest.approx(idle["done_work_gpu_h"])
    assert change["lost_work_gpu_h"] < 0.0 < change["checkpoint_gpu_h"] < -0.2 * change["lost_work_gpu_h"]
