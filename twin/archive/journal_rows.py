"""Journal rows: lines of a journal as rows of the table `journal`, under the names of the line's own time.

The journal gives entities of commands by index. They are named where the site is the one that the line was
written under; otherwise by the first and last name that the line holds.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from connectors.clickhouse import Labels
from twin.archive.journal_tail import TailPlace
from twin.catalogue import NS
from twin.contracts import (
    AdviceRecord,
    ClearedRecord,
    CommandRecord,
    DaemonRecord,
    FindingRecord,
    LeaderRecord,
    ManifestRecord,
    OtherRecord,
    SiteRecord,
    read_record,
)
from twin.report import sentence
from twin.run import line_hash
from twin.site import Site

MAX_TEXT = 4000
MAX_BODY = 2**20  # a longer one stays in the journal


class _Line(msgspec.Struct, frozen=True):
    """A line, its body as it stands."""

    seq: int
    kind: str
    tick: int
    now_ns: int
    body: msgspec.Raw


class JournalRows:
    """Makes rows under these labels. `site_now` is the site of the daemon, `leads` whether it leads now.

    The journal shows when the daemon gained and lost the lead; it starts without. Where the journal begins
    in the middle, what is so now is believed of then.
    """

    def __init__(
        self, labels: Labels, site_now: Callable[[], Site], leads: Callable[[], bool] = lambda: False
    ) -> None:
        self.labels, self._site_now, self._leads = labels, site_now, leads

    def of(self, lines: list[bytes], place: TailPlace) -> tuple[list[dict[str, Any]], TailPlace]:
        """(rows, the place behind these lines). Lines of a standby, or without an instant, have none."""
        rows: list[dict[str, Any]] = []
        leads, site_hash, begun = place.leads, place.site_hash, place.seq >= 0
        for text in lines:
            line = msgspec.json.decode(text, type=_Line)
            record = _record(line)
            if not begun and line.seq > 0:
                leads = self._leads()
            begun = True
            if isinstance(record, LeaderRecord):
                leads = record.epoch is not None
            elif isinstance(record, DaemonRecord) and record.started is not None:
                leads = False
            elif isinstance(record, SiteRecord):
                site_hash = record.site_hash
            elif isinstance(record, ManifestRecord):
                site_hash = record.site_hash or site_hash
            hashed = line_hash(text)
            place = TailPlace(line.seq, hashed, leads, site_hash)
            if line.now_ns > 0 and (leads or isinstance(record, LeaderRecord)):
                site = self._site_now()
                known = site if site.spec_hash == site_hash else None
                rows.append(self._row(line, hashed, record, known))
        return rows, place

    def _row(self, line: _Line, hashed: str, record: Any, site: Site | None) -> dict[str, Any]:
        entities, values = _entities(record, site)
        whole = bytes(line.body)
        return {
            "site": self.labels.site,
            "hall": self.labels.hall,
            "t": _instant(line.now_ns),
            "seq": line.seq,
            "hash": hashed,
            "tick": max(0, line.tick),
            "kind": line.kind,
            "policy": _text(getattr(record, "policy", "")),
            "control": _text(getattr(record, "control", "")),
            "severity": _text(getattr(record, "severity", "")),
            "id": _text(getattr(record, "id", "")),
            "text": _sentence(record, site)[:MAX_TEXT],
            "entities": entities,
            "values": values,
            "body": whole.decode("utf-8", "replace") if len(whole) <= MAX_BODY else "",
        }


def _record(line: _Line) -> Any:
    """The record of a line; one without content where a disk damaged its body, which goes as it stands."""
    try:
        return read_record(line.kind, msgspec.json.decode(line.body, type=dict))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return OtherRecord(line.kind, {})


def _sentence(record: Any, site: Site | None) -> str:
    if isinstance(record, CommandRecord | AdviceRecord):
        return record.reason
    if isinstance(record, FindingRecord | ClearedRecord):
        return record.title
    return sentence(record, site)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _instant(t_ns: int) -> str:
    """UTC, to the millisecond, rounded down."""
    when = datetime.fromtimestamp(t_ns // NS, UTC)
    return f"{when:%Y-%m-%d %H:%M:%S}.{t_ns % NS // 10**6:03d}"


def _entities(record: Any, site: Site | None) -> tuple[list[str], list[float | str]]:
    """(entities, their commanded values); the values are empty where nothing is commanded."""
    if isinstance(record, FindingRecord):
        return list(record.entities), []
    if not hasattr(record, "index"):
        return [], []
    index = np.asarray(record.index)
    value = np.asarray(record.value, np.float64) if isinstance(record, CommandRecord | AdviceRecord) else None
    names = list(record.names)
    table = record.control.partition(".")[0]
    if not names and site is not None and len(index) and index.max() < site.sizes.get(table, 0):
        names = [site.name(table, i) for i in index.tolist()]
    if not names and value is not None and len(index):
        names = [record.first_name] if len(index) == 1 else [record.first_name, record.last_name]
        value = value[[0]] if len(index) == 1 else value[[0, -1]]
    if value is None:
        return names, []
    count = min(len(names), len(value))
    return names[:count], [float(v) if np.isfinite(v) else str(v) for v in value[:count].tolist()]
