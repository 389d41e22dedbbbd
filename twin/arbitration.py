"""Arbitration: one pass over all controls, from proposals to commands and advice, and after old commands.

The rules are the arbiter's and the leases'; here is the order in which they are applied in a tick. May
import the core; called by the engine only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from twin.arbiter import Voiced
from twin.contracts import CommandBatch, Finding, Proposal
from twin.frame import F64, I32, NS, Bool, Frame
from twin.leases import Leases
from twin.records import command_record
from twin.signals import find_control
from twin.state import GOOD
from twin.view import EngineView

if TYPE_CHECKING:
    from twin.engine import Engine


def arbitrate(
    engine: Engine, view: EngineView, frame: Frame, records: list[dict[str, Any]]
) -> tuple[list[CommandBatch], list[CommandBatch], dict[str, int]]:
    commands: list[CommandBatch] = []
    advice: list[CommandBatch] = []
    deferred: dict[str, int] = {}
    verdicts: dict[str, int] = {}
    slew_s = min(frame.dt_s, engine.usual_dt_s or frame.dt_s)
    for key, lease in engine.arbiter.leases.items():
        if lease.n == 0:
            continue
        acting, all_voices = _voices(engine, key)
        busy = lease.running().any()
        alarmed = f"readback/{key}" in engine.findings.active
        owed = np.isfinite(lease.lapsed).any()
        if not (all_voices or busy or alarmed or owed or np.isfinite(lease.advised).any()):
            continue
        readback = view.readback(key)
        abandoned = _abandoned(engine, lease, all_voices)
        lapsed = lease.lapse(frame.now_ns, abandoned)
        if len(lapsed):
            records.append(
                {"kind": "lapsed", "control": key, "index": lapsed, "becomes": lease.control.on_expiry}
            )
        wanted = np.zeros(lease.n, np.bool_)
        if acting or (busy and engine.arbiter.mode == "held"):
            done = engine.arbiter.settle(key, acting, readback)
            held_back = engine.arbiter.limit(done, readback, slew_s, _known(view, key, lease.n))
            if held_back:
                deferred[key] = verdicts[f"deferred/{key}"] = held_back
            for number, lost in sorted(done.narrowed.items()):
                name = f"narrowed/{key}/{acting[number].name}"
                verdicts[name] = verdicts.get(name, 0) + lost
            generation = engine.state.tables[lease.control.table].generation
            commands += engine.arbiter.command(done, readback, generation, frame.now_ns)
            wanted = ~np.isnan(done.value)
        commands += engine.arbiter.withdraw(key, wanted | abandoned, frame.now_ns, slew_s, readback)
        if len(all_voices) > len(acting) or any(v.allowed is not None for v in acting):
            shadow = engine.arbiter.settle(key, all_voices, readback)
            for voice, index in engine.arbiter.advise(shadow):
                advice.append(
                    CommandBatch(
                        key,
                        voice.name,
                        engine.arbiter.epoch,
                        index,
                        lease.generation[index],
                        np.zeros(len(index), np.int64),
                        shadow.value[index],
                        voice.proposal.reason,
                        frame.now_ns,
                        0,
                        0,
                    )
                )
        elif np.isfinite(lease.advised).any():
            lease.advised[:] = np.nan
        records += _follow_up(engine, key, view, readback, frame.now_ns, commands)
    records += [command_record("command", c, engine.site) for c in commands]
    records += [command_record("advice", c, engine.site) for c in advice]
    records += _verdicts(engine, verdicts)
    return commands, advice, deferred


def _verdicts(engine: Engine, verdicts: dict[str, int]) -> list[dict[str, Any]]:
    """Journal bodies of the verdicts that differ from those in force."""
    why = {"narrowed": "a stronger proposal or the envelope left no room", "deferred": "blast radius"}
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
    engine: Engine, key: str, view: EngineView, readback: F64, now_ns: int, commands: list[CommandBatch]
) -> list[dict[str, Any]]:
    """Overdue commands, and read-backs that differ."""
    records: list[dict[str, Any]] = []
    lease = engine.arbiter.leases[key]
    control = lease.control
    if not lease.running().any():
        return engine.findings.clear(f"readback/{key}") + engine.findings.clear(f"unanswered/{key}")
    again, lost = engine.arbiter.resend(key, now_ns)
    if again is not None:
        commands.append(again)
    if len(lost):
        records.append(
            {"kind": "failed", "control": key, "index": lost, "why": "no answer after repeated sending"}
        )
    records += _unanswered(engine, key, lease.unanswered())
    if control.readback is not None:
        heard_ns = now_ns - np.minimum(view.age_s(f"{control.table}.{control.readback}") * NS, 2**62).astype(
            np.int64
        )
        tolerance = max(engine.site.envelopes[key].deadband, 1e-6)
        off = lease.compare(readback, heard_ns, tolerance, now_ns)
        evidence = ""
        if len(off):
            first = int(off[0])
            name = engine.site.name(control.table, first)
            evidence = f"{name}: commanded {lease.value[first]:g}, reads {readback[first]:g}"
        records += engine.findings.mismatches(engine.site, key, off, evidence)
    return records


def _unanswered(engine: Engine, key: str, index: I32) -> list[dict[str, Any]]:
    """Devices that never answered, or refused, until the command was given up."""
    if len(index) == 0:
        return engine.findings.clear(f"unanswered/{key}")
    table = key.partition(".")[0]
    return engine.findings.raise_(
        Finding(
            f"unanswered/{key}",
            "critical",
            f"{len(index)} {table} did not carry out {key}",
            tuple(engine.site.name(table, int(i)) for i in index[:8]),
            ("refused, or no answer, after repeated sending",),
            1.0,
            "Look at the agents of these devices; their leases go on being renewed.",
            len(index),
        )
    )


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
