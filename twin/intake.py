"""Intake: how each event changes what the engine holds, and what the journal says of it.

Deals with the authority of policies, requests of operators, grants, jobs, replaced devices, fitted models. An
event that cannot be applied is counted and recorded with the reason, never raised. May import the core.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np

from twin import events as ev
from twin.arbiter import Arbiter
from twin.contracts import Model
from twin.frame import F64
from twin.jobs import Jobs
from twin.signals import TABLES, find_control
from twin.site import Site
from twin.state import State
from twin.tree import digest, unpack

MAX_REQUESTS = 1000
MAX_SEEN = 10_000
MAX_NAMES = 100_000


class Intake:
    """What events have set, beside the measured state."""

    def __init__(self, site: Site, authority: dict[str, str]) -> None:
        self.authority = dict(authority)
        self.requests: dict[str, ev.OperatorRequest] = {}
        self.approvals: dict[str, ev.Approved] = {}
        self.grant_w = np.full(site.sizes["feeder"], np.nan)
        self.grant_ns = np.zeros(site.sizes["feeder"], np.int64)
        self.serials: dict[str, str] = {}
        self.pending_fits: dict[str, int] = {}  # fit id -> deadline
        self.params_hash: dict[str, str] = {}
        self.seen: OrderedDict[str, None] = OrderedDict()
        self.counts: dict[str, int] = {}

    def count(self, what: str) -> None:
        """One more of what went unusually."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def is_new(self, event: ev.Event) -> bool:
        """False for an event whose id was seen before."""
        if not event.id:
            return True
        if event.id in self.seen:
            self.count("duplicate_events")
            return False
        self.seen[event.id] = None
        while len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)
        return True

    def apply(
        self,
        event: ev.Event,
        site: Site,
        state: State,
        jobs: Jobs,
        arbiter: Arbiter,
        models: dict[str, Model],
    ) -> str | None:
        """Apply one event; the reason why not, if it could not be."""
        now_ns = state.now_ns
        match event:
            case ev.JobStarted():
                return self._job_started(event, site, state, jobs)
            case ev.JobEnded():
                return self._job_ended(event, jobs, arbiter, now_ns)
            case ev.OperatorRequest():
                return self._request(event, site)
            case ev.RequestWithdrawn():
                return None if self.requests.pop(event.request, None) else f"no request {event.request}"
            case ev.Approved():
                if event.policy not in self.authority:
                    return f"no policy {event.policy}"
                if len(self.approvals) >= MAX_REQUESTS and event.id not in self.approvals:
                    return f"more than {MAX_REQUESTS} approvals"
                self.approvals[event.id or f"{event.policy}/{event.control}"] = event
            case ev.Held():
                arbiter.mode = "held"
            case ev.Released():
                arbiter.mode = "released"
            case ev.Resumed():
                arbiter.mode = "normal"
            case ev.AuthorityChanged():
                if event.policy not in self.authority:
                    return f"no policy {event.policy}"
                self.authority[event.policy] = event.authority
            case ev.EpochChanged():
                if not arbiter.epoch <= event.epoch < 2**63:
                    return f"epoch {event.epoch} is older than {arbiter.epoch}, or no epoch"
                arbiter.epoch = event.epoch
            case ev.EntityReplaced():
                return self._replaced(event, site, state, arbiter)
            case ev.BudgetGranted():
                return self._granted(event, site)
            case ev.ModelFitted():
                return self._fitted(event, models)
            case ev.FitFailed():
                self.pending_fits.pop(event.fit, None)
            case _:
                return None
        return None

    def _job_started(self, event: ev.JobStarted, site: Site, state: State, jobs: Jobs) -> str | None:
        if not (0 <= event.floor_w < np.inf and abs(event.priority) < 2**31):
            return (
                f"expected a floor >= 0 and a priority of 32 bits, got {event.floor_w} and {event.priority}"
            )
        again = event.job in jobs.slot_of
        found = [site.entity("node", name) for name in event.nodes[:MAX_NAMES]]
        nodes = [i for i in found if i is not None]
        slot = jobs.start(event, nodes, len(found) - len(nodes), state.now_ns)
        if slot is None:
            return f"all {jobs.n} job slots are taken or resting"
        if not again:  # what the slot's last job reported and was told is not this one's
            state.tables["job"].replace(slot)
        return (
            None
            if len(nodes) == len(event.nodes)
            else f"{len(event.nodes) - len(nodes)} of its nodes are unknown"
        )

    def _job_ended(self, event: ev.JobEnded, jobs: Jobs, arbiter: Arbiter, now_ns: int) -> str | None:
        slot = jobs.end(event, now_ns)
        if slot is None:
            return f"no job {event.job} runs"
        for key, lease in arbiter.leases.items():
            if key.startswith("job."):
                lease.drop(slot)
        return None

    def _request(self, event: ev.OperatorRequest, site: Site) -> str | None:
        control = find_control(event.control)
        if not event.id:
            return "a request needs an id, by which it can be withdrawn"
        if control is None:
            return f"{event.control} is not a control of the catalogue"
        if not event.lo <= event.hi:
            return f"expected lo <= hi, got {event.lo} and {event.hi}"
        if not event.names:
            return f"names no {control.table}"
        if len(event.names) > MAX_NAMES or any(site.entity(control.table, n) is None for n in event.names):
            return f"names a {control.table} that this site does not have, or more than {MAX_NAMES}"
        if len(self.requests) >= MAX_REQUESTS and event.id not in self.requests:
            return f"more than {MAX_REQUESTS} standing requests"
        # As a snapshot would give it back: a whole number of watts is a float all the same.
        self.requests[event.id] = msgspec.convert(msgspec.to_builtins(event), ev.OperatorRequest)
        return None

    def acked(self, event: ev.CommandAcked, site: Site, arbiter: Arbiter) -> str | None:
        """Note a sink's answer; the reason why not, if it cannot be ours."""
        control = find_control(event.control)
        entity = None if control is None else site.entity(control.table, event.name)
        epoch, _, number = event.command.partition("-")
        digits = epoch.isascii() and epoch.isdigit() and number.isascii() and number.isdigit()
        if control is None or entity is None or not digits or len(number) > 18 or len(epoch) > 18:
            self.count("strange_acks")
            return "names no command of this site"
        # Another daemon's commands may bear the same numbers; after a takeover ours are sent anew.
        if int(epoch) != arbiter.epoch or not arbiter.leases[control.key].ack(
            entity, event.generation, int(number), event.state
        ):
            self.count("stale_acks")
            return "is about a superseded command or a replaced device"
        return None

    def _replaced(self, event: ev.EntityReplaced, site: Site, state: State, arbiter: Arbiter) -> str | None:
        entity = site.entity(event.table, event.name) if event.table in TABLES else None
        if entity is None:
            return f"no {event.table} {event.name}"
        key = f"{event.table}:{event.name}"
        if self.serials.get(key) == event.serial:
            return f"serial {event.serial} was already there"
        self.serials[key] = event.serial
        state.tables[event.table].replace(entity)
        for name, lease in arbiter.leases.items():
            if name.partition(".")[0] == event.table:
                lease.drop(entity)
        return None

    def _granted(self, event: ev.BudgetGranted, site: Site) -> str | None:
        feeder = site.entity("feeder", event.feeder)
        if feeder is None:
            return f"no feeder {event.feeder}"
        if not site.external_budget[feeder]:
            return f"the budget of {event.feeder} is not external"
        if not (0 <= event.budget_w < np.inf and 0 <= event.expires_ns < 2**63):
            return f"expected a budget >= 0 and an instant, got {event.budget_w} and {event.expires_ns}"
        self.grant_w[feeder], self.grant_ns[feeder] = event.budget_w, event.expires_ns
        return None

    def _fitted(self, event: ev.ModelFitted, models: dict[str, Model]) -> str | None:
        if event.model not in models:
            return f"no model {event.model}"
        if event.fit not in self.pending_fits:
            return f"fit {event.fit} was not asked for, or came too late"
        del self.pending_fits[event.fit]
        try:
            parameters = unpack(event.params)
            if digest(parameters) != event.params_hash:
                return f"its parameters do not hash to {event.params_hash}"
            if not isinstance(parameters, dict):
                return f"expected parameters by name, got {type(parameters).__name__}"
            models[event.model].load(parameters)
        except Exception as error:  # a plug-in's own code, and content that a worker made
            return f"{type(error).__name__}: {error}"[:500]
        self.params_hash[event.model] = event.params_hash
        return None

    def budget_w(self, site: Site, now_ns: int) -> F64:
        """Budget per feeder: the grant while it runs, within the feeder's own; else the guaranteed share."""
        lent = site.external_budget & (self.grant_ns > now_ns)
        outside = np.where(lent, self.grant_w, site.guaranteed_w)
        return np.where(site.external_budget, np.fmin(outside, site.budget_w), site.budget_w)

    def expire(self, now_ns: int) -> list[dict[str, Any]]:
        """Drop what ran out; returns journal bodies."""
        records: list[dict[str, Any]] = []
        held: tuple[tuple[str, dict[str, Any]], ...] = (
            ("request", self.requests),
            ("approval", self.approvals),
        )
        for name, gone in held:
            for key in [k for k, e in gone.items() if 0 < e.expires_ns <= now_ns]:
                del gone[key]
                records.append({"kind": f"{name}_expired", "id": key})
        for fit in [f for f, deadline in self.pending_fits.items() if deadline <= now_ns]:
            del self.pending_fits[fit]
            records.append({"kind": "fit_expired", "id": fit})
        return records

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {
            "authority": self.authority,
            "requests": {k: msgspec.to_builtins(v) for k, v in self.requests.items()},
            "approvals": {k: msgspec.to_builtins(v) for k, v in self.approvals.items()},
            "grant_w": self.grant_w, "grant_ns": self.grant_ns, "serials": self.serials,
            "pending_fits": self.pending_fits, "params_hash": self.params_hash, "seen": list(self.seen),
            "counts": self.counts,
        }  # fmt: skip

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.authority = {**self.authority, **data["authority"]}
        self.requests = {k: msgspec.convert(v, ev.OperatorRequest) for k, v in data["requests"].items()}
        self.approvals = {k: msgspec.convert(v, ev.Approved) for k, v in data["approvals"].items()}
        self.grant_w, self.grant_ns = np.array(data["grant_w"]), np.array(data["grant_ns"])
        self.serials, self.pending_fits = dict(data["serials"]), dict(data["pending_fits"])
        self.params_hash, self.counts = dict(data["params_hash"]), dict(data["counts"])
        self.seen = OrderedDict.fromkeys(data["seen"])
