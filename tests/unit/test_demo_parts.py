"""The parts of the demo: its story, its scheduler behind Slurm's programs, its narrator."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from racktwin_agent.devices import GPU_CAP, Key

from connectors.slurm import SlurmSettings, SlurmSource
from connectors.slurm.jobs import parse_listing
from connectors.slurm.marks import parse_marks
from connectors.slurm.nodes import parse_nodes
from twin.catalogue import NS, ConfigError, ConnectorError
from twin.config import load_site
from twin.plant import Plant
from twin.simulation import FOLDER, DemoSite, Narrator, Story, StoryStep, load_story, with_past
from twin.simulation.demo_plant import DemoPlant
from twin.simulation.scheduler import JobRequest, Scheduler
from twin.simulation.slurm_programs import SlurmPrograms
from twin.simulation.story import Sign, rows_of

SPEC, SITE = load_site(FOLDER / "site.yaml")
STORY = load_story(FOLDER / "story.yaml", SITE)
TRAIN = JobRequest(number=7, kind="training", nodes=17, racks=["r1"], checkpoint_interval_s=60.0,
                   checkpoint_save_s=5.0, restart_s=4.0)  # fmt: skip


class Site:
    """A plant with a scheduler, second by second."""

    def __init__(self, *roster: JobRequest) -> None:
        self.plant = Plant(SITE, 1)
        self.plant.start_ns = 1_700_000_000 * NS
        self.scheduler = Scheduler(self.plant, roster, 1)
        self.scheduler.commanded = True

    def go(self, seconds: int) -> None:
        for _ in range(seconds):
            self.plant.happened(self.scheduler.step(1.0))
            self.plant.step((), 1.0)

    def nodes(self, number: int) -> set[int]:
        return {int(i) for r in self.scheduler.runs if r.request.number == number for i in r.nodes}

    def says(self, *words: str) -> str:
        code, text = self.scheduler.answer(words)
        assert code == 0, text
        return text


def test_the_story_has_a_chapter_for_each_promise_and_others_alone() -> None:
    names = [c.name for c in STORY.only(None).chapters]
    assert names == ["power", "replacement", "checkpoint", "feed", "pump", "forecast"]
    assert max(c.at_s + c.within_s for c in STORY.only(None).chapters) <= 315
    assert [c.name for c in STORY.only("leak").chapters] == ["leak"]
    assert [c.name for c in STORY.only("forecast").chapters] == ["power", "forecast"]
    with pytest.raises(ConfigError, match="expected one of power, replacement"):
        STORY.only("pwer")


def test_a_story_with_a_strange_place_is_refused(tmp_path: Path) -> None:
    text = (FOLDER / "story.yaml").read_text().replace("entity: feed-a", "entity: feed-c")
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError, match="expected the path of a feeder"):
        load_story(tmp_path / "s.yaml", SITE)


def test_a_plan_is_the_mean_of_its_steps() -> None:
    job = msgspec.structs.replace(TRAIN, begin_s=90.0, end_s=150.0)
    plan = STORY.plan
    planned = STORY.planned_w([job], 0.0, 4)
    assert planned == [
        plan.idle_w,
        plan.idle_w + 8.5 * plan.node_w,
        plan.idle_w + 8.5 * plan.node_w,
        plan.idle_w,
    ]


def test_a_job_that_loses_its_node_goes_on_with_a_spare() -> None:
    site = Site(msgspec.structs.replace(TRAIN, nodes=int((~SITE.spare_node).sum())))
    site.go(3)
    before = site.nodes(7)
    assert not SITE.spare_node[list(before)].any()
    host = site.scheduler.hosts[min(before)]
    site.says("scontrol", "update", f"NodeName={host}", "State=DRAIN", "Reason=racktwin:3:ill")
    assert parse_nodes(site.says("sinfo"))[host].state == "draining"
    assert site.plant.truth.node_service_level[min(before)] == 3
    site.says("scontrol", "requeue", "7")
    site.go(8)
    after = site.nodes(7)
    assert before - after == {min(before)}
    assert SITE.spare_node[list(after - before)].all()
    assert parse_nodes(site.says("sinfo"))[host].ours == 3
    jobs, bad = parse_listing(site.says("squeue", "--noheader"))
    assert not bad
    assert [(j.state, j.partition) for j in jobs] == [("CANCELLED", "train"), ("RUNNING", "train")]
    site.says("scontrol", "update", f"NodeName={host}", "State=UNDRAIN")
    assert parse_nodes(site.says("sinfo"))[host].state == "idle"


def test_nodes_that_are_weighed_down_come_last() -> None:
    site = Site(msgspec.structs.replace(TRAIN, nodes=3))
    site.says("scontrol", "update", "NodeName=r1n[00-01]", "Weight=2000000001")
    marks = parse_marks(
        site.says("scontrol", "--all", "show", "nodes"), site.says("scontrol", "show", "reservation")
    )
    assert marks.weights["r1n00"] == 2_000_000_001
    site.go(2)
    assert site.nodes(7) == {2, 3, 4}


def test_a_removed_job_leaves_its_gpus_at_rest_and_a_placed_one_saves() -> None:
    site = Site(TRAIN)
    site.go(90)
    work, truth = site.scheduler.work, site.plant.truth
    assert work.progress.saving_gpu_s > 0
    assert work.checkpoint("slurm:demo:7", site.plant.truth.time_s) == 5.0
    (run,) = site.scheduler.runs
    gpus = np.flatnonzero(np.isin(SITE.node_of_gpu, run.nodes))
    assert (truth.gpu_sm_pu[gpus] > 0).all()
    site.plant.happened(site.scheduler.requeue(run))
    site.go(1)
    assert (truth.gpu_sm_pu == 0).all()
    assert work.progress.lost_gpu_s > 0


def test_the_programs_answer_as_the_scheduler_does(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def answer(words: Sequence[str]) -> tuple[int, str]:
        asked.append(list(words))
        return (1, "no\n") if words[0] == "scontrol" else (0, "r1n00|idle||||none|\n")

    programs = SlurmPrograms(tmp_path / "slurm", answer)
    try:
        done = subprocess.run([tmp_path / "slurm" / "sinfo", "--format=%N"], capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (0, b"r1n00|idle||||none|\n")
        assert (
            subprocess.run([tmp_path / "slurm" / "scontrol"], capture_output=True, check=False).returncode
            == 1
        )
        assert asked == [["sinfo", "--format=%N"], ["scontrol"]]
    finally:
        programs.close()
    assert SlurmSource(SITE, SlurmSettings()).name == "slurm"


def test_an_agent_reads_its_gpus_from_the_plant_and_its_caps_are_obeyed_there() -> None:
    past = with_past(STORY.only("feed"), 60.0)
    live = DemoPlant(DemoSite(past, SPEC, SITE))
    trays, live.plant.start_ns = live.trays(), 1_700_000_000 * NS
    topics = {m.topic for m in live.move(1.0, live.plant.now_ns + NS)}
    assert not any("/Frame/" in topic for topic in topics), "nodes speak for themselves"
    assert any("/Event/outlooks/" in topic for topic in topics)
    tray, key = trays["demo-pod/hall1/r2/node3"], Key(GPU_CAP, "gpu1")
    assert tray.limits(key) == (200.0, 1200.0)
    assert tray.limits(Key(GPU_CAP, "gpu4")) is None
    tray.set(key, 300.0)
    assert tray.get(key) == 300.0
    for _ in range(3):
        live.move(1.0, live.plant.now_ns + NS)
    sample = tray.sample(live.plant.now_ns)
    assert abs(sample.gpu["power_w"][1] - 300.0) < 15.0
    assert sample.gpu["power_limit_w"][1] in (300.0, None)
    assert not {"agent_state", "service_level_state"} & set(sample.node)


def test_an_agent_reads_the_nvlinks_of_the_plant_and_the_one_that_counts() -> None:
    live = DemoPlant(DemoSite(with_past(STORY.only("feed"), 60.0), SPEC, SITE))
    tray, live.plant.start_ns = live.trays()["demo-pod/hall1/r2/node3"], 1_700_000_000 * NS
    assert [gpu.read for gpu in tray.nvlinks()] == [0] * tray.gpus, "nothing is read before the first report"
    truth = live.plant.truth
    truth.gpu_nvlink_errors[tray.first + 1] = 40
    truth.gpu_nvlink_recoveries[tray.first + 1] = 2
    truth.health_count += 1
    for _ in range(3):
        live.move(1.0, live.plant.now_ns + NS)
    links = tray.nvlinks()
    assert [gpu.read for gpu in links] == [18] * tray.gpus
    assert [len(gpu.counts) for gpu in links] == [0, 1, *[0] * (tray.gpus - 2)]
    assert (links[1].total("errors"), links[1].total("recoveries"), links[1].total("replays")) == (40, 2, 0)
    live.reports.clear()
    assert tray.nvlinks()[1].read == 0, "and silence is no count of zero"


ROWS = {"now": [{"name": "a", "x": {"y": 3.0}, "now_ns": 5}, {"name": "b", "x": {"y": 1.0}, "now_ns": 9}]}


@pytest.mark.parametrize(
    ("sign", "since", "before", "found"),
    [
        ({"where": {"name": "a"}}, 0, {}, "a"),
        ({"where": {"name": "a"}}, 6, {}, None),
        ({"where": {"x.y": 1.0}}, 0, {}, "b"),
        ({"over": {"x.y": 2.0}}, 0, {}, "a"),
        ({"over": {"x.y": 3.0}}, 0, {}, None),
        ({"falls": "x.y"}, 0, {}, None),
        ({"falls": "x.y"}, 0, {"x.y": 2.0}, "b"),
        ({"falls": "x.y", "shows": {"name": "a"}}, 0, {"x.y": 9.0}, "a"),
    ],
)
def test_a_sign_shows_in_the_row_that_it_means(
    sign: dict[str, Any], since: int, before: dict[str, Any], found: str | None
) -> None:
    row = msgspec.convert({"path": "/p", "rows": "now", "says": "", **sign}, Sign).find(ROWS, since, before)
    assert (row and row["name"]) == found


def test_tables_of_explanations_are_rows() -> None:
    table = {"name": "jobs", "columns": [{"name": "job"}, {"name": "s"}], "rows": [["a", 1.0]]}
    assert rows_of({"tables": [table]}, "tables.jobs") == [{"job": "a", "s": 1.0}]
    assert rows_of({"tables": []}, "tables.jobs") == []


class Desk:
    """An interface with one alarm to come, which keeps what it is told."""

    def __init__(self) -> None:
        self.now_s, self.alarm_s, self.away = 0, 1e9, False
        self.told: list[dict[str, Any]] = []

    def call(self, method: str, path: str, body: Any = None) -> Any:
        if method == "POST":
            self.told.append(body)
            return {}
        if path.startswith("/forecasts"):
            row = {"horizon_s": 300.0, "lo": [9.0], "mean": [10.0], "hi": [11.0]}
            return {"forecasts": [row]}
        if self.away and path != "/summary":
            raise ConnectorError("not yet")
        alarms = (
            [{"id": "fault/x", "title": "it broke", "power_w": 2000.0}] if self.now_s >= self.alarm_s else []
        )
        return {"now_ns": self.now_s * NS, "racks": [{"power_w": 10.5}], "alarms": alarms}


def tell(desk: Desk, story: Story, seconds: int) -> tuple[Narrator, list[StoryStep]]:
    narrator, lines = Narrator(story, desk, 0), []
    for desk.now_s in range(seconds):
        lines += narrator.poll()
    return narrator, lines


def chapter(**more: Any) -> Story:
    sign = {"path": "/summary", "rows": "alarms", "where": {"id": "fault/"}, "says": "{title} at {power}"}
    raw = {"name": "c", "title": "T", "cause": "so", "at_s": 10.0, "within_s": 20.0, "signs": [sign], **more}
    return msgspec.structs.replace(STORY, chapters=[msgspec.convert(raw, type(STORY.chapters[0]))])


def test_a_chapter_is_told_when_it_begins_and_when_its_sign_shows() -> None:
    desk = Desk()
    desk.alarm_s = 16
    narrator, lines = tell(desk, chapter(), 40)
    assert [(line.chapter, line.after_s, line.text) for line in lines[1:]] == [
        (1, None, "T: so"), (1, 6.0, "it broke at 2 kW"),
    ]  # fmt: skip
    assert [body["text"] for body in desk.told] == ["so", "it broke at 2 kW"]
    assert narrator.is_over
    assert not narrator.missing


def test_a_sign_that_does_not_show_in_time_is_said_and_kept() -> None:
    desk = Desk()
    narrator, lines = tell(desk, chapter(), 60)
    assert lines[-1].text.startswith("not seen within 20 s")
    assert len(narrator.missing) == 1
    assert narrator.is_over


def test_a_forecast_is_compared_with_what_came() -> None:
    narrator, lines = tell(Desk(), chapter(keeps=True, signs=[]), 302)
    assert lines[-1].text.startswith("10.5 W in the last minute, within")
    assert not narrator.missing
