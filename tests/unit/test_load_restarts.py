"""The model of load over restarts and fits: snapshots, parameters, settings of a site file, other models.

Experts are few here, since it is the daemon's side that is tested; each expert has a test of its own.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from models.load import Load
from models.load.model import KNOWN, SIGNALS
from models.persistence import Persistence
from tests.support.builders import START_NS, Twin, two_racks
from tests.support.sampled_cases import sampled
from tests.unit.test_load import FEW, HOUR, MIN, POWER, drive, load_of, panel, rng_walk, said, twin_of
from twin.catalogue import NS, ConfigError, ContractError, digest, pack, unpack
from twin.config.engine import make_model, make_models
from twin.contracts import FitRequest
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.run import Fitter
from twin.run.fitting import run_fit
from twin.site import ModelEntry, SiteFile, convert
from twin.telemetry import events as ev

# Restarts.


def fitted(model: Load, seed: int = 1) -> Load:
    rng = np.random.default_rng(seed)
    series = {}
    for name, grid in model.grids(MIN).items():
        series[f"{name}/values"] = (60e3 + np.cumsum(rng.normal(0, 100, (400, 2)), axis=0)).astype(np.float32)
        series[f"{name}/grid"] = np.array([grid.step_s, *grid.horizons])
        series[f"{name}/start_ns"] = np.array([0], np.int64)
        series[f"{name}/known"] = np.full((len(KNOWN), 400), np.nan, np.float32)
    model.load(model.fit(series, seed))
    return model


@pytest.mark.long
@pytest.mark.parametrize("ticks, fit", sampled([(1, False), (141, True), (142, True)], (141, True)))
def test_a_restart_at_any_tick_changes_not_a_bit(ticks: int, fit: bool) -> None:
    """Ticks of 30 s: in the middle of a row, and just before and after one is complete."""

    def made() -> Load:
        return load_of((POWER, "site.power_w"), experts=FEW + ",linear" if fit else FEW)

    model = fitted(made()) if fit else made()
    twin = twin_of(model)
    drive(twin, rng_walk(ticks), 30.0)
    again = twin.restarted(two_racks(), [], [made()])
    assert again.engine.checksum() == twin.engine.checksum()
    assert again.engine.models["load"].parameters().keys() == model.parameters().keys()
    for row in rng_walk(25, seed=2):
        for each in (twin, again):
            each.tick({POWER: row}, dt_s=30.0)
        assert again.engine.checksum() == twin.engine.checksum()
    assert said(again).model == said(twin).model
    assert said(again).model.endswith("unfitted") != fit
    assert said(again).basis == said(twin).basis != ""


def other_settings() -> list[Load]:
    return [
        load_of(experts="last,ewma5,ewma15"),
        load_of(horizons_s=(MIN, 10 * MIN)),
        load_of(signals=(POWER, "site.power_w")),
        load_of(signals=("cdu.flow_lpm", POWER)),
        load_of(horizons_s=(6 * HOUR,)),
    ]


@pytest.mark.parametrize("changed", range(5))
def test_a_snapshot_of_other_settings_or_another_version_begins_afresh(changed: int) -> None:
    """It only forecasts: a daemon that does not start would be worse."""
    model = load_of(experts=FEW + ",linear")
    twin = twin_of(fitted(model))
    drive(twin, rng_walk(40))
    other = other_settings()[changed]
    again = twin_of(other)
    again.engine.restore(decode(encode(twin.engine.dump())))
    again.now_ns, again.number = twin.now_ns, twin.number
    drive(again, rng_walk(20))
    key = other.signals[-1] if changed != 2 else POWER
    assert np.isfinite(said(again, other.horizons_s[0], key).mean).all()


def test_models_come_and_go_between_snapshots() -> None:
    twin = twin_of(load_of())
    drive(twin, rng_walk(20))
    both = twin.restarted(two_racks(), [], [load_of(), Persistence()])
    drive(both, rng_walk(5))
    assert {f.model.partition("@")[0] for f in both.engine.forecasts.values()} == {"load", "persistence"}
    alone = both.restarted(two_racks(), [], [Persistence()])
    assert {f.model.partition("@")[0] for f in alone.engine.forecasts.values()} == {"persistence"}
    drive(alone, rng_walk(5))
    assert {f.model.partition("@")[0] for f in alone.engine.forecasts.values()} == {"persistence"}


def test_where_two_models_say_the_same_the_first_by_name_is_in_force() -> None:
    twin = twin_of(load_of(), Persistence(horizons_s=(MIN, 15 * MIN)))
    drive(twin, rng_walk(20))
    by = {h: f.model.partition("@")[0] for (_, h), f in twin.engine.forecasts.items()}
    assert by == {MIN: "load", 5 * MIN: "load", 15 * MIN: "persistence"}
    twin.engine.suspend("load", ValueError("boom"), twin.now_ns)
    twin.tick({POWER: 60e3}, dt_s=MIN)
    by = {h: f.model.partition("@")[0] for (_, h), f in twin.engine.forecasts.items()}
    assert by == {MIN: "persistence", 15 * MIN: "persistence"}
    twin.tick({POWER: 60e3}, ev.PluginRestored(plugin="load"), dt_s=MIN)
    assert said(twin).model.startswith("load@")


# Fits.


def gathered(**more: Any) -> tuple[Twin, Load]:
    model = load_of(experts=FEW + ",autoregression,state_space", **more)
    twin = twin_of(model)
    drive(twin, rng_walk(120))
    return twin, model


def test_there_is_nothing_to_fit_before_there_are_rows() -> None:
    model = load_of()
    assert model.training() == {}
    twin = twin_of(model)
    twin.tick({POWER: 60e3}, dt_s=1.0)
    assert model.training() == {}
    assert model.fit({}, 0) == {}


@pytest.mark.long
def test_what_a_fit_learns_from_is_a_copy_of_the_rows() -> None:
    twin, model = gathered(horizons_s=(MIN, 6 * HOUR))
    given = model.training()
    np.testing.assert_array_equal(given["fine/values"], panel(model).astype(np.float32))
    assert given["fine/grid"].tolist() == [60.0, 1.0]
    assert given["coarse/grid"].tolist() == [900.0, 24.0]
    assert given["fine/start_ns"][0] == model._blends["fine"].panel().start_ns
    before = digest(given)
    drive(twin, rng_walk(20))
    assert digest(given) == before
    assert digest(unpack(pack(given))) == before


@pytest.mark.long
def test_a_worker_fits_what_the_model_would() -> None:
    twin, model = gathered(zone="Europe/Berlin")
    kind = f"{type(model).__module__}:{type(model).__qualname__}"
    packed = run_fit(kind, model.settings(), pack(model.training()), 3)
    direct = model.fit(model.training(), 3)
    assert {k.split("/")[1] for k in direct} == {"grid", "autoregression", "state_space"}
    assert digest(unpack(packed)) == digest(direct)
    fitter = Fitter()
    try:
        request = FitRequest("load@1", "load", 0, 60, 3, START_NS + 900 * NS)
        fitter.submit(twin.engine, request, START_NS)
        (event,) = fitter.due(START_NS + 60 * NS, twin.site.spec_hash)
    finally:
        fitter.close()
    assert isinstance(event, ev.ModelFitted), event
    assert digest(unpack(event.params)) == digest(direct) == event.params_hash
    twin.engine.intake.pending_fits[event.fit] = request.deadline_ns
    before = said(twin)
    twin.tick({POWER: 60e3}, event, dt_s=MIN)
    assert before.model == "load@unfitted"
    assert said(twin).model == f"load@{digest(model.parameters())[:12]}"
    assert twin.engine.intake.params_hash == {"load": event.params_hash}


def test_no_history_yet_is_a_fit_that_failed() -> None:
    twin = twin_of(load_of())
    fitter = Fitter()
    fitter.submit(twin.engine, FitRequest("load@1", "load", 0, 60, 3, START_NS + 900 * NS), START_NS)
    (event,) = fitter.due(START_NS + 60 * NS, twin.site.spec_hash)
    assert isinstance(event, ev.FitFailed)
    assert "gathered nothing" in event.why


def spoiled(parameters: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Damage of each kind, named by what it is."""
    some = next(k for k in sorted(parameters) if "/linear/" in k and parameters[k].ndim == 2)
    out: list[dict[str, Any]] = [
        {"no such": np.zeros(1)},
        {"fine/no such/x": np.zeros(1)},
        {**parameters, "medium/linear/x": np.zeros(1)},
        {**parameters, some: parameters[some][:1, :1]},
        {**parameters, some: "text"},
        {**parameters, some: parameters[some].astype(str)},
        {**parameters, "fine/grid": np.array([60.0])},
        {**parameters, "fine/grid": np.array([-60.0, 1.0])},
        {**parameters, "fine/grid": np.array([np.nan, 1.0])},
        {**parameters, "fine/grid": np.array([60.0, 5.0, 1.0])},
        {**parameters, "fine/grid": np.array(["a", "b"])},
        {k: v for k, v in parameters.items() if k != some},
    ]
    return out


@pytest.mark.long
@pytest.mark.parametrize("running", [False, True], ids=["before a tick", "running"])
def test_damaged_parameters_are_refused_and_those_before_kept(running: bool) -> None:
    model = fitted(load_of(experts=FEW + ",linear"))
    twin = twin_of(model)
    if running:
        drive(twin, rng_walk(40))
    before, version = digest(model.parameters()), model._version
    for damaged in spoiled(model.parameters()):
        with pytest.raises(ContractError):
            model.load(damaged)
        assert digest(model.parameters()) == before
        assert model._version == version
        drive(twin, rng_walk(3))
        assert said(twin).model == f"load@{version}"
    drive(twin, rng_walk(10))
    assert said(twin).model == f"load@{version}"
    model.load({})
    assert model.parameters() == {}
    drive(twin, rng_walk(3))
    assert said(twin).model == "load@unfitted"


def test_parameters_of_other_horizons_are_not_used() -> None:
    """As after a fit that was asked for before rows became longer."""
    model = load_of(experts=FEW + ",linear")
    twin = twin_of(model)
    drive(twin, rng_walk(40))
    other = fitted(load_of(experts=FEW + ",linear", horizons_s=(2 * MIN, 30 * MIN)))
    with pytest.raises(ContractError):
        model.load(other.parameters())
    drive(twin, rng_walk(3))
    assert said(twin).model == "load@unfitted"


# Settings.


def test_the_site_has_it_without_being_asked() -> None:
    model, *others = make_models(SiteFile("s"))
    assert isinstance(model, Load)
    assert [m.name for m in others] == ["failure", "power_curve"]
    assert model.signals == SIGNALS
    both = make_models(convert(SiteFile, {"site": "s", "models": {"persistence": {}}}, "s.yaml"))
    assert sorted(m.name for m in both) == ["failure", "load", "persistence", "power_curve"]


def test_what_a_site_file_says_is_used_and_makes_another_like_it() -> None:
    entry = ModelEntry(
        signals=[POWER],
        horizons_s=[60.0, 3600.0],
        settings={"experts": " last, ewma5 ,", "zone": "Europe/Berlin", "fit_every_s": 7200.0},
    )
    model = make_model("load", entry)
    assert isinstance(model, Load)
    assert model.fit_every_s == 7200.0
    assert model.settings() == {
        "signals": (POWER,),
        "horizons_s": (60.0, 3600.0),
        "experts": "last,ewma5",
        "zone": "Europe/Berlin",
    }
    again = Load(**model.settings())  # type: ignore[arg-type]
    assert again.settings() == model.settings()
    twin = twin_of(model)
    drive(twin, rng_walk(5))
    assert {b.zone for b in model._blends.values()} == {"Europe/Berlin"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"settings": {"experts": "nonsense"}}, "nonsense"),
    ({"settings": {"experts": "last,nonsense"}}, "nonsense"),
    ({"settings": {"experts": ""}}, "experts"),
    ({"settings": {"experts": 5.0}}, "experts"),
    ({"settings": {"zone": "Europe/Nowhere"}}, "Europe/Nowhere"),
    ({"settings": {"zone": ""}}, "zone"),
    ({"settings": {"zone": "../../etc/passwd"}}, "zone"),
    ({"settings": {"zone": 5.0}}, "zone"),
    ({"settings": {"colour": "red"}}, "colour"),
    ({"settings": {"fit_every_s": -1.0}}, "fit_every_s"),
    ({"settings": {"fit_every_s": "often"}}, "fit_every_s"),
    ({"horizons_s": [0.0]}, "horizons_s"),
    ({"horizons_s": [-60.0]}, "horizons_s"),
    ({"horizons_s": [float("nan")]}, "horizons_s"),
    ({"horizons_s": [8 * 86_400.0]}, "horizons_s"),
    ({"signals": ["rack.colour"]}, "rack.colour"),
    ({"signals": ["gpu.energy_mj"]}, "gpu.energy_mj"),
    ({"signals": [POWER, POWER]}, POWER),
    ({"kind": "nothing"}, "nothing"),
]


@pytest.mark.parametrize(("entry", "what"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_settings_name_their_place(entry: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_model("load", ModelEntry(**entry))
    assert str(refused.value).startswith("$.models.load"), refused.value
    assert what in str(refused.value)


def test_a_site_may_name_any_quantity_that_is_forecast() -> None:
    """Those that follow from others too, as the default does."""
    Twin(two_racks(models={"load": {"signals": list(SIGNALS)}}))


@pytest.mark.long
def test_the_tick_imports_no_library_of_statistics() -> None:
    """With all experts, and in a process of its own: here they have long been imported."""
    program = """
import sys
from tests.support.builders import Twin, two_racks
from twin.config.engine import make_models
twin = Twin(two_racks())
from twin.site.file import SiteFile
twin = Twin(two_racks(), models=make_models(SiteFile("s")))
for i in range(30):
    twin.tick({"rack.power_w": 5e4 + i}, dt_s=60.0)
assert twin.engine.suspended == {}
assert ("rack.power_w", 60.0) in twin.engine.forecasts
heavy = {"sklearn", "statsmodels", "scipy", "pandas", "torch", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
