"""The operator's commands: questions and orders of a person on duty to a running daemon.

The commands ask nothing back: what an action needs is an option, so that it can be written into a runbook.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twin.cli.arguments import instant_ns, live
from twin.cli.grammar import WrongCall
from twin.cli.operate import show

if TYPE_CHECKING:
    from twin.api import Client

Answer = Callable[["Client", argparse.Namespace], Any]


def _get(path: str, *options: str) -> Answer:
    """Ask at a path, with these options as parameters."""
    return lambda client, args: client.get(path, **{name: getattr(args, name) for name in options})


def _post(path: str, *options: str) -> Answer:
    """Post to a path, with these options as the body."""
    return lambda client, args: client.post(path, {name: getattr(args, name) for name in options})


def _alarm(action: str, *options: str) -> Answer:
    """Do this to an alarm."""
    return lambda client, args: _post(_path("alarms", args.alarm, action), *options)(client, args)


def _path(*parts: str) -> str:
    from twin.api import path_of

    return path_of(*parts)


def _end(kind: str) -> Answer:
    """Take back what an id names."""
    return lambda client, args: client.delete(_path(kind, args.id))


def _request(client: Client, args: argparse.Namespace) -> Any:
    if args.lo is None and args.hi is None and args.want is None:
        raise WrongCall("a bound is missing: expected --lo, --hi or --want")
    return _post("/requests", "control", "names", "lo", "hi", "want", "for_s", "reason")(client, args)


def _withdraw(client: Client, args: argparse.Namespace) -> Any:
    return _end("approvals" if "approval" in args else "requests")(client, args)


def _authority(client: Client, args: argparse.Namespace) -> Any:
    if args.authority == "act" and not args.acknowledge:
        raise WrongCall(
            f'act requires --acknowledge "{args.policy} may act on SITE", with the name of the site'
        )
    return _post("/authority", "policy", "authority", "reason", "acknowledge")(client, args)


def _tested(client: Client, args: argparse.Namespace) -> Any:
    if args.passed == args.failed:
        raise WrongCall("expected --passed or --failed")
    body = {"note": args.note, "passed": args.passed, "test": args.test}
    for name in ("began", "ended"):
        if (text := getattr(args, name)) is not None:
            body[f"{name}_ns"] = instant_ns(f"--{name}", text, time.time_ns(), toward=-1)
    return client.post(_path("nodes", args.node, "tested"), body)


def _repaired(client: Client, args: argparse.Namespace) -> Any:
    return _post(_path("nodes", args.node, "repaired"), "note")(client, args)


MOST_PAGES = 100  # of one listing, each of which searches the journal for about a second
REASON = "--reason TEXT!  reason; the journal records it"


def _decisions(client: Client, args: argparse.Namespace) -> Any:
    """The latest, or those of a time of the past: further pages until the limit is full."""
    query = {name: getattr(args, name) for name in ("kind", "control", "policy", "before")}
    now_ns = time.time_ns()
    for name in ("since", "until"):
        if (text := getattr(args, name)) is not None:
            query[name] = instant_ns(f"--{name}", text, now_ns, toward=-1)
    if args.entity is not None:
        query |= {"entity": args.entity, "below": "true"}
    if args.kind is None:
        query["events"] = "few"
    whole = client.get("/decisions", limit=args.limit, **query)
    past = args.since is not None or args.until is not None or args.before is not None
    for _ in range(MOST_PAGES if past else 0):
        room = args.limit - len(whole["decisions"])
        if whole["next"] is None or room <= 0:
            break
        page = client.get("/decisions", limit=room, **{**query, "before": whole["next"]})
        page["decisions"] = whole["decisions"] + page["decisions"]
        page["searched_ns"][1] = whole["searched_ns"][1]
        page["events_left_out"] += whole["events_left_out"]
        whole = page
    return whole


ENTITY = "--entity ENTITY  only this entity and everything below it, such as hall1/r07"
ALARM = "ALARM  id of the alarm, as `racktwin alarm list` shows it"
POLICY = "POLICY  name of the policy, such as thermal_guard"
CONTROL = "CONTROL  name of the control, such as gpu.power_cap_w"
NODE = "NODE  path of the node, such as hall1/r07/node3"
NOTE = "--note TEXT=  note for the record, such as a ticket number"

VERBS = {
    "status": live(
        _get("/summary"),
        show.show_status,
        "",
        "",
        "--watch",
        "--url https://twin:8077 --format json",
        watched=True,
    ),
    "daemon reload": live(_post("/reload"), show.show_done, "", ""),
    "alarm list": live(
        _get("/alarms", "severity", "entity"),
        show.show_alarms,
        f"--severity LIST  only these severities, separated by commas: critical, warning, info\n{ENTITY}",
        "",
        "--severity critical,warning --entity hall1/r07",
        "--format csv --out alarms.csv",
        rows="alarms",
        watched=True,
    ),
    "alarm ack": live(
        _alarm("ack", "note"),
        show.show_done,
        f"{ALARM}\n--note TEXT=  note for the next person on duty",
        "leak/rack:hall1/r07 --note 'plumber is called'",
    ),
    "alarm shelve": live(
        _alarm("shelve", "for_s", "reason"),
        show.show_done,
        f"{ALARM}\n--for DURATION!  duration\n{REASON}",
        "sensor/cdu:hall1/cdu1 --for 2h --reason 'sensor is replaced'",
    ),
    "alarm unshelve": live(_alarm("unshelve"), show.show_done, ALARM, "sensor/cdu:hall1/cdu1"),
    "control decisions": live(
        _decisions,
        show.show_decisions,
        f"""
        --kind LIST  only these kinds, such as command,advice,event,finding; default: all, with few events
        {ENTITY}; job:NAME includes the nodes that the job ran on
        --control CONTROL  only decisions on this control, such as gpu.power_cap_w
        --policy POLICY  only decisions of this policy or about it
        --since TIME  from this time, such as 2026-03-14T02:00 (UTC), 02:00, or 3h for three hours ago
        --until TIME  up to this time, read from the journal on disk
        --before PLACE  only decisions before this place, as the last output shows it
        --limit COUNT=40  maximum number of decisions
        """,
        "",
        "--kind command --entity hall1/r07 --limit 10",
        "--entity hall1/r07/node3 --since 2026-03-01 --until 2026-04-01",
        rows="decisions",
        watched=True,
    ),
    "control hold": live(_post("/hold", "reason"), show.show_done, REASON, "--reason 'work on feeder A'"),
    "control release": live(_post("/release", "reason"), show.show_done, REASON, "--reason 'caps are wrong'"),
    "control resume": live(
        _post("/resume", "reason"), show.show_done, REASON.replace("!", ""), "", "--reason 'feeder A is back'"
    ),
    "control request": live(
        _request,
        show.show_done,
        f"""
        {CONTROL}
        NAME+>names  entities; a rack or hall stands for everything below it
        --lo VALUE  lower bound: a number, or the name of a state
        --hi VALUE  upper bound
        --want VALUE  preferred value
        --for DURATION  duration of the request; default: until it is withdrawn
        {REASON}
        """,
        "gpu.power_cap_w hall1/r07 --hi 800 --for 2h --reason 'hot aisle'",
    ),
    "control requests": live(_get("/requests"), show.show_requests, "", "", rows="requests", watched=True),
    "control withdraw": live(
        _withdraw, show.show_done, "ID  as `racktwin control requests` lists it\n~--approval", "request-3"
    ),
    "policy list": live(_get("/summary"), show.show_authority, "", "", rows="policies", watched=True),
    "policy set": live(
        _authority,
        show.show_done,
        f"""
        {POLICY}
        off|advise|approve|act>authority  new authority of the policy
        {REASON}
        --acknowledge SENTENCE  required for act: "POLICY may act on SITE", with the names
        """,
        "thermal_guard approve --reason 'a week of good advice'",
        "thermal_guard act --reason 'armed' --acknowledge 'thermal_guard may act on pod1'",
    ),
    "policy approvals": live(_get("/approvals"), show.show_approvals, "", "", rows="approvals", watched=True),
    "policy approve": live(
        _post("/approvals", "policy", "control", "names", "for_s", "reason"),
        show.show_done,
        f"""
        {POLICY}
        {CONTROL}
        NAME*>names  entities; default: all entities that the policy proposes
        --for DURATION=1h  duration of the approval
        {REASON.replace("!", "")}
        """,
        "thermal_guard gpu.power_cap_w hall1/r07 --for 2h --reason 'hot aisle'",
    ),
    "policy revoke": live(
        _end("approvals"), show.show_done, "ID  as `racktwin policy approvals` lists it", "approval-3"
    ),
    "device show": live(
        lambda client, args: client.get(_path("comparisons", args.name)),
        show.show_comparisons,
        "ENTITY>name  a GPU, node, rack, CDU, loop or feeder",
        "hall1/r07/node3/gpu1",
        "hall1/cdu1 --watch 10s",
        rows="comparisons",
        watched=True,
    ),
    "device maintain": live(
        _post("/maintenance", "table", "names", "for_s", "reason"),
        show.show_done,
        f"""
        TABLE  kind of the entities: rack, node, gpu, cdu, ...
        NAME+>names  names of the entities
        --for DURATION!  duration of the window
        {REASON}
        """,
        "rack hall1/r07 --for 2h --reason 'pump is replaced'",
    ),
    "device windows": live(_get("/maintenance"), show.show_maintenance, "", "", rows="windows", watched=True),
    "device close": live(
        _end("maintenance"), show.show_done, "ID  window, as `racktwin device windows` lists it", "window-3"
    ),
    "device repaired": live(
        _repaired, show.show_done, f"{NODE}\n{NOTE}", "hall1/r07/node3 --note 'new DIMM, INC-4711'"
    ),
    "device tested": live(
        _tested,
        show.show_done,
        f"""
        {NODE}
        {NOTE}
        --passed  the node passed
        --failed  the node failed
        --test NAME=  name of the test
        --began TIME  such as 02:00, 2026-11-21T02:00 (UTC), or 3h for three hours ago; default: its end
        --ended TIME  end of the test; default: now
        """,
        "hall1/r07/node3 --passed --test burn-in --began 3h",
    ),
}
