"""The operator's commands: what a person on duty asks of a running daemon, and tells it to do.

The commands ask nothing back: what an action needs is an option, so that it can be written into a runbook.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.catalogue import ConfigError
from twin.cli import forecast, health
from twin.cli.arguments import AUTHORITY, add_command, client_of, instant_ns, span_s, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from twin.api import Client


COMMANDS = ("status", "alarms", "decisions", "approve", "hold", "release", "resume", "request", "withdraw",
            "forecasts", "health", "outlook", "authority", "maintenance", "ack", "shelve", "unshelve",
            "node", "token", "reload")  # fmt: skip


class WrongCall(Exception):
    """The command was called in a way that makes no sense; exit code 2."""


def duration(text: str) -> float:
    """Seconds of `90`, `90s`, `15min`, `2h`, `1d`."""
    seconds = span_s(text)
    if seconds is None or not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time such as 90s, 15min, 2h or 1d")
    return seconds


def level(text: str) -> float | str:
    """A number, or the name of a state."""
    try:
        value = float(text)
    except ValueError:
        return text
    if value != value or abs(value) == float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number; leave a bound out for none")
    return value


def add_parsers(commands: Any) -> None:
    """All commands of this file."""
    _reading(commands)
    _acting(commands)
    _node(commands)
    _token(commands)
    for name in COMMANDS:
        commands.choices[name].set_defaults(handler=run_live)


def _reading(commands: Any) -> None:
    add_command(commands, "status", "show leader, alarms, commands with their reasons, and sources")
    alarms = add_command(commands, "alarms", "list active alarms, the most severe first")
    alarms.add_argument("--severity", help="comma-separated: critical, warning, info")
    alarms.add_argument("--entity", help="only this entity and everything below it")
    forecasts = add_command(commands, "forecasts", "show forecasts of power and demand with 90 %% bands")
    forecast.add_arguments(forecasts)
    health.add_arguments(add_command(commands, "health", "show the health of the site or of one part"))
    decisions = add_command(commands, "decisions", "list the latest decisions with their reasons")
    decisions.add_argument("--kind", help="comma-separated: command, advice, event, finding, ...")
    decisions.add_argument("--entity", help="only those about this entity")
    decisions.add_argument("--control", help="only those on this control, such as gpu.power_cap_w")
    decisions.add_argument("--limit", type=int, default=40, help="lines at most (default: 40)")


def _acting(commands: Any) -> None:
    approve = add_command(
        commands, "approve", "let a policy act for a while; without arguments: list what waits for approval"
    )
    approve.add_argument("policy", nargs="?", metavar="POLICY", help="such as thermal_guard")
    approve.add_argument("control", nargs="?", metavar="CONTROL", help="such as gpu.power_cap_w")
    approve.add_argument("names", nargs="*", metavar="NAME",
                         help="entities, racks or halls (default: all that it proposes)")  # fmt: skip
    approve.add_argument("--for", dest="for_s", type=duration, default=3600.0, metavar="TIME",
                         help="how long, such as 2h (default: 1h)")  # fmt: skip
    for name, what in (("hold", "freeze the site: no new values; protective moves still pass"),
                       ("release", "let all leases lapse; nothing is commanded until resume")):  # fmt: skip
        add_command(commands, name, what).add_argument("--reason", required=True, help="kept in the journal")
    add_command(commands, "resume", "end a hold or a release").add_argument(
        "--reason", help="kept in the journal"
    )
    request = add_command(
        commands, "request", "keep a control within bounds; without arguments: list standing requests"
    )
    request.add_argument("control", nargs="?", metavar="CONTROL", help="such as gpu.power_cap_w")
    request.add_argument("names", nargs="*", metavar="NAME",
                         help="entities; a rack or hall stands for everything below it")  # fmt: skip
    for bound, what in (("--lo", "lower bound"), ("--hi", "upper bound"), ("--want", "preferred value")):
        request.add_argument(bound, type=level, metavar="VALUE", help=f"{what}: a number or a state's name")
    request.add_argument("--for", dest="for_s", type=duration, metavar="TIME",
                         help="how long, such as 2h (default: until withdrawn)")  # fmt: skip
    request.add_argument("--reason", help="kept in the journal")
    withdraw = add_command(commands, "withdraw", "withdraw a request or an approval")
    withdraw.add_argument("id", metavar="ID", help="as `racktwin request` or `racktwin approve` lists it")
    withdraw.add_argument("--approval", action="store_true", help="ID names an approval, not a request")
    authority = add_command(
        commands, "authority", "set the authority of a policy; without arguments: list all"
    )
    authority.add_argument("policy", nargs="?", metavar="POLICY", help="such as thermal_guard")
    authority.add_argument("level", nargs="?", choices=AUTHORITY, help="its new authority")
    authority.add_argument("--reason", help="kept in the journal")
    authority.add_argument(
        "--acknowledge", metavar="SENTENCE", help='needed for act: "POLICY may act on SITE"'
    )
    maintenance = add_command(
        commands, "maintenance", "open or close a maintenance window; without arguments: list open windows"
    )
    maintenance.add_argument("table", nargs="?", metavar="TABLE", help="rack, node, gpu, cdu, ...")
    maintenance.add_argument("names", nargs="*", metavar="NAME", help="entities of that table")
    maintenance.add_argument(
        "--for", dest="for_s", type=duration, metavar="TIME", help="how long, such as 2h"
    )
    maintenance.add_argument("--reason", help="kept in the journal")
    maintenance.add_argument("--end", metavar="ID", help="close this window now")
    ack = add_command(commands, "ack", "acknowledge an alarm")
    ack.add_argument("--note", default="", help="for the next person on duty")
    shelve = add_command(commands, "shelve", "shelve an alarm for a while")
    shelve.add_argument("--for", dest="for_s", type=duration, required=True, metavar="TIME",
                        help="how long, such as 2h")  # fmt: skip
    shelve.add_argument("--reason", required=True, help="kept in the journal")
    for one in (ack, shelve, add_command(commands, "unshelve", "end the shelving of an alarm")):
        one.add_argument("alarm", metavar="ALARM", help="id, as `racktwin alarms` lists it")
    add_command(commands, "reload", "make the daemon read its configuration, site and tokens again")
    outlook = add_command(
        commands, "outlook", "send future values, such as prices; without arguments: list those in force"
    )
    outlook.add_argument("file", type=Path, nargs="?", metavar="FILE", help="CSV of future times and values")
    outlook.add_argument("--quantity", metavar="KEY", help="such as site.outdoor_temp_c or rack.power_w")
    outlook.add_argument("--name", default="", metavar="ENTITY", help="such as hall1/r07 (default: the site)")
    outlook.add_argument("--time-column", default="time", metavar="COLUMN", help="default: time")
    outlook.add_argument("--value-column", default="value", metavar="COLUMN", help="default: value")
    outlook.add_argument(
        "--zone", default="UTC", help="zone of times without an offset, such as Europe/Berlin (default: UTC)"
    )


def _node(commands: Any) -> None:
    what = "report that a node was repaired, or how a test of it ended"
    parser = commands.add_parser("node", help=what, description=what)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    repaired = add_command(actions, "repaired", "the node was repaired and now waits for a test")
    tested = add_command(actions, "tested", "a test ended; it counts like the site's own burn-in")
    for one in (repaired, tested):
        one.add_argument("node", metavar="NODE", help="such as hall1/r07/node3")
        one.add_argument("--note", default="", help="kept in the node's record, such as a ticket")
    passed = tested.add_mutually_exclusive_group(required=True)
    passed.add_argument("--passed", action="store_true", help="the node passed")
    passed.add_argument("--failed", action="store_true", help="the node failed")
    tested.add_argument("--test", default="", help="name of the test")
    tested.add_argument("--began", help="such as 2026-11-21T02:00 (UTC); default: when it ended")
    tested.add_argument("--ended", help="default: now")


def _token(commands: Any) -> None:
    token = commands.add_parser("token", help="make, list and revoke tokens of the HTTP interface")
    actions = token.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, what in (("add", "make a token; its text is shown once"), ("list", "list all tokens"),
                       ("revoke", "revoke a token; then reload the daemon")):  # fmt: skip
        one = actions.add_parser(name, help=what, description=what, allow_abbrev=False)
        where = one.add_mutually_exclusive_group(required=True)
        where.add_argument("--config", type=Path, help="the daemon's configuration")
        where.add_argument("--tokens-file", type=Path, help="file of token hashes")
        if name != "list":
            one.add_argument("name", help="owner of the token; the journal names it as author")
        if name == "add":
            one.add_argument("--role", choices=("job", "viewer", "operator", "admin"), default="viewer",
                             help="default: viewer")  # fmt: skip
            one.add_argument("--expires-days", type=float, metavar="DAYS", help="default: never")
            one.add_argument("-o", "--output", type=Path, help="write the token to this file, mode 0600")
        one.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run_live(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Carry out one of these commands; 0 done, 1 the answer is no, 2 a wrong call."""
    from twin.cli.show import SHOW, show_done
    from twin.report import escape

    if args.command == "token":
        return _tokens(args, out, err)
    try:
        call, shown = _call(args)
    except WrongCall as error:
        err.print(
            f"[red]error[/red] {escape(str(error))}; see racktwin {args.command} --help", soft_wrap=True
        )
        return 2
    tree = call(client_of(args))
    if args.json:
        write_json(tree, out)
    elif shown == "forecasts":
        forecast.show(tree, out)
    elif shown == "health":
        health.show(tree, out)
    else:
        SHOW.get(shown, show_done)(tree, out)
    return 0


def _call(args: argparse.Namespace) -> tuple[Callable[[Client], Any], str]:
    """(what to ask, how to show the answer). Raises WrongCall."""
    name = args.command
    if name == "status":
        return lambda c: c.get("/summary"), "status"
    if name == "forecasts":
        return forecast.call(args), "forecasts"
    if name == "health":
        return health.call(args), "health"
    if name == "alarms":
        return lambda c: c.get("/alarms", severity=args.severity, entity=args.entity), "alarms"
    if name == "decisions":
        return lambda c: c.get("/decisions", kind=args.kind, entity=args.entity, control=args.control,
                               limit=args.limit), "decisions"  # fmt: skip
    if name in ("hold", "release", "resume"):
        return lambda c: c.post(f"/{name}", {"reason": args.reason}), "done"
    if name == "reload":
        return lambda c: c.post("/reload", {}), "done"
    if name in ("ack", "shelve", "unshelve"):
        return _alarm(args), "done"
    asks = {"approve": _approve, "request": _request, "withdraw": _withdraw, "authority": _authority,
            "maintenance": _maintenance, "outlook": _outlook, "node": _node_report}  # fmt: skip
    return asks[name](args)


Request = tuple[Callable[["Client"], Any], str]


def _alarm(args: argparse.Namespace) -> Callable[[Client], Any]:
    from twin.api import path_of

    body: dict[str, Any] = {}
    if args.command == "ack":
        body = {"note": args.note}
    elif args.command == "shelve":
        body = {"for_s": args.for_s, "reason": args.reason}
    return lambda c: c.post(path_of("alarms", args.alarm, args.command), body)


def _approve(args: argparse.Namespace) -> Request:
    if args.policy is None:
        return lambda c: c.get("/approvals"), "approvals"
    if args.control is None:
        raise WrongCall(
            "a control is missing: racktwin approve POLICY CONTROL [NAME ...] --for 1h; "
            "`racktwin authority` lists the policies and their controls"
        )
    body = {"policy": args.policy, "control": args.control, "names": args.names, "for_s": args.for_s}
    return lambda c: c.post("/approvals", body), "done"


def _request(args: argparse.Namespace) -> Request:
    if args.control is None:
        return lambda c: c.get("/requests"), "requests"
    if not args.names:
        raise WrongCall("names are missing: racktwin request CONTROL NAME ... --hi 800 --reason TEXT")
    if args.lo is None and args.hi is None and args.want is None:
        raise WrongCall("a bound is missing: expected --lo, --hi or --want")
    if not args.reason:
        raise WrongCall("--reason is missing; the journal keeps it")
    body = {"control": args.control, "names": args.names, "lo": args.lo, "hi": args.hi, "want": args.want,
            "for_s": args.for_s, "reason": args.reason}  # fmt: skip
    return lambda c: c.post("/requests", body), "done"


def _outlook(args: argparse.Namespace) -> Request:
    if args.file is None:
        return lambda c: c.get("/outlooks", quantity=args.quantity), "outlooks"
    if not args.quantity:
        raise WrongCall("--quantity is missing: racktwin outlook FILE --quantity site.outdoor_temp_c")
    from twin.tables import SeriesOptions, read_series, to_tell

    read = read_series([args.file], args.time_column, [args.value_column], SeriesOptions(zone=args.zone))

    def send(client: Client) -> Any:
        now_ns = client.get("/outlooks", limit=1)["now_ns"]  # what is over by the daemon's clock is left out
        body, warnings = to_tell(read, now_ns, args.file.name)
        tree = client.post("/outlooks", body | {"quantity": args.quantity, "name": args.name})
        return tree | {"warnings": warnings} if warnings else tree

    return send, "done"


def _node_report(args: argparse.Namespace) -> Request:
    from twin.api import path_of

    body: dict[str, Any] = {"note": args.note}
    if args.action == "tested":
        body |= {"passed": args.passed, "test": args.test}
        for option in ("began", "ended"):
            if (text := getattr(args, option)) is not None:
                body[f"{option}_ns"] = instant_ns(f"--{option}", text)
    return lambda c: c.post(path_of("nodes", args.node, args.action), body), "done"


def _withdraw(args: argparse.Namespace) -> Request:
    from twin.api import path_of

    kind = "approvals" if args.approval else "requests"
    return lambda c: c.delete(path_of(kind, args.id)), "done"


def _authority(args: argparse.Namespace) -> Request:
    if args.policy is None:
        return lambda c: c.get("/summary"), "authority"
    if args.level is None:
        raise WrongCall("a level is missing: racktwin authority POLICY off|advise|approve|act --reason TEXT")
    if not args.reason:
        raise WrongCall("--reason is missing; the journal keeps it")
    if args.level == "act" and not args.acknowledge:
        raise WrongCall(
            f'to let it act, say so: --acknowledge "{args.policy} may act on SITE", with the site\'s name'
        )
    body = {"policy": args.policy, "authority": args.level, "reason": args.reason,
            "acknowledge": args.acknowledge}  # fmt: skip
    return lambda c: c.post("/authority", body), "done"


def _maintenance(args: argparse.Namespace) -> Request:
    from twin.api import path_of

    if args.end is not None:
        return lambda c: c.delete(path_of("maintenance", args.end)), "done"
    if args.table is None:
        return lambda c: c.get("/maintenance"), "maintenance"
    if not args.names or args.for_s is None or not args.reason:
        raise WrongCall("expected racktwin maintenance TABLE NAME ... --for 2h --reason TEXT")
    body = {"table": args.table, "names": args.names, "for_s": args.for_s, "reason": args.reason}
    return lambda c: c.post("/maintenance", body), "done"


def _tokens(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Tokens are made where their file lies: no network carries one before it is known."""
    from twin.api import tokens
    from twin.cli.show import show_tokens

    path: Path = args.tokens_file
    if args.config is not None:
        from twin.config import load_config

        loaded = load_config(args.config)
        given = loaded.config.api.tokens_file if loaded.config.api is not None else None
        path = loaded.state / tokens.LOCAL_FILES[0] if given is None else loaded.file(given)
    if args.action == "list":
        if not path.exists():
            raise ConfigError(f"{path}: is not there; `racktwin token add` makes it")
        show_tokens(tokens.read_tokens(path), tokens.check_mode(path), args.json, out, err)
        return 0
    if args.action == "revoke":
        tokens.revoke_token(path, args.name)
        result: dict[str, Any] = {"revoked": args.name, "file": str(path)}
    else:
        secret = tokens.add_token(path, args.name, args.role, args.expires_days)
        result = {"name": args.name, "role": args.role, "file": str(path)}
        if args.output is not None:
            tokens.write_private(args.output, secret + "\n")
            result["output"] = str(args.output)
        else:
            result["token"] = secret
    if args.json:
        write_json(result, out)
    elif "token" in result:
        out.file.write(result["token"] + "\n")
    if not args.json:
        err.print(f"{path}: written; a running daemon takes it up at `racktwin reload` or SIGHUP",
                  markup=False, soft_wrap=True)  # fmt: skip
    return 0
