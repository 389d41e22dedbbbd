"""Processes of what-ifs: any number gives the same result, a dead one costs its own case, none is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded_site import BASE, FROM, SCENARIO, SITE, asked, lab, recorded
from twin.catalogue import ConfigError
from twin.cli.main import main
from twin.simulation import Case, Question, whatif
from twin.simulation.whatif import ArmResult, run_arm

__all__ = ["lab", "recorded"]
ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0  # only a test that fails waits so long
WORK_S = 1.0  # of a processor, in which a worker is well past its first steps


@pytest.mark.long
def test_processes_give_what_one_gives(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "scenario.yaml").write_text(
        SCENARIO + "sweep: {seeds: [4, 7], vary: {'faults[0].begin_s': [2, 8]}}\n"
    )
    one = asked(capsys, "--jobs", "1", "--horizon", "10s")
    many = asked(capsys, "--jobs", "3", "--horizon", "10s")
    for result in (one, many):
        del result["wall_s"]
    assert one == many
    assert [c["varied"] for c in one["cases"]] == [
        {"seed": s, "faults[0].begin_s": b} for b in (2, 8) for s in (4, 7)
    ]  # fmt: skip
    assert len(one["summary"]) == 2
    assert one["summary"][0]["cases"] == 2
    hottest = one["summary"][0]["nothing"]["highest_gpu_temp_c"]
    assert hottest["lowest"] < hottest["median"] < hottest["highest"]
    assert hottest["median"] > one["summary"][1]["nothing"]["highest_gpu_temp_c"]["median"]


KILLER = """\
import os


class Killer:
    name, controls, rank, period_s, urgent, memory = "killer", ("gpu.power_cap_w",), 9, 0.0, False, None

    def propose(self, view, memory):
        os._exit(9)
"""


@pytest.mark.long
def test_a_worker_that_dies_loses_its_own_case_only(
    lab: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab / "killers_of_tests.py").write_text(KILLER)
    monkeypatch.syspath_prepend(str(lab))
    (lab / "site.yaml").write_text(SITE + 'policies: {killer: {kind: "killers_of_tests:Killer"}}\n')
    (lab / "scenario.yaml").write_text(
        SCENARIO + "policies: {killer: act}\nsweep: {vary: {policies.killer: ['off', act, 'off']}}\n"
    )
    capsys.readouterr()
    assert main([*BASE, "--jobs", "2", "--horizon", "5s", "--json"]) == 1
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["failed"] == 1
    assert [c["error"] for c in result["cases"]] == [
        None,
        "its process ended: killed, or out of memory",
        None,
    ]
    assert [("policies" in c, "nothing" in c) for c in result["cases"]] == [
        (True, True),
        (False, True),
        (True, True),
    ]
    assert "failed: policies.killer = act: its process ended" in said.err


def test_a_case_that_fails_is_told(lab: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def unlucky(question: Question, case: Case, arm: Any, progress: Any = None) -> ArmResult:
        if case.scenario.seed == 1:
            raise ZeroDivisionError("as it happens")
        return run_arm(question, case, arm, progress)

    monkeypatch.setattr(whatif, "run_arm", unlucky)
    result = asked(capsys, "--jobs", "1", "--horizon", "5s", "--seeds", "0,1", code=1)
    assert [c["error"] for c in result["cases"]] == [None, "ZeroDivisionError: as it happens"]
    assert (result["summary"][0]["cases"], result["summary"][0]["failed"]) == (2, 1)


@pytest.mark.parametrize(
    ("more", "processes"),
    [(["60s"], 1), (["101s"], 2), (["50s", "--seeds", "2"], 1), (["60s", "--seeds", "2"], 4)],
)
def test_few_steps_are_not_worth_other_processes(
    lab: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], processes: int
) -> None:
    asked_for: list[int] = []

    def note(question: Question, cases: Any, count: int, bar: Any) -> Any:
        asked_for.append(count)
        raise ConfigError("this is enough")

    monkeypatch.setattr("twin.cli.whatif.run_cases", note)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert main([*BASE, "--horizon", *more]) == 1
    assert asked_for == [processes]


def children_of(pid: int) -> list[int]:
    try:
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def stat_of(pid: int) -> list[str]:
    """Return the kernel's fields of a process, from its state on; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def lives(pid: int) -> bool:
    return bool(found := stat_of(pid)) and found[0] not in ("Z", "X")


class Workers:
    """Those children of a command that are in the midst of a course, told by their threads and time spent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ready_s: dict[int, float] = {}

    def deep(self) -> set[int]:
        """Children that have worked for WORK_S since they had the thread that watches the parent."""
        for pid in children_of(self.pid):
            found = stat_of(pid)
            if found and int(found[17]) > 1:
                self._ready_s.setdefault(pid, self._spent_s(found))
        return {
            pid for pid, ready_s in self._ready_s.items() if self._spent_s(stat_of(pid)) > ready_s + WORK_S
        }

    @staticmethod
    def _spent_s(found: list[str]) -> float:
        return (int(found[11]) + int(found[12])) / os.sysconf("SC_CLK_TCK") if found else 0.0


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nobody_is_left_behind(lab: Path, how: signal.Signals) -> None:
    words = [sys.executable, "-m", "twin.cli.main", *FROM, "--jobs", "2", "--horizon", "1000000s"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    workers, children = Workers(process.pid), list[int]()
    try:
        until = time.monotonic() + PATIENCE_S
        while len(workers.deep()) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until, "no two workers are at work"
            time.sleep(0.05)
        children = children_of(process.pid)
        process.send_signal(how)
        _, err = process.communicate(timeout=PATIENCE_S)
        if how != signal.SIGKILL:
            assert process.returncode == 130
            assert err.decode().strip() == "interrupted"
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and any(lives(pid) for pid in children):
            time.sleep(0.05)
        assert [pid for pid in children if lives(pid)] == []
    finally:
        for pid in (process.pid, *(children or children_of(process.pid))):
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
