"""Simulations: what-ifs that people start from the page, beside the loop, in a process of their own.

One runs at a time; the last few results are kept in memory. A what-if begins with a copy of the state of now
and commands nothing: it asks `racktwin simulation whatif`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web

from twin.api.access import author
from twin.api.answers import Refused, answer, body_of, live_of
from twin.api.runtime import Runtime
from twin.catalogue import ConfigError, clean
from twin.config import read_yaml, spec_of
from twin.engine import snapshot
from twin.run import copied

log = logging.getLogger(__name__)
MAX_KEPT = 5
MAX_FAULTS, MAX_MORE_RACKS = 20, 1000
MOST_HORIZON_S = 6 * 3600.0
LONGEST_S = 900.0  # of the process
MAX_OUTPUT = 16 * 2**20
NICE = 10  # the loop comes first
BUDGET_PU = (0.1, 3.0)


# Of a what-if from now: the site's tree, the state, the authorities
Given = tuple[dict[str, Any], dict[str, Any], dict[str, str]]


class WhatIfFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fault of the scenario: its kind, where, and when it begins and ends, in seconds from now."""

    kind: str
    entity: str = ""
    begin_s: float = 60.0
    end_s: float | None = None
    severity: float = 1.0
    ramp_s: float = 0.0
    part: Literal["1", "2", "both"] = "1"


class MoreRacks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """More racks beside a present rack; optionally with another profile and activity of their GPUs."""

    count: int
    beside: str
    profile: str | None = None
    load_pu: float | None = None


class NewSimulation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A what-if from the present state: faults, more racks, budgets times `budget_pu`, authorities,
    settings.

    Policies have the authority of now, unless `policies` says otherwise. With `before`, it begins just before
    that tick of this run instead, with the authority of then, and nothing else may be changed.
    """

    name: str
    horizon_s: float = 1800.0
    faults: list[WhatIfFault] = []
    budget_pu: float | None = None
    policies: dict[str, Literal["off", "advise", "approve", "act"]] = {}
    settings: dict[str, dict[str, float | str | bool]] = {}
    more_racks: MoreRacks | None = None
    before: int | None = None


@dataclass
class SimulationRun:
    """One what-if: its author, its question and its outcome."""

    id: str
    author: str
    asked: NewSimulation
    begun_ns: int
    from_ns: int
    state: Literal["running", "done", "failed", "cancelled"] = "running"
    ended_ns: int | None = None
    error: str = ""
    result: dict[str, Any] | None = None
    task: asyncio.Task[None] | None = None

    def shown(self, whole: bool = False) -> dict[str, Any]:
        """As JSON; `whole`: with its result."""
        out = {"id": self.id, "author": self.author, "name": clean(self.asked.name, 200),
               "state": self.state, "begun_ns": self.begun_ns, "ended_ns": self.ended_ns,
               "from_ns": self.from_ns, "error": clean(self.error, 500),
               "asked": msgspec.to_builtins(self.asked)}  # fmt: skip
        return out | {"result": self.result} if whole else out


@dataclass
class Simulations:
    """The runs of this daemon, the newest last."""

    runs: dict[str, SimulationRun] = field(default_factory=dict)

    def running(self) -> SimulationRun | None:
        """The run that has not ended."""
        return next((r for r in self.runs.values() if r.state == "running"), None)

    def of(self, identity: str) -> SimulationRun:
        """A run by its id. Raises Refused."""
        found = self.runs.get(identity)
        if found is None:
            raise Refused(404, f"no simulation {clean(identity, 60)}; the last {MAX_KEPT} are kept")
        return found

    async def close(self) -> None:
        """End what runs; with the daemon goes its process."""
        run = self.running()
        if run is not None and run.task is not None:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)


SIMULATIONS: web.AppKey[Simulations] = web.AppKey("simulations", Simulations)


async def begin(request: web.Request) -> web.Response:
    """Start a what-if from the state of now, beside the loop; one at a time. It commands nothing."""
    body, live, held = await body_of(request, NewSimulation), live_of(request), request.app[SIMULATIONS]
    _check(live, body)
    busy = held.running()
    if busy is not None:
        raise Refused(409, f"{busy.author} runs {clean(busy.asked.name, 60)!r} already; one runs at a time")
    run = SimulationRun(
        uuid.uuid4().hex[:12], author(request), body, time.time_ns(), live.engine.state.now_ns
    )
    given = None if body.before is not None else _of_now(live, body)
    held.runs[run.id] = run
    while len(held.runs) > MAX_KEPT:
        held.runs.pop(next(iter(held.runs)))
    run.task = asyncio.create_task(_run(run, live, given), name="what-if")
    return answer(run.shown())


def _of_now(live: Runtime, body: NewSimulation) -> Given:
    site = _altered(live, body)
    frozen = copied(live.engine.dump())  # now, between two ticks
    # As they stand now, unless asked otherwise
    return site, frozen, {**live.engine.intake.authority, **body.policies}


async def listed_runs(request: web.Request) -> web.Response:
    """List the what-ifs of this daemon, the newest first, without their results."""
    runs = request.app[SIMULATIONS].runs.values()
    return answer({"simulations": [r.shown() for r in reversed(list(runs))]})


async def one(request: web.Request) -> web.Response:
    """Return a what-if with its result: figures of both arms, their difference, and curves."""
    return answer(request.app[SIMULATIONS].of(request.match_info["id"]).shown(whole=True))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a what-if that runs."""
    run = request.app[SIMULATIONS].of(request.match_info["id"])
    if run.state != "running" or run.task is None:
        raise Refused(409, "it has ended")
    run.state = "cancelled"
    run.task.cancel()
    return answer({"id": run.id, "done": True})


def _check(live: Runtime, body: NewSimulation) -> None:
    """Raise Refused for an invalid what-if."""
    if not body.name.strip() or len(body.name) > 100:
        raise Refused(400, "name: expected 1 to 100 characters")
    if not 60.0 <= body.horizon_s <= MOST_HORIZON_S:
        raise Refused(400, f"horizon_s: expected seconds from 60 to {MOST_HORIZON_S:g}")
    if len(body.faults) > MAX_FAULTS:
        raise Refused(400, f"faults: expected at most {MAX_FAULTS}, got {len(body.faults)}")
    if body.budget_pu is not None and not BUDGET_PU[0] <= body.budget_pu <= BUDGET_PU[1]:
        raise Refused(400, f"budget_pu: expected {BUDGET_PU[0]:g} to {BUDGET_PU[1]:g}")
    names = [p.name for p in live.engine.policies]
    for name in (*body.policies, *body.settings):
        if name not in names:
            raise Refused(404, f"no policy {clean(name, 60)}; expected one of {', '.join(names)}")
    if body.more_racks is not None:
        _check_racks(live, body.more_racks)
    changed = any((body.faults, body.budget_pu, body.policies, body.settings, body.more_racks))
    if body.before is not None:
        _check_before(live, body.before, changed)
    elif not changed:
        raise Refused(400, "expected at least a fault, more racks, another budget, an authority or a setting")


def _check_racks(live: Runtime, more: MoreRacks) -> None:
    if not 1 <= more.count <= MAX_MORE_RACKS:
        raise Refused(400, f"more_racks.count: expected 1 to {MAX_MORE_RACKS}")
    if live.engine.site.entity("rack", more.beside) is None:
        raise Refused(404, f"no rack {clean(more.beside, 60)}")
    if more.load_pu is not None and not 0.0 <= more.load_pu <= 1.0:
        raise Refused(400, "more_racks.load_pu: expected 0 to 1")


def _check_before(live: Runtime, tick: int, changed: bool) -> None:
    if not 0 < tick <= live.engine.state.tick:
        raise Refused(400, f"before: expected a tick from 1 to {live.engine.state.tick}")
    if changed:
        raise Refused(400, "before: expected alone; a simulation from a past tick allows no other change")
    if not live.run_dir:
        raise Refused(409, "this daemon records no run to go back in")


def _altered(live: Runtime, body: NewSimulation) -> dict[str, Any]:
    """Return the tree of the site file with other budgets and settings."""
    try:
        tree: dict[str, Any] = read_yaml(live.loaded.site_file)
    except ConfigError as error:
        raise Refused(409, "; ".join(error.problems)) from None
    factor = 1.0 if body.budget_pu is None else body.budget_pu
    for place in (tree, *tree.get("halls", [])):  # feeders of the site may feed several halls
        for feeder in place.get("feeders", []):
            for key in ("budget_w", "guaranteed_w"):
                if isinstance(feeder.get(key), int | float):
                    feeder[key] = float(feeder[key]) * factor
    for name, settings in body.settings.items():
        entry = tree.setdefault("policies", {}).setdefault(name, {})
        entry["settings"] = entry.get("settings", {}) | settings
    return tree


async def _run(run: SimulationRun, live: Runtime, given: Given | None) -> None:
    """Run a what-if to its end. `given` None: from before a tick of this run."""
    site_file = live.loaded.site_file
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="racktwin-whatif-"))
    try:
        await asyncio.to_thread(_write_scenario, folder, run.asked)
        if given is None:
            more = ["--site", str(site_file), "--from", live.run_dir, "--before", str(run.asked.before)]
        else:
            site, frozen, authority = given
            await asyncio.to_thread(_write_state, folder, site_file.parent, site, frozen)
            more = ["--site", str(folder / "site.yaml"), "--from", str(folder / "now.rts"),
                    *(f"--authority={name}={level}" for name, level in authority.items())]  # fmt: skip
        run.result = await _whatif_result(
            folder, run.asked, more, [str(folder), live.run_dir, str(site_file.parent)]
        )
        run.from_ns = (run.result["from"] or {}).get("now_ns", run.from_ns)
        run.state = "done"
    except asyncio.CancelledError:
        run.state = "cancelled"
        raise
    except ConfigError as error:
        run.state, run.error = "failed", "; ".join(error.problems)
    except _Failed as error:
        run.state, run.error = "failed", str(error)
    except Exception as error:
        run.state, run.error = "failed", f"{type(error).__name__}: the log says where"
        log.exception("a what-if failed")
    finally:
        run.ended_ns = time.time_ns()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class _Failed(Exception):
    """Error of a process that gave no result."""


def _write_state(folder: Path, beside: Path, site: dict[str, Any], frozen: dict[str, Any]) -> None:
    """The files of a what-if from now: site, profiles, snapshot. Raises ConfigError for a bad setting."""
    if (beside / "profiles").is_dir():
        (folder / "profiles").symlink_to(beside / "profiles")
    (folder / "site.yaml").write_text(json.dumps(site), encoding="utf-8")
    # The state of now under the changed file: the same entities, so the same columns.
    frozen["site_hash"] = spec_of(site, beside, "site.yaml").digest()
    (folder / "now.rts").write_bytes(snapshot.encode(frozen))


def _write_scenario(folder: Path, asked: NewSimulation) -> None:
    faults = [{k: v for k, v in msgspec.to_builtins(f).items() if v not in (None, "")} for f in asked.faults]
    for fault in faults:
        if fault["part"] == "1":
            del fault["part"]
    scenario = {"name": asked.name, "duration_s": asked.horizon_s, "faults": faults}
    if asked.more_racks is not None:
        more = msgspec.to_builtins(asked.more_racks)
        scenario["more_racks"] = {key: value for key, value in more.items() if value is not None}
    (folder / "scenario.yaml").write_text(json.dumps(scenario), encoding="utf-8")


async def _whatif_result(
    folder: Path, asked: NewSimulation, more: list[str], hidden: list[str]
) -> dict[str, Any]:
    """The result of `racktwin simulation whatif`; folders in `hidden` stand in no message. Raises _Failed."""
    command = [sys.executable, "-m", "twin", "simulation", "whatif", *more,
               "--scenario", str(folder / "scenario.yaml"),
               "--horizon", f"{asked.horizon_s:g}s", "--format", "json"]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, limit=MAX_OUTPUT, preexec_fn=lambda: os.nice(NICE),
    )  # fmt: skip
    try:
        async with asyncio.timeout(LONGEST_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise _Failed(f"took longer than {LONGEST_S:g} s; ask for a shorter horizon") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    text = err.decode(errors="replace").strip()
    if process.returncode or len(out) > MAX_OUTPUT:
        for path in filter(None, hidden):
            text = text.replace(f"{path}/", "").replace(f"{path}: ", "")
        raise _Failed(text[-500:] or f"ended with {process.returncode}")
    result: dict[str, Any] = json.loads(out)
    result["from"] = {k: v for k, v in (result.get("from") or {}).items() if k != "snapshot"}
    return {k: v for k, v in result.items() if k != "source"}
