"""The page of a hub in a browser: halls, shared feeders, a silent hall, holds, and tokens of some halls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np
import pytest

from policies import BY_NAME
from tests.sim.test_page import HOSTILE, SERIOUS
from tests.support.browser import Browser, Screen, browser, shared_browser
from tests.support.fleets import fleet_tree
from tests.support.in_process_daemon import Desk, serving_aside
from tests.support.page_packages import page_packages
from tests.support.thread_server import http_thread
from tests.unit.test_api_fleet import TOLD, fill
from twin.api.tokens import add_token
from twin.catalogue import NS
from twin.config import ClickHouse, FleetSettings, History
from twin.site import HALL_BUDGET

__all__ = ["browser", "shared_browser"]
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
        screen.shows("2 halls", "Shared feeders, loops and contracts", "200 kW left")
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
    screen.shows("Hall hall-a", "its maximum")


def test_a_silent_hall_is_unknown_and_a_lost_feeder_is_told(browser: Browser, desk: Desk) -> None:
    def lose() -> None:
        told = {k: [v[0], float("nan")] for k, v in TOLD.items() if k.startswith("rack")}
        for _ in range(20):
            desk.pod.tick(told | {"feeder.energised_state": [0.0, 1.0]})

    screen = opened(browser, desk, "viewer")
    desk.do(lose)
    screen.shows("1 of 2", "silent, 20 s", "fb lost", "No hall holds a part of it")
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


class KeptPower:
    """A store in which each hall has its power for the last `hours`, but for an hour in the middle."""

    def __init__(self, hours: float) -> None:
        self.hours, self.asked = hours, list[str]()

    async def query(
        self, key: str, names: list[str], since_ns: int, until_ns: int, step_s: float, points: int
    ) -> dict[str, Any]:
        self.asked.append(key)
        step_ns = round(step_s * NS)
        at = np.arange(since_ns // step_ns, until_ns // step_ns + 1) * step_ns
        back_h = (until_ns - at) / NS / 3600.0
        watts = {
            "rack.hall_power_w": 300e3 + 50e3 * np.sin(np.maximum(back_h, 0.0)),
            "rack.hall_budget_readback_w": 400e3,
        }
        value = np.broadcast_to(watts.get(key, 0.0), at.shape).copy()
        value[(back_h > self.hours) | (abs(back_h - self.hours / 2) < 0.5)] = np.nan
        listed = [None if v != v else float(v) for v in value]
        return {"t_ns": at.tolist(), **{what: dict.fromkeys(names, listed) for what in ("values", "max")}}


def fleet_server(kept: KeptPower, asked: list[dict[str, str]]) -> type[BaseHTTPRequestHandler]:
    """A ClickHouse that answers questions with the values of `kept`."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            names = {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()}
            asked.append(names)
            halls, step_s = names["param_entity"].split(","), int(names["param_step"]) / 1000
            span = (int(names["param_since"]) * 10**6, int(names["param_until"]) * 10**6)
            found = asyncio.run(kept.query(names["param_signal"], halls, *span, step_s, 0))
            lines = []
            for hall in halls:
                for t, v in zip(found["t_ns"], found["values"][hall], strict=True):
                    if v is not None:
                        row = {"site": "fleet", "hall": "fleet", "entity": hall, "t_ms": t // 10**6}
                        lines.append(json.dumps(row | dict.fromkeys(("mean", "min", "max", "last"), v)))
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write("\n".join(lines).encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Answers


def keep_at(desk: Desk, url: str | None, store: KeptPower | None) -> None:
    """The hub has this ClickHouse, and this store of its own."""
    live = desk.pod.live
    server = None if url is None else ClickHouse(url=url)
    config = msgspec.structs.replace(live.loaded.config, history=History(clickhouse=server))
    object.__setattr__(live.loaded, "config", config)
    live.history = store  # type: ignore[assignment]


def charts(screen: Screen) -> list[str]:
    """The charts of the halls, as a screen reader says them."""
    drawn = screen.page.locator(".fleet-history .plot")
    drawn.first.wait_for()
    return [str(drawn.nth(i).get_attribute("aria-label")) for i in range(drawn.count())]


def test_power_of_each_hall_is_drawn_from_the_hubs_own_store(browser: Browser, desk: Desk) -> None:
    store = KeptPower(hours=6)
    keep_at(desk, None, store)
    screen = opened(browser, desk, "viewer")
    screen.shows("Configure ClickHouse", "unknown for 60 min", "stored since")
    assert charts(screen) == [f"{h}: drawn 303 kW, budget 400 kW" for h in ("hall-a", "hall-b")]
    screen.page.get_by_role("button", name="GPUs out of service").click()
    screen.page.wait_for_function(
        "() => document.querySelector('.fleet-history .plot')?.ariaLabel.includes('out of')"
    )
    assert "rack.hall_gpu_out_count" in store.asked
    screen.page.get_by_role("button", name="1 h", exact=True).click()
    screen.page.wait_for_function(
        "() => /^hall-a/.test(document.querySelector('.fleet-history .plot')?.ariaLabel)"
    )
    assert "unknown for" not in screen.page.locator(".fleet-history").inner_text()
    screen.page.get_by_role("button", name="30 days").click()
    screen.shows("stored since")
    assert screen.complaints == []


def test_the_history_of_the_fleet_is_drawn_where_there_is_one(browser: Browser, desk: Desk) -> None:
    asked: list[dict[str, str]] = []
    with http_thread(fleet_server(KeptPower(hours=300), asked)) as port:
        keep_at(desk, f"http://127.0.0.1:{port}", None)
        screen = opened(browser, desk, "viewer")
        screen.shows("From the ClickHouse of the fleet")
        assert len(charts(screen)) == 2
        screen.page.get_by_role("button", name="30 days").click()
        screen.shows("stored since")
    whole = {(q["param_hall"], q["param_entity"]) for q in asked}
    assert whole == {("fleet", "fleet/campus/hall-a,fleet/campus/hall-b")}
    keep_at(desk, f"http://127.0.0.1:{port}", KeptPower(hours=6))
    screen = opened(browser, desk, "viewer")
    screen.shows("the history of the fleet:", "this hub's own store instead")
    assert len(charts(screen)) == 2


def test_of_many_halls_one_is_drawn(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    racks = [{"name": f"hall-{i:02d}", "guaranteed_w": 3e5, "max_w": 1e6} for i in range(14)]
    tree = {"site": "fleet", "halls": [{"name": "campus", "racks": racks}]}
    with serving_aside(tmp_path, monkeypatch, tree=tree, more=[BY_NAME["hall_budgets"]()]) as desk:
        keep_at(desk, None, KeptPower(hours=6))
        screen = opened(browser, desk, "viewer")
        assert [text.partition(":")[0] for text in charts(screen)] == ["hall-00"]
        screen.page.locator(".fleet-history select").select_option("hall-13")
        screen.page.wait_for_function(
            "() => document.querySelector('.fleet-history .plot')?.ariaLabel.startsWith('hall-13')"
        )
        assert len(charts(screen)) == 1


def test_a_hub_that_keeps_nothing_says_so(browser: Browser, desk: Desk) -> None:
    keep_at(desk, None, None)
    screen = opened(browser, desk, "viewer")
    screen.shows("No history: no ClickHouse is configured", "no store of its own")
    assert screen.page.locator(".fleet-history .plot").count() == 0


def test_a_token_of_one_hall_opens_the_page_of_that_hall_alone(browser: Browser, desk: Desk) -> None:
    desk.pod.secrets["a"] = add_token(desk.pod.tokens_file, "anna", "viewer", halls=("hall-a",))
    desk.do(desk.pod.tokens.reload)
    screen = opened(browser, desk, "a")
    screen.shows("The token anna can see only hall-a", "1 hall", "the rest is not shown to this token")
    assert "hall-b" not in screen.page.content()
    assert screen.page.locator("nav a").count() == 1
    assert screen.complaints == [], "nothing is asked that is refused"
