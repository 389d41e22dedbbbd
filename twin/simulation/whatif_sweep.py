"""Sweep of what-ifs: the courses of all cases, with policies and without, in one process or in several.

A course that fails costs its own case only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from twin.run import Failed, Pool, ProgressBar, Report
from twin.simulation.whatif import ARMS, Arm, Case, Course, Question, run_course

NICE = 5


@dataclass
class Result:
    """A case with its two courses, or why there are none."""

    case: Case
    courses: dict[Arm, Course] = field(default_factory=dict)
    error: str = ""


def run_cases(question: Question, cases: Sequence[Case], processes: int, bar: ProgressBar) -> list[Result]:
    """All cases, both arms, in the order of `cases`: the same whatever `processes` is."""
    results = [Result(case) for case in cases]
    tasks = [(case, arm) for case in cases for arm in ARMS]
    pool = Pool(partial(_run, question), processes, bar.move, NICE)
    for task, outcome in pool.completed(tasks):
        i, arm = task // len(ARMS), tasks[task][1]
        if not isinstance(outcome, Failed):
            results[i].courses[arm] = outcome
            if i:
                outcome.trail = {}  # only the first case is drawn
        elif not results[i].error:
            results[i].error = outcome.reason
    for result in results:
        result.courses = {arm: result.courses[arm] for arm in ARMS if arm in result.courses}
    return results


def _run(question: Question, task: tuple[Case, Arm], report: Report) -> Course:
    """One course."""
    case = task[0]
    horizon_s = question.horizon_s or case.scenario.duration_s
    return run_course(question, case, task[1], lambda seconds: report(seconds / horizon_s, ""))
