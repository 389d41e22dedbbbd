"""Compiled kernels and their definition in NumPy give the same bytes, on whatever numbers there are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from twin import kernels
from twin.kernels import plain

NATIVE = kernels.native()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="no kernels were compiled (python hatch_build.py)")
ODD = (np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, -1e-310, 1e-40, 1e300, -1e300, 3.0e38)
NS = 1_000_000_000
Draw = np.random.Generator
Kernel = Callable[..., Any]


def floats(draw: Draw, *shape: int, scale: float = 1.0, odd: float = 0.05, kind: str = "f8") -> Any:
    """Normal numbers, among them odd ones."""
    out = draw.normal(0.0, scale, shape)
    where = draw.random(shape) < odd
    out[where] = draw.choice(ODD, int(where.sum()))
    with np.errstate(over="ignore"):
        return out.astype(kind)


def flags(draw: Draw, *shape: int, share: float = 0.5) -> Any:
    return draw.random(shape) < share


def times(draw: Draw, n: int) -> Any:
    return (draw.integers(0, 40, n) * NS + draw.integers(0, 3, n) * draw.integers(0, NS, n)).astype(np.int64)


def some_of(draw: Draw, n: int) -> Any:
    """Entities, unique and ascending; or None, which is all."""
    if draw.random() < 0.4:
        return None
    return np.sort(draw.permutation(n)[: draw.integers(1, n + 1)]).astype(np.int32)


def noise(draw: Draw, n: int) -> tuple[Any, ...]:
    odd = draw.choice([0.0, 0.1])
    variance, mean, creeping = floats(draw, 3, n, odd=odd)
    return (
        floats(draw, n, scale=draw.choice([1.0, 20.0]), odd=0.1), times(draw, n), np.abs(variance),
        mean, np.abs(creeping),
        draw.integers(0, 60, n), np.where(flags(draw, n, share=0.1), times(draw, n), 0),
        np.abs(floats(draw, n, odd=odd)),
        1 / 600, 1 / 120, draw.choice([1e-4, 1.0]), 4.0, 10.0 * NS, 30.0,
    )  # fmt: skip


def fit(draw: Draw, n: int) -> tuple[Any, ...]:
    k = int(draw.integers(1, 5))
    weight = np.where(flags(draw, n, share=draw.choice([0.5, 1.0])), draw.random(n), 0.0)
    return (
        floats(draw, k * (k + 1) // 2, n + 3)[:, 2:-1], floats(draw, k, n), np.abs(floats(draw, n)),
        floats(draw, n),
        np.abs(floats(draw, n)) + 0.1, weight, 0.01, 0.05, 1.0, *(floats(draw, n) for _ in range(k)),
    )  # fmt: skip


def sigma(draw: Draw, n: int) -> tuple[Any, ...]:
    k, m = int(draw.integers(1, 5)), int(draw.integers(0, n + 1))
    factor = floats(draw, k * (k + 1) // 2, n, kind="f4")
    return factor, draw.integers(0, n, m), np.zeros(m), *(floats(draw, m) for _ in range(k))


def heat(draw: Draw, n: int) -> tuple[Any, ...]:
    nodes = max(n // 4, 1)
    return (
        *floats(draw, 3, n), *floats(draw, 3, nodes), draw.integers(0, nodes, n).astype(np.int32),
        *floats(draw, 3, n), 100.0 * draw.random(n), 30.0, np.zeros(n),
    )  # fmt: skip


def off(draw: Draw, n: int) -> tuple[Any, ...]:
    return *floats(draw, 3, n), 2.0, np.zeros(n, np.int64)


def cadence(draw: Draw, n: int) -> tuple[Any, ...]:
    entity = some_of(draw, n)
    m = n if entity is None else len(entity)
    same = flags(draw, m) if draw.random() < 0.5 else None
    longest, usual = (
        np.abs(draw.normal(3.0, 3.0, (4, 2, n))).astype("f4")[:, 1],
        draw.random(n).astype("f4") * 9,
    )
    lags = draw.random((2, n)).astype("f4") * 30
    return (
        times(draw, n), times(draw, m) + draw.integers(0, 3) * NS, entity, 45 * NS,
        int(draw.integers(0, 2)) * NS,
        longest, usual, lags[0], lags[1], draw.random(n).astype("f4"),
        draw.integers(0, 130, n).astype(np.int32), same, 2.0,
    )  # fmt: skip


def quanta(draw: Draw, k: int, m: int) -> Any:
    q = draw.integers(-(2**24), 2**24, (k, m)).astype(np.int32)
    for row in range(k):
        where = flags(draw, m, share=draw.choice([0.0, 0.2, 1.0]))
        q[row, where] = draw.integers(-(2**31), -(2**31) + 3, int(where.sum()))
    return q


def latched(draw: Draw, n: int) -> tuple[Any, ...]:
    gauges, entity = 6, some_of(draw, n)
    rows = np.sort(draw.permutation(gauges)[:4]).astype(np.int32)
    quality = np.where(flags(draw, gauges, n, share=draw.choice([0.0, 0.3])), 4, 0).astype(np.uint8)
    return (
        floats(draw, gauges, n, kind="f4"), quality, np.zeros((gauges, n), np.int64),
        np.count_nonzero(quality, axis=1).astype(np.int64), np.zeros(gauges, np.bool_),
        draw.random(gauges).astype("f4"), rows, entity, quanta(draw, 4, n if entity is None else len(entity)),
        np.stack([times(draw, n), times(draw, n)]), draw.integers(0, 2, gauges + 2).astype(np.int32),
    )  # fmt: skip


def counted(draw: Draw, n: int) -> tuple[Any, ...]:
    entity = some_of(draw, n)
    m = n if entity is None else len(entity)
    rows, raw = np.array([0, 2], np.int32), draw.integers(-1, 50, (3, n))
    return (
        raw, draw.integers(0, 2**62, (3, n)), np.zeros((3, n), np.int32), rows, entity,
        draw.integers(-1, 90, (2, m)), draw.integers(0, 40, (2, m)),
    )  # fmt: skip


def whole(draw: Draw, n: int) -> tuple[Any, ...]:
    entity = some_of(draw, n)
    rows = np.array([0, 1, 3], np.int32)
    value = floats(draw, 4, n, scale=100.0, odd=0.05, kind="f4")
    value[1] = np.abs(np.nan_to_num(value[1])) % 50.0
    return (
        value, rows, entity, np.array([1.0, 10.0, 7.0, 0.3], "f4"), np.full((4, 1), -200.0, "f4"),
        np.full((4, 1), 200.0, "f4"), np.zeros((3, n if entity is None else len(entity)), np.int32),
        np.ones((3, 4), np.int64), 3.0e38,
    )  # fmt: skip


def gauges(draw: Draw, n: int) -> tuple[Any, ...]:
    k = int(draw.choice([1, 3]))
    traits = n if k == 1 else k
    new = flags(draw, k, n) if draw.random() < 0.5 else None
    last = np.round(floats(draw, k, n, scale=5.0, kind="f4"))
    value = np.where(flags(draw, k, n), last, np.round(floats(draw, k, n, scale=5.0, kind="f4")))
    vary = draw.random((2, k, n)).astype("f4") if draw.random() < 0.5 else (None, None)
    wide = floats(draw, k, n + 4, scale=2.0, odd=0.0, kind="f4")
    return (
        value, new, last, floats(draw, k, n, scale=5.0, kind="f4"),
        draw.integers(0, 40, (k, n)).astype(np.int32),
        draw.random((k, n)).astype("f4"), draw.integers(0, 200, (k, n)).astype(np.int32), (wide**2)[:, 1:-3],
        flags(draw, k, n), *vary, np.full(traits, 12, np.int32), draw.random(traits).astype("f4"),
        draw.random(traits).astype("f4"), flags(draw, traits),
        1.0 + draw.random(int(draw.integers(1, 90))).astype("f4"),
        int(draw.integers(0, 2)), int(draw.integers(0, 2)), 0.01, 4.0, 36.0, 1e15, 0.25,
        np.zeros(k * n, np.int64), np.zeros(k * n, np.int64),
    )  # fmt: skip


def deviations(draw: Draw, n: int) -> tuple[Any, ...]:
    r = int(draw.choice([1, 3]))
    fresh = flags(draw, r, n) if draw.random() < 0.5 else None
    sums = np.maximum(draw.normal(0.0, 4.0, (2, r, n)), 0.0).astype("f4")
    return (
        floats(draw, r, n, scale=draw.choice([0.5, 3.0]), odd=draw.choice([0.0, 0.05]), kind="f4"), fresh,
        draw.normal(0.0, 1.0, (r, n)).astype("f4"), np.zeros((r, n), np.float32),
        flags(draw, r, n, share=0.3),
        sums[0], sums[1], draw.random((r, n)).astype("f4"), draw.integers(0, 1000, (r, n)).astype(np.int16),
        5.5 + 4.0 * draw.random((r, n)).astype("f4"), 1000.0, 0.4, 2.0, 5.0, 0.96,
        7.5, 25.0, 2.5, int(draw.integers(0, 2)), np.zeros(r * n, np.int64),
    )  # fmt: skip


def arrival(draw: Draw, n: int) -> tuple[Any, ...]:
    heard_ns = times(draw, n)
    hits = flags(draw, n, share=draw.choice([0.0, 0.01])).astype(np.uint16)
    return hits, heard_ns, heard_ns + (draw.random(n) > draw.choice([0.0, 0.01])) * NS - draw.integers(0, 2)


def grown(draw: Draw, n: int) -> tuple[Any, ...]:
    raw = draw.integers(-int(draw.integers(0, 2)), 2**62, (3, n))
    rows, at = np.array([0, 2], np.int32), int(draw.integers(0, n))
    new = raw[rows, at:] + draw.integers(0, draw.integers(2, 12), (2, n - at))
    return raw, draw.integers(0, 9, (3, n)), rows, at, new, np.array([[9.0], [2.0], [8.0]])


def block(draw: Draw, n: int) -> tuple[Any, ...]:
    at = int(draw.integers(0, n))
    rows, source = (np.array(some, np.int32) for some in ([0, 3, 4], [2, 0, 2]))
    return np.zeros((5, n), np.float32), rows, source, at, floats(draw, 3, n - at, kind="f4")


def entered(draw: Draw, n: int) -> tuple[Any, ...]:
    return *floats(draw, 2, n, scale=0.3, kind="f4"), draw.choice([0.1, 0.9]), 5.0


def fallen(draw: Draw, n: int) -> tuple[Any, ...]:
    return *(3.0 + floats(draw, 2, n, scale=0.3, kind="f4")), 0.7, 0.1, 5.0


def linear(draw: Draw, n: int) -> tuple[Any, ...]:
    k = int(draw.integers(1, 4))
    doubt = floats(draw, n) if draw.random() < 0.5 else None
    made = *np.zeros((3, n)), np.zeros(n, np.int64)
    return (
        floats(draw, k, n),
        *floats(draw, 3, n),
        doubt,
        0.1,
        2.0,
        *made,
        *(floats(draw, n) for _ in range(k)),
    )


def lesson(draw: Draw, n: int) -> tuple[Any, ...]:
    untouched = flags(draw, n, share=0.9) if draw.random() < 0.5 else None
    off_ns = np.where(flags(draw, n, share=0.2), times(draw, n), 0)
    return (
        floats(draw, n), times(draw, n), times(draw, n), untouched, floats(draw, n), off_ns,
        *floats(draw, 4, n),
        10.0 * NS, 4.0, 2.0, *np.zeros((3, n)),
    )  # fmt: skip


def doubtful(draw: Draw, n: int) -> tuple[Any, ...]:
    return *floats(draw, 4, n), 0.1, 2.0, np.zeros(n), np.zeros(n, np.int64)


def left(draw: Draw, n: int) -> tuple[Any, ...]:
    return *floats(draw, 3, n), flags(draw, n), np.zeros(n)


def filled(draw: Draw, n: int) -> tuple[Any, ...]:
    return (floats(draw, int(draw.integers(1, 4)), n, odd=0.2),)


def errors(draw: Draw, n: int) -> tuple[Any, ...]:
    return np.ones(n), *floats(draw, int(draw.integers(1, 5)), n, odd=0.2)


def powers(draw: Draw, n: int) -> tuple[Any, ...]:
    tensor, dram = (floats(draw, n) if draw.random() < 0.7 else None for _ in range(2))
    return (
        floats(draw, 5, n), floats(draw, n), tensor, dram, *floats(draw, 4, n), *np.zeros((4, n)),
        np.zeros(n, np.int64),
    )  # fmt: skip


def heard(draw: Draw, n: int) -> tuple[Any, ...]:
    seconds = draw.integers(0, 9, (2, n)).astype(np.float64)
    return *floats(draw, 2, n, odd=0.3), *seconds, 5.0, draw.choice([1.0, 3.0]), np.zeros(n, np.int64)


def guarded(draw: Draw, n: int) -> tuple[Any, ...]:
    value = floats(draw, n, kind="f4")
    bound = np.where(flags(draw, n), value, floats(draw, n)).astype(np.float64)
    return value, bound, bool(flags(draw, 1)[0]), np.zeros(n, np.int32)


def resolved(draw: Draw, n: int) -> tuple[Any, ...]:
    values = np.rint(floats(draw, 3, 2, n, scale=5.0)) * draw.choice([0.1, 1.0])
    return values[0], np.where(flags(draw, 2, n), np.abs(values[1]), np.inf), values[2], 0.02, 1e-4


def lags(draw: Draw, n: int) -> tuple[Any, ...]:
    guessed, unknown = (floats(draw, 2, n) if flags(draw, 1)[0] else np.zeros((2, n)) for _ in range(2))
    aim, share, level = floats(draw, 3, 2, n)
    moved = np.zeros((2, n), np.int64), unknown, 7 * NS, 1e-3, np.zeros((2, n))
    return aim, share, guessed, level, *moved


def clocks(draw: Draw, n: int) -> tuple[Any, ...]:
    return *floats(draw, 8, n), 0.1, np.zeros(n), np.zeros(n, np.int64)


def claimed(draw: Draw, n: int) -> tuple[Any, ...]:
    index = some_of(draw, n)
    index = np.arange(n, dtype=np.int32) if index is None else index
    bottom, top = np.sort(draw.integers(-3, 4, (2, len(index))).astype(np.float64), axis=0)
    lo, hi = np.sort(draw.integers(-3, 4, (2, n)).astype(np.float64), axis=0)
    unset = flags(draw, n, share=0.1)
    lo[unset] = hi[unset] = np.nan
    top[flags(draw, len(index), share=0.1)] = np.inf
    wish, want, value, leased, readback = (
        np.where(flags(draw, m, share=0.4), np.nan, draw.normal(0.0, 3.0, m))
        for m in (len(index), n, n, n, n)
    )
    allowed = flags(draw, len(index)) if draw.random() < 0.5 else None
    return (
        index, bottom, top, wish, allowed, lo, hi, want, value, draw.integers(-1, 3, n).astype(np.int32),
        leased, readback, floats(draw, n, odd=0.0), 3, bool(draw.random() < 0.3),
    )  # fmt: skip


def levels(draw: Draw, n: int) -> tuple[Any, ...]:
    groups, k = max(n // 8, 1), max(n // 4, 1)
    group, full = np.sort(draw.integers(0, groups, n)), draw.integers(0, 5, n) / 4.0
    scale, count = 1.0 / (full.max(initial=0.5) + 1e-9), np.bincount(group, minlength=groups)
    key = np.sort(group + full * scale)
    summed = [np.concatenate([[0.0], np.cumsum(draw.random(n))]) for _ in range(2)]
    level = np.where(flags(draw, k, share=0.1), np.inf, draw.integers(0, 6, k) / 4.0)
    first = np.concatenate([[0], np.cumsum(count)])
    some = draw.integers(0, groups, k)
    return some, level, np.zeros(k), np.zeros(k), key, *summed, first, float(full.max()), scale


def named(draw: Draw, n: int) -> tuple[Any, ...]:
    paths = [f"node{k // 4}/gpu{k % 4}" for k in range(n)]
    known = {path: k for k, path in enumerate(paths)} | {"gpu0": int(draw.integers(0, n)), "gone": -1}
    names, strange = list[str](), ["gpu0", "gone", "no such node", ""]
    while len(names) < n:
        at, odd = int(draw.integers(0, n)), str(draw.choice(strange))
        names += [odd, *paths[at : at + int(draw.integers(1, 20))]]
    return names, known, paths if draw.random() < 0.8 else [], np.zeros(len(names), np.int32)


def moves(draw: Draw, n: int) -> tuple[Any, ...]:
    value, leased, read, lo, hi = (
        np.where(flags(draw, n, share=0.4), np.nan, draw.integers(-4, 5, n) / 2.0) for _ in range(5)
    )
    low, high = np.sort(draw.integers(-3, 4, (2, n)).astype(np.float64), axis=0)
    low[flags(draw, n, share=0.1)] = np.nan
    slew_per_s = np.where(flags(draw, n), 0.0, draw.random(n))
    return (
        value, flags(draw, n), leased, read, low, high, floats(draw, n), lo, hi, slew_per_s, flags(draw, n),
        1.5, float(draw.choice([0.0, 0.6])), int(draw.random() < 0.4), int(draw.integers(-1, 2)),
        int(draw.random() < 0.4),
    )  # fmt: skip


def read_back(draw: Draw, n: int) -> tuple[Any, ...]:
    value, readback = (np.where(flags(draw, n, share=0.2), np.nan, draw.integers(0, 3, n)) for _ in range(2))
    differs_ns = np.where(flags(draw, n), 0, times(draw, n))
    columns = times(draw, n), draw.integers(0, 7, n).astype(np.uint8), differs_ns, flags(draw, n)
    return value, *columns, readback, times(draw, n), np.zeros(n, np.int32), 0.5, 41 * NS, 30 * NS, 10 * NS


class Answer:
    """An acknowledgement as a kernel reads it."""

    __slots__ = ("command", "control", "generation", "id", "name", "state")

    def __init__(self, **parts: Any) -> None:
        for part, value in parts.items():
            setattr(self, part, value)


class OtherAnswer(Answer):
    __slots__ = ()


ODD_ANSWERS: dict[str, tuple[Any, ...]] = {
    "command": ("", "12-", "12", "1-5", "12-+5", "12-5\n12-6", "12-1" + 18 * "0", "12-\u0663", "12-\ud800"),
    "control": ("node.power_cap_w", "gpu", ""), "state": ("", "lost"),
    "generation": (-1, 2**31, 2**70, -(2**70)),
}  # fmt: skip


def answered(draw: Draw, n: int) -> tuple[Any, ...]:
    names, known, paths, place = named(draw, n)
    states = ("accepted", "in_progress", "done", "failed")
    numbers = draw.integers(0, 10 ** draw.integers(1, 19, len(names))).tolist()
    many, answers = draw.choice(states, len(names)).tolist(), list[Answer]()
    for name, number, state in zip(names, numbers, many, strict=True):
        parts = {"id": "", "control": "gpu.power_cap_w", "command": f"12-{number}", "name": name}
        parts["id"] = str(draw.choice(["", "7"])) if n % 2 else ""
        answers.append(Answer(**parts, generation=int(draw.choice([0, 3, 2**31 - 1])), state=state))
    if draw.random() < 0.5:
        odd, part = answers[int(draw.integers(0, len(answers)))], str(draw.choice([*ODD_ANSWERS]))
        setattr(odd, part, ODD_ANSWERS[part][int(draw.integers(0, len(ODD_ANSWERS[part])))])
    elif draw.random() < 0.1:
        answers[-1].__class__ = OtherAnswer
    whole = np.ones((2, len(names)), np.int64)
    return (
        answers,
        "gpu.power_cap_w",
        "12-",
        states,
        known,
        paths,
        place,
        *whole,
        np.ones(len(names), np.uint8),
    )


class Report:
    """A fault as a kernel reads it."""

    __slots__ = ("at_ns", "code", "count", "detail", "id", "name", "table")

    def __init__(self, **parts: Any) -> None:
        for part, value in parts.items():
            setattr(self, part, value)


class OtherReport(Report):
    __slots__ = ()


WORDS = (
    "",
    "f1",
    "gpu",
    "node",
    "h/r1/node0/gpu3",
    "\u00b5 \U0001f525",
    "\ud800",
    "x" * 127,
    "x" * 128,
    "x" * 129,
)
NUMBERS = (0, 1, 48, -1, 2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**80, True)


def reported(draw: Draw, n: int) -> tuple[Any, ...]:
    def some(of: tuple[Any, ...]) -> Any:
        return of[int(draw.integers(0, len(of)))]

    events = [
        (Report if draw.random() < 0.9 else OtherReport)(
            **{part: some(WORDS) for part in ("id", "table", "name", "detail")},
            **{part: some(NUMBERS) for part in ("code", "count", "at_ns")},
        )
        for _ in range(n)
    ]  # fmt: skip
    numbers = np.ones((5, n), np.int64)
    return events, ("node", "gpu"), np.ones(n, np.uint8), numbers[:3], numbers[3], numbers[4]


def of_pairs(draw: Draw, n: int) -> tuple[Any, ...]:
    """Faults of a few pairs within a minute: (pairs, their number, instants, times)."""
    many = int(draw.choice([1, 3, n]))
    pair = draw.integers(0, many, n).astype(np.int32)
    return pair, many, times(draw, n), draw.integers(1, draw.choice([2, 50_000]), n)


def rings(draw: Draw, n: int) -> tuple[Any, ...]:
    pair, many, at_ns, counts = of_pairs(draw, n)
    kept = np.sort(times(draw, 3 * many).reshape(3, many), axis=0)
    received, held = times(draw, 3 * many).reshape(3, many), draw.integers(0, 9, (3, many)).astype(np.int32)
    order, dated = np.lexsort((at_ns, pair)), flags(draw, n, share=draw.choice([0.0, 0.7, 1.0]))
    return order, pair, at_ns, counts, dated, kept, received, held, np.zeros(n, np.bool_), 41 * NS


def buckets(draw: Draw, n: int) -> tuple[Any, ...]:
    pair, many, at_ns, counts = of_pairs(draw, n)
    entity, ignored = draw.integers(0, 5, many).astype(np.int32), flags(draw, many)
    fresh = flags(draw, n, share=0.8)
    bucket = draw.integers(0, draw.choice([2, 2**16]), (11, many)).astype(np.uint16)
    sums, total = draw.integers(0, 99, many), draw.integers(0, 99, 5)
    columns = pair, at_ns, counts, entity[pair], fresh, fresh & ~ignored[pair]
    return *columns, bucket, sums, total, int(draw.choice([1, 3, 60])) * NS, 41 * NS


DRAWN = {
    "keep_newest": rings,
    "count_faults": buckets,
    "read_faults": reported,
    "read_answers": answered,
    "find_places": named,
    "fill_nan": filled,
    "joint": errors,
    "expect_power": powers,
    "hold_power": heard,
    "follow_steps": resolved,
    "beyond": guarded,
    "move_lags": lags,
    "expect_clock": clocks,
    "doubt_moves": doubtful,
    "unaccounted": left,
    "compare_linear": linear,
    "teach_linear": lesson,
    "first_arrival": arrival,
    "count_up": grown,
    "stage_block": block,
    "enters": entered,
    "falls": fallen,
    "learn_noise": noise,
    "learn_fit": fit,
    "fit_sigma": sigma,
    "follow_heat": heat,
    "far_off": off,
    "learn_cadence": cadence,
    "latch": latched,
    "latch_counts": counted,
    "quantise": whole,
    "watch_gauges": gauges,
    "add_deviations": deviations,
    "narrow": claimed,
    "limit_moves": moves,
    "compare_readbacks": read_back,
    "power_at_level": levels,
}


def test_all_are_compared() -> None:
    assert set(DRAWN) == set(kernels.__all__) - {"COMPILED"}


@pytest.mark.parametrize("name", DRAWN)
def test_same_bytes(name: str) -> None:
    for seed in range(400):
        draw = np.random.default_rng(seed)
        arguments = DRAWN[name](draw, int(draw.choice([1, 2, 7, 64, 521, 1030])))
        ours, theirs = copy.deepcopy(arguments), copy.deepcopy(arguments)
        with np.errstate(all="ignore"):
            expected = getattr(plain, name)(*ours)
        assert getattr(NATIVE, name)(*theirs) == expected, f"{name}, seed {seed}"
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if isinstance(a, np.ndarray):
                a, b = _one_nan(a), _one_nan(b)
                assert a.tobytes() == b.tobytes(), f"{name}, seed {seed}, argument {place}: {_first(a, b)}"


def _one_nan(of: Any) -> Any:
    """A copy in which all NaN are alike: of two operands that are NaN a processor gives either."""
    return np.where(np.isnan(of), of.dtype.type(np.nan), of) if of.dtype.kind == "f" else of


def _first(a: Any, b: Any) -> str:
    at = np.flatnonzero(
        a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}") if a.flags.c_contiguous else a != b
    )[:3]
    return f"at {at}: {a.reshape(-1)[at]} and {b.reshape(-1)[at]}"
