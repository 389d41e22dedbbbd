"""Arbitration: one pass over all controls, from proposals to commands and advice, and after old commands.

The rules are the arbiter's and the leases'; here is the order in which they are applied in a tick. May
import the core; called by the engine only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from twin.arbiter import Settlement, Voiced
from twin.contracts import CommandBatch, Proposal
from twin.frame import F64, I32, I64, NS, Bool, Frame
from twin.leases import MISMATCH_S, Leases
from twin.records import command_record, names_of, shown
from twin.signals import find_control, find_signal
from twin.silence import SHOWN_ENTITIES
from twin.state import GOOD, STALE_PERIODS
from twin.takeover import adopt, claim, renew_term, settling_records
from twin.view import EngineView

if TYPE_CHECKING:
    from twin.engine import Engine

# The policy that says what people ask for: it may disturb work of which nothing is known.
UNDISPUTED = "operator"
# Whose mark in the scheduler a node is out by is read back beside its level.
SERVICE, OWNER, OURS = "node.service_level", "node.service_owner_state", 1.0
# Findings about what became of commands, each by control.
FOLLOWED = ("readback", "unanswered", "unread")


def arbitrate(
    engine: Engine, view: EngineView, frame: Frame, records: list[dict[str, Any]]
) -> tuple[list[CommandBatch], list[CommandBatch], dict[str, int]]:
    commands: list[CommandBatch] = []
    advice: list[CommandBatch] = []
    deferred: dict[str, int] = {}
    verdicts: dict[str, int] = {}
    arbiter, now_ns = engine.arbiter, frame.now_ns
    slew_s = min(frame.dt_s, engine.usual_dt_s or frame.dt_s)
    records += settling_records(arbiter, now_ns)
    for key, lease in arbiter.leases.items():
        if lease.n == 0:
            continue
        acting, all_voices = _voices(engine, key)
        barred = engine.windows.mask(lease.control.table)
        if key in arbiter.settling and _may_act(engine, key):
            if key == SERVICE:
                claim(arbiter, key, view.readback(key), view.value(OWNER) == OURS)
            known = _known(view, key, lease.n) & (True if barred is None else ~barred)
            generation = engine.state.tables[lease.control.table].generation
            commands += adopt(arbiter, key, view.readback(key), known, generation, now_ns)
        busy = lease.running().any()
        alarmed = any(f"{kind}/{key}" in engine.findings.active for kind in FOLLOWED)
        _look_after(engine, view, key)
        owed = np.isfinite(lease.lapsed).any()
        if not (all_voices or busy or alarmed or owed or np.isfinite(lease.advised).any()):
            continue
        readback = view.readback(key)
        abandoned = _abandoned(engine, lease, all_voices)
        lapsed = lease.lapse(now_ns, abandoned)
        if len(lapsed):
            records.append(
                {"kind": "lapsed", "control": key, "index": lapsed, "becomes": lease.control.on_expiry}
                | names_of(key, lapsed, engine.site, engine.jobs)
            )
        if busy:
            commands += arbiter.confine(key, now_ns, barred)
        wanted = np.zeros(lease.n, np.bool_)
        if acting or (busy and arbiter.mode_of(key) == "held"):
            done = arbiter.settle(key, acting, readback)
            records += _keep_out(engine, done, readback, barred)
            if spared := _spare(view, done, readback):
                verdicts[f"protected/{key}"] = spared
            held_back = arbiter.limit(done, readback, slew_s, _known(view, key, lease.n))
            if held_back:
                deferred[key] = verdicts[f"deferred/{key}"] = held_back
            for number, lost in sorted(done.narrowed.items()):
                name = f"narrowed/{key}/{acting[number].name}"
                verdicts[name] = verdicts.get(name, 0) + lost
            generation = engine.state.tables[lease.control.table].generation
            commands += arbiter.command(done, readback, generation, now_ns, barred)
            wanted = ~np.isnan(done.value)
        keep = wanted | abandoned if barred is None else wanted | abandoned | barred
        commands += arbiter.withdraw(key, keep, now_ns, slew_s, readback)
        # What keeps its value and is asked for no more may be another's by now: that lease is left to lapse
        left = ~wanted if lease.control.on_expiry == "keep" and arbiter.mode_of(key) != "held" else barred
        if left is not None and barred is not None:
            left = left | barred
        commands += renew_term(arbiter, key, now_ns, left)
        if len(all_voices) > len(acting) or any(v.allowed is not None for v in acting):
            advice += _advice(engine, key, all_voices, readback, barred, now_ns)
        elif np.isfinite(lease.advised).any():
            lease.advised[:] = np.nan
        records += _follow_up(engine, key, view, readback, barred, commands)
    arbiter.fresh_term = False
    records += [command_record("command", c, engine.site, engine.jobs) for c in commands]
    records += [command_record("advice", c, engine.site, engine.jobs) for c in advice]
    records += _verdicts(engine, verdicts)
    return commands, advice, deferred


def _advice(
    engine: Engine, key: str, voices: list[Voiced], readback: F64, barred: Bool | None, now_ns: int
) -> list[CommandBatch]:
    """What would be commanded if all voices might act."""
    arbiter = engine.arbiter
    lease, shadow = arbiter.leases[key], arbiter.settle(key, voices, readback)
    if barred is not None:
        shadow.value[barred] = np.nan
    return [
        CommandBatch(
            key,
            voice.name,
            arbiter.epoch,
            index,
            lease.generation[index],
            np.zeros(len(index), np.int64),
            shadow.value[index],
            voice.proposal.reason,
            now_ns,
            0,
            0,
        )
        for voice, index in arbiter.advise(shadow)
    ]


def _may_act(engine: Engine, key: str) -> bool:
    """Whether any policy may command this control, now or when somebody approves."""
    return any(key in p.controls and engine.intake.authority[p.name] in ("act", "approve")
               for p in engine.policies)  # fmt: skip


def _keep_out(engine: Engine, done: Settlement, readback: F64, barred: Bool | None) -> list[dict[str, Any]]:
    """Nothing is wanted where people work; what would have protected is told once per window."""
    if barred is None or not np.isfinite(done.value[barred]).any():
        return []
    records = engine.windows.kept_back(done.control.key, engine.arbiter.protects(done, readback))
    done.value[barred] = np.nan
    return records


def _spare(view: EngineView, done: Settlement, readback: F64) -> int:
    """Hold back what would disturb protected nodes, unless an operator asked for it; returns on how many.

    Isolating a rack is no matter of scheduling and is not held back.
    """
    control = done.control
    if not control.disruptive or control.table != "node" or not done.voices:
        return 0
    commanded = view.commanded(control.key)
    stands = np.where(np.isnan(commanded), readback, commanded)
    worse = (done.value > np.nan_to_num(stands)) & view.protected_nodes()
    if not worse.any():
        return 0
    for voice in done.voices:
        if voice.name == UNDISPUTED:
            p = voice.proposal
            asked = np.fmax(p.lo, p.want) >= done.value[p.index]
            worse[p.index[asked if voice.allowed is None else asked & voice.allowed]] = False
    done.value[worse] = commanded[worse]
    return int(np.count_nonzero(worse))


def _verdicts(engine: Engine, verdicts: dict[str, int]) -> list[dict[str, Any]]:
    """Journal bodies of the verdicts that differ from those in force."""
    why = {
        "narrowed": "a stronger proposal or the envelope left no room",
        "deferred": "blast radius",
        "protected": "nobody knows what runs on these nodes; an operator may ask for it",
    }
    records: list[dict[str, Any]] = []
    for name in sorted({**engine.arbiter.verdicts, **verdicts}):
        count = verdicts.get(name, 0)
        if count != engine.arbiter.verdicts.get(name, 0):
            kind, control, *policy = name.split("/")
            body = {"kind": kind, "control": control, "count": count, "why": why[kind]}
            records.append(body | ({"policy": policy[0]} if policy else {}))
    engine.arbiter.verdicts = verdicts
    return records


def _voices(engine: Engine, key: str) -> tuple[list[Voiced], list[Voiced]]:
    """(voices that may act, all voices) on a control, strongest first."""
    acting: list[Voiced] = []
    every: list[Voiced] = []
    for number, policy in enumerate(engine.policies):
        for p in engine.in_force[policy.name]:
            if p.control != key or len(p.index) == 0:
                continue
            every.append(Voiced(number, policy.name, p, None))
            authority = engine.intake.authority[policy.name]
            if authority == "act":
                acting.append(Voiced(number, policy.name, p, None))
            elif authority == "approve":
                allowed = _approved(engine, policy.name, p)
                if allowed is not None:
                    acting.append(Voiced(number, policy.name, p, allowed))
    return acting, every


def _approved(engine: Engine, policy: str, p: Proposal) -> Bool | None:
    allowed = np.zeros(len(p.index), np.bool_)
    table = p.control.partition(".")[0]
    for approval in engine.intake.approvals.values():
        if approval.policy == policy and approval.control == p.control:
            if not approval.names:
                return np.ones(len(p.index), np.bool_)
            named = [i for n in approval.names if (i := engine.site.entity(table, n)) is not None]
            allowed |= np.isin(p.index, named)
    return allowed if allowed.any() else None


def _follow_up(
    engine: Engine,
    key: str,
    view: EngineView,
    readback: F64,
    barred: Bool | None,
    commands: list[CommandBatch],
) -> list[dict[str, Any]]:
    """Overdue commands, and read-backs that differ or do not come; nothing of it where people work."""
    records: list[dict[str, Any]] = []
    lease, findings, now_ns = engine.arbiter.leases[key], engine.findings, view.now_ns
    control = lease.control
    if not lease.running().any():
        return [r for kind in FOLLOWED for r in findings.clear(f"{kind}/{key}")]
    again, lost = engine.arbiter.resend(key, now_ns, barred)
    if again is not None:
        commands.append(again)
    if len(lost):
        records.append(
            {"kind": "failed", "control": key, "index": lost, "why": "no answer after repeated sending"}
            | names_of(key, lost, engine.site, engine.jobs)
        )
    silent = _outside(lease.unanswered(), barred)
    records += findings.unanswered(_shown(engine, control.table, silent), key, silent)
    if control.readback is not None:
        signal = find_signal(f"{control.table}.{control.readback}")
        assert signal is not None  # a control's read-back is of the catalogue
        heard_ns = _heard_ns(view, key, lease.n)
        tolerance = max(engine.site.envelopes[key].deadband, 1e-6)
        off = _outside(lease.compare(readback, heard_ns, tolerance, now_ns), barred)
        if barred is not None:
            lease.differs_ns[barred] = 0
        evidence = ""
        if len(off):
            first, (name,) = int(off[0]), _shown(engine, control.table, off[:1])
            evidence = f"{name}: commanded {lease.value[first]:g}, reads {readback[first]:g}"
        records += findings.mismatches(_shown(engine, control.table, off), key, off, evidence)
        period_s = float(engine.state.tables[control.table].period_s[signal.row])
        wait_s = STALE_PERIODS * period_s + MISMATCH_S
        resumed_ns = int(engine.state.tables[control.table].resumed_ns[0])
        unread = _outside(lease.unread(heard_ns, wait_s, now_ns, resumed_ns), barred)
        records += findings.unread(_shown(engine, control.table, unread), key, unread, wait_s)
    return records


def _look_after(engine: Engine, view: EngineView, key: str) -> None:
    """Whether what was given back has arrived, and what is out of service is still so by our mark."""
    lease, envelope = engine.arbiter.leases[key], engine.site.envelopes[key]
    if np.isfinite(lease.given).any():
        tolerance = max(envelope.deadband, 1e-6)
        lease.kept(view.readback(key), _heard_ns(view, key, lease.n), envelope.safe, tolerance, view.now_ns)
    if key == SERVICE and np.isfinite(lease.lapsed).any():
        marked = np.isfinite(lease.lapsed) & (view.quality(OWNER) == GOOD) & (view.value(OWNER) != OURS)
        lease.no_longer_ours(np.flatnonzero(marked).astype(np.int32))


def _heard_ns(view: EngineView, key: str, n: int) -> I64:
    """When the read-back of a control was last heard [n]; long ago where it has none."""
    control = find_control(key)
    if control is None or control.readback is None:
        return np.zeros(n, np.int64)
    age_ns = np.minimum(view.age_s(f"{control.table}.{control.readback}") * NS, 2**62)
    heard_ns: I64 = view.now_ns - age_ns.astype(np.int64)
    return heard_ns


def _shown(engine: Engine, table: str, index: I32) -> tuple[str, ...]:
    return shown(engine.site, engine.jobs, table, index[:SHOWN_ENTITIES])


def _outside(index: I32, barred: Bool | None) -> I32:
    return index if barred is None else index[~barred[index]]


def _known(view: EngineView, key: str, n: int) -> Bool:
    """Where the read-back of a control is current [n]."""
    control = find_control(key)
    if control is None or control.readback is None:
        return np.zeros(n, np.bool_)
    good: Bool = view.quality(f"{control.table}.{control.readback}") == GOOD
    return good


def _abandoned(engine: Engine, lease: Leases, voices: list[Voiced]) -> Bool:
    """Where a lease is not given back but left to lapse [n].

    Its owner is suspended; or its owner may act no longer and still asks for it, so that to give it back
    would be to raise what somebody wants held down.
    """
    suspended = [i for i, p in enumerate(engine.policies) if p.name in engine.suspended]
    out = np.isin(lease.owner, suspended)
    for voice in voices:
        if engine.intake.authority[voice.name] != "act":
            index = voice.proposal.index
            out[index[lease.owner[index] == voice.policy]] = True
    return out
