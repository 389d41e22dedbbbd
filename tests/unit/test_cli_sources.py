"""`racktwin sources` and the lines of `racktwin status` on what is not used."""

from __future__ import annotations

import csv
import io
from typing import Any

from rich.console import Console

from tests.support.builders import site_of, two_racks
from twin.api.state import plain
from twin.catalogue import NS
from twin.cli.arguments import write_csv
from twin.cli.operate import show_sources as show, unused_line
from twin.cli.operate.sources import _failed as failed
from twin.daemon import Ingest
from twin.telemetry import Reading

T = 1_700_000_000 * NS


def ingest() -> Ingest:
    made = Ingest(site_of(two_racks()), {})
    made.ledger.now_ns = lambda: T
    for k in range(120):
        reading = Reading("rack", 0, "power_w", 1.0, T + k * NS)
        made.of("agent lab/h/r1/node0", outside=True).stage([reading], T + k * NS)
    made.of("exporter http://node9:9400/metrics")
    for n in range(3):
        made.of(f"topic telegraf/x{n}", outside=True).skip(
            "host", "no host of the site", "telegraf/x/\u202e[red]", "name it in the site file"
        )
    return made


def shown(ledger: Any, every: bool = False) -> str:
    rows = plain(ledger.rows(ledger.listing(T + 120 * NS), T + 120 * NS))
    out = io.StringIO()
    tree = {"sources": rows, "next_offset": None, "total": len(rows)}
    show(tree, Console(file=out, width=80, highlight=False), every)
    return out.getvalue()


def test_each_source_has_a_row_and_each_reason_its_remedy() -> None:
    text = shown(ingest().ledger)
    assert "agent lab/h/r1/node0" in text
    assert "never" in text, "an exporter that never answered is listed as well"
    assert text.count("name it in the site file") == 3
    assert "\u202e" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "reports 1 signals of 1 rack" in shown(ingest().ledger, every=True)


def test_failed_requests_are_of_all_where_answers_are_counted() -> None:
    made = ingest()
    for name in ("agent lab/h/r1/node0", "exporter http://node9:9400/metrics"):
        for _ in range(3):
            made.of(name).fail("no route to host")
    rows = {row["name"]: row for row in plain(made.ledger.rows(made.ledger.listing(T), T))}
    said = {name: failed(row).plain for name, row in rows.items()}
    assert said["agent lab/h/r1/node0"] == "3", "it speaks by itself as well"
    assert said["exporter http://node9:9400/metrics"] == "3 of 3"
    assert said["topic telegraf/x0"] == "–"


def test_the_same_reason_of_several_sources_is_one_line_of_the_status() -> None:
    (line,) = plain(ingest().ledger.overview(T))
    text = unused_line(line).plain
    assert "and 2 more  3×  no host of the site, such as telegraf/x/" in text
    assert "name it in the site file" in text


def test_as_csv_a_spreadsheet_reads_it() -> None:
    """Parts of a source are columns, instants are text, and no topic becomes a formula."""
    made = ingest()
    made.of("topic =cmd", outside=True).skip("host", "no host of the site", "x", "name it in the site file")
    rows = plain(made.ledger.rows(made.ledger.listing(T + 120 * NS), T + 120 * NS))
    rows.append({"name": "=1+1", "flags": [1, "x"], "ok": True, "offset": -2.5, "none": None, "empty": {}})
    out = io.StringIO()
    write_csv(rows, Console(file=out))
    table = {row["name"]: row for row in csv.DictReader(io.StringIO(out.getvalue()))}
    agent = table["agent lab/h/r1/node0"]
    assert (agent["carries.rack.signals"], agent["readings"]) == ("1", "120")
    assert agent["last_utc"] == "2023-11-14T22:15:19.000+00:00"
    assert table["exporter http://node9:9400/metrics"]["last_utc"] == ""
    last = table["'=1+1"]
    assert (last["flags"], last["ok"], last["offset"], last["none"]) == ("1; x", "true", "-2.5", "")
