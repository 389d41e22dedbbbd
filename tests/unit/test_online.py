"""The online forecast: bands that hold, atoms that are hit, gaps, sleep, memory, and no wild answers."""

from __future__ import annotations

import numpy as np
import pytest

from models.load import BANDS, LEVELS, MEDIAN, UNUSUAL, ExpertAggregation, Issue, restlessness, stride
from tests.support.sampled_cases import sampled
from twin.catalogue import F64, ContractError

NAN = float("nan")
EXPERTS = ("last", "mean", "wild")


def issue_of(values: np.ndarray, row: int, horizon: int, quantum: float = 0.0) -> Issue:
    """Return the forecasts of simple experts, and their measures, at `row` of `values` [n_time, n]."""
    past = values[max(0, row - 400) : row + 1]
    last = past[-1]
    change = np.abs(past[horizon:] - past[:-horizon]) if len(past) > horizon else np.full_like(past[:1], NAN)
    scale = change[-60:].mean(axis=0)
    n = values.shape[1]
    points = np.stack([last, past.mean(axis=0), 1e6 * np.sin(row) + last])
    return Issue(
        points,
        last,
        np.where(scale > 0.0, scale, NAN),
        np.full(n, quantum),
        recent=past[:: 1 + len(past) // 64],
    )


def run(
    values: np.ndarray, horizon: int = 1, quantum: float = 0.0, online: ExpertAggregation | None = None
) -> np.ndarray:
    """Quantiles [n_time, n, n_level] issued at each row."""
    n_time, n = values.shape
    online = online or ExpertAggregation(horizon, n, EXPERTS, stride(horizon))
    said = np.full((n_time, n, len(LEVELS)), NAN)
    for row in range(n_time):
        online.learn(row, values[row])
        said[row] = online.issue(row, issue_of(values, row, horizon, quantum))
    return said


def coverage(said: np.ndarray, actual: np.ndarray, band: str) -> np.ndarray:
    """Tie-aware coverage [n] of `said` [n_time, n, n_level]; a tie is spread over the levels round it."""
    levels = np.array(LEVELS)
    low, high = (levels[i] for i in BANDS[band])
    y = actual[..., None]
    a, b = np.where(said < y, levels, 0.0).max(axis=-1), np.where(said > y, levels, 1.0).min(axis=-1)
    shared = np.clip(np.minimum(b, high) - np.maximum(a, low), 0.0, None) / (b - a)
    inside = (said[..., BANDS[band][0]] <= actual) & (actual <= said[..., BANDS[band][1]])
    out: np.ndarray = np.where((said == y).any(axis=-1), shared, inside).mean(axis=0)
    return out


def walk(rng: np.random.Generator, n_time: int, n: int) -> np.ndarray:
    return np.cumsum(rng.normal(size=(n_time, n)), axis=0)


def drifting(rng: np.random.Generator, n_time: int, n: int) -> np.ndarray:
    """Independent values whose spread grows and shrinks by a factor of 7, with shifts of level."""
    spread = np.exp(np.sin(2.0 * np.pi * np.arange(n_time) / n_time * 2.0))[:, None]
    level = np.cumsum((rng.random((n_time, n)) < 0.001) * rng.normal(size=(n_time, n)) * 40.0, axis=0)
    return level + spread * rng.normal(size=(n_time, n))


def atoms(rng: np.random.Generator, n_time: int, n: int) -> np.ndarray:
    """GPUs in use: nine steps in ten change nothing."""
    steps = (rng.random((n_time, n)) < 0.1) * rng.integers(-8, 9, (n_time, n))
    return 400.0 + np.cumsum(steps, axis=0)


@pytest.mark.long
@pytest.mark.parametrize("make, quantum", sampled([(walk, 0.0), (drifting, 0.0), (atoms, 1.0)], (atoms, 1.0)))
def test_bands_cover_what_they_promise(make, quantum: float) -> None:
    values = make(np.random.default_rng(11), 3001, 3)
    said = run(values, 1, quantum)[1000:-1]
    for band, share in (("50", 0.5), ("90", 0.9), ("99", 0.99)):
        deviation = np.sqrt(share * (1.0 - share) / len(said))
        got = coverage(said, values[1001:], band)
        assert got == pytest.approx(np.full(3, share), abs=4.0 * deviation), band


@pytest.mark.long
def test_bands_cover_at_a_horizon_of_many_rows() -> None:
    values = walk(np.random.default_rng(12), 4000, 3)
    said = run(values, 20)[1500:-20]
    # 2,480 overlapping targets are worth some 3 / (2 * 20) as many independent ones.
    assert coverage(said, values[1520:], "90") == pytest.approx(np.full(3, 0.9), abs=0.08)


def test_a_count_that_rarely_changes_is_forecast_as_it_is() -> None:
    values = atoms(np.random.default_rng(13), 600, 2)
    said = run(values, 1, 1.0)
    assert (said[100:, :, MEDIAN] == values[100:]).all()
    assert (said[100:] == np.rint(said[100:])).all()


@pytest.mark.long
def test_a_series_that_hardly_ever_moves_is_forecast_as_still() -> None:
    """Means lag behind each jump; forgetting by the row would lose what one jump taught before the next."""
    n_time, lives = 6000, (1.0, 2.0, 5.0, 15.0, 60.0, 240.0)
    values = np.repeat(np.random.default_rng(16).integers(0, 40, n_time // 500) * 10.0, 500)[:, None]
    means, error = np.full(len(lives), values[0, 0]), np.zeros(n_time)
    online = ExpertAggregation(1, 1, ("last", *(f"ewma{life:.0f}" for life in lives)))
    for row in range(n_time - 1):
        now = values[row]
        online.learn(row, now)
        means += (1.0 - 0.5 ** (1.0 / np.array(lives))) * (now - means)
        points = np.concatenate([now, means])[:, None]
        said = online.issue(row, Issue(points, now, np.ones(1), np.zeros(1)))
        error[row] = abs(said[0, MEDIAN] - values[row + 1, 0])
    half = n_time // 2
    assert error[half:].sum() <= 1.001 * np.abs(np.diff(values[half:, 0])).sum()


def test_a_wild_expert_does_no_harm() -> None:
    values = walk(np.random.default_rng(14), 400, 2)
    said = run(values)
    error = np.abs(said[50:-1, :, MEDIAN] - values[51:]).mean(axis=0)
    naive = np.abs(np.diff(values[50:], axis=0)).mean(axis=0)
    assert (error < 1.05 * naive).all()


def test_the_better_expert_is_followed_in_each_series() -> None:
    rng = np.random.default_rng(15)
    values = np.column_stack([walk(rng, 600, 1), rng.normal(size=(600, 1))])
    online = ExpertAggregation(1, 2, EXPERTS)
    run(values, online=online)
    weight = online.weights()
    assert weight.shape == (2, 3)
    assert weight.sum(axis=1) == pytest.approx([1.0, 1.0])
    assert weight[0, 0] > 0.8
    assert weight[1, 1] > 0.8


def test_a_forecast_exists_with_a_last_value_and_bands_with_a_change() -> None:
    online = ExpertAggregation(1, 2, ("last",))
    last = np.array([5.0, NAN])
    said = online.issue(0, Issue(last[None], last, np.full(2, NAN), np.zeros(2), recent=last[None]))
    assert said[0, MEDIAN] == 5.0
    assert np.isnan(np.delete(said[0], MEDIAN)).all()
    assert np.isnan(said[1]).all()
    said = online.issue(1, Issue(last[None], last, np.array([2.0, NAN]), np.zeros(2)))
    assert np.isfinite(said[0]).all()
    assert said[0, 5] - said[0, 1] > 2.0


def test_a_series_seen_at_nothing_is_never_forecast_below_it() -> None:
    values = np.abs(np.random.default_rng(16).normal(size=(300, 2)))
    values[0] = 0.0
    values[:, 1] -= 0.1
    said = run(values)
    assert said[20:, 0, 0].min() == 0.0
    assert said[20:, 1, 0].min() < 0.0


def test_a_gap_teaches_nothing() -> None:
    values = walk(np.random.default_rng(17), 200, 2)
    online = ExpertAggregation(3, 2, EXPERTS)
    run(values, 3, online=online)
    before = online.memory()
    online.learn(200, np.array([NAN, 1.0]))
    after = online.memory()
    for name in ("point_regret", "mix_regret", "log_width", "band_counts"):
        assert np.array_equal(after[name][..., 0], before[name][..., 0]), name
        assert not np.array_equal(after[name][..., 1], before[name][..., 1]), name


def test_an_outcome_is_judged_once_and_only_at_its_row() -> None:
    values = walk(np.random.default_rng(18), 100, 1)
    online = ExpertAggregation(4, 1, EXPERTS)
    run(values, 4, online=online)
    before = online.memory()
    for row in (99, 90, 104, 3):  # judged already, long gone, not issued, before the first
        online.learn(row, np.array([1e9]))
    after = online.memory()
    assert all(np.array_equal(before[name], after[name], equal_nan=True) for name in before)


def test_only_forecasts_a_stride_apart_are_judged() -> None:
    horizon = 40
    online = ExpertAggregation(horizon, 1, ("last",), stride(horizon))
    value = np.ones(1)
    for row in range(7, 207):  # need not start at a multiple of the stride
        online.learn(row, value * row)
        online.issue(row, Issue(value[None] * row, value * row, value, np.zeros(1)))
    waiting = online.memory()["row"]
    assert sorted(waiting[waiting >= 0].tolist()) == list(range(167 + 0, 207, 2))[-20:]
    assert online.memory()["band_age"][1] == len(range(7, 207 - horizon, 2))


def test_memory_is_exact() -> None:
    values = walk(np.random.default_rng(19), 260, 3)
    one = ExpertAggregation(5, 3, EXPERTS)
    run(values[:200], 5, online=one)
    two = ExpertAggregation(5, 3, EXPERTS)
    two.restore({name: np.array(column) for name, column in one.memory().items()})
    for row in range(200, 260):
        said = []
        for online in (one, two):
            online.learn(row, values[row])
            said.append(online.issue(row, issue_of(values, row, 5)))
        assert np.array_equal(*said)


def test_memory_has_a_fixed_size() -> None:
    online = ExpertAggregation(60, 10, tuple(f"e{i}" for i in range(14)), stride(60))
    empty = {name: (a.shape, a.dtype) for name, a in online.memory().items()}
    values = walk(np.random.default_rng(20), 200, 10)
    for row in range(200):
        online.learn(row, values[row])
        online.issue(row, Issue(np.tile(values[row], (14, 1)), values[row], np.ones(10), np.zeros(10)))
    filled = online.memory()
    assert {name: (a.shape, a.dtype) for name, a in filled.items()} == empty
    assert sum(a.nbytes for a in filled.values()) / 10 < 16_000


def test_moved_series_go_on_as_if_nothing_had_been() -> None:
    values = walk(np.random.default_rng(21), 200, 3)
    stay, move = ExpertAggregation(2, 3, EXPERTS), ExpertAggregation(2, 3, EXPERTS)
    for online in (stay, move):
        run(values[:150], 2, online=online)
    move.remap(np.array([2, -1, 0, 1], np.int32))
    moved = np.ascontiguousarray(values[:, [2, 0, 0, 1]])  # the new series gets values of the first
    for row in range(150, 200):
        stay.learn(row, values[row])
        move.learn(row, moved[row])
        a = stay.issue(row, issue_of(values, row, 2))
        b = move.issue(row, issue_of(moved, row, 2))
        assert np.array_equal(b[[0, 2, 3]], a[[2, 0, 1]])
    assert not np.array_equal(b[1], a[0])


@pytest.mark.parametrize("arguments", [(0, 1, ("last",), 1), (1, 1, (), 1), (1, 1, ("last",), 0)])
def test_nonsense_is_refused(arguments: tuple[int, int, tuple[str, ...], int]) -> None:
    with pytest.raises(ContractError):
        ExpertAggregation(*arguments)


def test_memory_and_points_of_another_shape_are_refused() -> None:
    online = ExpertAggregation(1, 2, ("last", "mean"))
    with pytest.raises(ContractError, match="row"):
        online.restore({})
    with pytest.raises(ContractError, match="expected"):
        online.restore(ExpertAggregation(1, 3, ("last", "mean")).memory())
    with pytest.raises(ContractError, match="points"):
        online.issue(0, Issue(np.zeros((3, 2)), np.zeros(2), np.ones(2), np.zeros(2)))


def test_strides() -> None:
    assert [stride(h) for h in (1, 15, 16, 31, 32, 60, 1440)] == [1, 1, 1, 1, 2, 3, 90]


def test_a_series_that_never_changed_has_a_band_without_width_and_a_new_one_has_none() -> None:
    online = ExpertAggregation(1, 2, ("last",))
    for row in range(20):
        value = np.array([5.0, 5.0 if row >= 15 else NAN])
        online.learn(row, value)
        said = online.issue(row, Issue(value[None], value, np.full(2, NAN), np.zeros(2)))
    assert (said[0] == 5.0).all()
    assert np.isnan(np.delete(said[1], MEDIAN)).all()
    assert said[1, MEDIAN] == 5.0


def going_on(n: int, k: int) -> F64:
    """Levels on which a jump goes on for some rows, now and then: what comes after it is wide [n, k]."""
    rng = np.random.default_rng(0)
    out, level, drift, left = np.empty((n, k)), np.full(k, 50.0), np.zeros(k), np.zeros(k)
    for row in range(n):
        begins = rng.random(k) < 0.02
        drift = np.where(begins, 3.0 * rng.normal(size=k), drift)
        left = np.where(begins, rng.integers(2, 12, k), left - 1)
        level += drift * (left > 0) - 0.01 * (level - 50.0)
        out[row] = level + 0.3 * rng.normal(size=k)
    return out


@pytest.mark.long
def test_after_unusual_moves_bands_hold_more_and_elsewhere_hardly_anything_changes() -> None:
    values, k = going_on(1500, 16), 16
    share: dict[tuple[bool, bool], float] = {}
    for told in (True, False):  # of the moves
        online = ExpertAggregation(1, k, ("last", "mean"))
        before, was = np.full((k, len(LEVELS)), NAN), np.zeros(k, np.bool_)
        inside, after = [], []
        for row in range(100, len(values)):
            now = values[row]
            online.learn(row, now)
            inside.append((before[:, 1] <= now) & (now <= before[:, 5]))
            after.append(was)
            move, scale = now - values[row - 1], restlessness(values[row - 99 : row + 1], np.array([99]))[0]
            points = np.stack([now, values[row - 3 : row + 1].mean(axis=0)])
            before = online.issue(row, Issue(points, now, scale, np.zeros(k), move=move if told else None))
            was = np.abs(move) > UNUSUAL * scale
        for moved in (True, False):
            share[told, moved] = float(np.array(inside)[700:][np.array(after)[700:] == moved].mean())
    assert share[False, True] < 0.3, share
    assert 0.6 < share[True, True] < 0.97, share  # sixty moves a series, of which the width learns
    assert abs(share[True, False] - 0.9) < 0.03, share
