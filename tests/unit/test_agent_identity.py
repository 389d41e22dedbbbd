"""Serials of devices that an agent reports: when, under which id, and which it withholds."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pynvml
import pytest
from racktwin_agent.agent import Agent
from racktwin_agent.clock import NS, Instant
from racktwin_agent.config import load_config
from racktwin_agent.identity import AGAIN_S, Identity, board_serial, plain_serial
from racktwin_agent.nvml import NvmlDevices
from racktwin_agent.publish import Out
from racktwin_agent.simulated import SimulatedDevices

from connectors.agents import ItDecoder
from tests.support.builders import site_of
from tests.support.node_agents import write_config
from tests.unit.test_agent_nvml import A, B, FakeNvml
from twin.telemetry import IdentityTold, Message

NODE = "lab/h/r1/node0"


def at(seconds: float) -> Instant:
    return Instant(10**18 + round(seconds * NS), round((1000 + seconds) * NS))


def names(outs: list[Out]) -> list[tuple[str, str]]:
    bodies = [json.loads(out.payload) for out in outs]
    return [(b["name"].removeprefix(NODE), b["serial"]) for b in bodies]


class Boards(FakeNvml):
    """With serials and UUIDs: an error's number is raised."""

    def __init__(self, *bus_ids: str) -> None:
        super().__init__(*bus_ids)
        self.serial: dict[str, Any] = {b: f"16503220{i:05}" for i, b in enumerate(bus_ids)}
        self.uuid: dict[str, Any] = {b: f"GPU-{i:08x}" for i, b in enumerate(bus_ids)}

    def nvmlDeviceGetSerial(self, device: str) -> Any:
        return self._told(self.serial[device])

    def nvmlDeviceGetUUID(self, device: str) -> Any:
        return self._told(self.uuid[device])

    def _told(self, answer: Any) -> Any:
        if isinstance(answer, int):
            raise pynvml.NVMLError(answer)
        return answer


def test_racktwin_reads_what_the_agent_tells() -> None:
    site = site_of({"site": "lab", "halls": [{"name": "h", "racks": [
        {"name": "r1", "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 2}]}]})  # fmt: skip
    decoder, devices = ItDecoder(site), NvmlDevices(nvml=Boards(A, B))
    outs = Identity(NODE, "boot").reports(devices.serials(), "BOARD-77", at(5))
    events = [decoder.decode(Message(10**18, out.topic, out.payload)) for out in outs]
    assert events == [
        [IdentityTold(id=f"{NODE}#boot-{slot}-1005-{serial}", table=table, name=name, serial=serial)]
        for slot, table, name, serial in (
            ("node", "node", NODE, "BOARD-77"),
            ("gpu0", "gpu", f"{NODE}/gpu0", "1650322000000/GPU-00000000"),
            ("gpu1", "gpu", f"{NODE}/gpu1", "1650322000001/GPU-00000001"),
        )
    ]
    assert all((out.qos, out.retain) == (1, False) for out in outs)


def test_it_is_told_at_the_start_on_a_change_and_once_an_hour() -> None:
    identity = Identity(NODE, "boot")
    assert names(identity.reports(["S-0001", "S-0002"], None, at(0))) == [
        ("/gpu0", "S-0001"),
        ("/gpu1", "S-0002"),
    ]
    again = [s for s in range(60, 4 * 3600, 60) if identity.reports(["S-0001", "S-0002"], None, at(s))]
    assert len(again) in (3, 4)
    assert {b - a for a, b in pairwise(again)} == {AGAIN_S}
    assert names(identity.reports(["S-0001", "S-0003"], None, at(15_000))) == [("/gpu1", "S-0003")]
    back = identity.reports(["S-0001", "S-0002"], None, at(15_060))
    assert names(back) == [("/gpu1", "S-0002")]
    ids = {json.loads(out.payload)["id"] for out in back}
    assert ids == {"boot-gpu1-16060-S-0002"}, "another id than when it was told first in this boot"


def test_nodes_tell_it_again_at_different_times() -> None:
    due = set()
    for node in range(20):
        identity = Identity(f"lab/h/r1/node{node}", "boot")
        identity.reports(["S-0001"], None, at(0))
        due.add(next(s for s in range(60, 7200, 60) if identity.reports(["S-0001"], None, at(s))))
    assert len(due) > 10


def test_what_cannot_be_read_or_is_no_name_of_one_device_is_not_told() -> None:
    identity = Identity(NODE, "boot")
    assert names(identity.reports(["S-0001", None], None, at(0))) == [("/gpu0", "S-0001")]
    assert identity.reports([None, None], None, at(60)) == []  # off the bus: the same GPU all the same
    assert identity.reports(["S-0001", None], None, at(120)) == []
    assert Identity(NODE, "boot").reports(["BOARD-1", "BOARD-1"], None, at(0)) == []


def test_several_gpus_of_one_board_differ_by_their_uuid() -> None:
    nvml = Boards(A, B)
    nvml.serial = {A: "1650322002345", B: b"1650322002345"}
    nvml.uuid[B] = b"GPU-00000001"
    found = NvmlDevices(nvml=nvml).serials()
    assert found == ["1650322002345/GPU-00000000", "1650322002345/GPU-00000001"]


@pytest.mark.parametrize(
    "serial,uuid,found",
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, "GPU-00000000", "GPU-00000000"),
        ("0", "GPU-00000000", "GPU-00000000"),
        ("1650322002345", pynvml.NVML_ERROR_NOT_SUPPORTED, "1650322002345"),
        # Half a name would be another name: a swap that never was.
        (pynvml.NVML_ERROR_UNKNOWN, "GPU-00000000", None),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "GPU-00000000", None),
        ("1650322002345", pynvml.NVML_ERROR_GPU_IS_LOST, None),
        ("1650322002345", pynvml.NVML_ERROR_UNKNOWN, None),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NOT_SUPPORTED, None),
    ],
)
def test_a_gpu_of_which_not_all_can_be_read(serial: Any, uuid: Any, found: str | None) -> None:
    nvml = Boards(A, B)
    nvml.serial[A], nvml.uuid[A] = serial, uuid
    assert NvmlDevices(nvml=nvml).serials() == [found, "1650322000001/GPU-00000001"]


def test_a_gpu_that_is_missing_is_not_asked() -> None:
    assert NvmlDevices(["0000:99:00", A], nvml=Boards(A)).serials() == [None, "1650322000000/GPU-00000000"]


@pytest.mark.parametrize(
    "raw,serial",
    [
        (b"CN7016-0042\n", "CN7016-0042"),
        (b"  ..  \n", None),
        (b"0000000\n", None),
        (b"", None),
        (b"\xff\xfe\xfd\xfc", None),
        (b"x1" * 500, None),
    ],
)
def test_the_nodes_board_by_dmi(tmp_path: Path, raw: bytes, serial: str | None) -> None:
    path = tmp_path / "board_serial"
    path.write_bytes(raw)
    assert board_serial(path) == serial
    assert board_serial(tmp_path / "none") is None
    assert board_serial(tmp_path) is None
    assert plain_serial(" S-0001\0\n") == "S-0001"


def test_simulated_devices_claim_nothing_unless_a_test_says_so() -> None:
    devices = SimulatedDevices(2)
    assert devices.serials() == [None, None]
    devices.serial = ["S-0001", "S-0002"]
    devices.lost = {1}
    assert devices.serials() == ["S-0001", None]


def test_the_agent_reads_serials_on_its_sampling_thread_and_tells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = SimulatedDevices(2)
    devices.serial = ["S-0001", "S-0002"]
    agent = Agent(load_config(write_config(tmp_path, 1)), devices)
    sent: list[Out] = []
    monkeypatch.setattr(agent.link, "send", sent.append)
    agent._sampler.start()
    try:
        for _ in range(2):
            got = agent.inbox.get(20)
            assert got is not None
            agent._take(*got)
    finally:
        agent.stop()
        agent._sampler.join()
        agent.store.close()
    assert names(sent[1:]) == [("/gpu0", "S-0001"), ("/gpu1", "S-0002")]
    assert agent._failed is None
