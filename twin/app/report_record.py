"""The sections of a report on what was decided, found and heard: decisions, findings, data quality, messages.

Everything named here came from outside and is escaped on its way in. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.app.collect import Collector, SignalQuality
from twin.app.report_episodes import OUTCOMES, Action
from twin.app.report_figures import Summary, mapping, whole
from twin.app.report_plots import Gallery
from twin.app.report_sections import section, table
from twin.app.report_svg import Line
from twin.app.report_text import GLOSSARY, duration, number, percent, quantity, safe
from twin.frame import NS
from twin.signals import find_control

MAX_ROWS = 60
NEARLY_ALL = 0.9999
SHOWN_BELOW = 0.995  # a line at 100 % all along says no more than its number
AUTHORITY = {
    "off": "switched off",
    "advise": "may advise: what it wants is written down and shown, never sent",
    "approve": "commands only what an operator approved",
    "act": "commands by itself, within the allowed ranges",
}
QUALITY_WORDS = (
    "good",
    "stale: not refreshed in time",
    "untrusted: marked so by its source",
    "out of the physical range",
    "missing: reported as no reading",
)
QUALITY_CLASS = ("g", "st", "un", "ou", "mi")


def decisions(collector: Collector, gallery: Gallery) -> str:
    """Which policy wanted what, when and why."""
    book = collector.episodes
    policies = collector.policies()
    told = "; ".join(
        f"<b>{safe(p)}</b> {AUTHORITY.get(a := collector.authority(p), safe(a))}" for p in policies
    )
    intro = "A policy watches the twin and says what a control ought to be. " + (
        f"In this run: {told}." if told else "No policy took part in this run."
    )
    if not book.actions:
        why = (
            "With no policy there is nobody to ask for anything: the run watched, compared and reported only."
            if not policies
            else "Nothing was asked for, and that is fine: every value that the policies watch stayed "
            "inside its guards "
            "for the whole run, or the site did not report it."
        )
        return section("decisions", "Decisions", intro, f'<p class="note">{why}</p>', _outcomes(collector))
    actions = sorted(book.actions.values(), key=lambda a: (a.kind != "command", a.first_ns))
    rows = [_action(a, gallery) for a in actions[:MAX_ROWS]]
    left = len(actions) - len(rows) + sum(book.dropped[k] for k in ("command", "advice"))
    note = f'<p class="soft">{number(left, 9)} further lines are not shown.</p>' if left else ""
    return section(
        "decisions",
        "Decisions",
        intro,
        _activity(gallery),
        table(["when", "policy", "what", "why", "authority", "times"], rows, (5,)),
        note,
        _outcomes(collector),
    )


def _action(a: Action, gallery: Gallery) -> list[str]:
    control = find_control(a.control)
    if control is not None and control.states:
        value = (
            safe(control.states[min(max(int(a.high), 0), len(control.states) - 1)])
            if a.high > float("-inf")
            else "–"
        )
    else:
        core = control.unit if control is not None else ""
        low, high = quantity(a.low, core), quantity(a.high, core)
        value = high if low == high else f"{low} to {high}"
    kind = a.control.partition(".")[0]
    plural = f"{kind}s" if a.entities != 1 else kind
    names = ", ".join(safe(n) for n in a.names) + (", …" if a.entities > len(a.names) else "")
    where = f"on {a.entities:,} {safe(plural)}: {names}"
    what = f"{safe(a.control)} → <b>{value}</b><br><span class='soft'>{where}</span>"
    when = gallery.axis.label(a.first_ns)
    if a.last_ns > a.first_ns:
        when += f"<br><span class='soft'>until {gallery.axis.label(a.last_ns)}</span>"
    said = "<span class='warning'>commanded</span>" if a.kind == "command" else "advised"
    reason = safe(a.reason, 240) or "<span class='soft'>various further reasons</span>"
    return [when, safe(a.policy), what, reason, said, f"{a.batches:,}"]


def _activity(gallery: Gallery) -> str:
    track = gallery.tracks.get("decisions")
    if track is None:
        return ""
    cut = slice(0, gallery.points)
    names = ("commanded", "advised")
    lines = [Line(names[i], track.total[i, cut], 2 - i) for i in range(2) if track.total[i].any()]
    if not lines:
        return ""
    title = "Devices concerned by decisions"
    told = "How many devices each moment's new commands or advice were about."
    return gallery.lead(title, told, lines, "devices per point", 170)


def _outcomes(collector: Collector) -> str:
    rows = [
        [safe(kind), safe(control), OUTCOMES[kind], f"{n:,}"]
        for (kind, control), n in sorted(collector.episodes.outcomes.items())
    ]
    if not rows:
        return ""
    return "<h3>Where it went otherwise</h3>" + table(
        ["outcome", "control", "what it means", "devices"], rows, (3,)
    )


def findings(collector: Collector, gallery: Gallery) -> str:
    """Conditions from raised to cleared."""
    book = collector.episodes
    intro = (
        "A finding is a condition that people should know of. It is raised once, lasts while the "
        "condition does, and "
        "says what speaks for it."
    )
    if not book.conditions:
        return section(
            "findings",
            "Findings",
            intro,
            '<p class="note">None: no balance stayed outside its noise for long, and nothing that had spoken '
            "fell silent.</p>",
        )
    rank = {"critical": 0, "warning": 1}
    ordered = sorted(book.conditions.values(), key=lambda c: (rank.get(c.severity, 2), c.first_ns))
    rows = []
    for c in ordered[:MAX_ROWS]:
        severity = c.severity if c.severity in ("critical", "warning", "info") else "info"
        lasted = c.lasted_ns + (0 if c.cleared_ns is not None else collector.last_ns - c.raised_ns)
        end = (
            "<b>still lasting</b>" if c.cleared_ns is None else f"cleared {gallery.axis.label(c.cleared_ns)}"
        )
        again = f", raised {c.times:,} times" if c.times > 1 else ""
        where = ", ".join(safe(e) for e in c.entities)
        rows.append(
            [
                gallery.axis.label(c.first_ns),
                f"<span class='{severity}'>{severity}</span>",
                f"{safe(c.title, 160)}<br><span class='soft'>{where}</span>",
                f"{safe('; '.join(c.evidence), 300)}<br><span class='soft'>{safe(c.action, 200)}</span>",
                f"{end}<br><span class='soft'>lasted {duration(lasted / NS)}{again}</span>",
            ]
        )
    left = len(ordered) - len(rows) + book.dropped["finding"]
    note = f'<p class="soft">{number(left, 9)} further findings are not shown.</p>' if left else ""
    return section(
        "findings",
        "Findings",
        intro,
        table(["first raised", "severity", "what", "evidence, and what to do", "how it ended"], rows),
        note,
    )


def quality(collector: Collector, gallery: Gallery) -> str:
    """How much of what was ever heard could be relied on."""
    intro = (
        "Every value has a quality; anything but good is a reason not to call something healthy. "
        "The lines of single "
        "entities end where they fall silent; sums hold the last good value. Only values that were heard at "
        "least once count."
    )
    signals = collector.signal_qualities()
    if not signals:
        return ""
    key = (
        '<p class="key">'
        + "".join(
            f'<span><i class="{c}"></i>{w}</span>' for c, w in zip(QUALITY_CLASS, QUALITY_WORDS, strict=True)
        )
        + "</p>"
    )
    whole_ones = [q for q in signals if q.share[0] > NEARLY_ALL]
    rows = []
    for q in [q for q in signals if q.share[0] <= NEARLY_ALL][:MAX_ROWS]:
        bar = "".join(
            f'<i class="{c}" style="width:{100 * float(s):.2f}%"></i>'
            for c, s in zip(QUALITY_CLASS, q.share, strict=True)
            if s > 0
        )
        name = f"<code>{safe(q.key)}</code>"
        shares = [percent(float(q.share[0])), percent(float(q.share_at_end[0]))]
        rows.append([name, f"{q.heard:,}", f'<div class="bar">{bar}</div>', *shares])
    shown = ""
    if rows:
        head = ["signal", "cells heard", "over the run", "good, run", "good, end"]
        shown = key + table(head, rows, (1, 3, 4))
    left = len(signals) - len(whole_ones) - len(rows)
    note = f'<p class="soft">{left} further signals are not shown.</p>' if left else ""
    return section(
        "quality", "Data quality", intro, _quality_plot(gallery), shown, note, _all_good(whole_ones, rows)
    )


def _all_good(signals: list[SignalQuality], others: list[list[str]]) -> str:
    if not signals:
        return ""
    cells = sum(q.heard for q in signals)
    names = ", ".join(
        f"<code>{safe(q.key)}</code> ({q.heard:,})" for q in sorted(signals, key=lambda q: q.key)
    )
    first = "The other" if others else "All"
    return (
        f'<p class="note">{first} {len(signals)} signals, {number(cells, 9)} values in all, were good '
        "from when they "
        f"were first heard to the end.</p><details><summary>Which they are</summary>{names}</details>"
    )


def _quality_plot(gallery: Gallery) -> str:
    track = gallery.tracks.get("quality")
    if track is None or not (track.overall()[0][0] < SHOWN_BELOW):
        return ""
    names = ("good", "stale", "untrusted", "out of range", "missing")
    cut = slice(0, gallery.points)
    lines = [
        Line(names[i], track.mean()[i, cut] * 100, c)
        for i, c in zip(range(5), (3, 5, 4, 2, 0), strict=True)
        if i == 0 or track.total[i].any()
    ]
    title = "Quality of the readings"
    return gallery.lead(title, "Share of the values heard so far.", lines, "%", 190)


def messages(summary: Summary) -> str:
    """What arrived, what was understood, what was left aside and why."""
    counts = mapping(summary.get("messages"))
    inbox = mapping(summary.get("inbox"))
    if not counts and not inbox:
        return ""
    total = whole(counts.get("total"))
    parts = []
    if counts:
        rows = [
            ["all", f"{total:,}", ""],
            *(
                [name, f"{_sum(counts.get(name)):,}", why]
                for name, why in (
                    ("decoded", "gave readings or names"),
                    ("ignored", "well-formed, but about things that the twin does not use"),
                    ("bad", "malformed: counted, never fatal"),
                )
            ),
        ]
        parts.append(table(["messages", "count", "meaning"], rows, (1,)))
        parts.append(_ignored(mapping(counts.get("ignored_kinds", counts.get("ignored")))))
        parts.append(_samples("Malformed, for example", counts.get("bad_samples")))
    told = [[safe(k.replace("_", " ")), f"{whole(v):,}"] for k, v in inbox.items() if whole(v)]
    if told:
        parts.append(
            "<h3>Readings at the inbox</h3>" + table(["what became of them", "readings"], told, (1,))
        )
    parts.append(_samples("Damage in the files; what lies before it was used", summary.get("damage")))
    return section("messages", "Messages", "What arrived from the source, by what became of it.", *parts)


def _ignored(ignored: Mapping[str, Any]) -> str:
    if not ignored:
        return ""
    ordered = sorted(ignored.items(), key=lambda kv: -_count(kv[1]))
    rows = [
        [f"<code>{safe(kind)}</code>", f"{_count(entry):,}", safe(mapping(entry).get("why", ""), 200)]
        for kind, entry in ordered[:MAX_ROWS]
    ]
    left = len(ordered) - len(rows)
    note = f'<p class="soft">{left:,} further kinds are not shown.</p>' if left else ""
    return "<h3>Left aside</h3>" + table(["kind", "messages", "why"], rows, (1,)) + note


def _samples(title: str, given: object) -> str:
    lines = [safe(x, 300) for x in given[:8]] if isinstance(given, list | tuple) else []
    return f"<h3>{title}</h3><p>{'<br>'.join(f'<code>{x}</code>' for x in lines)}</p>" if lines else ""


def _sum(entry: object) -> int:
    return sum(_count(e) for e in entry.values()) if isinstance(entry, Mapping) else whole(entry)


def _count(entry: object) -> int:
    return whole(entry.get("count")) if isinstance(entry, Mapping) else whole(entry)


def footnotes(collector: Collector, summary: Summary) -> str:
    """Units, and the marks by which a run is known again."""
    items = "".join(f"<dt>{safe(unit)}</dt><dd>{safe(text, 200)}</dd>" for unit, text in GLOSSARY.items())
    marks = [
        (name, summary.get(key)) for key, name in (("state_checksum", "state"), ("journal_head", "journal"))
    ]
    told = " ".join(f"{name} <code>{safe(value)}</code>" for name, value in marks if value)
    same = (
        f"<p class='soft'>Marks of this run, equal whenever the same input is replayed: {told}.</p>"
        if told
        else ""
    )
    points = collector.time.points
    grain = (
        (
            f"<p class='soft'>Each series has {points} points of {collector.time.stride:,} ticks "
            "with least, mean and "
            "greatest, so that no peak is lost.</p>"
        )
        if points
        else ""
    )
    return f'<section id="units"><h2>Units and notes</h2><dl>{items}</dl>{grain}{same}</section>'


def spark(values: np.ndarray) -> str:
    """A line of block characters for the terminal; empty where nothing is known."""
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return ""
    cells = np.array_split(known, min(32, len(known)))
    means = np.array([c.mean() for c in cells])
    low, high = float(means.min()), float(means.max())
    share = (means - low) / (high - low) if high > low else np.zeros(len(means))
    return "".join("▁▂▃▄▅▆▇█"[round(s * 7)] for s in share.tolist())
