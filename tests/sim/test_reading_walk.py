"""The way of a reading: `docs/architecture.md` lists its files and functions, from MQTT to a command sent.

A daemon runs in a thread with a profiler; a hot GPU is published, and the request to its agent comes back.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import paho.mqtt.client as paho
import pytest

from connectors.agents import FRAME, encode_json
from tests.support.daemon_process import RunningDaemon
from tests.support.mosquitto import mosquitto
from tests.tidy.tree import ROOT
from twin.config import load_config
from twin.daemon import Daemon, SdNotify

pytestmark = pytest.mark.slow
GPUS = 4
SITE = {
    "site": "lab",
    "halls": [
        {"name": "h", "racks": [{"name": "r1", "profile": "gb200-nvl72", "nodes": 1, "gpus_per_node": GPUS}]}
    ],
    "policies": {"thermal_guard": {"authority": "act"}},
}
STEP = re.compile(r"^\| [^|]+ \| `([\w/]+\.py)` \| `([\w.]+)` \|$", re.M)


def steps() -> list[tuple[str, str]]:
    """(file, function) of each step on the page."""
    return STEP.findall((ROOT / "docs/architecture.md").read_text())


class Walk:
    """Functions of the product that ran, in the order of their first call since `begin`."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}
        self.recording = False

    def begin(self) -> None:
        self.calls.clear()
        self.recording = True

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.recording and frame.f_code.co_filename.startswith(str(ROOT)):
            path = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
            self.calls.setdefault((path, frame.f_code.co_qualname))


def frame_of(temp_c: float) -> bytes:
    columns = {"temp_c": [temp_c] * GPUS, "power_w": [700.0] * GPUS, "power_limit_w": [1200.0] * GPUS}
    return encode_json(time.time_ns(), {name: list(values) for name, values in columns.items()})


@pytest.fixture
def walk(server: Callable[..., Path], tmp_path: Path) -> Walk:
    """Functions that ran between the publication of a hot frame and the request for a lower cap."""
    seen, requested, running, daemons = Walk(), threading.Event(), threading.Event(), []
    with mosquitto(server, tmp_path) as broker:
        loaded = load_config(RunningDaemon(tmp_path / "d", broker.port, SITE).config_path)

        async def main() -> None:
            daemons.append((Daemon(loaded, SdNotify()), asyncio.get_running_loop()))
            running.set()
            await daemons[0][0].run()

        def work() -> None:
            sys.setprofile(seen.profile)
            asyncio.run(main())

        thread = threading.Thread(target=work)
        thread.start()
        client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        client.on_message = lambda *_: requested.set()
        client.connect("127.0.0.1", broker.port)
        client.subscribe("IT/v1/racktwin/Request/#", 1)
        client.loop_start()
        try:
            assert running.wait(30)
            daemon, loop = daemons[0]
            until = time.monotonic() + 30
            while daemon.tick_no < 3 and time.monotonic() < until:
                client.publish(f"{FRAME}lab/h/r1/node0", frame_of(50.0), 1)
                time.sleep(0.2)
            seen.begin()
            while not requested.is_set() and time.monotonic() < until:
                client.publish(f"{FRAME}lab/h/r1/node0", frame_of(99.0), 1)
                requested.wait(1)
            assert requested.is_set()
        finally:
            loop.call_soon_threadsafe(daemon.stop)
            thread.join(30)
            client.disconnect()
            client.loop_stop()
    return seen


def test_a_reading_goes_the_way_that_the_page_tells(walk: Walk) -> None:
    order = {call: number for number, call in enumerate(walk.calls)}
    expected = steps()
    assert len(expected) >= 10
    missing = [step for step in expected if step not in order]
    assert not missing, missing
    begun = expected[1:]  # the link was up before the reading came
    assert [order[s] for s in begun] == sorted(order[s] for s in begun)


def test_the_way_is_short() -> None:
    files = [path for path, _ in steps()]
    sides = ["connectors" if path.startswith("connectors/") else "twin" for path in files]
    assert len(set(files)) <= 15
    assert sum(a != b for a, b in pairwise(sides)) == 2
