"""The page of a hub in a browser: halls, shared feeders, a silent hall, holds, and tokens of some halls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policies import BY_NAME
from tests.sim.test_page import HOSTILE, SERIOUS
from tests.support.browser import Browser, Screen, browsing
from tests.support.fleets import fleet_tree
from tests.support.in_process_daemon import Desk, serving_aside
from tests.support.page_packages import page_packages
from tests.unit.test_api_fleet import TOLD, fill
from twin.api.tokens import add_token
from twin.config import FleetSettings
from twin.site import HALL_BUDGET

pytestmark = pytest.mark.slow
OWN_PAGE = "https://twin-a.example:8077/"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A hub whose two halls tell; hall-a has a page of its own."""
    more: dict[str, Any] = {"tree": fleet_tree(), "more": [BY_NAME["hall_budgets"](failover=False)]}
    with serving_aside(tmp_path, monkeypatch, **more) as made:
        loaded = made.pod.live.loaded
        fleet = FleetSettings(pages={"hall-a": OWN_PAGE})
        object.__setattr__(loaded, "config", msgspec.structs.replace(loaded.config, fleet=fleet))
        made.do(lambda: fill(made.pod))
        yield made


@pytest.fixture
def browser(server: Callable[..., Path]) -> Iterator[Browser]:
    """Chromium."""
    with browsing(server) as made:
        yield made


def opened(browser: Browser, desk: Desk, role: str = "operator", **more: Any) -> Screen:
    screen = browser.open(desk.pod.url, **more)
    screen.page.goto(f"{desk.pod.url}/#token={desk.pod.secrets[role]}")
    screen.page.wait_for_selector(".fleet-halls")
    return screen


async def beat(desk: Desk) -> None:
    """Tell each half second until the daemon's loop ends."""
    while True:
        await asyncio.sleep(0.5)
        fill(desk.pod, 1)


def row(screen: Screen, hall: str) -> str:
    found: str = screen.page.locator(".fleet-halls tbody tr", has_text=hall).first.inner_text()
    return " ".join(found.split())


def test_the_page_of_a_hub_is_clean_and_fits_a_phone(
    browser: Browser, desk: Desk, server: Callable[..., Path]
) -> None:
    axe = (page_packages(server) / "node_modules" / "axe-core" / "axe.min.js").read_text()
    desk.do(lambda: asyncio.get_running_loop().create_task(beat(desk)))  # a page of old values is faded
    for width, scheme in ((1366, "light"), (390, "dark")):
        screen = opened(browser, desk, width=width, scheme=scheme)
        screen.shows("2 halls", "Who holds which part of the shared feeders", "200 kW left")
        screen.page.evaluate(axe)
        assert screen.page.evaluate(SERIOUS, None) == []
        assert screen.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert (screen.complaints, screen.reports()) == ([], [])
        nav = screen.page.locator("nav a").all_inner_texts()
        assert "Fleet" in nav[0]
        assert not {"Jobs", "Cooling", "Ledger"} & set(nav)


def test_halls_show_what_they_tell_and_lead_to_their_own_page(browser: Browser, desk: Desk) -> None:
    screen = opened(browser, desk, "viewer")
    assert "2 300 kW of 1,000 kW 700 kW 900 kW 997 of 1,000 3 out" in row(screen, "hall-a")
    links = screen.page.locator(".fleet-halls a.own").evaluate_all("(all) => all.map((a) => [a.href, a.rel])")
    assert links == [[OWN_PAGE, "noreferrer noopener"]]
    screen.shows("critical alarms in hall-a, hall-b")
    screen.page.locator(".fleet-halls a.entity").first.click()
    screen.shows("Hall hall-a", "all that it may have")


def test_a_silent_hall_is_unknown_and_a_lost_feeder_is_told(browser: Browser, desk: Desk) -> None:
    def lose() -> None:
        told = {k: [v[0], float("nan")] for k, v in TOLD.items() if k.startswith("rack")}
        for _ in range(20):
            desk.pod.tick(told | {"feeder.energised_state": [0.0, 1.0]})

    screen = opened(browser, desk, "viewer")
    desk.do(lose)
    screen.shows("1 of 2", "silent, 20 s", "fb lost", "Nobody holds a part of it")
    assert row(screen, "hall-b").count("unknown") == 6, "its sign, power, headroom, forecast, GPUs, alarms"
    assert "✓" not in row(screen, "hall-b")


def test_a_hub_that_hears_nobody_counts_nothing_as_well(browser: Browser, desk: Desk) -> None:
    def go_dark() -> None:
        for _ in range(20):
            desk.pod.tick({k: [float("nan")] * 2 for k in TOLD if k.startswith("rack")})

    screen = opened(browser, desk, "viewer")
    desk.do(go_dark)
    screen.shows("0 of 2")
    figures = screen.page.locator(".figures").inner_text().lower()
    assert (figures.count("unknown"), "critical" in figures, "none out" in figures) == (9, False, False)


def test_an_operator_holds_and_releases_a_budget_on_the_page(browser: Browser, desk: Desk) -> None:
    screen = opened(browser, desk)
    screen.act("Hold", {"most": "600", "reason": HOSTILE}, within=".fleet-halls")
    screen.shows("held to 600 kW", "by operator-1", HOSTILE)
    assert screen.dialogs == []
    desk.do(lambda: fill(desk.pod, 2))
    assert desk.do(lambda: desk.pod.twin.lease(HALL_BUDGET).tolist())[0] == 600e3
    screen.shows("people ask for at most 600.0 kW")
    screen.act("Release", {}, within=".fleet-halls")
    screen.page.wait_for_selector(".hold", state="detached")
    screen = opened(browser, desk, "viewer")
    assert screen.page.get_by_role("button", name="Hold", exact=True).count() == 0


def test_a_token_of_one_hall_opens_the_page_of_that_hall_alone(browser: Browser, desk: Desk) -> None:
    desk.pod.secrets["a"] = add_token(desk.pod.tokens_file, "anna", "viewer", halls=("hall-a",))
    desk.do(desk.pod.tokens.reload)
    screen = opened(browser, desk, "a")
    screen.shows("The token anna sees hall-a alone", "1 hall", "the rest is not shown to this token")
    assert "hall-b" not in screen.page.content()
    assert screen.page.locator("nav a").count() == 1
    assert screen.complaints == [], "nothing is asked that is refused"
