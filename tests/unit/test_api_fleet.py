"""`GET /api/v1/fleet`, `racktwin fleet`: halls at the hub, budgets people narrow, tokens of some halls."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policies import BY_NAME
from tests.support.fleets import GUARANTEED_W, fleet_tree
from tests.support.in_process_daemon import Desk, Pod, serve, serving_aside
from tests.unit.test_api_access import concrete
from twin.api.public import ROUTES
from twin.api.tokens import add_token, read_tokens
from twin.catalogue import ConfigError
from twin.config import FleetSettings
from twin.config.fleet import fleet_problems
from twin.site import HALL_BUDGET

SECRET_W = 123_400.0  # that hall-b draws: nowhere in what a token of hall-a reads
TOLD: dict[str, Any] = {
    "rack.hall_power_w": [300e3, SECRET_W], "rack.hall_demand_w": [900e3, 500e3],
    "rack.hall_budget_readback_w": [400e3, 300e3], "rack.hall_guaranteed_w": [400e3, 300e3],
    "rack.hall_gpu_count": [1000.0, 777.0], "rack.hall_gpu_out_count": [3.0, 55.0],
    "rack.hall_alarm_critical_count": [1.0, 44.0], "rack.hall_alarm_warning_count": [0.0, 33.0],
    "rack.hall_alarm_info_count": [0.0, 0.0], "rack.hall_heard_pu": [1.0, 0.9], "feeder.power_w": [3e5, 3e5],
}  # fmt: skip
HUB: dict[str, Any] = {"tree": fleet_tree(), "more": [BY_NAME["hall_budgets"](failover=False)]}


def fill(pod: Pod, seconds: int = 8, **more: Any) -> None:
    """Seconds in which both halls tell, and take what they are lent."""
    told = TOLD | {k.replace("__", "."): v for k, v in more.items()}
    for _ in range(seconds):
        lent_w = pod.twin.lease(HALL_BUDGET).tolist()
        pod.tick(told | {"rack.hall_budget_readback_w": lent_w, "rack.hall_grant_age_s": [0.0, 0.0]})


def of(tree: dict[str, Any], hall: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in tree["halls"] if row["hall"] == hall)
    return found


def said_of(tree: Any) -> Iterator[str]:
    """All texts of an answer for people; identities and keys are left out."""
    if isinstance(tree, dict):
        tree = [value for key, value in tree.items() if key not in ("id", "table", "control", "marks")]
    if isinstance(tree, list):
        for value in tree:
            yield from said_of(value)
    elif isinstance(tree, str):
        yield tree


def test_no_text_of_a_hub_calls_a_hall_a_rack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_aside(tmp_path, monkeypatch, **HUB) as desk:
        silence = {key: float("nan") for key in TOLD if key.startswith("rack")}

        def suffer() -> None:
            fill(desk.pod)
            for told, seconds in ((silence, 30), (TOLD | {"rack.hall_budget_readback_w": 9e5}, 60)):
                for _ in range(seconds):
                    desk.pod.tick(told | {"feeder.energised_state": [0.0, 1.0]})

        desk.do(suffer)
        assert desk.run("status") == 0
        texts = [capsys.readouterr().out]
        for path in ("alarms", "decisions?limit=300", "explain/hall_budgets", "summary"):
            tree = asyncio.run(desk.pod.ask("GET", f"/api/v1/{path}"))[1]
            texts += said_of(tree)
        for part in ("halls do not follow", "No data from", " of 2 halls "):
            assert any(part in text for text in texts), part
        assert [
            text for text in texts if re.search(r"\bracks?\b(?![._/])", text) and "/feeder+" not in text
        ] == []


def test_each_hall_has_its_figures_and_a_silent_one_is_unknown(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        fill(pod)
        _, tree = await pod.ask("GET", "/api/v1/fleet")
        a = of(tree, "hall-a")
        assert (a["power_w"], a["budget_w"], a["headroom_w"], a["priority"]) == (300e3, 1e6, 700e3, 2)
        assert (a["gpu_count"], a["gpu_out_count"], a["alarms"]["critical"]) == (1000, 3, 1)
        assert (a["heard"], a["why"]) == (True, "its maximum")
        feeder = tree["feeders"][0]
        assert (feeder["side"], feeder["lost"], feeder["power_w"]) == ("A", False, 3e5)
        assert [(p["hall"], p["part_w"]) for p in feeder["parts"]] == [("hall-a", 5e5), ("hall-b", 5e5)]
        assert feeder["left_w"] == pytest.approx(2e5)
        for _ in range(20):
            pod.tick({k: [v[0], float("nan")] for k, v in TOLD.items() if k.startswith("rack")})
        _, tree = await pod.ask("GET", "/api/v1/fleet")
        b = of(tree, "hall-b")
        assert (b["heard"], set(b["alarms"].values()), b["budget_w"]) == (False, {None}, GUARANTEED_W[1])
        assert [b[k] for k in ("power_w", "headroom_w", "demand_w", "gpu_count", "gpu_out_count")] == [
            None
        ] * 5
        assert b["why"].startswith("silent for 20 s: its guaranteed share alone; counts with 1,000.0 kW")

    serve(tmp_path, check, **HUB)


def test_a_hall_that_tells_no_power_is_not_called_silent(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        fill(pod)
        fill(pod, 20, rack__hall_power_w=[300e3, float("nan")])
        _, tree = await pod.ask("GET", "/api/v1/fleet")
        b = of(tree, "hall-b")
        assert (b["heard"], b["power_w"]) == (False, None)
        assert b["why"].startswith(
            "reports no power for 20 s, but reports its state: its guaranteed share alone"
        )

    serve(tmp_path, check, **HUB)


def test_a_lost_feeder_is_named_with_the_halls_that_give_way(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        fill(pod)
        fill(pod, 3, feeder__energised_state=[0.0, 1.0])
        _, tree = await pod.ask("GET", "/api/v1/fleet")
        a, b = (of(tree, f"hall-{name}") for name in "ab")
        assert [f["lost"] for f in tree["feeders"]] == [False, True]
        assert (a["budget_w"], b["budget_w"]) == (900e3, 300e3)
        assert a["why"].startswith(
            "fleet/campus/fb is lost; fleet/campus/fa is full: by priority 2 and demand"
        )
        assert [p["part_w"] for p in tree["feeders"][0]["parts"]] == [900e3, 300e3]
        assert tree["feeders"][1]["parts"] == []

    serve(tmp_path, check, **HUB)


def test_people_narrow_a_budget_and_never_lend(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        fill(pod)
        ask = {"control": HALL_BUDGET, "names": ["hall-a"], "reason": "hot day", "for_s": 60.0}
        for wrong in ({"want": 1e6}, {"lo": 5e5, "hi": 6e5}, {}):
            status, said = await pod.ask("POST", "/api/v1/requests", "operator", ask | wrong)
            assert (status, "expected" in said["error"]) == (400, True)
        status, said = await pod.ask("POST", "/api/v1/requests", "operator", ask | {"hi": 1e5})
        assert (status, "outside" in said["error"]) == (400, True), "the guaranteed share stays"
        assert (await pod.ask("POST", "/api/v1/requests", "operator", ask | {"hi": 600e3}))[0] == 200
        fill(pod, 3)
        assert pod.twin.lease(HALL_BUDGET).tolist() == [600e3, 1e6]
        a = of((await pod.ask("GET", "/api/v1/fleet"))[1], "hall-a")
        assert (a["why"], a["asked_w"]) == ("people ask for at most 600.0 kW", 600e3)
        hold = a["holds"][0]
        assert (hold["author"], hold["budget_w"], hold["reason"]) == ("operator-1", 600e3, "hot day")
        fill(pod, 62)
        assert pod.twin.lease(HALL_BUDGET).tolist() == [1e6, 1e6], "its time is over"

    serve(tmp_path, check, **HUB)


def test_what_people_keep_from_a_hall_is_lent_to_others(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        fill(pod, 20)
        assert pod.twin.lease(HALL_BUDGET).tolist() == [900e3, 300e3]
        ask = {"control": HALL_BUDGET, "names": ["hall-a"], "reason": "x", "for_s": 600.0, "hi": 500e3}
        assert (await pod.ask("POST", "/api/v1/requests", "operator", ask))[0] == 200
        fill(pod, 20)
        assert pod.twin.lease(HALL_BUDGET).tolist() == [500e3, 700e3]

    serve(tmp_path, check, tree=fleet_tree(), more=[BY_NAME["hall_budgets"]()])


def test_a_request_alone_lends_nothing_while_no_split_is_in_force(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.tick(TOLD | {"rack.hall_budget_readback_w": [1e6, 1e6]})
        ask = {"control": HALL_BUDGET, "names": ["hall-a"], "reason": "x", "for_s": 600.0, "hi": 900e3}
        assert (await pod.ask("POST", "/api/v1/requests", "operator", ask))[0] == 200
        pod.tick(TOLD | {"rack.hall_budget_readback_w": [1e6, 1e6]})
        assert pod.twin.lease(HALL_BUDGET)[0] == GUARANTEED_W[0]

    serve(tmp_path, check, tree=fleet_tree())


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_a_token_of_one_hall_reads_nothing_of_another(tmp_path: Path, role: Any) -> None:
    async def check(pod: Pod) -> None:
        pod.secrets["a"] = add_token(pod.tokens_file, "a-1", role, halls=("hall-a",))
        pod.tokens.reload()
        fill(pod)
        ask = {"control": HALL_BUDGET, "names": ["hall-b"], "reason": "secret", "for_s": 60.0, "hi": 9e5}
        _, made = await pod.ask("POST", "/api/v1/requests", "operator", ask)
        seen = list[str]()
        for route in ROUTES:
            own = concrete(route).replace("lab/h/r1", "fleet/campus/hall-a")
            for path in (own, own.replace("hall-a", "hall-b").replace("nobody", made["id"])):
                status, said = await pod.ask(route.method, path, "a", b"{}")
                if route.path.endswith("/whoami"):
                    del said["created"]  # a time of day has any two digits
                passed = route.role is None or (route.path, status) in OPEN
                assert status == 403 or passed, (route.method, path, status, said)
                if route.role is not None:
                    seen.append(json.dumps(said))
        for query in (
            "/history?signal=rack.hall_power_w&name=hall-b",
            "/explain/hall_budgets/hall-b",
            "/fleet",
        ):
            seen.append(json.dumps((await pod.ask("GET", f"/api/v1{query}", "a"))[1]))
        for names in (["hall-b"], ["hall-a", "hall-b"], ["campus"], []):
            status, said = await pod.ask("POST", "/api/v1/requests", "a", ask | {"names": names})
            assert status == 403
            seen.append(json.dumps(said))
        told = " ".join(seen)
        assert "hall-a" in told
        for secret in ("hall-b", "123400", "777", "55", "44", "secret", made["id"]):
            assert secret not in told.replace("hall-budgets", ""), secret
        _, tree = await pod.ask("GET", "/api/v1/fleet", "a")
        assert [row["hall"] for row in tree["halls"]] == tree["only"] == ["hall-a"]
        assert [(f["held_w"], f["left_w"], f["power_w"]) for f in tree["feeders"]] == [(None, None, None)] * 2
        assert len([why for _, note in pod.notes if (why := note.get("why")) == "not its own hall"]) >= 1

    serve(tmp_path, check, **HUB)


OPEN = {("/api/v1/fleet", 200), ("/api/v1/whoami", 200), ("/api/v1/requests", 400)}


def test_an_operator_of_one_hall_holds_and_releases_it(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.secrets["a"] = add_token(pod.tokens_file, "a-1", "operator", halls=("hall-a",))
        pod.tokens.reload()
        fill(pod)
        ask = {"control": HALL_BUDGET, "names": ["hall-a"], "reason": "x", "for_s": 60.0, "hi": 6e5}
        assert (await pod.ask("POST", "/api/v1/requests", "a", ask | {"control": "rack.power_w"}))[0] in (
            403,
            404,
        )
        status, made = await pod.ask("POST", "/api/v1/requests", "a", ask)
        assert status == 200
        assert of((await pod.ask("GET", "/api/v1/fleet", "a"))[1], "hall-a")["holds"][0]["author"] == "a-1"
        assert (await pod.ask("DELETE", f"/api/v1/requests/{made['id']}", "a"))[0] == 200
        assert of((await pod.ask("GET", "/api/v1/fleet", "a"))[1], "hall-a")["holds"] == []

    serve(tmp_path, check, **HUB)


def test_a_token_of_halls_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    for role, halls in (("admin", ("hall-a",)), ("job", ("hall-a",)), ("viewer", ("hall a",))):
        with pytest.raises(ConfigError, match=r"halls: .*expected"):
            add_token(path, "x", role, halls=halls)  # type: ignore[arg-type]
    add_token(path, "x", "viewer", halls=("hall-a", "hall-b"))
    assert read_tokens(path)[0].halls == ("hall-a", "hall-b")
    path.write_text(path.read_text().replace("viewer", "admin"))
    with pytest.raises(ConfigError, match=r"\$.tokens\[0\].halls"):
        read_tokens(path)


@pytest.mark.parametrize(
    "url", ["javascript:alert(1)", "//x", "https://u:p@x", "https://x /", "http:///x", "https://x\\@y", "x"]
)
def test_a_page_that_is_no_address_of_a_page_is_refused(url: str) -> None:
    assert "$.fleet.pages.hall-a" in " ".join(fleet_problems(FleetSettings(pages={"hall-a": url})))
    assert fleet_problems(FleetSettings(pages={"hall-a": "https://twin-a:8077/"})) == []


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with serving_aside(tmp_path, monkeypatch, columns=160, **HUB) as made:
        yield made


def test_the_commands_show_hold_and_release(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> str:
        return " ".join(capsys.readouterr().out.split())

    desk.do(lambda: fill(desk.pod))
    assert desk.run("fleet", "status", role="viewer") == 0
    text = said()
    assert "hall-a 2 300.0 1,000 700.0 400.0 900.0 1,000 3 1 critical 0 s ago" in text, text
    assert "fleet/campus/fa side A may carry 1,200 kW; halls may hold 1,000 kW, 200.0 kW left" in text
    assert desk.run("fleet", "budgets", role="viewer") == 0
    assert "hall-b 500.0 150.0 its maximum" in said()
    assert desk.run("fleet", "hold", "hall-a", "--budget", "700kW", "--for", "2h", "--reason", "hot day") == 0
    assert desk.run("fleet", "hold", "hall-b", "--for", "2h", "--reason", "as it is") == 0
    said()
    assert desk.run("fleet", "status", "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    assert [row["holds"][0]["budget_w"] for row in tree["halls"]] == [700e3, 1e6]
    assert desk.run("fleet", "status") == 0
    assert "hall-a is held to 700.0 kW by operator-1: hot day" in said()
    assert desk.run("fleet", "release", "hall-a") == 0
    assert desk.run("fleet", "release", "hall-a") != 0
    assert desk.run("fleet", "hold", "hall-x", "--for", "2h", "--reason", "x") != 0
    assert "expected one of hall-a, hall-b" in " ".join(capsys.readouterr().err.split())


def test_a_release_says_what_still_holds_a_hall(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.do(lambda: fill(desk.pod))
    both = ("control", "request", HALL_BUDGET, "hall-a", "hall-b")
    assert desk.run(*both, "--hi", "800000", "--for", "2h", "--reason", "hot day") == 0
    assert desk.run("fleet", "hold", "hall-a", "--budget", "700kW", "--for", "2h", "--reason", "x") == 0
    capsys.readouterr()
    assert desk.run("fleet", "release", "hall-a") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "still held to 800.0 kW by operator-1" in said
    assert "racktwin control withdraw" in said
    assert desk.run("fleet", "release", "hall-a") != 0


def test_a_token_of_a_hall_that_the_hub_does_not_have_is_told_so(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.secrets["a"] = add_token(pod.tokens_file, "a-1", "viewer", halls=("hall-q",))
        pod.tokens.reload()
        fill(pod)
        status, said = await pod.ask("GET", "/api/v1/fleet", "a")
        assert status == 404
        assert "the token a-1 is for hall-q, not for halls of this hub" in said["error"]
        assert "hall-a" not in said["error"]

    serve(tmp_path, check, **HUB)


def test_a_daemon_that_is_no_hub_says_so(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        status, said = await pod.ask("GET", "/api/v1/fleet")
        assert (status, "guaranteed_w" in said["error"]) == (404, True)

    serve(tmp_path, check)
