"""The codec of the history gives back what it was given, bit for bit, in few bytes, and refuses damage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from twin.catalogue import NS, StorageError
from twin.run import history_chunks as chunks

T = np.arange(60, dtype=np.int64) * 10 * NS + 1_700_000_000 * NS


def quantised(quantum: float, n: int = 1024, noise: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(1)
    q = np.rint(rng.normal(60, 5, n) / quantum + rng.normal(0, noise, (60, n)))
    return q.astype(np.float32) * np.float32(quantum)


@pytest.mark.parametrize("quantum", [0.5, 0.01, 1e-5, 0.0, 7.0])
def test_gauges_come_back_bit_for_bit(quantum: float) -> None:
    values = quantised(0.01)
    t_ns, back = chunks.unpack_series(chunks.pack_series(T, values, quantum))
    np.testing.assert_array_equal(t_ns, T)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))


@settings(max_examples=60)
@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8),
               elements=st.floats(width=32, allow_nan=True, allow_infinity=True)),
    st.sampled_from([0.0, 0.5, 1e-3, 1e6]),
)  # fmt: skip
def test_any_floats_come_back(values: np.ndarray, quantum: float) -> None:
    t_ns = np.sort(np.random.default_rng(0).integers(0, 2**62, len(values)))
    back_t, back = chunks.unpack_series(chunks.pack_series(t_ns, values, quantum))
    np.testing.assert_array_equal(back_t, t_ns)
    np.testing.assert_array_equal(back, values)


@settings(max_examples=40)
@given(hnp.arrays(np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8)))
def test_any_counts_come_back(values: np.ndarray) -> None:
    _, back = chunks.unpack_series(chunks.pack_series(T[: len(values)], values))
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("quantum", [0.0, 0.5])
def test_a_gap_keeps_its_quality(quantum: float) -> None:
    values = quantised(0.5, n=4)
    quality = np.zeros((60, 4), np.uint8)
    quality[3, 1], quality[5, 2] = 1, 4
    chunks.quality_words(values, quality)
    assert np.isnan(values[3, 1])
    _, back = chunks.unpack_series(chunks.pack_series(T, values, quantum))
    np.testing.assert_array_equal(chunks.quality_of(back), quality)
    np.testing.assert_array_equal(back, values)


def test_columns_are_those_of_the_whole() -> None:
    values = quantised(0.5)
    data = chunks.pack_series(T, values, 0.5)
    _, some = chunks.unpack_series(data, np.array([1023, 0, 7]))
    np.testing.assert_array_equal(some, values[:, [1023, 0, 7]])
    with pytest.raises(StorageError, match="1024 entities"):
        chunks.unpack_series(data, np.array([1024]))


def test_what_is_measured_takes_about_a_byte() -> None:
    values = quantised(0.5, noise=10.0)  # a power of GPUs: 5 W of noise
    assert len(chunks.pack_series(T, values, 0.5)) < 0.9 * values.size
    counts = np.cumsum(np.random.default_rng(1).integers(8_000_000, 9_000_000, (60, 1024)), axis=0)
    assert len(chunks.pack_series(T, counts)) < 3.2 * counts.size
    still = np.broadcast_to(np.float32(1.5), (60, 1024))
    assert len(chunks.pack_series(T, still, 0.5)) < 200


@pytest.mark.parametrize("at", [0, 1, 3, 9, 13, 20, 60, -1])
def test_damage_is_found(at: int) -> None:
    data = bytearray(chunks.pack_series(T, quantised(0.5, n=16), 0.5))
    data[at] ^= 0x41
    with pytest.raises(StorageError):
        chunks.unpack_series(bytes(data))
    with pytest.raises(StorageError):
        chunks.unpack_series(bytes(data[:5]))


def test_coarse_slots_are_mean_low_and_high() -> None:
    t_ns = np.array([0, 10, 59, 60, 200], np.int64) * NS
    values = np.array([[1, np.nan], [2, np.nan], [6, np.nan], [5, 7], [np.nan, 1]], np.float32)
    slots = chunks.coarsen(t_ns, values, 60.0)
    np.testing.assert_array_equal(slots.t_ns, np.array([0, 60, 180]) * NS)
    np.testing.assert_array_equal(slots.mean, np.array([[3, np.nan], [5, 7], [np.nan, 1]], np.float32))
    np.testing.assert_array_equal(slots.low, np.array([[1, np.nan], [5, 7], [np.nan, 1]], np.float32))
    np.testing.assert_array_equal(slots.high, np.array([[6, np.nan], [5, 7], [np.nan, 1]], np.float32))
    back = chunks.unpack_coarse(chunks.pack_coarse(slots, 0.5))
    for given_part, part in zip(slots, back, strict=True):
        np.testing.assert_array_equal(part, given_part)


def test_coarse_counters_are_the_last_total() -> None:
    slots = chunks.coarsen(T[:7], np.array([[1], [2], [3], [4], [5], [-1], [-1]], np.int64), 60.0)
    back = chunks.unpack_coarse(chunks.pack_coarse(slots))
    assert back.mean.dtype == np.int64
    np.testing.assert_array_equal(back.high, slots.mean)
    assert back.mean.max() == 5


def test_series_are_merged_by_instant() -> None:
    a, b = np.array([1, 2, 5], np.int64), np.array([2, 3], np.int64)
    t_ns, values = chunks.merge(a, np.array([[1.0], [2], [5]]), b, np.array([[20.0], [30]]))
    assert t_ns.tolist() == [1, 2, 3, 5]
    assert values[:, 0].tolist() == [1, 20, 30, 5]
