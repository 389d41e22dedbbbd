"""`racktwin power`: what people read at night about headroom, caps, their price, and load targets."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from policies.power_capping.explain import PLACE_COLUMNS, first_words
from tests.support.capped_pod import Rig, guards, job, lab
from tests.support.in_process_daemon import Desk, serving_aside
from twin.cli.arguments import instant_ns
from twin.cli.grammar import watts
from twin.cli.operate import kw, show_explanation
from twin.contracts import Explanation, Forecast, Sentence, table_of

NASTY = "\x1b[31m[bold]evil\u202e"


class PowerDesk(Desk):
    """A desk whose pod runs in a closed loop."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rig = Rig(self.pod)

    def drive(self, *words: Any) -> None:
        """Seconds on the daemon's loop."""
        self.do(lambda: self.rig.run(*words))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PowerDesk]:
    more = {"tree": lab(), "more": guards()}
    with serving_aside(tmp_path, monkeypatch, PowerDesk, columns=100, **more) as desk:
        yield desk


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out = capsys.readouterr()
    text = out.out + out.err
    assert "\x1b" not in text
    assert "\ufffd" not in text
    return " ".join(text.split())


def test_headroom_and_why_and_cost_in_lines(desk: PowerDesk, capsys: pytest.CaptureFixture[str]) -> None:
    few_w = np.where(np.arange(144) < 60, 1100.0, 100.0)  # seen without caps: what these cost is known
    desk.drive(30, few_w, job("pre", range(15)), job("chat", range(18, 30), kind="inference"))
    desk.drive(60, 1100.0)
    assert desk.run("power", role="viewer") == 0
    text = said(capsys)
    for expected in ("power_guard act", "power_cap act", "if the other side fails", "of 144 GPUs (",
                     "lab/h/a feeder 150", "lab/h/r1 rack 132", "site site",
                     "when the first one starts"):  # fmt: skip
        assert expected in text, (expected, text)
    assert desk.run("power", "why", "r1") == 0
    text = said(capsys)
    for expected in ("rack lab/h/r1: ", "of 72 GPUs capped", "GPUs by power_cap", "usual pre", "idle",
                     "kW more at lab/h/",
                     "if the other side fails; it may carry 150.0 kW (site file, budget_w)"):  # fmt: skip
        assert expected in text, (expected, text)
    assert desk.run("power", "cost", "--back", "1h") == 0
    text = said(capsys)
    for expected in ("caps of the last 1 h", "by job", "pre", "waited_for", "straight line"):
        assert expected in text, (expected, text)
    assert desk.run("power", "fit", "a") == 0
    assert "by nameplate alone: no history is kept" in said(capsys)
    assert desk.run("power", "--json") == 0
    assert json.loads(capsys.readouterr().out)["first"]["kind"] == "feeder"
    assert desk.run("power", "--kind", "pump") == 1
    assert "kind: 'pump' is unknown" in said(capsys)
    assert desk.run("power", "why", "nowhere") == 1
    assert "no entity or job nowhere" in said(capsys)


def test_load_targets_are_set_shown_and_taken_back(
    desk: PowerDesk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.drive(3, 300.0)
    assert desk.run("power", "targets") == 0
    assert "no load target, current or planned" in said(capsys)
    assert desk.run("power", "target", "night", "--limit", "500kW", "--until", "3h", role="viewer") == 1
    assert "operator" in said(capsys)
    given = ("--limit", "500kW", "--until", "3h", "--kind", "utility")
    assert desk.run("power", "target", "night", *given) == 0
    assert "load target night of 500.0 kW holds from now until" in said(capsys)
    assert desk.run("power", "target", "low", "--limit", "10kW", "--feeder", "a", "--feeder", "b") == 0
    text = said(capsys)
    for expected in ("of 10.0 kW holds from now until it is withdrawn", "feeder h/a draws", "kW have to go",
                     "feeder h/b draws", "`racktwin power withdraw low` ends the target"):  # fmt: skip
        assert expected in text, (expected, text)
    assert desk.run("power", "target", "later", "--limit", "1MW", "--from", "+1h") == 0
    desk.drive(2)
    capsys.readouterr()
    assert desk.run("power", "targets") == 0
    text = said(capsys)
    for expected in ("kept night 500.0", "site from now utility", "EXCEEDED low 10.0",
                     "h/a from now operator", "h/b until withdrawn operator-1"):  # fmt: skip
        assert expected in text, (expected, text)
    held = {t.name: t for t in desk.pod.twin.engine.intake.load_targets.current(desk.pod.twin.site)}
    assert held["night"].limit_w == 500_000
    assert held["low"].feeders is not None
    assert desk.run("power", "withdraw", "night") == 0
    assert "load target night is withdrawn" in said(capsys)
    assert desk.run("power", "withdraw", "night") == 1
    assert "no load target night" in said(capsys)


def test_any_load_is_beyond_a_limit_of_nothing(desk: PowerDesk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.drive(3, 300.0)
    assert desk.run("power", "target", "dark", "--limit", "0kW", "--until", "06:00") == 0
    assert "the site draws" in said(capsys)
    desk.drive(10, 300.0)
    assert desk.run("power") == 0
    text = said(capsys)
    for expected in ("now: the site is beyond its limit, ", "above load target dark of 0.0 kW", "> 999 %"):
        assert expected in text, (expected, text)
    assert desk.run("power", "why", "site") == 0
    text = said(capsys)
    for expected in ("the demand of the site is more than it may draw now", "racktwin power withdraw dark"):
        assert expected in text, (expected, text)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--limit", "1kW", "--until", "soon"), "--until 'soon': expected a time such as"),
        (("--limit", "1kW", "--from", "x"), "--from 'x': expected a time such as"),
        (("--limit", "1kW", "--feeder", "z"), "no feeder z"),
        (
            ("--limit", "1kW", "--until", "2001-01-01T00:00"),
            "the target ends before it begins; the daemon's clock is 20",
        ),
        (("--limit", "1kW", "--until", "25:00"), "--until '25:00': expected a time such as 06:00"),
    ],
)
def test_what_cannot_be_so_is_refused(
    desk: PowerDesk, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    assert desk.run("power", "target", "t", *words) == 1
    assert why in said(capsys)
    assert desk.pod.twin.engine.intake.load_targets.current(desk.pod.twin.site) == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [("500kW", 5e5), ("1.2MW", 1.2e6), ("1.2 MW", 1.2e6), ("750000w", 7.5e5), ("800 W", 800.0),
     ("0kW", 0.0), ("2k", 2e3)],
)  # fmt: skip
def test_powers_as_people_write_them(text: str, value: float) -> None:
    assert watts(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "kW", "-5kW", "5 kV", "5kWh", "1e99W", "five", "1,2MW", "500", "0", "1e3"]
)
def test_what_is_no_power(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a power"):
        watts(text)


@given(st.integers(0, 4 * 10**9), st.integers(0, 23), st.integers(0, 59))
def test_an_hour_of_the_day_is_the_next_one(after_s: int, hour: int, minute: int) -> None:
    found = instant_ns("--until", f"{hour}:{minute:02}", after_s * 10**9 + 5)
    assert 0 < found - after_s * 10**9 <= 86_400 * 10**9
    assert found // 10**9 % 86_400 == hour * 3600 + minute * 60


@given(st.floats(-1e9, 1e9))
def test_powers_are_short(value: float) -> None:
    assert len(kw(value)) <= 12


def test_a_hundred_columns_are_enough_and_nothing_from_outside_is_markup() -> None:
    row: dict[str, Any] = dict.fromkeys(("target_w", "metered", "peak_w", "peak_lost_w", "peak_s"))
    row |= {
        "kind": "feeder",
        "dead": False,
        "limit_w": 750e3,
        "coming_w": 790e3,
        "coming_left_w": -40e3,
        "limit_from": "site file, budget_w",
        "unheard_racks": 1,
    }
    row |= {"capped_gpus": 1152, "target": "", "load_w": 612.3e3, "lost_w": 740e3, "left_w": 137.7e3}
    rows = [row | {"use_pu": 1.05, "place": p} for p in ("berlin/hall1/busway-a1", f"berlin/{NASTY}")]
    table = table_of("places", PLACE_COLUMNS, rows, NASTY, 400)
    found = Explanation(policy="power_cap", now_ns=0, sentences=(Sentence(NASTY),), tables=(table,))
    out = Console(file=io.StringIO(), width=100, highlight=False, emoji=False, color_system=None)
    show_explanation(found, out)
    text: str = out.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    assert "\u202e" not in text
    lines = text.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 100
    for expected in ("750", "790", "105 %", "100 columns: capped", "the first 2 of 400", "[bold]evil"):
        assert expected in text, (expected, text)


def test_what_binds_first_in_words() -> None:
    base = {"place": "lab/h/a", "kind": "feeder", "in_s": 0.0, "use_pu": 0.5, "left_w": 75e3, "over": False,
            "limit_w": 150e3, "limit_from": "site file, budget_w", "target": "", "lost": True,
            "bound": False}  # fmt: skip
    assert first_words(base) == (
        "now: feeder lab/h/a binds first if the other side fails: 75.0 kW left of its 150.0 kW "
        "(site file, budget_w), 50 % used"
    )
    target = base | {"kind": "site", "place": "site", "target": "dr", "lost": False}
    assert "now: the site binds first: 75.0 kW left of load target dr of 150.0 kW" in first_words(target)
    later = base | {"in_s": 900.0, "over": True, "left_w": -5e3, "lost": False, "bound": False}
    assert first_words(later) == (
        "forecast in 15 min, upper end of its 90 % band: feeder lab/h/a may be beyond its limit, 5.0 kW "
        "above its 150.0 kW (site file, budget_w)"
    )
    assert first_words(later | {"bound": True}).startswith(
        "worst case in 15 min, not a forecast (all racks reach the upper ends of their 90 % bands at once): "
    )


def test_a_dead_feeder_has_nothing_left_and_is_named(
    desk: PowerDesk, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "gpu.power_w": np.full(144, 600.0), "rack.power_w": np.full(2, 50e3),
        "feeder.power_w": np.array([0.0, 1e5]), "feeder.energised_state": np.array([1.0, 0.0]),
    }  # fmt: skip
    for _ in range(5):
        desk.do(lambda: desk.pod.tick(values))
    assert desk.run("power") == 0
    text = said(capsys)
    assert "feeder lab/h/a has no voltage, or its breaker is open: the other side carries its load" in text
    assert "lab/h/a feeder 150 0 0 - -" in text
    assert "now: feeder lab/h/b binds first: " in text, "the other side has failed already"


def test_a_load_that_is_feared_is_said_to_be(desk: PowerDesk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.drive(10, 600.0)
    assert desk.run("power") == 0
    assert "report no power just now" not in said(capsys)
    desk.rig.silent = {"rack.power_w", "gpu.power_w"}
    desk.drive(100)
    assert desk.run("power") == 0
    words = "2 of 2 racks report no power just now: they count with the most that they may draw, not"
    assert f"{words} with a reading" in said(capsys)


def test_a_cap_of_an_earlier_run_has_a_name(desk: PowerDesk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.drive(3, 300.0)
    desk.pod.twin.engine.arbiter.leases["gpu.power_cap_w"].owner[:] = -1
    assert desk.run("power") == 0
    assert "(144 by an earlier run)" in said(capsys)


def test_a_target_that_is_to_come_is_named_where_it_binds(
    desk: PowerDesk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.drive(3, 300.0)
    assert desk.run("power", "target", "evening", "--limit", "20kW", "--from", "+10min") == 0
    desk.drive(2)
    high = np.full(2, 50e3, np.float32)
    f = Forecast("rack.power_w", 900.0, high, high, high, "test")
    desk.pod.live.engine.forecasts["rack.power_w", 900.0] = f
    capsys.readouterr()
    assert desk.run("power") == 0
    assert "80.0 kW above load target evening of 20.0 kW" in said(capsys)


@pytest.mark.parametrize("role", ["leader", "standby"])
def test_only_a_leader_says_that_policies_will_cap(
    desk: PowerDesk, capsys: pytest.CaptureFixture[str], role: Any
) -> None:
    desk.drive(3, 300.0)
    high = np.full(2, 140e3, np.float32)
    f = Forecast("rack.power_w", 900.0, high, high, high, "test")
    desk.pod.live.engine.forecasts["rack.power_w", 900.0] = f
    desk.pod.live.role = role
    assert desk.run("power") == 0
    assert ("policies will cap before" in said(capsys)) == (role == "leader")
