"""Packed trees against scikit-learn's own predictions, against a walk down each tree, and against damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from models.trees import KEYS, check_trees, pack_trees, predict_trees, unpack_grove, unpack_trees
from twin.catalogue import F64, ContractError

Packed = dict[str, np.ndarray]


def fitted(rows: F64, y: F64, **settings: Any) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    start = dict(max_iter=12, min_samples_leaf=5, early_stopping=False, random_state=0)
    return HistGradientBoostingRegressor(**start | settings).fit(rows, y)


def gappy(rng: np.random.Generator, n_row: int, n_feature: int) -> F64:
    """Random features: a constant, one of few values, and a share of NaN."""
    rows = rng.normal(size=(n_row, n_feature))
    rows[:, 0] = 3.0
    rows[:, 1] = rng.integers(0, 4, n_row)
    rows[rng.random(rows.shape) < 0.1] = np.nan
    return rows


def endless(rng: np.random.Generator, n_row: int, n_feature: int) -> F64:
    """As `gappy`, with infinities, which scikit-learn predicts from but does not fit to."""
    rows = gappy(rng, n_row, n_feature)
    rows[rng.random(rows.shape) < 0.05] = np.inf
    rows[rng.random(rows.shape) < 0.05] = -np.inf
    return rows


def target(rng: np.random.Generator, rows: F64) -> F64:
    """Depends on values, on their products and on where they are missing."""
    x = np.nan_to_num(rows, nan=2.5)
    return (
        x[:, 1] * x[:, 2] + 3.0 * np.isnan(rows[:, 3]) + np.sin(3 * x[:, 4]) + 0.1 * rng.normal(size=len(x))
    )


def on_thresholds(packed: Packed, rng: np.random.Generator, n_row: int) -> F64:
    """Rows whose every value is a threshold of its feature, or a neighbouring number, or missing."""
    rows = np.empty((n_row, int(packed["n_feature"][0])))
    for column in range(rows.shape[1]):
        known = packed["threshold"][packed["feature"] == column]
        near = [known, np.nextafter(known, -np.inf), np.nextafter(known, np.inf), [np.nan, 0.0]]
        rows[:, column] = rng.choice(np.concatenate(near), n_row)
    return rows


def walked(packed: Packed, rows: F64) -> F64:
    """Node by node, tree by tree: the slow rival."""
    out = np.full(len(rows), packed["baseline"][0])
    for first in packed["start"][:-1]:
        for at, row in enumerate(rows):
            node = first
            while (column := packed["feature"][node]) >= 0:
                x = row[column]
                goes_left = packed["missing_left"][node] if np.isnan(x) else x <= packed["threshold"][node]
                node = first + packed["left" if goes_left else "right"][node]
            out[at] += packed["value"][node]
    return out


@pytest.fixture(scope="module")
def deep() -> Packed:
    """A forest deeper than a byte of decisions, with gaps."""
    rng = np.random.default_rng(7)
    rows = gappy(rng, 3000, 6)
    return pack_trees(fitted(rows, target(rng, rows), max_leaf_nodes=40))


@pytest.mark.parametrize(
    "settings",
    [
        dict(loss="squared_error", max_leaf_nodes=16),
        dict(loss="absolute_error", max_leaf_nodes=8),
        dict(loss="quantile", quantile=0.05, max_depth=4),
        dict(loss="quantile", quantile=0.95, max_leaf_nodes=31),
        dict(loss="squared_error", max_leaf_nodes=60, max_iter=30, min_samples_leaf=2),
        dict(loss="squared_error", max_leaf_nodes=2),
        dict(loss="squared_error", max_bins=3),
    ],
)
def test_equals_scikit_learn(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    rows = gappy(rng, 2000, 7)
    model = fitted(rows, target(rng, rows), **settings)
    packed = pack_trees(model)
    forest = unpack_trees(packed)
    for asked in (rows, endless(rng, 700, 7), on_thresholds(packed, rng, 900)):
        np.testing.assert_allclose(forest.predict(asked), model.predict(asked), rtol=1e-12, atol=1e-12)


def test_power_in_watts_keeps_relative_precision() -> None:
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(800, 5))
    model = fitted(rows, 1.2e6 + 4e5 * rows[:, 0] * rows[:, 1], max_iter=60)
    np.testing.assert_allclose(predict_trees(pack_trees(model), rows), model.predict(rows), rtol=1e-12)


def test_split_by_missing_alone() -> None:
    """scikit-learn writes a threshold of +inf: infinity goes left, NaN goes right."""
    rows = np.array([[1.0], [np.nan]] * 50)
    model = fitted(rows, np.isnan(rows[:, 0]) * 5.0, max_iter=3)
    packed = pack_trees(model)
    assert np.isinf(packed["threshold"]).any()
    asked = np.array([[1.0], [np.inf], [-np.inf], [np.nan]])
    np.testing.assert_allclose(predict_trees(packed, asked), model.predict(asked), rtol=1e-12)
    assert predict_trees(packed, asked)[1] != predict_trees(packed, asked)[3]


def test_constant_features_and_one_leaf_trees() -> None:
    rng = np.random.default_rng(5)
    y = rng.normal(size=60)
    model = fitted(np.ones((60, 3)), y)
    packed = pack_trees(model)
    assert len(packed["feature"]) == len(packed["start"]) - 1
    np.testing.assert_allclose(predict_trees(packed, np.zeros((4, 3))), np.full(4, y.mean()), rtol=1e-12)


def stump(feature: int, threshold: float, low: float, high: float, missing_left: bool) -> Packed:
    return {
        "start": np.array([0, 3], np.int32),
        "feature": np.array([feature, -1, -1], np.int32),
        "threshold": np.array([threshold, 0.0, 0.0]),
        "missing_left": np.array([missing_left, False, False]),
        "left": np.array([1, -1, -1], np.int32),
        "right": np.array([2, -1, -1], np.int32),
        "value": np.array([0.0, low, high]),
        "baseline": np.array([100.0]),
        "n_feature": np.array([2], np.int32),
    }


def test_stump_by_hand() -> None:
    rows = np.array([[0.0, 5.0], [0.0, 5.000001], [0.0, np.nan], [9.0, -np.inf]])
    assert predict_trees(stump(1, 5.0, 1.0, 2.0, False), rows).tolist() == [101.0, 102.0, 102.0, 101.0]
    assert predict_trees(stump(1, 5.0, 1.0, 2.0, True), rows).tolist() == [101.0, 102.0, 101.0, 101.0]


@st.composite
def forests(draw: st.DrawFn) -> tuple[Packed, F64]:
    """Any sound forest, chains and repeated splits too, over few values so that ties are common."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_feature, n_tree = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    chance = draw(st.sampled_from([0.2, 0.45, 0.5, 1.0]))  # 1.0: always full
    longest = draw(st.integers(1, 45))  # 1: trees of one leaf
    columns: dict[str, list[Any]] = {key: [] for key in ("feature", "threshold", "missing_left", "value")}
    left: list[int] = []
    right: list[int] = []
    start = [0]
    for _ in range(n_tree):
        first, parents = len(left), [(-1, False)]
        while parents:
            parent, is_right = parents.pop(int(rng.integers(len(parents))) if chance < 1.0 else -1)
            at = len(left) - first
            if parent >= 0:
                (right if is_right else left)[first + parent] = at
            split = at < longest and (at == 0 or rng.random() < chance) and longest > 1
            left.append(-1)
            right.append(-1)
            columns["feature"].append(int(rng.integers(n_feature)) if split else -1)
            columns["threshold"].append(rng.choice([-1.0, 0.0, 1.5, np.inf]) if split else 0.0)
            columns["missing_left"].append(split and rng.random() < 0.5)
            columns["value"].append(0.0 if split else rng.normal())
            if split:
                parents += [(at, False), (at, True)]
        start.append(len(left))
    packed = {
        "start": np.array(start, np.int32),
        "feature": np.array(columns["feature"], np.int32),
        "threshold": np.array(columns["threshold"]),
        "missing_left": np.array(columns["missing_left"], np.bool_),
        "left": np.array(left, np.int32),
        "right": np.array(right, np.int32),
        "value": np.array(columns["value"], np.float64),
        "baseline": np.array([rng.normal()]),
        "n_feature": np.array([n_feature], np.int32),
    }
    rows = rng.choice(
        [-np.inf, -1.0, -0.5, 0.0, 1.5, 2.0, np.inf, np.nan], (draw(st.integers(0, 70)), n_feature)
    )
    return packed, rows


@given(forests())
@settings(max_examples=60, deadline=None)
def test_equals_a_walk_down_any_forest(case: tuple[Packed, F64]) -> None:
    packed, rows = case
    np.testing.assert_allclose(predict_trees(packed, rows), walked(packed, rows), rtol=1e-12, atol=1e-12)


def test_a_grove_of_deep_trees_predicts_as_a_walk_does(deep: Packed) -> None:
    grove = unpack_grove([deep])
    rows = on_thresholds(deep, np.random.default_rng(1), 50)
    np.testing.assert_allclose(grove.predict(rows)[0], walked(deep, rows), rtol=1e-12)


def test_same_to_the_bit_in_any_batch(deep: Packed) -> None:
    rng = np.random.default_rng(2)
    rows = endless(rng, 5000, 6)
    forest = unpack_trees(deep)
    whole = forest.predict(rows)
    for n_row in (1, 2, 3, 8, 63, 64, 65, 1000, 2047, 2049, 4097):
        for first in (0, 17, 900):
            np.testing.assert_array_equal(
                forest.predict(rows[first : first + n_row]), whole[first : first + n_row]
            )
    np.testing.assert_array_equal(forest.predict(np.asfortranarray(rows)), whole)
    np.testing.assert_array_equal(unpack_trees(deep).predict(rows), whole)
    turned = forest.predict(rows[::-1])
    np.testing.assert_array_equal(turned[::-1], whole)
    assert forest.predict(rows[:0]).shape == (0,)


def test_grove_equals_its_forests(deep: Packed) -> None:
    rng = np.random.default_rng(6)
    rows = gappy(rng, 1500, 6)
    y = target(rng, rows)
    quantiles = [pack_trees(fitted(rows, y, loss="quantile", quantile=q)) for q in (0.1, 0.5, 0.9)]
    several = [quantiles[0], deep, *quantiles[1:]]
    asked = endless(rng, 300, 6)
    found = unpack_grove(several).predict(asked)
    for forest, packed in enumerate(several):
        np.testing.assert_array_equal(found[forest], predict_trees(packed, asked))


def test_buffer_size_and_errors_stay_as_they_were() -> None:
    with np.errstate(divide="raise"):
        np.setbufsize(4096)
        predict_trees(stump(1, 5.0, 1.0, 2.0, False), np.zeros((3, 2)))
        assert np.getbufsize() == 4096
        assert np.geterr()["divide"] == "raise"


def test_forests_must_share_features() -> None:
    other = stump(1, 5.0, 1.0, 2.0, False) | {"n_feature": np.array([3], np.int32)}
    with pytest.raises(ContractError, match="same features"):
        unpack_grove([stump(1, 5.0, 1.0, 2.0, False), other])
    with pytest.raises(ContractError, match="same features"):
        unpack_grove([])


@pytest.mark.parametrize("rows", [np.zeros((3, 3)), np.zeros(2), np.zeros((3, 2), np.float32)])
def test_rows_of_another_shape_are_refused(rows: Any) -> None:
    with pytest.raises(ContractError, match="rows"):
        predict_trees(stump(1, 5.0, 1.0, 2.0, False), rows)


def put(key: str, at: int, value: Any) -> Callable[[Packed], None]:
    def damage(packed: Packed) -> None:
        packed[key][at] = value

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        put("feature", 0, 2),
        put("feature", 0, -2),
        put("feature", 1, 0),
        put("feature", 0, -1),
        put("left", 0, 0),
        put("left", 0, 2),
        put("left", 0, -1),
        put("right", 0, 3),
        put("right", 0, 2**31 - 1),
        put("right", 0, -(2**31)),
        put("left", 2, 1),
        put("threshold", 0, np.nan),
        put("value", 1, np.nan),
        put("value", 2, np.inf),
        put("baseline", 0, np.nan),
        put("n_feature", 0, 1),
        put("n_feature", 0, 0),
        put("start", 0, 1),
        put("start", 1, 2),
        put("start", 1, -3),
    ],
)
def test_damage_is_refused(damage: Callable[[Packed], None]) -> None:
    packed = stump(1, 5.0, 1.0, 2.0, False)
    check_trees(packed)
    damage(packed)
    with pytest.raises(ContractError, match="trees:"):
        unpack_trees(packed)


@pytest.mark.parametrize("key", KEYS)
def test_wrong_arrays_are_refused(key: str) -> None:
    sound = stump(1, 5.0, 1.0, 2.0, False)
    array = sound[key]
    wrong: list[Any] = [array.astype(np.complex128), array[None], array[:0], np.append(array, array), None]
    for damaged in wrong:
        with pytest.raises(ContractError, match="trees:"):
            check_trees(sound | {key: damaged})
    with pytest.raises(ContractError, match=f"{key} is missing"):
        check_trees({k: v for k, v in sound.items() if k != key})


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_damaged_number_is_refused_or_harmless(deep: Packed, data: st.DataObject) -> None:
    packed = {key: array.copy() for key, array in deep.items()}
    key = data.draw(st.sampled_from(KEYS))
    at = data.draw(st.integers(0, len(packed[key]) - 1))
    raw = packed[key].view(np.uint8).reshape(len(packed[key]), -1)
    if key == "missing_left":
        packed[key][at] = not packed[key][at]
    else:
        raw[at, data.draw(st.integers(0, raw.shape[1] - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        check_trees(packed)
    except ContractError:
        return
    rows = np.zeros((2, int(min(packed["n_feature"][0], 50))))
    if rows.shape[1] == packed["n_feature"][0]:
        np.testing.assert_allclose(predict_trees(packed, rows), walked(packed, rows), rtol=1e-9)


def test_models_that_are_not_numbers_under_identity_are_refused() -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier

    rng = np.random.default_rng(8)
    rows = rng.integers(0, 5, (200, 2)).astype(np.float64)
    y = np.where(rows[:, 0] == 2, 4.0, 1.0)
    with pytest.raises(ContractError, match="category"):
        pack_trees(fitted(rows, y, categorical_features=[0]))
    with pytest.raises(ContractError, match="identity"):
        pack_trees(fitted(rows, y, loss="poisson"))
    with pytest.raises(ContractError, match="identity"):
        pack_trees(HistGradientBoostingClassifier(max_iter=2).fit(rows, y))
    with pytest.raises(ContractError, match="fitted"):
        pack_trees(object())


def test_nodes_that_mean_something_else_are_refused() -> None:
    rng = np.random.default_rng(9)
    rows = rng.normal(size=(300, 3))
    model = fitted(rows, rows[:, 0])
    for trees in model._predictors:
        nodes = trees[0].nodes
        nodes["left"], nodes["right"] = nodes["right"].copy(), nodes["left"].copy()
    packed = pack_trees(model)  # swapped for both: still the same model
    model.predict = lambda probes: predict_trees(packed, probes) + 1e-3
    with pytest.raises(ContractError, match="other values"):
        pack_trees(model)
