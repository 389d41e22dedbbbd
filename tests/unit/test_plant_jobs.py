"""Simulated jobs on the wire: they report as real ones do, follow advice while it holds, and fall back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from connectors.jobs import Advice, JobDecoder
from connectors.jobs.wire import advice_topic, encode_advice
from tests.support.builders import START_NS, site_of, two_racks
from twin.catalogue import NS, BadMessage
from twin.plant import Mix, Plant, Scenario, Sensors
from twin.plant.workload import Workload
from twin.simulation import LivePlant
from twin.simulation.plant_jobs import PlantJobs
from twin.simulation.plant_orders import Publication
from twin.telemetry import CheckpointTold, Ignored, JobEnded, JobStarted, Message

SITE = site_of(two_racks())
WORK = Mix(1.0, 0.0, 0.0, job_hours=(40.0, 48.0), checkpoint_interval_s=(2000.0, 2000.0),
           checkpoint_save_s=(20.0, 20.0))  # fmt: skip


class Wire:
    """A live plant, and what a daemon would hear of its jobs."""

    def __init__(self, speed: float = 1.0) -> None:
        plant = Plant(SITE, 1, Scenario("training", workload=WORK))
        self.live = LivePlant(plant, Sensors(SITE, 1), speed=speed)
        self.now_ns = START_NS
        self.started: dict[str, JobStarted] = {}
        self.told: list[CheckpointTold] = []
        self.kept: list[bool] = []
        self.go(1)
        self.job = min(self.started)

    def go(self, seconds: float, round_s: float = 1.0) -> None:
        for _ in range(round(seconds / round_s)):
            self.now_ns += round(round_s * NS)
            for publication in self.live.move(round_s, self.now_ns):
                self.hear(publication)

    def hear(self, publication: Publication) -> None:
        message = Message(self.now_ns, publication.topic, publication.payload)
        if message.topic.startswith("IT/v1/PUB/Job/"):
            got = JobDecoder().decode(message)
            assert not isinstance(got, Ignored)
            self.told += got
            self.kept.append(publication.kept)
        elif message.topic == "IT/v1/PUB/Event/jobs/scheduler" and b"JobStarted" in message.payload:
            event = msgspec.json.decode(message.payload, type=JobStarted)
            self.started[event.job] = event

    def advise(self, interval_s: float | None, since_s: float | None = None, **more: Any) -> None:
        """An advice that was issued now; `since_s` is how long ago."""
        since = None if since_s is None else self.now_ns - round(since_s * NS)
        issued = {"issued_ns": self.now_ns, "expires_ns": self.now_ns + 300 * NS, "epoch": 1} | more
        advice = Advice(job=self.job, interval_s=interval_s, save_since_ns=since, **issued)
        self.live.receive(Message(self.now_ns, advice_topic("racktwin", self.job), encode_advice(advice)))

    @property
    def interval_s(self) -> float:
        work = self.live.plant.workload
        assert isinstance(work, Workload)
        return next(j.interval_s for j in work.jobs if j.name == self.job)

    def mine(self) -> list[CheckpointTold]:
        return [e for e in self.told if e.job == self.job]


def test_a_save_that_is_advised_is_made_and_reported_by_the_clock_of_the_wire() -> None:
    wire = Wire()
    wire.go(9)
    asked_ns = wire.now_ns
    wire.advise(None, 5.0)
    wire.go(25)
    (report,) = wire.mine()
    assert abs(report.began_ns - asked_ns) <= 1.1 * NS
    assert report.at_ns - report.began_ns == pytest.approx(20 * NS)
    assert (report.save_s, report.block_s, report.interval_s) == (20.0, 20.0, 2000.0)
    assert report.id
    assert all(wire.kept), "a report waits for a broker"
    wire.advise(None, 5.0 + 25.0)  # as a renewal says again
    wire.go(30)
    assert len(wire.mine()) == 1


def test_an_interval_is_kept_while_its_advice_holds() -> None:
    wire = Wire()
    wire.advise(700.0)
    wire.go(2)
    assert wire.interval_s == 700.0
    assert wire.mine()[-1].interval_s == 700.0
    wire.go(200)
    wire.advise(700.0)  # a renewal
    wire.go(250, 10.0)
    assert wire.interval_s == 700.0
    wire.go(60, 10.0)
    assert wire.interval_s == 2000.0, "its own again"
    assert wire.mine()[-1].interval_s == 2000.0


def test_what_is_old_or_over_is_not_followed() -> None:
    wire = Wire()
    wire.advise(700.0, issued_ns=wire.now_ns, epoch=5)
    wire.go(1)
    wire.advise(800.0, issued_ns=wire.now_ns + NS, epoch=4)
    wire.advise(900.0, issued_ns=START_NS, epoch=5)
    wire.advise(950.0, expires_ns=wire.now_ns, epoch=6)
    wire.job, own = "nobody", wire.job
    wire.advise(100.0)
    wire.job = own
    wire.go(1)
    assert wire.interval_s == 700.0
    assert wire.live.counts["advice"] == 1
    assert wire.live.counts["advice not followed"] == 4
    wire.live.receive(Message(wire.now_ns, advice_topic("racktwin", own), b"{"))
    assert wire.live.counts["not understood"] == 1


def test_an_advice_to_another_job_is_refused() -> None:
    jobs = PlantJobs("racktwin")
    jobs.note(JobStarted(job="a", nodes=()), START_NS)
    body = encode_advice(Advice(job="b", interval_s=5.0, save_since_ns=None, issued_ns=1,
                                expires_ns=2 * START_NS, epoch=1))  # fmt: skip
    with pytest.raises(BadMessage, match="in the place of"):
        jobs.receive(Message(START_NS, "IT/v1/racktwin/Job/a", body))


def test_a_job_that_ended_is_forgotten() -> None:
    wire = Wire()
    wire.advise(700.0)
    jobs = wire.live._jobs
    jobs.note(JobEnded(job=wire.job), wire.now_ns)
    assert wire.job not in jobs.running
    jobs.follow(wire.live.plant.workload, 1.0, wire.now_ns)
    assert wire.interval_s == 2000.0


def test_seconds_of_a_faster_plant_are_those_of_the_wire() -> None:
    wire = Wire(speed=10.0)
    assert wire.started[wire.job].checkpoint_interval_s == 200.0
    assert wire.started[wire.job].checkpoint_save_s == 2.0
    wire.advise(70.0, 3.0)
    asked_ns = wire.now_ns
    wire.go(5)
    assert wire.interval_s == 700.0
    whole = [e for e in wire.mine() if e.save_s]
    assert [e.save_s for e in whole] == [2.0]
    assert abs(whole[0].began_ns - asked_ns) < 1.1 * NS
    assert whole[0].at_ns - whole[0].began_ns == pytest.approx(2 * NS)
    wire.advise(70.0, 3.0 + 5.0)
    wire.go(5)
    assert len([e for e in wire.mine() if e.save_s]) == 1, "the one it has is new enough"
