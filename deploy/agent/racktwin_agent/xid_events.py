"""XIDs from NVML's event set, for nodes without access to the kernel's log.

NVML numbers nothing, so an id is made of the boot, the GPU, the code and the second: a repeat within a
second is one event. Imports the agent's clock, NVML devices and faults.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from racktwin_agent.clock import NS, current_instant
from racktwin_agent.kernel_log import Fault
from racktwin_agent.nvml import NvmlDevices

WAIT_MS = 500


class XidEvents:
    """A thread that waits for critical errors and reports them."""

    def __init__(
        self, devices: NvmlDevices, boot: str, give: Callable[[Fault], None], say: Callable[[str], None]
    ) -> None:
        self.devices, self.boot, self.give, self.say = devices, boot, give, say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xid-events", daemon=True)

    def start(self) -> None:
        """Start to wait."""
        self._thread.start()

    def stop(self) -> None:
        """Stop waiting."""
        self._stop.set()
        self._thread.join(timeout=3.0)

    def _run(self) -> None:
        nvml = self.devices.nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for _, handle in self.devices.handles():
                try:
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                except nvml.NVMLError as error:
                    self.say(f"a GPU reports no XIDs: {error}")
        except nvml.NVMLError as error:
            self.say(f"NVML reports no XIDs: {error}")
            return
        while not self._stop.is_set():
            try:
                event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
            except nvml.NVMLError as error:
                if getattr(error, "value", None) != nvml.NVML_ERROR_TIMEOUT:
                    self.say(f"waiting for XIDs failed: {error}")
                    self._stop.wait(5.0)
                continue
            self.give(self._fault(event))
        nvml.nvmlEventSetFree(events)

    def _fault(self, event: Any) -> Fault:
        nvml = self.devices.nvml
        code = int(event.eventData)
        try:
            raw = nvml.nvmlDeviceGetPciInfo(event.device).busId
        except nvml.NVMLError:
            raw = "an unknown address"  # a GPU that fell off the bus no longer tells it
        bus_id = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
        gpu = self.devices.gpu_at(bus_id)
        name = "" if gpu is None else f"gpu{gpu}"
        at = current_instant()
        event_id = f"{self.boot}-nvml-{name}-{code}-{at.boot_ns // NS}"
        table, detail = "node" if gpu is None else "gpu", f"Xid {code} at {bus_id}"
        return Fault(event_id, table, name, code, detail, at.wall_ns)
