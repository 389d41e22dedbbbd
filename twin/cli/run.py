"""`racktwin daemon run`: the daemon as a process: signals, logs, the service manager, exit codes.

Exit codes: 0 stopped as asked, 1 something broke (the service manager starts it again), 78 the
configuration is wrong (it does not; `RestartPreventExitStatus` in the unit).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from typing import Any

from rich.console import Console
from rich.text import Text

from twin.catalogue import ConfigError, ConnectorError, StorageError, TwinError, clean, counted
from twin.cli.arguments import write_json
from twin.cli.grammar import CONFIG, Verb
from twin.config import Loaded, find_config, load_config, set_up, take_down
from twin.daemon import SdNotify
from twin.report import print_error

log = logging.getLogger("racktwin")
SHOWN_SOURCES = 50  # by --online
WRONG_CONFIG = 78  # EX_CONFIG of sysexits.h


def run_daemon(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Run until a signal says stop."""
    if "check" in args:
        return run_check(args, out, err)
    try:
        loaded = load_config(find_config(args.config))
        if args.command == "fleet run":
            _need_hub(loaded)
    except ConfigError as error:
        return _refused(error, err)
    # Until the loop has its own handlers: a stop that comes this early is a clean one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is read at the start is new anyway
    writer = set_up("debug" if args.verbose else "info", as_json=args.log_json)
    try:
        import uvloop

        return uvloop.run(_main(loaded))
    except ConfigError as error:
        for problem in error.problems:
            log.error("%s", problem)
        return WRONG_CONFIG
    except StorageError as error:
        log.critical("%s; nothing more is commanded, and the daemon ends", error)
        return 1
    except ConnectorError as error:
        log.critical("cannot start: %s", error)
        return 1
    except TwinError:
        log.critical("an invariant is broken; leases lapse, and the daemon ends", exc_info=True)
        return 1
    finally:
        take_down(writer)


def _need_hub(loaded: Loaded) -> None:
    """Raises ConfigError where this is the configuration of a hall, or of a daemon without a fleet."""
    fleet = loaded.config.fleet
    if fleet is None or fleet.hall is not None:
        raise ConfigError(
            f"{loaded.path}: $.fleet: {'missing' if fleet is None else f'is of hall {fleet.hall}'}; expected "
            "the servers of a hub, without `hall` (a hub below another hub sets its hall in `above`); "
            "start a hall with `racktwin daemon run`"
        )


def run_check(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Check configuration and site; print what it would read and do."""
    is_json = getattr(args, "format", "table") == "json"
    try:
        loaded = load_config(find_config(args.config))
        report = _check(loaded)
        if not is_json:
            _show(report, out)
        if getattr(args, "online", False):
            report["online"] = asked = _ask_online(loaded, args.listen_s)
            report["ok"] = all(answer["ok"] for answer in asked["endpoints"])
            if not is_json:
                _show_online(asked, out)
    except ConfigError as error:
        if is_json:
            write_json({"ok": False, "faults": list(error.problems)}, out)
        return _refused(error, err)
    if is_json:
        write_json(report, out)
    return 0 if report["ok"] else 1


def _refused(error: ConfigError, err: Console) -> int:
    for problem in error.problems:
        print_error(err, problem)
    return WRONG_CONFIG


def _check(loaded: Loaded) -> dict[str, Any]:
    """Everything that can be checked without contacting other hosts. Raises ConfigError."""
    from twin.config import (
        actuator_notes,
        broker_notes,
        burn_in_notes,
        journal_notes,
        power_notes,
        scheduler_notes,
        underfed,
        unguarded,
    )
    from twin.daemon import load_checked
    from twin.site import share_notes
    from twin.wiring import (
        actuator_faults,
        external_file_faults,
        fleet_faults,
        host_notes,
        power_faults,
        reading_notes,
        telemetry_faults,
        telemetry_notes,
        without_uncheckable,
    )

    faults, notes = external_file_faults(loaded)
    _, site, configured = load_checked(without_uncheckable(loaded), faults)
    unknown = [
        *telemetry_faults(loaded, site),
        *actuator_faults(loaded, site),
        *power_faults(loaded, site),
        *fleet_faults(loaded, site),
    ]
    if unknown:
        raise ConfigError(unknown)
    config = loaded.config
    if any(level in ("approve", "act") for level in configured.values()):
        notes += scheduler_notes(config.jobs.slurm, config.kubernetes, config.burn_in)
        notes += actuator_notes(config.redfish, config.dcmi)
    notes += [
        *journal_notes(config),
        *broker_notes(config.broker),
        *host_notes(loaded, site),
        *telemetry_notes(loaded, site),
    ]
    notes += [*reading_notes(loaded, site), *power_notes(config.power), *underfed(site), *unguarded(site)]
    notes += share_notes(site)
    named = site.file.policies.get("replacement")
    tests = bool(named.settings.get("burn_in")) if named is not None else False
    runs = configured.get("replacement", "off") != "off"
    notes += burn_in_notes(config.burn_in, tests if runs else None)
    sizes = {t: n for t, n in site.sizes.items() if n and t not in ("site", "job")}
    return {"file": str(loaded.path), "ok": True, "faults": [], "sizes": sizes, "notes": notes,
            "authority": dict(configured)}  # fmt: skip


def _show(report: dict[str, Any], out: Console) -> None:
    sizes = ", ".join(counted(t, n) for t, n in report["sizes"].items())
    levels = ", ".join(f"{policy} {level}" for policy, level in report["authority"].items())
    notes = (f"note: {note}" for note in report["notes"])
    for line in (f"{report['file']}: ok ({sizes})", *notes, f"authority: {levels}"):
        out.print(line, markup=False, soft_wrap=True)


def _ask_online(loaded: Loaded, listen_s: float) -> dict[str, Any]:
    """Ask each endpoint: what it answered, and the sources that reported meanwhile."""
    from twin.daemon import OnlineCheck, load_checked
    from twin.wiring import without_uncheckable

    _, site, _ = load_checked(without_uncheckable(loaded))
    check = OnlineCheck(loaded, site, listen_s)
    logging.disable(logging.ERROR)  # the answers say it all
    try:
        answers = asyncio.run(check.run())
    finally:
        logging.disable(logging.NOTSET)
    now_ns = time.time_ns()
    accounts = [a for a in check.ledger.listing(now_ns) if a.messages or a.lines]
    return {
        "endpoints": [{"name": a.name, "ok": a.is_ok, "text": a.text} for a in answers],
        "sources": check.ledger.rows(accounts[:SHOWN_SOURCES], now_ns),
        "total": len(accounts),
    }


def _show_online(asked: dict[str, Any], out: Console) -> None:
    from twin.cli.operate import show_sources

    if not asked["endpoints"]:
        out.print("no endpoints to ask: the configuration names no external broker and no other endpoint")
    for answer in asked["endpoints"]:
        line = Text("ok    " if answer["ok"] else "FAIL  ", "green" if answer["ok"] else "bold red")
        out.print(line.append(clean(f"{answer['name']}: {answer['text']}", 800), ""), soft_wrap=True)
    if asked["sources"]:
        out.print()
        show_sources(asked | {"next_offset": None}, out, every=True)
    if asked["total"] > SHOWN_SOURCES:
        out.print(f"and {asked['total'] - SHOWN_SOURCES} more sources")


async def _main(loaded: Loaded) -> int:
    from twin.daemon import Daemon

    notify = SdNotify()
    notify.status("starting")
    daemon = Daemon(loaded, notify)
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[list[str]]] = set()

    def reload() -> None:
        task = loop.create_task(daemon.reload("SIGHUP"))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGTERM, daemon.stop)
    loop.add_signal_handler(signal.SIGINT, daemon.stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    await daemon.run()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)  # it ends anyway: asked once more, it still ends well
    log.info("stopped after tick %d", daemon.tick_no - 1)
    return 0


VERBS = {
    "daemon run": Verb(
        run_daemon,
        f"""
        {CONFIG}
        --log-json  log as JSON, one object per line
        --verbose  log at level debug
        ~--check
        ~--online
        ~--listen SECONDS=10>listen_s
        """,
        ("", "--config /etc/racktwin/racktwin.yaml --log-json"),
        answers=False,
    ),
    "fleet run": Verb(
        run_daemon,
        f"""
        {CONFIG}
        --log-json  log as JSON, one object per line
        --verbose  log at level debug
        """,
        ("--config /etc/racktwin/fleet.yaml",),
        answers=False,
    ),
    "daemon check": Verb(
        run_check,
        f"""
        {CONFIG}
        --online  ask each endpoint once, and show the telemetry that the daemon would read
        --listen DURATION=10s  time to listen to the broker, with --online
        """,
        ("", "--config racktwin.yaml --online", "--format json"),
    ),
}
