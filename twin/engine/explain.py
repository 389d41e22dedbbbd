"""Explanations: the engine asks a policy for an explanation and validates it. This changes no state.

The explanation of a policy without its own one consists of its proposals in force.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from twin.catalogue import ContractError, clean
from twin.contracts import (
    PAGE,
    DataTable,
    Explainer,
    ExplainRequest,
    Explanation,
    ExplanationRefused,
    LeaseColumns,
    Policy,
    PolicyStatus,
    RecordedSeries,
    Sentence,
    SeriesWanted,
    Topic,
    TopicOption,
    Value,
    View,
    explain_proposals,
    leases_table,
    proposals_table,
    read_only,
    scope_of,
)
from twin.engine.engine import Engine
from twin.engine.event_handlers import ADVISING
from twin.engine.plugin_checks import fresh_memory
from twin.engine.preview_tables import Adviser, first_words, preview_rows, preview_tables

MAX_CELLS = 200_000  # of one explanation
METRIC_NAME = re.compile(r"[a-z][a-z0-9_]{0,99}")
MAX_LABELS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """The part of a request that its sender and the daemon know; the engine adds the rest."""

    entity: str = ""
    topic: str = ""
    options: Mapping[str, Value] = field(default_factory=dict)
    role: str = "leader"
    account: Any = None
    series: RecordedSeries | None = None
    series_note: str = ""


def topics_of(policy: Policy | type[Policy]) -> tuple[Topic, ...]:
    """The topics that a policy declares."""
    topics: tuple[Topic, ...] = getattr(policy, "topics", ())
    return topics


def explain(
    engine: Engine, policy: Policy, inquiry: Inquiry | None = None
) -> Explanation | Callable[[], Explanation]:
    """The explanation of a policy; a function that makes it where that is slow.

    Raises ExplanationRefused for a request that cannot be answered, ContractError for a bad explanation.
    """
    view, request = engine.view(), request_of(engine, policy, inquiry or Inquiry())
    memory = engine.memory.get(policy.name)
    if memory is None:
        memory = fresh_memory(policy, engine.site)
    if not isinstance(policy, Explainer):
        plain = explain_proposals(policy.name, view, request)
        return _finished(policy, _with_orders(engine, plain, policy, view, request), request)
    if request.topic == PAGE.name and PAGE in topics_of(policy) and not request.status(policy.name).proposals:
        return _finished(policy, Explanation(policy=policy.name, now_ns=view.now_ns), request)
    try:
        found = policy.explain(view, {k: read_only(v) for k, v in memory.items()}, request)
    except (ExplanationRefused, ContractError):
        raise
    except Exception as error:
        raise ContractError(f"{policy.name} cannot explain: {type(error).__name__}: {error}"[:500]) from error
    if isinstance(found, Explanation):
        return _finished(policy, _with_orders(engine, found, policy, view, request), request)
    return lambda: _finished(policy, found(), request)


def _with_orders(
    engine: Engine, found: Explanation, policy: Policy, view: View, request: ExplainRequest
) -> Explanation:
    """The main explanation always shows the proposals in force and the commands that run, as they are.

    It, and that of the page, show the preview as well.
    """
    if request.topic not in ("", PAGE.name):
        return found
    inside, tables = scope_of(view, request)[1], list[DataTable]()
    if not request.topic:
        tables.append(proposals_table(view, request.status(policy.name).proposals, inside))
        leases = leases_table(view, request, policy, inside)
        tables += [leases] if leases.rows else []
    notes, previews = list[Sentence](), list[DataTable]()
    adviser = _adviser(engine, policy)
    if adviser is not None:
        notes, previews = preview_tables(view, engine.arbiter, engine.spared, adviser, inside)
    known = {t.name for t in found.tables}
    more = (t for t in tables if t.name not in known)
    return msgspec.structs.replace(
        found,
        preview=bool(previews),
        sentences=(*notes, *found.sentences),
        tables=(*previews, *found.tables, *more),
    )


def _adviser(engine: Engine, policy: Policy) -> Adviser | None:
    """Return a policy if it advises; None otherwise."""
    if engine.intake.authority.get(policy.name) not in ADVISING:
        return None
    number = next((i for i, p in enumerate(engine.policies) if p.name == policy.name), -1)
    proposes = {p.control for p in engine.in_force.get(policy.name, ()) if len(p.index)}
    return Adviser(number, policy.name, policy.controls, proposes)


def first_commands(engine: Engine, policy: Policy) -> str:
    """Say what a policy that advises would command first if it were armed now; "" for any other."""
    adviser = _adviser(engine, policy)
    if adviser is None:
        return ""
    return first_words(preview_rows(engine.view(), engine.arbiter, engine.spared, adviser))


def series_wanted(engine: Engine, policy: Policy, inquiry: Inquiry) -> SeriesWanted | None:
    """Return the recorded series that an explanation needs, usually None. Raises ExplanationRefused."""
    wanted = getattr(policy, "series_wanted", None)
    if wanted is None:
        return None
    found: SeriesWanted | None = wanted(engine.view(), request_of(engine, policy, inquiry))
    return found


def request_of(engine: Engine, policy: Policy, inquiry: Inquiry) -> ExplainRequest:
    """The whole request. Raises ExplanationRefused for an unknown topic or option, or one out of range."""
    options: Mapping[str, Value] = inquiry.options
    if inquiry.topic:
        options = _checked_options(_topic(policy, inquiry.topic), options)
    elif options:
        raise ExplanationRefused(f"unknown parameter {clean(next(iter(options)), 60)}; expected topic")
    statuses = tuple(
        PolicyStatus(p.name, engine.intake.authority[p.name], p.name in engine.suspended,
                     tuple(engine.in_force.get(p.name, ())))
        for p in engine.policies
    )  # fmt: skip
    return ExplainRequest(
        entity=inquiry.entity,
        topic=inquiry.topic,
        options=options,
        policies=statuses,
        leases=lambda control: _leases(engine, control),
        budget_at=lambda at_ns: engine.intake.budget_w(engine.site, at_ns),
        role=inquiry.role,
        account=inquiry.account,
        series=inquiry.series,
        series_note=inquiry.series_note,
    )


def _leases(engine: Engine, control: str) -> LeaseColumns | None:
    lease = engine.arbiter.leases.get(control)
    if lease is None:
        return None
    owner = lease.owner.astype(np.int32)
    columns = (lease.value, owner, lease.state, lease.begun_ns, lease.changed_ns, lease.expires_ns)
    return LeaseColumns(*(read_only(column) for column in columns))


def _topic(policy: Policy, name: str) -> Topic:
    topics = {t.name: t for t in topics_of(policy)}
    if name not in topics:
        expected = ", ".join(topics) or "none"
        raise ExplanationRefused(
            f"topic: {policy.name} has no {clean(name, 40)!r}; expected one of {expected}", "unknown"
        )
    return topics[name]


def _checked_options(topic: Topic, given: Mapping[str, Value]) -> dict[str, Value]:
    """The options of a topic with its defaults, as numbers where it says so."""
    known = {o.name: o for o in topic.options}
    if strange := [name for name in given if name not in known]:
        expected = ", ".join(known) or "none"
        raise ExplanationRefused(f"unknown parameter {clean(strange[0], 60)}; expected {expected}")
    return {
        name: option.default if given.get(name) is None else _converted(option, given[name])
        for name, option in known.items()
    }


def _converted(option: TopicOption, value: Value) -> Value:
    if option.kind == "string":
        return str(value)[:400]
    try:
        text = str(value)
        number = int(text) if option.kind == "integer" and len(text) < 20 else float(text)
    except ValueError:
        number = math.nan
    if not option.low <= number <= option.high or (option.kind == "integer" and number != int(number)):
        what = "a whole number" if option.kind == "integer" else "a number"
        raise ExplanationRefused(f"{option.name}: expected {what} from {option.low:g} to {option.high:g}")
    return number


def _finished(policy: Policy, found: Explanation, request: ExplainRequest) -> Explanation:
    """The explanation with the policy's authority. Raises ContractError for one that is not plain data."""
    if not isinstance(found, Explanation) or found.policy != policy.name:
        raise ContractError(f"{policy.name}: expected an Explanation of its own")
    for names in ([f.name for f in found.figures if f.metric is None], [t.name for t in found.tables]):
        if len(set(names)) != len(names):
            raise ContractError(f"{policy.name}: figures and tables need names of their own")
    cells = sum(len(t.rows) * len(t.columns) for t in found.tables) + sum(len(c.x) for c in found.curves)
    if cells + len(found.figures) > MAX_CELLS:
        raise ContractError(f"{policy.name}: an explanation of {cells} cells; expected at most {MAX_CELLS}")
    for figure in found.figures:
        metric = figure.metric
        if metric is None:
            continue
        if not METRIC_NAME.fullmatch(metric.name) or len(metric.labels) > MAX_LABELS:
            raise ContractError(
                f"{policy.name}: metric {clean(metric.name, 60)!r}: expected small letters, digits, _, "
                f"and at most {MAX_LABELS} labels"
            )
    for table in found.tables:
        if any(len(row) != len(table.columns) for row in table.rows):
            raise ContractError(f"{policy.name}: table {clean(table.name, 60)}: expected a cell per column")
    status = request.status(policy.name)
    made = msgspec.structs.replace(
        found, topic=request.topic, authority=status.authority, suspended=status.suspended
    )
    try:
        same = msgspec.json.decode(msgspec.json.encode(made), type=Explanation) == made
    except (TypeError, msgspec.MsgspecError) as error:
        raise ContractError(f"{policy.name}: an explanation is plain data: {error}") from error
    if not same:
        raise ContractError(f"{policy.name}: an explanation is plain data; expected None for NaN")
    return made
