"""Kernels in NumPy: the definition of what each does, and its fallback where nothing is compiled.

Row by row and cell by cell: no result depends on another row, so that compiled loops need no second look.
"""

from __future__ import annotations

from hashlib import blake2b
from operator import attrgetter
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
U8: TypeAlias = NDArray[np.uint8]
Bool: TypeAlias = NDArray[np.bool_]

NS = 1_000_000_000
# The integers of a frame that stand for no value (`twin.telemetry.frame`), and the qualities of a state
MISSING_Q, UNTRUSTED_Q, ABSURD_Q, FIRST_VALID_Q = -(2**31), -(2**31) + 1, -(2**31) + 2, -(2**31) + 16
GOOD, UNTRUSTED, OUT_OF_RANGE, MISSING = 0, 2, 3, 4
# Of `twin.telemetry.cadence`
USUAL_GAPS, LAG_GAPS = 32, 8  # memories of the averages
MOST_LAG_S = 60.0  # a clock that is later is wrong, and its readings count as old. source: estimate
# Readings of a block, a power of two: old gaps are forgotten after two. source: simulated losses of 0 to 30 %
BLOCK = 64
SENT, IN_PROGRESS, DONE = 1, 3, 4  # states of a lease (`twin.control.leases`)
MOST_COUNT = 2**16 - 1  # in a bucket of `twin.health.fault_counts`
MOST_STREAK, LEAST_WILD = 999, 0.01  # of `twin.diagnosis.cusum`


def learn_noise(
    difference: F64,
    received_ns: I64,
    variance: F64,
    mean: F64,
    creeping: F64,
    count: I64,
    off_ns: I64,
    floor: F64,
    last_share: float,
    mean_share: float,
    creep_share: float,
    sigmas: float,
    fault_ns: float,
    warmup: float,
) -> None:
    """Take residuals into a noise [n]; see `ResidualNoise`, whose columns are changed."""
    size = np.abs(difference)
    known = np.isfinite(size)
    bound = np.sqrt(variance)
    np.maximum(bound, floor, out=bound)
    bound *= sigmas
    bound[count < warmup] = np.inf
    far = size > bound
    far &= known
    if far.any() or off_ns.any():
        near = known & ~(size > bound / 2)
        off_ns[:] = np.where(near, 0, np.where(far & (off_ns == 0), received_ns, off_ns))
        known &= ~((off_ns > 0) & (received_ns - off_ns >= fault_ns))
        np.copyto(size, bound, where=far)
    count += known
    since = 1.0 / np.maximum(count, 1)
    signed = np.copysign(size, difference)
    signed -= mean
    np.copyto(signed, 0.0, where=~known)
    step = signed * np.maximum(since, mean_share)
    mean += step
    signed *= signed - step  # (r - m0) (r - m)
    variance -= creeping  # the other part alone
    signed -= variance
    signed *= np.maximum(since, last_share)
    step = mean * mean
    step -= creeping
    step *= np.maximum(since, creep_share)
    for gained, of in ((signed, variance), (step, creeping)):
        np.copyto(gained, 0.0, where=~known)
        of += gained
    variance += creeping


def learn_fit(
    normal: F64,
    moment: F64,
    taught_s: F64,
    y: F64,
    error: F64,
    weight: F64,
    fade: float,
    worth: float,
    dt_s: float,
    *features: F64,
) -> None:
    """Take a reading per row into normal equations; see `Fit`, whose columns are changed."""
    taken = weight > 0.0
    keep = 1.0 - weight * fade
    clean = taken.all()
    sure = error if clean else np.where(taken, error, 1.0)  # what is not taken in may be NaN throughout
    information = weight * (worth / (sure * sure))
    xs = features if clean else [np.where(taken, x, 0.0) for x in features]
    target = y if clean else np.where(taken, y, 0.0)
    at = 0
    for i, x in enumerate(xs):
        weighted = information * x
        for other in xs[i:]:
            cell = normal[at]
            cell *= keep
            cell += weighted * other
            at += 1
        cell = moment[i]
        cell *= keep
        cell += weighted * target
    taught_s += weight * dt_s


def fit_sigma(factor: F32, at: I64, out: F64, *features: F64) -> None:
    """Write sqrt(x' W' W x) of the rows `at` [m]; see `Covariance.sigma`."""
    some, first = factor[:, at], 0
    out[:] = 0.0
    for i in range(len(features)):
        along = some[first] * features[0]
        for j in range(1, i + 1):
            along = along + some[first + j] * features[j]
        out += along * along
        first += i + 1
    np.sqrt(out, out=out)


def hold_power(
    read_w: F64, power_w: F64, silent_s: F64, settled_s: F64, hold_s: float, dt_s: float, at: I64
) -> int:
    """Take in powers (NaN: none), which are held for a while where they are missing.

    Returns how many GPUs begin anew, as they were silent for longer; writes which into `at`.
    """
    known = np.isfinite(read_w)
    settled_s += dt_s
    np.copyto(power_w, read_w, where=known)
    lost = silent_s > hold_s
    silent_s += dt_s
    silent_s[known] = 0.0
    settled_s[lost | (silent_s > hold_s)] = 0.0
    anew = np.flatnonzero(settled_s <= dt_s)
    at[: len(anew)] = anew
    return len(anew)


def follow_heat(
    heated: F64,
    twice: F64,
    power_w: F64,
    factor: F64,
    left: F64,
    inlet_c: F64,
    node: I32,
    offset: F64,
    resistance: F64,
    lag: F64,
    settled_s: F64,
    least_s: float,
    expected: F64,
) -> None:
    """Move the lags `heated` and `twice` of GPUs, and write their `expected` temperature.

    `factor`, `left` and `inlet_c` are of nodes, `node` is each GPU's.
    """
    stay = left[node]
    for level, goal in ((heated, power_w * factor[node]), (twice, heated)):
        level -= goal
        level *= stay
        level += goal
    np.take(inlet_c, node, out=expected)
    expected += offset
    expected += resistance * heated
    expected -= lag * (heated - twice)
    np.copyto(expected, np.nan, where=settled_s < least_s)


def fill_nan(values: F64) -> None:
    """Put 0 for NaN, and the largest finite numbers for infinities."""
    np.nan_to_num(values, copy=False)


def joint(total: F64, *sigmas: F64) -> None:
    """Write 1 sigma of a sum of independent errors; what is not known counts for nothing."""
    total[:] = 0.0
    for sigma in sigmas:
        total += np.nan_to_num(sigma, posinf=0.0) ** 2
    np.sqrt(total, out=total)


def follow_steps(values: F64, step: F64, last: F64, tolerance: float, least: float) -> None:
    """Take in readings [k, n], NaN for none; see `Steps`, whose columns are changed."""
    change = np.abs(values - last)
    # A device that stops or starts shows no step: 0 is a multiple of all
    change[(values == 0.0) | (last == 0.0)] = 0.0
    at = np.nonzero((change > 0.0) & (step > 0.0))
    found, value = np.minimum(step[at], change[at]), values[at]
    times = value / found
    left = np.abs(times - np.rint(times))
    found = np.where(left <= tolerance, found, left * found)
    step[at] = np.where(found > least * np.abs(value), found, 0.0)
    np.copyto(last, values, where=np.isfinite(values))


def move_lags(
    aim: F64,
    share: F64,
    guessed: F64,
    level: F64,
    known_ns: I64,
    unknown: F64,
    now_ns: int,
    least: float,
    out: F64,
) -> None:
    """Move lags [k, n] by a share of the way to their aims, where these are known; see `Lag`."""
    known = np.isfinite(aim)
    np.add(level, (aim - level) * share, out=level, where=known)
    if unknown.any() or guessed.any():
        np.add(unknown, (guessed - unknown) * share, out=unknown, where=known)
        unknown[unknown < least] = 0.0
    np.copyto(known_ns, now_ns, where=known)
    out[:] = np.where(known, level, np.nan)


def expect_power(
    theta: F64,
    sm: F64,
    tensor: F64 | None,
    dram: F64 | None,
    temp_c: F64,
    usual_c: F64,
    leak_w_per_k: F64,
    cap_w: F64,
    warmer_k: F64,
    static_w: F64,
    dynamic_w: F64,
    expected_w: F64,
    at: I64,
) -> int:
    """Write the power of GPUs by activity, at most the cap; see `GpuPower.expect`.

    `theta` has the coefficients of idle, SM, tensor and memory activity first. Returns how many are at their
    cap; writes which into `at`.
    """
    np.multiply(theta[1], sm, out=dynamic_w)
    for of, share in ((theta[2], tensor), (theta[3], dram)):
        if share is not None:
            dynamic_w += of * share
    warmer_k[:] = np.nan_to_num(temp_c - usual_c)
    np.add(theta[0], leak_w_per_k * warmer_k, out=static_w)
    np.add(dynamic_w, static_w, out=expected_w)
    held = np.flatnonzero(expected_w > cap_w)  # no reading of a cap is none
    expected_w[held] = cap_w[held]
    at[: len(held)] = held
    return len(held)


def expect_clock(
    static_w: F64,
    dynamic_w: F64,
    cap_w: F64,
    most_w: F64,
    activity: F64,
    temp_c: F64,
    hot_c: F64,
    top_hz: F64,
    working: float,
    expected_hz: F64,
    at: I64,
) -> int:
    """Write the clock of GPUs that nothing slows; NaN where idle or hot, or where a cap may bind.

    Returns how many draw more than their cap; writes which into `at`.
    """
    may_bind = np.isnan(dynamic_w) & (cap_w < most_w)
    expected_hz[:] = np.where((activity > working) & ~(temp_c >= hot_c) & ~may_bind, top_hz, np.nan)
    held = np.flatnonzero(static_w + dynamic_w > cap_w)
    at[: len(held)] = held
    return len(held)


def far_off(measured: F64, expected: F64, sigma: F64, sigmas: float, at: I64) -> int:
    """Write the places where a reading is off by more than so many sigmas into `at`; returns their number."""
    found = np.flatnonzero(np.abs(measured - expected) > sigma * sigmas)
    at[: len(found)] = found
    return len(found)


def beyond(value: F32, bound: F64, low: bool, at: I32) -> int:
    """Places at which a value is above a bound, or below it where `low`; returns their number."""
    found = np.flatnonzero(value < bound if low else value > bound)
    at[: len(found)] = found
    return len(found)


def compare_linear(
    theta: F64,
    before: F64,
    sigma: F64,
    measured: F64,
    doubt: F64 | None,
    move_share: float,
    sigmas: float,
    expected: F64,
    loose: F64,
    total: F64,
    at: I64,
    *features: F64,
) -> int:
    """Write a linear relation's expectation, what doubts it beside its noise, and both doubts' `total`.

    Returns how many readings are off by more than so many sigmas; writes which into `at`.
    """
    np.multiply(theta[0], features[0], out=expected)
    for of, x in zip(theta[1:], features[1:], strict=True):
        expected += of * x
    np.abs(np.subtract(expected, before, out=loose), out=loose)
    loose *= move_share
    loose[np.isnan(loose)] = 0.0
    if doubt is not None:
        loose += doubt
    np.add(sigma, loose, out=total)
    return far_off(measured, expected, total, sigmas, at)


def doubt_moves(
    expected: F64,
    before: F64,
    sigma: F64,
    measured: F64,
    move_share: float,
    sigmas: float,
    doubt: F64,
    at: I64,
) -> int:
    """Write the doubt in an expectation that moved since `before`, and in its noise.

    Returns how many readings are off by more than so many sigmas; writes which into `at`.
    """
    moved = np.abs(expected - before)
    np.copyto(moved, 0.0, where=~np.isfinite(moved))
    np.add(moved * move_share, sigma, out=doubt)
    return far_off(measured, expected, doubt, sigmas, at)


def unaccounted(measured: F64, expected: F64, accounted: F64, fresh: Bool, rest: F64) -> None:
    """Write what is left of a difference that is partly `accounted` for; NaN where no reading is `fresh`."""
    off = measured - expected
    off = np.sign(off) * np.maximum(np.abs(off) - accounted, 0.0)
    rest[:] = np.where(fresh, off, np.nan)


def teach_linear(
    y: F64,
    read_ns: I64,
    taught_ns: I64,
    untouched: Bool | None,
    expected: F64,
    off_ns: I64,
    sigma: F64,
    unknown: F64,
    loose: F64,
    error: F64,
    fault_ns: float,
    sigmas: float,
    known_sigmas: float,
    clipped: F64,
    weight: F64,
    rest: F64,
) -> int:
    """Write what new readings teach a linear relation; returns how many are new.

    `clipped`: the readings, bounded; `weight`: how much each counts; `rest`: what is left for its noise.
    """
    fresh = read_ns > taught_ns
    taught_ns[:] = read_ns
    if untouched is not None:
        fresh &= untouched
    off = y - expected
    usable = fresh & np.isfinite(off) & ~((off_ns > 0) & (read_ns - off_ns >= fault_ns))
    bound = np.where(np.isfinite(sigma), sigmas * (sigma + unknown), np.inf) + loose
    np.minimum(np.maximum(y, expected - bound, out=clipped), expected + bound, out=clipped)
    # A reading during a move errs by more
    pace = loose / error
    weight[:] = np.where(usable, 1.0 / (1.0 + pace * pace), 0.0)
    off = np.sign(off) * np.maximum(np.abs(off) - loose - known_sigmas * unknown, 0.0)
    rest[:] = np.where(fresh, off, np.nan)
    return int(np.count_nonzero(fresh))


def learn_cadence(
    received_ns: I64,
    t_ns: I64,
    entity: I32 | None,
    now_ns: int,
    paused_ns: int,
    longest_s: F32,
    usual_s: F32,
    lag_s: F32,
    last_lag_s: F32,
    repeats: F32,
    gaps: I32,
    same: Bool | None,
    jump_s: float,
) -> int:
    """Take in messages of `t_ns` [m] after those of `received_ns` [n]; changes the columns of `Cadence`.

    Returns how many gaps were learned: not of a first message, nor of those received before a pause.
    """
    before_ns = received_ns if entity is None else received_ns[entity]
    apart_ns = t_ns - before_ns
    usable = (before_ns > paused_ns) & (apart_ns > 0)
    at: Any = slice(None) if entity is None else entity
    if not usable.all():
        some = np.flatnonzero(usable).astype(np.int32)
        apart_ns, t_ns = apart_ns[some], t_ns[some]
        same = None if same is None else same[some]
        at = some if entity is None else entity[some]
    if not len(t_ns):
        return 0
    gap, late = (apart_ns / NS).astype(np.float32), ((now_ns - t_ns) / NS).astype(np.float32)
    jump = late - last_lag_s[at]  # the stamps jumped back by so much, or on
    back = (jump < -jump_s) & (gaps[at] > 0)
    if back.any():
        most = np.maximum(gap + jump, np.float32(0.0)) + np.maximum(usual_s[at], np.float32(jump_s))
        gap = np.where(back, np.minimum(gap, most), gap)
    last_lag_s[at] = late
    many = gaps[at] + np.int32(1)
    gaps[at] = many
    share = np.float32(1.0) / np.minimum(many, USUAL_GAPS).astype(np.float32)
    for array, new in ((usual_s, gap), (repeats, same)):
        if new is not None:
            array[at] += share * (new - array[at])
    lag = np.minimum(np.maximum(late, np.float32(0.0)), np.float32(MOST_LAG_S))
    lag_s[at] += (lag - lag_s[at]) * np.maximum(share, np.float32(1.0 / LAG_GAPS))
    first, second = longest_s[0], longest_s[1]
    cells = np.arange(len(first), dtype=np.int32)[at]
    longer = np.flatnonzero(gap > second[at])
    if len(longer):
        cell, long = cells[longer], gap[longer]
        second[cell] = np.maximum(second[cell], np.minimum(long, first[cell]))
        first[cell] = np.maximum(first[cell], long)
    full = cells[(many & (BLOCK - 1)) == 0]
    if len(full):
        longest_s[2:, full] = longest_s[:2, full]
        longest_s[:2, full] = 0.0
    return len(t_ns)


def first_arrival(hits: NDArray[np.uint16], received_ns: I64, t_ns: I64) -> bool:
    """Return True if nothing is pending, and all of `t_ns` is at or after the last one received."""
    return not hits.any() and bool((received_ns <= t_ns).all())


def count_up(raw: I64, gain: I64, rows: I32, at: int, new: I64, most: F64) -> bool:
    """Move counters of some rows to `new` [k, m], from column `at` on, where none grew by more than `most`.

    False, and nothing, where any did, or was never read. `most` is [rows, 1].
    """
    cells = (rows, slice(at, at + new.shape[1]))
    old = raw[cells]
    step = new - old
    if new.size and not (old.min() >= 0 and step.min() >= 0 and (step <= most[rows]).all()):
        return False
    gain[cells] += step
    raw[cells] = new
    return True


def stage_block(value: F32, rows: I32, source: I32, at: int, block: F32) -> None:
    """Copy rows `source` of a block [k, m] to some rows, from column `at` on."""
    value[rows, at : at + block.shape[1]] = block[source]


def enters(last: F32, value: F32, low: float, high: float) -> bool:
    """Return True if a value comes into a range in which its last one was not."""
    inside, was = (value >= low) & (value <= high), (last >= low) & (last <= high)
    return bool((inside & ~was).any())


def falls(last: F32, value: F32, share: float, low: float, high: float) -> bool:
    """Return True if a value of at least `low` is below a share of its last one, of at most `high`."""
    return bool(((value < np.float32(share) * last) & (value >= low) & (last <= high)).any())


def latch(
    value: F32,
    quality: U8,
    good_ns: I64,
    bad_count: I64,
    once_good: Bool,
    quantum: F32,
    rows: I32,
    entity: I32 | None,
    q: I32,
    t_ns: I64,
    group_of_row: I32,
) -> None:
    """Latch the quanta `q` [k, m] of some rows; see `TableState`, whose columns are changed.

    `t_ns` [groups, n] are the instants of the messages before.
    """
    cells: Any = slice(None) if entity is None else entity
    for row, quanta in zip(rows.tolist(), q, strict=True):
        good = quanta >= FIRST_VALID_Q
        scaled = quanta.astype(np.float32) * quantum[row]
        if good.all():
            value[row, cells] = scaled
            if bad_count[row]:
                quality[row, cells] = GOOD
                bad_count[row] = np.count_nonzero(quality[row])
            continue
        at = np.arange(value.shape[1], dtype=np.int32)[cells]
        fresh, bad, why = at[good], at[~good], quanta[~good]
        newly = bad[quality[row, bad] == GOOD]
        once_good[row] |= bool(len(newly))
        good_ns[row, newly] = t_ns[group_of_row[row], newly]
        value[row, fresh] = scaled[good]
        quality[row, fresh] = GOOD
        known = [why == UNTRUSTED_Q, why == ABSURD_Q]
        quality[row, bad] = np.select(known, [UNTRUSTED, OUT_OF_RANGE], MISSING)
        bad_count[row] = np.count_nonzero(quality[row])


def latch_counts(
    raw: I64, total: I64, resets: I32, rows: I32, entity: I32 | None, new: I64, gain: I64
) -> None:
    """Latch counters [k, m]; see `TableState.apply_counts`, whose columns are changed."""
    cells: Any = rows if entity is None else np.ix_(rows, entity)
    old = raw[cells]
    moved = (old >= 0) & (new >= 0) & (new != old + gain)
    if moved.any():
        resets[cells] += moved
    raw[cells] = new
    total[cells] += gain


def quantise(
    value: F32,
    rows: I32,
    entity: I32 | None,
    per_quantum: F32,
    low: F32,
    high: F32,
    q: I32,
    odd: I64,
    untrusted: float,
) -> int:
    """Write whole quanta of some rows into `q` [k, m]; returns how many rows have other than sane values.

    `low` and `high` are [rows, 1]. `odd` [k, 4]: of each row how many values are missing, untrusted and
    absurd, and the first absurd one.
    """
    odd[:] = 0
    for k, row in enumerate(rows.tolist()):
        some = value[row] if entity is None else value[row, entity]
        sane = (some >= low[row, 0]) & (some <= high[row, 0])
        whole = bool(sane.all())
        scaled = (some if whole else np.where(sane, some, np.float32(0.0))) * per_quantum[row]
        np.copyto(q[k], np.rint(scaled, out=scaled), casting="unsafe")
        if whole:
            continue
        missing, distrusted = np.isnan(some), some == np.float32(untrusted)
        distrusted &= ~sane
        absurd = ~(sane | missing | distrusted)
        for j, (mask, code) in enumerate(
            ((missing, MISSING_Q), (distrusted, UNTRUSTED_Q), (absurd, ABSURD_Q))
        ):
            q[k, mask], odd[k, j] = code, np.count_nonzero(mask)
        odd[k, 3] = absurd.argmax()
    return int(np.count_nonzero(odd[:, :3].any(axis=1)))


def watch_gauges(
    value: F32,
    new: Bool | None,
    last: F32,
    before: F32,
    run: I32,
    moves: F32,
    count: I32,
    jump: F32,
    frozen: Bool,
    change: F32 | None,
    varied: F32 | None,
    least_run: I32,
    least_k: F32,
    least_pu: F32,
    noisy: Bool,
    widening: F32,
    settled: int,
    thaw: int,
    per_reading: float,
    still: float,
    jump_squared: float,
    far_back: float,
    other_size: float,
    stood_at: I64,
    leapt_at: I64,
) -> tuple[int, int]:
    """Take in values [k, w] of gauges where they are `new` (None: all); `Bank` has the columns.

    The limits (`least_run` to `noisy`) are those of a row, or of a column where there is one row; `widening`
    is by readings known. Writes the cells that have stood still for long, and those that leapt far and back;
    returns how many these are. `change` and `varied`, if given, learn how many changes differ in size from
    the last.
    """
    k, w = value.shape
    least, k_least, pu_least, is_noisy = (
        of.reshape((1, w) if k == 1 else (k, 1)) for of in (least_run, least_k, least_pu, noisy)
    )
    everywhere: Any = True
    where = everywhere if new is None else new
    changed = (value != last) & where
    run += where
    np.copyto(run, 0, where=changed)
    rate: Any = np.float32(per_reading)
    if not settled:  # before counting
        rate = np.maximum(np.float32(1.0) / (count.astype(np.float32) + np.float32(1.0)), rate)
    if new is not None:
        rate = rate * new.astype(np.float32)
    if change is not None and varied is not None:
        _vary(np.abs(value - last), changed, rate * np.ones_like(value), change, varied, other_size)
    # A share of changes learned while it stands still would make standing still usual.
    up = (changed.astype(np.float32) - moves) * rate
    np.copyto(up, 0.0, where=run * moves.astype(np.float64) >= still)
    moves += up
    if thaw:
        np.copyto(frozen, False, where=where)
    stood = np.flatnonzero(run >= least)
    # A jump: both steps, to the last reading and from it, go the same way
    rise, fall, across = last - before, last - value, np.abs(value - before)
    back = np.fmax(np.maximum(np.minimum(rise, fall), -np.maximum(rise, fall)), np.float32(0.0))
    if new is not None:
        back *= new
    np.minimum(back, np.float32(far_back), out=back)
    square = back * back
    usual = jump * np.float32(jump_squared)
    far = (square > usual) & is_noisy
    far &= square / widening[np.minimum(count, len(widening) - 1)] > usual
    far &= back > k_least + pu_least * np.abs(value)
    learned = (square - jump) * rate
    np.copyto(learned, 0.0, where=far)
    jump += learned
    # Where its neighbours are farther from each other than from it, the level has moved
    leapt = np.flatnonzero(far & ~(across > back))
    np.copyto(before, last, where=where)
    np.copyto(last, value, where=where)
    stood_at[: len(stood)], leapt_at[: len(leapt)] = stood, leapt
    return len(stood), len(leapt)


def _vary(size: F32, changed: Bool, rate: F32, change: F32, varied: F32, other_size: float) -> None:
    """Learn of these changes which share is of another size than the change before."""
    differs = (np.abs(size - change) > change * np.float32(other_size)).astype(np.float32)
    np.add(varied, (differs - varied) * rate, out=varied, where=changed)
    np.copyto(change, size, where=changed)


def add_deviations(
    z: F32,
    fresh: Bool | None,
    mean: F32,
    last: F32,
    live: Bool,
    above: F32,
    below: F32,
    wild: F32,
    streak: NDArray[np.int16],
    certain: F32,
    farthest: float,
    mean_share: float,
    off_sigmas: float,
    wild_sigmas: float,
    wild_kept: float,
    most: float,
    huge_sigmas: float,
    allowance: float,
    any_wild: int,
    at: I64,
) -> tuple[float, int, int]:
    """Take in deviations [r, w] where they are `fresh`; see `CusumBoard`, whose columns are changed.

    `z` is bounded in place, NaN is 0. Returns the largest deviation, whether a sum is `certain`, and how many
    cells counted theirs; writes which into `at`.
    """
    np.copyto(z, 0.0, where=np.isnan(z))
    np.minimum(np.maximum(z, np.float32(-farthest), out=z), np.float32(farthest), out=z)
    size = np.abs(z)
    largest = float(size.max(initial=0.0))
    moved = (z - mean) * np.float32(mean_share)
    odd = (size > np.float32(off_sigmas)) | live
    if fresh is None:
        last[:] = z
    else:
        moved *= fresh
        odd &= fresh
        np.copyto(last, z, where=fresh)
    mean += moved
    cells = np.flatnonzero(odd)
    at[: len(cells)] = cells
    if not len(cells):
        return largest, 0, 0
    here = np.unravel_index(cells, z.shape)
    one = z[here]
    row = np.minimum(streak[here] + np.int16(1), np.int16(MOST_STREAK))
    row *= one * np.sign(mean[here]) > np.float32(off_sigmas)
    streak[here] = row
    lives = row > 0
    if largest > wild_sigmas or any_wild:
        many = wild[here] * np.float32(wild_kept)
        many += np.abs(one) > np.float32(wild_sigmas)
        many[many < np.float32(LEAST_WILD)] = 0.0
        wild[here] = many
        lives |= many > 0.0
    step = np.minimum(np.maximum(one, np.float32(-most)), np.float32(most))
    huge = np.abs(one) > np.float32(huge_sigmas)
    bound, sure = certain[here], 0
    step[huge] = np.copysign(np.float32(allowance) + bound[huge], one[huge])
    for sums, sign in ((above, np.float32(1.0)), (below, np.float32(-1.0))):
        added = sums[here] + sign * step
        added -= np.float32(allowance)
        np.minimum(np.maximum(added, np.float32(0.0), out=added), np.float32(2.0) * bound, out=added)
        sums[here] = added
        lives |= added > 0.0
        sure |= bool((added >= bound).any())
    live[here] = lives
    return largest, sure, len(cells)


def narrow(
    index: I32,
    bottom: F64,
    top: F64,
    wish: F64,
    allowed: Bool | None,
    lo: F64,
    hi: F64,
    want: F64,
    value: F64,
    by: I32,
    leased: F64,
    readback: F64,
    safe: F64,
    number: int,
    states: bool,
) -> int:
    """Narrow `lo` and `hi` [n] by a claim [k] on the entities `index`; see `Arbiter.settle`, whose columns
    are changed. Returns on how many the claim cannot have its way.
    """
    keep = np.isfinite(lo[index])
    if allowed is not None:
        keep &= allowed
    if not keep.all():
        index, bottom, top, wish = index[keep], bottom[keep], top[keep], wish[keep]
    nlo, nhi = np.clip(bottom, lo[index], hi[index]), np.clip(top, lo[index], hi[index])
    wished = np.clip(wish, bottom, top)  # NaN, no wish, is never cut
    lost = int(((top < lo[index]) | (bottom > hi[index]) | (wished < nlo) | (wished > nhi)).sum())
    lo[index], hi[index] = nlo, nhi
    want[index] = np.where(np.isnan(want[index]), wish, want[index])
    stands = np.where(np.isnan(leased[index]), readback[index], leased[index])
    wanted = np.where(np.isnan(want[index]), stands, want[index])
    # Where neither a wish nor a reading exists, the safe value is the best guess
    wanted = np.clip(np.where(np.isnan(wanted), safe[index], wanted), nlo, nhi)
    if states:  # a named level: between two of them there is nothing
        wanted = np.rint(wanted)
    before = value[index]
    by[index[np.isnan(before) | (wanted != before)]] = number
    value[index] = wanted
    return lost


def limit_moves(
    value: F64,
    change: Bool,
    leased: F64,
    read: F64,
    low: F64,
    high: F64,
    safe: F64,
    lo: F64,
    hi: F64,
    slew_per_s: F64,
    known: Bool,
    dt_s: float,
    deadband: float,
    held: int,
    towards: int,
    disruptive: int,
) -> None:
    """Apply hold, deadband and slew to settled values [n], and write which count as a change; see
    `Arbiter.limit`. `towards` tells where protection lies: -1 low, 1 high, 0 nowhere."""

    def protects(to: F64, origin: F64) -> Bool:
        if towards < 0:
            return to < origin
        return to > origin if towards > 0 and not disruptive else np.zeros(len(to), np.bool_)

    running = ~np.isnan(leased)
    stands = np.where(running, leased, np.where(np.isnan(read), safe, read))
    protective = protects(value, stands)
    if held:
        # A device without any reading may stand at its least protective end: then the move may be one.
        protective |= ~running & ~known & protects(value, high if towards < 0 else low)
        keep = ~np.isnan(value) & ~protective
        value[keep] = leased[keep]
    touched = ~np.isnan(value)
    # Jitter is not worth a command, while what stands lies inside what is asked. Judged before the slew
    # limit, lest steps smaller than the deadband never add up.
    same = touched & (leased >= lo) & (leased <= hi) & (np.abs(value - leased) < deadband)
    value[same] = leased[same]
    # A value that stood still has not saved up any slew: the rate is per tick.
    reach = np.where(slew_per_s > 0, slew_per_s * dt_s, np.inf)
    # A device found outside its envelope is taken to the edge at once.
    stands = np.clip(stands, low, high)
    slewed = touched & ~protective & np.isfinite(stands)
    value[slewed] = np.clip(value[slewed], (stands - reach)[slewed], (stands + reach)[slewed])
    change[:] = touched & (value != np.where(running, leased, read))
    if not disruptive:
        change &= ~protective


def compare_readbacks(
    value: F64,
    issued_ns: I64,
    state: U8,
    differs_ns: I64,
    seen: Bool,
    readback: F64,
    received_ns: I64,
    at: I32,
    tolerance: float,
    now_ns: int,
    slow_ns: int,
    wait_ns: int,
) -> int:
    """Compare setpoints [n] with read-backs; see `Leases.compare`, whose columns are changed.

    Writes the entities that differ for `wait_ns` into `at`, and returns their number. A command that is on
    its way may differ for `slow_ns`.
    """

    def waiting() -> Bool:
        return (state >= SENT) & (state <= IN_PROGRESS)

    running = ~np.isnan(value)
    current = running & (received_ns > issued_ns)
    differs = current & ~(np.abs(readback - value) <= tolerance)
    seen |= current & ~differs
    state[current & ~differs & waiting()] = DONE
    differs &= ~(waiting() & (now_ns - issued_ns < slow_ns))
    since = np.where(differs_ns == 0, now_ns, differs_ns)
    # Until the device has spoken after a command, an alarm neither begins nor ends.
    differs_ns[:] = np.where(differs, since, np.where(running & ~current, differs_ns, 0))
    found = np.flatnonzero((differs_ns > 0) & (now_ns - differs_ns >= wait_ns))
    at[: len(found)] = found
    return len(found)


def power_at_level(
    group: I64,
    level: F64,
    power_w: F64,
    slope: F64,
    key: F64,
    room_w: F64,
    weight: F64,
    first: I64,
    top: float,
    scale: float,
) -> None:
    """Write the power (W) and its rise per level of groups [k] at levels [k] into `power_w` and `slope`.

    `key` [n] ascends: the group of each device, and as its fraction the level at which it has all that it has
    room for; `room_w` and `weight` [n + 1] are summed up to each device, and `first` [n_group + 1] cuts them.
    """
    begin, end = first[group], first[group + 1]
    upto = np.searchsorted(key, group + np.minimum(level, top) * scale, side="right")
    upto = np.minimum(np.maximum(upto, begin), end)
    slope[:] = weight[end] - weight[upto]
    power_w[:] = room_w[upto] - room_w[begin] + slope * level


def find_places(names: list[str], known: dict[str, int], paths: list[str], places: I32) -> int:
    """Write the place of each name by `known` into `places` [k]: -1 for none. Returns the number of these.

    `paths` are the names of `known` by their places, or nothing. Many names follow each other as they do: the
    compiled form compares those before it looks into `known`, whose entries lie all over the memory.
    """
    del paths
    places[:] = [known.get(name, -1) for name in names]
    return int((places < 0).sum())


def read_answers(
    events: list[Any],
    control: str,
    prefix: str,
    states: tuple[str, ...],
    known: dict[str, int],
    paths: list[str],
    place: I32,
    generation: I64,
    number: I64,
    state: U8,
) -> int:
    """Write the columns [k] of answers to commands of one control; returns how many of them have an id.

    `place` is that of the name, as `find_places` gives it, `number` the 1 to 18 digits behind the `prefix` of
    the command, `state` the place in `states`. Returns -1, and zeros in all columns, where an answer is of
    another type or control, or is not such.
    """
    columns = place, generation, number, state
    for column in columns:
        column[:] = 0
    digits = [e.command[len(prefix) :] if e.command.startswith(prefix) else "" for e in events]
    if not events or not all(
        type(e) is type(events[0])
        and e.control == control
        and 0 < len(behind) <= 18
        and behind.isascii()
        and behind.isdigit()
        and 0 <= e.generation < 2**31
        and e.state in states
        for e, behind in zip(events, digits, strict=True)
    ):
        return -1
    generation[:] = [e.generation for e in events]
    number[:] = [int(behind) for behind in digits]
    state[:] = [states.index(e.state) for e in events]
    find_places([e.name for e in events], known, paths, place)
    return sum(1 for e in events if e.id)


def read_faults(
    events: list[Any], tables: tuple[str, ...], table: U8, numbers: I64, key: I64, mark: I64
) -> list[str]:
    """Write the columns [k] of reported faults; returns their names.

    `table` is the place in `tables`, 255 for none of these; `numbers` [3, k] are code, count and instant, -1
    for one of more than 63 bits. `key` is BLAKE2b of the id, `mark` the checksum of all but the instant, by
    which two faults of one id are told apart; 0 and -1 without an id.
    """
    place = {name: k for k, name in enumerate(tables)}
    table[:] = [place.get(e.table, 255) for e in events]
    for row, name in zip(numbers, ("code", "count", "at_ns"), strict=True):
        row[:] = [v if -(2**63) <= v < 2**63 else -1 for v in map(attrgetter(name), events)]
    ids = [blake2b(_utf8(e.id), digest_size=8).digest() if e.id else bytes(8) for e in events]
    key[:] = np.frombuffer(b"".join(ids), "<i8")
    texts = [f"{e.code} {e.count} {e.table}\n{e.name}\n{e.detail}" for e in events]
    mark[:] = [crc32(_utf8(text)) if e.id else -1 for e, text in zip(events, texts, strict=True)]
    return [e.name for e in events]


def keep_newest(
    order: I64,
    pair: I32,
    at_ns: I64,
    times: I64,
    dated: Bool,
    ring_at: I64,
    ring_received: I64,
    ring_times: I32,
    fresh: Bool,
    received_ns: int,
) -> None:
    """Keep the newest faults [k] of each pair in its ring [kept, n], in order of their instants.

    `order` sorts them by pair, then by instant, then as they came. Not `fresh` [k] are those that their
    device dated like another one of their pair: they are not kept.
    """
    fresh[:] = ~(dated & (ring_at[:, pair] == at_ns).any(axis=0))
    again = order[dated[order]]
    fresh[again[1:][(pair[again[1:]] == pair[again[:-1]]) & (at_ns[again[1:]] == at_ns[again[:-1]])]] = False
    kept = order[fresh[order]]
    of = pair[kept]
    last = np.searchsorted(of, of, side="right") - 1 - np.arange(len(of))  # 0: the newest of its pair
    for back in range(min(len(ring_at), int(last.max(initial=-1)) + 1) - 1, -1, -1):
        some = kept[last == back]
        mine = pair[some]
        news = at_ns[some], np.full(len(some), received_ns), times[some]
        rings: tuple[NDArray[Any], ...] = (ring_at, ring_received, ring_times)
        grown = [np.vstack([ring[:, mine], new]) for ring, new in zip(rings, news, strict=True)]
        place = np.argsort(grown[0], axis=0, kind="stable")[1:]
        for ring, values in zip(rings, grown, strict=True):
            ring[:, mine] = np.take_along_axis(values, place, axis=0)


def count_faults(
    pair: I32,
    at_ns: I64,
    times: I64,
    entity: I32,
    fresh: Bool,
    counted: Bool,
    bucket: NDArray[np.uint16],
    sums: I64,
    total: I64,
    every_ns: int,
    now_ns: int,
) -> None:
    """Add the `fresh` faults [k] to the buckets of `every_ns` of their pairs [many, n], which are full at
    some time, and what these gain to the `sums` [n] of pairs and, of those `counted`, the `total` by entity.

    Faults older than all buckets are left out. Instants are not negative, and each stands for one or more.
    """
    number = at_ns // every_ns
    some = np.flatnonzero(fresh & (now_ns // every_ns - number < len(bucket)))
    if not len(some):
        return
    cell = number[some] % len(bucket) * bucket.shape[1] + pair[some]
    of, first, place = np.unique(cell, return_index=True, return_inverse=True)
    more = np.bincount(place, times[some]).astype(np.int64)
    row, mine = of // bucket.shape[1], pair[some[first]]
    before = bucket[row, mine].astype(np.int64)
    bucket[row, mine] = after = np.minimum(before + more, MOST_COUNT)
    np.add.at(sums, mine, after - before)
    means = counted[some[first]]
    np.add.at(total, entity[some[first]][means], (after - before)[means])


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
