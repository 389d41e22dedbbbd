"""Explanation of `idle_power`: needed and ready GPUs, sleeping nodes, savings, and obstacles to sleep."""

from __future__ import annotations

import numpy as np

from policies.idle_power.account import account_of, expected_w
from policies.idle_power.breakers import SAFE_PU
from policies.idle_power.nodes import PHASES, SLEEPING
from policies.idle_power.readiness import Readiness
from twin.catalogue import NS
from twin.contracts import (
    ExplainRequest,
    Explanation,
    FigureMetric,
    KeyFigure,
    Memory,
    Sentence,
    TableColumn,
    Value,
    View,
    finite,
    in_scope,
    scope_of,
    table_of,
)

MAX_ROWS = 200
NAME = "idle_power"
COLUMNS = (
    TableColumn("node"),
    TableColumn("phase"),
    TableColumn("since_s", "s", "for"),
    TableColumn("idle_w", "W", "idle draw"),
    TableColumn("saved_w", "W", "expected saving"),
)


def explanation(view: View, memory: Memory, request: ExplainRequest, outlook: Readiness) -> Explanation:
    """The explanation of the site, or of the nodes of one entity."""
    entity, inside = scope_of(view, request)
    moved = np.flatnonzero(memory["phase"] > 0).astype(np.int32)
    at, saved_w, count = in_scope(inside, "node", moved), expected_w(view, memory), account_of(memory)
    rows: list[dict[str, Value]] = [
        {
            "node": view.site.name("node", node),
            "phase": PHASES[int(memory["phase"][node])],
            "since_s": (view.now_ns - int(memory["phase_ns"][node])) / NS,
            "idle_w": finite(float(memory["idle_w"][node])),
            "saved_w": float(saved_w[node]),
        }
        for node in at[:MAX_ROWS].tolist()
    ]
    figures = (
        KeyFigure("sleeping_nodes", count["sleeping"], "count", "nodes asleep", _metric("sleeping_nodes")),
        KeyFigure("needed_gpus", finite(outlook.need), "count", "idle GPUs that have to be ready"),
        KeyFigure("ready_gpus", outlook.ready, "count", "idle GPUs that are ready or waking"),
        KeyFigure("saving_w", float(saved_w.sum()), "W", "expected saving now", _metric("saving_w")),
        KeyFigure("expected_kwh", count["expected_kwh"], "kWh", "expected so far", _metric("expected_kwh")),
        KeyFigure("saved_kwh", count["saved_kwh"], "kWh", "saved so far", _metric("saved_kwh")),
        KeyFigure("starts_kwh", count["starts_kwh"], "kWh", "of which starts cost"),
        KeyFigure("rises", count["rises"], "count", "rises of demand since the first look"),
        KeyFigure("late", count["late"], "count", "of these, rises that found too few nodes awake"),
    )
    return Explanation(
        policy=NAME,
        now_ns=view.now_ns,
        entity=entity,
        sentences=tuple(_sentences(memory, outlook)),
        figures=figures,
        tables=(table_of("nodes", COLUMNS, rows, "nodes that sleep, fall asleep or wake", len(at)),),
    )


def _metric(name: str) -> FigureMetric:
    return FigureMetric(f"{NAME}_{name}")


def _sentences(memory: Memory, outlook: Readiness) -> list[Sentence]:
    state, out = outlook.state, list[Sentence]()
    asleep = int(np.count_nonzero(memory["phase"] == SLEEPING))
    if state.known and state.forecast:
        out.append(
            Sentence(
                f"{asleep} nodes sleep; {outlook.need:.0f} idle GPUs have to be ready and "
                f"{outlook.ready:.0f} are: {state.running:.0f} run, {state.pending:.0f} are pending, the "
                f"forecast's upper end within {outlook.lead_s / 60.0:.0f} min is {state.band:.0f}, the "
                f"reserve beyond it {state.reserve:.0f}, for failures {outlook.failures:.0f}"
            )
        )
    else:
        out.append(Sentence(f"{asleep} nodes sleep; demand or its forecast is unknown"))
    if outlook.hold:
        out.append(Sentence(f"no more nodes go to sleep: {outlook.hold}", "note"))
    if asleep and state.known and outlook.need > outlook.ready:
        out.append(
            Sentence(
                "nodes are missing: limits of racks, feeders, breakers or CDUs, or starts, take time",
                "warning",
            )
        )
    hot = int(np.count_nonzero(memory["theta"] >= SAFE_PU))
    if hot:
        share = f"at {SAFE_PU:.0%} of its trip or more"
        text = f"{hot} feeders have a breaker {share}: no node below starts until it cools"
        out.append(Sentence(text, "warning"))
    if memory["slept_s"][0] and not memory["measured_s"][0]:
        out.append(Sentence("no node's meter reports while it sleeps: savings are estimates", "note"))
    return out
