"""GPUs through NVML, against a stand-in for pynvml: there is no GPU here, so this shows what is asked of
NVML and what becomes of its answers and errors, not that a driver answers so."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from racktwin_agent.clock import NS, Instant
from racktwin_agent.devices import GPU_CAP, GPU_LOCK, NODE_CAP, DeviceError, Key, settings, short_bus_id
from racktwin_agent.kernel_log import Fault
from racktwin_agent.leases import LeaseBook
from racktwin_agent.nvml import QUERIES, NvmlDevices
from racktwin_agent.publish import sample_of
from racktwin_agent.settings import Settings
from racktwin_agent.wire import Order, Request
from racktwin_agent.xid_events import XidEvents

from connectors.agents import ItDecoder
from tests.support.builders import site_of
from twin.catalogue import TABLES
from twin.telemetry import Block, Message

NVML_FUNCTIONS = {
    "nvmlDeviceGetPowerUsage": 612_345,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetMarginTemperature": 26,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=40 * 2**30, total=80 * 2**30),
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetRemappedRows": (1, 2, 1, 0),
    "nvmlDeviceGetTotalEnergyConsumption": 2**45 + 1,
    "nvmlDeviceGetViolationStatus": SimpleNamespace(referenceTime=1, violationTime=123_456_789),
    "nvmlDeviceGetPcieReplayCounter": 4,
    "nvmlDeviceGetTotalEccErrors": 3,
    "nvmlDeviceGetPowerManagementLimitConstraints": (200_000, 700_000),
}


class FakeNvml:
    """Answers as pynvml would for GPUs at these addresses; `errors` are raised by function, or by
    (function, GPU)."""

    def __init__(self, *bus_ids: str) -> None:
        self.bus_ids = list(bus_ids)
        self.errors: dict[Any, int] = {}
        self.limit = dict.fromkeys(bus_ids, 700_000)
        self.clock_mhz = dict.fromkeys(bus_ids, 1980)
        self.asked: list[tuple[str, Any]] = []
        self.kib = 0
        self.events: list[Any] = []
        self.fields = {pynvml.NVML_FI_DEV_MEMORY_TEMP: 71, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: 1}

    def __getattr__(self, name: str) -> Any:
        if name in NVML_FUNCTIONS:
            return lambda device, *_: self._answer(name, device, NVML_FUNCTIONS[name])
        return getattr(pynvml, name)  # constants and NVMLError are the real ones

    def _answer(self, name: str, device: Any, answer: Any) -> Any:
        self.asked.append((name, device))
        error = self.errors.get((name, device), self.errors.get(name, self.errors.get(device)))
        if error is not None:
            raise pynvml.NVMLError(error)
        return answer

    def nvmlInit(self) -> None:
        self._answer("nvmlInit", None, None)

    def nvmlShutdown(self) -> None:
        self.asked.append(("nvmlShutdown", None))

    def nvmlDeviceGetCount(self) -> int:
        return len(self.bus_ids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        answer: str = self._answer("nvmlDeviceGetHandleByIndex", self.bus_ids[index], self.bus_ids[index])
        return answer

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: bytes) -> str:
        wanted = short_bus_id(bus_id.decode())
        found = [b for b in self.bus_ids if short_bus_id(b) == wanted]
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        answer: str = self._answer("nvmlDeviceGetHandleByPciBusId", found[0], found[0])
        return answer

    def nvmlDeviceGetPciInfo(self, device: str) -> Any:
        return SimpleNamespace(busId=self._answer("nvmlDeviceGetPciInfo", device, device))

    def nvmlDeviceGetClockInfo(self, device: str, kind: int) -> int:
        clock = self.clock_mhz[device] if kind == pynvml.NVML_CLOCK_SM else 2619
        answer: int = self._answer("nvmlDeviceGetClockInfo", device, clock)
        return answer

    def nvmlDeviceGetFieldValues(self, device: str, wanted: list[Any]) -> list[Any]:
        self._answer("nvmlDeviceGetFieldValues", device, None)
        number = wanted[0][0] if isinstance(wanted[0], tuple) else wanted[0]
        if number in (
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        ):
            value, code, kind = self.kib, pynvml.NVML_SUCCESS, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        else:
            value, kind = self.fields.get(number, 0), pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
            code = pynvml.NVML_SUCCESS if number in self.fields else pynvml.NVML_ERROR_NOT_SUPPORTED
        values = SimpleNamespace(dVal=0.5, uiVal=value, ulVal=value, ullVal=value, sllVal=value)
        return [SimpleNamespace(nvmlReturn=code, valueType=kind, value=values)]

    def nvmlDeviceGetPowerManagementLimit(self, device: str) -> int:
        limit: int = self._answer("nvmlDeviceGetPowerManagementLimit", device, self.limit[device])
        return limit

    def nvmlDeviceSetPowerManagementLimit(self, device: str, limit_mw: int) -> None:
        self._answer("nvmlDeviceSetPowerManagementLimit", device, None)
        self.limit[device] = limit_mw

    def nvmlDeviceGetMinMaxClockOfPState(self, device: str, kind: int, state: int) -> tuple[int, int]:
        answer: tuple[int, int] = self._answer("nvmlDeviceGetMinMaxClockOfPState", device, (345, 1980))
        return answer

    def nvmlDeviceSetGpuLockedClocks(self, device: str, low_mhz: int, high_mhz: int) -> None:
        assert low_mhz <= high_mhz
        self._answer("nvmlDeviceSetGpuLockedClocks", device, None)
        self.clock_mhz[device] = high_mhz

    def nvmlDeviceResetGpuLockedClocks(self, device: str) -> None:
        self._answer("nvmlDeviceResetGpuLockedClocks", device, None)
        self.clock_mhz[device] = 1980

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, device: str, kinds: int, events: str) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self._answer("nvmlDeviceRegisterEvents", device, None)

    def nvmlEventSetWait_v2(self, events: str, wait_ms: int) -> Any:
        if not self.events:
            threading.Event().wait(0.01)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return self.events.pop()

    def nvmlEventSetFree(self, events: str) -> None:
        self.asked.append(("nvmlEventSetFree", None))


A, B = "00000000:41:00.0", "00000000:C1:00.0"


def test_values_come_in_the_units_of_the_catalogue() -> None:
    devices = NvmlDevices(nvml=FakeNvml(A, B))
    sample = devices.sample(5)
    assert {name: column[1] for name, column in sample.gpu.items()} == {
        "power_w": 612.345,
        "temp_c": 61.0,
        "hbm_temp_c": 71,
        "thermal_margin_k": 26.0,
        "util_pu": 0.97,
        "mem_used_pu": 0.5,
        "sm_clock_hz": 1.98e9,
        "mem_clock_hz": 2.619e9,
        "power_limit_w": 700.0,
        "clock_lock_readback_mhz": 1980.0,
        "clock_event_bits": 4,
        "row_remap_pending_state": 1,
        "recovery_action_state": 1,
        "energy_mj": 2**45 + 1,
        "throttle_power_ns": 123_456_789,
        "throttle_thermal_ns": 123_456_789,
        "pcie_replay_count": 4,
        "ecc_sbe_count": 3,
        "ecc_dbe_count": 3,
        "row_remap_count": 3,
    }
    names = {name for name, _ in QUERIES}
    assert names <= set(TABLES["gpu"].by_name)


def test_racktwin_reads_the_frame_of_a_node_with_a_lost_gpu() -> None:
    nvml = FakeNvml(A, B)
    devices = NvmlDevices(nvml=nvml)
    nvml.errors[B] = pynvml.NVML_ERROR_GPU_IS_LOST
    site = site_of({"site": "lab", "halls": [{"name": "h", "racks": [
        {"name": "r1", "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 2}]}]})  # fmt: skip
    out = sample_of("lab/h/r1/node0", devices.sample(10**18))
    got = ItDecoder(site).decode(Message(10**18, out.topic, out.payload))
    assert isinstance(got, list)
    (block,) = got
    assert isinstance(block, Block)
    power = block.values[block.signals.index("power_w")]
    assert power[0] == pytest.approx(612.345)
    assert power[1] != power[1]
    assert block.counts[block.counters.index("energy_mj")].tolist() == [2**45 + 1, -1]


def test_a_gpu_that_fell_off_the_bus_loses_its_values_and_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("racktwin_agent.nvml.time", SimpleNamespace(
        monotonic=lambda: clock[0], monotonic_ns=lambda: int(clock[0] * 1e9)))  # fmt: skip
    nvml = FakeNvml(A, B)
    devices = NvmlDevices(nvml=nvml)
    nvml.errors[A] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert devices.sample(1).gpu["power_w"] == [None, 612.345]
    nvml.asked.clear()
    assert devices.sample(2).gpu["power_w"] == [None, 612.345]
    assert A not in {device for _, device in nvml.asked}  # a driver that hangs is not asked again and again
    assert devices.get(Key(GPU_CAP, "gpu0")) is None
    with pytest.raises(DeviceError, match="does not answer"):
        devices.set(Key(GPU_CAP, "gpu0"), 500)
    del nvml.errors[A]
    clock[0] = 11.0
    assert devices.sample(3).gpu["power_w"] == [612.345, 612.345]


def test_a_handle_from_before_a_reset_costs_a_gpu_no_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("racktwin_agent.nvml.time", SimpleNamespace(
        monotonic=lambda: clock[0], monotonic_ns=lambda: int(clock[0] * 1e9)))  # fmt: skip
    nvml = FakeNvml(A, B)
    devices = NvmlDevices(nvml=nvml)
    nvml.errors[A] = pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert devices.sample(1).gpu["power_w"] == [None, 612.345]
    del nvml.errors[A]
    clock[0] = 11.0
    found = devices.sample(2).gpu
    assert (found["power_w"], found["temp_c"]) == ([612.345, 612.345], [61.0, 61.0])


def test_features_that_are_missing_are_not_asked_for_again() -> None:
    nvml = FakeNvml(A)
    nvml.errors["nvmlDeviceGetTotalEccErrors"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    nvml.errors["nvmlDeviceGetUtilizationRates"] = pynvml.NVML_ERROR_UNKNOWN  # may pass
    devices = NvmlDevices(nvml=nvml)
    sample = devices.sample(1)
    assert not {"ecc_sbe_count", "ecc_dbe_count", "util_pu"} & set(sample.gpu)
    nvml.asked.clear()
    del nvml.errors["nvmlDeviceGetUtilizationRates"]
    assert devices.sample(2).gpu["util_pu"] == [0.97]
    assert "nvmlDeviceGetTotalEccErrors" not in {name for name, _ in nvml.asked}


def test_an_older_library_lacks_functions_and_fields() -> None:
    nvml = FakeNvml(A)
    older = SimpleNamespace(**{n: getattr(nvml, n) for n in (
        "nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "NVMLError",
        "nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksThrottleReasons", "NVML_ERROR_GPU_IS_LOST",
        "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_FUNCTION_NOT_FOUND",
        "NVML_ERROR_INVALID_ARGUMENT", "NVML_ERROR_NO_PERMISSION")})  # fmt: skip
    older.nvmlDeviceGetCurrentClocksThrottleReasons = lambda device: 0x80
    sample = NvmlDevices(nvml=older).sample(1)
    assert sample.gpu == {"power_w": [612.345], "clock_event_bits": [0x80]}
    assert sample.clock_bits() == 0x80


def test_nvlink_counts_become_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("racktwin_agent.nvml.time", SimpleNamespace(
        monotonic=lambda: clock[0], monotonic_ns=lambda: int(clock[0] * 1e9)))  # fmt: skip
    nvml = FakeNvml(A)
    devices = NvmlDevices(nvml=nvml)
    assert "nvlink_tx_bytes_per_s" not in devices.sample(1).gpu
    clock[0], nvml.kib = 2.0, 4096
    assert devices.sample(2).gpu["nvlink_tx_bytes_per_s"] == [pytest.approx(2 * 2**20)]
    clock[0], nvml.kib = 3.0, 10  # the driver was loaded anew
    assert "nvlink_tx_bytes_per_s" not in devices.sample(3).gpu


def test_power_limits_are_read_and_set_in_watts() -> None:
    nvml = FakeNvml(A, B)
    devices = NvmlDevices(nvml=nvml)
    assert settings(devices) == [Key(c, g) for c in (GPU_CAP, GPU_LOCK) for g in ("gpu0", "gpu1")]
    assert devices.limits(Key(GPU_CAP, "gpu1")) == (200, 700)
    devices.set(Key(GPU_CAP, "gpu1"), 512.5)
    assert (nvml.limit[B], devices.get(Key(GPU_CAP, "gpu1"))) == (512_500, 512.5)
    for name in ("gpu2", "gpu-1", "gpu", "", "gpu01x", "gpu\u0661"):
        assert devices.limits(Key(GPU_CAP, name)) is None
    assert devices.limits(Key(NODE_CAP, "")) is None
    nvml.errors["nvmlDeviceSetPowerManagementLimit"] = pynvml.NVML_ERROR_NO_PERMISSION
    with pytest.raises(DeviceError, match="gpu0: a limit of 300 W was refused"):
        devices.set(Key(GPU_CAP, "gpu0"), 300)


def test_clocks_are_locked_and_the_clock_shows_when_the_lock_is_gone() -> None:
    nvml = FakeNvml(A, B)
    devices, lock = NvmlDevices(nvml=nvml), Key(GPU_LOCK, "gpu1")
    low_mhz, high_mhz = devices.limits(lock) or (0.0, 0.0)
    assert (low_mhz, high_mhz > 5000) == (345, True)
    assert devices.get(lock) == 1980.0
    devices.set(lock, 345.0)
    assert (nvml.clock_mhz, devices.get(lock)) == ({A: 1980, B: 345}, 345.0)
    nvml.clock_mhz[B] = 210  # idle
    assert devices.sample(1).gpu["clock_lock_readback_mhz"] == [1980.0, 345.0]
    nvml.clock_mhz[B] = 1650  # the driver was loaded anew: NVML itself tells of no lock
    assert devices.sample(2).gpu["clock_lock_readback_mhz"] == [1980.0, 1650.0]
    devices.set(lock, 345.0)
    devices.set(lock, 2100.0)
    assert ("nvmlDeviceResetGpuLockedClocks", B) in nvml.asked
    assert (nvml.clock_mhz[B], devices.get(lock)) == (1980, 1980.0)
    nvml.errors["nvmlDeviceSetGpuLockedClocks"] = pynvml.NVML_ERROR_NO_PERMISSION
    with pytest.raises(DeviceError, match="gpu1: a lock of 400 MHz was refused"):
        devices.set(lock, 400)
    nvml.errors["nvmlDeviceGetMinMaxClockOfPState"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    older = NvmlDevices(nvml=nvml)
    assert older.limits(lock) is None
    assert "clock_lock_readback_mhz" not in older.sample(1).gpu


def test_places_follow_pci_addresses_also_of_a_gpu_that_is_missing() -> None:
    devices = NvmlDevices(["0000:C1:00", "0000:81:00.0", "41:00"], nvml=FakeNvml(A, B))
    assert (devices.gpus, devices.gpu_at("0000:41:00"), devices.gpu_at("00000000:C1:00.0")) == (3, 2, 0)
    assert devices.sample(1).gpu["power_w"] == [612.345, None, 612.345]
    assert devices.gpu_at("0000:99:00") is None


def test_a_node_without_nvml_or_without_gpus_says_what_is_expected() -> None:
    nvml = FakeNvml(A)
    nvml.errors["nvmlInit"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(DeviceError, match="expected NVIDIA's driver"):
        NvmlDevices(nvml=nvml)
    with pytest.raises(DeviceError, match="no GPU on this node"):
        NvmlDevices(nvml=FakeNvml())


def test_xids_of_the_event_set() -> None:
    nvml = FakeNvml(A, B)
    nvml.errors[("nvmlDeviceRegisterEvents", A)] = pynvml.NVML_ERROR_NOT_SUPPORTED
    nvml.events.append(SimpleNamespace(device=B, eventData=79, eventType=8))
    got: list[Fault] = []
    said: list[str] = []
    seen = threading.Event()

    def give(fault: Fault) -> None:
        got.append(fault)
        seen.set()

    events = XidEvents(NvmlDevices(nvml=nvml), "boot", give, said.append)
    events.start()
    assert seen.wait(10)
    events.stop()
    assert [(f.table, f.name, f.code) for f in got] == [("gpu", "gpu1", 79)]
    assert got[0].id.startswith("boot-nvml-gpu1-79-")
    assert got[0].at_ns > 0
    assert len(said) == 1
    assert ("nvmlEventSetFree", None) in nvml.asked


@pytest.mark.parametrize(
    "text,short",
    [("00000000:41:00.0", "0000:41:00"), ("0000:C1:00", "0000:c1:00"), ("41:00.0", "0000:41:00"), ("x", "x")],
)
def test_addresses_in_their_several_forms(text: str, short: str) -> None:
    assert short_bus_id(text) == short


def test_the_temperature_of_the_shutdown_is_a_threshold_or_a_margin() -> None:
    nvml = FakeNvml(A)
    nvml.nvmlDeviceGetTemperatureThreshold = lambda device, which: 92 - which  # type: ignore[attr-defined]
    assert NvmlDevices(nvml=nvml).sample(1).shutdown_c == [92.0]

    def lacks(device: str, which: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    nvml.nvmlDeviceGetTemperatureThreshold = lacks  # type: ignore[attr-defined]
    assert NvmlDevices(nvml=nvml).sample(1).shutdown_c == [None]
    for raw in (-8, 2**32 - 8):  # 61 C with a margin of 26 K to the limit, and 8 K below it
        nvml.fields[pynvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT] = raw
        devices = NvmlDevices(nvml=nvml)
        assert devices.sample(1).shutdown_c == [95.0]
    nvml.errors[A] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert devices.sample(2).shutdown_c == [95.0]
    assert "shutdown_c" not in devices.sample(2).gpu


def test_the_xids_of_a_gpu_that_no_longer_answers_are_told_too() -> None:
    nvml = FakeNvml(A, B)
    nvml.errors[("nvmlDeviceGetPciInfo", "gone")] = pynvml.NVML_ERROR_GPU_IS_LOST
    nvml.events += [SimpleNamespace(device=B, eventData=48), SimpleNamespace(device="gone", eventData=79)]
    got: list[Fault] = []
    seen = threading.Event()

    def give(fault: Fault) -> None:
        got.append(fault)
        if len(got) == 2:
            seen.set()

    events = XidEvents(NvmlDevices(nvml=nvml), "boot", give, lambda text: None)
    events.start()
    assert seen.wait(10)
    events.stop()
    assert [(f.table, f.name, f.code) for f in got] == [("node", "", 79), ("gpu", "gpu1", 48)]


def test_a_lock_whose_lease_ended_while_no_agent_ran_is_removed() -> None:
    nvml = FakeNvml(A)
    at = Instant(10**18, 10**12)
    book = LeaseBook(Settings(NvmlDevices(nvml=nvml)))
    span_ns = 30 * NS
    body = Request(GPU_LOCK, "p", 3, at.wall_ns, at.wall_ns + span_ns, False, False, "why", {})
    assert [a.state for a in book.take(body, [Order("gpu0", 0, 1, 345.0, 1980.0)], at)] == ["done"]
    assert nvml.clock_mhz[A] == 345
    later = Instant(at.wall_ns + 2 * span_ns, at.boot_ns + 2 * span_ns)
    again = LeaseBook(Settings(NvmlDevices(nvml=nvml)))  # knows of no lock, and NVML tells of none
    again.restore(book.dump(), later, same_boot=True)
    assert again.reassert(later) == []
    again.lapse(later)
    assert nvml.clock_mhz[A] == 1980


def test_a_gpu_that_another_thread_finds_lost_keeps_its_features() -> None:
    nvml = FakeNvml(A)
    devices = NvmlDevices(nvml=nvml)
    gpu = devices._gpus[0]

    nvml.errors[("nvmlDeviceGetTemperature", None)] = pynvml.NVML_ERROR_INVALID_ARGUMENT
    ask = devices._is_there

    def lost_after(gpu: Any) -> bool:
        there = ask(gpu)
        gpu.handle = None  # by a command, on the other thread
        return there

    devices._is_there = lost_after  # type: ignore[method-assign]
    assert devices.sample(1).gpu.get("temp_c") is None
    devices._is_there = ask  # type: ignore[method-assign]
    gpu.retry_s = 0.0
    assert devices.sample(2).gpu["temp_c"] == [61.0]
