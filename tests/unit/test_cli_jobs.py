"""`racktwin job list` and `job show`: what is printed of the answers of a daemon."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tests.support.builders import START_NS
from twin.cli.operate.jobs import show_job, show_jobs

HELD = {
    "table": "gpu",
    "entity": "lab/h/r1/node2/gpu1",
    "ends": None,
    "gpus": 1,
    "slowdown": 1.2,
    "since_ns": START_NS,
    "evidence": ["its clock is lowered by heat (hardware)"],
}


def job(**change: Any) -> dict[str, Any]:
    """A job as the interface lists it."""
    plain = {"name": "train", "kind": "training", "nodes": 8, "gpus": 32, "goodput_pu": 0.9,
             "trained_s": 3240.0, "still_s": 300.0, "lost_s": 60.0, "restarts": 1, "straggler_gpu_h": 3.25,
             "expected_end_ns": None, "expected_end_by": None, "held_back_by": None}  # fmt: skip
    return {**plain, **change}


def printed(show: Any, tree: dict[str, Any]) -> str:
    """Text that the command prints."""
    out = Console(file=io.StringIO(), width=140)
    show(tree, out)
    return out.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_list_names_who_holds_a_job_back() -> None:
    tree = {
        "jobs": [job(held_back_by=HELD), job(name="other", goodput_pu=None)],
        "next_offset": 2,
        "total": 9,
    }
    lines = printed(show_jobs, tree).splitlines()
    assert "goodput" in lines[0]
    train = next(line for line in lines if line.startswith("train"))
    assert all(word in train for word in ("90.0 %", "20 %", "lab/h/r1/node2/gpu1"))
    assert "unknown" in next(line for line in lines if line.startswith("other"))
    assert "2 of 9" in lines[-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {},
            (
                "goodput 90.0 %: of 1 h observed it stood still for 5 min and lost 1 min by 1 restart",
                "no straggler",
                "its end is not known",
            ),
        ),
        ({"held_back_by": HELD}, ("gpu1 slows the job: 20 %", "3.2 GPU-hours", "heat (hardware)")),
        (
            {
                "held_back_by": HELD
                | {"table": "link", "entity": "lab/h/r1/node2/rail1", "ends": "PORT to LEAF"}
            },
            ("PORT to LEAF slows the job",),
        ),
        ({"expected_end_ns": START_NS, "expected_end_by": "time_limit"}, ("at the latest", "time limit")),
        ({"expected_end_ns": START_NS, "expected_end_by": "progress"}, ("by its own progress",)),
        ({"trained_s": 0.0, "still_s": 0.0, "lost_s": 0.0}, ("no activity recorded",)),
    ],
)
def test_one_job_is_shown_with_its_evidence(change: dict[str, Any], words: tuple[str, ...]) -> None:
    text = printed(show_job, job(**change))
    assert all(word in text for word in words), text
