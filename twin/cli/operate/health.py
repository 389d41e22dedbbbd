"""The command `device health`: how well a site, or one part of it, is, why, how sure that is, and what to do.

Alone, whom to look at first; with a name, one part explained in plain words. What is not known is said as
plainly as what is.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import clean, counted, duration, table_noun
from twin.cli.arguments import live
from twin.contracts import LEVELS, PARTS
from twin.report import grid, health_texts as words, when

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client


STANDS_OUT = 3.0  # times the average
TONES = {
    "failed": "bold red",
    "degraded": "yellow",
    "watch": "cyan",
    "unknown": "magenta",
    "healthy": "green",
}
SHOWN_ROWS = 20
NAMED = {"cdu.ua": "the heat exchanger"}
AS_IT_SHOULD_BE = "all that it reports is as it should be"
OF_ITSELF = ("healthy", "unknown")  # levels that say nothing against a part


def _ask(client: Client, args: argparse.Namespace) -> Any:
    from twin.api import path_of

    if args.name is None:
        return client.get("/health", part=args.part, level=args.level, limit=args.limit)
    return client.get(path_of("health", args.name))


def show(tree: dict[str, Any], out: Console) -> None:
    """One part, equipment that serves racks, a place, or the whole site."""
    kind = tree.get("kind")
    if kind == "part":
        show_part(tree, out)
    elif kind == "equipment":
        show_equipment(tree, out)
    else:
        _site(tree, out)


# -- the site, or a place of it


def _site(tree: dict[str, Any], out: Console) -> None:
    head = Text(clean(tree.get("name") or tree["site"]), "bold")
    head.append(f"  {judged_at_text(tree)}", "not bold dim")
    out.print(head, soft_wrap=True)
    rows = []
    for part, counts in tree["parts"].items():
        cell = Text()
        for level in reversed(LEVELS):
            if counts.get(level):
                cell.append(f"{counts[level]} {level}  ", TONES[level])
        rows.append([table_noun(part, 2), cell if sum(counts.values()) else Text("none", "dim")])
    plain_grid(out, rows)
    out.print()
    _worst(tree, out)
    if tree.get("kind") != "place":
        _expected(tree, out)
        _remarks(tree, out)
        _unknown(tree, out)
    for note in tree["notes"]:
        out.print(Text(clean(note, 400), "dim"))


def _worst(tree: dict[str, Any], out: Console) -> None:
    rows, well = tree["rows"], []
    if tree.get("kind") == "place":  # in a rack, those that are as they should be share a line
        well = [r for r in rows if r["level"] == "healthy" and not r["lemon"] and not _far(r)]
        rows = [r for r in rows if r not in well]
    if not rows:
        nothing = all(not c.get("healthy") for c in tree["parts"].values())
        text = "no node stands out" + (", but nothing is known to be healthy either" if nothing else "")
        out.print(Text(text, "yellow" if nothing else "green"))
    else:
        _lines(rows, out)
    if well:
        names = ", ".join(r["name"].rpartition("/")[2] for r in well)
        out.print(Text("healthy  ", TONES["healthy"]).append(Text(clean(names, 2000), "dim")))
    left = tree["total"] - len(tree["rows"])
    if left > 0:
        out.print(Text(f"and {left} more; --limit and --level choose", "dim"))
    out.print()


def _far(row: dict[str, Any]) -> bool:
    day = row.get("day") or {}
    return bool(day.get("mean") and day.get("average") and day["mean"] >= STANDS_OUT * day["average"])


def _lines(rows: list[dict[str, Any]], out: Console) -> None:
    lines = []
    for r in rows:
        what = Text(clean(r["why"] or ("" if r["level"] == "healthy" else r["level"]), 300))
        if r.get("lemon"):
            what.append(f"{'; ' if what else ''}a lemon", "yellow")
        if r["level"] not in OF_ITSELF and r["action"] not in ("none", "watch"):
            what.append(f"\n{r['do']}", "dim")
        day = r.get("day") or {}
        line = Text(words.chance(day.get("mean")))
        if failed := r.get("failed_words"):
            line = Text(f"failed since\n{when(r['failed_since_ns'])}" if " since" in failed else "failed")
            if " is well " in failed:
                line = Text("well again,\nnot yet for long")
        if _far(r):
            line.append(f"\n{day['said']}", "yellow")
        lines.append([r["name"], Text(r["level"], TONES[r["level"]]), line, what])
    if any(r.get("day") for r in rows):
        grid(out, ("", "", "fails in 24 h", "why"), lines, "")
    else:
        grid(out, ("", "", "why"), [[name, level, why] for name, level, _, why in lines], "")


def _expected(tree: dict[str, Any], out: Console) -> None:
    if not tree["expected"]:
        return
    out.print(Text(f"nodes of {clean(tree['site'])} expected to fail, with 90 % intervals", "bold"))
    rows = []
    for e in tree["expected"]:
        interval = f"{e['lo']:.0f} to {e['hi']:.0f}" if e["lo"] is not None else "none yet"
        rows.append([f"within {duration(e['horizon_s'])}", words.count(e["mean"]), interval])
    plain_grid(out, rows)
    rests_on(tree["expected"], out)


def _remarks(tree: dict[str, Any], out: Console) -> None:
    failed, lemons = tree["failures"], tree["lemons"]
    if failed["total"]:
        since = f" in {duration((tree['now_ns'] - failed['since_ns']) / 1e9)}" if failed["since_ns"] else ""
        kinds = ", ".join(f"{words.CLASS_WORDS.get(k, k)} {n}" for k, n in failed["by_class"].items())
        text = f"node failures{since}: {failed['total']} ({kinds}); {failed['down']} still down"
        out.print(Text(clean(text, 500)))
    if failed["down_together"]:
        names = ", ".join(failed["together"])
        text = f"{failed['down_together']} nodes went down together ({names}): check what they share"
        out.print(Text(clean(text, 500), "bold red"))
    if tree["lowered"]:
        sentence = "; ".join(f"{n} {words.HELD_DOWN.get(by, by)}" for by, n in tree["lowered"].items())
        out.print(Text(f"GPUs with a reduced clock: {sentence}"))
    if lemons["total"]:
        more = lemons["total"] - len(lemons["names"])
        names = ", ".join(lemons["names"]) + (f" and {more} more" if more else "")
        out.print(Text(clean(f"lemons (fail more often than others): {names}", 2000), "yellow"))
    for w in tree["wear"]:
        out.print(Text(clean(wears(w, w["name"]), 400), "yellow"))


def _unknown(tree: dict[str, Any], out: Console) -> None:
    if not tree["unknown"]:
        return
    out.print()
    out.print(Text("unknown: too few readings", "bold"))
    rows = []
    for u in tree["unknown"]:
        by_source: dict[tuple[str, str], list[str]] = {}
        for m in u["missing"]:
            by_source.setdefault((_silence(m), m["connect"]), []).append(m["what"])
        lines = [f"{', '.join(what)}: {state}; comes from {connect}"
                 for (state, connect), what in by_source.items()]  # fmt: skip
        text = "\n".join(clean(line, 300) for line in lines) or "not judged yet"
        rows.append([Text(f"{u['unknown']} of {u['of']} {table_noun(u['part'], 2)}", "magenta"), Text(text)])
    plain_grid(out, rows)


def _silence(missing: dict[str, Any]) -> str:
    never, silent, of = missing["never"], missing["silent"], missing["of"]
    parts = ["never reported" if never == of else f"{never} never reported in {of}"] if never else []
    return ", ".join([*parts, *([f"silent now: {silent}"] if silent else [])])


def judged_at_text(tree: dict[str, Any]) -> str:
    """Return the instant at which all parts were last judged."""
    age_s = tree["judged_s"]
    return "not judged yet" if age_s is None else f"judged {duration(age_s)} ago"


def plain_grid(out: Console, rows: list[list[Any]]) -> None:
    """Columns without heads; the last one is broken into lines."""
    if rows:
        grid(out, ("",) * len(rows[0]), rows, "")


def wears(row: dict[str, Any], name: str) -> str:
    """Write the sentence on the remaining time of a drift towards a limit."""
    interval = ""
    if row["lo_s"] is not None:
        more = duration(row["hi_s"]) if row["hi_s"] is not None else "no end"
        interval = f" (90 % interval {duration(row['lo_s'])} to {more})"
    what = f"{NAMED.get(row['what'], row['what'])}{f' of {name}' if name else ''}"
    return f"{what} reaches its limit in about {duration(row['mid_s'])}{interval}"


def rests_on(rows: list[dict[str, Any]], out: Console) -> None:
    """Print the bases of forecasts: a line for each, with the horizons that it holds for."""
    bases: dict[str, list[str]] = {}
    for row in rows:
        if row["basis"]:
            bases.setdefault(row["basis"], []).append(duration(row["horizon_s"]))
    for basis, horizons in bases.items():
        of = f"within {', '.join(horizons)}: " if len(bases) > 1 else ""
        out.print(Text(clean(f"{of}based on {basis}", 500), "dim"))


def show_part(tree: dict[str, Any], out: Console) -> None:
    """A node, GPU, switch, link, pump or supply."""
    _verdict(tree, out)
    _evidence(tree, out)
    if tree["level"] == "unknown":
        _missing(tree, out)
    if tree.get("chance"):
        _chances(tree, out)
    if tree.get("parts"):
        _parts(tree, out)
    rows = [["would change it", Text(clean(tree["changes"], 400))]]
    if tree.get("ends"):
        rows.insert(0, ["ends", Text(clean(tree["ends"], 300))])
        counts = ", ".join(f"{name} {count:,}" for name, count in tree["counts"].items())
        rows.insert(1, ["counts", Text(counts or "not read")])
        days = ", ".join(f"{day['count']:,} on {clean(day['day'])}" for day in tree["recovered"])
        never = (
            "never in the last 28 days, as far as watched" if counts else "not known: the link is not read"
        )
        rows.insert(2, ["recovered", Text(days or never)])
    if (links := tree.get("nvlinks")) is not None and not tree.get("ends"):
        rows.append(["NVLinks", _nvlinks(links)])
    if tree.get("lost_with_it"):
        rows.append(["lost with it", Text(clean(tree["lost_with_it"], 300))])
    if tree.get("history"):
        rows.append(["history", _history(tree)])
    if tree.get("lemon"):
        rows.append(["lemon", _lemon(tree["lemon"])])
    rows.append(["remaining life", Text(clean(_remaining(tree["remaining"]), 900))])
    if tree["faults"]:
        rows.append(["it reported", _faults(tree["faults"])])
    out.print()
    plain_grid(out, rows)
    if tree["level"] != "unknown":
        _missing(tree, out)
    for note in tree["notes"]:
        out.print(Text(clean(note, 400), "dim"))


def _nvlinks(links: dict[str, Any]) -> Text:
    if not links["read"]:
        return Text("not read")
    text = Text(f"{links['read']} read, {len(links['counted'])} of them with counts or an XID")
    for row in links["counted"]:
        counts = ", ".join(f"{name} {count:,}" for name, count in row["counts"].items() if count)
        text.append(f"\n{row['level']}  ", TONES[row["level"]])
        text.append(clean(f"{row['name']}: {counts or 'an XID names it'}", 300))
    return text


def show_equipment(tree: dict[str, Any], out: Console) -> None:
    """A CDU with its pumps, a loop, a feeder or a storage, and the entities that it serves."""
    head, table = Text(clean(tree["name"]), "bold"), tree["table"]
    head.append(f"  {table_noun(table)}  {judged_at_text(tree)}", "not bold dim")
    out.print(head, soft_wrap=True)
    plain_grid(out, [[r["name"].partition("#")[2], Text(r["level"], TONES[r["level"]]), _short(r)]
                     for r in tree["parts"]])  # fmt: skip
    _print_diagnosis(tree, out)
    out.print()
    rows = [["remaining life", Text(clean(_remaining(tree["remaining"]), 900))]]
    if table != "storage":
        served = Text(f"{tree['racks_total']} racks; nodes: {words.counted(tree['nodes'])}")
        rows.append(["feeds" if table == "feeder" else "cools", served])
    if tree["faults"]:
        rows.append(["it reported", _faults(tree["faults"])])
    plain_grid(out, rows)
    _missing(tree, out)


def _short(row: dict[str, Any]) -> Text:
    line = Text(clean(row["why"], 300))
    if row["level"] not in OF_ITSELF and row["action"] not in ("none", "watch"):
        line.append(f"\n{row['do']}", "dim")
    return line


def _print_diagnosis(tree: dict[str, Any], out: Console) -> None:
    if tree["maintenance"]:
        out.print(Text("in maintenance: no alarms and no commands until the window closes", "yellow"))
    for d in tree["diagnosis"]:
        out.print(Text(clean(f"the diagnosis says: {d['title']}. {d['action']}", 300), "yellow"))


def _verdict(tree: dict[str, Any], out: Console) -> None:
    kind, level = table_noun(tree["part"]), tree["level"]
    head = Text(clean(tree["name"]), "bold")
    head.append(f"  {kind}  {judged_at_text(tree)}", "not bold dim")
    out.print(head, soft_wrap=True)
    line = Text(f"This {kind} {words.LEVEL_WORDS[level]}", TONES[level])
    since = duration(tree["age_s"]) if tree["age_s"] is not None and level != "healthy" else ""
    more = f", for {since}" if since else ""
    if level == "healthy" and tree["sure_pu"] is not None and tree["sure_pu"] < 1.0:
        known = f"{100 * tree['sure_pu']:.0f} %"
        more = f", as far as it reports: {known} of what there is to know of it"
    if tree["sure"] and tree["action"] != "check_facility":
        more += f"; {tree['sure']} that it is the {kind} itself"
    line.append(f"{more}.", "not bold default")
    out.print(line)
    rows = []
    if level not in OF_ITSELF or tree["action"] not in ("none", "watch"):
        rows.append([Text("do", "dim"), Text(clean(tree["do"]), "bold")])
    if tree["lowered"] and tree["lowered"] != "not lowered":
        rows.append([Text("clock reduced by", "dim"), Text(tree["lowered_words"])])
    if tree.get("job"):
        rows.append([Text("runs job", "dim"), Text(clean(tree["job"]))])
    plain_grid(out, rows)
    _print_diagnosis(tree, out)


def _evidence(tree: dict[str, Any], out: Console) -> None:
    if not tree["evidence"]:
        nothing = {"healthy": AS_IT_SHOULD_BE,
                   "unknown": "its reports are too few to say either way"}  # fmt: skip
        out.print(Text("why  ", "dim").append(nothing.get(tree["level"], "no reason was given"), "not dim"))
        return
    out.print()
    out.print(Text("why", "bold"))
    rows: list[list[Text]] = []
    if tree["level"] == "healthy" and all(e["rule"] == "history" for e in tree["evidence"]):
        rows.append([Text("healthy", TONES["healthy"]), Text(AS_IT_SHOULD_BE)])
    for e in tree["evidence"]:
        text = Text(clean(e["text"], 400))
        sure = words.sure(e["sure_pu"]) if e["level"] not in OF_ITSELF else ""
        age = f"for {duration(e['age_s'])}" if e["age_s"] is not None else ""
        foot = "; ".join(x for x in (age, sure, words.source(clean(e["source"], 200))) if x)
        text.append(f"\n{foot}" if foot else "", "dim")
        level = "note" if e["level"] == "healthy" else e["level"]  # it speaks neither for nor against it
        rows.append([Text(level, TONES.get(level, "dim")), text])
    plain_grid(out, rows)


def _missing(tree: dict[str, Any], out: Console) -> None:
    """Print the missing inputs: a line for each source that could be connected."""
    if not tree["missing"]:
        return
    out.print()
    out.print(
        Text("not known", "bold").append(", so it counts neither for nor against the part", "not bold dim")
    )
    by_source: dict[tuple[str, str], list[str]] = {}
    for m in tree["missing"]:
        by_source.setdefault((m["state"], m["connect"]), []).append(m["what"])
    for (state, connect), what in by_source.items():
        foot = "; ".join(x for x in (state, f"comes from {connect}" if connect else "") if x)
        text = ", ".join(what) + (f": {foot}" if foot else "")
        plain_grid(out, [[Text("-", TONES["unknown"]), Text(clean(text, 500))]])


def _chances(tree: dict[str, Any], out: Console) -> None:
    out.print()
    head = Text("chance of failing", "bold")
    if tree["part"] != "node":
        head.append(f" of its node {clean(tree['node'])}", "not bold")
    if failed := tree.get("failed_words"):
        out.print(head.append(f": none: it {clean(failed, 300)}", "not bold"), soft_wrap=True)
        return
    if all(c["mean"] is None for c in tree["chance"]):
        out.print(head.append(": no forecast, as there is none for it", "not bold"))
        return
    out.print(head, soft_wrap=True)
    lines = []
    for c in tree["chance"]:
        known = c["lo"] is not None and c["hi"] is not None
        interval = f"{words.chance(c['lo'])} to {words.chance(c['hi'])}" if known else "none yet"
        lines.append([f"within {duration(c['horizon_s'])}", words.chance(c["mean"]), interval,
                      words.chance(c["average"]), c["said"]])  # fmt: skip
    grid(out, ("", "chance", "90 % interval", "average here", ""), lines, "")
    rests_on(tree["chance"], out)


def _parts(tree: dict[str, Any], out: Console) -> None:
    out.print()
    parts = [f"{counted(p, sum(n.values()))}: {words.counted(n)}" for p, n in tree["parts_counts"].items()
            if sum(n.values())]  # fmt: skip
    out.print(Text("its parts  ", "bold").append("; ".join(parts), "not bold"))
    rows = [[Text(clean(r["name"].removeprefix(tree["owner"]).lstrip("/#"))),
             Text(r["level"], TONES[r["level"]]), Text(clean(r["why"], 300))]
            for r in tree["parts"] if r["level"] not in OF_ITSELF]  # fmt: skip
    plain_grid(out, rows[:SHOWN_ROWS])


def _history(tree: dict[str, Any]) -> Text:
    h = tree["history"]
    watched = f"watched for {duration(h['watched_s'])}: " if h["watched_s"] is not None else ""
    count = h["failures_total"]
    parts = [f"{watched}{count or 'no'} failure{'' if count == 1 else 's'}"]
    swapped = [f"replaced {h['replaced']} x"] if h["replaced"] else []
    swapped += [f"{h['gpus_replaced']} of its GPUs replaced"] if h["gpus_replaced"] else []
    parts.append(", ".join(swapped) or "nothing replaced")
    parts.append("reboots unknown" if h["reboots"] is None else f"{h['reboots']} reboots seen")
    out = Text("; ".join(parts))
    for f in h["failures"][:5]:
        ago = duration((tree["now_ns"] - f["start_ns"]) / 1e9)
        lasted = f"lasted {duration(f['lasted_s'])}" if f["end_ns"] else "not over"
        shared = ", together with others" if f["shared"] else ""
        out.append(f"\n{ago} ago: {words.CLASS_WORDS.get(f['class'], clean(f['class']))}, {lasted}{shared}")
    return out


def _lemon(lemon: dict[str, Any]) -> Text:
    if lemon["is"]:
        return Text(clean("yes: " + "; ".join(lemon["why"]), 900), "yellow")
    counted = [f"{s['words']} {round(s['value'], 1):g}" for s in lemon["signals"] if s["value"]]
    missing = ", ".join(s["words"] for s in lemon["signals"] if s["value"] is None)
    text = ", ".join(counted) or "nothing that counts towards one"
    return Text(clean(f"no; in 28 days: {text}" + (f"; never reported: {missing}" if missing else ""), 900))


def _remaining(rows: list[dict[str, Any]]) -> str:
    lines = [r["said"] for r in rows if r["said"]] or [wears(r, "") for r in rows]
    return "; ".join(lines) or "no wear found yet"


def _faults(faults: list[dict[str, Any]]) -> Text:
    sentence, alike = Text(), dict[tuple[str, int], list[dict[str, Any]]]()
    for f in faults:  # the newest first
        alike.setdefault((f["of"], f["code"]), []).append(f)
    for same in alike.values():
        f, times = same[0], sum(x["times"] for x in same)
        of, many = f"{f['of']}: " if f["of"] else "", f", {times} times, the last" if times > 1 else ","
        text = f"{of}{f['label']}{many} {duration(f['age_s'])} ago: {f['means']}; recommended: {f['asks']}"
        sentence.append(f"{chr(10) if sentence else ''}{clean(text, 400)}")
        sentence.append(f"\n  {clean(f['detail'], 160)}" if f["detail"] else "", "dim")
    return sentence


VERBS = {
    "device health": live(
        _ask,
        show,
        f"""
        [ENTITY]>name  a node, GPU, switch, link, rack, CDU, loop, feeder or storage
        --level LIST  without ENTITY: only these levels: failed, degraded, watch, unknown, healthy
        --part {"|".join(PARTS)}  without ENTITY: a line for each part of this kind
        --limit COUNT={SHOWN_ROWS}  maximum number of lines
        """,
        "",
        "hall1/r07/node3",
        "--level failed,degraded --part gpu --format csv",
        rows="rows",
        watched=True,
    )
}
