"""Responses: the commands inside the entities of an alarm that answer it, as a sentence for each policy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from twin.api.health import DRAIN_FIRST, DRAINED, SERVICE, drained
from twin.api.runtime import Runtime
from twin.api.scopes import is_below
from twin.catalogue import (
    INSTANTS,
    NS,
    Control,
    clean,
    control_value,
    control_words,
    counted,
    find_signal,
    plain_text,
    quantity,
)
from twin.contracts import ExplanationRefused, Proposal, below, drained_words, entities_within
from twin.report import few

MOST_ENTITIES = 8  # of an alarm that are looked into
MOST_ALARMS = 12
MOST_LINES = 2  # of one alarm
BEFORE_NS = 15 * NS  # a guard may act on what an alarm is raised for later. source: estimate
# A command on less of what is inside an alarm, or with less of itself on the devices that it names, is about
# something else. source: estimate
LEAST_SHARE = 0.03
_PLACE = re.compile(r"[^\s:;,()]+/[^\s:;,()]+")


def with_responses(live: Runtime, alarms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same alarms, the first ones with `doing`: the present commands of racktwin there."""
    running = {}
    for key, lease in live.engine.arbiter.leases.items():
        index = np.flatnonzero(lease.running())
        if len(index):
            running[key] = index
    authority = live.engine.intake.authority
    waiting = [p.name for p in live.engine.policies if authority[p.name] == "approve"]
    return [
        a | {"doing": (_doing(live, a, running) + _waits(live, a, waiting))[:MOST_LINES]} | _left(live, a)
        if i < MOST_ALARMS and a.get("state") != "cleared"
        else a
        for i, a in enumerate(alarms)
    ]


def _left(live: Runtime, alarm: dict[str, Any]) -> dict[str, str]:
    """Return the remaining action for people if the nodes of an alarm are drained."""
    if not str(alarm.get("action", "")).lower().startswith(DRAIN_FIRST):
        return {}
    nodes = _inside(live, alarm).get("node", np.zeros(0, np.int32))
    if not len(nodes) or not drained(live)[nodes].all():
        return {}
    name = live.engine.site.name("node", int(nodes[0])) if len(nodes) == 1 else "NODE"
    words = drained_words(name)
    return {"action": f"{words[0].upper()}{words[1:]}"}


def _inside(live: Runtime, alarm: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the entities by table inside those of an alarm; of a long list, the first ones."""
    out: dict[str, np.ndarray] = {}
    view, (kind, _, key) = live.engine.view(), str(alarm.get("id")).rpartition("/")[0].partition("/")
    level = live.engine.findings.beyond.get(key) if kind == "beyond" else None
    if level is not None:  # all that are beyond a bound, of which it names a few
        index = np.flatnonzero(level).astype(np.int32)
        return dict(below(live.engine.site, key.partition(".")[0], index))
    for name in list(alarm.get("entities", ()))[:MOST_ENTITIES]:
        try:
            _, _, inside = entities_within(view, str(name).partition("#")[0])
        except ExplanationRefused:
            continue
        for table, index in inside.items():
            out[table] = np.union1d(out.get(table, index), index)
    if out.keys() == {"gpu"}:  # what is done about a GPU is done to its node
        out["node"] = np.unique(live.engine.site.node_of_gpu[out["gpu"]])
    return out


def _doing(live: Runtime, alarm: dict[str, Any], running: dict[str, np.ndarray]) -> list[str]:
    """Return the commands that name the alarm as their reason; if none does, all commands since it began."""
    inside = _inside(live, alarm) if running else {}
    because: list[tuple[int, str]] = []
    since: list[tuple[int, str]] = []
    for key, index in running.items():
        table = live.engine.arbiter.leases[key].control.table
        here = index[np.isin(index, inside.get(table, np.zeros(0, np.int32)))]
        if len(here):
            named = _because(live, alarm, key, here)
            because += named
            since += [] if named else _since(live, alarm, key, index, here, inside)
    return [text for _, text in sorted(because or since, key=lambda x: -x[0])]


def _because(live: Runtime, alarm: dict[str, Any], key: str, here: np.ndarray) -> list[tuple[int, str]]:
    """Return (devices, sentence) of each policy that may act and whose reason in force names the alarm."""
    out = []
    for policy in live.engine.policies:
        if live.engine.intake.authority[policy.name] not in ("act", "approve"):
            continue
        found = [
            p
            for p in live.engine.in_force.get(policy.name, ())
            if p.control == key and _names_it(live, alarm, p)
        ]
        mine = here[np.isin(here, np.concatenate([p.index for p in found]))] if found else here[:0]
        if len(mine):
            reason = clean(plain_text(found[0].reason), 160)
            out.append((len(mine), f"{_holding(live, policy.name, key, mine, alarm)}: {reason}"))
    return out


def _since(
    live: Runtime,
    alarm: dict[str, Any],
    key: str,
    index: np.ndarray,
    here: np.ndarray,
    inside: dict[str, np.ndarray],
) -> list[tuple[int, str]]:
    """Return (devices, sentence) of each policy whose commands there began with the alarm or later."""
    lease, out = live.engine.arbiter.leases[key], []
    devices = inside.keys() <= {"node", "gpu", "job"}
    for owner in np.unique(lease.owner[here]).tolist():
        mine = here[lease.owner[here] == owner]
        of = np.count_nonzero(lease.owner[index] == owner) if devices else len(inside[lease.control.table])
        mine = mine[lease.begun_ns[mine] >= int(alarm.get("raised_ns") or 0) - BEFORE_NS]
        if len(mine) and len(mine) >= LEAST_SHARE * of:
            policies = live.engine.policies
            policy = policies[owner].name if 0 <= owner < len(policies) else "an earlier run"
            out.append((len(mine), _holding(live, policy, key, mine, alarm)))
    return out


def _holding(live: Runtime, policy: str, key: str, mine: np.ndarray, alarm: dict[str, Any]) -> str:
    """Return a policy's commands on these devices, in words."""
    lease, count = live.engine.arbiter.leases[key], counted(key, len(mine))
    if int(alarm.get("count") or 0) > len(mine) >= len(alarm.get("entities", ())) > 1:
        count += " of those named first"
    if key == SERVICE and (lease.value[mine] >= DRAINED).all():
        names = [live.engine.site.name("node", i) for i in mine[:MOST_ENTITIES].tolist()]
        repair = " (needs repair)" if (lease.value[mine] > DRAINED).all() else ""
        return f"{policy} keeps {few(names, len(mine))} out of service{repair}"
    if key in INSTANTS:
        return f"{policy} asks for a {control_words(key)} of {count}"
    return f"{policy} holds the {control_words(key)} of {count} at {_value(lease.control, lease.value[mine])}"


def _names_it(live: Runtime, alarm: dict[str, Any], proposal: Proposal) -> bool:
    """Return True if the reason of a proposal names a place of the alarm, one near it, or its signal."""
    head = f"{live.engine.site.file.site}/"
    entities = [str(e).partition("#")[0] for e in alarm.get("entities", ())]
    entities += [e.removeprefix(head).partition("/")[2] for e in entities]
    signals = [part for part in str(alarm.get("id")).split("/") if find_signal(part) is not None]
    if any(signal in proposal.reason for signal in signals):
        return True
    places = _PLACE.findall(proposal.reason)
    return any(is_below(e, place) or is_below(place, e) for e in entities if e for place in places)


def _waits(live: Runtime, alarm: dict[str, Any], waiting: list[str]) -> list[str]:
    inside, out = _inside(live, alarm) if waiting else {}, []
    for name in waiting:
        for p in live.engine.in_force[name]:
            members = inside.get(p.control.partition(".")[0], np.zeros(0, np.int32))
            count = int(np.isin(p.index, members).sum())
            if count:
                what = f"{control_words(p.control)} of {counted(p.control, count)}"
                why = clean(plain_text(p.reason), 160)
                out.append(f"{name} waits for approval to set the {what}: {why}")
    return out


def _value(control: Control, values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    if control.key in INSTANTS or control.states:
        return control_value(low, control.key)
    shown = quantity(low, control.unit)
    return shown if low == high else f"{shown} to {quantity(high, control.unit)}"
