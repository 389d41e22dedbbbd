"""Queries of the fleet's history: a signal over time, and lists of alarms, commands and decisions.

The table that answers follows from the step and from how far back the question reaches: values as they came,
or their rollups of a minute or an hour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from connectors.clickhouse.http_link import ClickHouseError, ClickHouseLink
from connectors.clickhouse.schema import Retention

POINTS = 500  # of one entity, where no step is asked for
MOST_ROWS = 20_000  # of one answer
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
NS_MS, NS_S = 10**6, 10**9
LISTS = {
    "alarms": ("finding", "cleared"),
    "commands": ("command", "lapsed", "failed"),
    "decisions": (),  # all that a journal says, but for its bookkeeping
}
BOOKKEEPING = ("mark", "manifest", "upkeep")
_NAMED = """ AND arrayExists(
    e -> position(concat('/', e, '/'), concat('/', {entity:String}, '/')) > 0, j.entities)"""


@dataclass(frozen=True, kw_only=True)
class ValueQuestion:
    """One signal in [since, until), in one hall or in all. `entity`: full paths or their ends, with commas
    between them.
    """

    entity: str
    signal: str
    since_ns: int
    until_ns: int
    hall: str = ""
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ListQuestion:
    """Lines of the journals in [since, until), the newest first. `what` is one of `LISTS`, `entity` a path or
    part of one: what it names, and everything below.
    """

    what: str
    since_ns: int
    until_ns: int
    hall: str = ""
    entity: str = ""
    limit: int = 200


class FleetReader:
    """Queries a server. Raises ClickHouseError. `keep`: the retention of each table."""

    def __init__(self, link: ClickHouseLink, keep: Retention) -> None:
        self.link, self.keep = link, keep

    def values(self, asked: ValueQuestion, now_ns: int) -> dict[str, Any]:
        """Return `rows` of mean, min, max and last by hall, entity and instant; `more` if there are
        further ones."""
        table, step_ms = self._choose(asked, now_ns)
        names: dict[str, str | int | float] = {
            "entity": asked.entity,
            "signal": asked.signal,
            "hall": asked.hall,
            "since": asked.since_ns // NS_MS,
            "until": asked.until_ns // NS_MS,
            "step": step_ms,
            "limit": MOST_ROWS + 1,
        }
        rows = self._rows(_values_sql(f"{self.link.database}.{table}", bool(asked.hall)), names)
        return {
            "table": table,
            "step_s": step_ms / 1000,
            "rows": rows[:MOST_ROWS],
            "more": len(rows) > MOST_ROWS,
        }

    def lines(self, asked: ListQuestion) -> dict[str, Any]:
        """Return `rows` of lines; `more` if there are older ones in the range."""
        kinds = LISTS[asked.what]
        names: dict[str, str | int | float] = {
            "entity": asked.entity,
            "hall": asked.hall,
            "since": asked.since_ns // NS_MS,
            "until": asked.until_ns // NS_MS,
            "limit": asked.limit + 1,
        }
        chosen = f"kind IN {_quoted(kinds)}" if kinds else f"kind NOT IN {_quoted(BOOKKEEPING)}"
        where = chosen + (" AND hall = {hall:String}" if asked.hall else "")
        sql = f"""SELECT toUnixTimestamp64Milli(t) AS t_ms, site, hall, kind, policy, control, severity, id,
    text, hash, arraySlice(entities, 1, 20) AS entities, arraySlice(values, 1, 20) AS values,
    length(j.entities) AS count
FROM {self.link.database}.journal AS j FINAL
WHERE t >= fromUnixTimestamp64Milli({{since:Int64}}, 'UTC')
    AND t < fromUnixTimestamp64Milli({{until:Int64}}, 'UTC') AND {where} {_NAMED if asked.entity else ""}
ORDER BY t DESC, site, hall, seq DESC LIMIT {{limit:UInt32}} FORMAT JSONEachRow"""
        rows = self._rows(sql, names)
        return {"rows": rows[: asked.limit], "more": len(rows) > asked.limit}

    def _rows(self, sql: str, names: dict[str, str | int | float]) -> list[dict[str, Any]]:
        rows = self.link.ask(sql, names)
        try:
            for row in rows:
                row["t_ns"] = int(row.pop("t_ms")) * NS_MS
                row |= {"count": int(row["count"])} if "count" in row else {}
        except (KeyError, TypeError, ValueError):
            why = "is not ClickHouse: its rows have another form"
            raise ClickHouseError(f"{self.link.place}: {why}", 200) from None
        return rows

    def _choose(self, asked: ValueQuestion, now_ns: int) -> tuple[str, int]:
        """Return (table, step in ms): the finest one with this history, the step a whole number of its
        own."""
        back_s = max(0, now_ns - asked.since_ns) / NS_S
        span_s = (asked.until_ns - asked.since_ns) / NS_S
        step_s = asked.step_s if asked.step_s is not None else span_s / POINTS
        if back_s > self.keep.minutes_days * DAY_S or step_s >= HOUR_S:
            return "value_1h", _whole(step_s, HOUR_S)
        if back_s > self.keep.values_days * DAY_S or step_s >= MINUTE_S:
            return "value_1min", _whole(step_s, MINUTE_S)
        return "value", max(1, round(1000 * step_s))


def _whole(step_s: float, unit_s: int) -> int:
    return max(1, round(step_s / unit_s)) * unit_s * 1000


def _quoted(kinds: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"'{kind}'" for kind in kinds) + ")"


def _values_sql(table: str, in_hall: bool) -> str:
    raw = table.endswith(".value")
    t_ms = "toUnixTimestamp64Milli(v.t)" if raw else "toInt64(toUnixTimestamp(v.t)) * 1000"
    start = "fromUnixTimestamp64Milli({since:Int64}, 'UTC')"
    figures = (
        "avg(v.value) AS mean, min(v.value) AS min, max(v.value) AS max, argMax(v.value, v.t) AS last"
        if raw
        else "sum(v.sum) / sum(v.count) AS mean, min(v.min) AS min, max(v.max) AS max, "
        "argMaxMerge(v.last) AS last"
    )
    if not raw:  # the bucket that holds the first instant begins before it
        unit = "Minute" if table.endswith("1min") else "Hour"
        start = f"toStartOf{unit}({start})"
    hall = " AND v.hall = {hall:String}" if in_hall else ""
    return f"""SELECT v.site AS site, v.hall AS hall, v.rack AS rack, v.entity AS entity,
    intDiv({t_ms}, {{step:Int64}}) * {{step:Int64}} AS t_ms, {figures}
FROM {table} AS v{" FINAL" if raw else ""}
WHERE v.signal = {{signal:String}}{hall}
    AND v.t >= {start} AND v.t < fromUnixTimestamp64Milli({{until:Int64}}, 'UTC')
    AND arrayExists(
        e -> v.entity = e OR endsWith(v.entity, concat('/', e)), splitByChar(',', {{entity:String}}))
GROUP BY site, hall, rack, entity, t_ms
ORDER BY site, hall, entity, t_ms LIMIT {{limit:UInt32}} FORMAT JSONEachRow"""
