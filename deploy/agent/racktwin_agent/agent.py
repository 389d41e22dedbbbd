"""The agent's loop: processes one queue, steps each second without drift, and owns the threads.

The network, the sampling of devices and the kernel's log have a thread each, so that a device that hangs
delays no command. Imports everything else of the agent.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any

from racktwin_agent.clock import NS, Instant, boot_id, current_instant
from racktwin_agent.config import Config
from racktwin_agent.contingency import HEAT
from racktwin_agent.devices import INLET, Devices, Sample
from racktwin_agent.identity import READ_EVERY_S, Identity, board_serial
from racktwin_agent.inbox import Inbox
from racktwin_agent.kernel_log import Fault, KernelLog
from racktwin_agent.link import Link
from racktwin_agent.node import Node
from racktwin_agent.notify import notify
from racktwin_agent.nvlinks import READ_EVERY_S as LINKS_EVERY_S, NvlinkReport
from racktwin_agent.nvml import NvmlDevices
from racktwin_agent.overheating import Overheating
from racktwin_agent.power import Power
from racktwin_agent.publish import Out, fault_of
from racktwin_agent.simulated import SimulatedDevices
from racktwin_agent.store import FileStore
from racktwin_agent.triggers import Watch, read_inputs, read_water_inlet
from racktwin_agent.wire import Refused
from racktwin_agent.xid_events import XidEvents

log = logging.getLogger("racktwin-agent")
STALL_S = 10.0
ANSWER_S = 0.2  # for the answer to an order that ends this node; source: estimate


def open_devices(config: Config) -> Devices:
    """Return the devices that the configuration names. Raises DeviceError."""
    if config.devices == "simulated":
        return SimulatedDevices(config.simulated_gpus, config.simulated_seed)
    return NvmlDevices(config.gpu_bus_ids)


class Agent:
    """One node's agent. Raises OSError where its state folder cannot be used.

    A bug in a thread of its own ends it: the next start takes the leases over.
    """

    def __init__(self, config: Config, devices: Devices) -> None:
        self.config, self.devices = config, devices
        self.inbox = Inbox()
        self._logged_lost = 0
        self.store = FileStore(config.state_dir)
        heat = Overheating(config.overheating_c) if config.overheating_c else None
        supplies = tuple(psu.name for psu in config.psu)
        self.watch = Watch(config.broker_gone_s, config.power_brake_s, heat=heat, supplies=supplies)
        boot = boot_id()
        power = Power(config.power)
        self.node = Node(
            config.node, devices, self.store, self.watch, boot, config.integration, log.info, power=power
        )
        self.identity = Identity(config.node, boot)
        self.nvlinks = NvlinkReport(config.node, boot)
        at = current_instant()
        self._resume()
        will = self.node.status("offline", at)
        self.link = Link(config.broker, self.node.topics(), will, self._received, self._changed)
        self._connected = False
        self.watch.connected(False, at)
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="sampler", daemon=True)
        self._inputs = threading.Thread(target=self._read_inputs, name="inputs", daemon=True)
        self._faults: KernelLog | XidEvents | None = None
        if config.kernel_log == "nvml":
            if isinstance(devices, NvmlDevices):
                self._faults = XidEvents(devices, boot, self._give, log.warning)
        elif config.kernel_log != "off":
            self._faults = KernelLog(config.kernel_log, boot, devices, self._give, log.warning)
        self._sampled_ns = at.boot_ns
        self._stalled = False
        self._failed: Exception | None = None

    def _resume(self) -> None:
        try:
            self.node.resume(current_instant())
        except ValueError as error:
            aside = self.store.put_aside()
            log.error("%s; moved to %s. Caps stay as they are until the daemon renews them.", error, aside)

    def stop(self) -> None:
        """Stop `run`; safe to call from a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Run until `stop`. Leases stay in force: the next agent that runs executes their lapses."""
        self.link.start()
        self._sampler.start()
        if self.config.psu:
            self._inputs.start()
        if self._faults is not None:
            self._faults.start()
        notify("READY=1")
        log.info("agent of %s: %d GPUs, %s devices", self.config.node, self.devices.gpus, self.config.devices)
        try:
            self._loop()
        finally:
            notify("STOPPING=1")
            self._stop.set()
            self.link.stop([self.node.status("offline", current_instant())])
            if self._faults is not None:
                self._faults.stop()
            self._sampler.join(timeout=2.0)
            self.store.close()

    def _loop(self) -> None:
        interval_ns = round(min(self.config.interval_s, 1.0) * NS)
        due_ns = current_instant().boot_ns
        while not self._stop.is_set():
            at = current_instant()
            if at.boot_ns >= due_ns:
                self._step()
                due_ns += interval_ns * (1 + (at.boot_ns - due_ns) // interval_ns)
            until_ns = due_ns
            ends_ns = self.node.next_ns()
            if ends_ns is not None and at.boot_ns < ends_ns < due_ns:
                until_ns = ends_ns
            got = self.inbox.get(min((until_ns - current_instant().boot_ns) / NS, 0.5))
            if got is not None:
                self._take(*got)
            elif until_ns != due_ns and current_instant().boot_ns >= until_ns:
                self._send(self.node.step(current_instant()))

    def _step(self) -> None:
        at = current_instant()
        self._note_link(at)
        self._send(self.node.step(at))
        if self._failed is not None:
            raise self._failed
        if not self.link.is_alive():
            raise RuntimeError("the thread of the connection ended")
        if self.inbox.lost > self._logged_lost:
            self._logged_lost = self.inbox.lost
            log.error("%d messages lost so far: more came than could be carried out", self._logged_lost)
        stalled = at.boot_ns - self._sampled_ns > max(STALL_S, 3 * self.config.interval_s) * NS
        if stalled and not self._stalled:
            log.error(
                "no sample for %g s: a device or its driver hangs", (at.boot_ns - self._sampled_ns) / NS
            )
        self._stalled = stalled
        notify("WATCHDOG=1")

    def _take(self, what: str, item: Any) -> None:
        at = current_instant()
        if what == "message":
            topic, payload = item
            try:
                self._send(self.node.take(topic, payload, at))
            except Refused as error:
                self.node.say_once(f"{topic[:200]}: refused: {error}")
        elif what == "sample":
            self._sampled_ns = at.boot_ns
            self.link.send(self.node.report(item, at))
            if HEAT in self.watch.present(at):
                self._send(self.node.step(at))
        elif what == "fault":
            fields = (item.id, item.table, item.name, item.code, item.detail, item.at_ns)
            self.link.send(fault_of(self.config.node, *fields))
        elif what == "serials":
            gpus, board = item
            self._send(self.identity.reports(gpus, board, at))
        elif what == "nvlinks":
            self._send(self.nvlinks.reports(item, at))
        elif what == "inputs":
            for text in self.watch.inputs(item):
                log.warning("%s", text)
            self._send(self.node.step(at))
        elif what == "link":
            log.info("broker: %s", item)
            self._note_link(at)

    def _note_link(self, at: Instant) -> None:
        """Note the state of the link. Asks the link itself, because a flood may drop its messages."""
        was, self._connected = self._connected, self.link.connected
        self.watch.connected(self._connected, at)
        if self._connected and not was:
            self._send([self.node.status("online", at)])

    def _send(self, outs: list[Out]) -> None:
        for out in outs:
            self.link.send(out)
        if self.node.power.is_due:
            time.sleep(ANSWER_S)
            log.warning("%s", self.node.power.run())

    def _received(self, topic: str, payload: bytes) -> None:
        self.inbox.put("message", (topic, payload), len(payload))

    def _changed(self, connected: bool, why: str) -> None:
        self.inbox.put("link", why)

    def _give(self, fault: Fault) -> None:
        self.inbox.put("fault", fault)

    def _sample(self) -> None:
        due_ns = current_instant().boot_ns
        interval_ns = round(self.config.interval_s * NS)
        read_ns = links_ns = due_ns
        while not self._stop.is_set():
            try:
                sample: Sample = self._with_inlet(self.devices.sample(current_instant().wall_ns))
                self.inbox.put("sample", sample)
                at_ns = current_instant().boot_ns
                if at_ns >= read_ns:
                    read_ns = at_ns + round(READ_EVERY_S * NS)
                    self.inbox.put("serials", (self.devices.serials(), self._board()))
                if at_ns >= links_ns:
                    links_ns = at_ns + round(LINKS_EVERY_S * NS)
                    self.inbox.put("nvlinks", self.devices.nvlinks())
            except Exception as error:
                self._failed = error  # the loop ends with it, and systemd starts anew
                return
            at_ns = current_instant().boot_ns
            due_ns += interval_ns * (1 + max(0, at_ns - due_ns) // interval_ns)
            self._stop.wait(max(0.0, (due_ns - at_ns) / NS))

    def _with_inlet(self, sample: Sample) -> Sample:
        file = self.config.water_inlet_file
        return (
            sample if file is None else replace(sample, node={**sample.node, INLET: [read_water_inlet(file)]})
        )

    def _board(self) -> str | None:
        """Return the node's serial; None for simulated devices, whose host is no machine of the site."""
        return board_serial() if isinstance(self.devices, NvmlDevices) else None

    def _read_inputs(self) -> None:
        while not self._stop.is_set():
            self.inbox.put("inputs", read_inputs(self.config.psu))
            self._stop.wait(1.0)
