"""Messages of the IT side: batched frames of a node or a rack, and events. Pure functions of bytes.

`IT/v1/PUB/Frame/{site}/{hall}/{rack}[/{node}]` carries one instant of many GPUs as columns, in JSON or in
msgpack with raw little-endian arrays; `IT/v1/PUB/Event/{rack or node}` carries a fault or the serial of
what is below it, `IT/v1/PUB/Event/jobs/{source}` a job event, `IT/v1/PUB/Event/outlooks/{source}` values to
come, each with an id, in JSON or msgpack. Columns are keyed by signal name or by DCGM field number. A
payload may say whom it is `from`: then it must be its topic's path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from connectors.allowance import Allowance
from connectors.series import SeriesFaults
from connectors.stamps import other_unit
from twin.catalogue import TABLES, BadMessage
from twin.engine import MAX_VALUES, check_serial
from twin.telemetry import (
    ELSEWHERE,
    Block,
    FaultReported,
    IdentityTold,
    Ignored,
    JobEnded,
    JobStarted,
    Message,
    Names,
    NvlinksCounted,
    OutlookTold,
    nowhere,
)

FRAME, EVENT, JOBS, OUTLOOKS = "IT/v1/PUB/Frame/", "IT/v1/PUB/Event/", "jobs/", "outlooks/"
MAX_PAYLOAD = 16 * 2**20
MAX_COLUMNS = 200
MAX_PLACES = 1_000_000
MAX_UNPLACED = 4096  # paths that the site has not: strangers invent them
MAX_EVENT, MAX_TEXT, MAX_ID = 4 * 2**20, 4000, 200  # bytes of an event; characters of its texts; of its id
MAX_NODE_NAME = 512
MAX_LINKS = 4096  # rows of one node
MAX_COUNT = 1_000_000  # faults that one event may stand for
FAULT_BURST, FAULT_PER_S = 2**18, 2**12  # bytes of a node or rack: near a thousand, then a dozen a second
IDENTITY_BURST, IDENTITY_PER_S = 2**16, 2**8  # of a node or rack: two hundred, then one a second
NVLINK_BURST, NVLINK_PER_S = 2**18, 2**11  # of a node: 40 of all its 144 links, then one in ten seconds
JOB_BURST, JOB_PER_S = 2**24, 2**16  # of all sources of jobs together: strangers invent names
OUTLOOK_BURST, OUTLOOK_PER_S = 2**24, 2**14  # of all sources of outlooks: a plan for some thousand racks
# DCGM field number -> (signal, factor to the core unit); NVIDIA DCGM API reference, field identifiers
UNKNOWN_PATH = "add it to the site file, or give the agent the `path` that it has there"
DCGM: dict[str, tuple[str, float]] = {
    "100": ("sm_clock_hz", 1e6), "101": ("mem_clock_hz", 1e6), "112": ("clock_event_bits", 1.0),
    "140": ("hbm_temp_c", 1.0), "150": ("temp_c", 1.0), "153": ("thermal_margin_k", 1.0),
    "155": ("power_w", 1.0), "156": ("energy_mj", 1.0),
    "164": ("power_limit_w", 1.0), "160": ("power_limit_w", 1.0),  # as enforced; as set
    "202": ("pcie_replay_count", 1.0), "203": ("util_pu", 0.01), "230": ("xid_code", 1.0),
    "312": ("ecc_sbe_count", 1.0), "313": ("ecc_dbe_count", 1.0), "396": ("row_remap_pending_state", 1.0),
    "1523": ("recovery_action_state", 1.0), "1002": ("sm_active_pu", 1.0),
    "1004": ("tensor_active_pu", 1.0), "1005": ("dram_active_pu", 1.0),
    "1009": ("pcie_tx_bytes_per_s", 1.0), "1010": ("pcie_rx_bytes_per_s", 1.0),
    "1011": ("nvlink_tx_bytes_per_s", 1.0), "1012": ("nvlink_rx_bytes_per_s", 1.0),
}  # fmt: skip


# A limit as enforced says more than the limit as set.
_STRONGER = {"160": "164"}


_NUMBERS = frozenset((float, int))


class _Frame(msgspec.Struct):
    """`t_ns` is the instant of all columns; a column is a list, or raw bytes (float32; counters int64)."""

    t_ns: int
    gpu: dict[str, Any] = {}
    node: dict[str, Any] = {}
    sender: str | None = msgspec.field(name="from", default=None)


class _Sender(msgspec.Struct):
    sender: str | None = msgspec.field(name="from", default=None)


_JSON, _MSGPACK = msgspec.json.Decoder(_Frame), msgspec.msgpack.Decoder(_Frame)
_ItEvent = FaultReported | NvlinksCounted | IdentityTold | JobStarted | JobEnded | OutlookTold


class _Outlook(OutlookTold, frozen=True, kw_only=True, tag="OutlookTold"):
    """An outlook as sent; the topic names the author."""

    author: str = ""


_Sent = FaultReported | NvlinksCounted | IdentityTold | JobStarted | JobEnded | _Outlook
_EVENT, _SENDER = msgspec.json.Decoder(_Sent), msgspec.json.Decoder(_Sender)
_EVENT_PACKED, _SENDER_PACKED = msgspec.msgpack.Decoder(_Sent), msgspec.msgpack.Decoder(_Sender)


def gpus_in(payload: bytes) -> int:
    """Return the number of GPUs in a frame; 0 if unknown."""
    try:
        decoder = _MSGPACK if payload[:1] >= b"\x80" else _JSON
        columns = list(decoder.decode(payload).gpu.values())
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError):
        return 0
    sizes = [len(c) if isinstance(c, list) else len(c) // 4 for c in columns if isinstance(c, list | bytes)]
    return min(sizes, default=0)


class ItDecoder:
    """Decodes frames and events for one site. Keeps only a cache of known names."""

    def __init__(self, names: Names, elsewhere: Callable[[str], bool] = nowhere) -> None:
        self.names, self._elsewhere = names, elsewhere
        self.faults, self.strangers = SeriesFaults(), SeriesFaults()
        self._place: dict[str, tuple[str, int]] = {}
        self.unplaced: dict[str, int] = {}  # path that the site has not -> GPUs in a frame of it
        self._faults = Allowance("faults", FAULT_BURST, FAULT_PER_S)
        self._identities = Allowance("identities", IDENTITY_BURST, IDENTITY_PER_S)
        self._nvlinks = Allowance("counts of NVLinks", NVLINK_BURST, NVLINK_PER_S)
        self._jobs = Allowance("job events", JOB_BURST, JOB_PER_S)
        self._outlooks = Allowance("outlooks", OUTLOOK_BURST, OUTLOOK_PER_S)

    def decode(self, message: Message) -> list[Block | _ItEvent] | Ignored:
        """Return the blocks and events of one message. Raises BadMessage for any other message."""
        if len(message.payload) > MAX_PAYLOAD:
            raise BadMessage(f"{len(message.payload)} bytes; expected at most {MAX_PAYLOAD}")
        if message.topic.startswith(EVENT):
            path = message.topic[len(EVENT) :]
            if not path.startswith((JOBS, OUTLOOKS)) and self._elsewhere(path):
                return Ignored("Event", ELSEWHERE)
            return [self._event(message)]
        if not message.topic.startswith(FRAME):
            return Ignored(message.topic[:40], "not a topic of the IT side")
        place = self._find(message.topic[len(FRAME) :])
        if place is None:
            path = message.topic[len(FRAME) :]
            if self._elsewhere(path):
                return Ignored("Frame", ELSEWHERE)
            if path not in self.unplaced and len(path) <= 512 and len(self.unplaced) < MAX_UNPLACED:
                self.unplaced[path] = gpus_in(message.payload)
            name = path[:120]
            return Ignored("Frame", f"no rack or node {name!r} in the site file", UNKNOWN_PATH)
        try:
            decoder = _MSGPACK if message.payload[:1] and message.payload[0] >= 0x80 else _JSON
            frame = decoder.decode(message.payload)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
            raise BadMessage(f"not an IT frame: {str(error)[:200]}") from error
        if not 0 < frame.t_ns < 2**62 or other_unit(frame.t_ns):
            raise BadMessage(f"t_ns {frame.t_ns}{other_unit(frame.t_ns)}; expected UTC nanoseconds")
        check_sender(frame.sender, message.topic[len(FRAME) :])
        table, entity = place
        blocks: list[Any] = []
        for kind, columns in (("gpu", frame.gpu), ("node", frame.node)):
            if columns:
                blocks.append(self._block(kind, columns, table, entity, frame.t_ns))
        return blocks

    def _event(self, message: Message) -> _ItEvent:
        payload, path = message.payload, message.topic[len(EVENT) :]
        if len(payload) > MAX_EVENT:
            raise BadMessage(f"{len(payload)} bytes of event; expected at most {MAX_EVENT}")
        try:
            is_packed = payload[:1] >= b"\x80"
            event: _ItEvent = (_EVENT_PACKED if is_packed else _EVENT).decode(payload)
            check_sender((_SENDER_PACKED if is_packed else _SENDER).decode(payload).sender, path)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
            raise BadMessage(f"not an IT event: {str(error)[:200]}") from error
        if not event.id:
            raise BadMessage("an event needs an id, so that a repeated delivery counts once")
        _check_size(event)
        if isinstance(event, NvlinksCounted):
            speaker = self._check_speaker(event, path, "counts")
            if self.names.entity("node", event.name) is None:
                raise BadMessage(f"counts of {event.name[:200]!r}, which is not a node of this site")
            self._nvlinks.spend(speaker, len(payload), message.t_ns)
            return msgspec.structs.replace(event, id=f"{speaker}#{event.id}")
        if isinstance(event, FaultReported | IdentityTold):
            is_fault = isinstance(event, FaultReported)
            speaker = self._check_speaker(event, path, "a fault" if is_fault else "a serial")
            if isinstance(event, IdentityTold) and (why := check_serial(event.serial)):
                raise BadMessage(f"of {event.name[:200]}: {why}")
            (self._faults if is_fault else self._identities).spend(speaker, len(payload), message.t_ns)
            # An id is one among those of its speaker: nobody uses up the ids of another.
            return msgspec.structs.replace(event, id=f"{speaker}#{event.id}")
        if isinstance(event, OutlookTold):
            return self._outlook(event, path, message)
        if not path.startswith(JOBS):
            raise BadMessage(f"a job event on the topic of {path[:200]!r}; expected it on {EVENT}{JOBS}...")
        self._jobs.spend("all sources", len(payload), message.t_ns)
        return event

    def _outlook(self, event: OutlookTold, path: str, message: Message) -> OutlookTold:
        """Return the outlook with its source as author, and an id that is unique among those of its
        source."""
        if not path.startswith(OUTLOOKS):
            raise BadMessage(
                f"an outlook on the topic of {path[:200]!r}; expected it on {EVENT}{OUTLOOKS}..."
            )
        self._outlooks.spend("all sources", len(message.payload), message.t_ns)
        source = path[:MAX_ID]
        return OutlookTold(
            id=f"{source}#{event.id}",
            author=source,
            quantity=event.quantity,
            name=event.name,
            start_ns=event.start_ns,
            step_s=event.step_s,
            values=event.values,
        )

    def _check_speaker(
        self, event: FaultReported | NvlinksCounted | IdentityTold, path: str, what: str
    ) -> str:
        """Check that a node reports only itself and what is below it; returns its full name."""
        place = self._find(path)
        if place is None:
            raise BadMessage(
                f"{what} on the topic of {path[:200]!r}, which is not a rack or node of this site"
            )
        site: Any = self.names
        full: str = site.name(*place)
        if event.name != full and not event.name.startswith(f"{full}/"):
            raise BadMessage(
                f"{what} of {event.name[:200]!r} on the topic of {full}; expected an entity below it"
            )
        return full

    def _find(self, path: str) -> tuple[str, int] | None:
        place = self._place.get(path)
        if place is None and len(path) <= 512:
            for table in ("node", "rack"):
                entity = self.names.entity(table, path)
                if entity is not None:
                    place = table, entity
                    break
            # only what the site has is remembered: strangers' names have no end
            if place is not None and len(self._place) < MAX_PLACES:
                self._place[path] = place
        return place

    def _block(self, kind: str, columns: dict[str, Any], table: str, entity: int, t_ns: int) -> Block:
        start, n = self._run(kind, table, entity)
        if len(columns) > MAX_COLUMNS:
            raise BadMessage(f"{len(columns)} columns; expected at most {MAX_COLUMNS}")
        spec = TABLES[kind].by_name
        values: list[np.ndarray] = []
        counts: list[np.ndarray] = []
        signals: list[str] = []
        counters: list[str] = []
        for key, column in columns.items():
            if _STRONGER.get(key) in columns:
                continue
            name, factor = DCGM.get(key, (key, 1.0)) if kind == "gpu" else (key, 1.0)
            signal = spec.get(name)
            if signal is None:  # a newer agent may know more than we do
                self.strangers.add(f"no signal {kind}.{name[:60]} in the catalogue")
                continue
            array = _array(column, name, n, signal.kind == "counter")
            if signal.kind == "counter":
                if name not in counters:  # by its number and by its name: the first counts
                    counters.append(name)
                    counts.append(array)
            elif name not in signals:
                signals.append(name)
                if factor != 1.0:
                    with np.errstate(
                        over="ignore", invalid="ignore"
                    ):  # too large becomes infinite: out of range
                        array = array * np.float32(factor)
                values.append(array)
        if not signals and not counters:
            raise BadMessage(
                f"none of the columns is a signal of {kind} in the catalogue: "
                f"{', '.join(k[:40] for k in list(columns)[:5])}"
            )
        matrix = np.array(values, np.float32) if values else np.empty((0, n), np.float32)
        raw = np.array(counts, np.int64) if counts else np.empty((0, n), np.int64)
        return Block(kind, start, tuple(signals), matrix, tuple(counters), raw, t_ns)

    def _run(self, kind: str, table: str, entity: int) -> tuple[int, int]:
        """Return (first entity, number) of this kind under the node or rack."""
        site: Any = self.names
        if table == "node":
            if kind == "node":
                return entity, 1
            return int(site.gpu_start_of_node[entity]), int(
                np.diff(site.gpu_start_of_node[entity : entity + 2])[0]
            )
        first, last = int(site.node_start_of_rack[entity]), int(site.node_start_of_rack[entity + 1])
        if kind == "node":
            return first, last - first
        start = int(site.gpu_start_of_node[first])
        return start, int(site.gpu_start_of_node[last]) - start


def _check_size(event: _ItEvent) -> None:
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, str) and len(value) > (MAX_ID if name == "id" else MAX_TEXT):
            raise BadMessage(
                f"{name} of {len(value)} characters; expected at most {MAX_TEXT}, of an id {MAX_ID}"
            )
        if name in ("start_ns", "at_ns", "started_ns"):
            # The reporter of a fault or a job may not know its instant
            if not (1 if name == "start_ns" else 0) <= value < 2**62:
                raise BadMessage(f"{name} {str(value)[:40]}; expected UTC nanoseconds")
        elif name == "count" and not 1 <= value <= MAX_COUNT:
            raise BadMessage(f"count {str(value)[:40]}; expected 1 to {MAX_COUNT}")
        elif isinstance(value, int) and abs(value) >= 2**31:
            raise BadMessage(f"{name} {str(value)[:40]}; expected a number below 2^31")
        if name == "values":
            if not 0 < len(value) <= MAX_VALUES:
                raise BadMessage(f"{len(value)} values; expected 1 to {MAX_VALUES}")
            if not all(v is None or math.isfinite(v) for v in value):
                raise BadMessage("values: expected finite numbers or null")
        elif isinstance(value, tuple) and isinstance(event, NvlinksCounted):
            if len(value) > MAX_LINKS or any(isinstance(x, int) and not 0 <= x < 2**62 for x in value):
                raise BadMessage(f"{name}: expected at most {MAX_LINKS} numbers of 0 and more")
            if any(isinstance(x, str) and len(x) > MAX_ID for x in value):
                raise BadMessage(f"{name}: expected names of at most {MAX_ID} characters")
        elif isinstance(value, tuple) and any(len(text) > MAX_NODE_NAME for text in value):
            raise BadMessage(f"{name}: expected names of at most {MAX_NODE_NAME} characters")


def check_sender(sender: str | None, path: str) -> None:
    """Raise BadMessage if a payload names another sender than the path in its topic."""
    if sender is not None and sender != path:
        raise BadMessage(f"claims to be {sender[:200]!r} on the topic of {path[:200]!r}")


def _array(column: Any, name: str, n: int, is_counter: bool) -> np.ndarray:
    try:
        if isinstance(column, bytes):
            array = np.frombuffer(column, "<i8" if is_counter else "<f4")
        elif is_counter:
            if any(isinstance(v, bool) for v in column):
                raise BadMessage(f"{name}: expected whole numbers or null")
            array = np.array([-1 if v is None else v for v in column])
            if array.dtype.kind not in "iu" or (n and array.max(initial=0) >= 2**63):
                raise BadMessage(f"{name}: expected whole numbers below 2^63 or null")
            array = array.astype(np.int64)
        else:
            if not _NUMBERS.issuperset(map(type, column)):  # nearly always plain numbers
                if any(isinstance(v, str | bool | list | dict) for v in column):
                    raise BadMessage(f"{name}: expected numbers or null")
                column = [np.nan if v is None else v for v in column]
            with np.errstate(over="ignore"):
                array = np.array(column, np.float64).clip(-1e38, 1e38).astype(np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"{name}: {str(error)[:100]}") from error
    if array.shape != (n,):
        raise BadMessage(f"{name}: {array.shape} values; expected {n}")
    return array


def encode_frame(t_ns: int, gpu: dict[str, np.ndarray], node: dict[str, np.ndarray] | None = None) -> bytes:
    """Return a msgpack frame with raw columns, as agents send it."""

    def raw(columns: dict[str, np.ndarray]) -> dict[str, bytes]:
        return {k: v.astype("<i8" if v.dtype.kind == "i" else "<f4").tobytes() for k, v in columns.items()}

    return msgspec.msgpack.encode({"t_ns": t_ns, "gpu": raw(gpu), "node": raw(node or {})})


def encode_json(
    t_ns: int,
    gpu: dict[str, Iterable[float | int | None]],
    node: dict[str, Any] | None = None,
) -> bytes:
    """Return the frame as columnar JSON, the open format."""
    return msgspec.json.encode(
        {"t_ns": t_ns, "gpu": {k: list(v) for k, v in gpu.items()}, "node": node or {}}
    )
