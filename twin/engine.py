"""The engine: one synchronous, deterministic function, `tick(frame) -> decision`.

Order of a tick: events, image, history, estimator, diagnosis, models, policies, arbiter, findings, journal
bodies. Live, replay and what-if all call this and nothing else. It has no clock, no files and no randomness.
May import the core; policies and models are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

import numpy as np

from twin import events as ev
from twin.arbiter import Arbiter
from twin.arbitration import arbitrate
from twin.asking import ask_policies
from twin.contracts import (
    Decision,
    Finding,
    FitRequest,
    Forecast,
    Memory,
    Model,
    Policy,
    Proposal,
)
from twin.diagnosis.diagnosis import Diagnosis
from twin.errors import ContractError, TwinError
from twin.estimator import Estimator
from twin.findings import Findings
from twin.frame import NS, Frame
from twin.health.alarms import findings as suspects_of
from twin.health.health import HealthState
from twin.history import History
from twin.intake import Intake
from twin.jobs import Jobs
from twin.maintenance import Windows
from twin.promises import check_forecast, fresh_memory
from twin.records import FaultTally, ReportTally, brief_event
from twin.remap import change_site
from twin.service_book import ServiceBook
from twin.signals import find_signal
from twin.site import Site
from twin.snapshot import dump_engine
from twin.state import GOOD, State
from twin.tree import digest
from twin.unwatched import noted
from twin.view import EngineView

RESUME_GAP_S, RESUME_REST_S = 5.0, 60.0
MARK_EVERY = 60  # ticks between checks of the state in the journal
MARK_AT = 30  # not in the tick in which a trace writes its keyframe, which is as much work
FIT_DEADLINE_S = 600.0
MAX_FORECASTS = 1000  # of one model
BALANCED = ("rack.heat", "feeder.balance")  # comparisons that are findings of their own, unless explained
_DEFAULT_AUTHORITY = "advise"


class Engine:
    """A site's twin with its policies and models."""

    def __init__(
        self,
        site: Site,
        policies: Sequence[Policy],
        models: Sequence[Model],
        authority: dict[str, str] | None = None,
    ) -> None:
        self.policies = sorted(policies, key=lambda p: (p.rank, p.name))
        self.models = {m.name: m for m in sorted(models, key=lambda m: m.name)}
        given = authority or {}
        self.intake = Intake(site, {p.name: given.get(p.name, _DEFAULT_AUTHORITY) for p in self.policies})
        self.state = State(site.sizes)
        self.jobs = Jobs(site.sizes["job"], site.sizes["node"])
        self.windows = Windows(site)
        self.memory: dict[str, Memory] = {p.name: fresh_memory(p, site) for p in self.policies}
        self.in_force: dict[str, list[Proposal]] = {p.name: [] for p in self.policies}
        self.ran_ns: dict[str, int] = {}
        self.fitted_ns: dict[str, int] = {}
        self.suspended: dict[str, int] = {}  # plug-in -> since
        self.usual_dt_s = 0.0  # of the last regular tick: a pause does not save up any slew
        self.forecasts: dict[tuple[str, float], Forecast] = {}
        self.settle_into(site)
        self.arbiter = Arbiter(site)
        self.estimator = Estimator(site)
        self.diagnosis = Diagnosis(site)
        self.health = HealthState(site)
        self.book = ServiceBook(site)
        self.findings = Findings(site, self.estimator)

    def settle_into(self, site: Site) -> None:
        """What depends on the site's file alone."""
        self.site = site
        self.history = History(site.file.history_s, site.sizes)
        for key, seconds in site.file.periods_s.items():
            table, _, name = key.partition(".")
            column = self.state.tables[table]
            every = (*column.signals, *column.counters)
            for row, signal in enumerate(every):
                if not name or signal.name == name:
                    column.period_s[row] = seconds

    def tick(self, frame: Frame) -> Decision:
        """Everything that follows from this frame. Raises only for a broken invariant, never for bad data."""
        if frame.now_ns <= self.state.now_ns or not frame.dt_s > 0:
            raise TwinError(
                f"tick {frame.tick} is at {frame.now_ns} ns, the one before at {self.state.now_ns} ns, dt "
                f"{frame.dt_s} s: time must advance, or silence would look fresh"
            )
        records: list[dict[str, Any]] = []
        self.state.now_ns, self.state.tick = frame.now_ns, frame.tick
        self._resume(frame)
        heard = self._heed(frame.events, records)
        self.state.apply(frame)
        records += self.intake.expire(frame.now_ns)
        records += self._end_windows(frame.now_ns)
        self.history.push(self.state)
        self.estimator.update(self.state, frame.dt_s, self.windows)
        self.diagnosis.update(self.state, self.estimator, self.jobs, self.windows, heard, frame.dt_s)
        self.health.update(self.state, self.estimator, self.diagnosis, self.jobs, self.windows)
        view = self._view(frame.dt_s)
        fits = self._forecast(view, frame, records)
        ask_policies(self, view, frame, records)
        commands, advice, deferred = arbitrate(self, view, frame, records)
        explained = {k: m for k in BALANCED if (m := self.diagnosis.explained(k)) is not None}
        records += self.findings.keep_only("fault/", self.diagnosis.findings(self.site))
        records += self.findings.deviations(self.site, self.estimator, self.windows, explained)
        records += self.findings.silences(self.site, self.state, self.windows)
        records += self.findings.limits(self.site, view, self.windows)
        if self.health.looked_ns == frame.now_ns:
            told = (self.diagnosis.faults, self.findings.active)
            suspects = suspects_of(self.health, self.forecasts, self.site, self.windows, *told)
            records += self.findings.keep_only("health/", suspects)
        if not frame.urgent:
            self.usual_dt_s = frame.dt_s
        if frame.tick % MARK_EVERY == MARK_AT:
            records.append(
                {"kind": "mark", "next_command": self.arbiter.next_command, "state": self.state.marks()}
            )
        return Decision(
            frame.tick,
            frame.now_ns,
            tuple(commands),
            tuple(advice),
            tuple(self.findings.active.values()),
            tuple(fits),
            tuple(records),
            deferred,
        )

    def _heed(self, events: Sequence[ev.Event], records: list[dict[str, Any]]) -> list[ev.FaultReported]:
        """Apply events in order; the faults that are new."""
        acks: dict[tuple[str, str, str], int] = {}
        faults, reports, heard = FaultTally(), ReportTally(), list[ev.FaultReported]()
        for kind, alike in groupby(events, type):
            if kind is ev.FaultReported:  # in a storm there are thousands
                fresh = self.intake.new_faults(cast(list[ev.FaultReported], list(alike)))
                for fault in fresh:
                    self.health.take(fault, self.jobs, self.state.now_ns)
                faults.add_all(fresh)
                heard += fresh
                continue
            for event in alike:
                if isinstance(event, ev.CheckpointTold):  # of ten thousand jobs, dozens in each second
                    reports.add(event, self.intake.told(event, self.jobs, self.state))
                elif not isinstance(event, ev.CommandAcked):
                    records += self._take_in(event)
                # A thousand devices may answer in one tick: the journal counts them, the leases know each.
                elif self.intake.is_new(event):
                    why = self.intake.acked(event, self.site, self.arbiter) or ""
                    key = event.control, event.state, why
                    acks[key] = acks.get(key, 0) + 1
        records += [
            {"kind": "acks", "control": control, "state": state, "count": count}
            | ({"refused": why} if why else {})
            for (control, state, why), count in sorted(acks.items())
        ]
        records += reports.records() + faults.records()
        return heard

    def _resume(self, frame: Frame) -> None:
        """After a gap in which nobody listened, silence counts from now on; not more than once a minute."""
        if frame.dt_s >= RESUME_GAP_S and any(isinstance(e, ev.TicksSkipped) for e in frame.events):
            for table in self.state.tables.values():
                if frame.now_ns - table.resumed_ns[0] >= RESUME_REST_S * NS:
                    table.resumed_ns[:] = frame.now_ns, frame.now_ns - round(frame.dt_s * NS)
            state, began_ns = self.state, frame.now_ns - round(frame.dt_s * NS)
            state.unwatched_ns = noted(state.unwatched_ns, began_ns, frame.now_ns)

    def _end_windows(self, now_ns: int) -> list[dict[str, Any]]:
        """Maintenance windows whose time is over, and what people left behind in those that ended."""
        records = self.windows.expire(now_ns)
        for table, index in self.windows.take_left().items():
            for key, lease in self.arbiter.leases.items():
                signal = find_signal(f"{table}.{lease.control.readback}")
                if lease.control.table != table or signal is None:
                    continue
                column, envelope = self.state.tables[table], self.site.envelopes[key]
                current = column.quality_of(signal, now_ns) == GOOD
                readback = np.where(current, column.value[signal.row].astype(np.float64), np.nan)
                lease.left_to_others(index, readback, envelope.safe, max(envelope.deadband, 1e-6))
        return records

    def _take_in(self, event: ev.Event) -> list[dict[str, Any]]:
        if isinstance(event, ev.IdentityTold):
            swaps, told = self.intake.identities.hear(event, self.site, self.state)
            return [*told, *(record for swap in swaps for record in self._take_in(swap))]
        if not self.intake.is_new(event):
            return []
        self.health.take(event, self.jobs, self.state.now_ns)
        if isinstance(event, ev.SiteChanged):
            return change_site(self, event)
        if isinstance(event, ev.PluginRestored):
            restored: dict[str, Any] = {"kind": "event", "event": brief_event(event)}
            if self.suspended.pop(event.plugin, None) is None:
                return [restored | {"refused": f"{event.plugin} is not suspended"}]
            if event.plugin in self.in_force:
                self.in_force[event.plugin] = []
            return [restored, *self.findings.clear(f"suspended/{event.plugin}")]
        if isinstance(event, ev.MaintenanceBegun):
            refused = self.windows.begin(event, self.state.now_ns)
            self.findings.silence_ns = 0  # what is spared now is looked at now
        elif isinstance(event, ev.MaintenanceEnded):
            refused = self.windows.end(event, self.state.now_ns)
        else:
            refused = self.intake.apply(event, self.site, self.state, self.jobs, self.arbiter, self.models)
        if refused is None:
            refused = self.book.take(event, self.state.now_ns)
        if refused is None and isinstance(event, ev.EntityReplaced):
            entity = self.site.entity(event.table, event.name)
            assert entity is not None  # or it would have been refused
            self.history.forget(event.table, entity)
            self.estimator.forget(event.table, entity)
            self.diagnosis.forget(event.table, entity)
            self.health.forget(event.table, entity)
            for model in self.models.values():
                forget = getattr(model, "forget", None)
                if forget is not None:
                    forget(event.table, entity)
            for policy in self.policies:
                if policy.memory is not None and policy.memory.table == event.table:
                    for column in self.memory[policy.name].values():
                        column[entity] = 0
        body: dict[str, Any] = {"kind": "event", "event": brief_event(event)}
        if refused is not None:
            body["refused"] = refused
        return [body]

    def _view(self, dt_s: float) -> EngineView:
        return EngineView(
            self.site,
            self.state,
            self.jobs,
            self.arbiter,
            self.estimator,
            self.history,
            tuple(self.intake.requests.values()),
            self.forecasts,
            self.intake.budget_w(self.site, self.state.now_ns),
            dt_s,
            lambda request: self.intake.targets(request, self.site),
            self.windows,
            self.diagnosis.faults,
            lambda quantity, at_ns: self.intake.outlooks.at(quantity, at_ns, self.site),
            self.health,
            self.book,
            self.intake.load_targets.held(self.site),
        )

    def due(self, name: str, period_s: float, now_ns: int) -> bool:
        """Whether a plug-in's period is over since it last ran."""
        last = self.ran_ns.get(name)
        return last is None or now_ns - last >= round(period_s * NS) - NS // 1000

    def _forecast(self, view: EngineView, frame: Frame, records: list[dict[str, Any]]) -> list[FitRequest]:
        fits: list[FitRequest] = []
        for name, model in self.models.items():
            if (
                name in self.suspended
                or frame.urgent
                or not self.due("model:" + name, model.period_s, frame.now_ns)
            ):
                continue
            self.ran_ns["model:" + name] = frame.now_ns
            try:
                model.update(view)
                said = model.predict(view)
                for forecast in said:
                    check_forecast(forecast, name, self.site.sizes)
                if len(said) > MAX_FORECASTS:
                    raise ContractError(f"{len(said)} forecasts; expected at most {MAX_FORECASTS}")
                self._hold(name, said)
            except Exception as error:
                records += self.suspend(name, error, frame.now_ns)
                continue
            begun = self.fitted_ns.setdefault(name, frame.now_ns)
            own = getattr(model, "next_fit_s", None)
            every_s = model.fit_every_s if own is None else own()
            if model.fit_every_s > 0 and frame.now_ns - begun >= round(every_s * NS):
                self.fitted_ns[name] = frame.now_ns
                span = round(every_s / max(frame.dt_s, 1e-3))
                fit = FitRequest(
                    f"{name}@{frame.tick}",
                    name,
                    max(0, frame.tick - span),
                    frame.tick,
                    frame.tick,
                    frame.now_ns + round(FIT_DEADLINE_S * NS),
                )
                self.intake.pending_fits[fit.id] = fit.deadline_ns
                fits.append(fit)
                records.append(
                    {
                        "kind": "fit_requested",
                        "id": fit.id,
                        "model": name,
                        "first_tick": fit.first_tick,
                        "last_tick": fit.last_tick,
                    }
                )
        return fits

    def _hold(self, name: str, said: list[Forecast]) -> None:
        """These are what a model says now; where two say the same, the first by name is in force."""
        held = {k: f for k, f in self.forecasts.items() if not f.model.startswith(f"{name}@")}
        for forecast in said:
            other = held.get((forecast.signal, forecast.horizon_s))
            if other is None or name < other.model.partition("@")[0]:
                held[forecast.signal, forecast.horizon_s] = forecast
        self.forecasts = held

    def suspend(self, name: str, error: Exception, now_ns: int) -> list[dict[str, Any]]:
        """A plug-in broke its contract: it is asked no more until `PluginRestored`."""
        self.suspended[name] = now_ns
        self.forecasts = {k: f for k, f in self.forecasts.items() if not f.model.startswith(f"{name}@")}
        why = f"{type(error).__name__}: {error}"[:500]
        return self.findings.raise_(
            Finding(
                f"suspended/{name}",
                "critical",
                f"{name} broke its contract and is suspended",
                (),
                (why,),
                1.0,
                "Mend the plug-in and restart; its running leases lapse by themselves.",
            )
        )

    def dump(self) -> dict[str, Any]:
        """All that a restart needs, as plain data and arrays."""
        return dump_engine(self)

    def checksum(self) -> str:
        """Content hash of everything that decides what comes next."""
        return digest(self.dump())
