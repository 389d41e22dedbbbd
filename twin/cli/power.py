"""The commands `power` and `power why | cost | fit | targets | target | withdraw`.

Headroom, caps and their price, and room for more racks are explanations, rendered as any other; load targets
are set, listed and withdrawn here.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import NS, ConfigError, clean, utc
from twin.cli.arguments import add_command, add_connection, client_of, instant_ns, span_s, write_json
from twin.cli.explain import print_answer
from twin.report import grid, safe_text, when

if TYPE_CHECKING:
    from rich.console import Console

Shown = tuple[Any, Callable[[Any, "Console"], None]]
DASH = "-"
KINDS = ("operator", "flex", "demand_response", "utility")
_WATTS = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([kKmMgG]?[wW]|[kKmMgG])")
_HOUR = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")
_DAY_S = 86_400
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def add_parser(commands: Any) -> None:
    """The arguments of `racktwin power`."""
    what = "power: headroom, caps and their price, room for more racks, load targets"
    parser = commands.add_parser("power", help=what, description=what)
    add_connection(parser)
    parser.add_argument("--kind", help="only these: rack, feeder, cdu, loop, site; commas between them")
    parser.add_argument("--limit", type=int, default=8, help="racks at most, the fullest first (default: 8)")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    why = _action(actions, "why", "why a rack, node, GPU, job or feeder is capped, and what would lift it")
    why.add_argument("name", metavar="NAME")
    cost = _action(actions, "cost", "what caps cost in work and saved in energy")
    cost.add_argument("--hours", type=float, default=24.0, help="how far back (default: 24)")
    fit = _action(actions, "fit", "how many more racks fit on a feeder, at a risk per hour")
    fit.add_argument("feeder", metavar="FEEDER")
    fit.add_argument("--racks", metavar="PROFILE", help="of the new racks; default: of those that are there")
    fit.add_argument("--risk", type=float, default=0.01, help="chance per hour of exceeding (default: 0.01)")
    fit.add_argument("--nameplate", type=watts, metavar="POWER", help="most of a new rack, such as 132kW")
    fit.add_argument("--days", type=float, help="of history (default: 31)")
    _action(actions, "targets", "what somebody outside lets the site or feeders draw")
    target = _action(actions, "target", "let the site, or each of some feeders, draw no more than a limit")
    target.add_argument("name", metavar="NAME", help="a later target of this name takes its place")
    target.add_argument("--limit", type=watts, required=True, dest="limit_w", metavar="POWER",
                        help="such as 500kW")  # fmt: skip
    target.add_argument("--feeder", action="append", default=[], metavar="FEEDER",
                        help="this one; may be given again; none: the site's racks together")  # fmt: skip
    target.add_argument("--from", dest="start", metavar="TIME",
                        help="such as 18:00 or 2026-11-21T18:00 (UTC), or +15min; default: now")  # fmt: skip
    target.add_argument("--until", metavar="TIME",
                        help="such as 21:00 or 2026-11-21T21:00 (UTC), or 3h after it begins; "
                        "default: until it is withdrawn")  # fmt: skip
    target.add_argument("--kind", dest="target_kind", choices=KINDS, default="operator")
    target.add_argument("--best-effort", action="store_true",
                        help="what cannot be shed without disturbing jobs may stay")  # fmt: skip
    back = _action(actions, "withdraw", "take a load target back")
    back.add_argument("name", metavar="NAME")
    parser.set_defaults(refuse=parser.error)
    parser.set_defaults(handler=run_power)


def _action(actions: Any, name: str, what: str) -> argparse.ArgumentParser:
    made = add_command(actions, name, what)
    for option in made._actions:  # what was given before the action's name is not taken back by its absence
        if option.dest != "help":
            option.default = argparse.SUPPRESS
    return made


def watts(text: str) -> float:
    """A power as a person writes it: 500kW, 1.2MW, 800W. In W.

    A number alone is refused: who forgets the k would bring the site down to its floor.
    """
    found = _WATTS.fullmatch(text.strip())
    value = float(found[1]) * _FACTORS[found[2].lower().removesuffix("w")] if found else math.nan
    if not 0 <= value < 1e12:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}: expected a power with its unit, such as 500kW, 1.2MW or 800W"
        )
    return value


def run_power(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Ask or tell, and print. Raises ConfigError for what the operator can mend, ConnectorError."""
    if args.action in (None, "why", "cost", "fit"):
        path, query = _question(args)
        print_answer(client_of(args).get(path, **query), args.json, out)
        return 0
    asked = {"targets": _targets, "target": _target, "withdraw": _withdraw}
    tree, show = asked[args.action](args)
    if args.json:
        write_json(tree, out)
    else:
        show(tree, out)
    return 0


def _question(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The path and the parameters of an explanation; JSON for programs is flat."""
    form = {} if args.json else {"form": "explanation"}
    if args.action == "why":
        return "/power/why", form | {"name": args.name}
    if args.action == "cost":
        return "/power/cost", form | {"hours": args.hours}
    if args.action == "fit":
        fit = {"feeder": args.feeder, "racks": args.racks, "risk": args.risk, "nameplate_w": args.nameplate}
        return "/power/fit", form | fit | {"days": args.days}
    return "/power", form | {"kind": args.kind, "limit": args.limit}


def _targets(args: argparse.Namespace) -> Shown:
    return client_of(args).get("/load-targets"), show_targets


def _target(args: argparse.Namespace) -> Shown:
    client, start, until = client_of(args), args.start, args.until
    for option, text in (("--from", start), ("--until", until)):
        if text is not None and _span(text) is None:
            _instant(option, text, 0)  # what is no time is refused before anybody is asked
    now = client.get("/power", kind="site,feeder", limit=0)
    now_ns = int(now["now_ns"])
    start_ns = now_ns if start is None else _when("--from", start, now_ns)
    end_ns = None if until is None else _when("--until", until, start_ns)
    if end_ns is not None and end_ns <= start_ns:
        time = utc(now_ns, "%Y-%m-%dT%H:%M")
        raise ConfigError(f"--until {until[:60]!r}: over before it begins; the daemon has {time} UTC")
    body = {"name": args.name, "limit_w": args.limit_w, "feeders": args.feeder,
            "start_ns": 0 if start is None else start_ns, "end_ns": end_ns, "kind": args.target_kind,
            "best_effort": args.best_effort}  # fmt: skip
    result = client.post("/load-targets", body)
    places = [p for p in now["places"] if (p["kind"] == "feeder") == bool(args.feeder)]
    places = [p for p in places if p["kind"] == "site" or _names(p["place"], args.feeder)]
    acts = any(p["authority"] == "act" and not p["suspended"] for p in now["policies"])
    return result | {"limit_w": args.limit_w, "start_ns": body["start_ns"], "site": now["site"], "acts": acts,
                   "places": [{k: p[k] for k in ("place", "kind", "load_w")} for p in places],
                   }, show_target_set  # fmt: skip


def _names(place: str, given: list[str]) -> bool:
    return any(place == name or place.endswith(f"/{name}") for name in given)


def _withdraw(args: argparse.Namespace) -> Shown:
    from twin.api import path_of

    return client_of(args).delete(path_of("load-targets", args.name)), show_withdrawn


def _when(option: str, text: str, from_ns: int) -> int:
    """An instant, or what follows `from_ns` by a span or an hour of the day."""
    after_s = _span(text)
    return _instant(option, text, from_ns) if after_s is None else from_ns + round(after_s * NS)


def _instant(option: str, text: str, after_ns: int) -> int:
    """An instant as a person writes it, UTC unless it says so; 06:00 is the next one after `after_ns`.

    Raises ConfigError for what is none.
    """
    if hour := _HOUR.fullmatch(text.strip()):
        since_s = after_ns // NS
        of_day_s = int(hour[1]) * 3600 + int(hour[2]) * 60
        return (since_s + 1 + (of_day_s - since_s - 1) % _DAY_S) * NS
    return instant_ns(option, text, "06:00 or 2026-11-21T02:00 (UTC), or 3h, 90min")


def _span(text: str) -> float | None:
    """Seconds of a span with its unit; None for a bare number, which may be an hour."""
    text = text.strip().removeprefix("+")
    return None if text.isdigit() else span_s(text)


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
    grid(out, heads, rows, "no load target runs or is to come", (2, 3), (1, 6))
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
        out.print(Text("no policy of power may act here: it is shown, and nothing is cut for it", "yellow"))
    text = f"`racktwin power targets` says whether it is kept, `racktwin power withdraw {tree['name']}` ends"
    out.print(safe_text(f"{text} it", "dim"), soft_wrap=True)


def show_withdrawn(tree: dict[str, Any], out: Console) -> None:
    """A target that was taken back."""
    out.print(safe_text(f"load target {tree['name']} is withdrawn"), soft_wrap=True)
