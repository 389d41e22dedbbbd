"""Alarms in the log: each has a line, and a storm of them no more than a screen can show."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from twin.catalogue import NS
from twin.contracts import Finding
from twin.daemon.alarms import AlarmBook
from twin.daemon.services import MAX_LOGGED_ALARMS, log_alarms


def test_a_storm_of_critical_alarms_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log itself holds back nothing that is critical."""
    caplog.set_level(logging.INFO, "racktwin")
    book = AlarmBook(tmp_path)
    found = [Finding(f"warm/{i}", "warning", "Warm", (), (), 1.0, "Look.") for i in range(5000)]
    found += [Finding(f"hot/{i}", "critical", "Hot", (), (), 1.0, "Look.") for i in range(5000)]
    log_alarms(book.update(found, NS))
    *lines, rest = caplog.records
    assert len(lines) == MAX_LOGGED_ALARMS
    assert {line.levelno for line in lines} == {logging.CRITICAL}
    assert rest.getMessage() == f"{10_000 - MAX_LOGGED_ALARMS} more alarms changed with this tick"
    caplog.clear()
    log_alarms(book.update(found[:-3], 2 * NS))
    assert [r.getMessage() for r in caplog.records] == [
        f"alarm cleared: Hot [hot/{4997 + i}]" for i in range(3)
    ]
