"""Closed loop of a simulated site: plant, sensors, Inbox and engine, with commands back to the plant.

One loop serves `simulate`, `whatif`, evaluation and tests. Frames are cut as live: a tick at the end of each
round, and an urgent one before it where something urgent arrived.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from twin import kernels
from twin.catalogue import NS, START_NS
from twin.contracts import CommandBatch, Decision
from twin.engine import Engine, news
from twin.plant import Observation, Plant, Report, Scenario, Sensors
from twin.run import URGENT_GAP_NS, Fitter, Observer, Recorder
from twin.site import Site
from twin.telemetry import EntityReplaced, Event, Frame, IdentityTold, Inbox, ReportLayout, SiteChanged, Stage


class ReportInbox(Inbox):
    """An Inbox that also accepts whole reports: an instant per entity, and one pass per table.

    The same cells, counts and frames as from a report's blocks, one by one; a test compares them. At 9,472
    nodes in 148 racks the blocks cost several times as much.
    """

    def put_report(self, report: Report, now_ns: int) -> None:
        """Stage a report; an older one is checked block by block. Raises KeyError as blocks do."""
        stage = self.stages.get(report.table)
        runs = report.runs()
        if stage is None or stage.n != len(report.t_ns) or report.t_ns.max(initial=0) > now_ns:
            self._put_blocks(report, now_ns)
            return
        layout = stage.layout(report.signals, report.counters)
        groups = stage.groups_of(layout.all_rows)
        for first, end in runs:
            at = slice(first, end)
            times = report.t_ns[at]
            if not all(kernels.first_arrival(stage.hits[g, at], stage.t_ns[g, at], times) for g in groups):
                self._put_blocks(report, now_ns)
                return
        for first, end in runs:
            at = slice(first, end)
            self.counts["accepted"] += (len(layout.rows) + len(layout.counter_rows)) * (end - first)
            if len(layout.counter_rows):
                self._grow(stage, layout, at, report)
            if layout.urgent or layout.drops:
                self._watch(stage, layout, report.values[layout.source, at], at)
            kernels.stage_block(stage.value, layout.rows, layout.source, first, report.values[:, at])
            for group in groups:
                stage.hits[group, at] = 1
                stage.t_ns[group, at] = report.t_ns[at]
        if runs:
            stage.dirty.update(groups)

    def _grow(self, stage: Stage, layout: ReportLayout, at: slice, report: Report) -> None:
        """Count growth; if all counters grew by at most a second's worth, nothing else is checked."""
        new = report.counts[:, at] if layout.in_order else report.counts[layout.counter_source, at]
        rows = layout.counter_rows
        grow = stage.raw, stage.gain, rows, at.start, new, stage.max_per_s
        if stage.n_held == 0 and kernels.count_up(*grow):
            return
        of_row = stage.partition.group_of_row
        for k, row in enumerate(rows.tolist()):
            before = stage.t_ns[of_row[row + len(stage.signals)], at]
            one = np.array([row], np.int32)
            self._count(stage, one, at, new[k : k + 1], report.t_ns[at], before)  # type: ignore[arg-type]

    def _put_blocks(self, report: Report, now_ns: int) -> None:
        for block in report.blocks():
            self.put_block(block, now_ns)


class Simulation:
    """A site's twin beside its plant. `decision` and `frame` are those of the last tick.

    `whole`: reports go into the Inbox in one piece; else block by block, as messages would. Both give the
    same frames. `observers` look on after each tick. Its memory does not grow with time.
    """

    whole = True
    observers: Sequence[Observer] = ()

    def __init__(
        self,
        engine: Engine,
        plant: Plant,
        sensors: Sensors,
        *,
        dt_s: float = 1.0,
        start_ns: int = START_NS,
        recorder: Recorder | None = None,
    ) -> None:
        self.engine, self.plant, self.sensors = engine, plant, sensors
        self.dt_s, self.recorder = dt_s, recorder
        self.inbox = ReportInbox(engine.site.sizes)
        self.fitter = Fitter()
        self.stopped = False
        self.now_ns = start_ns if engine.state.tick < 0 else engine.state.now_ns
        self.begun_ns = self.now_ns
        self.ticks = engine.state.tick + 1
        if engine.state.tick >= 0:
            self.inbox.resume(engine.state)
        self._cut_ns = self.now_ns  # of the last frame
        self._commands: list[CommandBatch] = []
        self.observation = Observation([], (), self.now_ns)
        self.frame = Frame(-1, self.now_ns, 0.0)
        self.decision = Decision(-1, self.now_ns)
        plant.start_ns = self.now_ns - round(plant.truth.time_s * NS)
        self._name_jobs()

    @classmethod
    def of(
        cls,
        engine: Engine,
        *,
        seed: int = 0,
        scenario: Scenario | None = None,
        lump: bool | int = False,
        noise: float = 1.0,
        dt_s: float = 1.0,
    ) -> Simulation:
        """Return a new plant with its sensors beside an engine."""
        plant = Plant(engine.site, seed=seed, scenario=scenario, lump=lump)
        sensors = Sensors(engine.site, seed, noise=noise, lump=plant.parameters.lump)
        return cls(engine, plant, sensors, dt_s=dt_s)

    @property
    def site(self) -> Site:
        return self.engine.site

    @property
    def time_s(self) -> float:
        """Return the simulated seconds since the begin."""
        return (self.now_ns - self.begun_ns) / NS

    def inject(self, *events: Event) -> None:
        """Queue events for the next frame: an operator's requests, grants, holds.

        Raises ValueError for a change of the site: the plant is of this one.
        """
        for event in events:
            if isinstance(event, SiteChanged):
                raise ValueError("a simulated site does not change while it runs; expected a new simulation")
            self._put(event)

    def step(self) -> Decision:
        """Run one round: the plant applies commands and moves, its sensors report, the twin ticks. Returns
        the decision."""
        commands, self._commands = self._commands, []
        self.plant.step(commands, self.dt_s)
        self.now_ns += round(self.dt_s * NS)
        for ack in self.plant.acks():
            self.inbox.put_event(ack)
        self.observation = observation = self.sensors.observe(
            self.plant.truth, self.plant.present, self.now_ns, tuple(self.plant.events())
        )
        self._put(*observation.events)
        urgent_ns: int | None = None
        for report in observation.reports:
            if urgent_ns is not None and report.arrival_ns > urgent_ns:
                self._tick(urgent_ns, True)
                urgent_ns = None
            if self.whole:
                self.inbox.put_report(report, report.arrival_ns)
            else:
                for block in report.blocks():
                    self.inbox.put_block(block, report.arrival_ns)
            if self.inbox.urgent and urgent_ns is None:
                urgent_ns = max(report.arrival_ns, self._cut_ns + URGENT_GAP_NS)
        if urgent_ns is not None and urgent_ns < self.now_ns:
            self._tick(urgent_ns, True)
        self._tick(self.now_ns, False)
        return self.decision

    def run(self, seconds: float, observer: Callable[[Simulation], None] | None = None) -> Simulation:
        """Run for this many simulated seconds, or until `stop`; calls `observer` after each round."""
        for _ in range(round(seconds / self.dt_s)):
            if self.stopped:
                break
            self.step()
            if observer is not None:
                observer(self)
        return self

    def stop(self) -> None:
        """Stop `run` after the present round, from a signal or another thread: a round always completes."""
        self.stopped = True

    def fork(self, recorder: Recorder | None = None, observers: Iterable[Observer] = ()) -> Simulation:
        """Return an independent copy of this moment: plant, sensors, twin and pending input.

        Site, design and policies are shared, since nobody writes to them; models are copied with what they
        learned. A fit in a worker stays with the original. Not recorded, unless a recorder is given.
        """
        memo = _shared(self.engine)
        out = copy.copy(self)
        out.engine = copy.deepcopy(self.engine, memo)
        out.inbox = copy.deepcopy(self.inbox, memo)
        out.sensors = self.sensors.fork()
        out.plant = self.plant.fork()
        out.fitter = Fitter()
        out.recorder, out.observers = recorder, tuple(observers)
        out._commands = list(self._commands)
        out.observation = Observation([], (), self.now_ns)
        return out

    def close(self) -> None:
        """Close the recording, if any, with the checksum of the last state."""
        self.fitter.close()
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.finish(self.engine)

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """`close`; after an error the files are closed as they are."""
        if kind is None:
            self.close()
            return
        self.fitter.close()
        if self.recorder is not None:
            self.recorder.close()

    def _put(self, *events: Event) -> None:
        for event in events:
            if isinstance(event, EntityReplaced) or (
                isinstance(event, IdentityTold)
                and news(self.engine.intake.serials, event, self.site) == "other"
            ):
                entity = self.site.entity(event.table, event.name)
                if entity is not None:  # a new device's counters do not go on where the old one's ended
                    self.inbox.forget(event.table, entity)
            self.inbox.put_event(event)

    def _name_jobs(self) -> None:
        """Give the plant the slots of the twin's jobs: commands to jobs name slots."""
        self.plant.job_names = {slot: name for name, slot in self.engine.jobs.slot_of.items()}

    def _tick(self, now_ns: int, urgent: bool) -> None:
        for event in self.fitter.due(now_ns, self.engine.site.spec_hash):
            self.inbox.put_event(event)
        cut = self.inbox.take(self.ticks, now_ns, (now_ns - self._cut_ns) / NS)
        self.frame = frame = dataclasses.replace(cut, urgent=urgent)
        self.ticks, self._cut_ns = self.ticks + 1, now_ns
        if self.recorder is not None:
            self.recorder.before(frame)
        self.decision = decision = self.engine.tick(frame)
        if self.recorder is not None:
            self.recorder.after(self.engine, decision)
        self._commands += decision.commands
        if frame.events:
            self._name_jobs()
        for request in decision.fits:
            self.fitter.submit(self.engine, request, now_ns)
        for observer in self.observers:
            observer.observe(self.engine, frame, decision)


def _shared(engine: Engine) -> dict[int, Any]:
    """Return a memo for copies that share the site, its read-only parts and the policies."""
    site = engine.site
    parts: list[Any] = [site, site.design, site.file, *site.envelopes.values(), *site.limits.values()]
    parts += [getattr(site, name) for name in site.__slots__ if hasattr(site, name)]
    return {id(part): part for part in [*parts, *engine.policies]}
