"""Influx line protocol over MQTT, as Telegraf publishes it: one or more lines per message, by a mapping.

Pure functions of bytes. The lines are parsed by `line_protocol_parser`; what a line means is data, see
`connectors.series_map` and `exporters/telegraf.yaml`. A bad line does not cost the good ones of its message:
it is a fault that the caller takes from `faults`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from line_protocol_parser import LineFormatError, parse_line  # type: ignore[import-untyped]

from connectors.series import SeriesFaults, SeriesSample, SeriesTable, Sums, packed, remedy_of
from connectors.series_map import SeriesMap
from connectors.stamps import other_unit
from twin.catalogue import BadMessage
from twin.telemetry import Block, Ignored, Message, Names, Reading

MAX_PAYLOAD = 8 * 2**20
MAX_LINES, MAX_LINE = 20_000, 64 * 2**10
UNMAPPED = "add a rule to a mapping file (`broker.maps`), or remove it at the publisher"
STEP_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


class LineDecoder:
    """Decodes messages for one site. `precision` is the unit of the lines' timestamps."""

    def __init__(
        self,
        site: Names,
        mapping: SeriesMap,
        file: str = "mapping",
        precision: Literal["ns", "us", "ms", "s"] = "ns",
        sums: Sums | None = None,
    ) -> None:
        self._table, self._file = SeriesTable(mapping, site, file, sums=sums), file
        self._step_ns = STEP_NS[precision]

    @property
    def faults(self) -> SeriesFaults:
        """Return the bad lines and fields of messages that were otherwise decoded."""
        return self._table.faults

    @property
    def strangers(self) -> SeriesFaults:
        """Return names outside the site in messages that were partly decoded."""
        return self._table.strangers

    def decode(self, message: Message) -> list[Reading | Block] | Ignored:
        """Decode the lines. Raises BadMessage if no line can be read."""
        if len(message.payload) > MAX_PAYLOAD:
            raise BadMessage(f"{len(message.payload)} bytes; expected at most {MAX_PAYLOAD}")
        text = message.payload.decode("utf-8", "replace")
        if "\0" in text:
            raise BadMessage("a NUL byte; expected text")
        lines = text.split("\n", MAX_LINES)
        if len(lines) > MAX_LINES:
            self.faults.add(f"more than {MAX_LINES} lines in a message; the rest is dropped")
            lines.pop()
        samples: list[SeriesSample] = []
        good, bad = 0, list[str]()
        for line in lines:
            try:
                read = self._line(line)
            except (LineFormatError, ValueError) as error:
                bad.append(f"line {line[:40]!r}: {str(error)[:100]}")
                continue
            if read is not None:
                good += 1
                samples += self._samples(read)
        if bad and not good:
            raise BadMessage(f"{bad[0]}; {len(bad)} bad lines and no good one")
        for why in bad:
            self.faults.add(why)
        readings = self._table.read(samples, message.t_ns)
        if readings:
            return packed(readings)
        if strange := self._table.strangers.take():
            return Ignored("name", strange[0][0], remedy_of(strange[0][0]))
        names = {s.measurement or "" for s in samples}
        known = sorted(names & self._table.measurements)
        if known:
            fields = ", ".join(dict.fromkeys(s.name for s in samples))[:80]
            return Ignored("field", f"{self._file} reads no field of {known[0]!r} among {fields}")
        text = ", ".join(sorted(names))[:80]
        return Ignored("measurement", f"{self._file} has no rule for measurement {text!r}", UNMAPPED)

    def _line(self, line: str) -> dict[str, Any] | None:
        """Return one parsed line with a checked time, None for an empty one. Raises ValueError and its
        subclasses."""
        if not line or line.isspace():
            return None
        if len(line) > MAX_LINE:
            raise ValueError(f"{len(line)} characters; expected at most {MAX_LINE}")
        read: dict[str, Any] | None = parse_line(line)
        if read is not None and read["time"] is not None:
            read["time"] *= self._step_ns
            if not 0 < read["time"] < 2**62 or other_unit(read["time"]):
                raise ValueError(f"time {read['time']}{other_unit(read['time'])}; expected ns since 1970")
        return read

    def _samples(self, read: dict[str, Any]) -> Iterator[SeriesSample]:
        for name, value in read["fields"].items():
            yield SeriesSample(name, read["tags"], value, read["time"], read["measurement"])
