"""Story: the events on a simulated site, chapter by chapter, and the expected sign of each reaction.

A story is data (YAML). A chapter names its cause before it acts and is done when the daemon's own interface
shows every one of its signs, or when its time is up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from twin.catalogue import ConfigError
from twin.config import read_yaml
from twin.plant import FaultEntry, Script, judge_fault, script_of
from twin.simulation.scheduler import JobRequest
from twin.site import Site

FOLDER = Path(__file__).parent / "demo"
TEXT = 200  # characters of a sign's text


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Sign(_Strict, frozen=True, kw_only=True):
    """A row in an answer of the interface: the `path` that is asked, and where in the answer its `rows` are.

    Its row has all of `where` (a text: begins with it; names of fields within fields are joined by dots). It
    shows once the row has all of `shows` too, more than `over`, and less in the field `falls` than at the
    chapter's begin. `says` is a sentence with fields of the row.
    """

    path: str
    rows: str
    where: dict[str, str | int | float | bool] = {}
    shows: dict[str, str | int | float | bool] = {}
    over: dict[str, float] = {}
    falls: str = ""
    says: str

    def rows_in(self, answer: Any) -> Iterator[dict[str, Any]]:
        """Its rows, each flat."""
        for row in rows_of(answer, self.rows):
            flat = flattened(row)
            if all(_fits(flat.get(key), value) for key, value in self.where.items()):
                yield flat

    def find(self, answer: Any, since_ns: int, before: dict[str, Any]) -> dict[str, Any] | None:
        """The first row that shows it, none from before `since_ns`; `before` is its row of then."""
        for row in self.rows_in(answer):
            was, value = before.get(self.falls), row.get(self.falls)
            fell = not self.falls or (was is not None and value is not None and value < was)
            shows = all(_fits(row.get(key), wanted) for key, wanted in self.shows.items())
            more = all((row.get(key) or 0.0) > least for key, least in self.over.items())
            if fell and shows and more and row.get("now_ns", since_ns) >= since_ns:
                return row | ({f"was.{self.falls}": was} if self.falls else {})
        return None


def rows_of(answer: Any, place: str) -> list[dict[str, Any]]:
    """The rows at a place of an answer: a list of it, or `tables.NAME` of an explanation."""
    first, _, name = place.partition(".")
    found = answer.get(first) or []
    if not name:
        return list(found)
    for table in found:
        if table["name"] == name:
            keys = [column["name"] for column in table["columns"]]
            return [dict(zip(keys, row, strict=True)) for row in table["rows"]]
    return []


def flattened(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    """The fields of a tree, those within fields by both names with a dot."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flattened(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return out


class Chapter(_Strict, frozen=True, kw_only=True):
    """A chapter begins `at_s` after the story, and has `within_s` for its signs to show.

    `jobs` and `faults` count their seconds from the chapter's begin. `keeps`: what came is compared with the
    forecast at the story's begin. `needs` are chapters without which it says nothing. One that stands `apart`
    is shown only where it is asked for.
    """

    name: str
    title: str
    cause: str
    at_s: float
    within_s: float = 60.0
    jobs: list[JobRequest] = []
    faults: list[FaultEntry] = []
    signs: list[Sign] = []
    keeps: bool = False
    needs: list[str] = []
    apart: bool = False


class PowerPlan(_Strict, frozen=True, kw_only=True):
    """The scheduler's own idea of power, which it announces: an idle site, and so much for a busy node."""

    idle_w: float
    node_w: float
    step_s: float = 60.0
    ahead_s: float = 1800.0


class Story(_Strict, frozen=True, kw_only=True):
    """A story of one site. Jobs count their seconds from its begin; those before it are of the past."""

    name: str
    past_s: float
    jobs: list[JobRequest]
    plan: PowerPlan
    chapters: list[Chapter]

    def only(self, name: str | None) -> Story:
        """Only one chapter, which then begins soon; None: all but those apart. Raises ConfigError."""
        if name is None:
            return msgspec.structs.replace(self, chapters=[c for c in self.chapters if not c.apart])
        found = [c for c in self.chapters if c.name == name]
        if not found:
            known = ", ".join(c.name for c in self.chapters)
            raise ConfigError(f"--story {name}: expected one of {known}")
        if found[0].needs:
            return msgspec.structs.replace(
                self, chapters=[c for c in self.chapters if c.name in (name, *found[0].needs)]
            )
        return msgspec.structs.replace(self, chapters=[msgspec.structs.replace(found[0], at_s=SOON_S)])

    def all_jobs(self, zero_s: float) -> list[JobRequest]:
        """Jobs of past and story by a clock at which the story begins at `zero_s`."""
        return self.past_jobs(zero_s) + [
            _moved(job, zero_s + c.at_s) for c in self.chapters for job in c.jobs
        ]

    def past_jobs(self, zero_s: float) -> list[JobRequest]:
        """The jobs that no chapter starts, by the same clock."""
        return [_moved(job, zero_s) for job in self.jobs]

    def scripts(self, site: Site, zero_s: float) -> list[Script]:
        """Faults by a clock at which the story begins at `zero_s`."""
        out = []
        for chapter in self.chapters:
            for entry in chapter.faults:
                script, at_s = script_of(entry, site), zero_s + chapter.at_s
                end_s = None if script.end_s is None else script.end_s + at_s
                out.append(replace(script, begin_s=script.begin_s + at_s, end_s=end_s))
        return out

    def planned_w(self, jobs: Sequence[JobRequest], from_s: float, count: int) -> list[float]:
        """The power that the scheduler expects of the site: the mean of each step from `from_s` on."""
        out = []
        for k in range(count):
            begin_s, end_s = from_s + k * self.plan.step_s, from_s + (k + 1) * self.plan.step_s
            nodes = sum(
                job.nodes * max(0.0, min(end_s, _end(job)) - max(begin_s, job.begin_s)) for job in jobs
            )
            out.append(self.plan.idle_w + self.plan.node_w * nodes / self.plan.step_s)
        return out


SOON_S = 15.0


def with_past(story: Story, past_s: float) -> Story:
    """The same story after another past; jobs before it are of its beginning."""
    return msgspec.structs.replace(story, past_s=past_s)


def load_story(path: Path, site: Site) -> Story:
    """The story of a file. Raises ConfigError with all that is wrong in it."""
    try:
        story = msgspec.convert(read_yaml(path), Story)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    problems = [
        f"{path}: {problem}"
        for i, chapter in enumerate(story.chapters)
        for j, fault in enumerate(chapter.faults)
        for problem in judge_fault(f"$.chapters[{i}].faults[{j}]", fault, site, True)
    ]
    if problems:
        raise ConfigError(problems)
    return story


def _moved(job: JobRequest, by_s: float) -> JobRequest:
    end_s = None if job.end_s is None else job.end_s + by_s
    return msgspec.structs.replace(job, begin_s=max(job.begin_s + by_s, 0.0), end_s=end_s)


def _end(job: JobRequest) -> float:
    return float("inf") if job.end_s is None else job.end_s


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and isinstance(value, str):
        return value.startswith(wanted)
    return bool(value == wanted)
