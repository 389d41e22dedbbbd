"""Power on a terminal: headroom, why caps are as they are, their price, room for racks, load targets.

Readable at a hundred columns. Whatever the daemon passes on from outside is made safe. Part of the shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from twin.app.cli_live_show import grid, safe, span, when
from twin.app.report_text import clean

if TYPE_CHECKING:
    from rich.console import Console

NS = 1_000_000_000
FULL_PU, NEAR_PU, MOST_PU = 1.0, 0.9, 9.99
NARROW, NAME_WIDTH = 96, 10  # columns: of a terminal that holds less, and of a name
KIND_NAMES = {"site": "site", "feeder": "feeder", "cdu": "CDU", "loop": "loop", "rack": "rack"}
CLASSES = {"idle": "no job", "usual": "usual", "high": "high", "waited_for": "inference"}
RANKS = {"idle": "no job, first", "usual": "usual", "high": "high", "waited_for": "inference, last"}
DASH = "-"


def kw(value: Any) -> str:
    """A power in kW; a dash for none."""
    if not isinstance(value, int | float):
        return DASH
    return f"{value / 1e3:,.1f}" if abs(value) < 999_950 else f"{value / 1e3:,.0f}"


def pct(value: Any) -> str:
    """A share in %; a dash for none."""
    if not isinstance(value, int | float):
        return DASH
    return f"{100 * value:.0f} %" if value < MOST_PU else "> 999 %"


def tone(use_pu: Any) -> str:
    """The colour of a load over its limit."""
    if not isinstance(use_pu, int | float):
        return "dim"
    return "bold red" if use_pu >= FULL_PU else "yellow" if use_pu >= NEAR_PU else ""


def short(path: Any, site: str = "") -> str:
    """A name without the site's in front, as all would begin with it."""
    text = clean(path, 120)
    return text.removeprefix(f"{site}/") if site else text


def show_headroom(tree: dict[str, Any], out: Console) -> None:
    """What binds first, then a line for each place."""
    _head(tree, out)
    first = tree["first"]
    if first is not None:
        out.print(Text(first_words(first, tree["site"]), tone(first["use_pu"]) or "bold"), soft_wrap=True)
        if first["over"] and first["in_s"] and any(p["authority"] == "act" for p in tree["policies"]):
            text = "a forecast knows of no caps to come: the policies that may act cut before that"
            out.print(Text(text, "dim"), soft_wrap=True)
    else:
        out.print(Text("nothing binds that is known: no place has both a limit and a load", "yellow"))
    _capped_line(tree["capped"], out)
    out.print()
    places = tree["places"]
    horizons = sorted({s["horizon_s"] for p in places for s in p["ahead"]})[:2]
    horizons = horizons[-1:] if out.width < NARROW else horizons
    heads = ["", "", "limit kW", "now", "side lost", *(f"in {span(h)}" for h in horizons)]
    peaked = not horizons and any(p["peak_w"] is not None for p in places)
    heads += ["peak"] if peaked else []
    rows = [_place(p, tree["site"], horizons, peaked) for p in places]
    if rows:
        _table((*heads, "left", "used", "capped"), rows, out)
    else:
        out.print(Text("no place carries a rack here", "dim"))
    shown = sum(1 for p in places if p["kind"] == "rack")
    if shown and tree["racks_total"] > shown:
        out.print(Text(f"the {shown} fullest of {tree['racks_total']:,} racks; --limit shows more", "dim"))
    told = {s["from"] for p in places for s in p["ahead"] if s["from"]}
    if told:
        text = (
            f"coming loads: upper ends of 90 % bands, of {' and of '.join(sorted(told))}; bands are added up"
        )
        out.print(Text(f"{text}, as if all came at once", "dim"), soft_wrap=True)
    _notes(tree, out)


def _table(
    heads: tuple[str, ...],
    rows: list[list[Any]],
    out: Console,
    left: tuple[int, ...] = (0, 1),
    folds: tuple[int, ...] = (1,),
) -> None:
    """Numbers to the right and never broken; only what is in the columns `folds` is."""
    table = Table(box=None, pad_edge=False, padding=(0, 1 if out.width < NARROW else 2, 0, 0))
    for i, head in enumerate(heads):
        table.add_column(
            head,
            no_wrap=i not in folds,
            overflow="fold",
            justify="left" if i in left else "right",
            min_width=NAME_WIDTH if i == folds[0] else None,
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else safe(cell) for cell in row))
    out.print(table)


def first_words(first: dict[str, Any], site: str) -> str:
    """What binds first, in a sentence."""
    place = _where(first["kind"], first["place"], site)
    limit = f"load target {first['target']} of {kw(first['limit_w'])} kW" if first["target"] else (
        f"its {kw(first['limit_w'])} kW")  # fmt: skip
    at = "now" if not first["in_s"] else f"in {span(first['in_s'])}, by the upper end of the forecast"
    lost = " with the other side lost" if first["lost"] else ""
    if first["over"]:
        return f"beyond its limit {at}: {place}{lost}, {kw(-first['left_w'])} kW above {limit}"
    left = f"{kw(first['left_w'])} kW left of {limit} {at} ({pct(first['use_pu'])} used)"
    return f"binds first: {place}{lost}, {left}"


def _where(kind: str, name: Any, site: str) -> str:
    return "the site" if kind == "site" else f"{KIND_NAMES[kind]} {short(name, site)}"


def _place(p: dict[str, Any], site: str, horizons: list[float], peaked: bool) -> list[Any]:
    limit = p["limit_w"]
    name = "all racks" if p["kind"] == "site" else short(p["place"], site)
    words = Text(kw(limit))
    if p["target_w"] is not None:
        words.append(f"\n{kw(p['target_w'])}")
        name += f"\n  {clean(p['target'], 40) or 'load target'}"
    load = Text(kw(p["load_w"]))
    if p["unheard_racks"]:
        load.append(f"\n+ {p['unheard_racks']} unheard", "yellow")
    ahead = {s["horizon_s"]: s for s in p["ahead"]}
    cells: list[Any] = [KIND_NAMES[p["kind"]], Text(name), words, load, kw(p["lost_w"])]
    for horizon in horizons:
        step = ahead.get(horizon)
        value = None if step is None else step["lost_w"] if step["lost_w"] is not None else step["load_w"]
        cells.append(Text(kw(value), tone(step["use_pu"]) if step else "dim"))
    if peaked:
        cells.append(kw(p["peak_lost_w"] if p["lost_w"] is not None else p["peak_w"]))
    if p["dead"]:
        return [*cells, Text("dead", "bold red"), "", ""]
    left = Text(kw(p["left_w"]), tone(p["use_pu"]))
    return [
        *cells,
        left,
        Text(pct(p["use_pu"]), tone(p["use_pu"])),
        f"{p['capped_gpus']:,}" if p["capped_gpus"] else "",
    ]


def _head(tree: dict[str, Any], out: Console) -> None:
    head = Text(clean(tree["site"]), "bold")
    for p in tree.get("policies", ()):
        mode = "suspended" if p["suspended"] else p["authority"]
        style = "bold red" if p["suspended"] else "bold" if mode == "act" else ""
        head.append(f"  {p['policy']}: {clean(mode, 20)}", style)
    out.print(head, soft_wrap=True)


def _capped_line(capped: dict[str, Any], out: Console) -> None:
    by = ", ".join(f"{n:,} by {clean(p, 40)}" for p, n in capped["by_policy"].items())
    text = f"capped: {capped['gpus']:,} of {capped['of']:,} GPUs" + (f" ({by})" if by else "")
    if capped["advised_gpus"]:
        text += f"; {capped['advised_gpus']:,} more would be, if their policy might act"
    out.print(Text(text, "yellow" if capped["gpus"] else ""), soft_wrap=True)


def _notes(tree: dict[str, Any], out: Console) -> None:
    for note in tree["notes"]:
        out.print(safe(note, "dim"), soft_wrap=True)


def show_why(tree: dict[str, Any], out: Console) -> None:
    """A paragraph for each group of GPUs that are capped alike."""
    _head(tree, out)
    site = tree["site"]
    head = Text(f"{tree['kind']} {short(tree['name'], site)}", "bold")
    head.append(
        f"  {tree['capped_gpus']:,} of {tree['gpus']:,} GPUs capped", "yellow" if tree["capped_gpus"] else ""
    )
    out.print(head, soft_wrap=True)
    if tree["first"] is not None:
        out.print(Text(f"above it, {first_words(tree['first'], site)}", "dim"), soft_wrap=True)
    blocks: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for group in tree["groups"]:
        key = (group["policy"], group["reason"], group["lift"])
        blocks.setdefault(key, []).append(group)
    for alike in blocks.values():
        out.print()
        _block(alike, site, out)
    if (left := tree["groups_total"] - len(tree["groups"])) > 0:
        out.print(Text(f"and {left:,} more groups: name a rack or node", "dim"))
    for a in tree["advised"]:
        out.print()
        text = f"{a['gpus']:,} GPUs would be capped to {_range(a['cap_low_w'], a['cap_high_w'])}"
        out.print(
            safe(f"{text} by {a['policy']}, which may only {a['authority']}: {a['reason']}"), soft_wrap=True
        )
    for n in tree["nodes"]:
        out.print(
            safe(f"{n['node']}: the whole node is capped to {n['cap_w']:,.0f} W by {n['policy']}"),
            soft_wrap=True,
        )
    if not tree["capped_gpus"] and not tree["advised"] and tree["gpus"]:
        out.print(Text("no cap is commanded here, and none is proposed", "green"))
    _notes(tree, out)


def _range(low: float, high: float) -> str:
    return f"{low:,.0f} W" if round(low) == round(high) else f"{low:,.0f} to {high:,.0f} W"


def _block(groups: list[dict[str, Any]], site: str, out: Console) -> None:
    """GPUs that are held by the same policy for the same reason: that first, then who they are."""
    g = groups[0]
    count = sum(x["gpus"] for x in groups)
    head = f"{count:,} GPU{'s' if count > 1 else ''} by {g['policy']}" + (
        ", being given back" if g["releasing"] else "")  # fmt: skip
    out.print(safe(head, "bold"), soft_wrap=True)
    rows = [["as", safe(g["reason"])]] if g["reason"] else []
    if g["place"]:
        text = _where(g["place_kind"], g["place"], site)
        text += f" carries {kw(g['place_load_w'])} kW"
        if g["place_lost_w"] is not None:
            text += f", {kw(g['place_lost_w'])} kW with the other side lost"
        if g["place_limit_w"] is not None:
            text += f"; it may carry {kw(g['place_limit_w'])} kW"
        rows.append(["at", safe(text)])
    rows.append(["lift", safe(g["lift"], limit=600)])
    grid(out, ("", ""), [[Text(f"  {r[0]}", "dim"), r[1]] for r in rows], "")
    lines: list[list[Any]] = []
    for x in sorted(groups, key=lambda x: (x["rack"], x["cap_high_w"])):
        job = clean(x["job"], 40) if x["job"] else ""
        job += f", priority {x['priority']}" if x["priority"] else ""
        draws, back = (f"{v:,.0f}" if v is not None else "unheard" for v in (x["power_w"], x["read_back_w"]))
        told = "" if x["states"] == ["done"] else ", ".join(x["states"]) or "no answer"
        lines.append([f"  {short(x['rack'], site)}", f"{x['gpus']:,}",
                      _range(x["cap_low_w"], x["cap_high_w"]).removesuffix(" W"), f"{x['most_w']:,.0f}", back,
                      draws, RANKS.get(x["class"], x["class"]), safe(job), safe(told, "yellow")])  # fmt: skip
    heads = ("  rack", "GPUs", "cap W", "of W", "reads back", "draws", "class", "job", "")
    _table(heads, lines, out, (0, 6, 7, 8), (7, 8))


def show_cost(tree: dict[str, Any], out: Console) -> None:
    """Work lost and energy saved: of the site, by class, by job."""
    out.print(Text(clean(tree["site"]), "bold").append(f"  caps of the last {tree['hours']:g} h", "not bold"))
    total = tree["total"]
    if total is not None:
        rows = [_cost("site", total)]
        rows += [_cost(f"  {CLASSES.get(c['class'], c['class'])}", c) for c in tree["classes"]]
        hit = [j for j in tree["jobs"] if j["lost_most_gpu_h"] > 0]
        rows += [_cost(f"  job {j['job']}" if j["job"] else "  further jobs", j) for j in hit]
        heads = (
            "",
            "work lost\nGPU-h",
            "of its\nwork",
            "at most\nGPU-h",
            "not drawn\nkWh",
            "net\nkWh",
            "at their cap\nGPU-h",
        )
        grid(out, heads, rows, "")
        text = (
            "at most: if all GPUs at their caps wanted all they may have; net: of what was not drawn, less "
            "what the lost work takes to be made up for; of its work: of a job while it had caps, else of all"
        )
        out.print(Text(text, "dim"), soft_wrap=True)
        if free := len(tree["jobs"]) - len(hit):
            out.print(Text(f"{free:,} more jobs had caps that cost them nothing", "dim"))
    _notes(tree, out)


def _cost(name: str, c: dict[str, Any]) -> list[Any]:
    share = f"{100 * c['lost_pu']:.2f} %" if c["busy_gpu_h"] else DASH
    return [safe(name), *(f"{v:,.2f}" if abs(v) < 100 else f"{v:,.0f}" for v in (c["lost_gpu_h"],)), share,
            *(f"{v:,.2f}" if abs(v) < 100 else f"{v:,.0f}"
              for v in (c["lost_most_gpu_h"], c["saved_kwh"], c["net_kwh"], c["held_gpu_h"]))]  # fmt: skip


def show_fit(tree: dict[str, Any], out: Console) -> None:
    """How many more racks fit, by three ways of counting."""
    site = tree["site"]
    head = Text(f"{clean(site)}  ", "bold")
    head.append(f"how many more racks fit on {short(tree['feeder'], site)}", "bold")
    out.print(head, soft_wrap=True)
    plate = f"at most {kw(tree['nameplate_w'])} kW each" if tree["nameplate_w"] else "of unknown nameplate"
    out.print(safe(f"racks like {short(tree['like'], site)} ({tree['profile'] or 'no profile'}), {plate}; "
                   f"{tree['racks_there']} are there"), soft_wrap=True)  # fmt: skip
    out.print()
    risk = f"at {100 * tree['risk_pu']:g} % per hour"
    rows = []
    for key, name in (("lost", "with the other side lost"), ("both", "while both sides live")):
        f = tree[key]
        sure = f"{f['diverse']} ({f['low']} to {f['high']})" if f["diverse"] is not None else DASH
        rows.append([name, *(DASH if f[k] is None else str(f[k]) for k in ("nameplate", "peaks")), sure,
                     safe(short(f["stops"], site)) if f["stops"] else DASH])  # fmt: skip
    grid(out, ("", "by nameplate", "by peaks", risk, "what stops the next"), rows, "")
    lost = tree["lost"]
    if lost["why_not"]:
        out.print(safe(f"by nameplate alone: {lost['why_not']}", "yellow"), soft_wrap=True)
    else:
        text = f"from {lost['hours']:,} hours of {lost['days']} days, {tree['donors']} racks to learn from"
        text += "; in brackets 90 % by days drawn anew: plan with the lower end"
        out.print(safe(text, "dim"), soft_wrap=True)
    _notes(tree, out)


def show_targets(tree: dict[str, Any], out: Console) -> None:
    """Load targets, and whether they are kept."""
    rows = []
    for t in tree["targets"]:
        name = {True: "kept", False: "EXCEEDED", None: "not known"}[t["within"]] if t["runs"] else "to come"
        style = {"kept": "green", "EXCEEDED": "bold red", "not known": "yellow"}.get(name, "dim")
        where = "site" if t["site"] else "\n".join(_below_site(p["feeder"]) for p in t["places"][:3])
        if t["places_total"] > 3:
            where += f"\nand {t['places_total'] - 3} more"
        left = min((p["left_w"] for p in t["places"] if p["left_w"] is not None), default=None)
        begin = when(t["start_ns"])[:-3] if t["start_ns"] else "now"
        until = when(t["end_ns"])[:-3] if t["end_ns"] else "withdrawn"
        rows.append([Text(name, style), t["name"], kw(t["limit_w"]), kw(left), Text(where),
                     Text(f"from {begin}\nuntil {until}"),
                     Text(f"{clean(t['kind'], 40)}\n{clean(t['author'], 60)}")])  # fmt: skip
    if rows:
        _table(("", "", "limit kW", "left kW", "of", "UTC", "by"), rows, out, (0, 1, 4, 5, 6), (1, 6))
    else:
        out.print(Text("no load target runs or is to come", "dim"))
    if (more := tree["total"] - len(tree["targets"])) > 0:
        out.print(Text(f"and {more:,} more", "dim"))


def _below_site(path: Any) -> str:
    """A full name without the site's, whatever that is called."""
    return clean(path, 120).partition("/")[2] or clean(path, 120)


def show_target_set(tree: dict[str, Any], out: Console) -> None:
    """A target that was set, what flows now, and whether anybody may act on it."""
    until = f"until {when(tree['end_ns'])} UTC" if tree.get("end_ns") else "until it is withdrawn"
    begin = f"from {when(tree['start_ns'])}" if tree["start_ns"] else "from now"
    text = f"load target {tree['name']} of {kw(tree['limit_w'])} kW holds {begin} {until}"
    out.print(safe(text), soft_wrap=True)
    for place in tree["places"][:4]:
        text = _where(place["kind"], place["place"], tree["site"])
        over_w = None if place["load_w"] is None else place["load_w"] - tree["limit_w"]
        words = ": what it draws is not known"
        if over_w is not None:
            words = f" draws {kw(place['load_w'])} kW now: "
            words += f"{kw(over_w)} kW have to go" if over_w > 0 else "within it"
        out.print(Text(text + words, "yellow" if over_w is None or over_w > 0 else ""), soft_wrap=True)
    if not tree["acts"]:
        out.print(Text("no policy of power may act here: it is shown, and nothing is cut for it", "yellow"))
    text = f"`racktwin power targets` says whether it is kept, `racktwin power withdraw {tree['name']}` ends"
    out.print(safe(f"{text} it", "dim"), soft_wrap=True)


def show_withdrawn(tree: dict[str, Any], out: Console) -> None:
    """A target that was taken back."""
    out.print(safe(f"load target {tree['name']} is withdrawn"), soft_wrap=True)
