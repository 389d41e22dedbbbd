"""The story of the demo in closed loop: every chapter is answered, and the run replays byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twin.catalogue import START_NS
from twin.config import load_site, make_engine
from twin.contracts import CommandRecord, Decision, FindingRecord
from twin.engine import Engine
from twin.run import TraceReader, replay_frames
from twin.simulation import FOLDER, DemoPast, DemoSite, Story, load_story
from twin.telemetry import Frame

pytestmark = [pytest.mark.slow, pytest.mark.long]
STORY_S = 300
CAP, LEVEL = "gpu.power_cap_w", "node.service_level"


class Heard:
    """Decisions of a story, with seconds since its begin; and the last forecast before it."""

    def __init__(self) -> None:
        self.begun_ns = 0
        self.commands: list[tuple[float, CommandRecord]] = []
        self.findings: list[tuple[float, str]] = []
        self.caps: dict[int, Any] = {}  # of all GPUs, by second

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """After a tick."""
        at_s = (decision.now_ns - self.begun_ns) / 1e9
        for record in decision.records:
            if isinstance(record, CommandRecord):
                self.commands.append((at_s, record))
            elif isinstance(record, FindingRecord):
                self.findings.append((at_s, record.id))
        if self.begun_ns:
            self.caps[round(at_s)] = engine.arbiter.leases[CAP].value.copy()

    def asked(self, control: str, policy: str, after_s: float) -> list[CommandRecord]:
        """Commands of a policy from an instant on."""
        found = (r for t, r in self.commands if t >= after_s and r.control == control)
        return [r for r in found if r.policy == policy]

    def found(self, start: str, after_s: float) -> bool:
        """Return True if a finding of this kind came from an instant on."""
        return any(t >= after_s and name.startswith(start) for t, name in self.findings)


class Told:
    """A story that was lived through: the demo, its loop, and what was heard."""

    def __init__(self, folder: Path) -> None:
        spec, site = load_site(FOLDER / "site.yaml")
        self.story: Story = load_story(FOLDER / "story.yaml", site).only(None)
        self.site, self.folder, self.heard = site, folder, Heard()
        self.demo = DemoSite(self.story, spec, site)
        with DemoPast(self.demo, START_NS, folder) as loop:
            loop.run(self.story.past_s)
            forecasts = loop.engine.view(1.0).forecasts
            self.forecast = forecasts["site.power_w", 300.0]
            self.demo.begin()
            loop.dt_s, loop.observers, self.heard.begun_ns = 1.0, (self.heard,), loop.now_ns
            self.power_w: list[float] = []
            self.tripped = 0
            for _ in range(STORY_S):
                loop.step()
                self.power_w.append(float(self.demo.plant.truth.rack_power_w.sum()))
                self.tripped += int(self.demo.plant.truth.feeder_tripped.sum())
            self.ticks = loop.ticks

    def at(self, chapter: str) -> float:
        """Return the begin of a chapter, s."""
        return next(c.at_s for c in self.story.chapters if c.name == chapter)

    def gpus_of(self, job: int) -> Any:
        """The GPUs of a job's nodes, by the scheduler."""
        run = next(r for r in self.demo.scheduler.runs if r.request.number == job)
        return np.flatnonzero(np.isin(self.site.node_of_gpu, run.nodes))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("demo"))


def test_caps_are_shared_by_priority_when_demand_is_more_than_a_feeder_carries(told: Told) -> None:
    second = round(told.at("power")) + 25
    before, after = told.heard.caps[round(told.at("power")) - 5], told.heard.caps[second]
    usual, waited_for = told.gpus_of(103), told.gpus_of(102)
    assert after[usual].max() < before[usual].min() - 50.0
    assert after[waited_for].min() > after[usual].max() + 100.0


def test_a_gpu_that_is_about_to_fail_is_saved_from_drained_and_replaced_by_a_spare(told: Told) -> None:
    since_s, node = told.at("replacement"), told.site.entity("node", "r1/node3")
    assert told.heard.found("health/demo-pod/hall1/r1/node3", since_s)
    saves = [
        r
        for p in ("replacement", "checkpoint")
        for r in told.heard.asked("job.checkpoint_since_s", p, since_s)
    ]
    drains = [
        r for r in told.heard.asked(LEVEL, "replacement", since_s) if node in r.index and r.value.max() >= 3
    ]
    assert saves
    assert drains
    run = next(r for r in told.demo.scheduler.runs if r.request.number == 101)
    assert node not in run.nodes
    assert told.site.spare_node[run.nodes].any()
    assert run.starts == 2, "it failed no second time"


def test_intervals_shorten_as_failure_rates_rise(told: Told) -> None:
    first, *_, last = (r.value.max() for t, r in told.heard.commands
                       if r.control == "job.checkpoint_interval_s" and "104" in r.reason)  # fmt: skip
    assert last < 0.9 * first


def test_a_lost_feed_trips_nothing_as_the_other_was_kept_free_for_it(told: Told) -> None:
    assert told.heard.found("fault/feed_lost/demo-pod/hall1/feed-a", told.at("feed"))
    assert told.tripped == 0
    begin = round(told.at("feed"))
    budget_w = 380_000.0
    assert max(told.power_w[begin : begin + 30]) < budget_w


def test_the_guard_cuts_to_what_one_worn_pump_still_cools(told: Told) -> None:
    since_s = told.at("pump")
    assert told.heard.found("fault/pump_trip/demo-pod/hall1/cdu2", since_s)
    (rack, *_) = (told.site.rack_of_gpu[r.index[0]] for r in told.heard.asked(CAP, "power_guard", since_s))
    assert told.site.cdu_of_rack[rack] == told.site.entity("cdu", "cdu2")


def test_the_load_was_forecast_five_minutes_before(told: Told) -> None:
    mean_w = float(np.mean(told.power_w[-60:]))
    now_w = float(np.mean(told.power_w[:15]))
    assert told.forecast.lo[0] <= mean_w <= told.forecast.hi[0]
    assert now_w < mean_w, "the forecast knew of more than the present"


@pytest.mark.long
def test_past_and_story_replay_byte_for_byte(told: Told) -> None:
    """As long as the story itself; the demos of one chapter replay in each test run."""
    run = told.folder / "run"
    outcome = replay_frames(make_engine(told.site), TraceReader(run), run / "journal.jsonl")
    assert (outcome.ticks, outcome.damage) == (told.ticks, [])
    assert outcome.compared_lines > STORY_S
