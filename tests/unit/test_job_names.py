"""Jobs are called by the name that their users gave them, everywhere a person reads; slots stay inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_process_daemon import Pod, serve
from tests.support.journal_bodies import bodies_of
from tests.support.saving_jobs import EIGHT, OTHERS, Saving, drain, saved
from tests.unit.test_api_checkpoint import employ, wish
from twin.engine import shown
from twin.engine.records import MOST_NAMES, job_names
from twin.report.episodes import Episodes
from twin.telemetry import CheckpointTold, JobEnded, JobSlots

INTERVAL = "job.checkpoint_interval_s"


def texts(answer: dict[str, Any]) -> str:
    return " | ".join(d["text"] for d in answer["decisions"])


def test_decisions_name_jobs_and_take_their_names(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        employ(pod)
        wish(pod, INTERVAL, 0, 900.0)
        wish(pod, INTERVAL, 1, 700.0)
        for asked in ("4711", "job:4711", "lab/job0"):
            status, found = await pod.ask("GET", f"/api/v1/decisions?entity={asked}&kind=command")
            assert status == 200, found
            assert "job:4711" in texts(found)
            assert "job:ns/b" not in texts(found)
            assert "lab/job0" not in texts(found)
        status, found = await pod.ask("GET", "/api/v1/decisions?entity=nosuch")
        assert status == 404
        status, of_job = await pod.ask("GET", "/api/v1/entities/job/4711")
        assert status == 200
        assert any("15 min" in d["text"] for d in of_job["decisions"])
        pod._events.append(JobEnded(job="4711"))
        pod.tick()
        status, found = await pod.ask("GET", "/api/v1/decisions?entity=4711&kind=command")
        assert status == 200, "of one that has ended the lines still tell"
        assert "15 min" in texts(found)

    serve(tmp_path, check)


def test_the_next_job_of_a_slot_is_not_held_to_what_the_last_was_told(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        employ(pod)
        wish(pod, INTERVAL, 0, 900.0)
        jobs = pod.live.engine.jobs
        jobs.names[0] = "fresh"  # as if it had the slot now
        jobs.slot_of = {"fresh": 0, "ns/b": 1}
        _, found = await pod.ask("GET", "/api/v1/decisions?entity=fresh&kind=command")
        assert found["decisions"] == []

    serve(tmp_path, check)


@pytest.mark.long
def test_findings_and_records_name_jobs() -> None:
    twin = Saving({"4711": EIGHT, "b": OTHERS})
    twin.says.day = 0.5
    twin.wait(120)
    twin.tick(None, CheckpointTold(job="4711", at_ns=twin.now_ns, interval_s=5.0))
    twin.wait(1200)
    found = [f for f in twin.engine.findings.active.values() if "checkpoint_interval_s" in f.id]
    assert found
    assert all(name.startswith("job:") for f in found for name in f.entities)
    assert "job:4711" in {name for f in found for name in f.entities}
    assert any(e.startswith("job:4711: commanded") for f in found for e in f.evidence)
    saved(twin, "4711")
    twin.tick(None, drain())
    records = [r for r in twin.records("command") if r["control"].startswith("job.")]
    twin.wait(10)
    records += [r for r in bodies_of(twin.decision) if str(r.get("control")).startswith("job.")]
    assert not [r for r in records if "lab/job" in str({k: v for k, v in r.items() if k != "index"})]


def test_a_record_names_a_few_of_many_jobs_and_only_jobs() -> None:
    twin = Saving({"a": EIGHT})
    jobs = JobSlots(200, 36)
    jobs.alive[:100], jobs.names[:100] = True, [f"j{k}" for k in range(100)]
    index = np.arange(150, dtype=np.int32)
    told = job_names(INTERVAL, index, twin.site, jobs)
    assert len(told) == MOST_NAMES
    assert told[0] == "job:j0"
    assert shown(twin.site, jobs, "job", index[120:121]) == ("lab/job120",), "one that nobody knows"
    assert job_names("gpu.power_cap_w", index, twin.site, jobs) == ()


def test_a_report_of_a_run_names_jobs() -> None:
    twin, book = Saving({"4711": EIGHT}, authority="act"), Episodes()
    twin.says.day = 0.5
    for _ in range(20):
        twin.wait(5)
        book.act("command", twin.decision.commands, twin.site, twin.engine.jobs)
    assert {name for a in book.actions.values() for name in a.names} == {"job:4711"}
