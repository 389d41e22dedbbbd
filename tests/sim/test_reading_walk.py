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
from types import CodeType, FrameType
from typing import Any

import paho.mqtt.client as paho
import pytest

from connectors.agents import FRAME, encode_json
from tests.support.daemon_process import RunningDaemon
from tests.support.mosquitto import mosquitto
from tests.support.patience import PATIENCE_S
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
PAGE = (ROOT / "docs/architecture.md").read_text()
STEP = re.compile(r"^\| [^|]+ \| `([\w/]+\.py)` \| `([\w.<>]+)` \|$", re.M)
LEAF = re.compile(r"`([\w/]+\.py)`")
Call = tuple[str, str]  # (file, function)
STEPS: list[Call] = STEP.findall(PAGE)
FILES = frozenset(path for path, _ in STEPS)
LEAVES = frozenset(LEAF.findall(PAGE.split("steps call these helper modules")[1].split("\n`tests/")[0]))
# Below these nothing but steps and leaves is called: the way from the wire, and the way to it.
ENDS = {
    ("connectors/mqtt/link.py", "MqttLink._stage"),
    ("twin/daemon/dispatcher.py", "Dispatcher._carry_out"),
    ("connectors/mqtt/source.py", "MqttSource.publisher.<locals>.publish"),
}


class Walk:
    """Functions of the product that ran since `begin`, with their callers, the outermost first.

    `calls` has each with the callers of its first call; `steps` are the calls of STEPS in their order, with
    repetitions; `at_ends` are files of functions that ran below one of ENDS.
    """

    def __init__(self) -> None:
        self.calls: dict[Call, tuple[Call, ...]] = {}
        self.steps: list[Call] = []
        self.at_ends: set[str] = set()
        self.recording = False
        self._edges: set[tuple[CodeType, CodeType | None]] = set()

    def begin(self) -> None:
        self.calls.clear()
        self.recording = True

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.recording or not is_product(frame):
            return
        if (step := call_of(frame)) in STEPS:
            self.steps.append(step)
        edge = frame.f_code, frame.f_back.f_code if frame.f_back else None
        if edge not in self._edges:
            self._edges.add(edge)
            *callers, call = calls_of(frame)
            self.calls.setdefault(call, tuple(callers))
            if ENDS.intersection(callers):
                self.at_ends.add(call[0])


def is_product(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(tuple(f"{ROOT}/{top}/" for top in ("twin", "connectors", "policies", "models")))


def call_of(frame: FrameType) -> Call:
    return frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname


def calls_of(frame: FrameType | None) -> list[Call]:
    """Calls of the product on the stack, the outermost first."""
    calls: list[Call] = []
    while frame is not None:
        if is_product(frame):
            calls.append(call_of(frame))
        frame = frame.f_back
    return calls[::-1]


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
            assert running.wait(PATIENCE_S)
            daemon, loop = daemons[0]
            until = time.monotonic() + PATIENCE_S
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


def strangers(callers: tuple[Call, ...]) -> set[str]:
    """Files on the stack, from the first that is a step's onward, that are no step's."""
    files = [path for path, _ in callers]
    first = next((n for n, path in enumerate(files) if path in FILES), len(files))
    return set(files[first:]) - FILES


def test_a_reading_takes_the_steps_of_the_page_and_no_other(walk: Walk) -> None:
    assert [step for step in STEPS if step not in walk.calls] == []
    rest = iter(walk.steps)  # ticks run before the reading arrives, and again behind it
    assert [step for step in STEPS if step not in rest] == []
    assert {step: files for step in STEPS if (files := strangers(walk.calls[step]))} == {}
    assert walk.at_ends - FILES - LEAVES == set()


def test_the_way_is_short() -> None:
    sides = ["connectors" if path.startswith("connectors/") else "twin" for path, _ in STEPS]
    assert len(FILES) <= 15
    assert sum(a != b for a, b in pairwise(sides)) == 2
