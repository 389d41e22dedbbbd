"""Record sections of a report: decisions, findings, data quality and messages."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from twin.catalogue import GLOSSARY, NS, clean, duration, find_control, number, percent, quantity
from twin.report.collector import Collector, SignalQuality
from twin.report.episodes import OUTCOMES, Action
from twin.report.figures import Summary, mapping, whole
from twin.report.page import code, details, fill, heading, joined, marked, paragraph, section, stacked, table
from twin.report.plots import Gallery
from twin.report.svg import Line, PlotLayout

MAX_ROWS = 60
NEARLY_ALL = 0.9999
SHOWN_BELOW = 0.995  # a line at 100 % all along says no more than its number
AUTHORITY = {
    "off": "switched off",
    "advise": "may advise: its proposals are recorded and shown, never sent",
    "approve": "commands only what an operator approved",
    "act": "commands by itself, within the allowed ranges",
}
QUALITY_WORDS = (
    "good",
    "stale: not refreshed in time",
    "untrusted: marked by its source",
    "out of the physical range",
    "missing: reported as no reading",
)
QUALITY_CLASS = ("g", "st", "un", "ou", "mi")


def decisions(collector: Collector, gallery: Gallery) -> Markup:
    """Commands and advice of the policies, with instants and reasons."""
    book = collector.episodes
    policies = collector.policies()
    result = joined(
        (
            Markup("<b>{}</b> {}").format(clean(p), AUTHORITY.get(a := collector.authority(p), clean(a)))
            for p in policies
        ),
        "; ",
    )
    intro = Markup("A policy reads the twin and proposes values of controls. {}").format(
        Markup("In this run: {}.").format(result) if result else "No policy took part in this run."
    )
    if not book.actions:
        why = (
            "Without a policy nothing is commanded: the run only monitored, compared and reported."
            if not policies
            else "No policy proposed a value. Every value that the policies watch stayed "
            "inside its guards "
            "for the whole run, or the site did not report it."
        )
        return section("decisions", "Decisions", intro, paragraph(why, "note"), _outcomes(collector))
    actions = sorted(book.actions.values(), key=lambda a: (a.kind != "command", a.first_ns))
    rows = [_action(a, gallery) for a in actions[:MAX_ROWS]]
    left = len(actions) - len(rows) + sum(book.dropped[k] for k in ("command", "advice"))
    note = paragraph(f"{number(left, 9)} further lines are not shown." if left else "", "soft")
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
            clean(control.states[min(max(int(a.high), 0), len(control.states) - 1)])
            if a.high > float("-inf")
            else "–"
        )
    else:
        core = control.unit if control is not None else ""
        low, high = quantity(a.low, core), quantity(a.high, core)
        value = high if low == high else f"{low} to {high}"
    kind = a.control.partition(".")[0]
    plural = f"{kind}s" if a.entities != 1 else kind
    names = ", ".join(clean(n) for n in a.names) + (", …" if a.entities > len(a.names) else "")
    where = f"on {a.entities:,} {plural}: {names}"
    what = stacked(Markup("{} → <b>{}</b>").format(clean(a.control), value), where)
    until = f"until {gallery.axis.label(a.last_ns)}" if a.last_ns > a.first_ns else ""
    authority = marked("commanded", "warning") if a.kind == "command" else "advised"
    reason = clean(a.reason, 240) or marked("various further reasons", "soft")
    when = stacked(gallery.axis.label(a.first_ns), until)
    return [when, clean(a.policy), what, reason, authority, f"{a.batches:,}"]


def _activity(gallery: Gallery) -> Markup:
    track = gallery.tracks.get("decisions")
    if track is None:
        return Markup("")
    cut = slice(0, gallery.points)
    names = ("commanded", "advised")
    lines = [Line(names[i], track.total[i, cut], 2 - i) for i in range(2) if track.total[i].any()]
    if not lines:
        return Markup("")
    title = "Devices concerned by decisions"
    text = "Number of devices with new commands or advice at each moment."
    return gallery.lead(title, text, lines, "devices per point", PlotLayout(height=170))


def _outcomes(collector: Collector) -> Markup:
    rows = [
        [clean(kind), clean(control), OUTCOMES[kind], f"{n:,}"]
        for (kind, control), n in sorted(collector.episodes.outcomes.items())
    ]
    if not rows:
        return Markup("")
    return heading("Commands with another outcome") + table(
        ["outcome", "control", "what it means", "devices"], rows, (3,)
    )


def findings(collector: Collector, gallery: Gallery) -> Markup:
    """Conditions from raised to cleared."""
    book = collector.episodes
    intro = (
        "A finding is a condition for people to know. It is raised once, lasts as long as the "
        "condition, and lists its evidence."
    )
    if not book.conditions:
        return section(
            "findings",
            "Findings",
            intro,
            paragraph(
                "None: no balance stayed outside its noise for long, and no source fell silent.",
                "note",
            ),
        )
    rank = {"critical": 0, "warning": 1}
    ordered = sorted(book.conditions.values(), key=lambda c: (rank.get(c.severity, 2), c.first_ns))
    rows = []
    for c in ordered[:MAX_ROWS]:
        severity = c.severity if c.severity in ("critical", "warning", "info") else "info"
        lasted = c.lasted_ns + (0 if c.cleared_ns is not None else collector.last_ns - c.raised_ns)
        lasting = c.cleared_ns is None
        end = (
            Markup("<b>still lasting</b>") if lasting else f"cleared {gallery.axis.label(c.cleared_ns or 0)}"
        )
        again = f", raised {c.times:,} times" if c.times > 1 else ""
        where = ", ".join(clean(e) for e in c.entities)
        rows.append(
            [
                gallery.axis.label(c.first_ns),
                marked(severity, severity),
                stacked(clean(c.title, 160), where),
                stacked(clean("; ".join(c.evidence), 300), clean(c.action, 200)),
                stacked(end, f"lasted {duration(lasted / NS)}{again}"),
            ]
        )
    left = len(ordered) - len(rows) + book.dropped["finding"]
    note = paragraph(f"{number(left, 9)} further findings are not shown." if left else "", "soft")
    return section(
        "findings",
        "Findings",
        intro,
        table(["first raised", "severity", "what", "evidence, and what to do", "how it ended"], rows),
        note,
    )


def quality(collector: Collector, gallery: Gallery) -> Markup:
    """Quality of the readings over the run."""
    intro = (
        "Every value has a quality; anything but good is a reason not to call something healthy. "
        "The lines of single "
        "entities end where they fall silent; sums hold the last good value. Only values that were reported "
        "at least once count."
    )
    signals = collector.signal_qualities()
    if not signals:
        return Markup("")
    key = paragraph(
        joined(
            Markup('<span><i class="{}"></i>{}</span>').format(c, w)
            for c, w in zip(QUALITY_CLASS, QUALITY_WORDS, strict=True)
        ),
        "key",
    )
    whole_ones = [q for q in signals if q.share[0] > NEARLY_ALL]
    rows = []
    for q in [q for q in signals if q.share[0] <= NEARLY_ALL][:MAX_ROWS]:
        bar = joined(
            Markup('<i class="{}" style="width:{:.2f}%"></i>').format(c, 100 * float(s))
            for c, s in zip(QUALITY_CLASS, q.share, strict=True)
            if s > 0
        )
        name = code(clean(q.key))
        shares = [percent(float(q.share[0])), percent(float(q.share_at_end[0]))]
        rows.append([name, f"{q.n_reporting:,}", Markup('<div class="bar">{}</div>').format(bar), *shares])
    shown = Markup("")
    if rows:
        head = ["signal", "cells reported", "over the run", "good, run", "good, end"]
        shown = key + table(head, rows, (1, 3, 4))
    left = len(signals) - len(whole_ones) - len(rows)
    note = paragraph(f"{left} further signals are not shown." if left else "", "soft")
    return section(
        "quality", "Data quality", intro, _quality_plot(gallery), shown, note, _all_good(whole_ones, rows)
    )


def _all_good(signals: list[SignalQuality], others: list[list[str]]) -> Markup:
    if not signals:
        return Markup("")
    cells = sum(q.n_reporting for q in signals)
    names = joined(
        (
            Markup("{} ({:,})").format(code(clean(q.key)), q.n_reporting)
            for q in sorted(signals, key=lambda q: q.key)
        ),
        ", ",
    )
    first = "The other" if others else "All"
    good = f"{first} {len(signals)} signals, {number(cells, 9)} values in all, were good throughout."
    return paragraph(good, "note") + details("These signals", names)


def _quality_plot(gallery: Gallery) -> Markup:
    track = gallery.tracks.get("quality")
    if track is None or not (track.overall()[0][0] < SHOWN_BELOW):
        return Markup("")
    names = ("good", "stale", "untrusted", "out of range", "missing")
    cut = slice(0, gallery.points)
    lines = [
        Line(names[i], track.mean()[i, cut] * 100, c)
        for i, c in zip(range(5), (3, 5, 4, 2, 0), strict=True)
        if i == 0 or track.total[i].any()
    ]
    title = "Quality of the readings"
    return gallery.lead(title, "Share of the values reported so far.", lines, "%", PlotLayout(height=190))


def messages(summary: Summary) -> Markup:
    """Counts of messages: decoded, ignored and malformed, with reasons."""
    counts = mapping(summary.get("messages"))
    inbox = mapping(summary.get("inbox"))
    if not counts and not inbox:
        return Markup("")
    total = whole(counts.get("total"))
    parts: list[Markup] = []
    if counts:
        rows = [
            ["all", f"{total:,}", ""],
            *(
                [name, f"{whole(counts.get(name)):,}", why]
                for name, why in (
                    ("decoded", "gave readings or names"),
                    ("ignored", "well-formed, but about things that the twin does not use"),
                    ("bad", "malformed: counted, never fatal"),
                )
            ),
        ]
        parts.append(table(["messages", "count", "meaning"], rows, (1,)))
        parts.append(_reasons(counts.get("reasons")))
    lines_ = [[clean(k.replace("_", " ")), f"{whole(v):,}"] for k, v in inbox.items() if whole(v)]
    if lines_:
        parts.append(
            heading("Readings at the inbox") + table(["what became of them", "readings"], lines_, (1,))
        )
    parts.append(_samples("Damage in the files; what lies before it was used", summary.get("damage")))
    return section("messages", "Messages", "What arrived from the source, by what became of it.", *parts)


def _reasons(given: object) -> Markup:
    """Return lines of the source ledger: unused readings, the most frequent first."""
    if not isinstance(given, list) or not given:
        return Markup("")
    rows = []
    for entry in map(mapping, given[:MAX_ROWS]):
        why = [clean(entry.get(key, ""), 200) for key in ("why", "remedy")]
        example = code(clean(entry.get("example", ""), 120))
        count = f"{whole(entry.get('count')):,}"
        rows.append([clean(entry.get("outcome", "")), count, "; ".join(filter(None, why)), example])
    left = len(given) - len(rows)
    note = paragraph(f"{left:,} further reasons are not shown." if left else "", "soft")
    return (
        heading("Left aside")
        + table(["outcome", "count", "why, and what to do", "such as"], rows, (1,))
        + note
    )


def _samples(title: str, given: object) -> Markup:
    lines = [code(clean(x, 300)) for x in given[:8]] if isinstance(given, list | tuple) else []
    return heading(title) + paragraph(joined(lines, "<br>")) if lines else Markup("")


def footnotes(collector: Collector, summary: Summary) -> Markup:
    """Units, and the marks by which a run is known again."""
    marks = [
        (name, summary.get(key)) for key, name in (("state_checksum", "state"), ("journal_head", "journal"))
    ]
    result = joined((Markup("{} {}").format(name, code(clean(value))) for name, value in marks if value), " ")
    same = Markup("Marks of this run, equal whenever the same input is replayed: {}.").format(result)
    points = collector.time.points
    grain = (
        f"Each series has {points} points of {collector.time.stride:,} ticks with least, mean and greatest, "
        "so that no peak is lost."
    )
    return fill("units.html", glossary=GLOSSARY.items(), notes=[grain] * bool(points) + [same] * bool(result))


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
