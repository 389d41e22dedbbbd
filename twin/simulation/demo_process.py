"""Demo process: a demo site in a process of its own, as a site is apart from the daemon.

`python -m twin.simulation.demo_process STORY SITE FOLDER PORT [CHAPTER]` simulates the past into the run of
FOLDER/state, then lives on the broker at PORT. Each line on standard output is a JSON object that says how
far it is; the line `begin` on standard input begins the story, and the end of that input ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from racktwin_agent.config import Broker
from racktwin_agent.fleet import Fleet
from racktwin_agent.publish import Out

from connectors.mqtt import LinkSettings, MqttLink
from twin.catalogue import ConnectorError
from twin.config import load_site
from twin.simulation.demo_plant import DemoPlant
from twin.simulation.demo_site import DemoPast, DemoSite
from twin.simulation.slurm_programs import SlurmPrograms
from twin.simulation.story import load_story
from twin.telemetry import Message

HOST = "127.0.0.1"
AGENTS_GONE_S = 30.0  # without a broker, after which agents fall back to their contingency
AGAIN_S = 0.1
USAGE = "usage: python -m twin.simulation.demo_process STORY SITE FOLDER PORT [CHAPTER]"


def say(**what: object) -> None:
    """Report to the parent process, if it still exists."""
    with contextlib.suppress(OSError):
        sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
        sys.stdout.flush()


def write_log(text: str) -> None:
    """Report a sentence for the log."""
    print(text, file=sys.stderr, flush=True)


def simulate_past(demo: DemoSite, folder: Path) -> None:
    """Simulate the past, and report the duration."""
    begun = time.monotonic()
    with DemoPast(demo, time.time_ns(), folder / "state") as past:
        past.run(demo.story.past_s)
    say(past_s=demo.story.past_s, took_s=round(time.monotonic() - begun, 3))


class DemoPod:
    """Moves the plant once in each round of its agents, so that both have one clock, and publishes its
    readings."""

    def __init__(self, plant: DemoPlant) -> None:
        self.plant = plant
        self.fleet: Fleet | None = None
        self._connected = False

    def step(self, seconds: float) -> list[Out]:
        """Step before each round of samples; sends metadata again with each connection."""
        out = []
        connected = self.fleet is not None and self.fleet.link.connected
        if connected and not self._connected:
            out += [Out(m.topic, m.payload, 1, True) for m in self.plant.metadata()]
        self._connected = connected
        messages = self.plant.move(seconds, time.time_ns())
        return out + [Out(m.topic, m.payload, 1 if m.kept else 0) for m in messages]


def take(plant: DemoPlant, link: MqttLink, message: Message) -> None:
    """Process a message of a link."""
    plant.receive(message, link.retained)


async def listen(plant: DemoPlant, port: int, end: threading.Event) -> None:
    """Receive the commands to building, scheduler and jobs, until the end."""
    while not end.is_set():
        settings = LinkSettings(HOST, port, f"demo-site-{os.getpid()}", persistent=False)
        link = MqttLink(settings, plant.subscriptions())
        with contextlib.suppress(ConnectorError):
            await link.run(partial(take, plant, link), plant.missed)
        await asyncio.sleep(AGAIN_S)


def reachable(port: int, end: threading.Event) -> bool:
    """Wait until a broker listens; False where the end comes first."""
    while not end.wait(AGAIN_S):
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1.0):
            return True
    return False


def heed(plant: DemoPlant, end: threading.Event) -> None:
    """Start the story on request; stop with the parent."""
    for line in sys.stdin:
        if line.strip() == "begin":
            with plant.lock:
                plant.demo.begin()
            say(begun_ns=plant.plant.now_ns)
    end.set()


def main(argv: list[str]) -> int:
    """Run the process."""
    if len(argv) not in (5, 6) or not argv[4].isdecimal():
        print(USAGE, file=sys.stderr)
        return 2
    spec, site = load_site(Path(argv[2]))
    story = load_story(Path(argv[1]), site)
    folder, port = Path(argv[3]), int(argv[4])
    demo = DemoSite(story.only(argv[5] if len(argv) == 6 else None), spec, site)
    simulate_past(demo, folder)
    plant, end = DemoPlant(demo), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())

    def answer(words: Sequence[str]) -> tuple[int, str]:
        with plant.lock:
            return demo.answer(words)

    programs = SlurmPrograms(folder / "slurm", answer)
    say(programs=str(folder / "slurm"))
    threading.Thread(target=heed, args=(plant, end), daemon=True).start()
    try:
        if reachable(port, end):
            pod, broker = DemoPod(plant), Broker(HOST, port, site.file.site)
            pod.fleet = Fleet(
                plant.trays(), broker, before_step=pod.step, broker_gone_s=AGENTS_GONE_S, say=write_log
            )
            with pod.fleet:
                asyncio.run(until(plant, port, end))
    finally:
        programs.close()
    return 0


async def until(plant: DemoPlant, port: int, end: threading.Event) -> None:
    """Run until the end."""
    listening = asyncio.ensure_future(listen(plant, port, end))
    await asyncio.to_thread(end.wait)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
