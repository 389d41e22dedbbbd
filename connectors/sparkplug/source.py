"""Sparkplug B: births, data and deaths of edge nodes and devices as readings, by a mapping.

A metric's series has its name, and the labels `group`, `node` and `device`. Aliases and datatypes hold from a
birth on; after a gap in the sequence they are not believed until the next birth, as one may have been missed:
the topics that should be asked for it are in `wants_rebirth` (asking is a command, and left to the caller). A
death turns what the node or device fed into "no reading". Only metrics that the mapping reads are remembered,
and no more than a limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.series import SeriesFaults, SeriesSample, SeriesTable, Sums, packed
from connectors.series_map import SeriesMap
from connectors.sparkplug.payload import Metric, Payload, read_payload
from twin.catalogue import BadMessage
from twin.telemetry import Block, Ignored, Message, Names, Reading

PREFIX = "spBv1.0/"
MAX_EDGES = 10_000
MAX_ALIASES = 2_000_000  # of all births together
MAX_TOPIC = 1024
_KINDS = frozenset(("NBIRTH", "NDATA", "NDEATH", "DBIRTH", "DDATA", "DDEATH"))


@dataclass
class _Metrics:
    """Content of a birth: metric by alias, datatype by name, and the cells of its values.

    `lost`: it is not believed any more, as a later one may have been missed.
    """

    by_alias: dict[int, str] = field(default_factory=dict)
    datatype: dict[str, int] = field(default_factory=dict)
    fed: set[tuple[str, int, str]] = field(default_factory=set)
    lost: bool = False


@dataclass
class _Edge:
    """An edge node: `seq` of its last message, -1 if not trusted; "" is the node itself."""

    seq: int = -1
    bd_seq: int | None = None
    silent_ns: int = 0  # when a birth or death last turned readings into none
    parts: dict[str, _Metrics] = field(default_factory=dict)

    def fed(self, device: str) -> set[tuple[str, int, str]]:
        """Return the cells fed by a device since its birth."""
        part = self.parts.get(device)
        return part.fed if part is not None else set()


class SparkplugDecoder:
    """Decodes the messages of one broker for one site. `counts` has births, deaths, gaps and losses."""

    def __init__(
        self, site: Names, mapping: SeriesMap, file: str = "mapping", sums: Sums | None = None
    ) -> None:
        self._mapping, self._file = mapping, file
        self._table = SeriesTable(mapping, site, file, sums=sums)
        self._edges: dict[tuple[str, str], _Edge] = {}
        self._held = 0  # metrics announced, of all edges
        self.wants_rebirth: dict[str, None] = {}  # topics of node commands, in order; the caller may clear it
        self.counts = dict.fromkeys(("births", "deaths", "gaps", "old_deaths", "unborn"), 0)

    @property
    def faults(self) -> SeriesFaults:
        """Return the faults of single metrics in messages that were otherwise decoded."""
        return self._table.faults

    @property
    def strangers(self) -> SeriesFaults:
        """Return names outside the site in messages that were partly read."""
        return self._table.strangers

    def decode(self, message: Message) -> list[Reading | Block] | Ignored:
        """Decode a message. Raises BadMessage."""
        parts = message.topic.split("/") if len(message.topic) <= MAX_TOPIC else []
        if not message.topic.startswith(PREFIX):
            return Ignored(message.topic[:40], "not a topic of Sparkplug B")
        if len(parts) not in (4, 5) or not all(parts):
            raise BadMessage(f"topic {message.topic[:80]!r}; expected spBv1.0/GROUP/KIND/NODE[/DEVICE]")
        group, kind, node, device = parts[1], parts[2], parts[3], "".join(parts[4:])
        if kind not in _KINDS:
            return Ignored(kind[:40], "not a birth, data or death")
        if (len(parts) == 5) != kind.startswith("D"):
            raise BadMessage(
                f"{kind} on {message.topic[:80]!r}: expected a device only with the kinds DBIRTH, "
                "DDATA and DDEATH"
            )
        payload = read_payload(message.payload)
        edge = self._edges.get((group, node))
        if edge is None:
            if len(self._edges) >= MAX_EDGES:
                self.faults.add(f"more than {MAX_EDGES} edge nodes")
                return Ignored(kind, f"more than {MAX_EDGES} edge nodes")
            edge = self._edges[group, node] = _Edge()
        ask = f"{PREFIX}{group}/NCMD/{node}"
        if kind == "NDEATH":
            return self._node_died(edge, payload, message.t_ns)
        if kind == "NBIRTH":
            return self._node_born(edge, payload, (group, node), message.t_ns)
        self._follow(edge, payload, ask)
        if kind == "DDEATH":
            self.counts["deaths"] += 1
            gone = self._drop(edge, device)
            return self._silence(edge, gone, message.t_ns)
        labels = {"group": group, "node": node, "device": device}
        if kind == "DBIRTH":
            gone = self._announce(edge, device, payload)
            out = self._read(edge, device, payload, labels, message.t_ns, edge.silent_ns)
            return [*self._silence(edge, gone - edge.fed(device), message.t_ns), *out]
        part = edge.parts.get(device)
        if (part is None or part.lost) and not any(m.name and m.datatype for m in payload.metrics):
            self.counts["unborn"] += 1
            self._ask(ask)
            return Ignored(kind, "no birth certificate received yet")
        return self._read(edge, device, payload, labels, message.t_ns)

    def _node_born(
        self, edge: _Edge, payload: Payload, name: tuple[str, str], t_ns: int
    ) -> list[Reading | Block]:
        gone: set[tuple[str, int, str]] = set()
        for device in list(edge.parts):
            gone |= self._drop(edge, device)
        edge.seq = payload.seq if payload.seq is not None and payload.seq < 256 else 0
        edge.bd_seq = _bd_seq(payload)
        self._announce(edge, "", payload)
        self.wants_rebirth.pop(f"{PREFIX}{name[0]}/NCMD/{name[1]}", None)
        labels = {"group": name[0], "node": name[1], "device": ""}
        out = self._read(edge, "", payload, labels, t_ns, edge.silent_ns)
        return [*self._silence(edge, gone - edge.fed(""), t_ns), *out]

    def _node_died(self, edge: _Edge, payload: Payload, t_ns: int) -> list[Reading | Block] | Ignored:
        number = _bd_seq(payload)
        if edge.bd_seq is not None and number is not None and number != edge.bd_seq:
            self.counts["old_deaths"] += 1
            return Ignored("NDEATH", "of an earlier session: its bdSeq differs from that of the birth")
        self.counts["deaths"] += 1
        gone: set[tuple[str, int, str]] = set()
        for device in list(edge.parts):
            gone |= self._drop(edge, device)
        edge.seq, edge.bd_seq = -1, None
        return self._silence(edge, gone, t_ns)

    def _follow(self, edge: _Edge, payload: Payload, ask: str) -> None:
        """Check that no message of the node was missed."""
        if edge.seq < 0:
            return
        expected = (edge.seq + 1) % 256
        edge.seq = payload.seq if payload.seq is not None and payload.seq < 256 else expected
        if edge.seq != expected:
            self.counts["gaps"] += 1
            for part in edge.parts.values():
                self._held -= len(part.datatype)
                part.by_alias, part.datatype, part.lost = {}, {}, True
            self._ask(ask)

    def _ask(self, topic: str) -> None:
        if len(self.wants_rebirth) < MAX_EDGES:
            self.wants_rebirth[topic] = None

    def _announce(self, edge: _Edge, device: str, payload: Payload) -> set[tuple[str, int, str]]:
        """Apply a birth; returns the cells that were fed before it."""
        gone = self._drop(edge, device)
        self.counts["births"] += 1
        part = edge.parts[device] = _Metrics()
        for metric in payload.metrics:
            if metric.name not in self._table.wanted or metric.name in part.datatype:
                continue
            if self._held >= MAX_ALIASES:
                self.faults.add(f"more than {MAX_ALIASES} metrics announced; the rest is left out")
                break
            self._held += 1
            part.datatype[metric.name] = metric.datatype
            if metric.alias is not None:
                part.by_alias[metric.alias] = metric.name
        if not part.datatype and device:
            del edge.parts[device]  # nothing of it concerns us
        return gone

    def _drop(self, edge: _Edge, device: str) -> set[tuple[str, int, str]]:
        part = edge.parts.pop(device, None)
        if part is None:
            return set()
        self._held -= len(part.datatype)
        return part.fed

    def _read(
        self,
        edge: _Edge,
        device: str,
        payload: Payload,
        labels: dict[str, str],
        t_ns: int,
        since_ns: int = 0,
    ) -> list[Reading | Block]:
        """Return the readings of a payload. A birth says what holds at it, however long ago a value changed:
        it counts from `since_ns` at least, or it would be older than the silence before it."""
        part = edge.parts.get(device) or _Metrics()
        samples: list[SeriesSample] = []
        for metric in payload.metrics:
            name = metric.name or (part.by_alias.get(metric.alias, "") if metric.alias is not None else "")
            datatype = metric.datatype or part.datatype.get(name, 0)
            if name and datatype:
                at_ns = _instant(metric, payload)
                at_ns = None if at_ns is None else max(at_ns, since_ns)
                samples.append(SeriesSample(name, labels, metric.value(datatype), at_ns))
        readings = self._table.read(samples, t_ns)
        if readings:
            part.fed.update((r.table, r.entity, r.signal) for r in readings)
            edge.parts[device] = part
        return packed(readings)

    @staticmethod
    def _silence(edge: _Edge, cells: set[tuple[str, int, str]], t_ns: int) -> list[Reading | Block]:
        if cells:
            edge.silent_ns = t_ns
        return packed([Reading(table, entity, signal, None, t_ns) for table, entity, signal in sorted(cells)])


def _bd_seq(payload: Payload) -> int | None:
    """Return the session number of a birth or death of a node."""
    for metric in payload.metrics:
        if metric.name == "bdSeq" and isinstance(metric.raw, int):
            return metric.raw
    return None


def _instant(metric: Metric, payload: Payload) -> int | None:
    """Return the instant of a metric; None, which means its arrival, if the stamp is missing or invalid."""
    t_ms = metric.t_ms if metric.t_ms is not None else payload.t_ms
    return t_ms * 10**6 if t_ms is not None and 0 < t_ms < 2**42 else None
