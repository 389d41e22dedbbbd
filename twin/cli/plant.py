"""The command `plant`: a simulated site in real time on a broker, for trying the daemon on.

`racktwin plant` in one terminal, `racktwin run` in another: what the daemon hears and commands takes the same
way as on a real site.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from connectors.mqtt import LinkSettings, MqttLink
from twin.catalogue import ConfigError, ConnectorError, clean
from twin.cli.arguments import write_json
from twin.cli.record import advised
from twin.cli.simulate import load_scenario, warn
from twin.config import load_site, uncooled
from twin.plant import Plant, Sensors
from twin.run import plant_words
from twin.simulation import Broadcast, LivePlant

SPEEDS = (0.1, 60.0)


def add_parser(commands: Any) -> None:
    """The arguments of `racktwin plant`."""
    parser = commands.add_parser("plant", help="a simulated site in real time on a broker")
    parser.add_argument("--site", type=Path, required=True, help="site file (YAML)")
    parser.add_argument("--broker", metavar="HOST[:PORT]", required=True, help="a broker of its own")
    parser.add_argument("--scenario", type=Path, help="scenario file (YAML); without: an ordinary hour")
    parser.add_argument("--seed", type=int, help="of the hidden truth and all noise")
    parser.add_argument("--speed", type=float, default=1.0, help="of the physics; instants stay the clock's")
    parser.add_argument("--seconds", type=float, help="end after this long (default: Ctrl-C)")
    parser.add_argument("--integration", default="racktwin", help="whose requests it obeys")
    for name, what in (
        ("ca", "authority of the broker"),
        ("cert", "certificate to show"),
        ("key", "its key"),
    ):
        parser.add_argument(f"--{name}-file", type=Path, help=f"TLS: {what} (PEM)")
    parser.add_argument("--username", help="user at the broker")
    parser.add_argument("--password-file", type=Path, help="file with the user's password")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(handler=run_plant)


def run_plant(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Simulate and publish until the time is up, or Ctrl-C, or SIGTERM; then say what was done."""
    settings, (live, warnings) = _settings(args), _live(args)
    link = MqttLink(settings, live.subscriptions())

    def say(text: str) -> None:
        err.print(clean(text, 1000), markup=False, soft_wrap=True)

    warn(warnings, err)
    cast = Broadcast(live, link, say)
    size = live.site.sizes
    say(f"{live.site.file.site} (simulated): {size['rack']} racks, {size['node']} nodes, {size['gpu']} GPUs "
        f"on {link.where}; Ctrl-C ends it")  # fmt: skip
    begun = time.monotonic()
    try:
        why = asyncio.run(_until(cast, args.seconds))
    except ConnectorError as error:
        raise ConnectorError(advised(str(error), settings.tls)) from None
    summary: dict[str, Any] = {
        "ended": why,
        "seconds": round(time.monotonic() - begun, 3),
        "simulated_s": round(live.plant.truth.time_s, 3),
        "skipped_s": round(cast.skipped_s, 3),
        "connections": link.counts.connections,
        "published": cast.published,
        "lost": cast.lost,
        "heard": dict(live.counts),
        "plant": live.plant.figures(),
    }
    if args.json:
        write_json(summary, out)
        return 0
    result: dict[str, Any] = {k.replace("_", " "): v for k, v in summary.items()}
    result["plant"] = dict(plant_words(summary["plant"]))
    for key, value in result.items():
        shown = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        out.print(f"{key}: {clean(shown, 4000)}", markup=False, soft_wrap=True)
    return 0


def _live(args: argparse.Namespace) -> tuple[LivePlant, list[str]]:
    """(the plant at its beginning, what to know of it). Raises ConfigError for a wrong call or file."""
    if not SPEEDS[0] <= args.speed <= SPEEDS[1]:
        raise ConfigError(f"--speed {args.speed:g}: expected {SPEEDS[0]:g} to {SPEEDS[1]:g}")
    if args.seconds is not None and not args.seconds > 0:
        raise ConfigError("--seconds: expected a number > 0")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed {args.seed}: expected 0 to 2^63 - 1")
    if not args.integration or any(c in "+#/ " for c in args.integration):
        raise ConfigError(f"--integration {args.integration!r}: expected a level of a topic")
    _, site = load_site(args.site)
    scenario = load_scenario(args.scenario, site)
    if args.seed is not None:
        scenario = replace(scenario, seed=args.seed, weather=replace(scenario.weather, seed=args.seed))
    plant = Plant(site, scenario.seed, scenario)
    # Live it goes on to Ctrl-C, in steps of its own: of the scenario's remarks the sweep's alone holds.
    remarks = replace(scenario, faults=()).remarks(scenario.dt_s) + uncooled(site)
    return LivePlant(plant, Sensors(site, scenario.seed), args.integration, args.speed), remarks + uncooled(
        site
    )


def _settings(args: argparse.Namespace) -> LinkSettings:
    """Return the broker's address and credentials. Raises ConfigError."""
    host, _, port = args.broker.rpartition(":") if ":" in args.broker else (args.broker, "", "1883")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"--broker {args.broker!r}: expected HOST or HOST:PORT")
    if (args.cert_file is None) != (args.key_file is None) or (args.password_file and not args.username):
        raise ConfigError("expected --cert-file with --key-file, and --password-file with --username")
    given = (args.ca_file, args.cert_file, args.key_file, args.password_file)
    for path in given:
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"{path}: cannot be read")
    ca, cert, key = (None if path is None else str(path) for path in given[:3])
    return LinkSettings(
        host.strip("[]"), int(port), f"racktwin-plant-{os.getpid()}", args.username,
        args.password_file.read_text(encoding="utf-8").strip() if args.password_file else None,
        tls=ca is not None or cert is not None, ca_file=ca, cert_file=cert, key_file=key, persistent=False,
    )  # fmt: skip


async def _until(cast: Broadcast, seconds: float | None) -> str:
    """Why it ended; seconds count from the call on."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    running, stopping = asyncio.ensure_future(cast.run()), asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait(
            (running, stopping), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if running in done:
            running.result()
        return "interrupted" if stopping in done else "the time is up"
    finally:
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
