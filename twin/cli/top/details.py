"""Details on a screen: an alarm explained; an entity with what is measured, expected, judged, commanded.

Each takes an answer of the daemon and gives what rich draws. All of it is text, never markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twin.catalogue import (
    INSTANTS,
    NS,
    clean,
    control_words,
    counted,
    duration,
    number,
    percent,
    quantity,
    signal_words,
)
from twin.cli.top.cells import GLYPHS, TONES, Cell, ColumnHead, ShortNames, brief_span, clock, since
from twin.report import health_texts

SHOWN_LINES = 8
SHOWN_SIGNALS = 30
STATES = ("learned", "learning", "inputs missing", "not read")  # of comparisons, as they are listed


def _line(*cells: Cell) -> Text:
    return Text.assemble(*((text, style) for text, style in cells))


def _words(signal: str) -> str:
    return clean(signal_words(signal), 60)


def _head(text: str) -> Text:
    return Text(f"\n{text}", "bold underline")


def _signed(kind: str, text: str) -> Text:
    return _line((f"{GLYPHS.get(kind, '')} ", TONES.get(kind, "")), (text, ""))


def _rows(heads: Sequence[str], rows: Iterable[Sequence[Cell]], right: Sequence[int] = ()) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(heads), header_style="dim")
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i in right else "left", no_wrap=i in right)
    for row in rows:
        made.add_row(*(Text(text, style) for text, style in row))
    return made


# -- an alarm


def alarm_text(alarm: dict[str, Any], children: dict[str, Any], names: ShortNames, now_ns: int) -> Group:
    """An alarm: title, where, since when, evidence, what racktwin does, what the reader should do."""
    severity = str(alarm.get("severity"))
    title = Text(f"{GLYPHS.get(severity, '')} {names.brief(alarm.get('title', ''))}",
                 f"bold {TONES.get(severity, '')}")  # fmt: skip
    rows: list[tuple[str, str]] = [("How bad", f"{clean(severity)}{_sure(alarm)}")]
    entities = [names.short(e) for e in alarm.get("entities", [])]
    more = int(alarm.get("count") or 0) - len(entities)
    many = f" and {more:,} more" if more > 0 and len(entities) >= 4 else ""
    rows.append(("Where", ", ".join(entities) + many or "the whole site"))
    rows.append(("Since", since(alarm.get("raised_ns"), now_ns).removeprefix("since ") or "unknown"))
    rows += [("Evidence" if not i else "", names.brief(e)) for i, e in enumerate(alarm.get("evidence", []))]
    doing = alarm.get("doing") or ["nothing"]
    rows += [("racktwin does" if not i else "", names.brief(d, now_ns)) for i, d in enumerate(doing)]
    rows.append(("You", clean(alarm.get("action") or "nothing to do", 600)))
    rows.append(("State", _people(alarm)))
    rows.append(("Id", clean(alarm.get("id", ""), 200)))
    parts: list[RenderableType] = [title, Text(), _facts(rows)]
    if children.get("alarms"):
        parts.append(_head("Follow from it"))
        parts += [
            _signed(str(c.get("severity")), names.brief(c.get("title", ""))) for c in children["alarms"]
        ]
    if children.get("total"):
        silent = ", ".join(names.short(s["name"]) for s in children["silent"][:12])
        parts += [_head(f"Without data: {children['total']:,}"), Text(silent)]
    return Group(*parts)


def _sure(alarm: dict[str, Any]) -> str:
    sure_pu = alarm.get("confidence_pu")
    return "" if sure_pu is None else f", {percent(sure_pu, 2)} sure"


def _people(alarm: dict[str, Any]) -> str:
    state = str(alarm.get("state", ""))
    if state == "shelved":
        until, reason = clock(alarm.get("shelved_until_ns") or 0), clean(alarm.get("shelf_reason", ""), 300)
        return f"shelved by {clean(alarm.get('shelf_author'))} until {until} UTC: {reason}"
    if alarm.get("ack_author"):
        note = f": {clean(alarm['ack_note'], 300)}" if alarm.get("ack_note") else ""
        return f"acknowledged by {clean(alarm['ack_author'])} at {clock(alarm.get('ack_ns') or 0)} UTC{note}"
    return "not acknowledged" + ("; flapping" if alarm.get("flapping") else "")


def _facts(rows: Sequence[tuple[str, str]]) -> Table:
    return _rows(("", ""), [((name, "dim"), (text, "")) for name, text in rows])


# -- an entity


def entity_text(
    tree: dict[str, Any], health: dict[str, Any], held: list[dict[str, Any]], names: ShortNames
) -> Group:
    """An entity: alarms, verdict, measured beside expected, commands, its job, other readings, decisions.

    `held`: the commands on it and on what is inside.
    """
    now_ns, parts = tree["now_ns"], list[RenderableType]()
    for alarm in tree["alarms"][:SHOWN_LINES]:
        parts.append(_signed(str(alarm.get("severity")), names.brief(alarm.get("title", ""), now_ns)))
    parts += _verdict(health, names)
    parts += _comparisons(tree["comparisons"])
    parts += _commands(tree, held, now_ns)
    if job := tree.get("job"):
        text = f"{clean(job['job'])} on {job['nodes']} nodes, {since(job['started_ns'], now_ns)}"
        parts += [_head("Job"), Text(text)]
    parts += _readings(tree["signals"])
    if tree["decisions"]:
        parts.append(_head("Latest decisions"))
        parts.append(_rows(("", ""), [((clock(d["now_ns"]), "dim"), (names.brief(d["text"], now_ns), ""))
                                      for d in tree["decisions"][:SHOWN_LINES]]))  # fmt: skip
    return Group(*parts)


def _verdict(health: dict[str, Any], names: ShortNames) -> list[RenderableType]:
    """The verdict on it, with what it rests on and what to do."""
    out: list[RenderableType] = []
    level = health.get("level")
    if level:
        out.append(_head("Health"))
        sure = f", {health['sure']}" if health.get("sure") else ""
        why = names.brief(health.get("why") or "")
        out.append(_line((f"{GLYPHS.get(level, '')} {level}", TONES.get(level, "")),
                         (f"{sure}{': ' + why if why else ''}", "")))  # fmt: skip
        if health.get("action") not in (None, "none"):
            out.append(_line(("You: ", "bold"), (clean(health.get("do", ""), 400), "")))
        failed = health.get("failed_words")
        if failed:
            it = "It" if health.get("node") == health.get("name") else "Its node"
            out.append(_line((f"{it} {clean(failed, 300)}", "")))
        for c in [] if failed else health.get("chance") or []:
            mean = health_texts.chance(c["mean"])
            out.append(_line((f"fails within {brief_span(c['horizon_s'])}: ", "dim"), (mean, "")))
    for e in (health.get("evidence") or [])[:SHOWN_LINES]:
        out.append(_signed(str(e.get("level")), names.brief(e.get("text", ""))))
    for m in (health.get("missing") or [])[:SHOWN_LINES]:
        out.append(Text(f"not known of it: {clean(m['what'])}, {clean(m['state'])}", "dim"))
    return out


def _comparisons(comparisons: list[dict[str, Any]]) -> list[RenderableType]:
    if not comparisons:
        return []
    rows: list[list[Cell]] = []
    named = [c["signal"] for c in comparisons]
    silent = [_words(c["signal"]) for c in comparisons if c["state"] == "not read"]
    for c in sorted(comparisons, key=lambda c: STATES.index(c["state"]) if c["state"] in STATES else 0):
        if c["state"] == "not read":
            continue
        unit, band = c["unit"], c["band"]
        difference = "K" if unit == "degC" else unit
        beyond = band is not None and c["residual"] is not None and abs(c["residual"]) > band
        state: Cell = ("◆ beyond", TONES["warning"]) if beyond else ("✓ within", TONES["ok"])
        if c["state"] != "learned":
            left = f", {duration(c['left_s'])} left" if c["left_s"] else ""
            state = (clean(c["state"]) + left, "dim")
        rows.append([
            (_named(c, named), ""),
            (quantity(c["measured"], unit, 4), "bold"),
            (quantity(c["expected"], unit, 4), ""), (quantity(c["residual"], difference), ""),
            ("–" if band is None else f"± {quantity(band, difference)}", ""), state,
        ])  # fmt: skip
    heads = ("signal", "measured", "expected", "residual", "90 % band", "")
    tail = [Text(f"not read: {', '.join(dict.fromkeys(silent))}", "dim")] if silent else []
    return [_head("Measured beside expected"), *([_rows(heads, rows, (1, 2, 3, 4))] if rows else []), *tail]


def _named(comparison: dict[str, Any], signals: list[str]) -> str:
    """The signal in words; where it is compared twice, with what it is expected from."""
    text = _words(comparison["signal"])
    return f"{text}, {clean(comparison['from'])}" if signals.count(comparison["signal"]) > 1 else text


def _commands(tree: dict[str, Any], held: list[dict[str, Any]], now_ns: int) -> list[RenderableType]:
    rows: list[list[Cell]] = []
    inside: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for lease in held:
        if lease["name"] != tree["name"]:
            inside.setdefault((lease["control"], str(lease["policy"])), []).append(lease)
    for (control, policy), found in inside.items():
        values = [lease["value"] for lease in found]
        means = ", ".join(dict.fromkeys(str(lease["means"]) for lease in found if lease.get("means")))
        ends = dict.fromkeys(quantity(v, found[0]["unit"], 4) for v in (min(values), max(values)))
        rows.append([
            (f"{clean(control_words(control), 60)} of {clean(counted(control, len(found)), 60)}", ""),
            (clean(means or " to ".join(ends)), "bold"), (f"by {clean(policy)}", ""),
        ])  # fmt: skip
    held_rows: list[RenderableType] = [_rows(("",) * 3, rows)] if rows else []
    rows = []
    for lease in tree["leases"]:
        value = lease.get("means") or quantity(lease["value"], lease["unit"], 4)
        read = lease["readback"]
        known = read is not None and math.isfinite(read) and lease["control"] not in INSTANTS
        back = f"reads {quantity(read, lease['unit'], 4)}" if known and not lease.get("means") else ""
        rows.append([
            (clean(control_words(lease["control"]), 60), ""), (clean(value), "bold"),
            (f"by {clean(lease['policy'])}", ""), (clean(lease["state"].replace("_", " ")), ""),
            (back, ""), (f"ends in {brief_span((lease['expires_ns'] - now_ns) / NS)} unless renewed", "dim"),
        ])  # fmt: skip
    if rows:
        held_rows.append(_rows(("",) * 6, rows))
    return [_head("Commands"), *(held_rows or [Text("nothing is commanded here", "dim")])]


def _readings(signals: dict[str, Any]) -> list[RenderableType]:
    rows: list[list[Cell]] = []
    for name, s in list(signals.items())[:SHOWN_SIGNALS]:
        value, old = s["value"], bool(s.get("late")) or s["quality"] != "good"
        if value is None:
            shown: Cell = (clean(s["quality"]), TONES["unknown"])
        elif s.get("states"):
            states, at = s["states"], int(value)
            shown = (clean(states[at]).replace("_", " ") if 0 <= at < len(states) else number(value), "")
        else:
            shown = (quantity(value, s["unit"], 4), "dim" if old else "")
        guard = s.get("guard")
        bound = f"guard {quantity(guard, s['unit'])}" if guard is not None and math.isfinite(guard) else ""
        age = f"{duration(s['age_s'])} old" if s["age_s"] is not None else "never read"
        rows.append([(_words(name), ""), shown, (bound, "dim"), (age, "yellow" if old else "dim")])
    return [_head("Readings"), _rows(("", "", "", ""), rows, (1,))] if rows else []


# -- what an entity holds

CHILD_HEADS = (
    ColumnHead("", 1), ColumnHead("name", 10), ColumnHead("power", 8, True),
    ColumnHead("temperature", 8, True), ColumnHead("health"),
)  # fmt: skip


def child_rows(table: str, children: Sequence[str], state: dict[str, Any],
               health: dict[str, Any]) -> dict[str, list[Cell]]:  # fmt: skip
    """A row for each entity inside, by `table name`: power, temperature, level of health and why."""
    signals, at = state.get("signals", {}), {n: i for i, n in enumerate(state.get("names", []))}
    judged = {row["name"]: row for row in health.get("rows", [])}

    def value(signal: str, name: str, unit: str) -> str:
        column = signals.get(signal)
        return quantity(column["value"][at[name]], unit) if column and name in at else "–"

    rows: dict[str, list[Cell]] = {}
    for name in children:
        found = judged.get(name, {})
        level = str(found.get("level", ""))
        warm = value("temp_c" if table == "gpu" else "inlet_temp_c", name, "degC")
        why = f": {clean(found['why'], 300)}" if found.get("why") else ""
        rows[f"{table} {name}"] = [
            (GLYPHS.get(level, ""), TONES.get(level, "")), (clean(name.rpartition("/")[2]), ""),
            (value("power_w", name, "W"), ""), (warm, ""), (level + why, ""),
        ]  # fmt: skip
    return rows
