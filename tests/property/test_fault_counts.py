"""Faults counted in one batch are counted as they are one by one, also where codes share a row."""

from __future__ import annotations

import numpy as np
import pytest

from twin.catalogue import NS
from twin.health.fault_codes import CATALOGUE
from twin.health.fault_counts import MAX_UNKNOWN, Batch, FaultCounts

NOW_NS = 1_800_000_000 * NS
DEVICES = 3


def drawn(seed: int) -> Batch:
    """Faults of few devices over a month, some heard twice, of more codes than have a row of their own.

    The oldest first: of what is older than the newest three, nobody knows any more whether it was heard.
    """
    draw = np.random.default_rng(seed)
    k = int(draw.integers(1, 60))
    code = draw.choice([31, 79, 94, *range(60_000, 60_002 + 2 * MAX_UNKNOWN)], k).astype(np.int64)
    told = draw.random(k) < 0.7  # of others the time is that of their arrival
    ago_s = np.where(told, draw.choice([1, 59, 61, 3599, 3601, 86_399, 86_401, 2_000_000], k), 0)
    again = np.repeat(np.arange(k), draw.choice([1, 1, 2], k))
    batch = Batch(
        draw.integers(0, DEVICES, k).astype(np.int32),
        code,
        CATALOGUE.rows(code, "gpu"),
        NOW_NS - ago_s.astype(np.int64) * NS,
        draw.choice([1, 2, 70_000], k).astype(np.int64),
        told,
    )
    batch = batch.some(again)
    return batch.some(np.argsort(batch.at_ns, kind="stable"))


def shown(counts: FaultCounts) -> dict[tuple[int, int], tuple[object, ...]]:
    columns = (counts.sums, counts.ring_at, counts.ring_heard, counts.ring_times, *counts.buckets)
    pairs = zip(counts.entity[: counts.size].tolist(), counts.code[: counts.size].tolist(), strict=True)
    return {pair: tuple(c[:, k].tolist() for c in columns) for k, pair in enumerate(pairs)}


@pytest.mark.parametrize("seed", range(25))
def test_a_batch_counts_as_its_faults_do_one_by_one(seed: int) -> None:
    batch = drawn(seed)
    at_once, singly = FaultCounts(DEVICES, now_ns=NOW_NS), FaultCounts(DEVICES, now_ns=NOW_NS)
    # Of devices that have all rows they may have, no order of arrival decides who gets one
    for counts in (at_once, singly):
        for device in range(DEVICES):
            code = np.arange(60_000, 60_000 + MAX_UNKNOWN + 1)
            of = np.full(len(code), device, np.int32)
            none = np.zeros(len(code), np.int64)
            counts.add(Batch(of, code, none.astype(np.int32), none + NOW_NS - NS, none + 1, none > 0), NOW_NS)
        assert counts.merged == DEVICES
    fresh = at_once.add(batch, NOW_NS)
    one_by_one = [bool(singly.add(batch.some([k]), NOW_NS)[0]) for k in range(len(batch.code))]
    assert fresh.tolist() == one_by_one
    assert shown(at_once) == shown(singly)
    assert np.array_equal(at_once.total, singly.total)
    kept = [bucket[:, : at_once.size].sum(axis=0, dtype=np.int64) for bucket in at_once.buckets]
    assert np.array_equal(at_once.sums[:, : at_once.size], kept), "a bucket that is full counts no further"
