"""Fleet history: writer of this daemon and reader of all halls, as the section `history.clickhouse` asks.

`labels_of` names a daemon's rows: the site as its file calls it, and the hall as `fleet.hall` does, at the
hub as the site.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from connectors.clickhouse import ClickHouseLink, FleetReader, Labels, Login, Retention
from twin.archive.archive_writer import ArchiveWriter
from twin.archive.journal_rows import JournalRows
from twin.archive.journal_tail import JournalTail
from twin.catalogue import ConfigError
from twin.config import ClickHouse, Loaded
from twin.site import Site

PLACE_FILE = "clickhouse-journal.json"  # in the folder of the history
MB = 10**6


def labels_of(loaded: Loaded, site: Site) -> Labels:
    """The site and hall of this daemon's rows."""
    settings, fleet = _settings(loaded), loaded.config.fleet
    upward = None if fleet is None else fleet.upward
    name = settings.site or site.file.site
    hall = settings.hall or (upward.hall if upward is not None else None)
    return Labels(name, hall or name)


def retention_of(settings: ClickHouse) -> Retention:
    """Days that the tables keep, as configured."""
    return Retention(
        values_days=settings.values_days,
        minutes_days=settings.minutes_days,
        hours_days=settings.hours_days,
        journal_days=settings.journal_days,
    )


def fleet_reader(loaded: Loaded) -> FleetReader:
    """The reader of the server. Raises ConfigError, where no server is configured too."""
    return FleetReader(_link(loaded, _settings(loaded)), retention_of(_settings(loaded)))


def make_archive(
    loaded: Loaded, site_now: Callable[[], Site], leads: Callable[[], bool], safe_lines: Callable[[], int],
    journal_folder: Path,
) -> ArchiveWriter:  # fmt: skip
    """The writer of this daemon, not started. Raises ConfigError."""
    settings = _settings(loaded)
    labels = labels_of(loaded, site_now())
    tail = JournalTail(journal_folder, loaded.state / "history" / PLACE_FILE, safe_lines)
    journal = (tail, JournalRows(labels, site_now, leads))
    return ArchiveWriter(_link(loaded, settings), labels, settings.buffer_mb * MB, journal, leads)


def _settings(loaded: Loaded) -> ClickHouse:
    settings = loaded.config.history.clickhouse
    if settings is None:
        raise ConfigError(
            f"{loaded.path}: $.history.clickhouse: missing; expected `clickhouse: {{url: ..}}`, "
            "the server that keeps the history of the fleet"
        )
    return settings


def _link(loaded: Loaded, settings: ClickHouse) -> ClickHouseLink:
    trust = loaded.trust(settings.tls, "history.clickhouse.tls") if settings.tls is not None else None
    login = Login(settings.username, loaded.secret(settings.password_file))
    return ClickHouseLink(settings.url, settings.database, login, trust)
