"""Tables on a terminal for the operator's commands: what somebody at three in the morning reads first, first.

Whatever the daemon passes on from outside is made safe: one line, no markup, no control characters. Colour
only where rich finds a terminal.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from twin.catalogue import INSTANTS, NS, clean, control_words, counted, duration, number, table_noun, utc
from twin.cli.operate.sources import unused_line
from twin.report import few, grid, health_texts, interval, safe_text, when

TONES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
LATE_S, STALE_S = 5.0, 60.0
STATE_WORDS = {
    "leader": "the daemon leads",
    "standby": "the daemon stands by, another one leads",
    "starting": "the daemon is starting",
}
MODE_WORDS = {
    "normal": "works normally",
    "held": "is on hold: it changes no command",
    "released": "has released the site: it commands nothing",
}


def show_status(tree: dict[str, Any], out: Console) -> None:
    """Print the leader, alarms, commands with their reasons, and the age of the data."""
    _headline(tree, out)
    counts = tree["alarm_counts"]
    out.print()
    if tree["alarms_total"]:
        line = Text("alarms  ")
        for severity in ("critical", "warning", "info"):
            if counts.get(severity):
                line.append(f"{counts[severity]} {severity}  ", TONES[severity])
        if counts.get("shelved"):
            line.append(f"{counts['shelved']} shelved", "dim")
        out.print(line)
        _alarm_rows(tree["alarms"][:10], tree["now_ns"], out)
        if tree["alarms_total"] > 10:
            out.print(Text(f"and {tree['alarms_total'] - 10} more: racktwin alarm list", "dim"))
    else:
        # Of what never spoke nothing is known: no alarms is then no good news.
        out.print(Text("alarms  none", "green" if _all_reporting(tree) else "yellow"))
    out.print()
    _commanded(tree, out)
    _by_people(tree, out)
    out.print()
    for line in tree.get("unused", []):
        head = "failed  " if line["outcome"] == "failed" else "unused  "
        out.print(Text(head, "yellow").append_text(unused_line(line)))
    if tree.get("unused"):
        out.print(Text("more of each source: racktwin sources\n", "dim"))
    rows = [[p["name"], p["kind"], safe_text(p["state"], "" if p["state"] == "running" else "red"),
             duration(p["since_s"]), p["error"]] for p in tree["parts"]]  # fmt: skip
    grid(out, ("part", "", "state", "for", "error"), rows, "no sources, sinks or services")


def state_words(tree: dict[str, Any]) -> str:
    """Return one sentence on the state of a daemon, what it may do, and the age of its newest reading."""
    role = STATE_WORDS.get(tree["role"], f"the daemon is {tree['role']}")
    mode = MODE_WORDS.get(tree["mode"], f"is in the mode {tree['mode']}")
    role += f" and {mode}" if tree["role"] == "leader" else ""
    policies = [p for p in tree["policies"] if p["name"] != "operator" and not p["suspended"]]
    may = {level: [p["name"] for p in policies if p["authority"] == level] for level in ("act", "approve")}
    verb = (
        "may act"
        if (tree["role"], tree["mode"]) == ("leader", "normal")
        else "may act once it leads and works"
    )
    acts = f"{' and '.join(may['act'])} {verb}" if may["act"] else "no policy may act by itself"
    if may["approve"]:
        acts += f", {' and '.join(may['approve'])} only with approval"
    age_s = tree.get("telemetry_age_s")
    freshness = (
        "no reading has arrived yet" if age_s is None else f"the newest reading is {duration(age_s)} old"
    )
    return clean(f"{tree['site']}: {role}; {acts}; {freshness}", 600)


def _headline(tree: dict[str, Any], out: Console) -> None:
    ticks, age_s = tree["ticks"], tree.get("telemetry_age_s")
    well = (tree["role"], tree["mode"]) == ("leader", "normal") and age_s is not None and age_s <= STALE_S
    out.print(Text(state_words(tree), "bold" if well else "bold yellow"), soft_wrap=True)
    head = Text("role  ")
    head.append(clean(tree["role"]), "green" if tree["role"] == "leader" else "yellow")
    head.append(f" (epoch {tree['epoch']})  ")
    head.append(clean(tree["mode"]), "" if tree["mode"] == "normal" else "bold red")
    if tree["simulated"]:
        head.append("  simulated", "cyan")
    if not tree["ready"]:
        head.append("  not ready", "red")
    out.print(head)
    levels: dict[str, list[str]] = {}
    for policy in tree["policies"]:
        level = "suspended" if policy["suspended"] else policy["authority"]
        levels.setdefault(level, []).append(policy["name"])
    line = Text("authority  ")
    for level in ("suspended", "act", "approve", "advise", "off"):
        if level in levels:
            tone = {"act": "bold", "suspended": "red", "approve": "yellow"}.get(level, "dim")
            line.append(f"{level}: {clean(', '.join(levels[level]), 300)}  ", tone)
    out.print(line)
    late = ticks["age_s"] > max(LATE_S, 3 * ticks["every_s"])
    text = Text("tick  ")
    text.append(f"{ticks['tick']}, {duration(ticks['age_s'])} ago", "bold red" if late else "")
    text.append(f"; {ticks['skipped']} skipped", "yellow" if ticks["skipped"] else "")
    took = ticks["took_s_p99"]
    text.append(f"; 99 of 100 take at most {took * 1000:.1f} ms" if took is not None else "")
    out.print(text)
    line = Text("heard  ")
    for table, count in tree.get("heard", {}).items():
        noun = table_noun(clean(tree.get("noun_keys", {}).get(table, table)), count["of"])
        share = f"{count['heard']} of {count['of']} {noun}  "
        line.append(share, "" if count["heard"] == count["of"] else "yellow")
        if count.get("learning"):
            line.append(f"({count['learning']} learning)  ", "dim")
    if tree.get("heard"):
        out.print(line)
    judged = tree.get("judged")
    if judged:
        out.print(safe_text(judged["text"], "yellow" if judged["learning"] else ""))
    if tree.get("health"):
        out.print(_well(tree["health"]["parts"], judged["table"] if judged else ""))


def _well(parts: dict[str, dict[str, int]], judged: str) -> Text:
    """Return the counts of parts by kind and level; `racktwin device health` says more. That all of the
    `judged` kind are healthy stands above it, with what that is judged on.
    """
    line = Text("health  ")
    for part, counts in parts.items():
        if sum(counts.values()) > (counts["healthy"] if part == judged else 0):
            worst = health_texts.worst(counts)
            tone = {"failed": "bold red", "degraded": "yellow", "unknown": "yellow"}.get(worst, "")
            line.append(f"{clean(table_noun(part, 2))}: {health_texts.counted(counts)}  ", tone)
    return line


def _all_reporting(tree: dict[str, Any]) -> bool:
    return all(count["heard"] == count["of"] for count in tree.get("heard", {}).values())


def _commanded(tree: dict[str, Any], out: Console) -> None:
    rows = [_order(c, "renewed, for the reason given before") for c in tree["commanded"]]
    grid(out, ("commanded", "", "by", "because"), rows, "no commands")
    if preview := [_order(c, "no longer needed") for c in tree.get("preview", [])]:
        out.print()
        grid(out, ("preview, not commanded", "", "advised by", "because"), preview, "")
    for w in tree["wanting"]:
        out.print(
            safe_text(
                f"{w['policy']} waits for approval of the {control_words(w['control'])} of "
                f"{counted(w['control'], w['count'])}: {w['reason']}; give it with "
                f"`racktwin policy approve {w['policy']} {w['control']}`",
                "yellow",
            )
        )


def _order(c: dict[str, Any], otherwise: str) -> list[str]:
    """A line on what is commanded, or advised, of one control by one policy."""
    value = "" if c["control"] in INSTANTS else c["means"] or interval(c["low"], c["high"], c["control"])
    reasons = "; ".join(c["reasons"]) or otherwise
    return [
        f"{control_words(c['control'])} {value}".rstrip(),
        counted(c["control"], c["count"]),
        c["policy"],
        reasons,
    ]


def _by_people(tree: dict[str, Any], out: Console) -> None:
    """Maintenance windows and standing requests: what somebody set and somebody else may have forgotten."""
    for w in tree.get("windows", []):
        text = f"maintenance of {w['table']} {few(w['names'], w['count'])} until {when(w['until_ns'])} by "
        text += f"{w['author']}: no alarms, no commands, no protection there ({w['reason'] or 'no reason'})"
        out.print(safe_text(text, "yellow"))
    for r in tree.get("standing", []):
        end = f"until {when(r['expires_ns'])}" if r["expires_ns"] else "without an end"
        names = few([r["first"]], r["count"])
        wanted = f"{control_words(r['control'])} of {interval(r['lo'], r['hi'], r['control'])}"
        text = f"{r['author']} asks for a {wanted} for {names}"
        out.print(safe_text(f"{text}, {end}: {r['reason'] or 'no reason'}", "cyan"))


def since_words(t_ns: int, now_ns: int | None) -> str:
    """Return an instant and its age, such as "since 22:13:58 UTC (3 min ago)", with the date of another
    day. None: an older daemon, which does not answer its time."""
    if now_ns is None:
        return f"since {when(t_ns)} UTC"
    at = utc(t_ns, "%H:%M:%S" if utc(t_ns, "%F") == utc(now_ns, "%F") else "%Y-%m-%d %H:%M:%S")
    return f"since {at} UTC ({duration(max(0, now_ns - t_ns) / NS)} ago)"


def _alarm_rows(alarms: list[dict[str, Any]], now_ns: int | None, out: Console) -> None:
    rows = []
    for a in alarms:
        where = ", ".join(str(e) for e in a.get("entities", [])[:4])
        named = len(a.get("entities", []))  # the count of one place is that of what it concerns
        more = a.get("count", 0) - min(4, named) if named > 1 else 0
        text = "; ".join(p for p in (where + (f" and {more} more" if more > 0 and where else ""),
                                     *a.get("evidence", [])) if p)  # fmt: skip
        what = Text(clean(a.get("title", ""), 300), "bold")
        since = f"{since_words(a['raised_ns'], now_ns)}  " if a.get("raised_ns") else ""
        what.append(f"\n{clean(text, 600)}", "dim")
        if action := a.get("action"):
            what.append(f"\nwhat to do: {clean(action, 300)}")
        what.append(f"\n{since}{clean(a.get('id', ''), 200)}", "dim")
        if people := _people(a):
            what.append(f"\n{clean(people, 600)}", "cyan")
        rows.append(
            [
                safe_text(a.get("severity"), TONES.get(str(a.get("severity")), "")),
                safe_text(a.get("state")),
                what,
            ]
        )
    grid(out, ("", "", ""), rows, "no alarms")


def _people(a: dict[str, Any]) -> str:
    """Write an alarm's acknowledgement and shelving: author, time and reason."""
    parts = []
    if a.get("ack_author"):
        note = f": {a['ack_note']}" if a.get("ack_note") else ""
        parts.append(f"known to {a['ack_author']} since {when(a.get('ack_ns'))}{note}")
    if a.get("state") == "shelved":
        parts.append(f"shelved by {a.get('shelf_author')} until {when(a.get('shelved_until_ns'))}"
                    f": {a.get('shelf_reason')}")  # fmt: skip
    return "; ".join(parts)


def show_comparisons(tree: dict[str, Any], out: Console) -> None:
    """Measured beside expected, signal by signal, with what the band is or what it waits for."""
    rows = []
    for c in tree["comparisons"]:
        state = safe_text(c["state"], "" if c["state"] == "learned" else "yellow")
        if c["left_s"] is not None:
            state.append(f", at least {duration(c['left_s'])} more" if c["left_s"] else ", soon done")
        outside = c["band"] is not None and c["residual"] is not None and abs(c["residual"]) > c["band"]
        rows.append([c["signal"], number(c["measured"], 6), number(c["expected"], 6),
                     Text(number(c["residual"], 4), "yellow" if outside else ""),
                     "–" if c["band"] is None else f"± {number(c['band'], 4)}",
                     c["unit"], state, c["from"]])  # fmt: skip
    heads = ("signal", "measured", "expected", "residual", "band", "", "state", "expected follows")
    grid(out, heads, rows, f"{clean(tree['name'])} has no expected values", right=range(1, 5))
    out.print(Text("band: nine of ten readings of a healthy device are within it; `racktwin device health` "
                   "has the verdict", "dim"))  # fmt: skip


def show_alarms(tree: dict[str, Any], out: Console) -> None:
    """Alarms with evidence, what to do, and the id that `ack` and `shelve` take."""
    _alarm_rows(tree["alarms"], tree.get("now_ns"), out)
    if tree["next_offset"] is not None:
        out.print(
            Text(f"{tree['total'] - len(tree['alarms'])} more; narrow it with --severity or --entity", "dim")
        )


def show_decisions(tree: dict[str, Any], out: Console) -> None:
    """Decisions, newest last, as one reads a log."""
    rows = [[when(d["now_ns"]), str(d["tick"]), d["kind"], d["text"]] for d in reversed(tree["decisions"])]
    grid(out, ("time (UTC)", "tick", "kind", "what"), rows, "no decisions in this time")
    begin, (since, until) = tree["begin_ns"], tree["searched_ns"]
    first = max(since, begin)
    said = [f"searched from {utc(first)} to {utc(until)} UTC; the journal is kept since {utc(begin)} UTC"]
    if tree["next"] is not None:
        said.append(f"older lines: --before {tree['next']}")
    if tree["events_left_out"]:
        said.append(f"{tree['events_left_out']:,} events are left out; `--kind event` lists them")
    for text in [*said, *tree["notes"]]:
        out.print(Text(clean(text, 300), "dim"))


def show_approvals(tree: dict[str, Any], out: Console) -> None:
    """Print the proposals that wait for approval, and the approvals in force."""
    rows = []
    for w in tree["wanting"]:
        value = f"{w['control']} {interval(w['low'], w['high'], w['control'])}"
        partly = "; approved for some" if w["approved_partly"] else ""
        rows.append([w["policy"], f"{value} for {counted(w['control'], w['count'])}: {w['reason']}{partly}"])
    grid(out, ("waits for approval", ""), rows, "nothing waits for approval")
    out.print()
    standing = [[a["id"], f"{a['policy']} may act on {a['control']} of {_names(a) or 'all'} until "
             f"{when(a.get('expires_ns'))}; by {a['author']}"] for a in tree["approvals"]]  # fmt: skip
    grid(out, ("approval", ""), standing, "no approvals in force")


def show_requests(tree: dict[str, Any], out: Console) -> None:
    """Standing requests."""
    rows = []
    for r in tree["requests"]:
        until = f" until {when(r['expires_ns'])}" if r.get("expires_ns") else ""
        value = interval(r.get("lo"), r.get("hi"), r["control"])
        text = f"{r['control']} {value} for {_names(r)}{until}; by {r['author']}"
        rows.append([r["id"], text + (f": {r['reason']}" if r.get("reason") else "")])
    grid(out, ("request", ""), rows, "no requests in force")


def show_outlooks(tree: dict[str, Any], out: Console) -> None:
    """Announced future values."""
    rows = []
    for o in tree["outlooks"]:
        now = f"now {number(o['now'], 6)}, " if o["now"] is not None else ""
        lasts = f"from {when(o['start_ns'])} to {when(o['end_ns'])}, every {duration(o['step_s'])}"
        text = f"{now}{bounds(o['low'], o['high'])} {o['unit']} {lasts}; by {o['author']}"
        rows.append([o["quantity"], o["name"] or "-", text])
    grid(out, ("quantity", "of", "values"), rows, "no outlooks")
    if tree["next_offset"] is not None:
        out.print(Text(f"{tree['total'] - len(rows)} more; narrow it with --quantity", "dim"))


def bounds(low: Any, high: Any) -> str:
    """An interval; null is no bound."""
    if low is None or high is None:
        return "any" if low is None and high is None else f"at {'most' if low is None else 'least'} " + (
            number(high if low is None else low, 6))  # fmt: skip
    return number(low, 6) if low == high else f"{number(low, 6)} to {number(high, 6)}"


def _names(tree: dict[str, Any]) -> str:
    return few(tree["names"], tree["names_total"])


def show_authority(tree: dict[str, Any], out: Console) -> None:
    """Print each policy's authority, controls and reasons."""
    rows = [[p["name"], "suspended" if p["suspended"] else p["authority"], ", ".join(p["controls"]),
             "; ".join(p["reasons"])] for p in tree["policies"]]  # fmt: skip
    grid(out, ("policy", "authority", "controls", "says"), rows, "no policies")


def show_maintenance(tree: dict[str, Any], out: Console) -> None:
    """Open windows."""
    rows = [[w["id"], f"{w['table']} {_names(w)} until {when(w['until_ns'])}; by {w['author']}: "
             + w.get("reason", "")]
            for w in tree["windows"]]  # fmt: skip
    grid(out, ("window", ""), rows, "no maintenance windows")


def show_done(tree: dict[str, Any], out: Console) -> None:
    """Print the result of an action."""
    result = {k: v for k, v in tree.items() if k not in ("done", "id", "tick", "warnings")}
    text = Text("done")
    if "id" in tree:
        text.append(f"  {clean(tree['id'], 200)}", "bold")
    for key, value in result.items():
        text.append(f"  {key} {when(value) if key.endswith('_ns') else clean(value)}")
    out.print(text)
    for warning in tree.get("warnings", ()):
        out.print(safe_text(f"warning: {warning}", "yellow"))
