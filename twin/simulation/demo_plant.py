"""Demo plant: a demo site in real time, whose node agents are real ones (`racktwin_agent`).

Only their devices are simulated: leases lapse and contingencies hold as on a node.
"""

from __future__ import annotations

import threading

import msgspec
import numpy as np
from racktwin_agent.devices import GPU_CAP, GPU_LOCK, POWER, Column, DeviceError, Key, Sample
from racktwin_agent.nvlinks import GpuLinks
from racktwin_agent.power import LEVELS, OFF, STOP, Power

from connectors.agents import EVENT
from twin.catalogue import F64, NS
from twin.plant import Observation, Report
from twin.simulation.demo_site import DemoSite
from twin.simulation.plant_live import LivePlant
from twin.simulation.plant_orders import Publication
from twin.simulation.plant_wire import plain_column, rounded
from twin.telemetry import JobEnded, JobStarted, Message

# Others say these of a node: its agent, and the scheduler
NOT_OF_AGENTS = ("agent_state", "service_level_state", "standby_state")
AGENTS = ("gpu", "node")  # tables whose devices the agents read and set
# Counter of a GPU -> count of its links
LINK_COUNTS = {
    "nvlink_recovery_count": "recoveries",
    "nvlink_error_count": "errors",
    "nvlink_replay_count": "replays",
}
CATCH_UP_S = 120.0  # of the time since the past ended, at most


class DemoPlant(LivePlant):
    """A demo site in real time. Agents read and cap its devices from another thread."""

    def __init__(self, demo: DemoSite) -> None:
        super().__init__(demo.plant, demo.sensors)
        self.demo, self.lock = demo, threading.RLock()
        truth = demo.plant.truth
        self.limits: dict[str, F64] = {GPU_CAP: truth.gpu_cap_w.copy(), GPU_LOCK: truth.gpu_lock_mhz.copy()}
        self.reports: dict[tuple[str, tuple[str, ...]], Report] = {}
        self._own_requests = tuple(f"{self._requests}{table}." for table in AGENTS)
        demo.scheduler.commanded = True
        for event in demo.scheduler.running():
            self._jobs.note(event, self.plant.now_ns)
        # From now on the agents own the caps: they keep the set values until their own leases end
        for control in self.limits:
            held = self.plant.actuators.until_s.get(control)
            if held is not None:
                held[:] = np.inf

    def receive(self, message: Message, retained: bool = False) -> None:
        """See LivePlant; agents receive their own requests themselves."""
        if not message.topic.startswith(self._own_requests):
            with self.lock:
                super().receive(message, retained)

    def missed(self, _: str, why: str, count: int) -> None:
        """Count messages that were lost before they arrived."""
        self.counts[f"missed: {why[:80]}"] += count

    def move(self, seconds: float, now_ns: int) -> list[Publication]:
        """See LivePlant; first the time that passed since the simulated past ended."""
        with self.lock:
            behind_s = (now_ns - self.plant.now_ns) / NS
            seconds = max(seconds, min(behind_s, CATCH_UP_S)) if not self.reports else seconds
            self.plant.happened(self.demo.scheduler.step(seconds))
            out = super().move(seconds, now_ns)
            plan = self.demo.plan()
            if plan is not None:
                body = {"type": "OutlookTold", **msgspec.to_builtins(plan)}
                topic = f"{EVENT}outlooks/{body.pop('author')}"
                out.append(Publication(topic, msgspec.json.encode(body), True))
        return out

    def shown(self, seen: Observation) -> Observation:
        """Return all readings except those of agents and the scheduler."""
        rest = []
        for report in seen.reports:
            if report.table in AGENTS:
                self.reports[report.table, report.signals] = report.copy()
            else:
                rest.append(report)
        events = [event for event in seen.events if not isinstance(event, JobStarted | JobEnded)]
        return Observation(rest, events, seen.now_ns)

    def columns(self, table: str, first: int, end: int) -> dict[str, Column]:
        """Return the last observed columns of these entities; silent ones are left out."""
        out: dict[str, Column] = {}
        for (kind, _), report in list(self.reports.items()):
            if kind != table or (report.present is not None and not report.present[first:end].all()):
                continue
            for k, signal in enumerate(report.signals):
                if signal not in NOT_OF_AGENTS:
                    out[signal] = plain_column(rounded(f"{table}.{signal}", report.values[k, first:end]))
            for k, counter in enumerate(report.counters):
                out[counter] = plain_column(report.counts[k, first:end])
        return out

    def trays(self) -> dict[str, Tray]:
        """Return the devices of every node, by its path."""
        return {self.site.name("node", i): Tray(self, i) for i in range(self.site.sizes["node"])}


class TrayPower(Power):
    """The power of one node; its programs switch the plant's node."""

    def __init__(self, live: DemoPlant, node: int) -> None:
        super().__init__(dict.fromkeys((STOP, OFF), ("switch of the plant",)))
        self.live, self.node = live, node

    def columns(self) -> dict[str, Column]:
        """See racktwin_agent.power: the node's board says it."""
        return {}

    def run(self) -> str:
        """See racktwin_agent.power."""
        self._due = ()
        with self.live.lock:
            self.live.ask(POWER, self.node, self.level)
        return f"{LEVELS[self.level]} of node {self.node}"


class Tray:
    """The GPUs of one node as an agent's devices."""

    def __init__(self, live: DemoPlant, node: int) -> None:
        self.live, self.node, self.power = live, node, TrayPower(live, node)
        self.first, self.end = (int(i) for i in live.site.gpu_start_of_node[node : node + 2])
        self.gpus = self.end - self.first
        envelopes = {control: live.site.envelopes[control] for control in live.limits}
        self._range = {c: (float(x.low[self.first]), float(x.high[self.first])) for c, x in envelopes.items()}

    def sample(self, t_ns: int) -> Sample:
        """See racktwin_agent.devices."""
        with self.live.lock:
            gpu = self.live.columns("gpu", self.first, self.end)
            node = self.live.columns("node", self.node, self.node + 1)
        return Sample(t_ns, gpu, node)

    def limits(self, key: Key) -> tuple[float, float] | None:
        """See racktwin_agent.devices."""
        return None if self._gpu(key) is None else self._range[key.control]

    def get(self, key: Key) -> float | None:
        """See racktwin_agent.devices."""
        gpu = self._gpu(key)
        return None if gpu is None else float(self.live.limits[key.control][gpu])

    def set(self, key: Key, value: float) -> None:
        """See racktwin_agent.devices."""
        gpu = self._gpu(key)
        if gpu is None:
            raise DeviceError(f"no {key.name}")
        with self.live.lock:
            self.live.limits[key.control][gpu] = value
            self.live.ask(key.control, gpu, value)

    def serials(self) -> list[str | None]:
        """See racktwin_agent.devices: they have none."""
        return [None] * self.gpus

    def nvlinks(self) -> list[GpuLinks]:
        """See racktwin_agent.devices: all that a GPU counts is of one of its links, which never changes."""
        with self.live.lock:
            columns = self.live.columns("gpu", self.first, self.end)
        return [self._links(gpu, columns) for gpu in range(self.gpus)]

    def _links(self, gpu: int, columns: dict[str, Column]) -> GpuLinks:
        site = self.live.site
        links = site.design.scale_up_links[site.rack_of_gpu[self.first + gpu]]
        counts = {count: columns[name][gpu] for name, count in LINK_COUNTS.items() if name in columns}
        if not links >= 1 or len(counts) < len(LINK_COUNTS) or None in counts.values():
            return GpuLinks()  # a counter that was not read is not at zero
        whole = {count: int(value or 0) for count, value in counts.items()}
        return GpuLinks(int(links), {(self.first + gpu) % int(links): whole} if any(whole.values()) else {})

    def gpu_at(self, bus_id: str) -> int | None:
        """See racktwin_agent.devices: these are on no bus."""
        return None

    def close(self) -> None:
        """See racktwin_agent.devices."""

    def _gpu(self, key: Key) -> int | None:
        lowest = self._range.get(key.control, (np.nan, np.nan))[0]
        if np.isnan(lowest) or not key.name.startswith("gpu") or not key.name[3:].isdecimal():
            return None
        number = int(key.name[3:])
        return self.first + number if number < self.gpus else None
