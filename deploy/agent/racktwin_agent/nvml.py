"""NVIDIA GPUs through NVML: readings as columns, power limits and clock locks.

A feature that a GPU lacks is a column of nothing; a GPU that fell off the bus loses its own values and
nothing else. Units are those of racktwin's catalogue. Imports the agent's devices and serials, and pynvml
when it is opened.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from racktwin_agent.devices import GPU_LOCK, READBACK, Column, DeviceError, Key, Sample, short_bus_id
from racktwin_agent.identity import plain_serial
from racktwin_agent.nvlinks import GpuLinks, read_links

CLOCK_STEP_MHZ = (
    15.0  # of SM clocks: so much above its lock a clock may be; source: nvidia-smi, supported clocks
)
NVLINK_ALL = 0xFFFFFFFF  # the scope of a field value: all links together
RETRY_LOST_S = 10.0
Number = float | int | None
Query = tuple[str, Callable[[Any, Any], Number]]


def _field(name: str, scope: int | None = None) -> Callable[[Any, Any], Number]:
    """Return the value of a field by the name of its number."""

    def read(nvml: Any, device: Any) -> Number:
        number = getattr(nvml, name)
        wanted = [number if scope is None else (number, scope)]
        (found,) = nvml.nvmlDeviceGetFieldValues(device, wanted)
        if found.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(found.nvmlReturn)
        kinds = {
            nvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
            nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
            nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
            nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
            getattr(nvml, "NVML_VALUE_TYPE_SIGNED_INT", None): "siVal",  # not in an older library
        }
        kind = kinds.get(found.valueType)
        return None if kind is None else getattr(found.value, kind)

    return read


def _clock_events(nvml: Any, device: Any) -> Number:
    read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    read = read or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    return int(read(device)) & 0xFFFF


def _memory_used(nvml: Any, device: Any) -> Number:
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    return memory.used / memory.total if memory.total else None


def _ecc(kind: str) -> Callable[[Any, Any], Number]:
    return lambda n, d: int(n.nvmlDeviceGetTotalEccErrors(d, getattr(n, kind), n.NVML_AGGREGATE_ECC))


def _throttled(policy: str) -> Callable[[Any, Any], Number]:
    return lambda n, d: int(n.nvmlDeviceGetViolationStatus(d, getattr(n, policy)).violationTime)


_shutdown_limit = _field("NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT")


def _shutdown(nvml: Any, device: Any) -> Number:
    """Return the shutdown temperature; GPUs since Hopper report margins instead, source: nvml.h, T.Limit."""
    try:
        return float(nvml.nvmlDeviceGetTemperatureThreshold(device, nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN))
    except nvml.NVMLError:
        limit_k = _shutdown_limit(nvml, device)
        if limit_k is None:
            return None
        temp_c = nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
        signed_k = (int(limit_k) + 2**31) % 2**32 - 2**31  # some drivers call it unsigned
        return float(temp_c + nvml.nvmlDeviceGetMarginTemperature(device) - signed_k)


QUERIES: tuple[Query, ...] = (
    ("power_w", lambda n, d: n.nvmlDeviceGetPowerUsage(d) / 1e3),
    ("temp_c", lambda n, d: float(n.nvmlDeviceGetTemperature(d, n.NVML_TEMPERATURE_GPU))),
    ("hbm_temp_c", _field("NVML_FI_DEV_MEMORY_TEMP")),
    ("thermal_margin_k", lambda n, d: float(n.nvmlDeviceGetMarginTemperature(d))),
    ("util_pu", lambda n, d: n.nvmlDeviceGetUtilizationRates(d).gpu / 100),
    ("mem_used_pu", _memory_used),
    ("sm_clock_hz", lambda n, d: n.nvmlDeviceGetClockInfo(d, n.NVML_CLOCK_SM) * 1e6),
    ("mem_clock_hz", lambda n, d: n.nvmlDeviceGetClockInfo(d, n.NVML_CLOCK_MEM) * 1e6),
    ("power_limit_w", lambda n, d: n.nvmlDeviceGetEnforcedPowerLimit(d) / 1e3),
    ("clock_event_bits", _clock_events),
    ("row_remap_pending_state", lambda n, d: int(n.nvmlDeviceGetRemappedRows(d)[2])),
    ("recovery_action_state", _field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")),
    ("energy_mj", lambda n, d: int(n.nvmlDeviceGetTotalEnergyConsumption(d))),
    ("throttle_power_ns", _throttled("NVML_PERF_POLICY_POWER")),
    ("throttle_thermal_ns", _throttled("NVML_PERF_POLICY_THERMAL")),
    ("pcie_replay_count", lambda n, d: int(n.nvmlDeviceGetPcieReplayCounter(d))),
    ("ecc_sbe_count", _ecc("NVML_MEMORY_ERROR_TYPE_CORRECTED")),
    ("ecc_dbe_count", _ecc("NVML_MEMORY_ERROR_TYPE_UNCORRECTED")),
    ("row_remap_count", lambda n, d: sum(n.nvmlDeviceGetRemappedRows(d)[:2])),
)
# signal -> (a field that counts KiB, its scope): read as rates
RATES: tuple[tuple[str, Callable[[Any, Any], Number]], ...] = (
    ("nvlink_tx_bytes_per_s", _field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", NVLINK_ALL)),
    ("nvlink_rx_bytes_per_s", _field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", NVLINK_ALL)),
)


class _Gpu:
    """One GPU: its handle while present, missing features, and the last counts of its rates."""

    def __init__(self, bus_id: str) -> None:
        self.bus_id, self.handle = bus_id, None
        self.lacks: set[str] = set()
        self.counts: dict[str, tuple[int, int]] = {}
        self.retry_s = 0.0
        self.shutdown_c: Number = None
        self.lock_mhz: float | None = None  # as it was set here; NVML does not report it


class NvmlDevices:
    """The GPUs of this node, in the order of `bus_ids` if given, else of NVML. Raises DeviceError.

    With `bus_ids`, a GPU that is missing at the start keeps its place, empty.
    """

    def __init__(self, bus_ids: Sequence[str] = (), nvml: Any = None) -> None:
        self.nvml = importlib.import_module("pynvml") if nvml is None else nvml
        try:
            self.nvml.nvmlInit()
            count = self.nvml.nvmlDeviceGetCount()
            found: dict[str, Any] = {}
            for i in range(count):
                try:
                    handle = self.nvml.nvmlDeviceGetHandleByIndex(i)
                    found[self._bus_id(handle)] = handle
                except self.nvml.NVMLError:
                    continue  # lost: NVML still counts it
        except self.nvml.NVMLError as error:
            raise DeviceError(
                f"NVML cannot be used: {error}; expected NVIDIA's driver on this node"
            ) from None
        self._gpus = [_Gpu(short_bus_id(b)) for b in (bus_ids or sorted(found))]
        for gpu in self._gpus:
            gpu.handle = found.get(gpu.bus_id)
        self.gpus = len(self._gpus)
        self._limits: dict[int, tuple[float, float]] = {}
        self._clocks: dict[int, tuple[float, float]] = {}
        if self.gpus == 0:
            raise DeviceError("NVML knows no GPU on this node; expected at least one, or gpu_bus_ids")

    def _bus_id(self, handle: Any) -> str:
        raw = self.nvml.nvmlDeviceGetPciInfo(handle).busId
        return short_bus_id(raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw))

    def sample(self, t_ns: int) -> Sample:
        """See Devices."""
        columns: dict[str, Column] = {name: [None] * self.gpus for name, _ in (*QUERIES, *RATES)}
        locked = columns[READBACK[GPU_LOCK]] = [None] * self.gpus
        for i, gpu in enumerate(self._gpus):
            for name, query in QUERIES:
                columns[name][i] = self._ask(gpu, name, query)
            for name, query in RATES:
                columns[name][i] = self._rate(gpu, name, self._ask(gpu, name, query))
            clock_hz = columns["sm_clock_hz"][i]
            locked[i] = self._lock_mhz(i, None if clock_hz is None else clock_hz / 1e6)
            if gpu.shutdown_c is None:
                gpu.shutdown_c = self._ask(gpu, "shutdown_c", _shutdown)
        # A column of nothing from every GPU is a feature that this node lacks.
        gpu_columns = {k: v for k, v in columns.items() if any(x is not None for x in v) or k == "power_w"}
        return Sample(t_ns, gpu_columns, shutdown_c=[gpu.shutdown_c for gpu in self._gpus])

    def nvlinks(self) -> list[GpuLinks]:
        """See Devices."""
        return [read_links(self.nvml, g.handle) if self._is_there(g) else GpuLinks() for g in self._gpus]

    def _ask(self, gpu: _Gpu, name: str, query: Callable[[Any, Any], Number]) -> Number:
        if name in gpu.lacks or not self._is_there(gpu):
            return None
        nvml, handle = self.nvml, gpu.handle
        if handle is None:  # lost meanwhile, by word of the other thread: no missing feature
            return None
        try:
            value = query(nvml, handle)
        except nvml.NVMLError as error:
            code = getattr(error, "value", None)
            lost = code in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
            if lost or (code == nvml.NVML_ERROR_INVALID_ARGUMENT and not self._is_valid(handle)):
                gpu.handle, gpu.retry_s = None, time.monotonic() + RETRY_LOST_S
            elif code in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                          nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NO_PERMISSION):  # fmt: skip
                gpu.lacks.add(name)
            return None
        except (AttributeError, TypeError, ValueError, IndexError):
            gpu.lacks.add(name)  # a library or driver older than the query
            return None
        return value if isinstance(value, int | float) and value >= -1e6 else None

    def _is_valid(self, handle: Any) -> bool:
        """Return False for a handle from before a reset: every query refuses it, whatever the GPU has."""
        try:
            self.nvml.nvmlDeviceGetPciInfo(handle)
        except self.nvml.NVMLError:
            return False
        return True

    def _is_there(self, gpu: _Gpu) -> bool:
        """Return True if the GPU answers; looks for a lost GPU periodically, as after a reset."""
        if gpu.handle is None and time.monotonic() >= gpu.retry_s:
            gpu.retry_s = time.monotonic() + RETRY_LOST_S
            try:
                handle = self.nvml.nvmlDeviceGetHandleByPciBusId(f"{gpu.bus_id}.0".encode("ascii"))
                self.nvml.nvmlDeviceGetPowerUsage(handle)
                gpu.handle, gpu.counts = handle, {}
            except (self.nvml.NVMLError, AttributeError):
                gpu.handle = None
        return gpu.handle is not None

    def _rate(self, gpu: _Gpu, name: str, count: Number) -> Number:
        """Return the bytes per second since the last sample, from a count of KiB."""
        now = time.monotonic_ns()
        before = gpu.counts.get(name)
        if count is None:
            return None
        gpu.counts[name] = (int(count), now)
        if before is None or count < before[0] or now <= before[1]:
            return None
        return (int(count) - before[0]) * 1024 * 1e9 / (now - before[1])

    def _number(self, key: Key) -> int | None:
        digits = key.name.removeprefix("gpu")
        if key.control not in READBACK or digits == key.name or not (digits.isascii() and digits.isdigit()):
            return None
        return int(digits) if len(digits) < 4 and int(digits) < self.gpus else None

    def limits(self, key: Key) -> tuple[float, float] | None:
        """See Devices: NVML's constraints on the power limit; for a lock, any clock from the lowest up,
        because a value above the highest removes the lock."""
        at = self._number(key)
        if at is None:
            return None
        if key.control == GPU_LOCK:
            clocks = self._clocks_mhz(at)
            return None if clocks is None else (clocks[0], inf)
        if at not in self._limits and self._is_there(self._gpus[at]):
            try:
                low, high = self.nvml.nvmlDeviceGetPowerManagementLimitConstraints(self._gpus[at].handle)
                self._limits[at] = (low / 1e3, high / 1e3)
            except self.nvml.NVMLError:
                return None
        return self._limits.get(at)

    def get(self, key: Key) -> float | None:
        """See Devices: the set limit; a lower limit that the hardware enforces is in the samples."""
        at = self._number(key)
        if at is None or not self._is_there(self._gpus[at]):
            return None
        if key.control == GPU_LOCK:
            gpu = self._gpus[at]
            return self._lock_mhz(
                at, self._ask(gpu, "lock", lambda n, d: n.nvmlDeviceGetClockInfo(d, n.NVML_CLOCK_SM))
            )
        try:
            return float(self.nvml.nvmlDeviceGetPowerManagementLimit(self._gpus[at].handle) / 1e3)
        except self.nvml.NVMLError:
            return None

    def set(self, key: Key, value: float) -> None:
        """See Devices: requires root."""
        at = self._number(key)
        if at is None:
            raise DeviceError(f"no {key.control} of {key.name or 'this node'}")
        if not self._is_there(self._gpus[at]):
            raise DeviceError(f"{key.name} at {self._gpus[at].bus_id} does not answer")
        if key.control == GPU_LOCK:
            self._lock(at, value)
            return
        try:
            self.nvml.nvmlDeviceSetPowerManagementLimit(self._gpus[at].handle, round(value * 1e3))
        except self.nvml.NVMLError as error:
            raise DeviceError(f"{key.name}: a limit of {value:g} W was refused: {error}") from None

    def _clocks_mhz(self, at: int) -> tuple[float, float] | None:
        """Return the lowest and highest SM clock of a GPU; None if its clocks cannot be locked."""
        if at not in self._clocks and self._is_there(self._gpus[at]):
            nvml, device = self.nvml, self._gpus[at].handle
            try:
                low, high = nvml.nvmlDeviceGetMinMaxClockOfPState(
                    device, nvml.NVML_CLOCK_SM, nvml.NVML_PSTATE_0
                )
                if 0 < low < high and hasattr(nvml, "nvmlDeviceSetGpuLockedClocks"):
                    self._clocks[at] = float(low), float(high)
            except (nvml.NVMLError, AttributeError, TypeError, ValueError):
                return None
        return self._clocks.get(at)

    def _lock_mhz(self, at: int, clock_mhz: float | None) -> float | None:
        """Return the lock that this agent set, unless the GPU's clock shows that it is gone.

        NVML has no query for it: after a driver is loaded anew, or by another's hand, the clock runs free.
        """
        clocks, set_mhz = self._clocks_mhz(at), self._gpus[at].lock_mhz
        if clocks is None or clock_mhz is None:
            return None
        if set_mhz is None:
            return clocks[1]
        return set_mhz if clock_mhz <= set_mhz + CLOCK_STEP_MHZ else clock_mhz

    def _lock(self, at: int, value: float) -> None:
        """Lock the clocks of a GPU up to a value; the highest clock or more removes the lock."""
        gpu, clocks = self._gpus[at], self._clocks_mhz(at)
        if clocks is None:
            raise DeviceError(f"gpu{at}: its clocks cannot be locked")
        try:
            if value >= clocks[1]:
                self.nvml.nvmlDeviceResetGpuLockedClocks(gpu.handle)
                gpu.lock_mhz = None
            else:
                self.nvml.nvmlDeviceSetGpuLockedClocks(gpu.handle, round(clocks[0]), round(value))
                gpu.lock_mhz = value
        except self.nvml.NVMLError as error:
            raise DeviceError(f"gpu{at}: a lock of {value:g} MHz was refused: {error}") from None

    def serials(self) -> list[str | None]:
        """See Devices: the board's serial and the UUID, since several GPUs may share a board.

        source: NVML API reference, nvmlDeviceGetSerial, nvmlDeviceGetUUID, nvmlDeviceGetHandleBySerial
        """
        return [self._identity(gpu) for gpu in self._gpus]

    def _identity(self, gpu: _Gpu) -> str | None:
        """Return the identity, or None unless all its parts could be read: a part of a name would be
        another name."""
        nvml, parts = self.nvml, []
        for name in ("nvmlDeviceGetSerial", "nvmlDeviceGetUUID"):
            if not self._is_there(gpu):
                return None
            try:
                raw = getattr(nvml, name)(gpu.handle)
            except nvml.NVMLError as error:
                if getattr(error, "value", None) != nvml.NVML_ERROR_NOT_SUPPORTED:
                    return None
                continue
            except AttributeError:
                continue  # a library older than the query
            except ValueError:
                return None
            part = plain_serial(raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw))
            if part is not None:
                parts.append(part)
        return "/".join(parts) or None

    def gpu_at(self, bus_id: str) -> int | None:
        """See Devices."""
        wanted = short_bus_id(bus_id)
        return next((i for i, g in enumerate(self._gpus) if g.bus_id == wanted), None)

    def handles(self) -> list[tuple[int, Any]]:
        """Return (number, NVML handle) of the present GPUs."""
        return [(i, g.handle) for i, g in enumerate(self._gpus) if g.handle is not None]

    def close(self) -> None:
        """See Devices."""
        try:
            self.nvml.nvmlShutdown()
        except self.nvml.NVMLError:
            return
