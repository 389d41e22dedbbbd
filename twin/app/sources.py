"""Sources of a replay: files of any known form, as one stream of arrivals in order of time.

Knows which form a file has, decodes, and counts every message or row as decoded, ignored (with its kind and
why) or bad. Part of the shell; the codecs are in `connectors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from connectors.capture import START_NS, BadRow, open_bytes, read_capture
from connectors.dsx_bms import BmsDecoder
from connectors.ipmi import Dump, Tally, read_sensor_table
from connectors.it_frame import ItDecoder
from connectors.tabular import read_mapping, read_series
from twin.errors import BadMessage, ConfigError, StorageError
from twin.events import Event
from twin.reading import Block, Ignored, Message, Reading
from twin.site import Site

Form = Literal["native", "capture", "ipmi", "table"]
MAX_KINDS = 200
SAMPLES = 10


class Arrival(NamedTuple):
    """What arrived at `t_ns` (our clock), after decoding."""

    t_ns: int
    items: list[Any]  # Reading, Block or Event


@dataclass
class Messages:
    """What became of each message or row."""

    total: int = 0
    decoded: int = 0
    bad: int = 0
    ignored: dict[str, dict[str, Any]] = field(default_factory=dict)
    bad_samples: list[str] = field(default_factory=list)

    def ignore(self, what: str, why: str, number: int = 1) -> None:
        """Count an ignored message under its kind; kinds beyond a limit are counted together."""
        key = what if what in self.ignored or len(self.ignored) < MAX_KINDS else "other"
        entry = self.ignored.setdefault(key, {"count": 0, "why": why})
        entry["count"] += number

    def spoil(self, why: str) -> None:
        """Count a bad message and keep the first few reasons."""
        self.bad += 1
        if len(self.bad_samples) < SAMPLES:
            self.bad_samples.append(why[:300])

    def add(self, tally: Tally) -> None:
        """Take over what a table's or a dump's reader counted."""
        self.total += tally.total
        self.decoded += tally.decoded
        self.bad += tally.bad
        for (outcome, what, why), (number, sample) in tally.reasons.items():
            if outcome == "ignored":
                self.ignore(what, why, number)
            elif outcome == "bad" and len(self.bad_samples) < SAMPLES:
                self.bad_samples.append(f"{what}: {why}, e.g. {sample!r} ({number} times)"[:300])

    def summary(self) -> dict[str, Any]:
        """For JSON: the three sums add up to the total."""
        ignored = sum(e["count"] for e in self.ignored.values())
        return {"total": self.total, "decoded": self.decoded, "ignored": ignored, "bad": self.bad,
                "ignored_kinds": dict(sorted(self.ignored.items())), "bad_samples": self.bad_samples}  # fmt: skip


def form_of(path: Path, mapping: Path | None) -> Form:
    """What kind of recording a path is. Raises StorageError for what is none."""
    if path.is_dir():
        if sorted(path.glob("trace-*.rt")):
            return "native"
        raise StorageError(f"{path}: a folder without trace-*.rt; expected a recorded run or a file")
    if not path.exists():
        raise StorageError(f"{path}: no such file")
    if path.suffix == ".rt":
        return "native"
    if path.name.endswith((".tar.gz", ".tgz", ".tar", ".tar.xz")):
        return "ipmi"
    if ".jsonl" in path.suffixes[-2:]:
        return "capture"
    if mapping is not None:
        return "table"
    try:
        with open_bytes(path) as file:
            head = file.readline(4096)
    except (OSError, EOFError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error
    if head.lstrip(b"\xef\xbb\xbf").strip() == b"offset,topic,payload":
        return "capture"
    raise ConfigError(f"{path}: a table needs --map FILE (columns to signals), a capture begins with "
                      "`offset,topic,payload` or ends in .jsonl")  # fmt: skip


class MessageSource:
    """MQTT messages of a capture, decoded by topic."""

    def __init__(self, paths: list[Path], site: Site, start_ns: int = START_NS) -> None:
        self.paths, self.start_ns = paths, start_ns
        self.messages = Messages()
        halls = site.names["hall"]
        default = halls[0].rpartition("/")[2] if len(halls) == 1 else None
        self.bms = BmsDecoder(site, default_hall=default)
        self.it = ItDecoder(site)

    def __iter__(self) -> Iterator[Arrival]:
        for path in self.paths:
            for row in read_capture(path, self.start_ns):
                self.messages.total += 1
                if isinstance(row, BadRow):
                    self.messages.spoil(f"{path.name} line {row.line}: {row.reason}")
                    continue
                items = self._decode(row)
                if items is not None:
                    yield Arrival(row.t_ns, items)

    def _decode(self, message: Message) -> list[Any] | None:
        try:
            got: list[Reading] | list[Any] | Ignored
            if message.topic.startswith("IT/v1/"):
                got = self.it.decode(message)
            elif message.topic.startswith("BMS/v1/"):
                got = self.bms.decode(message)
            else:
                got = Ignored("topic", "neither BMS/v1/ nor IT/v1/")
        except BadMessage as error:
            self.messages.spoil(f"{message.topic[:120]}: {error}")
            return None
        if isinstance(got, Ignored):
            self.messages.ignore(got.what, got.why)
            return None
        self.messages.decoded += 1
        return list(got)


class SampleSource:
    """Rows of a table or sensor lines of a dump, already in order."""

    def __init__(self, samples: Any, tally: Tally) -> None:
        self.samples, self.messages = samples, Messages()
        self.messages.add(tally)

    def __iter__(self) -> Iterator[Arrival]:
        for t_ns, readings in self.samples:
            yield Arrival(t_ns, readings)


def open_source(
    paths: list[Path], site: Site, mapping: Path | None, sensors: Path | None = None
) -> MessageSource | SampleSource:
    """The arrivals of these files, which must all have one form (native traces are read by `replay` itself)."""
    forms = {form_of(p, mapping) for p in paths}
    if len(forms) != 1:
        raise ConfigError(f"{', '.join(map(str, paths))}: forms differ ({', '.join(sorted(forms))}); expected one per replay")
    form = forms.pop()
    if form == "capture":
        return MessageSource(paths, site)
    if form == "table":
        assert mapping is not None
        series = read_series(paths, read_mapping(mapping), site)
        return SampleSource(series, series.counts)
    if len(paths) != 1:
        raise ConfigError("expected one archive of IPMI dumps")
    dump = Dump(paths[0], read_sensor_table(sensors or default_sensors()), site)
    return SampleSource(dump, dump.tally)


def default_sensors() -> Path:
    """The mapping of sensor names that comes with racktwin."""
    return Path(__file__).parents[2] / "deploy" / "mappings" / "ipmi-sdr.yaml"


def stage(item: Reading | Block | Event, inbox: Any, now_ns: int) -> None:
    """Put one decoded item into the Inbox."""
    if isinstance(item, Reading):
        inbox.put(item, now_ns)
    elif isinstance(item, Block):
        inbox.put_block(item, now_ns)
    else:
        inbox.put_event(item)
