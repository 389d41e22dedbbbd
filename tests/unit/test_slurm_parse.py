"""Jobs in the output of `squeue` become events: once each, with ids that a restart repeats."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from connectors.orders import SinkContext
from connectors.slurm import SlurmSettings, SlurmSource, SlurmStandby
from connectors.slurm.jobs import JobLedger, Listed, parse_listing
from connectors.slurm.source import RESTS
from tests.support.builders import site_of, two_racks
from tests.support.inlets import RecordingInlet
from twin.catalogue import NS, BadMessage, ConfigError, ConnectorError
from twin.site import Site
from twin.telemetry import JobEnded, JobStarted

NAMES = {"gpu[01-18]": "r1/node[0-17]", "gpu[19-36]": "lab/h/r2/node[0-17]"}


# nodes, tasks, sockets; GPUs accounted, asked for; tasks of an array, submitted, eligible, shared, reason
MORE = "1|1|*|cpu=1|N/A|gres:gpu:4|N/A|N/A|N/A|1700000000|1700000000|OK|normal|None|"


@pytest.fixture(scope="module")
def site() -> Site:
    tree = two_racks()
    tree["halls"][0]["racks"].append({"name": "cn[1-3]", "nodes": 1})
    return site_of(tree)


def line(
    job: int = 7,
    state: str = "RUNNING",
    start: str = "1700000000",
    hosts: str = "gpu[01-02]",
    limit: str = "1:00:00",
    priority: str = "100",
    account: str = "phys",
) -> str:
    return f"{state}|{job}|{start}|{limit}|{priority}|{account}|ada|train|{hosts}|{MORE}\n"


def listed(*lines: str) -> list[Listed]:
    jobs, bad = parse_listing("".join(lines))
    assert not bad
    return jobs


def test_a_job_is_told_once_and_ends_once(site: Site) -> None:
    ledger = JobLedger(site, NAMES)
    ledger.cluster = "lab"
    assert ledger.changes(listed(line())) == [
        JobStarted(
            id="slurm:lab:7:1700000000",
            job="slurm:lab:7",
            nodes=("lab/h/r1/node0", "lab/h/r1/node1"),
            priority=100,
            tenant="ada",
            account="phys",
            queue="train",
            time_limit_s=3600.0,
            started_ns=1_700_000_000 * NS,
        )
    ]
    assert ledger.changes(listed(line(state="SUSPENDED"))) == []
    assert ledger.changes(listed(line(state="COMPLETING", hosts="gpu02"))) == []  # its nodes leave one by one
    ended = JobEnded(id="slurm:lab:7:1700000000:end", job="slurm:lab:7", reason="left the queue")
    assert ledger.changes([]) == [ended]
    assert ledger.changes([]) == []


def test_how_a_job_ended_is_said_where_slurm_says_it(site: Site) -> None:
    ledger = JobLedger(site, NAMES)
    ledger.changes(listed(line()))
    (ended,) = ledger.changes(listed(line(state="TIMEOUT")))
    assert isinstance(ended, JobEnded)
    assert ended.reason == "timeout"
    assert ledger.changes(listed(line(state="TIMEOUT"))) == []


def test_a_requeued_job_starts_anew_even_if_nobody_saw_it_wait(site: Site) -> None:
    ledger = JobLedger(site, NAMES)
    (first,) = ledger.changes(listed(line()))
    (same,) = ledger.changes(listed(line(start="1700000400")))
    assert same.id == "slurm:cluster:7:1700000400"
    (second,) = ledger.changes(listed(line(start="1700000500", hosts="gpu[03-04]")))
    assert isinstance(second, JobStarted)
    assert second.id != first.id
    assert second.job == first.job  # type: ignore[union-attr]
    assert second.nodes == ("lab/h/r1/node2", "lab/h/r1/node3")


def test_a_requeued_job_that_still_completes_keeps_its_run_until_its_nodes_are_free(site: Site) -> None:
    ledger = JobLedger(site, NAMES)
    (first,) = ledger.changes(listed(line()))
    assert ledger.changes(listed(line(state="COMPLETING", start="1700000400"))) == []
    (ended,) = ledger.changes(listed(line(state="PENDING", start="1700000400", hosts="")))
    assert ended.id == f"{first.id}:end"


def test_each_resize_has_an_id_of_its_own(site: Site) -> None:
    ledger = JobLedger(site, NAMES)
    sizes = ("gpu[01-02]", "gpu[01-03]", "gpu[01-02]", "gpu[01-03]", "gpu[01-02]")
    ids = [event.id for hosts in sizes for event in ledger.changes(listed(line(hosts=hosts)))]
    assert len(set(ids)) == len(sizes)


def test_a_resized_job_is_told_with_its_nodes(site: Site) -> None:
    ledger = JobLedger(site, NAMES)
    ids = [ledger.changes(listed(line(hosts=h)))[0].id for h in ("gpu[01-02]", "gpu01", "gpu[01-04]")]
    assert len(set(ids)) == 3
    assert ledger.changes(listed(line(hosts="gpu[01-04]"))) == []
    again = JobLedger(site, NAMES)
    assert again.changes(listed(line()))[0].id == ids[0]


def test_a_job_that_was_resized_while_nobody_watched_has_an_id_of_its_own(site: Site) -> None:
    """Nodes 1, then 1 and 2, and back to 1 while the daemon is down: the first id is used up."""
    before = JobLedger(site, NAMES)
    first, grown = (before.changes(listed(line(hosts=h)))[0] for h in ("gpu01", "gpu[01-02]"))
    assert isinstance(first, JobStarted)
    assert isinstance(grown, JobStarted)
    (unchanged,) = JobLedger(site, NAMES).changes(listed(line(hosts="gpu01")), {first.job: first.nodes})
    assert unchanged.id == first.id, "counts once: nothing happened"
    (back,) = JobLedger(site, NAMES).changes(listed(line(hosts="gpu01")), {first.job: grown.nodes})
    assert isinstance(back, JobStarted)
    assert back.id not in (first.id, grown.id)
    assert back.nodes == first.nodes


def test_hosts_by_configuration_by_own_name_and_in_racks_of_one(site: Site) -> None:
    ledger = JobLedger(site, {"x": "lab/h/r1/node5"})
    (event,) = ledger.changes(listed(line(hosts="x,cn[2-3],stranger,r1")))
    assert isinstance(event, JobStarted)
    assert event.nodes == ("lab/h/r1/node5", "lab/h/cn2/node0", "lab/h/cn3/node0")
    assert list(ledger.strangers) == ["stranger", "r1"]


def test_a_job_on_strangers_only_is_none_of_ours(site: Site) -> None:
    ledger = JobLedger(site, NAMES)
    assert ledger.changes(listed(line(hosts="login1"))) == []
    assert ledger.changes([]) == []


def test_jobs_that_ended_while_nobody_watched(site: Site) -> None:
    ledger = JobLedger(site, NAMES)
    known = dict.fromkeys(("slurm:cluster:7", "slurm:cluster:8", "slurm:other:9", "mqtt-job"), ())
    events = ledger.changes(listed(line()), known)
    assert [type(e).__name__ + e.job for e in events if isinstance(e, JobEnded | JobStarted)] == [
        "JobEndedslurm:cluster:8",
        "JobStartedslurm:cluster:7",
    ]


def test_a_listing_in_part_ends_nothing(site: Site) -> None:
    ledger = JobLedger(site, NAMES)
    ledger.changes(listed(line(), line(8, hosts="gpu03")))
    assert ledger.changes(listed(line()), whole=False) == []
    assert len(ledger.changes(listed(line(), line(8, state="FAILED", hosts="gpu03")), whole=False)) == 1


def test_kinds_by_partition(site: Site) -> None:
    (event,) = JobLedger(site, NAMES, {"train": "training"}).changes(listed(line()))
    assert isinstance(event, JobStarted)
    assert event.kind == "training"


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("UNLIMITED", 0),
        ("NOT_SET", 0),
        ("INVALID", 0),
        ("", 0),
        ("5", 300),
        ("5:30", 330),
        ("1:00:00", 3600),
        ("2-00:00:00", 172_800),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("10-01:02:03", 867_723),
    ],
)
def test_time_limits(text: str, seconds: float) -> None:
    assert listed(line(limit=text))[0].time_limit_s == seconds


def test_cells_that_hold_nothing(site: Site) -> None:
    (job,) = listed(line(hosts="(null)", account="(null)", start="N/A", priority=str(2**32 - 9)))
    assert (job.hosts, job.account, job.start_s, job.priority) == ("", "", 0, 2**31 - 1)
    assert JobLedger(site, NAMES).changes([job]) == []
    assert listed(line(state="REVOKED"), "\n") == []
    waiting = listed(line(state="PENDING", hosts=""), line(job=8, state="CONFIGURING"))
    assert JobLedger(site, NAMES).changes(waiting) == []


@pytest.mark.parametrize(
    "bad",
    [
        "garbage",
        line(start="2026-11-21T03:00:00"),
        line(limit="1-x"),
        line(priority="high"),
        line().replace("|7|", "|x|"),
        line().replace("|ada", "|ada|more"),
        line(limit="9" * 50),
    ],
)
def test_a_line_of_another_form_is_told(bad: str) -> None:
    jobs, why = parse_listing(line() + bad.rstrip("\n") + "\n")
    assert [j.job for j in jobs] == ["7"]
    assert len(why) == 1
    with pytest.raises(BadMessage):
        parse_listing(bad)


def test_a_host_list_that_cannot_be_read_is_told(site: Site) -> None:
    ledger = JobLedger(site, NAMES)
    assert ledger.changes(listed(line(hosts="gpu[01-"))) == []
    assert len(ledger.faults) == 1


def test_names_that_do_not_pair_are_refused(site: Site) -> None:
    with pytest.raises(ConfigError, match="expected as many"):
        SlurmSource(site, SlurmSettings(node_names={"gpu[1-2]": "r1/node0"}))


@pytest.mark.parametrize(
    "script, expected",
    [
        ("echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1", "Unable to contact"),
        ("sleep 60", "no answer within 0.5 s"),
        ("trap '' TERM; sleep 60 & wait", "no answer within 0.5 s"),
        ("exec cat /dev/zero", "bytes of answer"),
        ("echo nonsense", "expected State|"),
        ("", "cannot be run"),
    ],
)
def test_a_scheduler_that_does_not_answer_ends_no_job(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str
) -> None:
    monkeypatch.setattr("connectors.slurm.source.MAX_OUTPUT", 2**20)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(name: str, body: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n" if body else "")
        (tmp_path / name).chmod(0o755 if body else 0o644)

    write("scontrol", "echo 'ClusterName             = lab'")
    write("squeue", f"printf '{line()}'")
    inlet = RecordingInlet()

    async def run() -> None:
        source = SlurmSource(site, SlurmSettings(period_s=0.05, timeout_s=0.5, node_names=NAMES))
        task = asyncio.create_task(source.run(inlet))
        while not inlet.items and not task.done():
            await asyncio.sleep(0.01)
        write("squeue.new", script)
        (tmp_path / "squeue.new").replace(tmp_path / "squeue")
        if not script:
            monkeypatch.setenv("PATH", str(tmp_path))
            source._env["PATH"] = str(tmp_path)
        with pytest.raises(ConnectorError, match=expected.replace("|", r"\|")):
            await asyncio.wait_for(task, 20)

    asyncio.run(run())
    assert [type(e) for e in inlet.items] == [JobStarted]
    assert inlet.items[0].id == "slurm:lab:7:1700000000"  # type: ignore[union-attr]


@pytest.mark.parametrize("hangs", ["squeue", "scontrol"])
def test_a_scheduler_that_hangs_rests_before_it_is_asked_again(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("scontrol", "squeue"):
        body = "sleep 60" if name == hangs else "echo 'ClusterName = lab'"
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    source = SlurmSource(site, SlurmSettings(timeout_s=0.3, node_names=NAMES))

    async def took_s() -> float:
        begun_s = time.monotonic()
        with pytest.raises(ConnectorError, match="no answer"):
            await source.run(RecordingInlet())
        return time.monotonic() - begun_s

    asyncio.run(took_s())
    assert asyncio.run(took_s()) >= (RESTS + 1) * 0.3
    assert source.settle_s > (RESTS + 1) * 0.3, "it is not back while it rests or hangs"


def test_nodes_that_wake_are_asked_for_no_more_often_than_slurm_bears(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, pauses = SlurmSource(site, SlurmSettings(period_s=5.0)), list[float]()
    source.nodes_every_s = 16.0

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr("connectors.slurm.standby.asyncio.sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(SlurmStandby(site, source, SinkContext(lambda items, _: None, lambda: True)).run())
    assert pauses == [16.0]


def test_settings_of_the_user_do_not_reach_the_commands(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    env: dict[str, Any] = SlurmSource(site, SlurmSettings(conf="/etc/s.conf"))._env
    assert set(env) == {"PATH", "LC_ALL", "SLURM_TIME_FORMAT", "SLURM_CONF", "SLURM_BITSTR_LEN"}
