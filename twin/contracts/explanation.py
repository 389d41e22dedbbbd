"""Explanation: the account that a policy gives of its proposals, as data that any interface can render.

An explanation holds sentences, figures (named numbers with a unit), tables and curves. HTTP, the terminal,
the control room, metrics and reports render it without knowing the policy. A policy makes it from the numbers
that its proposals were made from, so that an explanation never differs from the decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from twin.catalogue import (
    F64,
    I32,
    I64,
    INSTANTS,
    NS,
    TABLES,
    U8,
    Control,
    TwinError,
    clean,
    control_value,
    find_control,
)
from twin.contracts.contracts import Memory, Policy, Proposal, View
from twin.contracts.maintenance import below
from twin.site import Site

Value = str | int | float | bool | None
MAX_REASON = 300  # characters of a reason in a table
MAX_PROPOSALS_SHOWN = 200
HOLDERS = ("rack", "node", "gpu", "feeder", "cdu", "loop", "hall", "site")  # where a name is looked up first
LEASE_STATES = ("", "sent", "accepted", "under way", "done", "failed", "expired")  # by `LeaseColumns.state`


class ExplanationRefused(TwinError):
    """A policy cannot answer this request: the name is unknown, an option is invalid, or nothing is there."""

    def __init__(self, why: str, kind: Literal["unknown", "invalid", "impossible"] = "invalid") -> None:
        super().__init__(why)
        self.kind = kind


class FigureMetric(msgspec.Struct, frozen=True):
    """The series that a figure is exported as: `racktwin_NAME`, with `_total` behind a counter's."""

    name: str
    kind: Literal["gauge", "counter"] = "gauge"
    labels: dict[str, str] = {}


class KeyFigure(msgspec.Struct, frozen=True):
    """A named number with its unit. `text` says in a few words what it is; without it, it is for programs."""

    name: str
    value: Value
    unit: str = ""
    text: str = ""
    metric: FigureMetric | None = None


class TableColumn(msgspec.Struct, frozen=True):
    """A column of a table. Numbers are in `unit`; `text` is the heading, the name by default.

    One marked `detail` is for programs: people are not shown it.
    """

    name: str
    unit: str = ""
    text: str = ""
    detail: bool = False


class DataTable(msgspec.Struct, frozen=True):
    """Rows under named columns. `total` counts all rows where only the first are given.

    A table named `a.b` details table `a`: its first column holds the first column of the row it belongs to.
    """

    name: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[Value, ...], ...]
    text: str = ""
    total: int | None = None


class DataCurve(msgspec.Struct, frozen=True):
    """Points of one quantity over another, x ascending."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    x_unit: str = ""
    y_unit: str = ""
    text: str = ""


class Sentence(msgspec.Struct, frozen=True):
    """One sentence: the summary, a note (what is missing or assumed), or a warning."""

    text: str
    kind: Literal["summary", "note", "warning"] = "summary"


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The account that a policy gives of the site, or of one entity, at one instant."""

    policy: str
    now_ns: int
    entity: str = ""  # full name; "" is the site
    topic: str = ""
    authority: str = ""  # of the policy; filled in by the engine
    suspended: bool = False
    # It advises: the tables `preview` and `preview_feeders` show what would be, the others what is
    preview: bool = False
    sentences: tuple[Sentence, ...] = ()
    figures: tuple[KeyFigure, ...] = ()
    tables: tuple[DataTable, ...] = ()
    curves: tuple[DataCurve, ...] = ()

    def figure(self, name: str) -> Value:
        """The value of a figure; None where there is none of this name."""
        return next((f.value for f in self.figures if f.name == name), None)

    def table(self, name: str) -> list[dict[str, Value]]:
        """The rows of a table by column name; empty where there is none of this name."""
        found = next((t for t in self.tables if t.name == name), None)
        return [] if found is None else [as_row(found, row) for row in found.rows]

    def shortened(self, rows: int, figures: int) -> Explanation:
        """The explanation as people read it at a glance: the first rows and figures, no columns of detail."""
        tables = []
        for table in self.tables:
            kept = [i for i, c in enumerate(table.columns) if not c.detail]
            if kept and table.rows:
                short = tuple(tuple(row[i] for i in kept) for row in table.rows[:rows])
                total = table.total if table.total is not None else len(table.rows)
                columns = tuple(table.columns[i] for i in kept)
                tables.append(DataTable(table.name, columns, short, table.text, total))
        few = [f for f in self.figures if f.text and not (f.metric and f.metric.labels)]
        return msgspec.structs.replace(self, figures=tuple(few[:figures]), tables=tuple(tables), curves=())


@dataclass(frozen=True, slots=True)
class TopicOption:
    """An option of a topic, as it stands in a query or behind `--set`."""

    name: str
    text: str
    kind: Literal["string", "number", "integer"] = "string"
    default: Value = None
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class Topic:
    """One question that a policy answers beside its main explanation.

    `path`: also served as `GET /api/v1/PATH`, flattened. The topics `metrics` and `page`, where declared,
    replace the main explanation on `/metrics` and on the overview of the control room.
    """

    name: str
    text: str
    options: tuple[TopicOption, ...] = ()
    path: str = ""


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """A policy as it stands now: what it may do, and the proposals in force."""

    name: str
    authority: str
    suspended: bool
    proposals: tuple[Proposal, ...]


@dataclass(frozen=True, slots=True)
class LeaseColumns:
    """The leases of one control [n]: `value` NaN where none runs; `owner` is a policy's index, -1 unknown."""

    value: F64
    owner: I32
    state: U8
    begun_ns: I64
    changed_ns: I64
    expires_ns: I64


@dataclass(frozen=True, slots=True)
class RecordedSeries:
    """Recorded values of one signal: `value` [n_slot, n] is the highest of each slot, NaN unknown."""

    t_ns: I64
    value: F64
    step_s: float


@dataclass(frozen=True, slots=True)
class SeriesWanted:
    """Recorded values that an explanation needs."""

    signal: str
    index: I32
    days: float


def _no_leases(control: str) -> LeaseColumns | None:  # noqa: ARG001
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRequest:
    """The request to explain, and what surrounds the view: policies in order of rank, leases, the daemon."""

    entity: str = ""
    topic: str = ""
    options: Mapping[str, Value] = field(default_factory=dict)
    policies: tuple[PolicyStatus, ...] = ()
    leases: Callable[[str], LeaseColumns | None] = _no_leases
    budget_at: Callable[[int], F64] | None = None  # instant -> budget per feeder, as known now
    role: str = "leader"
    account: Any = None  # what `account()` of the policy made
    series: RecordedSeries | None = None
    series_note: str = ""  # why `series` is missing or shorter than wanted

    def status(self, name: str) -> PolicyStatus:
        """A policy as it stands now; one that does not run proposes nothing and may do nothing."""
        return next((p for p in self.policies if p.name == name), PolicyStatus(name, "off", False, ()))


@runtime_checkable
class Explainer(Protocol):
    """A policy that explains itself. `topics` is optional, as `account` and `series_wanted` are.

    `explain` may return a function in place of the explanation: slow work on what it has already taken from
    the view, which the daemon runs beside its loop.
    """

    def explain(
        self, view: View, memory: Memory, request: ExplainRequest
    ) -> Explanation | Callable[[], Explanation]:
        """The explanation that a request asks for. Pure. Raises ExplanationRefused."""
        ...


class PolicyAccount(Protocol):
    """A running account that a policy keeps for its explanations, beside the decisions.

    The daemon makes one with the policy's `account(previous)`, shows it the site every few seconds and keeps
    it in a file of its own, `NAME.json`, so that it survives a restart. `previous` is the account of a policy
    of the same name before a reload, None at first.
    """

    name: str
    problem: str  # why the file could not be read or written; "" is fine

    def observe(self, view: View, request: ExplainRequest) -> None:
        """Count what passed since the last call. A role other than `leader` counts no effects."""
        ...

    def dump(self) -> dict[str, Any]:
        """All of it as plain data."""
        ...

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over what `dump` gave. Raises ValueError, KeyError or TypeError for anything else."""
        ...


# The engine answers it with nothing while the policy proposes nothing; `explain` may ignore the topic.
PAGE = Topic("page", "Its part of the overview: its explanation; empty while it proposes nothing.")


def finite(value: Any, digits: int | None = None) -> float | None:
    """A number for a figure or a cell; None where it is not finite."""
    number = float(value)
    if not math.isfinite(number):
        return None
    return number if digits is None else round(number, digits)


def as_row(table: DataTable, row: Sequence[Value]) -> dict[str, Value]:
    """A row of a table by column name."""
    return {c.name: v for c, v in zip(table.columns, row, strict=True)}


def table_of(
    name: str,
    columns: Iterable[TableColumn | tuple[str, str] | str],
    rows: Iterable[Mapping[str, Value]],
    text: str = "",
    total: int | None = None,
) -> DataTable:
    """A table of rows by column name. A column may be its name alone, or (name, unit)."""
    made = tuple(
        c if isinstance(c, TableColumn) else TableColumn(*((c,) if isinstance(c, str) else c))
        for c in columns
    )
    return DataTable(name, made, tuple(tuple(row[c.name] for c in made) for row in rows), text, total)


def entities_within(view: View, name: str) -> tuple[str, str, dict[str, I32]]:
    """(table, full name, entities by table) of an entity or a running job and all that is inside it.

    A feeder, CDU or loop holds the racks that it serves. Raises ExplanationRefused for an unknown name.
    """
    site, jobs = view.site, view.jobs
    slot = jobs.slot_named(name)
    slot = site.entity("job", name) if slot is None else slot
    if slot is not None and jobs.alive[slot]:
        nodes = np.flatnonzero(jobs.job_of_node == slot).astype(np.int32)
        return "job", jobs.names[slot], below(site, "node", nodes) | {"job": np.array([slot], np.int32)}
    name = name.rstrip("/")
    if name == "site":
        name = site.file.site
    for table in dict.fromkeys((*HOLDERS, *TABLES)):
        row = site.entity(table, name)
        if row is None:
            continue
        here = np.array([row], np.int32)
        racks = _racks_served(site, table, row)
        inside = below(site, table, here) if racks is None else below(site, "rack", racks) | {table: here}
        return table, site.name(table, row), inside
    raise ExplanationRefused(f"no entity or job {clean(name, 120)}", "unknown")


def scope_of(view: View, request: ExplainRequest) -> tuple[str, dict[str, I32] | None]:
    """(full name, entities by table) of the entity that a request names; ("", None) is the whole site."""
    if not request.entity:
        return "", None
    _, entity, inside = entities_within(view, request.entity)
    return entity, inside


def in_scope(inside: Mapping[str, I32] | None, table: str, index: I32) -> I32:
    """Those of these entities that are inside a scope."""
    if inside is None:
        return index
    return index[np.isin(index, inside.get(table, np.zeros(0, np.int32)))]


def _racks_served(site: Site, table: str, row: int) -> I32 | None:
    """Racks that hang on a feeder, CDU or loop, ascending; None for other tables."""
    if table == "feeder":
        return np.sort(site.racks_below(row)).astype(np.int32)
    if table == "cdu":
        return np.flatnonzero(site.cdu_of_rack == row).astype(np.int32)
    if table == "loop":
        cdus = np.flatnonzero(site.loop_of_cdu == row)
        return np.flatnonzero(np.isin(site.cdu_of_rack, cdus)).astype(np.int32)
    return None


def control_cell(value: Any, control: Control) -> float | str | None:
    """A control's value for a cell: a state's name, an instant, else the finite number; None for any.

    An instant at an end of the control's range bounds nothing.
    """
    known = finite(value)
    if control.key in INSTANTS and known in (control.low, control.high):
        return None
    if known is None or not (control.states or control.key in INSTANTS):
        return known
    return control_value(known, control.key)


PROPOSAL_COLUMNS = tuple(
    TableColumn(*column)
    for column in (
        ("control",),
        ("count", "count", "entities"),
        ("first",),
        ("lo", "", "at least"),
        ("hi", "", "at most"),
        ("want_low", "", "wanted, least"),
        ("want_high", "", "wanted, most"),
        ("unit",),
        ("reason",),
    )
)


def _name_of(view: View, table: str, index: int) -> str:
    """The path of an entity; of a running job the name that people know."""
    return clean(view.jobs.names[index]) if table == "job" else view.site.name(table, index)


def proposals_table(view: View, proposals: Sequence[Proposal], inside: Mapping[str, I32] | None) -> DataTable:
    """A row for each proposal: entities concerned, the widest interval, the range of wishes, the reason.

    `inside`: count only these entities, by table.
    """
    rows: list[dict[str, Value]] = []
    for p in proposals:
        control = find_control(p.control)
        if control is None:
            continue
        kept = np.isin(p.index, in_scope(inside, control.table, p.index))
        if not kept.any():
            continue
        want = p.want[kept][np.isfinite(p.want[kept])]
        rows.append({
            "control": p.control, "count": int(kept.sum()),
            "first": _name_of(view, control.table, int(p.index[kept][0])),
            "lo": control_cell(p.lo[kept].min(), control), "hi": control_cell(p.hi[kept].max(), control),
            "want_low": control_cell(want.min(), control) if len(want) else None,
            "want_high": control_cell(want.max(), control) if len(want) else None,
            "unit": control.unit, "reason": clean(p.reason, MAX_REASON),
        })  # fmt: skip
    text = "proposals in force"
    return table_of("proposals", PROPOSAL_COLUMNS, rows[:MAX_PROPOSALS_SHOWN], text, len(rows))


LEASES = tuple(
    TableColumn(*column)
    for column in (
        ("control",),
        ("count", "count", "entities"),
        ("first",),
        ("low", "", "from"),
        ("high", "", "to"),
        ("unit",),
        ("states", "", "state"),
        ("ends_s", "s", "first ends in"),
    )
)


def leases_table(
    view: View, request: ExplainRequest, policy: Policy, inside: Mapping[str, I32] | None
) -> DataTable:
    """A row for each control on which commands of a policy run: entities, values, states, the first end."""
    number = next((i for i, p in enumerate(request.policies) if p.name == policy.name), None)
    rows: list[dict[str, Value]] = []
    for key in policy.controls if number is not None else ():
        control, leases = find_control(key), request.leases(key)
        if control is None or leases is None:
            continue
        mine = np.flatnonzero(np.isfinite(leases.value) & (leases.owner == number)).astype(np.int32)
        mine = in_scope(inside, control.table, mine)
        if len(mine):
            rows.append(
                {
                    "control": key,
                    "count": len(mine),
                    "first": _name_of(view, control.table, int(mine[0])),
                    "low": control_cell(leases.value[mine].min(), control),
                    "high": control_cell(leases.value[mine].max(), control),
                    "unit": control.unit,
                    "states": ", ".join(LEASE_STATES[s] for s in np.unique(leases.state[mine]).tolist()),
                    "ends_s": round((int(leases.expires_ns[mine].min()) - view.now_ns) / NS, 1),
                }
            )
    return table_of("leases", LEASES, rows, "commands that run")


def explain_proposals(policy: str, view: View, request: ExplainRequest) -> Explanation:
    """The explanation of any policy: its proposals in force, of the site or of one entity, with reasons."""
    entity, inside = scope_of(view, request)
    table = proposals_table(view, request.status(policy).proposals, inside)
    where = f" for {clean(entity, 120)}" if entity else ""
    text = f"{policy} proposes nothing{where} now"
    if table.rows:
        count = table.total or 0
        reasons = dict.fromkeys(str(row[-1]) for row in table.rows)
        text = f"{policy} makes {count} proposal{'s' if count != 1 else ''}{where}: " + "; ".join(
            list(reasons)[:3]
        )
    return Explanation(
        policy=policy,
        entity=entity,
        now_ns=view.now_ns,
        sentences=(Sentence(text),),
        figures=(KeyFigure("proposals", table.total, "count", "proposals in force"),),
        tables=(table,),
    )
