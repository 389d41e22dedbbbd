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


def markdown(told: dict[str, Any]) -> str:
    """The record as a page of markdown, to be attached to a ticket as it is."""
    lines = [f"# {quoted(told['node'])}: record for repair or return", ""]
    if told["simulated"]:
        lines += ["**Simulated: no hardware stands behind this record.**", ""]
    lines += _what(told) + _why(told) + _faults_page(told) + _failures_page(told)
    lines += _tests_page(told) + _repairs_page(told) + _drains_page(told) + _limits(told)
    return "\n".join(lines).rstrip() + "\n"


def quoted(text: Any, limit: int = MAX_LINE) -> str:
    """Foreign text that markdown takes for text: on one line, its signs escaped."""
    out = clean(text, limit)
    for sign in "\\`*_{}[]<>#|!~":
        out = out.replace(sign, "\\" + sign)
    return out


def _what(told: dict[str, Any]) -> list[str]:
    serials = [f"{g['name'].rpartition('/')[2]} {quoted(g['serial'])}" for g in told["gpus"] if g["serial"]]
    missing = len(told["gpus"]) - len(serials)
    of_gpus = ", ".join(serials) + (f"{'; ' if serials else ''}of {missing} unknown" if missing else "")
    rows = [("site, rack", f"{quoted(told['site'])}, {quoted(told['rack'])}"),
            ("serial of the node", quoted(told["serial"]) if told["serial"] else "unknown: no agent told it"),
            ("serials of its GPUs", of_gpus or "it has none"),
            ("made", f"{utc(told['made_ns'])} UTC by racktwin {quoted(told['racktwin'])}"),
            ("covers", f"since {utc(told['since_ns'])} UTC")]  # fmt: skip
    return [*_table(("", ""), rows), ""]


def _why(told: dict[str, Any]) -> list[str]:
    out = ["## Why", ""]
    planned = told["planned"]
    if planned is not None and planned.get("phase") not in (None, "in_service"):
        since = f" since {utc(planned['entered_ns'])} UTC" if planned.get("entered_ns") else ""
        state = "It is withdrawn" if planned["phase"] not in IN_SERVICE else "Its state"
        out.append(f"- {state}: {quoted(planned['phase_words'])}{since}.")
        if planned.get("reason"):
            out.append(f"- {quoted(planned['reason'])}")
    out.append(f"- Now: {told['level']}" + (f", {told['sure']}" if told["sure"] else "")
               + (f"; to do: {quoted(told['do'])}" if told["action"] not in IDLE else ""))  # fmt: skip
    for e in told["evidence"][:20]:
        since = f" (since {utc(e['since_ns'])} UTC)" if e["since_ns"] else ""
        out.append(f"- {e['level']}: {quoted(e['text'])}{since}")
    for p in told["parts"][:20]:
        out.append(
            f"- {quoted(p['name'].rpartition('/')[2])} {p['level']}: {quoted(p['why'] or 'see below')}"
        )
    if told["lemon"]["is"]:
        out += [
            f"- Repeat offender: {quoted(w)}"
            for w in told["lemon"]["why"] or ["it fails more often than others"]
        ]
    if told["tests_failed"]:
        out.append(f"- It failed {told['tests_failed']} of {told['tests_total']} tests.")
    day = next((c for c in told["chance"] if c["horizon_s"] == 86_400.0), None)
    if day and day["mean"] is not None:
        out.append(f"- Expected to fail within 24 h: {words.chance(day['mean'])}"
                   + (f", {day['said']}" if day["said"] else ""))  # fmt: skip
    return [*out, ""]


def _faults_page(told: dict[str, Any]) -> list[str]:
    out = ["## Faults that its devices reported (28 days)", ""]
    rows = [(quoted(f["of"] or "node"), quoted(f"{f['label']}"), quoted(f["means"]), f"{f['times']:,}",
             utc(f["first_ns"]), utc(f["last_ns"]), quoted(f["detail"])) for f in told["faults"]]  # fmt: skip
    heads = ("of", "code", "means", "times", "first (UTC)", "last (UTC)", "as told")
    return [*out, *(_table(heads, rows) if rows else ["None was heard."]), ""]


def _failures_page(told: dict[str, Any]) -> list[str]:
    watched = f" in {duration(told['watched_s'])} of watching" if told["watched_s"] else ""
    out = [f"## Failures: {told['failures_total']}{watched}", ""]
    for f in told["failures"]:
        shared = "; with others, so perhaps not of its own" if f["shared"] else ""
        over = (
            f"lasted {duration(f['lasted_s'])}"
            if f["end_ns"]
            else f"not over after {duration(f['lasted_s'])}"
        )
        out.append(
            f"- {utc(f['start_ns'])} UTC: {words.CLASS_WORDS.get(f['class'], f['class'])}, {over}{shared}"
        )
    more = told["failures_total"] - len(told["failures"])
    out += [f"- and {more} earlier"] if more > 0 else []
    reboots = "unknown" if told["reboots"] is None else f"{told['reboots']:,}"
    return [*out, f"- restarts counted: {reboots}; GPUs replaced: {told['gpus_replaced']}", ""]


def _tests_page(told: dict[str, Any]) -> list[str]:
    out = [f"## Tests: {told['tests_total']}", ""]
    if not told["tests"]:
        return [*out, "None is in the journal.", ""]
    for row in reversed(told["tests"]):
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


def _repairs_page(told: dict[str, Any]) -> list[str]:
    rows = [f"- {utc(r['at_ns'])} UTC: {quoted(r['text'])}" for r in told["repairs"]]
    return ["## Repairs and replacements", "", *(rows or ["None is in the journal."]), ""]


def _drains_page(told: dict[str, Any]) -> list[str]:
    """Write the section on its withdrawals and returns; tests and repairs stand above."""
    shown = [r for r in told["history"] if r["kind"] not in ("test", "repair", "replaced")]
    rows = [f"- {utc(r['at_ns'])} UTC: {r['kind']}: {quoted(r['text'])}" for r in shown]
    kinds = Counter(r["kind"] for r in shown)
    head = ", ".join(f"{n} {k}" for k, n in kinds.most_common(6))
    return ["## How it was withdrawn and came back" + (f" ({head})" if head else ""), "",
            *(rows or ["It was never withdrawn."]), ""]  # fmt: skip


def _limits(told: dict[str, Any]) -> list[str]:
    parts = [f"- not heard: {quoted(m['what'])}, {quoted(m['state'])}" for m in told["missing"]]
    parts += [f"- {quoted(n)}" for n in told["notes"]]
    score = told["score"]
    if score["scored"]:
        parts.append(
            f"- predictions about it that were settled: {score['scored']}, Brier {number(score['brier'])}"
        )
    return ["## What this record does not know", "", *parts, ""] if parts else []


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}",
            *(f"| {' | '.join(row)} |" for row in rows)]  # fmt: skip
