"""RMA record of a node as Markdown, to be attached to a ticket.

What devices wrote is quoted, never read as markup; what is not known is said so. Pure, so that it can be made
from the JSON of another host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from twin.catalogue import NS, clean, duration, number, utc
from twin.report import health_texts as words

MAX_LINE = 400
IN_SERVICE = ("suspect", "probation")  # phases
IDLE = ("none", "watch")  # actions that ask nobody for anything


def markdown(rma: dict[str, Any]) -> str:
    """The record as a page of markdown, to be attached to a ticket as it is."""
    lines = [f"# {quoted(rma['node'])}: record for repair or return", ""]
    if rma["simulated"]:
        lines += ["**Simulated: no hardware stands behind this record.**", ""]
    lines += _what(rma) + _why(rma) + _faults_page(rma) + _failures_page(rma)
    lines += _tests_page(rma) + _repairs_page(rma) + _drains_page(rma) + _limits(rma)
    return "\n".join(lines).rstrip() + "\n"


def quoted(text: Any, limit: int = MAX_LINE) -> str:
    """Foreign text that markdown takes for text: on one line, its signs escaped."""
    out = clean(text, limit)
    for sign in "\\`*_{}[]<>#|!~":
        out = out.replace(sign, "\\" + sign)
    return out


def _what(rma: dict[str, Any]) -> list[str]:
    serials = [f"{g['name'].rpartition('/')[2]} {quoted(g['serial'])}" for g in rma["gpus"] if g["serial"]]
    missing = len(rma["gpus"]) - len(serials)
    of_gpus = ", ".join(serials) + (f"{'; ' if serials else ''}of {missing} unknown" if missing else "")
    rows = [("site, rack", f"{quoted(rma['site'])}, {quoted(rma['rack'])}"),
            ("serial of the node", quoted(rma["serial"]) if rma["serial"] else "unknown: never reported"),
            ("serials of its GPUs", of_gpus or "it has none"),
            ("made", f"{utc(rma['made_ns'])} UTC by racktwin {quoted(rma['racktwin'])}"),
            ("covers", f"since {utc(rma['since_ns'])} UTC")]  # fmt: skip
    return [*_table(("", ""), rows), ""]


def _why(rma: dict[str, Any]) -> list[str]:
    out = ["## Why", ""]
    planned = rma["planned"]
    if planned is not None and planned.get("phase") not in (None, "in_service"):
        since = f" since {utc(planned['entered_ns'])} UTC" if planned.get("entered_ns") else ""
        state = "It is withdrawn" if planned["phase"] not in IN_SERVICE else "Its state"
        out.append(f"- {state}: {quoted(planned['phase_words'])}{since}.")
        if planned.get("reason"):
            out.append(f"- {quoted(planned['reason'])}")
    out.append(f"- Now: {rma['level']}" + (f", {rma['sure']}" if rma["sure"] else "")
               + (f"; to do: {quoted(rma['do'])}" if rma["action"] not in IDLE else ""))  # fmt: skip
    for e in rma["evidence"][:20]:
        since = f" (since {utc(e['since_ns'])} UTC)" if e["since_ns"] else ""
        out.append(f"- {e['level']}: {quoted(e['text'])}{since}")
    for p in rma["parts"][:20]:
        out.append(
            f"- {quoted(p['name'].rpartition('/')[2])} {p['level']}: {quoted(p['why'] or 'see below')}"
        )
    if rma["lemon"]["is"]:
        out += [
            f"- Repeat offender: {quoted(w)}"
            for w in rma["lemon"]["why"] or ["it fails more often than others"]
        ]
    if rma["tests_failed"]:
        out.append(f"- It failed {rma['tests_failed']} of {rma['tests_total']} tests.")
    day = next((c for c in rma["chance"] if c["horizon_s"] == 86_400.0), None)
    if day and day["mean"] is not None:
        out.append(f"- Expected to fail within 24 h: {words.chance(day['mean'])}"
                   + (f", {day['said']}" if day["said"] else ""))  # fmt: skip
    return [*out, ""]


def _faults_page(rma: dict[str, Any]) -> list[str]:
    out = ["## Faults that its devices reported (28 days)", ""]
    rows = [(quoted(f["of"] or "node"), quoted(f"{f['label']}"), quoted(f["means"]), f"{f['times']:,}",
             utc(f["first_ns"]), utc(f["last_ns"]), quoted(f["detail"])) for f in rma["faults"]]  # fmt: skip
    heads = ("of", "code", "means", "times", "first (UTC)", "last (UTC)", "as reported")
    return [*out, *(_table(heads, rows) if rows else ["None was reported."]), ""]


def _failures_page(rma: dict[str, Any]) -> list[str]:
    watched = f" in {duration(rma['watched_s'])} of watching" if rma["watched_s"] else ""
    out = [f"## Failures: {rma['failures_total']}{watched}", ""]
    for f in rma["failures"]:
        shared = "; with others, so perhaps not of its own" if f["shared"] else ""
        over = (
            f"lasted {duration(f['lasted_s'])}"
            if f["end_ns"]
            else f"not over after {duration(f['lasted_s'])}"
        )
        out.append(
            f"- {utc(f['start_ns'])} UTC: {words.CLASS_WORDS.get(f['class'], f['class'])}, {over}{shared}"
        )
    more = rma["failures_total"] - len(rma["failures"])
    out += [f"- and {more} earlier"] if more > 0 else []
    reboots = "unknown" if rma["reboots"] is None else f"{rma['reboots']:,}"
    return [*out, f"- restarts counted: {reboots}; GPUs replaced: {rma['gpus_replaced']}", ""]


def _tests_page(rma: dict[str, Any]) -> list[str]:
    out = [f"## Tests: {rma['tests_total']}", ""]
    if not rma["tests"]:
        return [*out, "None is in the journal.", ""]
    for row in reversed(rma["tests"]):
        data = row["data"]
        text = {True: "passed", False: "**failed**"}.get(data["passed"], "no result")
        took = duration((data["ended_ns"] - data["began_ns"]) / NS)
        refused = f"; not taken: {quoted(data['refused'])}" if data.get("refused") else ""
        out.append(
            f"### {utc(data['ended_ns'])} UTC: {quoted(data['test']) or 'test'}: {text}, took {took}{refused}"
        )
        if data["detail"]:
            out += ["", *fenced(data["detail"])]
        out.append("")
    return out


def fenced(text: str) -> list[str]:
    """Output as a block that cannot end before its end."""
    longest = max((_run(line) for line in text.splitlines()), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *text.splitlines(), fence]


def _run(line: str) -> int:
    best = now = 0
    for sign in line:
        now = now + 1 if sign == "`" else 0
        best = max(best, now)
    return best


def _repairs_page(rma: dict[str, Any]) -> list[str]:
    rows = [f"- {utc(r['at_ns'])} UTC: {quoted(r['text'])}" for r in rma["repairs"]]
    return ["## Repairs and replacements", "", *(rows or ["None is in the journal."]), ""]


def _drains_page(rma: dict[str, Any]) -> list[str]:
    """Write the section on its withdrawals and returns; tests and repairs stand above."""
    shown = [r for r in rma["history"] if r["kind"] not in ("test", "repair", "replaced")]
    rows = [f"- {utc(r['at_ns'])} UTC: {r['kind']}: {quoted(r['text'])}" for r in shown]
    kinds = Counter(r["kind"] for r in shown)
    head = ", ".join(f"{n} {k}" for k, n in kinds.most_common(6))
    return ["## How it was withdrawn and came back" + (f" ({head})" if head else ""), "",
            *(rows or ["It was never withdrawn."]), ""]  # fmt: skip


def _limits(rma: dict[str, Any]) -> list[str]:
    parts = [f"- not reported: {quoted(m['what'])}, {quoted(m['state'])}" for m in rma["missing"]]
    parts += [f"- {quoted(n)}" for n in rma["notes"]]
    score = rma["score"]
    if score["scored"]:
        parts.append(
            f"- predictions about it that were settled: {score['scored']}, Brier {number(score['brier'])}"
        )
    return ["## What this record does not know", "", *parts, ""] if parts else []


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}",
            *(f"| {' | '.join(row)} |" for row in rows)]  # fmt: skip
