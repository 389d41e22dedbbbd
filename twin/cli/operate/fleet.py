"""The commands `fleet status | budgets | hold | release`: halls of a hub, who holds what, and holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.text import Text

from twin.catalogue import clean, duration
from twin.cli.arguments import live
from twin.cli.grammar import WrongCall
from twin.cli.operate.power import kw
from twin.cli.operate.show import TONES, show_done
from twin.report import grid, safe_text

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client

CONTROL = "rack.hall_budget_w"
UNKNOWN = "-"
HALLS = (
    "hall", "priority", "kW", "budget", "headroom", "guaranteed", "forecast", "GPUs", "out", "alarms", "heard"
)  # fmt: skip
HALL = "HALL  name of the hall, such as hall-a"


def show_fleet(tree: dict[str, Any], out: Console) -> None:
    """Print a line for each hall, what people asked for, and what is left of all that they share."""
    halls = tree["halls"]
    silent = [row["hall"] for row in halls if not row["heard"]]
    head = Text(clean(tree["site"]), "bold")
    head.append(f"  {clean(tree['role'])}", "green" if tree["role"] == "leader" else "yellow")
    head.append(f"  {len(halls)} halls, powers in kW")
    if silent:
        head.append(f"  {len(silent)} silent: {clean(', '.join(silent), 200)}", "yellow")
    if tree["authority"] != "act" or tree["suspended"]:
        head.append(
            f"  budgets are not lent: {'suspended' if tree['suspended'] else tree['authority']}", "red"
        )
    out.print(head)
    out.print()
    grid(out, HALLS, [_hall(row) for row in halls], "no halls", right=range(1, 9))
    _holds(halls, out)
    out.print()
    for row in tree["feeders"]:
        out.print(_feeder(row), soft_wrap=True)


def show_budgets(tree: dict[str, Any], out: Console) -> None:
    """Print each shared feeder, loop and contract with who holds what of it, and why."""
    for feeder in tree["feeders"]:
        out.print(_feeder(feeder), soft_wrap=True)
        rows = [[clean(part["hall"]), kw(part["part_w"]), kw(part["guaranteed_w"]), clean(part["why"], 300)]
                for part in feeder["parts"]]  # fmt: skip
        grid(out, ("hall", "kW", "of it guaranteed", "because"), rows, "no hall holds a share")
        out.print()
    _holds(tree["halls"], out)


def _hall(row: dict[str, Any]) -> list[Any]:
    age = duration(row["age_s"]) if row["age_s"] is not None else "never"
    return [
        clean(row["hall"]),
        str(row["priority"]),
        kw(row["power_w"]),
        kw(row["budget_w"]),
        kw(row["headroom_w"]),
        kw(row["guaranteed_w"]),
        kw(row["demand_w"]),
        _whole(row["gpu_count"]),
        _whole(row["gpu_out_count"]),
        _alarms(row["alarms"]) if row["heard"] else safe_text(UNKNOWN, "yellow"),
        safe_text(f"{age} ago" if row["heard"] else f"silent, {age}", "" if row["heard"] else "yellow"),
    ]


def _alarms(alarms: dict[str, float | None]) -> Text:
    line = Text()
    for severity, count in alarms.items():
        if count is None or count:
            line.append(f"{_whole(count)} {severity} ", TONES[severity])
    return line if line.plain else Text("none")


def _feeder(row: dict[str, Any]) -> Text:
    line = Text(clean(row["feeder"]), "bold")
    line.append(f"  {row['kind']}" if row["kind"] != "feeder" else "")
    line.append(f"  side {row['side']}" if row["side"] else "")
    if row["lost"]:
        line.append("  lost", "bold red")
        return line
    line.append(f"  may carry {kw(row['budget_w'])} kW")
    if row["held_w"] is not None:
        line.append(f"; halls may hold {kw(row['held_w'])} kW, {kw(row['left_w'])} kW left")
    if row["why"]:
        line.append(f"  {clean(row['why'], 300)}", "yellow")
    return line


def _holds(halls: list[dict[str, Any]], out: Console) -> None:
    for row in halls:
        for hold in row["holds"]:
            text = f"{clean(row['hall'])} is held to {kw(hold['budget_w'])} kW by {clean(hold['author'])}"
            out.print(Text(f"{text}: {clean(hold['reason'], 300)}", "yellow"), soft_wrap=True)


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _named(client: Client, hall: str) -> dict[str, Any]:
    """The row of a hall by its own or full name. Raises WrongCall."""
    halls = client.get("/fleet")["halls"]
    found = [row for row in halls if hall in (row["hall"], row["name"])]
    if not found:
        known = clean(", ".join(row["hall"] for row in halls), 300)
        raise WrongCall(f"{clean(hall, 80)!r} is no hall that this token sees; expected one of {known}")
    return dict(found[0])


def _hold(client: Client, args: argparse.Namespace) -> Any:
    """Narrow a budget; without one, to what it is now."""
    row = _named(client, args.hall)
    budget_w = row["budget_w"] if args.budget_w is None else args.budget_w
    body = {"control": CONTROL, "names": [row["name"]], "hi": budget_w, "for_s": args.for_s}
    return client.post("/requests", body | {"reason": args.reason}) | {
        "hall": row["hall"],
        "budget_w": budget_w,
    }


def _release(client: Client, args: argparse.Namespace) -> Any:
    """Take back all that people asked of one hall alone."""
    from twin.api import path_of

    row = _named(client, args.hall)
    own = [hold["id"] for hold in row["holds"] if hold["halls"] == 1]
    if not own:
        others = ", ".join(hold["id"] for hold in row["holds"])
        hint = f"; of several halls at once: racktwin control withdraw {others}" if others else ""
        raise WrongCall(f"the budget of {row['hall']} is not held{hint}")
    for identity in own:
        client.delete(path_of("requests", identity))
    left = [
        f"still held to {kw(hold['budget_w'])} kW by {hold['author']}, with other halls: "
        f"racktwin control withdraw {hold['id']}"
        for hold in row["holds"]
        if hold["halls"] != 1
    ]
    return {"done": True, "hall": row["hall"], "withdrawn": own, "warnings": left}


VERBS = {
    "fleet status": live(
        lambda client, _: client.get("/fleet"), show_fleet, "", "", "--watch 5s", rows="halls", watched=True
    ),
    "fleet budgets": live(
        lambda client, _: client.get("/fleet"), show_budgets, "", "", rows="feeders", watched=True
    ),
    "fleet hold": live(
        _hold,
        show_done,
        f"""
        {HALL}
        --budget POWER  upper limit of the budget, such as 4MW; default: the present budget
        --for DURATION!  duration of the limit
        --reason TEXT!  reason; the journal records it
        """,
        "hall-a --for 2h --reason 'work on feeder B'",
        "hall-a --budget 4.5MW --for 8h --reason 'hot day'",
    ),
    "fleet release": live(_release, show_done, HALL, "hall-a"),
}
