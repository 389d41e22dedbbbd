"""Archive writer: sends values and journal of a daemon to ClickHouse, with bounded retries.

It takes samples as InfluxDB's writer does. A thread of its own sends them, the oldest first; the journal it
reads from the disk, so that the time for which the server may be away is bounded by the journal's quota, not
by memory. A daemon that stands by sends nothing: the leader does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from connectors.clickhouse import (
    JOURNAL_COLUMNS,
    VALUE_COLUMNS,
    ClickHouseError,
    ClickHouseLink,
    Labels,
    ValueBlocks,
    ValueBuffer,
)
from connectors.influx import LineColumns, SiteNames
from connectors.send_lane import CLOSE_S, SendLane, SendThread
from twin.archive.journal_rows import JournalRows
from twin.archive.journal_tail import JournalTail
from twin.catalogue import StorageError

# Codes of what a server refuses however often it is sent: the data cannot be read or is too large; anything
# else may be mended there. source: ClickHouse, src/Common/ErrorCodes.cpp
REFUSED = frozenset((6, 26, 27, 33, 38, 41, 72, 117, 131, 349))
TOO_LARGE = 413


class ArchiveWriter:
    """Samples in, from any thread; `stats` says what became of them and of the journal's lines."""

    def __init__(
        self,
        link: ClickHouseLink,
        labels: Labels,
        room_bytes: int,
        journal: tuple[JournalTail, JournalRows] | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._link, self._journal, self._leads = link, journal, leads
        self._buffer, self._blocks = ValueBuffer(room_bytes), ValueBlocks(labels)
        self.counts = dict.fromkeys(
            ("written_points", "refused_points", "written_lines", "refused_lines", "write_errors"), 0
        )
        self.refusal = ""
        lanes = [SendLane(send, self._failed) for send in (self._send_values, self._send_lines)]
        self._thread = SendThread("clickhouse", lanes, lambda: self._buffer.oldest is not None, self._ended)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def offer(self, t_ns: int, names: SiteNames, tables: Sequence[LineColumns]) -> None:
        """One instant of these tables; their arrays must not change any more. Never waits for the server."""
        if self._leads():
            self._buffer.put(t_ns, names, tables)
            with self._thread.changed:
                self._thread.changed.notify()

    def stats(self) -> dict[str, int | str]:
        """Points and lines written, waiting and lost; `error` is why nothing is written now, or empty."""
        return {
            **self.counts,
            "queue_points": self._buffer.queue_points,
            "dropped_points": self._buffer.dropped_points,
            "lost_lines": self._journal[0].lost_lines if self._journal is not None else 0,
            "error": self._thread.error,
            "refusal": self.refusal,
        }

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Send what waits if it can be done by then; True if all was sent. A hanging server is left alone."""
        self._thread.close(timeout_s)
        return self._buffer.queue_points == 0

    def _ended(self) -> None:
        if self._journal is not None:
            self._journal[0].close()
        self._link.close()

    def _failed(self, error: Exception) -> str:
        self.counts["write_errors"] += 1
        known = isinstance(error, ClickHouseError | StorageError)
        return str(error) if known else f"{type(error).__name__}: {error}"

    def _send_values(self) -> bool:
        """Send the oldest sample; False if there was none. Raises ClickHouseError."""
        sample = self._buffer.oldest
        if sample is None:
            return False
        for block, rows in self._blocks.of(sample):
            taken = self._insert("value", VALUE_COLUMNS, "Native", block)
            self.counts["written_points" if taken else "refused_points"] += rows
        self._buffer.done(sample)
        return True

    def _send_lines(self) -> bool:
        """Send the next lines of the journal; False if there were none. Raises as reader and server do."""
        if self._journal is None:
            return False
        tail, rows_of = self._journal
        batch = tail.read()
        if batch is None:
            return False
        rows, place = rows_of.of(batch.lines, tail.place)
        if rows:
            body = msgspec.json.Encoder().encode_lines(rows)
            taken = self._insert("journal", JOURNAL_COLUMNS, "JSONEachRow", body)
            self.counts["written_lines" if taken else "refused_lines"] += len(rows)
        tail.taken(batch, place)
        return True

    def _insert(self, table: str, columns: Sequence[str], form: str, body: bytes) -> bool:
        """False where the server refuses this body for good. Raises ClickHouseError for all else."""
        try:
            self._link.insert(table, columns, form, body)
        except ClickHouseError as error:
            if error.code not in REFUSED and error.status != TOO_LARGE:
                raise
            self.refusal = str(error)
            self.counts["write_errors"] += 1
            return False
        return True
