"""Observation gaps: times in which nobody watched; an event missing there was only not seen, and counts for
no rate.

Gaps are instants [g, 2] of their begins and ends, ascending and apart; bounded. Pure functions.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I64, NS

LEAST_S = 600.0  # a failure that lasts is not missed in less: it is held for as long. source: estimate
MOST = 64  # gaps; of more the shortest is taken for watched


def nothing() -> I64:
    """Return no gap."""
    return np.zeros((0, 2), np.int64)


def with_gap(gaps: I64, began_ns: int, ended_ns: int) -> I64:
    """Return these gaps with one more; one shorter than LEAST_S is ignored."""
    if ended_ns - began_ns < round(LEAST_S * NS):
        return gaps
    out: I64 = np.concatenate([gaps, np.array([[began_ns, ended_ns]], np.int64)])
    if len(out) > MOST:
        out = np.delete(out, np.argmin(out[:, 1] - out[:, 0]), axis=0)
    return out


def watched_ns(at_ns: I64 | int, gaps: I64) -> I64:
    """Return instants [k] by a clock that stops without observation."""
    at = np.asarray(at_ns, np.int64)
    if not len(gaps):
        return at
    begins, ends = gaps[:, 0], gaps[:, 1]
    out: I64 = at - np.clip(at[..., None] - begins, 0, ends - begins).sum(axis=-1)
    return out


def ago_d(gaps: I64, now_ns: int) -> F64:
    """Return the age in days of the begins and ends of gaps [g, 2]."""
    return (now_ns - gaps) / (86_400.0 * NS)
