"""The ledger's page in a browser: it shows the statement of the API, and a tenant its own rows alone; and the
demand on the page of jobs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import Browser, Screen, browser, shared_browser
from tests.support.builders import two_racks
from tests.support.in_process_daemon import Desk, serving_aside
from tests.unit.test_api_ledger import fill
from twin.api.tokens import add_token
from twin.ledger import BY

__all__ = ["browser", "shared_browser"]
pytestmark = pytest.mark.slow
TENANT = "tenant.alba"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A daemon in whose hour two tenants ran a job each, with a price and without a carbon intensity."""
    with serving_aside(tmp_path, monkeypatch, Desk) as made:
        for name in (TENANT, "stranger"):
            made.pod.secrets[name] = add_token(made.pod.tokens_file, name, "job")
        made.do(made.pod.tokens.reload)
        made.do(lambda: fill(made.pod))
        yield made


def opened(browser: Browser, desk: Desk, role: str) -> Screen:
    screen = browser.open(desk.pod.url)
    screen.log_in(desk.pod.secrets[role])
    screen.go("ledger")
    return screen


def cells(screen: Screen, table: str, row: str) -> list[str]:
    """Cells of the row whose name begins so."""
    rows = screen.page.locator(f"[aria-label='{table}'] tbody tr")
    for found in rows.all():
        texts: list[str] = found.locator("td").all_inner_texts()
        if texts[0].startswith(row):
            return texts
    raise AssertionError(f"no row {row!r} in {rows.all_inner_texts()}")


def exported(screen: Screen) -> list[dict[str, str]]:
    with screen.page.expect_download() as download:
        screen.page.get_by_role("button", name="CSV", exact=True).click()
    return [*csv.DictReader(io.StringIO(Path(download.value.path()).read_text()))]


def told(desk: Desk, capsys: pytest.CaptureFixture[str], by: str) -> Any:
    """The statement that the command tells."""
    assert desk.run("ledger", "--by", by, "--json", role="viewer") == 0
    return json.loads(capsys.readouterr().out)


def test_it_shows_the_statement_and_what_is_unknown(
    browser: Browser, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = opened(browser, desk, "viewer")
    screen.shows("November 2023 (UTC), so far", "kWh had no known carbon intensity: not in the carbon")
    facts = screen.page.locator(".facts").inner_text().split("\n")
    shown = dict(zip(facts[::2], facts[1::2], strict=True))
    assert {shown[name] for name in ("Carbon", "PUE", "TUE", "WUE")} == {"unknown"}, "unknown is not zero"
    row = next(r for r in told(desk, capsys, "tenant")["rows"] if r["name"] == "alba")
    assert row["energy_pm_kwh"] > 0.0
    name, kwh, half, gpu_h, _, usd, carbon = cells(screen, "Rows of the statement", "alba")
    assert (name, carbon) == ("alba", "–")
    # 4 nodes of 5 kW and 4 GPUs for 600 s, at 0.1 USD per kWh
    assert [float(v) for v in (kwh, half, gpu_h, usd)] == pytest.approx(
        [row["energy_kwh"], row["energy_pm_kwh"], 16 / 6, row["cost_usd"]], rel=0.05
    )
    bar = screen.page.locator(".stack rect.g-busy").first
    assert float(bar.get_attribute("width") or "0") == pytest.approx(100.0), "no class but busy"
    screen.page.get_by_role("button", name="Job", exact=True).click()
    screen.page.get_by_text("lab:2").first.wait_for()
    assert cells(screen, "Rows of the statement", "lab:2")[0] == "lab:2 brno, q-brno"
    screen.page.get_by_role("button", name="Rack", exact=True).click()
    screen.shows("GPU time, cost and carbon are reported by")
    assert cells(screen, "Rows of the statement", "r1")[3:] == ["–"] * 4, "racks have energy alone"
    screen.page.locator("[name=month]").select_option("2023-10")
    screen.shows("The ledger has no entry for October 2023")
    assert screen.page.get_by_role("button", name="CSV", exact=True).is_disabled()
    assert screen.complaints == []


def test_the_csv_has_the_rows_of_the_api(
    browser: Browser, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = opened(browser, desk, "viewer")
    for by in BY:
        screen.page.get_by_role("button", name=by.title(), exact=True).click()
        screen.page.get_by_role("heading", name=f"By {by}", exact=True).wait_for()
        expected = told(desk, capsys, by)["rows"]
        rows = exported(screen)
        assert [r["name"] for r in rows] == [r["name"] for r in expected]
        for row, true in zip(rows, expected, strict=True):
            assert float(row["energy_kwh"]) == true["energy_kwh"]
            if by == "rack":
                assert {row["cost_usd"], row["carbon_kg"], row["gpu_h.busy"], row["granted_h"]} == {""}
                continue
            assert float(row["cost_usd"]) == true["cost_usd"]
            # Nobody tells of carbon; of no energy it is none
            assert row["carbon_kg"] == ("" if float(row["energy_kwh"]) else "0")
            assert {k[6:]: float(v) for k, v in row.items() if k.startswith("gpu_h.")} == true["gpu_h"]


def test_a_tenant_sees_its_own_rows_and_no_other_page(browser: Browser, desk: Desk) -> None:
    asked: list[str] = []
    screen = browser.open(desk.pod.url)
    screen.page.on("request", lambda r: "/api/" in r.url and asked.append(r.url.split("/api/v1/")[1]))
    screen.log_in(desk.pod.secrets[TENANT])
    screen.shows("The token tenant.alba can see only its own rows", "By tenant", "alba")
    assert screen.page.locator("nav a").all_inner_texts() == ["Ledger"]
    for by in ("Site", "Hall", "Queue", "Job"):
        screen.page.get_by_role("button", name=by, exact=True).click()
        screen.shows(f"By {by}")
        text = screen.text()
        assert not [word for word in ("brno", "lab:2", "PUE", "idle nodes") if word in text], by
    assert [r["tenant"] for r in exported(screen)] == ["alba"]
    screen.go("alarms")
    assert screen.page.locator("main h1").inner_text() == "Ledger"
    assert screen.page.get_by_role("button", name="Rack", exact=True).count() == 0
    assert {path.split("?")[0] for path in asked} == {"whoami", "ledger"}, "nothing that it may not"
    assert screen.complaints == []


def test_a_token_without_tenant_is_told_so(browser: Browser, desk: Desk) -> None:
    screen = browser.open(desk.pod.url)
    screen.log_in(desk.pod.secrets["stranger"])
    screen.shows("the token stranger speaks for no tenant and no job; expected tenant.NAME or job.NAME")


@pytest.mark.long
def test_demand_is_shown_by_queue_and_priority_with_what_is_unknown(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = two_racks(queues=[{"name": "train"}, {"name": "debug"}], priorities=[{"name": "urgent"}],
                     services=[{"name": "chat"}])  # fmt: skip
    with serving_aside(tmp_path, monkeypatch, Desk, tree=tree) as desk:
        wants = {"queue.gpu_running_count": [96.0, np.nan], "queue.gpu_pending_count": [12.0, np.nan],
                 "queue.oldest_wait_s": [7200.0, np.nan], "site.gpu_running_count": 96.0,
                 "priority.gpu_pending_count": [8.0, 4.0], "service.requests_per_s": 3.5}  # fmt: skip
        desk.do(lambda: desk.pod.tick(wants))
        screen = browser.open(desk.pod.url)
        screen.log_in(desk.pod.secrets["viewer"])
        screen.go("jobs")
        screen.shows("GPUs: 96 granted, unknown busy by their activity", "No scheduler reports waiting jobs")
        desk.do(lambda: desk.pod.tick(wants | {"site.gpu_pending_count": 12.0}))
        screen.page.locator("[aria-label='Demand']").wait_for()
        assert cells(screen, "Demand", "site")[1:3] == ["96", "12"]
        assert cells(screen, "Demand", "train queue")[1:] == ["96", "12", "–", "–", "–", "–", "2 h", "–"]
        assert cells(screen, "Demand", "debug queue")[1:] == ["–"] * 8, "unknown is not zero"
        assert [cells(screen, "Demand", f"{n} priority")[2] for n in ("urgent", "rest")] == ["8", "4"]
        assert cells(screen, "Requests of services", "chat")[1:3] == ["3.5", "–"]
        assert screen.complaints == []
