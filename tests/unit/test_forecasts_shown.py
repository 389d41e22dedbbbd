"""Forecasts as people see them: the block of the summary, `racktwin forecast list`, and Prometheus."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from models.failure import Failure
from models.load import DEFAULT_EXPERTS, FORECASTERS, Load
from models.load.model import GRIDS, SIGNALS
from models.load.schedule import EXPERTS as FROM_OUTSIDE
from models.persistence import Persistence
from tests.support.in_process_daemon import Pod, serve
from tests.unit.test_cli_live import Desk, desk
from tests.unit.test_metrics import parsed
from twin.api import forecasts, metrics
from twin.api.metrics import Metrics
from twin.api.summary import Pulse, summary
from twin.catalogue import NS
from twin.cli.operate import forecast as cli_live_forecast
from twin.contracts import Forecast, View
from twin.report import Shown, shown, time_left, why
from twin.report.forecast_texts import EXPERTS
from twin.telemetry.events import BudgetGranted

__all__ = ["desk"]
BASIS = "last 62 %, ewma5 20 %, told_by_nobody 3 %"
NASTY = "\x1b[31m[bold]evil[/bold]"


def forecast(pod: Pod, key: str, horizon_s: float, mean: Any, half: Any = 0.0, **more: str) -> None:
    """A forecast in force, as a model would have left it."""
    n = pod.twin.site.sizes[key.partition(".")[0]]
    centre, wide = (np.broadcast_to(np.asarray(x, np.float32), (n,)).copy() for x in (mean, half))
    told = {"model": "load@unfitted", "basis": BASIS} | more
    pod.twin.engine.forecasts[key, horizon_s] = Forecast(
        key, horizon_s, centre, centre - wide, centre + wide, **told
    )


def block(pod: Pod) -> dict[str, Any]:
    return forecasts.block(pod.live)


def heard(pod: Pod) -> None:
    """Both racks say what they draw, and an hour and a day ahead are forecast."""
    pod.tick({"rack.power_w": [60_000.0, 30_000.0], "site.grid_price_usd_per_kwh": 0.0731})
    forecast(pod, "site.power_w", 3600.0, 91_000.0, 4000.0)
    forecast(pod, "site.power_w", 86400.0, 90_000.0, math.nan)
    forecast(pod, "site.grid_price_usd_per_kwh", 3600.0, 0.08, 0.02)
    forecast(pod, "site.requests_per_s", 3600.0, math.nan, math.nan)
    forecast(pod, "rack.power_w", 3600.0, [61_000.0, 29_000.0], 1000.0)
    forecast(pod, "rack.power_w", 86400.0, 1.0, math.nan)
    forecast(pod, "cdu.heat_w", 3600.0, 80_000.0, 1000.0)


def test_the_summary_says_what_is_expected_how_sure_and_why(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    heard(pod)
    said = summary(pod.live, Pulse())["forecasts"]
    power, price = said["rows"]
    assert (power["signal"], power["name"], power["now"]) == ("site.power_w", "lab", 90_000.0)
    assert power["shown"] == {"unit": "kW", "factor": 1e-3, "digits": 1}
    assert price["shown"] == {"unit": "USD/MWh", "factor": 1e3, "digits": 1}
    (hour,) = power["ahead"]  # a day ahead has no band yet
    assert (hour["mean"], hour["lo"], hour["hi"]) == (91_000, 87_000, 95_000)
    assert hour["why"] == "the last value 62 %, 5 min average 20 %, told_by_nobody 3 %"
    assert said["unheard"] == ["site.requests_per_s"]
    assert said["notes"] == ["the site file names no forecast model"]
    assert said["awaited"] == "", "no model is there"
    assert said["quantities"][:2] == ["site.power_w", "site.grid_price_usd_per_kwh"]
    assert {"rack.power_w", "cdu.heat_w"} < set(said["quantities"])
    json.dumps(said, allow_nan=False)


def test_what_has_gone_silent_is_no_present_value(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    heard(pod)
    pod.tick({"rack.power_w": [60_000.0, math.nan]}, dt_s=400.0)
    (row, *_) = block(pod)["rows"]
    assert row["now"] is None  # a part is not the whole
    assert row["ahead"][0]["mean"] == 91_000


@pytest.mark.parametrize(("horizon_s", "half_w", "line"), [
    (900.0, 20_000.0, "in 15 min"), (3600.0, 20_000.0, "in 1 h"), (60.0, 9_999.0, None),
    (900.0, 10_000.0, "in 15"), (21600.0, 99_000.0, None)])  # fmt: skip
def test_a_band_that_reaches_a_budget_is_a_line(
    tmp_path: Path, horizon_s: float, half_w: float, line: str | None
) -> None:
    pod = Pod(tmp_path)
    forecast(pod, "feeder.power_w", horizon_s, [290_000.0, 100_000.0], half_w)
    said = block(pod)["budgets"]
    if line is None:
        assert said == []
        return
    (only,) = said
    assert line in only
    for expected in ("feeder lab/h/a: ", "90 % band", "budget of 300.0 kW", "290.0 kW expected"):
        assert expected in only


def test_the_soonest_horizon_of_a_feeder_counts_and_a_loan_only_until_it_ends(tmp_path: Path) -> None:
    pod = Pod(tmp_path, tree=_external())
    now_ns = pod.tick().now_ns
    for horizon_s in (60.0, 900.0, 3600.0):
        forecast(pod, "feeder.power_w", horizon_s, 150_000.0, 10_000.0)
    grant = BudgetGranted(
        id="g1", author="grid", feeder="lab/h/a", budget_w=200_000.0, expires_ns=now_ns + 600 * NS
    )
    pod.live.put_event(grant)
    pod.tick()
    (line,) = block(pod)["budgets"]
    # Within the loan of 200 kW for ten minutes; after it only 100 kW are guaranteed.
    assert "budget of 100.0 kW in 15 min" in line


def _external() -> dict[str, Any]:
    from tests.support.builders import two_racks

    tree = two_racks()
    for hall in tree["halls"]:
        for feeder in hall["feeders"]:
            if feeder["name"] == "a":
                feeder |= {"external": True, "guaranteed_w": 100_000}
    return tree


def test_many_feeders_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "SHOWN_BUDGETS", 1)
    pod = Pod(tmp_path)
    forecast(pod, "feeder.power_w", 60.0, 400_000.0, 1.0)
    first, more = block(pod)["budgets"]
    assert "lab/h/a" in first
    assert more == "and 1 more feeders"


class Failing:
    """A model that breaks its contract."""

    name: ClassVar[str] = "failing"
    period_s: ClassVar[float] = 1.0
    fit_every_s: ClassVar[float] = 0.0

    def update(self, view: View) -> None:
        raise ValueError

    def predict(self, view: View) -> list[Forecast]:
        return []

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        return {}

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        pass


def test_the_models_own_way_from_nothing_to_a_forecast(tmp_path: Path) -> None:
    from tests.support.builders import Twin, two_racks

    pod = Pod(tmp_path)
    model = Load(experts="last,ewma5")
    pod.twin = Twin(two_racks(), models=[model, Failing()])
    pod.live.engine = pod.twin.engine
    assert block(pod)["awaited"] == "Forecasts begin with the first tick of the models."
    pod.tick({"rack.power_w": 50_000.0})
    first = block(pod)
    assert first["notes"] == ["model failing failed and is suspended: racktwin alarm list says why"]
    assert first["rows"] == [], "the present value is no forecast"
    now_ns = pod.twin.now_ns
    fine, coarse = (step_s - (now_ns - 1) % (step_s * NS) / NS for step_s in (60, 900))
    at = {h: time_left(fine + 9 * h) for h in (60, 300, 900, 3600)}
    at |= {h: time_left(coarse + 9 * h) for h in (21_600, 86_400)}
    assert first["awaited"] == (
        f"Learning: first forecast (1 min ahead) in {at[60]}, 5 min ahead in {at[300]}, 15 min ahead "
        f"in {at[900]}, 1 h ahead in {at[3600]}, 6 h ahead in {at[21_600]}, 1 d ahead in {at[86_400]}. "
        "A forecast needs 9 times its horizon of history. "
        f"Forecasts rest on simple rules until the first fit in {time_left(model.next_fit_s())}."
    )
    assert "site.requests_per_s" in first["unheard"]
    begins = math.ceil((fine + 540.0) / 10.0)
    for i in range(begins - 2):  # the last look at a row completes it
        pod.tick({"rack.power_w": 50_000.0 + 10.0 * i}, dt_s=10.0)
        assert block(pod)["rows"] == []
    assert block(pod)["awaited"].startswith("Learning: first forecast (1 min ahead) in 1 min, ")
    pod.tick({"rack.power_w": 50_000.0 + 10.0 * begins}, dt_s=10.0)
    pod.tick({"rack.power_w": 50_000.0 + 10.0 * begins}, dt_s=10.0)
    (row,) = block(pod)["rows"]
    (minute,) = row["ahead"]
    assert minute["horizon_s"] == 60.0
    assert 99_000.0 < minute["lo"] < minute["mean"] < minute["hi"] < 106_000.0
    assert "the last value" in minute["why"]
    assert block(pod)["awaited"].startswith("Learning: next forecast (5 min ahead) in ")


def test_the_fit_that_is_awaited_is_that_of_the_forecasts_in_question(tmp_path: Path) -> None:
    from tests.support.builders import Twin, two_racks

    pod, model = Pod(tmp_path), Load(experts="last,ewma5")
    pod.twin = Twin(two_racks(), models=[Failure(), model])  # its first fit is weeks ahead
    pod.live.engine = pod.twin.engine
    for i in range(22):
        pod.tick({"rack.power_w": 50_000.0 + 100.0 * i, "node.power_w": 5_000.0}, dt_s=10.0)
    assert "site.node_failure_count" in {key for key, _ in pod.twin.engine.forecasts}
    awaited = block(pod)["awaited"]
    assert awaited.startswith("Learning site.power_w: next forecast (1 min ahead) in ")
    left = time_left(2 * 3600 - 210)
    assert awaited.endswith(f" Forecasts of site.power_w rest on simple rules until the first fit in {left}.")


def test_what_stands_still_is_forecast_to_stand_still_once_that_was_seen(tmp_path: Path) -> None:
    from tests.support.builders import Twin, two_racks

    pod, model = Pod(tmp_path), Load(("site.power_w",), (300.0,), experts="last")
    pod.twin = Twin(two_racks(), models=[model])
    pod.live.engine = pod.twin.engine
    for _ in range(45):
        pod.tick({"rack.power_w": 50_000.0}, dt_s=60.0)
        assert block(pod)["rows"] == []
    for _ in range(2):
        pod.tick({"rack.power_w": 50_000.0}, dt_s=60.0)
    ((five,),) = (row["ahead"] for row in block(pod)["rows"])
    assert (five["lo"], five["mean"], five["hi"]) == (1e5, 1e5, 1e5)
    assert "Learning" not in block(pod)["awaited"]


def test_a_model_that_tells_no_beginning_needs_nine_times_the_horizon(tmp_path: Path) -> None:
    from tests.support.builders import Twin, two_racks

    pod, model = Pod(tmp_path), Persistence(("site.grid_price_usd_per_kwh",), (300.0,))
    pod.twin = Twin(two_racks(), models=[model])
    pod.live.engine = pod.twin.engine
    pod.tick({"site.grid_price_usd_per_kwh": 0.07})
    assert "first forecast (5 min ahead) in 45 min. A forecast needs" in block(pod)["awaited"]


def test_a_time_to_wait_has_one_unit() -> None:
    minutes = {0.0: "1 min", 61.0: "2 min", 7140.0: "119 min", 43_199.0: "12 h", 43_199 * 60.0: "30 d"}
    assert {s: time_left(s) for s in minutes} == minutes


def test_a_band_that_is_narrower_than_an_earlier_one_says_why(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    for horizon_s, mean, half in ((60.0, 9e4, 500.0), (3600.0, 9e4, 4000.0), (21600.0, 9e4, 1000.0)):
        forecast(pod, "site.power_w", horizon_s, mean, half)
    (row,) = block(pod)["rows"]
    assert [a["note"] for a in row["ahead"]] == [
        "", "", "narrower than in 1 h: a mean over 15 min varies less than one over 1 min"
    ]  # fmt: skip


def test_a_fit_that_found_nothing_is_none(tmp_path: Path) -> None:
    from tests.support.builders import Twin, two_racks

    pod, model = Pod(tmp_path), Load(experts="last,linear")
    pod.twin = Twin(two_racks(), models=[model])
    pod.live.engine = pod.twin.engine
    model.load({"fine/grid": np.array([60.0, 1, 5, 15, 60])})
    pod.tick({"rack.power_w": 50_000.0})
    assert block(pod)["awaited"].endswith(
        f" Forecasts rest on simple rules until the next fit in {time_left(model.next_fit_s())}, because too "
        "few readings arrived for the last one."
    )


def test_the_command_shows_the_site(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.do(lambda: heard(desk.pod))
    desk.do(lambda: forecast(desk.pod, "feeder.power_w", 900.0, 300_000.0, 1.0))
    assert desk.run("forecast", "list", role="viewer") == 0
    said = " ".join(capsys.readouterr().out.split())
    for expected in ("site.power_w lab now 90.0 kW", "in 1 h 91.0 kW 87.0 to 95.0 the last value 62 %, 5 min",
                     "now 73.1 USD/MWh", "80.0 USD/MWh 60.0 to 100.0",
                     "no readings of site.requests_per_s", "feeder lab/h/a: the upper end"):  # fmt: skip
        assert expected in said
    assert "in 1 d" not in said, "it has no band yet"
    assert "rack.power_w" not in said
    assert desk.run("forecast", "list", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2


def test_the_command_shows_the_entities_of_a_quantity(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.do(lambda: heard(desk.pod))
    assert desk.run("forecast", "list", "rack.power_w") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rack.power_w, kW: expected, and the 90 % band below now 1 h lab" in said
    assert "lab/h/r1 60.0 61.0 60.0–62.0" in said
    assert "lab/h/r2 30.0 29.0 28.0–30.0" in said
    assert "1 h the last value 62 %" in said
    assert "model load@unfitted" in said
    assert desk.run("forecast", "list", "rack.power_w", "--name", "r2") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rack.power_w lab/h/r2 now 30.0 kW" in said
    assert "in 1 h 29.0 kW 28.0 to 30.0" in said
    assert "r1" not in said
    # A sum that no signal gives, and the site by name.
    assert desk.run("forecast", "list", "cdu.heat_w") == 0
    assert "80.0 kW 79.0 to 81.0" in " ".join(capsys.readouterr().out.split())
    assert desk.run("forecast", "list", "site.power_w", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["now"] == 90_000.0
    assert desk.run("forecast", "list", "site.requests_per_s") == 0
    assert "no readings of site.requests_per_s" in capsys.readouterr().out


def test_the_command_says_what_can_be_asked(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.do(lambda: heard(desk.pod))
    for words, status, expected in (
        (("rack.pover_w",), 1, "expected one of: site.power_w, "),
        (("rack.power_w", "--name", "r9"), 1, "r9"),
        (("--name", "r1"), 2, "a quantity is missing"),
    ):
        assert desk.run("forecast", "list", *words) == status
        assert expected in " ".join(capsys.readouterr().err.split())


def test_foreign_words_are_no_markup(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.do(lambda: heard(desk.pod))
    for key in ("site.power_w", "rack.power_w"):
        desk.do(lambda key=key: forecast(desk.pod, key, 3600.0, 9e4, 1.0, basis=NASTY, model=f"load@{NASTY}"))
    for words in (
        (),
        ("rack.power_w",),
        ("rack.power_w", "--name", "r1"),
    ):
        assert desk.run("forecast", "list", *words) == 0
        said = capsys.readouterr().out
        assert "[bold]evil[/bold]" in said
        assert "\x1b" not in said


def test_prometheus_gets_forecasts_of_the_site_and_its_feeders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = Pod(tmp_path)
    heard(pod)
    forecast(pod, "feeder.power_w", 60.0, [1000.0, math.nan], 100.0)

    def own() -> dict[str, list[tuple[dict[str, str], float]]]:
        return parsed(Metrics(pod.live, Pulse(), {}).own().decode())

    found = own()
    power = [
        (labels["horizon_s"], labels["edge"], v) for labels, v in found["racktwin_forecast_site_power_w"]
    ]
    hour = [("3600", "lo", 87_000.0), ("3600", "mean", 91_000.0), ("3600", "hi", 95_000.0)]
    assert power == [*hour, ("86400", "mean", 90_000.0)]  # a forecast without an interval keeps its mean
    assert {labels["name"] for labels, _ in found["racktwin_forecast_feeder_power_w"]} == {"lab/h/a"}
    assert not any("rack_power" in name for name in found if "forecast" in name)
    assert found["racktwin_forecasts_left_out"] == [({}, 0.0)]
    monkeypatch.setattr(metrics, "MAX_FORECAST_SERIES", 8)
    found = own()
    assert "racktwin_forecast_feeder_power_w" not in found  # the site's come first: two of three series each
    assert len(found["racktwin_forecast_site_power_w"]) == 3
    assert found["racktwin_forecasts_left_out"] == [({}, 6.0)]


def test_the_summary_has_the_block(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        heard(pod)
        _, tree = await pod.ask("GET", "/api/v1/summary")
        assert tree["forecasts"]["rows"][0]["ahead"][0]["mean"] == 91_000.0

    serve(tmp_path, check)


def test_the_text_for_operators_names_all_that_is_there() -> None:
    text = (Path(__file__).parents[2] / "docs" / "forecasts.md").read_text(encoding="utf-8")
    named = {n for n in (*FORECASTERS, *FROM_OUTSIDE) if not n.startswith("ewma")}
    assert {n for n in (*named, *SIGNALS) if f"`{n}`" not in text} == set()
    assert len(DEFAULT_EXPERTS) == 18
    assert "Eighteen experts" in text


def test_the_command_knows_the_rows_of_the_model() -> None:
    short = (cli_live_forecast.SHORT_ROW_S, cli_live_forecast.SHORT_HORIZON_S)
    assert [(step_s, most_s) for _, step_s, _, most_s in GRIDS[:1]] == [short]
    assert [step_s for _, step_s, _, _ in GRIDS[1:]] == [cli_live_forecast.LONG_ROW_S]


def test_every_expert_has_words() -> None:
    for name in (*FORECASTERS, *FROM_OUTSIDE):
        assert name in EXPERTS or why(f"{name} 5 %").startswith("average of ")
    assert why("ewma15 20 %", 900.0) == "3 h 45 min average 20 %"
    assert why("ewma60 20 %", 60.0) == "1 h average 20 %"
    assert why("ewma60 20 %") == "average of 60 rows 20 %"
    assert (why(""), why("a model's own words, 3 of them")) == ("", "a model's own words, 3 of them")


@pytest.mark.parametrize(("unit", "most", "expected"), [
    ("W", 900.0, Shown("W")), ("W", 84_000.0, Shown("kW", 1e-3, 1)), ("W", 3e6, Shown("MW", 1e-6, 2)),
    ("W", math.nan, Shown("W")), ("USD/kWh", 0.07, Shown("USD/MWh", 1e3, 1)), ("count", 50.0, Shown("")),
    ("count", 0.08, Shown("", 1.0, 2)),
    ("g/kWh", 412.0, Shown("g/kWh", 1, 1)), ("degC", 21.0, Shown("°C", 1, 1)),
    ("1/s", 4000.0, Shown("1/s"))])  # fmt: skip
def test_units_are_sensible(unit: str, most: float, expected: Shown) -> None:
    assert shown(unit, most) == expected
