"""Expected beside measured: heat, the power tree, the noise of both. May import `twin`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.support.builders import START_NS, Twin, site_of, two_racks
from tests.support.estimator_rig import Desk
from twin.catalogue import NS, ConfigError
from twin.contracts import Residual, confidence_of, erf
from twin.estimation.comparisons import Board, Row
from twin.estimation.heat import CAPTURE_PRIOR, CAPTURE_SIGMA
from twin.estimation.noise import NOISE_WARMUP, ResidualNoise
from twin.estimation.power_tree import METER_NOISE_PU, balances_of
from twin.estimation.readings import Steps
from twin.physics import COOLANTS, heat_rate_w_per_k

NAN = float("nan")


def readings(power_w: Any, capture: float, flow_lpm: float = 80.0, supply_c: float = 32.0) -> dict[str, Any]:
    """Return the readings of two racks whose liquid carries this share of their power."""
    power = np.broadcast_to(np.asarray(power_w, np.float64), (2,))
    rate = heat_rate_w_per_k(COOLANTS["pg25"], np.full(2, flow_lpm), np.full(2, 40.0))
    return {"rack.power_w": power, "rack.flow_lpm": flow_lpm, "rack.supply_temp_c": supply_c,
            "rack.return_temp_c": supply_c + capture * power / rate}  # fmt: skip


def residual(desk: Desk, name: str) -> Residual:
    return desk.estimator.residuals[name]


def test_erf_is_erf() -> None:
    x = np.linspace(0, 6, 2001)
    assert np.abs(erf(x) - [math.erf(v) for v in x]).max() < 1.5e-7


@pytest.mark.parametrize(
    "z, expected", [(0.0, 0.0), (1.0, 0.6827), (1.6449, 0.9), (2.5758, 0.99), (3.8906, 0.9999)]
)
def test_confidence_is_the_normals(z: float, expected: float) -> None:
    both = confidence_of(np.array([z, -z]) * 0.3, np.full(2, 0.3))
    assert both == pytest.approx([expected] * 2, abs=2e-5)
    assert np.isnan(confidence_of(np.array([NAN, 1.0]), np.array([1.0, NAN]))).all()


def test_expected_return_is_supply_plus_captured_heat_over_the_flow() -> None:
    desk = Desk(two_racks())
    desk.tick(readings(100_000, 0.9))
    heat = residual(desk, "rack.heat")
    # 80 l/min of PG25: 5.33 kW/K; 90 kW raise it by 16.9 K
    assert heat.expected == pytest.approx(
        [32 + CAPTURE_PRIOR * 100e3 / (80 / 60e3 * 1012 * 3950)] * 2, abs=0.01
    )
    assert heat.difference == pytest.approx([0, 0], abs=0.01)


@pytest.mark.parametrize("capture", [0.75, 0.93])
def test_the_share_converges_to_the_truth(capture: float) -> None:
    desk = Desk(two_racks())
    assert np.isnan(desk.estimator.liquid_capture()).all()
    rng = np.random.default_rng(3)
    for _ in range(300):
        desk.tick(readings([60e3, 110e3], capture * (1 + rng.normal(0, 0.005))))
    assert desk.estimator.liquid_capture() == pytest.approx([capture] * 2, abs=0.005)
    assert np.abs(residual(desk, "rack.heat").difference).max() < 0.5


def test_the_uncertainty_is_bounded_and_only_readings_reduce_it() -> None:
    desk = Desk(two_racks())
    for _ in range(60):
        desk.tick(readings(100e3, 0.8))
    tight = desk.estimator.capture_var.copy()
    assert (tight < 0.01**2).all()
    for _ in range(100):
        desk.tick({}, dt_s=1000.0)
    desk.tick(readings(100e3, 0.8))
    assert (desk.estimator.capture_var > tight).all()
    assert (desk.estimator.capture_var <= CAPTURE_SIGMA**2).all()
    assert desk.estimator.capture == pytest.approx([0.8, 0.8], abs=0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"rack.power_w": 500.0},  # idle: it says nothing about its liquid
        {"rack.return_temp_c": 32.5},  # a rise of half a kelvin drowns in the sensors' error
        {"rack.return_temp_c": 20.0},
        {"rack.power_w": 5e6},  # absurd
        {"rack.flow_lpm": -1.0},
        {"rack.supply_temp_c": NAN},
        {"rack.flow_lpm": 0.0},
    ],
)
def test_bad_or_idle_readings_teach_nothing(change: dict[str, float]) -> None:
    desk = Desk(two_racks())
    desk.run(40, readings(100e3, 0.8))
    estimator = desk.estimator
    before = estimator.capture.copy(), estimator.capture_count.copy(), estimator.heat_noise.count.copy()
    desk.run(20, readings(100e3, 0.8) | change)
    after = estimator.capture, estimator.capture_count, estimator.heat_noise.count
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert np.isnan(residual(desk, "rack.heat").confidence_pu).all()


def test_stale_readings_are_unknown_and_one_reading_teaches_once() -> None:
    desk = Desk(two_racks())
    desk.tick(readings(100e3, 0.8))
    estimator = desk.estimator
    for second in range(1, 301):  # a period of 100 s: stale after three
        desk.tick({})
        assert estimator.capture_count.tolist() == [1, 1], "the same reading again"
        assert np.isfinite(residual(desk, "rack.heat").measured).all() == (second <= 300)
    desk.tick({})
    assert np.isnan(residual(desk, "rack.heat").measured).all()


def test_an_unknown_coolant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\$.coolant"):
        site_of(two_racks(coolant="oil"))


def tree_site(feeders: list[dict[str, Any]]) -> dict[str, Any]:
    tree = two_racks()
    tree["halls"][0]["feeders"] = feeders
    return tree


def balance_sheet(desk: Desk) -> dict[str, tuple[float, float]]:
    """name -> (measured, expected)"""
    r = residual(desk, "feeder.balance")
    names = [b.name for b in desk.estimator.balances]
    return {n: (float(m), float(e)) for n, m, e in zip(names, r.measured, r.expected, strict=True)}


TAPS = [
    {"name": "main", "serves": ["ta", "tb"]},
    {"name": "ta", "serves": ["r1"]},
    {"name": "tb", "serves": ["r1", "r2"]},
]  # fmt: skip


@pytest.mark.parametrize(
    "feeders, feeder_w, rack_w, expected",
    [
        (
            [{"name": "a", "serves": ["r1", "r2"]}, {"name": "b", "serves": ["r1", "r2"]}],
            [60e3, 50e3],
            [70e3, 40e3],
            {"a+b": (110e3, 110e3)},
        ),
        (
            [{"name": "a", "serves": ["r1"]}, {"name": "b", "serves": ["r2"]}],
            [60e3, 50e3],
            [70e3, 40e3],
            {"a": (60e3, 70e3), "b": (50e3, 40e3)},
        ),
        (
            TAPS,
            [111e3, 30e3, 80e3],
            [70e3, 40e3],
            {
                "main": (111e3, 110e3),
                "main>children": (111e3, 110e3),
                "r1<taps": (110e3, 70e3),
                "r2<taps": (80e3, 40e3),
            },
        ),
        ([{"name": "a", "serves": ["r1"]}], [60e3], [NAN, 40e3], {"a": (60e3, NAN)}),
        (
            [{"name": "a", "serves": ["r1", "r2"]}, {"name": "b", "serves": ["r1"]}],
            [60e3, NAN],
            [70e3, 40e3],
            {"a+b": (NAN, 110e3)},
        ),
        ([{"name": "spare"}], [5.0], [1.0, 1.0], {}),
    ],
)
def test_meters_and_what_they_serve(
    feeders: list[dict[str, Any]],
    feeder_w: list[float],
    rack_w: list[float],
    expected: dict[str, tuple[float, float]],
) -> None:
    desk = Desk(tree_site(feeders))
    desk.tick({"feeder.power_w": feeder_w, "rack.power_w": rack_w})
    found = balance_sheet(desk)
    assert set(found) == set(expected)
    for name, pair in expected.items():
        assert found[name] == pytest.approx(pair, nan_ok=True), name


def test_the_same_names_in_two_halls_make_different_balances() -> None:
    tree = tree_site(TAPS)
    tree["halls"][0]["name"] = "h[1-2]"
    names = [b.name for b in balances_of(site_of(tree))]
    assert len(names) == len(set(names)) == 8
    assert "h2/r1<taps" in names


def test_many_roots_make_a_balance_each() -> None:
    n = 10_000
    hall = {"name": "h", "racks": [{"name": f"r[1-{n}]"}],
            "feeders": [{"name": f"f[1-{n}]", "serves": [f"r[1-{n}]"]}]}  # fmt: skip
    found = balances_of(site_of({"site": "s", "halls": [hall]}))
    assert [(b.meters.tolist(), b.racks.tolist()) for b in found] == [([i], [i]) for i in range(n)]


def test_a_guessed_edge_is_told() -> None:
    desk = Desk(tree_site([{"name": "a", "serves": ["r1", "r2"], "inferred": True}]))
    assert desk.estimator.tree_residual_pu() == (None, False)
    desk.tick({"feeder.power_w": 110e3, "rack.power_w": 50e3})
    assert desk.estimator.tree_residual_pu() == (pytest.approx(0.1), True)
    desk = Desk(two_racks())
    desk.tick({"feeder.power_w": [55e3, 55e3], "rack.power_w": 50e3})
    assert desk.estimator.tree_residual_pu() == (pytest.approx(0.1), False)


FEEDS = [{"name": "a", "serves": ["r1", "r2"]}, {"name": "b", "serves": ["r1", "r2"]}]
SPLIT, BALANCE = "feeder.power_w/split", "feeder.balance"


def two_feeds(seconds: int = 400) -> tuple[Desk, np.random.Generator]:
    """Two feeds that share 100 kW evenly, whose meters are right to a tenth of a percent."""
    desk, rng = Desk(tree_site(FEEDS)), np.random.default_rng(4)
    for _ in range(seconds):
        feed(desk, rng, [50e3, 50e3])
    return desk, rng


def feed(desk: Desk, rng: np.random.Generator, feeder_w: list[float], rack_w: float = 50e3) -> None:
    """A second in which the feeders read this, with their noise."""
    noise = 1.0 + 0.001 * rng.normal(size=2)
    desk.tick({"feeder.power_w": np.asarray(feeder_w) * noise, "rack.power_w": rack_w})


@pytest.mark.long
@pytest.mark.parametrize("to", [0.4, 1.8])
def test_meters_that_read_a_step_of_the_load_one_after_the_other_do_not_contradict(to: float) -> None:
    """One feed's meter is read three seconds after the rest. A first reading may be a spike."""
    (late, rng), (prompt, other) = two_feeds(), two_feeds()
    for second in range(60):
        feed(late, rng, [50e3 * to, 50e3 * (to if second >= 3 else 1.0)], 50e3 * to)
        feed(prompt, other, [50e3 * to] * 2, 50e3 * to)
        for name in (SPLIT, BALANCE):
            assert second == 0 or np.abs(late.z(name)).max() < 4.0, (second, name)
    for name in (SPLIT, BALANCE):
        assert residual(late, name).sigma == pytest.approx(residual(prompt, name).sigma, rel=0.2)


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_reading_of_one_meter_that_is_far_off_alone_is_no_move_of_its_load(factor: float) -> None:
    desk, rng = two_feeds()
    feed(desk, rng, [50e3 * factor, 50e3])
    assert np.abs(desk.z(BALANCE)).min() > 8.0
    assert np.abs(desk.z(SPLIT)[0]) > 8.0
    feed(desk, rng, [50e3, 50e3])
    assert np.abs(desk.z(SPLIT)).max() < 4.0
    for _ in range(3):
        feed(desk, rng, [50e3, 50e3])
        feed(desk, rng, [50e3 * factor, 50e3])
        assert np.abs(desk.z(SPLIT)[0]) > 4.0, "nor is one that comes again"


def test_confidence_is_uniform_on_healthy_noise_and_sure_of_a_real_deviation() -> None:
    n, ticks = 400, 600
    noise, rng = ResidualNoise(n, np.full(n, METER_NOISE_PU)), np.random.default_rng(11)
    sure = np.zeros((3, ticks - 100))
    for k in range(ticks):
        residuals = rng.normal(0, 0.01, n)
        if k >= 100:
            confidence = confidence_of(residuals, noise.sigma())
            sure[:, k - 100] = [(confidence > level).mean() for level in (0.5, 0.9, 0.99)]
        elif k < NOISE_WARMUP:
            assert np.isnan(noise.sigma()).all(), "nothing is called learned before the warm-up"
        noise.learn(residuals, np.full(n, START_NS + k * NS), 1.0)
    assert sure.mean(axis=1) == pytest.approx([0.5, 0.1, 0.01], abs=0.02)
    assert abs(sure[1].mean() - 0.1) < 0.01
    assert (confidence_of(np.full(n, 0.06), noise.sigma()) > 0.9999).all()


@pytest.mark.parametrize("sigmas", [5.5, 8.0, 30.0])
def test_a_fault_that_stays_does_not_become_normal(sigmas: float) -> None:
    noise, rng = ResidualNoise(1, np.zeros(1)), np.random.default_rng(5)
    t_ns = START_NS
    for _ in range(600):
        t_ns += NS
        noise.learn(rng.normal(0, 1, 1), np.array([t_ns]), 1.0)
    sure = 0
    for _ in range(3600):
        t_ns += NS
        fault = sigmas + rng.normal(0, 0.3, 1)
        sure += int(confidence_of(fault, noise.sigma())[0] > 0.9999)
        noise.learn(fault, np.array([t_ns]), 1.0)
    assert sure > 3000
    assert noise.sigma()[0] < 2.0


def test_a_deviation_that_creeps_stands_out_of_the_noise() -> None:
    """Of a ramp that began after 1,500 s and lasts 2,400 s a memory of all of it has 2400 / (3 * 3900) of the
    end's square; one of 600 s had three times as much."""
    noise, rng = ResidualNoise(200, np.zeros(200)), np.random.default_rng(6)
    for second in range(1500 + 2400):
        creep = 5.0 * max(second - 1500, 0) / 3600
        noise.learn(creep + rng.normal(0, 1, 200), np.full(200, START_NS + second * NS), 1.0)
        if second == 1500:
            assert noise.sigma().mean() == pytest.approx(1.0, abs=0.02)
    assert noise.sigma().mean() == pytest.approx(np.sqrt(1.0 + 0.205 * creep**2), rel=0.05)


@pytest.mark.parametrize("period_s", [1.0, 10.0, 60.0])
def test_noise_of_slow_readings_is_neither_less_nor_more(period_s: float) -> None:
    """Parts beside and of the mean over 120 s sum to the mean square, however few readings it has."""
    noise, rng = ResidualNoise(2000, np.zeros(2000)), np.random.default_rng(7)
    for k in range(300):
        at_ns = START_NS + round(k * period_s * NS)
        noise.learn(0.5 + rng.normal(0, 1, 2000), np.full(2000, at_ns), period_s)
    assert np.mean(noise.variance) == pytest.approx(1.25, rel=0.03)


def test_a_short_transient_is_learned_and_the_floor_holds() -> None:
    noise = ResidualNoise(1, np.array([0.5]))
    for k in range(100):
        noise.learn(np.array([0.01]), np.array([START_NS + k * NS]), 1.0)
    assert noise.sigma()[0] == 0.5
    for k in range(100, 110):
        noise.learn(np.array([50.0]), np.array([START_NS + k * NS]), 1.0)
    assert 0.5 < noise.sigma()[0] < 1.0


def test_what_was_learned_survives_a_restart_and_moves_with_the_racks() -> None:
    twin = Twin(two_racks())
    for k in range(80):
        twin.tick({**readings(100e3 + 500 * k, 0.8), "feeder.power_w": 100e3})
    back = twin.restarted(two_racks(), [])
    more = {**readings(90e3, 0.8), "feeder.power_w": 91e3}
    twin.tick(more)
    back.tick(more)
    assert back.engine.checksum() == twin.engine.checksum()
    moved = twin.engine.estimator.remapped(
        site_of(two_racks(racks="r[2-3]")), {"rack": np.array([1, -1], np.int32)}
    )
    assert moved.capture.tolist() == [twin.engine.estimator.capture[1], CAPTURE_PRIOR]
    assert moved.heat_noise.count[1] == 0


def test_the_step_of_a_signal_is_found_and_a_fine_one_has_none() -> None:
    rng = np.random.default_rng(3)
    steps = Steps(2, {"rack": 3}, "rack")
    assert not steps.sigma().any()
    walk = 40.0 + np.cumsum(rng.normal(0.0, 0.7, (200, 3)), axis=0)
    for t, values in enumerate(walk):
        coarse = np.rint(values / np.array([1.0, 0.5, 2.0])) * np.array([1.0, 0.5, 2.0])
        steps.follow(np.stack([coarse.astype(np.float32).astype(float), values]))
        if t == 50:
            steps.follow(np.full((2, 3), np.nan))
    assert steps.sigma()[0] == pytest.approx(np.array([1.0, 0.5, 2.0]) / np.sqrt(12.0))
    assert not steps.sigma()[1].any()


def test_a_signal_that_stops_and_starts_tells_no_step() -> None:
    steps, rng = Steps(1, {"cdu": 1}, "cdu"), np.random.default_rng(3)
    for i in range(60):
        speed = 0.0 if 20 <= i < 40 else 0.78
        steps.follow(np.array([[speed]]))
        assert steps.sigma() == 0.0
    for _ in range(60):
        steps.follow(np.array([[0.02 * round(35 + 5 * rng.random())]]))
    assert steps.sigma()[0, 0] == pytest.approx(0.02 / np.sqrt(12.0))


def test_a_board_is_no_surer_than_the_steps_of_its_readings() -> None:
    board = Board([Row("rack.x", "rack", 1, 0.02)])
    zero, second = np.zeros(1), 0
    for second in range(1, 200):
        board.begin(second * NS)
        board.put("rack.x", zero, zero, np.array([second * NS]), steps=np.array([0.3]))
        board.settle(1.0, None)
    assert board.residual("rack.x").sigma == pytest.approx(0.3, abs=1e-6)
