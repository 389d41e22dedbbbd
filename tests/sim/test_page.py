"""The page in a browser: it shows what the API says, acts in the token's name, and survives what comes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec
import pytest

from policies.power_capping.power_cap import PowerCap
from tests.support.browser import Browser, Screen, browser, shared_browser
from tests.support.builders import two_racks
from tests.support.in_process_daemon import Desk, Pod, serving_aside
from tests.support.page_packages import page_packages
from tests.unit.test_site_change import BLOCK, description_of, grown
from twin.api.tokens import revoke_token
from twin.catalogue import NS
from twin.config import Api
from twin.daemon.alarms import AlarmBook
from twin.telemetry import events as ev

__all__ = ["browser", "shared_browser"]
pytestmark = pytest.mark.slow
PAGES = {
    "": "What is wrong", "alarms": "Maintenance windows", "decisions": "Decisions",
    "power": "One-line diagram",
    "cooling": "If a pump stops", "policies": "Thermal guard", "policies/thermal_guard": "Settings",
    "jobs": "Running", "replacement": "History", "ledger": "GPU-hours by class",
    "whatif": "Run it", "setup": "Reporting entities",
    "e/rack/lab/h/r1": "Rack r1", "e/node/lab/h/r1/node0": "Node r1/node0",
    "e/cdu/lab/h/cdu1": "Racks it cools",
    "e/gpu/lab/h/r1/node0/gpu0": "GPU r1/node0/gpu0", "e/feeder/lab/h/a": "Feeder a",
}  # fmt: skip
HOSTILE = '<img src=x onerror=alert(1)>"><script>alert(2)</script>'


# Violations that axe calls serious or critical, each with its first places
SERIOUS = """
(rules) => axe.run(document, {resultTypes: ["violations"], ...(rules ? {runOnly: rules} : {})})
  .then((r) => r.violations
  .filter((v) => ["serious", "critical"].includes(v.impact))
  .map((v) => [v.id, v.nodes.slice(0, 2).map((n) => `${n.html.slice(0, 160)} ${n.failureSummary}`)]))
"""
# Columns and panels that are lower than what they hold, so that it lies over what follows
SPILT = """() => [...document.querySelectorAll("main .stack, main .panel")]
  .filter((e) => e.scrollHeight > e.clientHeight + 2 && getComputedStyle(e).overflowY === "visible")
  .map((e) => e.className)"""
HOT = {"gpu.temp_c": 95.0, "gpu.power_w": 700.0, "gpu.power_limit_w": 1200.0, "rack.flow_lpm": 96.0,
       "rack.power_w": 80_000.0}  # fmt: skip


class BeatingDesk(Desk):
    """A desk whose daemon ticks twice a second with the same readings, until others are given."""

    readings: ClassVar[dict[str, float]] = HOT
    book: AlarmBook | None = None

    def start(self) -> None:
        """On the daemon's loop: a job, a history, and the first tick."""
        self.pod.live.history = History(self.pod)
        self.pod.live.put_event(
            ev.JobStarted(id="j1", job="train-1", nodes=("lab/h/r1/node0", "lab/h/r1/node1"))
        )
        self.pod.tick(self.readings)
        self.beating = asyncio.get_running_loop().create_task(self.beat())

    async def beat(self) -> None:
        """Tick until the loop ends."""
        while True:
            await asyncio.sleep(0.5)
            self.pod.tick(self.readings)
            if self.book is not None:
                self.book.update(self.pod.twin.engine.findings.active.values(), self.pod.twin.now_ns)

    def keep_book(self) -> None:
        """On the daemon's loop: alarms in a book, with what people note on them."""
        self.book = self.pod.live.alarms = AlarmBook(self.folder / "book")
        self.book.update(self.pod.twin.engine.findings.active.values(), self.pod.twin.now_ns)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds on the daemon's loop."""
        for _ in range(200):
            if self.do(holds):
                return
            time.sleep(0.1)
        raise AssertionError("it does not come to hold")

    def told(self) -> list[dict[str, Any]]:
        """All that the journal holds of people: events with their authors, and notes; the oldest first."""

        def read() -> list[dict[str, Any]]:
            lines = [line.answer(self.pod.twin.site) for line in self.pod.live.lines]
            events = [line["body"]["event"] for line in lines if line and line["kind"] == "event"]
            return events + [{"kind": kind, **body} for kind, body in self.pod.notes]

        return self.do(read)


class History:
    """A history that knows the last minute of everything."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod

    async def query(self, key: str, names: list[str], *_: Any) -> dict[str, Any]:
        """Ten values of each."""
        now = self.pod.twin.now_ns
        return {"t_ns": [now - i * 6 * NS for i in range(10, 0, -1)], "damaged": 0,
                "values": {n: [50.0] * 10 for n in names}}  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BeatingDesk]:
    """A daemon whose GPUs are hot, with a job, behind a real socket."""
    with serving_aside(tmp_path, monkeypatch, BeatingDesk, more=[PowerCap()]) as made:
        made.do(made.start)
        yield made


def logged_in(browser: Browser, desk: BeatingDesk, role: str = "operator", **more: Any) -> Screen:
    screen = browser.open(desk.pod.url, **more)
    screen.log_in(desk.pod.secrets[role])
    return screen


@pytest.mark.long
def test_every_page_loads_clean_and_is_usable_by_all(
    browser: Browser, desk: BeatingDesk, server: Callable[..., Path]
) -> None:
    """No error, no report of the policy, no serious finding of axe; it fits a phone, in light and dark."""
    axe = (page_packages(server) / "node_modules" / "axe-core" / "axe.min.js").read_text()
    found: list[Any] = []
    for width, scheme, only in ((1366, "light", None), (390, "dark", ["color-contrast"])):
        screen = logged_in(browser, desk, width=width, scheme=scheme)
        screen.page.evaluate(axe)
        for path, words in PAGES.items():
            screen.go(path)
            screen.shows(words)
            over = screen.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert over <= 0, (path, width, over)
            assert screen.page.evaluate(SPILT) == [], (path, width)
            found += [[path, scheme, *one] for one in screen.page.evaluate(SERIOUS, only)]
        assert screen.reports() == []
        assert screen.complaints == []
    assert found == []


def test_it_shows_what_the_api_says(browser: Browser, desk: BeatingDesk) -> None:
    screen = logged_in(browser, desk, "viewer")
    screen.shows("1 critical alarm", "160 kW", "144 of 144 in service", "1 running")
    alarm = desk.do(lambda: desk.pod.live.engine.findings.active)
    for finding in alarm.values():
        screen.shows(finding.action)
    screen.shows("thermal_guard waits for approval to set the power cap of 144")
    tiles = screen.page.locator(".tile.r-critical").all_inner_texts()
    assert [("r1" in t, "80 kW" in t) for t in tiles][:1] == [(True, True)]
    assert len(tiles) == 2, "an alarm on many names the first; each rack of them is marked"
    # Another tick arrives by the stream, without anybody asking
    desk.readings = HOT | {"rack.power_w": 40_000.0, "gpu.temp_c": 60.0}  # type: ignore[misc]
    screen.shows("80 kW", "No alarms, but not everything reports")
    screen.page.keyboard.press("g")
    screen.page.keyboard.press("d")
    screen.page.wait_for_selector(".timeline li")
    screen.page.keyboard.press("/")
    screen.page.wait_for_selector(".finder input:focus")
    screen.page.keyboard.type("r2/node3")
    screen.page.wait_for_selector(".found a")
    screen.page.keyboard.press("Enter")
    screen.shows("Node r2/node3")


# Counts tones and notifications instead of making them
HEARD = """
window.tones = 0; window.notes = []; window.asked = 0;
const ramp = {setValueAtTime() {}, exponentialRampToValueAtTime() {}};
class Node_ { gain = ramp; frequency = {}; connect(x) { return x; } stop() {} start() { window.tones += 1; } }
window.AudioContext = class { state = "running"; currentTime = 0;
  createOscillator() { return new Node_(); } createGain() { return new Node_(); } };
window.Notification = class { constructor(title) { window.notes.push(title); } static permission = "default";
  static async requestPermission() { window.asked += 1; return this.permission = "granted"; } };
"""


def test_new_critical_alarms_ring_only_where_somebody_wants_it(browser: Browser, desk: BeatingDesk) -> None:
    desk.readings = HOT | {"gpu.temp_c": 60.0}  # type: ignore[misc]
    desk.until(lambda: not desk.pod.live.engine.findings.active)
    screen = browser.open(desk.pod.url)
    screen.page.add_init_script(HEARD)
    screen.log_in(desk.pod.secrets["viewer"])
    heard = "() => [window.tones, window.notes.length, window.asked]"

    def fever() -> None:
        desk.readings = HOT  # type: ignore[misc]
        screen.page.wait_for_selector(".nav .n-critical")
        desk.readings = HOT | {"gpu.temp_c": 60.0}  # type: ignore[misc]
        desk.until(lambda: not desk.pod.live.engine.findings.active)
        screen.page.wait_for_function("() => !document.querySelector('.nav .n-critical')")

    screen.go("")
    screen.shows("No alarms, but not everything reports")
    fever()
    assert screen.page.evaluate(heard) == [0, 0, 0], "off until somebody switches it on"
    screen.go("alarms")
    for name in ("Sound", "Notify"):
        screen.page.get_by_role("button", name=name, exact=True).click()
    assert screen.page.evaluate(heard) == [2, 0, 1], "it shows what it sounds like, and asks the browser"
    screen.go("")
    fever()
    assert screen.page.evaluate(heard) == [4, 1, 1]
    assert screen.complaints == []


def test_demand_and_today_stand_on_the_overview(browser: Browser, desk: BeatingDesk) -> None:
    screen = logged_in(browser, desk, "viewer")
    screen.shows("8 of 144 GPUs granted to jobs", "no load target", "never capped", "1 alarm, 1 critical")
    # 50 W of each rack since midnight
    screen.page.wait_for_selector(".figure:has-text('Today'):has-text('Wh')")


def test_what_is_not_in_service_is_not_well(browser: Browser, desk: BeatingDesk) -> None:
    """Nodes that are out, or wait for repair, and pumps of which one cannot carry the flow of both."""
    pumps = {"cdu.pump1_speed_pu": 0.74, "cdu.pump2_speed_pu": 0.74}
    desk.readings = HOT | pumps | {"gpu.temp_c": 60.0, "node.service_level_state": 1.0}  # type: ignore[misc]
    screen = logged_in(browser, desk, "viewer")
    screen.page.wait_for_selector(".tile.r-info:has-text('72 out')")
    desk.readings = desk.readings | {"node.service_level_state": 4.0}  # type: ignore[misc]
    screen.page.wait_for_selector(".tile.r-warning:has-text('72 out, need repair')")
    screen.go("cooling")
    screen.shows("at full speed it carries 68 % of the flow, 32 % less than now")
    desk.readings = desk.readings | {"cdu.pump1_speed_pu": 0.42, "cdu.pump2_speed_pu": 0.42}  # type: ignore[misc]
    screen.shows("the other one can carry all of the flow, at 84 % of its speed")
    desk.readings = desk.readings | {"cdu.pump1_speed_pu": 1.0, "cdu.pump2_speed_pu": 0.0}  # type: ignore[misc]
    screen.shows("stopped now: pump 2 stands still, the other one runs at 100 %")
    assert screen.complaints == []


def test_of_a_site_that_fell_silent_nothing_is_well(browser: Browser, desk: BeatingDesk) -> None:
    well = {"rack.power_w": 40_000.0, "gpu.temp_c": 60.0, "node.service_level_state": 0.0}
    told = desk.readings = HOT | well  # type: ignore[misc]
    desk.do(lambda: [desk.pod.tick(told) for _ in range(20)])  # so that their period is known
    screen = logged_in(browser, desk, "viewer")
    power, margin = (screen.page.locator(f".figure:has(.figure-label:text-is('{label}'))")
                     for label in ("Power", "Cooling margin"))  # fmt: skip
    screen.page.wait_for_selector(".figure:has-text('80 kW')")
    assert "unknown" not in margin.inner_text()
    desk.readings = {}  # type: ignore[misc]
    desk.do(lambda: [desk.pod.tick({}) for _ in range(120)])
    screen.page.wait_for_selector(".figure:has-text('2 racks silent')")
    assert all("unknown" in figure.inner_text() for figure in (power, margin))
    assert screen.page.locator(".tile.r-ok").count() == 0
    screen.go("e/node/lab/h/r1/node0")
    screen.page.wait_for_selector("tr:has-text('Service level') .stale:has-text('old')")
    assert screen.complaints == []


def test_racks_in_one_box_are_as_grave_as_the_gravest(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large site; and a load target beside them, with the load that it limits."""
    with serving_aside(tmp_path, monkeypatch, BeatingDesk, tree=two_racks(racks="r[1-70]")) as desk:
        desk.readings = HOT | {"gpu.temp_c": 60.0}  # type: ignore[misc]
        desk.do(desk.start)
        limit = ev.LoadTargetSet(id="t1", author="ada", target="grid", limit_w=6e6)
        desk.do(lambda: desk.pod.live.put_event(limit))
        screen = logged_in(browser, desk, "viewer")
        screen.go("power")
        screen.page.wait_for_selector(".place.p-ok:has-text('70 racks'):has-text('5.60 MW')")
        screen.page.wait_for_selector("tr:has-text('grid'):has-text('5.60 MW'):has-text('kept')")
        desk.readings = HOT  # type: ignore[misc]
        screen.page.wait_for_selector(".place.p-critical:has-text('70 racks'):has-text('70 critical')")
        assert screen.complaints == []


def test_it_says_whether_more_racks_fit(browser: Browser, desk: BeatingDesk) -> None:
    screen = logged_in(browser, desk, "viewer")
    screen.go("whatif")
    panel = screen.page.locator("section.panel", has_text="Do more racks fit?")
    panel.locator("[name=more]").fill("12")
    panel.locator("[name=more_feeder]").select_option("lab/h/a")
    panel.get_by_role("button", name="Ask", exact=True).click()
    screen.shows(
        "12 more racks on a", "by nameplate, while both sides live", "from the profiles of its racks"
    )
    # 300 kW, two racks of some 130 kW are there: no twelve more, whatever they draw
    marks = [t for t in panel.locator(".tag").all_inner_texts() if "fit" in t or "unknown" in t]
    assert len(marks) == 5
    assert not any(t.endswith(" fits") for t in marks)
    assert any("does not fit" in t for t in marks)
    assert screen.complaints == []


def test_a_key_counts_from_the_first_moment(browser: Browser, desk: BeatingDesk) -> None:
    screen = logged_in(browser, desk, "viewer")
    screen.page.reload()
    screen.page.wait_for_selector(".nav")
    screen.page.keyboard.press("/")
    screen.page.wait_for_selector(".finder input:focus")


def test_the_story_of_a_simulated_site_stands_on_every_page(browser: Browser, desk: BeatingDesk) -> None:
    """Marked as simulated, with its chapter and since when; nothing before it begins or after it ends."""
    live = desk.pod.live
    config = msgspec.structs.replace(live.loaded.config, simulated=True)
    live.loaded = replace(live.loaded, config=config)
    screen = logged_in(browser, desk)
    screen.shows("144 of 144 in service")
    assert screen.page.locator(".story").count() == 0
    live.story = {"chapter": 2, "of": 6, "title": "A GPU is about to fail", "text": "memory errors grow",
                  "since_ns": desk.pod.twin.now_ns}  # fmt: skip
    for path in ("", "alarms", "e/rack/lab/h/r1"):
        screen.go(path)
        screen.shows("2 of 6 · A GPU is about to fail — memory errors grow · ")
        assert screen.page.locator(".story .c-simulated").inner_text() == "simulated"
    live.story = None
    screen.page.wait_for_selector(".story", state="detached")


def test_what_people_do_lands_in_the_journal_with_name_and_reason(
    browser: Browser, desk: BeatingDesk
) -> None:
    screen = logged_in(browser, desk, "admin")
    screen.go("policies")
    screen.act("Hold", {"reason": "a look at the pumps"})
    screen.shows("Resume")
    screen.act("Resume", {"reason": "all is well"})
    screen.go("policies/thermal_guard")
    screen.act("Authority", {"authority": "act", "reason": "advised well",
                             "acknowledge": "thermal_guard may act on lab"}, ".policy")  # fmt: skip
    screen.go("e/rack/lab/h/r1")
    screen.act("Maintenance", {"for_s": "3600", "reason": "new hoses"})
    screen.act("Request", {"value": "700", "for_s": "900", "reason": "a quiet hour"})
    told = [json.dumps(body) for body in desk.told()]
    for words in ("a look at the pumps", "all is well", "advised well", "new hoses", "a quiet hour"):
        assert any(words in text and "admin-1" in text for text in told), words
    engine = desk.pod.live.engine
    assert desk.do(lambda: engine.intake.authority["thermal_guard"]) == "act"
    assert len(desk.do(lambda: engine.windows.events())) == 1
    assert screen.complaints == []


def test_an_alarm_is_acknowledged_shelved_and_taken_back(browser: Browser, desk: BeatingDesk) -> None:
    desk.do(desk.keep_book)
    screen = logged_in(browser, desk)
    screen.go("alarms")
    (alarm,) = desk.do(lambda: list(desk.book.alarms.values()) if desk.book else [])
    assert (alarm.severity, alarm.ack_author, alarm.state) == ("critical", "", "raised")
    screen.shows("not acknowledged")
    screen.act("Acknowledge", {"note": "on my way"})
    screen.shows("acknowledged by operator-1", "on my way")
    assert screen.page.get_by_role("button", name="Acknowledge", exact=True).count() == 0
    screen.act("Shelve", {"for_s": "900", "reason": "the pump is being changed"})
    screen.shows("No alarms stand")
    screen.page.get_by_role("button", name="Shelved 1", exact=True).click()
    screen.shows("shelved by operator-1 until", "the pump is being changed")
    screen.act("Unshelve", {})
    screen.page.get_by_role("button", name="Standing", exact=True).click()
    screen.shows("acknowledged by operator-1")
    notes = [n for n in desk.told() if n.get("kind") == "alarm"]
    assert [(n["what"], n["author"], n.get("note"), n.get("reason")) for n in notes] == [
        ("acknowledged", "operator-1", "on my way", None),
        ("shelved", "operator-1", None, "the pump is being changed"),
        ("unshelved", "operator-1", None, None),
    ]
    assert screen.complaints == []


def test_a_maintenance_window_is_opened_and_ended(browser: Browser, desk: BeatingDesk) -> None:
    screen = logged_in(browser, desk)
    screen.go("alarms")
    screen.act("Open a window", {"table": "node", "name": "r2/node0, r2/node1", "for_s": "14400",
                                 "reason": "new drives"})  # fmt: skip
    screen.shows("operator-1: new drives", "r2/node0, r2/node1")
    (window,) = desk.do(lambda: desk.pod.live.engine.windows.events())
    assert (window.author, window.reason, window.table) == ("operator-1", "new drives", "node")
    assert window.names == ("lab/h/r2/node0", "lab/h/r2/node1")
    assert 14390 < (window.until_ns - desk.pod.twin.now_ns) / NS <= 14400
    screen.act("End", {})
    screen.shows("No maintenance window is open.")
    assert not desk.do(lambda: desk.pod.live.engine.windows.events())
    ended = next(e for e in desk.told() if e["type"] == "MaintenanceEnded")
    assert (ended["author"], ended["window"]) == ("operator-1", window.id)
    assert screen.complaints == []


def test_a_proposal_is_approved_and_a_release_is_resumed(browser: Browser, desk: BeatingDesk) -> None:
    engine = desk.pod.live.engine
    screen = logged_in(browser, desk, "admin")
    screen.go("policies")
    screen.shows("thermal_guard would set the power cap of 144 GPUs")
    assert not desk.do(lambda: engine.arbiter.leases["gpu.power_cap_w"].running().any())
    screen.act("Approve", {"for_s": "900", "reason": "the coolant is hot"})
    screen.shows("admin-1 lets thermal_guard set power cap until")
    desk.until(lambda: engine.arbiter.leases["gpu.power_cap_w"].running().sum() == 144)
    screen.act("Withdraw", {})
    screen.shows("thermal_guard would set the power cap of 144 GPUs")
    screen.act("Release", {"reason": "the caps are wrong"})
    screen.shows("racktwin sends no command until somebody resumes.")
    assert desk.do(lambda: engine.arbiter.mode) == "released"
    screen.act("Resume", {"reason": "settled"})
    screen.shows("Policies send commands within their authority")
    assert desk.do(lambda: engine.arbiter.mode) == "normal"
    said = [(t.get("type", t.get("kind")), t["author"], t.get("reason")) for t in desk.told()
            if t.get("author")]  # fmt: skip
    assert said == [
        ("Approved", "admin-1", "the coolant is hot"),
        ("ApprovalWithdrawn", "admin-1", None),
        ("Released", "admin-1", "the caps are wrong"),
        ("Resumed", "admin-1", None),
        ("resumed", "admin-1", "settled"),
    ]
    assert screen.complaints == []


def test_new_lines_of_the_site_file_are_approved_with_a_reason(
    browser: Browser, desk: BeatingDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very lines stand on the page; approved, they are in the file."""
    path = desk.pod.folder / "site.yaml"
    path.write_text(BLOCK)
    desk.pod.live.describe = lambda: description_of(grown())

    async def reload(_: str) -> list[str]:
        return []

    desk.pod.live.reload = reload
    screen = logged_in(browser, desk, role="admin")
    screen.go("setup")
    screen.shows("8 new lines for")
    shown = screen.page.locator("pre.diff").inner_text()
    assert "+      - {name: r4, profile: gb200-nvl72}" in shown
    screen.page.get_by_label("Profile of new racks").select_option("none")
    screen.page.get_by_text("rack r3: nothing says what stands in it").wait_for()
    assert "+      - {name: r4}" in screen.page.locator("pre.diff").inner_text()
    monkeypatch.setattr("twin.api.page.site_changes._is_writable", lambda _: False)
    screen.page.get_by_role("button", name="Look again").click()
    screen.page.get_by_text("The daemon's service has no write access to this file").wait_for()
    assert screen.page.get_by_role("button", name="Approve", exact=True).count() == 0
    monkeypatch.undo()
    screen.page.get_by_role("button", name="Look again").click()
    screen.page.get_by_role("button", name="Approve", exact=True).click()
    screen.page.get_by_label("Reason").fill("delivered today")
    screen.page.get_by_role("dialog").get_by_role("button", name="Approve").click()
    screen.page.get_by_text("The file lists everything that describes itself on the bus").wait_for()
    assert "{name: r4}" in path.read_text()
    told = [b for b in desk.told() if b.get("kind") == "site_file"]
    said = [(b["author"], b["reason"], len(b["lines"])) for b in told]
    assert said == [("admin-1", "delivered today", 8)]
    assert screen.complaints == []


def test_what_if_we_had_not_is_asked_of_a_command(browser: Browser, desk: BeatingDesk) -> None:
    """It begins before the tick of that command; a daemon that records no run says why it cannot."""
    desk.do(lambda: desk.pod.live.engine.intake.authority.update(thermal_guard="act"))
    desk.until(lambda: any(line.kind == "command" for line in desk.pod.live.lines))
    tick = desk.do(lambda: next(line.tick for line in desk.pod.live.lines if line.kind == "command"))
    screen = logged_in(browser, desk)
    screen.go(f"decisions/{quote('kind=command', safe='')}")
    bodies: list[dict[str, Any]] = []
    screen.page.on("request", lambda r: r.method == "POST" and bodies.append(json.loads(r.post_data)))
    screen.page.locator(".timeline .line").last.click()
    screen.page.get_by_role("button", name="What if we had not?", exact=True).click()
    screen.shows("this daemon records no run to go back in")
    assert [(b["before"], b.keys()) for b in bodies] == [(tick, {"name", "before", "horizon_s"})]
    assert all("409" in c for c in screen.complaints)
    viewer = logged_in(browser, desk, "viewer")
    viewer.go(f"decisions/{quote('kind=command', safe='')}")
    viewer.page.locator(".timeline .line").last.click()
    button = viewer.page.get_by_role("button", name="What if we had not?", exact=True)
    assert button.get_attribute("aria-disabled") == "true"


def test_more_racks_are_simulated_and_the_limits_that_bind_are_named(
    browser: Browser, desk: BeatingDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form starts the process with its values; the page shows the answer, the limits first."""
    (desk.pod.folder / "site.yaml").write_text(BLOCK)
    scenarios: list[dict[str, Any]] = []

    async def asked(folder: Path, *_: Any) -> dict[str, Any]:
        scenarios.append(json.loads((folder / "scenario.yaml").read_text()))
        limit = {"limit": "the budget of a feeder", "entity": "lab/h/a", "used_pu": 1.2, "reached_s": 3.0,
                 "text": "the budget of a feeder: lab/h/a, 360 kW of 300 kW; reached after 3 s"}  # fmt: skip
        arm = {"it_energy_kwh": 5.0, "faults": [], "limits": [limit]}
        curve = {"time_s": [1.0, 2.0], "it_power_kw": [300.0, 360.0]}
        return {"from": {"now_ns": 1}, "horizon_s": 600, "authority": {}, "warnings": [], "not_carried": [],
                "cases": [{"policies": arm, "nothing": arm | {"limits": []}}],
                "curves": {"policies": curve, "nothing": curve}}  # fmt: skip

    monkeypatch.setattr("twin.api.page.simulations._whatif_result", asked)
    screen = logged_in(browser, desk)
    screen.go("whatif")
    screen.page.get_by_role("button", name="More racks", exact=True).click()
    screen.shows("CDUs, loops and feeders keep their capacity")
    screen.page.locator("[name=count]").fill("12")
    screen.page.locator("[name=entity]").select_option("lab/h/r2")
    screen.page.locator("[name=profile]").select_option("gb300-nvl72")
    screen.page.locator("[name=load]").select_option("1")
    screen.page.get_by_role("button", name="Run it", exact=True).click()
    screen.shows("What binds first", "The budget of a feeder: a, 360 kW of 300 kW; reached after 3 s")
    assert [s["more_racks"] for s in scenarios] == [
        {"count": 12, "beside": "lab/h/r2", "profile": "gb300-nvl72", "load_pu": 1.0}]  # fmt: skip
    screen.shows("12 more racks beside r2, gb300-nvl72")
    assert screen.complaints == []


def test_a_role_that_may_not_cannot_and_a_wrong_sentence_is_refused(
    browser: Browser, desk: BeatingDesk
) -> None:
    viewer = logged_in(browser, desk, "viewer")
    viewer.go("policies")
    button = viewer.page.get_by_role("button", name="Hold", exact=True)
    assert button.get_attribute("aria-disabled") == "true"
    button.click(force=True)
    assert viewer.page.locator("dialog[open]").count() == 0
    admin = logged_in(browser, desk, "admin")
    admin.go("policies/thermal_guard")
    admin.page.locator(".policy").get_by_role("button", name="Authority").click()
    dialog = admin.page.locator("dialog[open]")
    dialog.locator("[name=authority]").select_option("act")
    dialog.locator("[name=reason]").fill("well")
    dialog.locator("[name=acknowledge]").fill("yes")
    dialog.locator("button[type=submit]").click()
    admin.shows("expected exactly")
    assert desk.do(lambda: desk.pod.live.engine.intake.authority["thermal_guard"]) == "approve"


def test_names_from_outside_are_text(browser: Browser, desk: BeatingDesk) -> None:
    """Whatever jobs, telemetry and people may fill is shown as they wrote it, and never as markup."""
    pod = desk.pod

    def fill() -> None:
        events = (
            ev.JobStarted(id="j2", job=f"job{HOSTILE}", nodes=("lab/h/r2/node0",), tenant=HOSTILE),
            ev.MaintenanceBegun(id="m1", author=HOSTILE, table="rack", names=("lab/h/r2",), reason=HOSTILE,
                                until_ns=pod.twin.now_ns + 3600 * NS),
            ev.OperatorRequest(id="r1", author=HOSTILE, control="gpu.power_cap_w", lo=200.0, hi=900.0,
                               names=("lab/h/r1/node0/gpu0",), reason=HOSTILE, expires_ns=0),
        )  # fmt: skip
        for event in events:
            pod.live.put_event(event)
        pod.live.parts[HOSTILE] = type(pod.live.parts["mqtt"])(HOSTILE, "sink", "waiting", 1, 0, HOSTILE)
        pod.live.counts[HOSTILE] = 3
        pod.tick({"gpu.temp_c": 95.0})
        for line in list(pod.live.lines):
            if line.kind == "finding":
                pod.live.lines.append(line)

    desk.do(fill)
    screen = logged_in(browser, desk, "admin")
    screen.shows("<img src=x onerror=alert(1)>")
    for path in (*PAGES, "e/job/lab/job1"):
        screen.go(path)
        screen.page.wait_for_timeout(150)
        assert screen.page.locator("main img, main script, [onerror]").count() == 0, path
    screen.go("jobs")
    screen.shows("job<img src=x onerror=alert(1)>")
    screen.go("alarms")
    screen.shows("<script>alert(2)</script>")
    screen.go("setup")
    screen.shows("<img src=x onerror=alert(1)>")
    assert screen.dialogs == []
    assert screen.reports() == []


# Shows the cleared alarms, which asks the daemon, unless the page was refused and wants a token already
CLEARED_OR_LOGIN = """() => {
  const tab = [...document.querySelectorAll("main button")].find((b) => b.textContent === "Cleared");
  tab?.click();
  return Boolean(tab) || document.body.innerText.includes("Enter a token");
}"""


@pytest.mark.long
def test_it_survives_a_restart_and_asks_again_when_the_token_is_gone(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_aside(tmp_path, monkeypatch, BeatingDesk) as desk:
        desk.do(desk.start)
        screen = logged_in(browser, desk, "viewer")
        screen.shows("144 of 144", "1 critical alarm")
        secrets, port = desk.pod.secrets, int(desk.pod.url.rpartition(":")[2])
    screen.page.locator(".banner.shown", has_text="No update").wait_for()
    # The tokens outlive the daemon
    monkeypatch.setattr("tests.support.in_process_daemon.add_token", lambda path, name, role: secrets[role])
    with serving_aside(tmp_path, monkeypatch, BeatingDesk, api=Api(port=port)) as again:
        pod = again.pod
        again.readings = HOT | {"gpu.temp_c": 60.0}  # type: ignore[misc]
        again.do(again.start)
        screen.page.wait_for_selector(".banner:not(.shown)", state="attached")
        screen.shows("No alarms, but not everything reports")
        again.do(lambda: (revoke_token(pod.tokens_file, "viewer-1"), pod.tokens.reload()))
        screen.go("alarms")
        screen.page.wait_for_function(CLEARED_OR_LOGIN)
        screen.shows("Enter a token", "unknown here or has expired")
        assert screen.page.evaluate("sessionStorage.length") == 0
