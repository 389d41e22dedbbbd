"""Boards and banks do for many comparisons and meters at once what a plain loop does for each.

May import `twin`.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tests.support.builders import START_NS, site_of, two_racks
from twin.catalogue import NS
from twin.contracts import Residual
from twin.diagnosis import cusum, deviations as tracks_module
from twin.diagnosis.cusum import (
    ALLOWANCE,
    CERTAIN,
    FARTHEST,
    HUGE_SIGMAS,
    MEAN_PER_READING,
    MOST,
    OFF_SIGMAS,
    WILD_KEPT,
    WILD_SIGMAS,
    CusumBoard,
    DeviationTrack,
)
from twin.diagnosis.deviations import NewReadings, Tracks
from twin.diagnosis.sensor_checks import Bank, traits_of
from twin.telemetry import State

F, KEPT = np.float32, tuple(DeviationTrack.declared)
SIZES = site_of(two_racks()).sizes


def plain(cell: dict[str, Any], z: Any, now_ns: int) -> None:
    """One reading of one cell, as the rule is written."""
    z = F(0.0) if z != z else F(min(max(z, -FARTHEST), FARTHEST))
    cell["last"] = z
    cell["mean"] += MEAN_PER_READING * (z - cell["mean"])
    out = z * np.sign(cell["mean"]) > OFF_SIGMAS
    cell["streak"] = cell["streak"] + 1 if out else 0
    cell["wild"] = F(cell["wild"] * F(WILD_KEPT)) + (abs(z) > WILD_SIGMAS)
    if cell["wild"] < 0.01:
        cell["wild"] = F(0.0)
    step = F(min(max(z, -MOST), MOST))
    if abs(z) > HUGE_SIGMAS:
        step = np.copysign(F(ALLOWANCE + CERTAIN), z)
    for name, way in (("above", step), ("below", -step)):
        cell[name] = F(min(max(float(F(cell[name] + way) - F(ALLOWANCE)), 0.0), 2 * CERTAIN))
    bound = CERTAIN / 2 if cell["on"] else CERTAIN
    up = cell["above"] >= bound and cell["above"] >= cell["below"]
    now = 1 if up else -1 if cell["below"] >= bound else 0
    if now and not cell["on"]:
        cell["since_ns"] = now_ns
    if not now:
        cell["since_ns"] = 0
    cell["on"] = now


def deviations(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Mostly noise, some far, huge, endless or not a number."""
    z = rng.normal(size=shape) * rng.choice([1.0, 4.0, 30.0], size=shape, p=[0.8, 0.15, 0.05])
    z[rng.random(shape) < 0.02] = np.nan
    z[rng.random(shape) < 0.002] = np.inf
    return z


@pytest.mark.long
def test_a_board_counts_each_cell_as_the_rule_is_written() -> None:
    rng, board = np.random.default_rng(3), CusumBoard(3, 20)
    pieces = [DeviationTrack(20) for _ in range(3)]
    for r, piece in enumerate(pieces):
        piece.sit(board, r, slice(0, 20))
    cells = [[dict.fromkeys(KEPT, F(0.0)) | {"on": 0, "streak": 0} for _ in range(20)] for _ in range(3)]
    ever = 0
    for tick in range(300):
        part = slice(0, 11) if tick % 2 else slice(11, 20)
        z = deviations(rng, (3, part.stop - part.start))
        fresh = rng.random(z.shape) < 0.6 if tick % 3 else None
        for r, i in np.ndindex(z.shape):
            if fresh is None or fresh[r, i]:
                plain(cells[r][part.start + i], z[r, i], START_NS + tick)
        board.update(z.astype(np.float32), fresh, part, START_NS + tick)
        ever += int(np.count_nonzero(board.on))
        assert [p.active for p in pieces] == board.on.any(axis=1).tolist()
        for name in KEPT:
            want = np.array([[c[name] for c in row] for row in cells])
            assert getattr(board, name) == pytest.approx(want, rel=1e-5), (tick, name)
    assert ever > 100


def compared(rng: np.random.Generator, sizes: dict[str, int]) -> dict[str, Residual]:
    out = {}
    for name, n in sizes.items():
        sigma = np.full(n, 2.0)
        out[name] = Residual(name, np.zeros(n), 2.0 * deviations(rng, (n,)), sigma, np.full(n, np.nan))
    return out


def run(tracks: Tracks, state: State, rng: np.random.Generator, ticks: int) -> None:
    sizes = {"rack.balance": 2, "gpu.x/drift": 144, "node.x/drift": 36}
    for _ in range(ticks):
        state.tick += 1
        state.now_ns += NS
        readings = NewReadings(SIZES)
        readings.begin()
        tracks.update(compared(rng, sizes), state, readings, {})


def same(a: Tracks, b: Tracks) -> bool:
    pairs = [(a.tracks[k], b.tracks[k]) for k in a.tracks]
    return list(a.tracks) == list(b.tracks) and all(
        np.array_equal(getattr(t, name), getattr(u, name)) for t, u in pairs for name in KEPT
    )


@pytest.mark.parametrize("part", [8192, 40])
def test_comparisons_side_by_side_are_as_each_alone(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracks_module, "SLICE", part)
    state, rng, tracks = State(SIZES), np.random.default_rng(1), Tracks(SIZES)
    run(tracks, state, rng, 20)
    state, rng = State(SIZES), np.random.default_rng(1)
    sizes = {name: len(t.on) for name, t in tracks.tracks.items()}
    boards = {name: CusumBoard(1, n) for name, n in sizes.items()}
    for name, n in sizes.items():
        DeviationTrack(n).sit(boards[name], 0, slice(0, n))
    for tick in range(20):
        for name, r in compared(rng, sizes).items():
            n, parts = sizes[name], -(-sizes[name] // part)
            piece = slice(tick % parts * n // parts, (tick % parts + 1) * n // parts)
            z = (r.measured / r.sigma)[piece].astype(np.float32)
            boards[name].update(z[None], None, piece, (tick + 1) * NS)
    for name, track in tracks.tracks.items():
        assert track.active == bool(boards[name].on.any())
        for key in KEPT:
            assert np.array_equal(getattr(track, key), getattr(boards[name], key)[0]), (name, key)


def test_a_copy_goes_on_as_the_first_does_and_leaves_it_alone() -> None:
    state, first = State(SIZES), Tracks(SIZES)
    run(first, state, np.random.default_rng(1), 10)
    other, known = copy.deepcopy(first), copy.deepcopy(first.dump()["tracks"])
    run(other, copy.deepcopy(state), np.random.default_rng(2), 10)
    assert all(np.array_equal(first.dump()["tracks"][k][f], known[k][f]) for k in known for f in KEPT)
    run(first, state, np.random.default_rng(2), 10)
    assert same(first, other)


def test_meters_in_a_row_are_as_meters_of_a_large_table() -> None:
    rng, n = np.random.default_rng(4), 50
    traits = traits_of("gpu")
    k = len(traits["least_run"])
    large = Bank(k, n, traits, flat=False)
    row = Bank(1, k * n, {name: np.repeat(v, n) for name, v in traits.items()}, flat=True)
    stuck = np.zeros((k, n), np.bool_)
    stuck[0, 7] = True
    value = np.zeros((k, n), np.float32)
    odd = 0
    for tick in range(400):
        noise = (900.0 + rng.normal(size=(k, n)) * 5.0).astype(np.float32)
        noise[0, 9] += 300.0 * (tick > 200 and tick % 4 == 0)
        value = np.where(stuck & (tick > 100), value, noise)
        new = rng.random((k, n)) < 0.9 if tick % 5 else None
        was = {name: getattr(large, name).copy() for name in large.declared}
        with np.errstate(all="ignore"):
            heard = value if new is None else np.where(new, value, F(-1.0))
            large.update(heard.copy(), new, slice(0, n))
            row.update(
                heard.reshape(1, -1).copy(), None if new is None else new.reshape(1, -1), slice(0, k * n)
            )
        for name in large.declared:
            a, b = getattr(large, name), getattr(row, name).reshape(k, n)
            assert np.array_equal(a, b, equal_nan=True), (tick, name)
            if new is not None:
                assert np.array_equal(a[~new], was[name][~new], equal_nan=True), "no reading, no news"
        odd += int(large.jumping[0, 9])
        assert not large.frozen[0, 8]
    assert np.argwhere(large.frozen).tolist() == [[0, 7]]
    assert odd > 50
    assert not large.jumping[:, :9].any()


def siegmund(allowance: float, bound: float, correlation: float = 0.0) -> float:
    """Readings between two errors of a two-sided cumulative sum on noise of 1 sigma.

    Siegmund (1985), Sequential Analysis, 2.57, both sides alike. What neighbouring readings have in common,
    a first-order autoregression, counts as a variance of (1 + r) / (1 - r): too pessimistic, see below.
    """
    wide = np.sqrt((1.0 + correlation) / (1.0 - correlation))
    drift, way = allowance / wide, bound / wide + 1.166
    return float((np.exp(2.0 * drift * way) - 2.0 * drift * way - 1.0) / (2.0 * drift**2) / 2.0)


@pytest.mark.parametrize(
    ("allowance", "bound", "correlation", "readings"),
    [(0.5, 4.0, 0.0, 150), (0.5, 5.0, 0.0, 400), (1.0, 3.0, 0.0, 800), (0.5, 6.0, 0.5, 100)],
)
def test_a_board_errs_as_often_as_its_bounds_say(
    monkeypatch: pytest.MonkeyPatch, allowance: float, bound: float, correlation: float, readings: int
) -> None:
    """Bounds that are low enough to be reached, through the board itself."""
    for name, value in (("ALLOWANCE", allowance), ("CERTAIN", bound), ("OFF_SIGMAS", allowance)):
        monkeypatch.setattr(cusum, name, value)
    board, rng, n = CusumBoard(1, 4000), np.random.default_rng(1), 4000
    z, ever = rng.normal(size=(1, n)), np.zeros(n, np.bool_)
    for reading in range(readings):
        z = correlation * z + np.sqrt(1.0 - correlation**2) * rng.normal(size=(1, n))
        board.update(z.astype(np.float32), None, slice(0, n), reading + 1)
        ever |= board.on[0] != 0
    found = readings / -np.log1p(-ever.mean())
    stated = siegmund(allowance, bound, correlation)
    assert found > 0.9 * stated
    assert correlation or found < 1.1 * stated


def test_the_bounds_in_use_err_less_than_once_in_2000_rack_hours() -> None:
    """300 comparisons of a rack of 72 GPUs, each read once a second, of which a third is as the last."""
    assert siegmund(ALLOWANCE, CERTAIN, 1.0 / 3.0) > 2000 * 3600 * 300
