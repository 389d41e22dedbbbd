"""`racktwin checkpoint plan`: a job that is only thought of, and the jobs of a daemon."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.checkpointing import SaveTerms, best_interval, best_plan, ettr
from tests.support.in_process_daemon import serving
from tests.support.saving_jobs import DAY_S, Saving
from twin.backtest.checkpoint_page import PAGE
from twin.cli.main import main as racktwin
from twin.contracts import Explanation, gamma_factors
from twin.engine import Inquiry, explain
from twin.telemetry import JobStarted

JOB = ["--save", "60s", "--restart", "600s"]


def main(*words: str) -> int:
    return racktwin(["checkpoint", "plan", *words])


def test_a_job_that_is_thought_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--nodes", "128", "--rate", "6.5", *JOB]
    assert main(*base, "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    mttf_s = 86_400.0 / (128 * 6.5e-3)
    interval_s, worth = best_interval(60.0, 600.0, mttf_s)
    assert tree["interval_s"] == pytest.approx(float(interval_s))
    assert tree["ettr"] == pytest.approx(float(worth))
    hour = float(ettr(3600.0, 60.0, 600.0, mttf_s))
    assert tree["alternatives"]["fixed_60_min"]["ettr"] == pytest.approx(hour)
    assert main(*base, "--report", str(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "128 nodes at 6.5 failures per 1000 node-days: one each 1 d 4 h" in said
    assert (tmp_path / PAGE).exists()
    assert main(*base, "--rate-shape", "2", "--json") == 0
    unsure = json.loads(capsys.readouterr().out)
    terms = SaveTerms(*(np.full(1, x) for x in (60.0, 0.0, 600.0, np.nan, np.nan, 2.0, 1.0 / mttf_s, 0.0)))
    assert unsure["interval_s"] == pytest.approx(best_plan(terms).interval_s[0])
    assert unsure["ettr"] == pytest.approx(best_plan(terms).ettr[0])
    assert unsure["ettr"] > tree["ettr"]  # of as many failures on average, but of longer spells without


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nodes", "0", "--rate", "6.5", *JOB], "--nodes 0: expected a whole number"),
        (["--nodes", "1e3", "--rate", "6.5", *JOB], "--nodes 1e3"),
        (["--nodes", "8", *JOB], "--rate is missing"),
        (["--rate", "6.5", *JOB], "--nodes is missing"),
        (["--nodes", "8", "--rate", "-1", *JOB], "--rate -1: expected a number"),
        (["--nodes", "8", "--rate", "nan", *JOB], "--rate nan"),
        (["--nodes", "8", "--rate", "6.5"], "--save is missing"),
        (["--nodes", "8", "--rate", "6.5", *JOB, "--rate-shape", "2", "--weibull", "0.5"], "no --weibull"),
    ],
)
def test_what_is_wrong_is_told(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*words) == 1
    assert why in capsys.readouterr().err


def test_both_kinds_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["big", "--nodes", "8"], ["--url", "http://x", *JOB], ["job", "--flush", "5s"]):
        assert main(*words) == 2
        assert "expected" in capsys.readouterr().err


def rows_of(twin: Saving) -> list[dict[str, Any]]:
    """The rows of the topic `plan`, as a daemon of this engine would give them."""
    return explained(twin, "plan").table("jobs")


def explained(twin: Saving, topic: str = "", entity: str = "") -> Explanation:
    policy = next(p for p in twin.engine.policies if p.name == "checkpoint")
    found = explain(twin.engine, policy, Inquiry(topic=topic, entity=entity))
    assert isinstance(found, Explanation)
    return found


def test_the_rows_are_the_policys_own_sums() -> None:
    twin = Saving({"a": ("r1/node0", "r1/node1"), "b": ("r2/node0",)})
    blank = rows_of(twin)
    assert [row["failures_per_day"] for row in blank] == [None, None]
    assert blank[0]["best_interval_s"] is None
    assert "no failure forecast" in blank[0]["why"]
    assert blank[0]["interval_s"] == 7200.0
    twin.says.day = 0.2
    twin.wait(10.0)
    rows = rows_of(twin)
    rate = -np.log1p(-0.2)
    assert [row["failures_per_day"] for row in rows] == pytest.approx([2 * rate, rate], rel=1e-3)
    row = rows[0]
    assert (row["job"], row["nodes"], row["why"], row["save_s"]) == ("a", 2, "", 60.0)
    low, _ = gamma_factors(np.array([twin.says.shape]))
    assert row["failures_per_day_low"] == pytest.approx(2 * rate * low[0], rel=0.05)
    assert row["failures_per_day_low"] < row["failures_per_day"] < row["failures_per_day_high"]
    assert row["advised_s"] == row["interval_s"] == pytest.approx(twin.often("a"))
    assert abs(row["best_interval_s"] / row["interval_s"] - 1.0) < 0.05
    assert row["best_ettr"] >= row["ettr"] > row["fixed_120_min"]
    sure_s = float(best_interval(60.0, 600.0, DAY_S / (2 * rate))[0])
    assert row["best_interval_s"] == pytest.approx(sure_s, rel=0.1)


def test_one_job_is_explained_with_its_costs_and_the_proposal_in_force() -> None:
    twin = Saving({"a": ("r1/node0", "r1/node1"), "b[red]": ("r2/node0",)})
    twin.says.day = 0.2
    twin.wait(10.0)
    site = explained(twin)
    assert [row["job"] for row in site.table("jobs")] == ["a", "b[red]"]
    assert site.sentences[0].text == "2 training jobs"
    assert [row["job"] for row in explained(twin, entity="r2").table("jobs")] == ["b[red]"]
    one = explained(twin, entity="job:a")
    (row, _) = rows_of(twin)
    assert one.figure("best_interval_s") == row["best_interval_s"]
    said = " ".join(s.text for s in one.sentences)
    assert "a save stops it for 60 s (as it said), a restart takes 10 min (as it said)" in said
    assert "proposed: job a: save every" in said
    assert "it was advised" not in said


def test_what_a_job_reports_that_it_keeps_is_in_force_and_a_prior_is_no_measurement() -> None:
    twin = Saving({"a": ("r1/node0", "r1/node1"), "b": ("r2/node0",)}, told={})
    twin.says.day = 0.2
    twin.told("a", ago_s=60.0, save_s=60.0, block_s=60.0, interval_s=7200.0)
    twin.wait(10.0)
    rows = rows_of(twin)
    assert (rows[0]["interval_s"], rows[0]["advised_s"]) == (7200.0, pytest.approx(twin.often("a")))
    assert (rows[0]["costs"], rows[0]["restart_costs"]) == ("measured", "by a prior")
    said = " ".join(s.text for s in explained(twin, entity="a").sentences)
    assert "and reports that it keeps 2 h" in said
    assert "a restart takes 10 min (by a prior)" in said


def test_one_reason_for_many_jobs_is_said_once() -> None:
    twin = Saving({f"j{i}": (f"r1/node{i}",) for i in range(9)}, max_jobs=10)
    said = " ".join(s.text for s in explained(twin).sentences)
    assert said.count("no failure forecast") == 1
    assert "j0, j1, j2, j3, j4 and 4 more: no failure forecast" in said


def test_the_interface_tells_and_refuses(tmp_path: Path) -> None:
    asyncio.run(_asked(tmp_path))


async def _asked(folder: Path) -> None:
    async with serving(folder) as pod:
        status, tree = await pod.ask("GET", "/api/v1/checkpoints", "viewer")
        assert (status, tree["jobs"], tree["total"]) == (200, [], 0)
        pod.twin.tick(None, JobStarted(id="1", job="big", nodes=("r1/node0",), kind="training"))
        pod.twin.tick(None, JobStarted(id="2", job="chat", nodes=("r1/node1",), kind="inference"))
        status, tree = await pod.ask("GET", "/api/v1/checkpoints", "viewer")
        assert [row["job"] for row in tree["jobs"]] == ["big"]
        assert tree["jobs"][0]["costs"] == "by a prior"
        status, tree = await pod.ask("GET", "/api/v1/checkpoints?job=big", "viewer")
        assert tree["total"] == 1
        status, tree = await pod.ask("GET", "/api/v1/checkpoints?job=none", "viewer")
        assert status == 404
        assert "no job none is known to run" in tree["error"]
        status, tree = await pod.ask("GET", "/api/v1/checkpoints?offset=1", "viewer")
        assert (tree["jobs"], tree["total"]) == ([], 1)
        assert (await pod.ask("GET", "/api/v1/checkpoints", "none"))[0] == 401


def test_nobody_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def get(self, path: str, **query: Any) -> Any:
            asked.append((path, query))
            return {"jobs": [], "total": 0}

    asked: list[Any] = []
    monkeypatch.setattr("twin.api.connect", lambda *given: Client())
    assert main("--json") == 0
    assert json.loads(capsys.readouterr().out) == {"jobs": [], "total": 0}
    assert asked[-1] == ("/checkpoints", {"job": None, "limit": 1000})
