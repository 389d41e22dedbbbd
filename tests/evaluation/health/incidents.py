"""Incidents of health: alarms of health as operators hear them, each once, and those that nothing justifies.

An incident is justified by a failure of its node that lasts, comes within a week or was over for less than an
hour; by a lemon; or by what its device truly states. All of it is simulated. Part of the shell; pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.evaluation.health.alarms import SETTLE_S, WITHIN_S
from tests.evaluation.health.course import Course
from tests.evaluation.health.intervals import rate_interval
from tests.evaluation.incidents import OpenIncidents
from twin.contracts import DEGRADED, Finding
from twin.engine import Engine
from twin.site import Site

FORECAST = "forecast"
# The true state of the plant: a row waits for a reset, a supply gives nothing, the hardware has slowed a GPU
STATES = ("row_remap_pending", "psu", "thermal_slowdown")
MOST = 200_000


class HealthIncident(NamedTuple):
    """An alarm that begins. `kind` is its rule, or lemon, wear, forecast, shared; `node` -1: of no node."""

    kind: str
    node: int
    begin_s: float
    severity: str
    again: bool = False  # it was over, and goes on


class IncidentLog:
    """Looks on at the findings of health and keeps each alarm as it begins; severity info is none."""

    def __init__(self) -> None:
        self.incidents: list[HealthIncident] = []
        self._open = OpenIncidents()

    def look(self, engine: Engine, found: Sequence[Finding], now_s: float) -> None:
        """After a round."""
        active = {f.id: f for f in found if f.severity != "info"}
        for finding, again in self._open.look(active, engine.state.now_ns):
            if len(self.incidents) < MOST:
                kind, node = _kind(engine, finding)
                self.incidents.append(HealthIncident(kind, node, now_s, finding.severity, again))


def _kind(engine: Engine, finding: Finding) -> tuple[str, int]:
    """(what an alarm of health rests on, its node)."""
    site, parts = engine.site, finding.id.split("/", 2)
    node = site.entity("node", finding.id.removeprefix("health/"))
    if node is not None:
        return _rule(engine, node), node
    name = finding.entities[0] if finding.entities else ""
    if parts[1] == "link" and (link := site.entity("link", name)) is not None:
        return _gravest(engine, "link", link, link + 1) or "link", int(site.node_of_link[link])
    return parts[1], _owner(site, name)


def _owner(site: Site, name: str) -> int:
    """The node of a node or GPU; -1: of none."""
    if (node := site.entity("node", name)) is not None:
        return node
    gpu = site.entity("gpu", name)
    return -1 if gpu is None else int(site.node_of_gpu[gpu])


def _rule(engine: Engine, node: int) -> str:
    """The gravest rule against a node or a GPU of its."""
    first, last = engine.site.gpu_start_of_node[node : node + 2].tolist()
    return _gravest(engine, "node", node, node + 1) or _gravest(engine, "gpu", first, last) or FORECAST


def _gravest(engine: Engine, part: str, first: int, last: int) -> str:
    """The gravest rule against some of these parts; "" for none."""
    index = np.arange(first, last, dtype=np.int32)
    told = engine.health.verdicts.rules_of(part, index, DEGRADED).values()
    return max((said for some in told for said in some), default=(0, 0.0, ""))[2]


def justified(course: Course, incident: HealthIncident) -> bool:
    """Return True if something truly is wrong, or soon will be."""
    if incident.kind in STATES or incident.node in course.lemons or incident.kind == "shared":
        return True
    return any(
        f.node == incident.node and f.begin_s - WITHIN_S <= incident.begin_s <= f.end_s + SETTLE_S
        for f in course.failures
    )


def by_kind(courses: Sequence[Course], node_months: float) -> list[dict[str, Any]]:
    """Incidents of each kind after the training days, and those that nothing justifies per node-month."""
    begun, every, false = Counter[str](), Counter[str](), Counter[str]()
    for course in courses:
        for incident in course.incidents:
            if incident.begin_s < course.train_s:
                continue
            begun[incident.kind] += 1
            if not incident.again:
                every[incident.kind] += 1
                false[incident.kind] += not justified(course, incident)
    out = []
    for kind, count in [("all", every.total()), *every.most_common()]:
        alarms = begun.total() if kind == "all" else begun[kind]
        unjustified = false.total() if kind == "all" else false[kind]
        low, high = rate_interval(unjustified, node_months)
        out.append({"kind": kind, "alarms": alarms, "incidents": count, "unjustified": unjustified,
                    "per_node_month": unjustified / node_months if node_months else float("nan"),
                    "low": low, "high": high})  # fmt: skip
    return sorted(out, key=lambda row: (row["kind"] != "all", -row["unjustified"], -row["incidents"]))
