"""The commands `power show | why | cost | fit | targets | target | withdraw`.

Headroom, caps and their price, and room for more racks are explanations, rendered as any other; load targets
are set, listed and withdrawn here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import ConfigError, clean, utc
from twin.cli.arguments import instant_ns, live
from twin.cli.operate.explain import show_answer
from twin.report import grid, safe_text, when

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client

DASH = "-"


def _explained(path: str, *options: str) -> Callable[[Client, argparse.Namespace], Any]:
    """Ask for an explanation of power; JSON for programs is flat."""

    def ask(client: Client, args: argparse.Namespace) -> Any:
        form = {} if args.format == "json" else {"form": "explanation"}
        return client.get(path, **form, **{name: getattr(args, name) for name in options})

    return ask


def _cost(client: Client, args: argparse.Namespace) -> Any:
    form = {} if args.format == "json" else {"form": "explanation"}
    return client.get("/power/cost", **form, hours=args.back_s / 3600.0)


def _fit(client: Client, args: argparse.Namespace) -> Any:
    form = {} if args.format == "json" else {"form": "explanation"}
    days = None if args.back_s is None else args.back_s / 86_400.0
    asked = {"feeder": args.feeder, "racks": args.racks, "risk": args.risk, "nameplate_w": args.nameplate_w}
    return client.get("/power/fit", **form, **asked, days=days)


def _target(client: Client, args: argparse.Namespace) -> Any:
    start, until = args.start, args.until
    for option, text in (("--from", start), ("--until", until)):
        if text is not None:
            instant_ns(option, text, 0)  # what is no time is refused before anybody is asked
    now = client.get("/power", kind="site,feeder", limit=0)
    now_ns = int(now["now_ns"])
    start_ns = now_ns if start is None else instant_ns("--from", start, now_ns)
    end_ns = None if until is None else instant_ns("--until", until, start_ns)
    if end_ns is not None and end_ns <= start_ns:
        time = utc(now_ns, "%Y-%m-%dT%H:%M")
        raise ConfigError(
            f"--until {until[:60]!r}: the target ends before it begins; the daemon's clock is {time} UTC"
        )
    body = {"name": args.name, "limit_w": args.limit_w, "feeders": args.feeder,
            "start_ns": 0 if start is None else start_ns, "end_ns": end_ns, "kind": args.kind,
            "best_effort": args.best_effort}  # fmt: skip
    result = client.post("/load-targets", body)
    places = [p for p in now["places"] if (p["kind"] == "feeder") == bool(args.feeder)]
    places = [p for p in places if p["kind"] == "site" or _names(p["place"], args.feeder)]
    acts = any(p["authority"] == "act" and not p["suspended"] for p in now["policies"])
    shown = [{k: p[k] for k in ("place", "kind", "load_w")} for p in places]
    terms = {"limit_w": args.limit_w, "start_ns": body["start_ns"], "site": now["site"], "acts": acts}
    return result | terms | {"places": shown}


def _withdraw(client: Client, args: argparse.Namespace) -> Any:
    from twin.api import path_of

    return client.delete(path_of("load-targets", args.name))


def _names(place: str, given: list[str]) -> bool:
    return any(place == name or place.endswith(f"/{name}") for name in given)


def kw(value: Any) -> str:
    """A power in kW; a dash for none."""
    if not isinstance(value, int | float):
        return DASH
    return f"{value / 1e3:,.1f}" if abs(value) < 999_950 else f"{value / 1e3:,.0f}"


def _place_name(kind: str, path: Any) -> str:
    return "the site" if kind == "site" else f"{kind} {_below_site(path)}"


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
    heads = ("", "", "limit kW", "left kW", "of", "UTC", "by")
    grid(out, heads, rows, "no load target, current or planned", (2, 3), (1, 6))
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
    out.print(safe_text(text), soft_wrap=True)
    for place in tree["places"][:4]:
        text = _place_name(place["kind"], place["place"])
        over_w = None if place["load_w"] is None else place["load_w"] - tree["limit_w"]
        words = ": what it draws is not known"
        if over_w is not None:
            words = f" draws {kw(place['load_w'])} kW now: "
            words += f"{kw(over_w)} kW have to go" if over_w > 0 else "within it"
        out.print(Text(text + words, "yellow" if over_w is None or over_w > 0 else ""), soft_wrap=True)
    if not tree["acts"]:
        out.print(Text("no power policy may act here: racktwin only reports the target", "yellow"))
    text = f"`racktwin power targets` shows compliance; `racktwin power withdraw {tree['name']}` ends"
    out.print(safe_text(f"{text} the target", "dim"), soft_wrap=True)


def show_withdrawn(tree: dict[str, Any], out: Console) -> None:
    """A target that was taken back."""
    out.print(safe_text(f"load target {tree['name']} is withdrawn"), soft_wrap=True)


VERBS = {
    "power show": live(
        _explained("/power", "kind", "limit"),
        show_answer,
        """
        --kind LIST  only these kinds, separated by commas: rack, feeder, cdu, loop, site
        --limit COUNT=8  maximum number of racks, the fullest first
        """,
        "",
        "--kind feeder,site",
        "--watch 10s",
        watched=True,
    ),
    "power why": live(
        _explained("/power/why", "name"),
        show_answer,
        "ENTITY>name  a rack, node, GPU, job or feeder",
        "hall1/r07",
        "job:llama",
    ),
    "power cost": live(
        _cost, show_answer, "--back DURATION=24h  time span up to now\n~--hours HOURS>back_s", "", "--back 7d"
    ),
    "power fit": live(
        _fit,
        show_answer,
        """
        FEEDER
        --racks PROFILE  profile of the new racks; default: the profile of the present ones
        --risk NUMBER=0.01  probability per hour that the limit is exceeded
        --nameplate POWER  maximum power of a new rack, such as 132kW
        --back DURATION  length of the history; default: 31d
        ~--days DAYS>back_s
        """,
        "feed-a --racks gb200-nvl72 --risk 0.001",
    ),
    "power targets": live(
        lambda client, _: client.get("/load-targets"), show_targets, "", "", rows="targets", watched=True
    ),
    "power target": live(
        _target,
        show_target_set,
        """
        NAME  name of the target; a later target of this name replaces it
        --limit POWER!  maximum power, such as 500kW
        --feeder FEEDER*  limit this feeder; repeatable; default: all racks of the site together
        --from TIME>start  begin, such as 18:00 or 2026-11-21T18:00 (UTC), or 15min from now; default: now
        --until TIME  end, such as 21:00, or 3h after the begin; default: until it is withdrawn
        --kind operator|flex|demand_response|utility=operator  origin of the target
        --best-effort  shed only what does not disturb jobs
        """,
        "evening --limit 500kW --from 18:00 --until 3h",
        "work --limit 80kW --feeder feed-a",
    ),
    "power withdraw": live(_withdraw, show_withdrawn, "NAME  name of the target", "evening"),
}
