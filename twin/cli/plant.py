"""The command `simulation publish`: a simulated site in real time on a broker, for trying the daemon on.

It runs in one terminal and `racktwin daemon run` in another: what the daemon receives and commands takes the
same way as on a real site.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from dataclasses import replace
from typing import Any

from rich.console import Console

from connectors.mqtt import LinkSettings, MqttLink
from twin.catalogue import ConfigError, ConnectorError
from twin.cli.arguments import BROKER_USER, SITE, present
from twin.cli.broker import advised, as_user
from twin.cli.grammar import Verb
from twin.cli.simulate import SCENARIO, load_scenario, warn
from twin.config import load_site, uncooled
from twin.plant import Plant, Sensors
from twin.report import print_line
from twin.run import plant_words
from twin.simulation import Broadcast, LivePlant

SPEEDS = (0.1, 60.0)


def run_plant(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Simulate and publish until the time is up, or Ctrl-C, or SIGTERM; then say what was done."""
    host, port = args.broker
    named = LinkSettings(host, port, f"racktwin-plant-{os.getpid()}", persistent=False)
    settings, (live, warnings) = as_user(named, args), _live(args)
    link = MqttLink(settings, live.subscriptions())

    def say(text: str) -> None:
        print_line(err, text)

    warn(warnings, err)
    cast = Broadcast(live, link, say)
    size = live.site.sizes
    say(f"{live.site.file.site} (simulated): {size['rack']} racks, {size['node']} nodes, {size['gpu']} GPUs "
        f"on {link.where}; Ctrl-C ends it")  # fmt: skip
    begun = time.monotonic()
    try:
        why = asyncio.run(_until(cast, args.for_s))
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
    return present(args, summary, _show, out)


def _show(summary: dict[str, Any], out: Console) -> None:
    result: dict[str, Any] = {k.replace("_", " "): v for k, v in summary.items()}
    result["plant"] = dict(plant_words(summary["plant"]))
    for key, value in result.items():
        shown = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        print_line(out, f"{key}: {shown}")


def _live(args: argparse.Namespace) -> tuple[LivePlant, list[str]]:
    """(the plant at its beginning, what to know of it). Raises ConfigError for a wrong call or file."""
    if not SPEEDS[0] <= args.speed <= SPEEDS[1]:
        raise ConfigError(f"--speed {args.speed:g}: expected {SPEEDS[0]:g} to {SPEEDS[1]:g}")
    if not args.integration or any(c in "+#/ " for c in args.integration):
        raise ConfigError(f"--integration {args.integration!r}: expected a level of a topic")
    _, site = load_site(args.site)
    scenario = load_scenario(args.scenario, site, args.seed)
    plant = Plant(site, scenario.seed, scenario)
    # Live it goes on to Ctrl-C, in steps of its own: of the scenario's remarks the sweep's alone holds.
    remarks = replace(scenario, faults=()).remarks(scenario.dt_s) + uncooled(site)
    return LivePlant(plant, Sensors(site, scenario.seed), args.integration, args.speed), remarks + uncooled(
        site
    )


async def _until(cast: Broadcast, seconds: float | None) -> str:
    """Run until the plant ends, a signal comes or `seconds` have passed; return the reason."""
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


VERBS = {
    "simulation publish": Verb(
        run_plant,
        f"""
        {SITE}
        --broker HOST[:PORT]!  broker for this plant alone, never the site's
        {SCENARIO}
        --speed NUMBER=1  speed of the physics; timestamps follow the real clock
        --for DURATION  stop after this time; default: at Ctrl-C
        ~--seconds SECONDS>for_s
        --integration NAME=racktwin  integration whose requests the plant follows
        {BROKER_USER}
        """,
        (
            "--site site.yaml --broker 127.0.0.1:1883",
            "--site site.yaml --broker 127.0.0.1 --scenario leak.yaml",
        ),
    )
}
