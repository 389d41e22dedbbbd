"""NVLink counts by link, read through NVML and reported when a link recovers, and periodically otherwise.

NVLink 5 counts recoveries that succeeded and failed, effective errors (left after error correction) and
symbol errors as fields of a link; older links count replays, recoveries and CRC errors. Names and numbers are
those of nvml.h. Nearly all links count nothing, so only those that do are named. Imports clock and
messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from racktwin_agent.clock import NS, Instant
from racktwin_agent.devices import Column
from racktwin_agent.publish import Out, frame_of, nvlinks_of

READ_EVERY_S = 10.0
AGAIN_S = 3600.0  # so that a daemon that began later receives them
# Between reports of counts of which no alarm comes: symbol errors of a noisy link move at every reading
SELDOM_S = 600.0
MAX_LINKS = 64
COUNTS = ("recoveries", "failures", "errors", "replays", "symbols")
# count -> field of a link, NVLink 5
FIELDS = (
    ("recoveries", "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS"),
    ("failures", "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS"),
    ("errors", "NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS"),
    ("symbols", "NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS"),
)
BER = "NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER"
# count -> counter of nvmlDeviceGetNvLinkErrorCounter: replay, recovery, CRC of flits, CRC of data
OLDER = (("replays", 0), ("recoveries", 1), ("errors", 2), ("errors", 3))
SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH


@dataclass
class GpuLinks:
    """Links of one GPU, and those with counts, by number."""

    read: int = 0
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    ber: dict[int, float] = field(default_factory=dict)
    far: dict[int, str] = field(default_factory=dict)

    def total(self, *names: str) -> int:
        """Return the sum of these counts over all links."""
        return sum(count.get(name, 0) for count in self.counts.values() for name in names)


def read_links(nvml: Any, device: Any) -> GpuLinks:
    """Read all links of a GPU; none if the GPU, its driver or the library reports none."""
    found = GpuLinks()
    try:
        (many,) = nvml.nvmlDeviceGetFieldValues(device, [nvml.NVML_FI_DEV_NVLINK_LINK_COUNT])
        if many.nvmlReturn != nvml.NVML_SUCCESS:
            return found
        links = range(min(int(many.value.uiVal), MAX_LINKS))
        by_link = _fields(nvml, device, links) or _counters(nvml, device, links)
    except (nvml.NVMLError, AttributeError, TypeError, ValueError):
        return found
    found.read = len(by_link)
    for link, counts in by_link.items():
        ber = counts.pop("ber", 0)
        if any(counts.values()):
            found.counts[link] = counts
            found.ber[link] = bit_error_rate(ber)
            found.far[link] = _far_end(nvml, device, link)
    return found


def _fields(nvml: Any, device: Any, links: Sequence[int]) -> dict[int, dict[str, int]]:
    """Return the counts of NVLink 5 by link; empty for GPUs with other links."""
    # An older library lacks the newer fields
    numbers = {name: getattr(nvml, constant, None) for name, constant in (*FIELDS, ("ber", BER))}
    if numbers["recoveries"] is None:
        return {}
    wanted = [(name, link, n) for link in links for name, n in numbers.items() if n is not None]
    values = nvml.nvmlDeviceGetFieldValues(device, [(number, link) for _, link, number in wanted])
    out: dict[int, dict[str, int]] = {}
    for (name, link, _), value in zip(wanted, values, strict=False):
        if value.nvmlReturn == nvml.NVML_SUCCESS:
            out.setdefault(link, {})[name] = int(value.value.ullVal)
    return {link: counts for link, counts in out.items() if "recoveries" in counts}


def _counters(nvml: Any, device: Any, links: Sequence[int]) -> dict[int, dict[str, int]]:
    """Return the counts of links before NVLink 5, by link."""
    out: dict[int, dict[str, int]] = {}
    for link in links:
        counts: dict[str, int] = {}
        try:
            for name, counter in OLDER:
                count = int(nvml.nvmlDeviceGetNvLinkErrorCounter(device, link, counter))
                counts[name] = counts.get(name, 0) + count
        except nvml.NVMLError:
            continue  # a link that is not in use
        out[link] = counts
    return out


def _far_end(nvml: Any, device: Any, link: int) -> str:
    """Return the other end as the driver reports it; "" if it does not, as between trays of a rack."""
    try:
        kind = int(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link))
        raw = nvml.nvmlDeviceGetNvLinkRemotePciInfo(device, link).busId
    except (nvml.NVMLError, AttributeError, TypeError, ValueError):
        return ""
    bus_id = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
    if not bus_id.strip("0:.\0 ") or set(bus_id.strip("\0 :.").upper()) <= set("F:."):
        return ""
    return f"{'NVSwitch' if kind == SWITCH else 'device'} {bus_id.lower()}"


def bit_error_rate(packed: int) -> float:
    """Return the rate that NVML packs: bits 0-7 the negative exponent of ten, bits 8-11 the mantissa."""
    return float((packed >> 8 & 0xF) * 10.0 ** -(packed & 0xFF))


def _marks(gpus: Sequence[GpuLinks], recoveries_only: bool) -> list[Any]:
    """Return the counts whose change makes a report due."""
    if not recoveries_only:
        return [(gpu.read, gpu.counts) for gpu in gpus]
    of_link = [
        {
            k: marks
            for k, c in gpu.counts.items()
            if any(marks := (c.get("recoveries", 0), c.get("failures", 0)))
        }
        for gpu in gpus
    ]
    return [(gpu.read, links) for gpu, links in zip(gpus, of_link, strict=True)]


class NvlinkReport:
    """Last report on the NVLinks of the node at `path`."""

    def __init__(self, path: str, boot: str) -> None:
        self.path, self.boot = path, boot
        self._sent: list[GpuLinks] | None = None
        self._sent_ns = 0
        # A fleet that starts at once does not report it all again at once
        self._phase_ns = zlib.crc32(path.encode()) % round(AGAIN_S) * NS

    def reports(self, gpus: Sequence[GpuLinks], at: Instant) -> list[Out]:
        """Return a frame with the sums of each GPU, and the counts by link when they are due."""
        if not any(gpu.read for gpu in gpus):
            return []
        sums = {
            "nvlink_recovery_count": ("recoveries",),  # as the mapping of dcgm-exporter sums
            "nvlink_error_count": ("errors", "failures"),
            "nvlink_replay_count": ("replays",),
        }
        columns: dict[str, Column] = {
            name: [g.total(*of) if g.read else None for g in gpus] for name, of in sums.items()
        }
        out = [frame_of(self.path, at.wall_ns, columns, {})]
        every_ns = round(AGAIN_S * NS)
        again_ns = self._sent_ns + every_ns - (self._sent_ns - self._phase_ns) % every_ns
        seldom = at.boot_ns - self._sent_ns < round(SELDOM_S * NS)
        moved = self._sent is None or _marks(gpus, seldom) != _marks(self._sent, seldom)
        if moved or at.boot_ns >= again_ns:
            self._sent, self._sent_ns = list(gpus), at.boot_ns
            out.append(nvlinks_of(self.path, f"{self.boot}-nvlinks-{at.boot_ns // NS}", self._body(gpus, at)))
        return out

    def _body(self, gpus: Sequence[GpuLinks], at: Instant) -> dict[str, Any]:
        rows = [(i, link, gpu) for i, gpu in enumerate(gpus) for link in sorted(gpu.counts)]
        body: dict[str, Any] = {
            "at_ns": at.wall_ns,
            "read": [gpu.read for gpu in gpus],
            "gpu": [i for i, _, _ in rows],
            "link": [link for _, link, _ in rows],
            "symbol_ber": [gpu.ber.get(link, 0.0) for _, link, gpu in rows],
            "far": [gpu.far.get(link, "") for _, link, gpu in rows],
        }
        return body | {name: [gpu.counts[link].get(name, 0) for _, link, gpu in rows] for name in COUNTS}
