"""Schema: SQL of the tables, rollups and views of the fleet's history, and of the grants of each user.

Values lie in `value`, a row per reading. Two materialised views keep `value_1min` and `value_1h` from the
inserts alone. The journals of all halls lie in `journal`, a row per line, keyed by the line's own hash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Inserts that a table remembers, to know one that comes again. source: estimate, a day of ten halls
REMEMBERED = 100_000
VALUE_COLUMNS = ("site", "hall", "rack", "entity", "signal", "t", "value")
JOURNAL_COLUMNS = (
    "site", "hall", "t", "seq", "hash", "tick", "kind", "policy", "control", "severity", "id", "text",
    "entities", "values", "body",
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
ROLLUPS = (("value_1min", "toStartOfMinute"), ("value_1h", "toStartOfHour"))


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Days for which the server keeps values, minute and hour means, and journals."""

    values_days: float = 30.0
    minutes_days: float = 365.0
    hours_days: float = 3650.0
    journal_days: float = 3650.0


def database_problem(name: str) -> str:
    """Return the fault of a database name, which appears unquoted in SQL; "" for none."""
    if _NAME.fullmatch(name):
        return ""
    return f"expected letters, digits and _, at most 63 and no digit first, got {name[:80]!r}"


def schema_sql(database: str, keep: Retention) -> list[str]:
    """Return statements that create missing tables; each may run again. The user needs the right to create
    them."""
    return [
        f"CREATE DATABASE IF NOT EXISTS {database}",
        _values(database, keep),
        *(statement for name, start in ROLLUPS for statement in _rollup(database, name, start, keep)),
        _journal(database, keep),
        *_views(database),
    ]


def _ttl(days: float) -> str:
    return f"TTL toDateTime(t) + toIntervalHour({max(1, round(24 * days))})"


def _values(database: str, keep: Retention) -> str:
    return f"""CREATE TABLE IF NOT EXISTS {database}.value (
    site LowCardinality(String),
    hall LowCardinality(String),
    rack LowCardinality(String),
    entity String CODEC(ZSTD),
    signal LowCardinality(String),
    t DateTime64(3, 'UTC') CODEC(Delta, ZSTD),
    value Float64 CODEC(Gorilla, ZSTD)
)
ENGINE = ReplacingMergeTree
PARTITION BY toDate(t)
ORDER BY (signal, site, hall, entity, t)
{_ttl(keep.values_days)}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = {REMEMBERED}"""


def _rollup(database: str, name: str, start: str, keep: Retention) -> tuple[str, str]:
    days = keep.minutes_days if name == "value_1min" else keep.hours_days
    table = f"""CREATE TABLE IF NOT EXISTS {database}.{name} (
    site LowCardinality(String),
    hall LowCardinality(String),
    rack LowCardinality(String),
    entity String CODEC(ZSTD),
    signal LowCardinality(String),
    t DateTime('UTC') CODEC(Delta, ZSTD),
    count SimpleAggregateFunction(sum, UInt64),
    sum SimpleAggregateFunction(sum, Float64),
    min SimpleAggregateFunction(min, Float64),
    max SimpleAggregateFunction(max, Float64),
    last AggregateFunction(argMax, Float64, DateTime64(3, 'UTC'))
)
ENGINE = AggregatingMergeTree
PARTITION BY toYYYYMM(t)
ORDER BY (signal, site, hall, rack, entity, t)
{_ttl(days)}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = {REMEMBERED}"""
    view = f"""CREATE MATERIALIZED VIEW IF NOT EXISTS {database}.{name}_view TO {database}.{name} AS
SELECT site, hall, rack, entity, signal, {start}(v.t) AS t, count() AS count, sum(v.value) AS sum,
    min(v.value) AS min, max(v.value) AS max, argMaxState(v.value, v.t) AS last
FROM {database}.value AS v
GROUP BY site, hall, rack, entity, signal, t"""
    return table, view


def _journal(database: str, keep: Retention) -> str:
    return f"""CREATE TABLE IF NOT EXISTS {database}.journal (
    site LowCardinality(String),
    hall LowCardinality(String),
    t DateTime64(3, 'UTC') CODEC(Delta, ZSTD),
    seq UInt64,
    hash String,
    tick UInt64,
    kind LowCardinality(String),
    policy LowCardinality(String),
    control LowCardinality(String),
    severity LowCardinality(String),
    id String,
    text String CODEC(ZSTD),
    entities Array(String) CODEC(ZSTD),
    values Array(Float64) CODEC(ZSTD),
    body String CODEC(ZSTD(3))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(t)
ORDER BY (site, hall, t, seq, hash)
{_ttl(keep.journal_days)}
SETTINGS ttl_only_drop_parts = 1"""


def _views(database: str) -> tuple[str, str, str]:
    """Return views of findings, commands and decisions as tables, for SQL users."""
    return (
        f"""CREATE VIEW IF NOT EXISTS {database}.finding AS
SELECT site, hall, t, kind = 'finding' AS active, id, severity, text, entities, hash
FROM {database}.journal FINAL WHERE kind IN ('finding', 'cleared')""",
        f"""CREATE VIEW IF NOT EXISTS {database}.command AS
SELECT site, hall, t, control, policy, entity, value, text, hash
FROM {database}.journal FINAL ARRAY JOIN entities AS entity, values AS value WHERE kind = 'command'""",
        f"""CREATE VIEW IF NOT EXISTS {database}.decision AS
SELECT site, hall, t, seq, kind, policy, control, text, entities, body, hash
FROM {database}.journal FINAL WHERE kind NOT IN ('mark', 'manifest', 'upkeep')""",
    )


def grants_sql(database: str) -> list[str]:
    """Return the minimal rights: of a hall, which only writes, and of a daemon or person that reads."""
    return [
        f"GRANT INSERT ON {database}.value TO hall",
        f"GRANT INSERT ON {database}.journal TO hall",
        f"GRANT SELECT ON {database}.* TO reader",
    ]
