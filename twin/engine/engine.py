"""Engine: one synchronous, deterministic function, `tick(frame) -> decision`.

Order of a tick: events, state, history, estimator, diagnosis, health, models, policies, arbitration,
findings.
Live operation, replay and what-if call only this function. The engine has no clock, no files and no
randomness. The caller passes policies and models in.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any, cast

import msgspec
import numpy as np

from twin.alerts import DRAINED, REPLACE, Findings, awaited_repairs
from twin.catalogue import (
    F64,
    NS,
    ConfigError,
    ContractError,
    StorageError,
    TwinError,
    digest,
    find_control,
    find_signal,
)
from twin.contracts import (
    AccountRecord,
    AcksRecord,
    CommandBatch,
    Decision,
    EventRecord,
    Finding,
    FitRequest,
    FitRequestedRecord,
    Forecast,
    JournalRecord,
    MarkRecord,
    Memory,
    Model,
    Policy,
    Proposal,
    ServiceBook,
    SiteRecord,
    Windows,
    brief_event,
    read_only,
)
from twin.control import MAX_PROPOSALS, Arbiter, check_proposal
from twin.diagnosis import Diagnosis
from twin.engine.arbitration import ArbitrationPass
from twin.engine.event_handlers import Intake
from twin.engine.plugin_checks import check_forecast, checked_accounts, checked_memory, fresh_memory
from twin.engine.preview import PreviewState, PreviewView, handover_of, preview_of
from twin.engine.records import FaultTally, ReportTally, proposals_record, same_proposals
from twin.engine.remap import slots_kept
from twin.engine.shadow_power import SparedPower
from twin.engine.view import EngineView
from twin.estimation import Estimator
from twin.goodput import GoodputState, LinkRecords
from twin.health import HealthState, findings as suspects_of
from twin.ledger import SiteLedger
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import (
    FaultColumns,
    Frame,
    Freshness,
    JobSlots,
    SignalHistory,
    State,
    events as ev,
    with_gap,
)

RESUME_GAP_S, RESUME_REST_S = 5.0, 60.0
# On a large site plug-ins with such periods take turns, so many seconds after the first tick. Those of 5 s to
# 10 s run between them, and not with the health of all parts, the ledger or the load forecast
SELDOM_S, TURNS_S = 10.0, (1, 2, 4, 6, 7)
SPREAD_S, SPREAD_TURN_S = 5.0, 3
DUE_NS = NS // 1000  # by so much a plug-in may run too early
MARK_EVERY = 60  # ticks between checks of the state in the journal
MARK_AT = 33  # not in a tenth tick, in which what is asked each 5 and 10 s is done as well
MARK_TURN = 35  # on a large site, in whose ticks 3 and 8 of ten plug-ins run each 5 s
FIT_DEADLINE_S = 600.0
UNTESTED_S = 180.0  # a drained node waits for people from then on, if no test began. source: estimate
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
        self.state = State(site.sizes, site.file.periods_s)
        self.jobs = JobSlots(site.sizes["job"], site.sizes["node"])
        self.windows = Windows(site)
        self.memory: dict[str, Memory] = {p.name: fresh_memory(p, site) for p in self.policies}
        self.in_force: dict[str, list[Proposal]] = {p.name: [] for p in self.policies}
        self.ran_ns: dict[str, int] = {}
        period_s = {f"model:{n}": m.period_s for n, m in self.models.items()}
        period_s |= {p.name: p.period_s for p in self.policies}
        seldom = [name for name, seconds in period_s.items() if seconds >= SELDOM_S]
        self._turn_s = {name: SPREAD_TURN_S for name, seconds in period_s.items() if seconds >= SPREAD_S}
        self._turn_s |= {name: TURNS_S[i % len(TURNS_S)] for i, name in enumerate(seldom)}
        self.fitted_ns: dict[str, int] = {}
        self.suspended: dict[str, int] = {}  # plug-in -> since
        self.usual_dt_s = 0.0  # of the last regular tick: a pause does not save up any slew
        self.forecasts: dict[tuple[str, float], Forecast] = {}
        self.settle_into(site)
        self.arbiter = Arbiter(site)
        self.preview = PreviewState(site)
        self.spared: SparedPower | None = None  # of the last tick, for explanations
        self.estimator = Estimator(site)
        self.diagnosis = Diagnosis(site)
        self.health = HealthState(site)
        self.goodput = GoodputState(site)
        self.book = ServiceBook(site)
        self.ledger = SiteLedger(site)
        self.findings = Findings(site, self.estimator)

    def settle_into(self, site: Site) -> None:
        """Set up the parts that depend on the site's file alone."""
        self.site = site
        self.history = SignalHistory(site.file.history_s, site.sizes)

    def tick(self, frame: Frame) -> Decision:
        """Return the decision on this frame. Raises only for a broken invariant, never for bad data."""
        if frame.now_ns <= self.state.now_ns or not frame.dt_s > 0:
            raise TwinError(
                f"tick {frame.tick} is at {frame.now_ns} ns, the one before at {self.state.now_ns} ns, dt "
                f"{frame.dt_s} s: time must advance, or silence would look fresh"
            )
        records: list[JournalRecord] = []
        self.state.now_ns, self.state.tick = frame.now_ns, frame.tick
        paused = self._resume(frame)
        faults = self._heed(frame.events, records)
        self.state.apply(frame)
        records += self.intake.expire(frame.now_ns)
        records += self._end_windows(frame.now_ns)
        self.windows.update_standby(self.state)
        self.history.push(self.state)
        self.estimator.update(self.state, frame.dt_s, self.windows)
        self.diagnosis.update(self.state, self.estimator, self.jobs, self.windows, faults, frame.dt_s)
        self.health.update(self.state, self.estimator, self.diagnosis, self.jobs, self.windows)
        links = LinkRecords(self.health.rates, self.health.nvlinks)
        self.goodput.update(self.state, self.jobs, links)
        view = self.view(frame.dt_s)
        self.ledger.update(self.state, view, frame.dt_s, paused)
        fits = self._forecast(view, frame, records)
        armed = [i for i, p in enumerate(self.policies) if self.intake.takes_over(p.name, frame.now_ns)]
        preview, handover = preview_of(view, self.preview), handover_of(view, self.preview, armed)
        self.spared = preview.spared if isinstance(preview, PreviewView) else None
        self._run_policies(view, preview, handover, frame, records)
        commands, advice, deferred = self._arbitrate(view, preview, records)
        explained = {k: m for k in BALANCED if (m := self.diagnosis.explained(k)) is not None}
        records += self.findings.keep_only("fault/", self.diagnosis.findings(self.site))
        records += self.findings.keep_only("doubt/", self.diagnosis.doubted())
        records += self.findings.deviations(self.site, self.estimator, self.windows, explained)
        records += self.findings.outages(self.site, view, self.diagnosis.silence.outages)
        records += self.findings.coverage(self.site, self.state, self.windows)
        records += self.findings.limits(self.site, view, self.windows)
        if self.health.whole_ns == frame.now_ns:
            known = (self.health.reported(self.diagnosis.faults), self.findings.active)
            suspects = suspects_of(self.health, self.forecasts, self.site, self.windows, *known)
            records += self.findings.keep_only("health/", suspects)
        if "node.service_level" in self.arbiter.leases:
            waits = self._awaiting_people(frame.now_ns)
            repairs = awaited_repairs(self.site, waits, self.windows, self.findings.active)
            records += self.findings.keep_only("replacement/", repairs)
        if self.goodput.evaluated_ns == frame.now_ns:
            held_back = self.goodput.findings(self.state, self.jobs)
            records += self.findings.keep_only("job_straggler/", held_back)
        if not frame.urgent:
            self.usual_dt_s = frame.dt_s
        if frame.tick % MARK_EVERY == (MARK_TURN if self.site.is_large else MARK_AT):
            records.append(MarkRecord(next_command=self.arbiter.next_command, state=self.state.marks()))
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

    def _heed(self, events: Sequence[ev.Event], records: list[JournalRecord]) -> FaultColumns:
        """Apply events in order, and return the new faults."""
        acks: Counter[tuple[str, str, str]] = Counter()
        faults, reports, new_faults = FaultTally(), ReportTally(), list[FaultColumns]()
        runs = [(kind, list(alike)) for kind, alike in groupby(events, type)]
        every = chain.from_iterable(alike for kind, alike in runs if kind is ev.FaultReported)
        reported, end = FaultColumns.of(cast(list[ev.FaultReported], list(every))), 0
        for kind, alike in runs:
            if kind is ev.FaultReported:  # in a storm there are thousands
                begin, end = end, end + len(alike)
                fresh = self.intake.new_faults(reported.some(slice(begin, end)))
                self.health.take_faults(fresh)
                faults.add_all(fresh)
                new_faults.append(fresh)
                continue
            # A thousand devices may answer in one tick: the journal counts them, the leases know each.
            if kind is ev.CommandAcked:
                answers = cast(list[ev.CommandAcked], alike)
                acks.update(self.intake.take_acks(answers, self.site, self.arbiter))
                continue
            for event in alike:
                if isinstance(event, ev.CheckpointTold):  # of ten thousand jobs, dozens in each second
                    refused = self.intake.take_report(event, self.jobs, self.state)
                    reports.add(event, refused)
                    if refused is None:
                        self.ledger.receive(event, self.jobs)
                else:
                    records += self._take_in(event)
        records += [
            AcksRecord(control=control, state=state, count=count, refused=why)
            for (control, state, why), count in sorted(acks.items())
        ]
        records += reports.records() + faults.records()
        return FaultColumns.joined(new_faults)

    def _resume(self, frame: Frame) -> bool:
        """Restart the count of silence after a gap without ticks, at most once a minute.

        Return True if there was such a gap.
        """
        paused = frame.dt_s >= RESUME_GAP_S and any(isinstance(e, ev.TicksSkipped) for e in frame.events)
        if paused:
            for table in self.state.tables.values():
                if frame.now_ns - table.resumed_ns[0] >= RESUME_REST_S * NS:
                    table.resumed_ns[:] = frame.now_ns, frame.now_ns - round(frame.dt_s * NS)
            state, began_ns = self.state, frame.now_ns - round(frame.dt_s * NS)
            state.unwatched_ns = with_gap(state.unwatched_ns, began_ns, frame.now_ns)
        return paused

    def _end_windows(self, now_ns: int) -> list[JournalRecord]:
        """Maintenance windows whose time is over, and what people left behind in those that ended."""
        records = self.windows.expire(now_ns)
        for table, index in self.windows.take_left().items():
            for key, lease in self.arbiter.leases.items():
                signal = find_signal(f"{table}.{lease.control.readback}")
                if lease.control.table != table or signal is None:
                    continue
                column, envelope = self.state.tables[table], self.site.envelopes[key]
                current = column.current(signal, now_ns)
                readback = np.where(current, column.value[signal.row].astype(np.float64), np.nan)
                lease.left_to_others(index, readback, envelope.safe, max(envelope.deadband, 1e-6))
        return records

    def _take_in(self, event: ev.Event) -> list[JournalRecord]:
        if isinstance(event, ev.IdentityTold):
            swaps, changes = self.intake.identities.receive(event, self.site, self.state)
            return [*changes, *(record for swap in swaps for record in self._take_in(swap))]
        # Counts are reported again and again, and twice is no more than once: ids of them would press out
        # others, and only what is odd is journalled
        if not isinstance(event, ev.NvlinksCounted) and not self.intake.is_new(event):
            return []
        self.health.take(event, self.jobs, self.state.now_ns)
        if isinstance(event, ev.NvlinksCounted):
            refused = None if self.site.entity("node", event.name) is not None else f"no node {event.name}"
            return [EventRecord(event=brief_event(event), refused=refused)] if refused else []
        if isinstance(event, ev.SiteChanged):
            return self._change_site(event)
        if isinstance(event, ev.PluginRestored):
            if self.suspended.pop(event.plugin, None) is None:
                self.intake.forget_id(event)
                return [EventRecord(event=brief_event(event), refused=f"{event.plugin} is not suspended")]
            if event.plugin in self.in_force:
                self.in_force[event.plugin] = []
                self.ran_ns.pop(event.plugin, None)
            return [EventRecord(event=brief_event(event)), *self.findings.clear(f"suspended/{event.plugin}")]
        if isinstance(event, ev.MaintenanceBegun):
            refused = self.windows.begin(event, self.state.now_ns)
            self.findings.silence_ns = 0  # look at once: what is in maintenance is not silent
        elif isinstance(event, ev.MaintenanceEnded):
            refused = self.windows.end(event, self.state.now_ns)
        else:
            refused = self.intake.apply(event, self.site, self.state, self.jobs, self.arbiter, self.models)
        if refused is None:
            refused = self.book.take(event, self.state.now_ns)
        if refused is not None:
            self.intake.forget_id(event)
        if refused is None and isinstance(event, ev.EntityReplaced):
            entity = self.site.entity(event.table, event.name)
            assert entity is not None  # or it would have been refused
            self.history.forget(event.table, entity)
            self.preview.forget(event.table, entity)
            self.estimator.forget(event.table, entity)
            self.diagnosis.forget(event.table, entity)
            self.health.forget(event.table, entity)
            self.goodput.forget(event.table, entity)
            self.ledger.forget(event.table, entity)
            for model in self.models.values():
                forget = getattr(model, "forget", None)
                if forget is not None:
                    forget(event.table, entity)
            for policy in self.policies:
                if policy.memory is not None:
                    policy.memory.forget(self.memory[policy.name], event.table, entity)
        return [EventRecord(event=brief_event(event), refused=refused)]

    def view(self, dt_s: float | None = None) -> EngineView:
        """The state as policies and models see it; `dt_s` of the last regular tick if not given."""
        return EngineView(
            now_ns=self.state.now_ns,
            dt_s=(self.usual_dt_s or 1.0) if dt_s is None else dt_s,
            site=self.site,
            jobs=self.jobs,
            requests=tuple(self.intake.requests.values()),
            forecasts=self.forecasts,
            state=self.state,
            arbiter=self.arbiter,
            estimator=self.estimator,
            history=self.history,
            intake=self.intake,
            windows=self.windows,
            diagnosis=self.diagnosis,
            health_state=self.health,
            service_book=self.book,
        )

    def due(self, name: str, period_s: float, now_ns: int) -> bool:
        """True if a plug-in's period is over since it last ran."""
        last = self.ran_ns.get(name)
        return last is None or now_ns - last >= round(period_s * NS) - DUE_NS

    def _note_run(self, name: str, period_s: float, now_ns: int) -> None:
        """Note that a plug-in runs, at the instant from which its next period counts.

        On a large site the second run of a plug-in that runs seldom comes 1 to 7 s later, by its turn. From
        then on its periods follow each other without a gap. A late run, or a pause, moves no turn.
        """
        last_ns = self.ran_ns.get(name)
        if not self.site.is_large:
            self.ran_ns[name] = now_ns
        elif last_ns is None:
            self.ran_ns[name] = now_ns + self._turn_s.get(name, 0) * NS
        else:
            late_ns = (now_ns + DUE_NS - last_ns) % max(round(period_s * NS), 1)
            self.ran_ns[name] = now_ns + DUE_NS - late_ns

    def _awaiting_people(self, now_ns: int) -> F64:
        """Service levels [n_node] at which nodes wait for people; NaN elsewhere.

        That is `replace`, and `drained` of a node that a policy withdrew, for a while without a job or test.
        """
        service, test = self.arbiter.leases["node.service_level"], self.arbiter.leases["node.burn_in_since_s"]
        if not (service.value >= DRAINED).any():
            return np.full(len(service.value), np.nan)
        operators = [k for k, policy in enumerate(self.policies) if policy.name == "operator"]
        idle = (self.jobs.job_of_node < 0) & np.isnan(test.value) & ~np.isin(service.owner, operators)
        idle &= now_ns - service.changed_ns >= round(UNTESTED_S * NS)
        return np.where((service.value >= REPLACE) | (service.value >= DRAINED) & idle, service.value, np.nan)

    def _forecast(self, view: EngineView, frame: Frame, records: list[JournalRecord]) -> list[FitRequest]:
        fits: list[FitRequest] = []
        for name, model in self.models.items():
            key = "model:" + name
            waits = frame.urgent and key in self.ran_ns
            if name in self.suspended or waits or not self.due(key, model.period_s, frame.now_ns):
                continue
            self._note_run(key, model.period_s, frame.now_ns)
            try:
                model.update(view)
                forecasts = model.predict(view)
                for forecast in forecasts:
                    check_forecast(forecast, name, self.site.sizes)
                if len(forecasts) > MAX_FORECASTS:
                    raise ContractError(f"{len(forecasts)} forecasts; expected at most {MAX_FORECASTS}")
                self._hold(name, forecasts)
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
                    FitRequestedRecord(
                        id=fit.id, model=name, first_tick=fit.first_tick, last_tick=fit.last_tick
                    )
                )
        return fits

    def _hold(self, name: str, forecasts: list[Forecast]) -> None:
        """Store the forecasts of a model. Of two with the same forecast, the first by name is in force."""
        others = {k: f for k, f in self.forecasts.items() if not f.model.startswith(f"{name}@")}
        for forecast in forecasts:
            other = others.get((forecast.signal, forecast.horizon_s))
            if other is None or name < other.model.partition("@")[0]:
                others[forecast.signal, forecast.horizon_s] = forecast
        self.forecasts = others

    def _run_policies(
        self,
        view: EngineView,
        preview: EngineView,
        handover: EngineView,
        frame: Frame,
        records: list[JournalRecord],
    ) -> None:
        """Run the policies that are due, in order of rank; changed proposals and accounts go to `records`.

        One that advises sees the `preview`, in which its advice is obeyed; one that was just armed, the
        `handover`, in which its first commands are.
        """
        for policy in self.policies:
            name = policy.name
            if self.intake.authority[name] == "off":
                if self.in_force[name]:
                    records.append(proposals_record(name, [], self.in_force[name], self.site, self.jobs))
                self.in_force[name] = []
                continue
            if name in self.suspended:
                self._retire(policy, frame.now_ns)
                continue
            # One whose proposals were dropped, as after a change of the site, runs in any tick: else its
            # leases would be withdrawn
            early = frame.urgent and name in self.ran_ns
            if not (policy.urgent if early else self.due(name, policy.period_s, frame.now_ns)):
                continue
            if not early:
                self._note_run(name, policy.period_s, frame.now_ns)
            try:
                seen = handover if self.intake.takes_over(name, frame.now_ns) else view
                seen = preview if self.intake.previews(name) else seen
                proposals, accounts = self._run_policy(policy, seen)
            except Exception as error:
                records += self.suspend(name, error, frame.now_ns)
                continue
            changed = not same_proposals(proposals, self.in_force[name])
            if changed:
                records.append(proposals_record(name, proposals, self.in_force[name], self.site, self.jobs))
            records += accounts
            if not changed:
                continue
            # A policy may reuse its buffers: keep copies.
            self.in_force[name] = [
                Proposal(p.control, p.index.copy(), p.lo.copy(), p.hi.copy(), p.want.copy(), p.reason)
                for p in proposals
            ]

    def _run_policy(self, policy: Policy, view: EngineView) -> tuple[list[Proposal], list[JournalRecord]]:
        """Return a policy's proposals and accounts, and store its memory. Raises the policy's errors."""
        before = {k: read_only(v) for k, v in self.memory[policy.name].items()}
        proposals, memory = policy.propose(view, before)
        if len(proposals) > MAX_PROPOSALS:
            raise ContractError(f"{len(proposals)} proposals; expected at most {MAX_PROPOSALS}")
        for p in proposals:
            control = find_control(p.control)
            check_proposal(p, policy.controls, self.site.sizes[control.table] if control else 0)
        after = checked_memory(policy, memory, self.site, self.memory[policy.name])
        account_of = getattr(policy, "accounts", None)
        given = (
            []
            if account_of is None
            else account_of(view, before, {k: read_only(v) for k, v in after.items()})
        )
        accounts: list[JournalRecord] = [
            AccountRecord(policy=policy.name, account=account) for account in checked_accounts(given)
        ]
        self.memory[policy.name] = after
        return proposals, accounts

    def _retire(self, policy: Policy, now_ns: int) -> None:
        """Keep the intervals of a suspended policy until their leases end."""
        since = self.suspended[policy.name]
        self.in_force[policy.name] = [
            p
            for p in self.in_force[policy.name]
            if now_ns - since < round(cast(Any, find_control(p.control)).lease_s * NS)
        ]

    def _arbitrate(
        self, view: EngineView, preview: EngineView, records: list[JournalRecord]
    ) -> tuple[list[CommandBatch], list[CommandBatch], dict[str, int]]:
        """Return (commands, advice, number of deferred entities by control)."""
        return ArbitrationPass(
            policies=self.policies,
            in_force=self.in_force,
            suspended=self.suspended,
            intake=self.intake,
            arbiter=self.arbiter,
            findings=self.findings,
            state=self.state,
            view=view,
            preview=preview,
            slew_s=min(view.dt_s, self.usual_dt_s or view.dt_s),
        ).run(records)

    def suspend(self, name: str, error: Exception, now_ns: int) -> list[JournalRecord]:
        """Suspend a plug-in that violated its contract, until `PluginRestored`."""
        self.suspended[name] = now_ns
        self.forecasts = {k: f for k, f in self.forecasts.items() if not f.model.startswith(f"{name}@")}
        why = f"{type(error).__name__}: {error}"[:500]
        return self.findings.raise_(
            Finding(
                f"suspended/{name}",
                "critical",
                f"{name} violated its contract and is suspended",
                (),
                (why,),
                1.0,
                "Fix the plug-in and restart the daemon; its running leases lapse by themselves.",
            )
        )

    def _change_site(self, event: ev.SiteChanged) -> list[JournalRecord]:
        """Move all state to another site; returns journal records. A bad site is refused."""
        try:
            new = build_site(msgspec.json.decode(event.spec, type=SiteSpec), "the changed site")
        except (msgspec.MsgspecError, ConfigError) as error:
            return [EventRecord(event=brief_event(event), refused=str(error)[:500])]
        return self.change_site(new)

    def change_site(self, new: Site) -> list[JournalRecord]:
        """Move all state to another site; returns journal records."""
        old = self.site
        kept = slots_kept(old, new)
        state, intake = self.state, self.intake
        for table in state.tables:
            freshness = Freshness(table, new.file.periods_s)
            state.tables[table] = state.tables[table].remapped(new.sizes[table], kept[table], freshness)
        self.jobs = self.jobs.remapped(new.sizes["node"], kept["node"], new.sizes["job"])
        self.arbiter = self.arbiter.remapped(new, kept)
        preview, self.preview = self.preview, PreviewState(new)
        self.preview.adopt(preview, kept)
        self.spared = None
        self.estimator = self.estimator.remapped(new, kept)
        self.diagnosis = self.diagnosis.remapped(new, kept)
        self.health = self.health.remapped(new, kept)
        self.goodput = self.goodput.remapped(new, kept)
        self.book = self.book.remapped(new, kept)
        self.ledger = self.ledger.remapped(new, kept)
        self.windows, dropped = self.windows.remapped(new, kept)
        self.memory |= {
            p.name: p.memory.moved(self.memory[p.name], kept, new.sizes)
            for p in self.policies
            if p.memory is not None
        }
        self.in_force = {p.name: [] for p in self.policies}  # indices moved; asked afresh in this very tick
        self.ran_ns = {}
        intake.grant_w, grants = np.full(new.sizes["feeder"], np.nan), intake.grant_w
        intake.grant_ns, until = np.zeros(new.sizes["feeder"], np.int64), intake.grant_ns
        order, intake.grant_order = intake.grant_order, np.zeros((new.sizes["feeder"], 2), np.int64)
        moved = np.flatnonzero(kept["feeder"] >= 0)
        intake.grant_w[moved] = grants[kept["feeder"][moved]]
        intake.grant_ns[moved] = until[kept["feeder"][moved]]
        intake.grant_order[moved] = order[kept["feeder"][moved]]
        self.forecasts = {}
        records = dropped
        for name, model in self.models.items():
            try:
                model.remap(kept)
            except Exception as error:
                records += self.suspend(name, error, state.now_ns)
        self.settle_into(new)
        self.findings = self.findings.remapped(new, self.estimator, kept)
        changed = SiteRecord(
            site_hash=new.spec_hash, was=old.spec_hash, sizes={t: n for t, n in new.sizes.items() if n}
        )
        return [changed, *records]

    def dump(self) -> dict[str, Any]:
        """Return all state that affects future decisions, as plain data and arrays."""
        return {
            "site_hash": self.site.spec_hash,
            "tick": self.state.tick,
            "now_ns": self.state.now_ns,
            "unwatched_ns": self.state.unwatched_ns,
            "tables": {name: table.arrays() for name, table in self.state.tables.items()},
            "jobs": self.jobs.dump(),
            "arbiter": self.arbiter.dump(),
            "preview": self.preview.dump(),
            "estimator": self.estimator.dump(),
            "diagnosis": self.diagnosis.dump(),
            "health": self.health.dump(),
            "goodput": self.goodput.dump(),
            "findings": self.findings.dump(),
            "intake": self.intake.dump(),
            "windows": self.windows.dump(),
            "book": self.book.dump(),
            "ledger": self.ledger.dump(),
            "memory": self.memory,
            "in_force": {
                name: [[p.control, p.index, p.lo, p.hi, p.want, p.reason] for p in some]
                for name, some in self.in_force.items()
            },
            "ran_ns": self.ran_ns,
            "fitted_ns": self.fitted_ns,
            "suspended": self.suspended,
            "usual_dt_s": self.usual_dt_s,
            "models": {
                n: {"parameters": m.parameters(), "memory": m.memory()} for n, m in self.models.items()
            },
            "forecasts": [
                [f.signal, f.horizon_s, f.mean, f.lo, f.hi, f.model, f.basis] for f in self.forecasts.values()
            ],
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the result of `dump`. Raises StorageError for another site or other policies."""
        if data["site_hash"] != self.site.spec_hash:
            raise StorageError(f"snapshot is of site {data['site_hash']}, this is {self.site.spec_hash}")
        # One that speaks after all others begins afresh: leases name their owners by place
        missing = sorted(set(data["memory"]) ^ {p.name for p in self.policies[: len(data["memory"])]})
        if missing:
            raise StorageError(f"snapshot and configuration differ in policies: {', '.join(missing)}")
        self.state.tick, self.state.now_ns = data["tick"], data["now_ns"]
        if "unwatched_ns" in data:
            self.state.unwatched_ns = np.array(data["unwatched_ns"])
        for name, arrays in data["tables"].items():
            self.state.tables[name].restore(arrays)
        self.jobs.restore(data["jobs"])
        self.arbiter.restore(data["arbiter"])
        if "preview" in data:  # one of a version before has none
            self.preview.restore(data["preview"])
        self.estimator.restore(data["estimator"])
        if "diagnosis" in data:  # one of a version before has none: faults are found again
            self.diagnosis.restore(data["diagnosis"])
        if "health" in data:
            self.health.restore(data["health"])
        if "goodput" in data:
            self.goodput.restore(data["goodput"])
        self.findings.restore(data["findings"])
        self.intake.restore(data["intake"])
        self.windows.restore(data["windows"])
        if "book" in data:
            self.book.restore(data["book"])
        if "ledger" in data:  # one of a version before has none: the hour begins anew
            self.ledger.restore(data["ledger"])
        self.memory |= {
            p.name: p.memory.restored(data["memory"][p.name], self.site.sizes)
            for p in self.policies
            if p.memory is not None and p.name in data["memory"]
        }
        self.in_force |= {name: [Proposal(*p) for p in some] for name, some in data["in_force"].items()}
        self.ran_ns, self.fitted_ns = dict(data["ran_ns"]), dict(data["fitted_ns"])
        self.suspended = dict(data["suspended"])
        self.usual_dt_s = float(data["usual_dt_s"])
        for name, held in data["models"].items():
            if name not in self.models:
                continue  # it came or went with another version
            with contextlib.suppress(ContractError):  # of another version: it begins afresh
                if held["parameters"]:
                    self.models[name].load(held["parameters"])
                self.models[name].restore(held["memory"])
        forecasts = [Forecast(*f) for f in data["forecasts"]]
        self.forecasts = {
            (f.signal, f.horizon_s): f for f in forecasts if f.model.partition("@")[0] in self.models
        }

    def checksum(self) -> str:
        """Return the content hash of all state that affects future decisions."""
        return digest(self.dump())
