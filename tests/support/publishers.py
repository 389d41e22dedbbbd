"""Simulated devices behind the formats of real publishers, at a clock of its own.

room = Room(tree)                                   # the physics, second by second
listener = Listener(room.site, start_ns=room.now_ns)
listener.scrape(DcgmExporter(room, 0), "dcgm", "lab/h/r1/node0", 15.0)
listener.subscribe(Building(room), Telegraf(room, 4, "r2/node0", interval_s=10))
listener.run(room, 600)
listener.alarms(since_s=300.0)                      # what it raised above `info`

Formats are those that the publishers document: dcgm-exporter's README and etc/default-counters.csv,
node_exporter's collectors `infiniband` and `netclass`, ipmi_exporter's README, and the READMEs of Telegraf's
plugins `nvidia_smi`, `ipmi_sensor`, `net` and `outputs.mqtt`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from connectors.dsx.discovery import discover
from connectors.files import BadRow, read_capture
from connectors.mqtt import Router, extra_route
from connectors.prometheus import PageDecoder
from connectors.series_map import load_map
from tests.support.builders import START_NS, site_of
from twin.catalogue import NS, BadMessage
from twin.config import make_engine
from twin.contracts import CommandBatch, Finding
from twin.daemon.ingest import Ingest
from twin.plant import Campaign, Observation, Plant, Script, Sensors
from twin.simulation.plant_wire import PlantWire
from twin.site import Site
from twin.telemetry import Message

MIB_OF_GPU = 196_608
SWING_S = 600.0


class Room:
    """Devices of a site that work and are well, until `suffer`: `read(key)` [n] is what they show now."""

    def __init__(self, tree: dict[str, Any], seed: int = 3, start_ns: int = START_NS) -> None:
        self.site: Site = site_of(tree)
        self.plant = Plant(self.site, seed=seed)
        self._begin_ns = start_ns
        self.sensors = Sensors(self.site, seed)
        self.now_ns = start_ns // NS * NS
        self.building: list[Message] = []  # what the BMS publishes in this second
        self._wire = PlantWire(self.site)
        self._readings: dict[str, np.ndarray] = {}
        self._bytes: dict[str, np.ndarray] = {}  # that links carried
        self.pass_second()

    def read(self, key: str) -> np.ndarray:
        """The last readings of a signal or counter; NaN where a sensor dropped out, 0 where there is none."""
        if key not in self._readings:
            return np.zeros(self.site.sizes[key.partition(".")[0]])
        return self._readings[key]

    def bytes(self, key: str) -> np.ndarray:
        """Bytes that links have carried, of `link.rx_bytes_per_s` or its sister."""
        return self._bytes[key]

    def metadata(self) -> list[Message]:
        """Retained messages of the BMS."""
        return self._wire.metadata(self.now_ns)

    def suffer(self, kind: str, table: str, entity: int, **more: Any) -> None:
        """From the next second on: a fault of the plant."""
        script = Script(kind, table, entity, self.plant.truth.time_s, **more)
        self.plant.campaign = Campaign(self.site, [script], 1)

    def pass_second(self) -> None:
        t = self.plant.truth
        # Work comes and goes each ten minutes, at a phase of its own per GPU, well below what racks may draw
        phase = 2.0 * np.pi * (self.now_ns - self._begin_ns) / (SWING_S * NS) + np.arange(len(t.gpu_sm_pu))
        for column, share in ((t.gpu_sm_pu, 1.0), (t.gpu_tensor_pu, 0.7), (t.gpu_dram_pu, 0.5)):
            column[:] = share * (0.6 + 0.2 * np.sin(phase))
        self.plant.step([], 1.0)
        self.now_ns += NS
        events = tuple(self.plant.events())
        observation = self.sensors.observe(self.plant.truth, self.plant.present, self.now_ns, events)
        for report in observation.reports:
            names = (*report.signals, *report.counters)
            for name, row in zip(names, (*report.values, *report.counts), strict=True):
                there = slice(None) if report.present is None else report.present
                known = self._readings.setdefault(f"{report.table}.{name}", np.full(len(row), np.nan))
                known[there] = row[there]
        for key in ("link.rx_bytes_per_s", "link.tx_bytes_per_s"):
            if key in self._readings:
                now = self._bytes.setdefault(key, np.zeros(len(self._readings[key])))
                now += np.nan_to_num(self._readings[key])
        self.of_nodes = [r for r in observation.reports if r.table in ("gpu", "node")]
        of_building = [r for r in observation.reports if r.table not in ("gpu", "node")]
        self.building = self._wire.messages(Observation(of_building, (), self.now_ns))


class Exporter(Protocol):
    """Something that answers a scrape; empty while it is not there."""

    def page(self) -> bytes: ...


class Publisher(Protocol):
    """Something that publishes to a broker."""

    def messages(self, now_ns: int) -> list[Message]:
        """Messages up to then, since the last call."""
        ...


class Series(NamedTuple):
    """A metric of a page: its declaration, the signal behind it, and the factor to the exporter's unit."""

    name: str
    kind: str
    help: str
    key: str
    factor: float = 1.0
    digits: int = 0


DCGM = (
    Series("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock frequency (in MHz).", "gpu.sm_clock_hz", 1e-6),
    Series("DCGM_FI_DEV_MEMORY_TEMP", "gauge", "Memory temperature (in C).", "gpu.hbm_temp_c"),
    Series("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C).", "gpu.temp_c"),
    Series("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W).", "gpu.power_w", 1.0, 6),
    Series("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter",
           "Total energy consumption since boot (in mJ).", "gpu.energy_mj"),
    Series("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", "Total number of PCIe retries.",
           "gpu.pcie_replay_count"),
    Series("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %).", "gpu.util_pu", 100.0),
    Series("DCGM_FI_DEV_XID_ERRORS", "gauge", "Value of the last XID error encountered.", "gpu.xid_code"),
    Series("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter",
           "Number of remapped rows for uncorrectable errors", "gpu.row_remap_count"),
    Series("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "counter",
           "Number of remapped rows for correctable errors", "", 0.0),
    Series("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", "Whether remapping of rows has failed",
           "gpu.row_remap_failed_state"),
    Series("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time the graphics engine is active.",
           "gpu.util_pu", 1.0, 6),
    Series("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge",
           "Ratio of cycles the tensor (HMMA) pipe is active.", "gpu.tensor_active_pu", 1.0, 6),
    Series("DCGM_FI_PROF_DRAM_ACTIVE", "gauge",
           "Ratio of cycles the device memory interface is active sending or receiving data.",
           "gpu.dram_active_pu", 1.0, 6),
)  # fmt: skip


class DcgmExporter:
    """dcgm-exporter of one node. It collects by itself each `collect_s` (its default: 30 s)."""

    def __init__(self, room: Room, node: int, collect_s: float = 30.0) -> None:
        self.room, self.node, self.collect_s = room, node, collect_s
        self._page, self._due_ns = b"", 0

    def page(self) -> bytes:
        if self.room.now_ns >= self._due_ns:
            self._due_ns = self.room.now_ns + round(self.collect_s * NS)
            self._page = self._collect()
        return self._page

    def _collect(self) -> bytes:
        starts = self.room.site.gpu_start_of_node
        gpus = range(int(starts[self.node]), int(starts[self.node + 1]))
        out = []
        for series in DCGM:
            out += [f"# HELP {series.name} {series.help}", f"# TYPE {series.name} {series.kind}"]
            column = self.room.read(series.key) if series.key else None
            for k, gpu in enumerate(gpus):
                value = 0.0 if column is None else float(column[gpu])
                if value == value:
                    text = f"{value * series.factor:.{series.digits}f}"
                    out.append(f"{series.name}{{{self._labels(k, gpu, series, value)}}} {text}")
        return ("\n".join(out) + "\n").encode()

    def _labels(self, k: int, gpu: int, series: Series, value: float) -> str:
        text = (
            f'gpu="{k}",UUID="GPU-{gpu:08x}-d9cf-fef3-62e9-d92044ab6e52",pci_bus_id="00000000:{k:02X}:00.0",'
            f'device="nvidia{k}",modelName="NVIDIA GB200",Hostname="node{self.node}",'
            'DCGM_FI_DRIVER_VERSION="570.86.15"'
        )
        if series.name == "DCGM_FI_DEV_XID_ERRORS":
            text += (
                f',err_code="{value:.0f}",err_msg="{"No Error" if value == 0 else "see the XID catalogue"}"'
            )
        return text


class NodeExporter:
    """node_exporter of one node, its collectors of links; with it ipmi_exporter's lines of a local BMC."""

    def __init__(self, room: Room, node: int, ipmi: bool = False) -> None:
        self.room, self.node, self.ipmi = room, node, ipmi

    def page(self) -> bytes:
        room, out = self.room, []
        links = np.flatnonzero(room.site.node_of_link == self.node).tolist()
        for k, link in enumerate(links):
            at = f'{{device="mlx5_{k}",port="1"}}'
            down = float(room.read("link.up_state")[link])
            for name, value in (
                ("state_id", 4.0 - 3.0 * down),
                ("link_downed_total", room.read("link.flap_count")[link]),
                ("link_error_recovery_total", 0.0),
                ("symbol_error_total", 0.0),
                ("port_errors_received_total", room.read("link.error_count")[link]),
                ("port_discards_transmitted_total", room.read("link.discard_count")[link]),
                ("port_data_received_bytes_total", room.bytes("link.rx_bytes_per_s")[link]),
                ("port_data_transmitted_bytes_total", room.bytes("link.tx_bytes_per_s")[link]),
            ):
                if value == value:
                    out.append(f"node_infiniband_{name}{at} {value:.17g}")
        out += ['node_cpu_seconds_total{cpu="0",mode="idle"} 1.23456e+06', "node_load1 3.5"]
        if self.ipmi:
            power_w, inlet_c = (float(room.read(f"node.{s}")[self.node]) for s in ("power_w", "inlet_temp_c"))
            out += [f'ipmi_dcmi_power_consumption_watts{{id=""}} {power_w:.0f}'] * (power_w == power_w)
            out += [f'ipmi_temperature_celsius{{id="4",name="Inlet Temp"}} {inlet_c:g}'] * (
                inlet_c == inlet_c
            )
            out.append("ipmi_chassis_power_state 1")
        return ("\n".join(out) + "\n").encode()


class Telegraf:
    """Telegraf on one node: gathers at whole multiples of its interval, publishes at its next flush.

    A flush is one message per plugin, as with `layout = "batch"`. `clock_s`: how far its clock is ahead.
    """

    def __init__(self, room: Room, node: int, host: str, interval_s: int = 10, flush_s: int = 10) -> None:
        self.room, self.node, self.host = room, node, host
        self.interval_s, self.flush_s, self.clock_s, self.alive = interval_s, flush_s, 0, True
        self._waiting: dict[str, list[str]] = {}
        self._phase_s = zlib.crc32(host.encode()) % flush_s  # flushes count from when Telegraf began

    def messages(self, now_ns: int) -> list[Message]:
        now_s = now_ns // NS
        if not self.alive:
            self._waiting.clear()
            return []
        if (now_s + self.clock_s) % self.interval_s == 0:
            self._gather((now_s + self.clock_s) * NS)
        if now_s % self.flush_s != self._phase_s:
            return []
        waiting, self._waiting = self._waiting, {}
        return [
            Message(now_ns, f"telegraf/{self.host}/{plugin}", ("\n".join(lines) + "\n").encode())
            for plugin, lines in waiting.items()
        ]

    def _gather(self, t_ns: int) -> None:
        starts = self.room.site.gpu_start_of_node
        smi = self._waiting.setdefault("nvidia_smi", [])
        for k, gpu in enumerate(range(int(starts[self.node]), int(starts[self.node + 1]))):
            tags = (
                f"arch=Blackwell,compute_mode=Default,host={self.host},index={k},name=NVIDIA\\ GB200,"
                f"pstate=P0,uuid=GPU-{gpu:08x}-6279-6f2c-d729-868a30f14d96"
            )
            shown = ",".join(self._smi_fields(gpu))
            smi.append(f"nvidia_smi,{tags} {shown} {t_ns}")
        ipmi = self._waiting.setdefault("ipmi_sensor", [])
        for name, key, unit in IPMI_SENSORS:
            value = float(self.room.read(f"node.{key}")[self.node])
            if value == value:
                tags = f"host={self.host},name={name},status_code=ok,unit={unit}"
                ipmi.append(f"ipmi_sensor,{tags} value={value:g} {t_ns}")
        self._waiting.setdefault("net", []).append(
            f"net,host={self.host},interface=eth0 bytes_sent=451838509i,bytes_recv=3284081640i,"
            f"packets_sent=2663590i,packets_recv=3585442i,err_in=0i,err_out=0i,drop_in=4i,drop_out=0i {t_ns}"
        )

    def _smi_fields(self, gpu: int) -> Iterator[str]:
        for name, key, factor, digits in SMI_FIELDS:
            value = float(self.room.read(key)[gpu]) * factor
            if value == value:
                yield f"{name}={value:.{digits}f}" if digits else f"{name}={value:.0f}i"
        yield f"memory_total={MIB_OF_GPU}i"
        yield f"memory_used={MIB_OF_GPU // 2}i"


SMI_FIELDS = (
    ("power_draw", "gpu.power_w", 1.0, 2),
    ("power_limit", "gpu.power_limit_w", 1.0, 2),
    ("temperature_gpu", "gpu.temp_c", 1.0, 0),
    ("utilization_gpu", "gpu.util_pu", 100.0, 0),
    ("clocks_current_sm", "gpu.sm_clock_hz", 1e-6, 0),
)
IPMI_SENSORS = (
    ("total_power", "power_w", "watts"),
    ("inlet_temp", "inlet_temp_c", "degrees_c"),
    ("exhaust_temp", "outlet_temp_c", "degrees_c"),
)


class Building:
    """The BMS of a room, with its retained metadata first."""

    def __init__(self, room: Room) -> None:
        self.room, self.alive = room, True
        self._first = room.metadata()

    def messages(self, now_ns: int) -> list[Message]:
        first, self._first = self._first, []
        return first + self.room.building if self.alive else []


class Agent:
    """racktwin-agent on one node, a frame each second."""

    def __init__(self, room: Room, node: int) -> None:
        self.room, self.alive = room, True
        site = room.site
        self._mine = {"node": np.arange(site.sizes["node"]) == node, "gpu": site.node_of_gpu == node}
        self._wire = PlantWire(site)

    def messages(self, now_ns: int) -> list[Message]:
        if not self.alive:
            return []
        reports = [
            dataclasses.replace(r, present=self._mine[r.table] & (True if r.present is None else r.present))
            for r in self.room.of_nodes
        ]
        return self._wire.messages(Observation(reports, (), now_ns))


class LoopedCapture:
    """A capture that is published again and again, with the same pauses; `edits` may change its messages."""

    def __init__(self, path: Path, begin_ns: int = START_NS, gap_s: float = 1.0) -> None:
        rows = [row for row in read_capture(path, 0) if not isinstance(row, BadRow)]
        self.edits: list[Callable[[Message], Message]] = []
        self.alive = True
        self._path, self._begin_ns = path, begin_ns
        self._turn_ns = max(row.t_ns for row in rows) + round(gap_s * NS)
        self._coming = self._all()
        self._next: Message | None = next(self._coming)

    def _all(self) -> Iterator[Message]:
        turn = 0
        while True:
            for row in read_capture(self._path, self._begin_ns + turn * self._turn_ns):
                if not isinstance(row, BadRow):
                    yield row
            turn += 1

    def messages(self, now_ns: int) -> list[Message]:
        out = []
        while self._next is not None and self._next.t_ns <= now_ns:
            message = self._next
            for edit in self.edits:
                message = edit(message)
            out.append(message)
            self._next = next(self._coming)
        return out if self.alive else []


def capture_site(path: Path, profile: str | None, name: str = "titan") -> dict[str, Any]:
    """The site as `site discover` finds it, with the type of its racks, which discovery cannot know."""
    tree = discover(list(read_capture(path)), name).site
    for rack in tree["halls"][0]["racks"]:
        rack["profile"] = profile
    return tree


@dataclass(slots=True)
class ScrapeTarget:
    """An exporter that is scraped."""

    name: str
    exporter: Exporter
    decoder: PageDecoder
    period_s: float
    due_ns: int
    alive: bool = True


@dataclass(slots=True)
class AlarmSpan:
    """A finding of one severity, with the seconds in which it was first and last active."""

    finding: Finding
    first_s: float
    last_s: float

    def __repr__(self) -> str:
        f = self.finding
        lasted = f"{self.first_s:.0f} to {self.last_s:.0f} s"
        return f"{lasted}: {f.severity} {f.id}: {f.title}; {'; '.join(f.evidence[:2])}"


class Listener:
    """The daemon's part between the wire and people: decoders, ingest and the engine, one tick a second."""

    def __init__(self, site: Site, maps: dict[str, str] | None = None, start_ns: int = START_NS) -> None:
        self.site, self.engine = site, make_engine(site)
        self.ingest = Ingest(site, self.engine.intake.serials)
        self.router = Router(site, extra=[extra_route(t, m) for t, m in (maps or {}).items()])
        self.publishers: list[Publisher] = []
        self.targets: list[ScrapeTarget] = []
        self.start_ns = self.now_ns = start_ns
        self.number = 0
        self._active: dict[tuple[str, str], AlarmSpan] = {}
        self._spans: list[AlarmSpan] = []
        self._advice: list[tuple[float, CommandBatch]] = []

    @property
    def time_s(self) -> float:
        return (self.now_ns - self.start_ns) / NS

    def subscribe(self, *publishers: Publisher) -> None:
        self.publishers += publishers

    def scrape(self, exporter: Exporter, mapping: str, place: str, period_s: float) -> ScrapeTarget:
        """From now on, at a phase of its own as in the daemon."""
        decoder = PageDecoder(self.site, *load_map(mapping), place)
        name = f"scrape-{len(self.targets)}"
        phase = zlib.crc32(f"{mapping}{place}".encode()) / 2**32
        out = ScrapeTarget(name, exporter, decoder, period_s, self.now_ns + round(period_s * phase * NS))
        self.targets.append(out)
        return out

    def run(self, room: Room | None, seconds: int) -> None:
        """So many seconds; findings and advice are kept."""
        for _ in range(seconds):
            if room is not None:
                room.pass_second()
            self.now_ns += NS
            for publisher in self.publishers:
                for message in publisher.messages(self.now_ns):
                    self.hear(message)
            for target in self.targets:
                if self.now_ns >= target.due_ns:
                    target.due_ns += round(target.period_s * NS)
                    self._fetch(target)
            self.tick()

    def hear(self, message: Message) -> None:
        """A message of the broker."""
        self.router.take(self.ingest, message)

    def _fetch(self, target: ScrapeTarget) -> None:
        if not target.alive:
            return
        inlet = self.ingest.of(target.name)
        try:
            items = target.decoder.decode(target.exporter.page(), self.now_ns)
            inlet.stage(items, self.now_ns, target.period_s)
        except BadMessage as error:
            inlet.reject(target.name, str(error))

    def tick(self) -> None:
        """One tick of a second."""
        decision = self.engine.tick(self.ingest.take(self.number, self.now_ns, 1.0))
        self.number += 1
        before, self._active = self._active, {}
        for finding in decision.findings:
            key = (finding.id, finding.severity)
            span = before.get(key)
            if span is None:
                span = AlarmSpan(finding, self.time_s, self.time_s)
                self._spans.append(span)
            span.last_s = self.time_s
            self._active[key] = span
        self._advice += [(self.time_s, batch) for batch in decision.advice]

    def alarms(self, since_s: float = 0.0) -> list[AlarmSpan]:
        """Findings above `info` that were active at that time or later."""
        return [s for s in self._spans if s.last_s >= since_s and s.finding.severity != "info"]

    def advice(self, since_s: float = 0.0) -> list[tuple[float, str, int]]:
        """(when, control, of how many) of what was advised."""
        return [(at, b.control, len(b.index)) for at, b in self._advice if at >= since_s]
