"""NVLinks through NVML, against a stand-in for pynvml: what is asked and told, and that racktwin reads it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest
from racktwin_agent.clock import NS, Instant
from racktwin_agent.nvlinks import AGAIN_S, FIELDS, GpuLinks, NvlinkReport, bit_error_rate, read_links

from connectors.agents import EVENT, ItDecoder
from tests.support.builders import site_of, two_racks
from twin.catalogue import BadMessage
from twin.telemetry import Block, Message, NvlinksCounted

NODE = "lab/h/r1/node0"
NUMBER = {name: getattr(pynvml, constant) for name, constant in FIELDS}
BER = pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER


class Links:
    """The part of pynvml that reads links: of NVLink 5 (`fields`), or older (`counters`)."""

    def __init__(self, links: int = 18, fields: bool = True) -> None:
        self.links, self.has_fields = links, fields
        self.values: dict[tuple[int, int], int] = {}  # by field or counter, and link
        self.unused: set[int] = set()
        self.far: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlDeviceGetFieldValues(self, device: str, wanted: list[Any]) -> list[Any]:
        if wanted == [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT]:
            return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(uiVal=self.links))]
        ok = pynvml.NVML_SUCCESS if self.has_fields else pynvml.NVML_ERROR_NOT_SUPPORTED
        return [SimpleNamespace(nvmlReturn=ok if link not in self.unused else pynvml.NVML_ERROR_NOT_SUPPORTED,
                                value=SimpleNamespace(ullVal=self.values.get((number, link), 0)))
                for number, link in wanted]  # fmt: skip

    def nvmlDeviceGetNvLinkErrorCounter(self, device: str, link: int, counter: int) -> int:
        if link in self.unused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.values.get((counter, link), 0)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, device: str, link: int) -> int:
        if link not in self.far:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 2

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: str, link: int) -> Any:
        return SimpleNamespace(busId=self.far[link].encode())


def at(seconds: float) -> Instant:
    """An instant so long after the boot."""
    return Instant(1_800_000_000 * NS + round(seconds * NS), round(seconds * NS))


def test_the_fields_of_nvlink_5_are_read_by_link() -> None:
    nvml = Links()
    assert read_links(nvml, "gpu") == GpuLinks(read=18)
    nvml.values = {(NUMBER["recoveries"], 14): 505, (NUMBER["failures"], 14): 1, (NUMBER["symbols"], 3): 7,
                   (BER, 3): 0x50C, (BER, 5): 0x1FF}  # fmt: skip
    nvml.far = {14: "00000000:05:00.0", 3: "00000000:00:00.0"}
    nvml.unused = {17}
    found = read_links(nvml, "gpu")
    assert found.read == 17
    assert found.counts == {
        3: {"recoveries": 0, "failures": 0, "errors": 0, "symbols": 7},
        14: {"recoveries": 505, "failures": 1, "errors": 0, "symbols": 0},
    }
    assert found.ber[3] == pytest.approx(5e-12)
    assert found.far == {3: "", 14: "NVSwitch 00000000:05:00.0"}
    assert found.total("recoveries", "failures") == 506


def test_older_links_are_read_by_their_counters() -> None:
    nvml = Links(12, fields=False)
    nvml.values = {(0, 2): 9, (1, 2): 1, (2, 4): 3, (3, 4): 4}
    nvml.unused = {11}
    found = read_links(nvml, "gpu")
    assert found.read == 11
    assert found.counts[2] == {"replays": 9, "recoveries": 1, "errors": 0}
    assert found.counts[4]["errors"] == 7


@pytest.mark.parametrize("lacks", ["NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER", dict(FIELDS)["recoveries"]])
def test_a_library_without_the_newer_fields_reads_what_it_has(lacks: str) -> None:
    class Older(Links):
        def __getattr__(self, name: str) -> Any:
            if name == lacks:
                raise AttributeError(name)
            return super().__getattr__(name)

    older, newer = Older(12, fields=False), Older(12)
    older.values, newer.values = {(0, 2): 9}, {(NUMBER["failures"], 2): 1}
    assert read_links(older, "gpu").counts[2]["replays"] == 9
    assert read_links(newer, "gpu").read == 12


def test_a_gpu_without_links_or_an_older_library_tells_nothing() -> None:
    assert read_links(Links(0), "gpu") == GpuLinks()
    older = SimpleNamespace(NVMLError=pynvml.NVMLError, NVML_SUCCESS=0)
    assert read_links(older, "gpu") == GpuLinks()
    assert [bit_error_rate(x) for x in (0, 0x1FF, 0x30F)] == pytest.approx([0.0, 1e-255, 3e-15])


def links_of(recoveries: int) -> GpuLinks:
    """A GPU of which link 14 recovered so often."""
    return GpuLinks(18, {14: {"recoveries": recoveries, "failures": 1, "errors": 2}} if recoveries else {})


def test_counts_are_told_when_one_moves_and_once_an_hour() -> None:
    report, told = NvlinkReport(NODE, "boot"), []
    for second in range(0, 2 * round(AGAIN_S), 10):
        outs = report.reports([links_of(505 + (second >= 1000)), links_of(0)], at(100.0 + second))
        sums = json.loads(outs[0].payload)["gpu"]
        assert sums["nvlink_recovery_count"] == [505 + (second >= 1000), 0]
        assert sums["nvlink_error_count"] == [3, 0]  # failed recoveries too, as dcgm-exporter's mapping
        told += [second for _ in outs[1:]]
    assert told[0] == 0
    assert 1000 in told
    assert len(told) in (4, 5)  # at the start, at the move, and at its minute of each hour
    assert report.reports([GpuLinks(), GpuLinks()], at(1e6)) == []


def test_symbol_errors_that_move_at_every_reading_are_told_seldom() -> None:
    report, told = NvlinkReport(NODE, "boot"), []
    for second in range(0, 1800, 10):
        noisy = GpuLinks(18, {3: {"recoveries": int(second >= 900), "failures": 0, "symbols": second + 1}})
        told += [second for _ in report.reports([noisy], at(1e6 + second))[1:]]
    assert len(told) <= 5
    assert {0, 900} <= set(told)


def test_racktwin_reads_what_is_told() -> None:
    site = site_of(two_racks())
    frame, event = NvlinkReport(NODE, "boot").reports([links_of(505), *[links_of(0)] * 3], at(5.0))
    decoder = ItDecoder(site)
    (block,) = decoder.decode(Message(at(5.0).wall_ns, frame.topic, frame.payload))  # type: ignore[misc]
    assert isinstance(block, Block)
    assert block.counts[block.counters.index("nvlink_recovery_count")].tolist() == [505, 0, 0, 0]
    assert event.topic == EVENT + NODE
    (counted,) = decoder.decode(Message(at(5.0).wall_ns, event.topic, event.payload))  # type: ignore[misc]
    assert counted == NvlinksCounted(
        id=f"{NODE}#boot-nvlinks-5", name=NODE, at_ns=at(5.0).wall_ns, read=(18,) * 4, gpu=(0,), link=(14,),
        recoveries=(505,), failures=(1,), errors=(2,), replays=(0,), symbols=(0,), symbol_ber=(0.0,),
        far=("",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "change", "reason"),
    [
        (NODE, {"name": f"{NODE}/gpu0"}, "which is not a node"),
        ("lab/h/r1", {"name": "lab/h/r1/\x1b[2J"}, "which is not a node"),
        ("lab/h/r1/node1", {}, "counts of 'lab/h/r1/node0' on the topic of lab/h/r1/node1"),
        (NODE, {"recoveries": [-1]}, "recoveries: expected at most"),
        (NODE, {"errors": [2**62]}, "errors: expected at most"),
        (NODE, {"gpu": [0] * 4097}, "gpu: expected at most 4096"),
        (NODE, {"far": ["x" * 201]}, "far: expected names"),
        (NODE, {"id": ""}, "needs an id"),
        (NODE, {"link": ["1"]}, "not an IT event"),
    ],
)
def test_counts_that_are_refused(path: str, change: dict[str, Any], reason: str) -> None:
    body = {"type": "NvlinksCounted", "id": "1", "name": NODE} | change
    with pytest.raises(BadMessage, match=reason):
        ItDecoder(site_of(two_racks())).decode(
            Message(at(1).wall_ns, EVENT + path, msgspec.json.encode(body))
        )
