"""Shares: distributes the power within all budgets among GPUs, by class, floor, power curve and demand.

The first pass serves expected demand, the second one raises GPUs towards their maximum. In both passes the
classes are served in turn. Within a class, guarantees of tenants and floors of jobs come first, then the
watts that buy the most work: a known power curve of a job is cut into pieces, and pieces of about the same
slope rise together. A synchronous job is one device, with one share of its GPUs' ranges, since the slowest
GPU sets the pace. The floors of all GPUs are subtracted beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.power_capping.allocation import Devices, allocate
from policies.power_capping.budgets import Carried, budgets_of, gain_of, sums_w
from policies.power_capping.curves import Curve, segments, static_w
from policies.power_capping.demand import WAITED_FOR, Wants
from twin.catalogue import F64, I8, I32, I64, Bool
from twin.site import Site

FULL_PU = 1e-6  # of a budget: so near to it, it is used up
PIECES = 4  # that a curve is cut into
MOST_CURVED = 5000  # devices with curves; beyond, only synchronous jobs have theirs
# Slopes within a factor of 2^0.5 rise together; slope 1 is all speed for all watts. source: estimate
STEPS_PER_OCTAVE, SLOPE_ONE, STEEPEST = 2.0, 8, 13
STRAIGHT = SLOPE_ONE - 1  # of work whose curve nobody knows, from about 0.4 of its speed up. source: estimate
KEPT, RANKS = STEEPEST + 1, STEEPEST + 3  # of a class; its floors come before its slopes
GRANTED = WAITED_FOR * RANKS - 1  # after what people wait for, before all others


class Claims(NamedTuple):
    """Of each GPU [n_gpu]: its class, its synchronous job (-1 = none), and if anybody has one the shares of
    its range (0..1) that its job has to keep and its tenant is guaranteed, and the share of its work that
    waits for the clock (NaN = not known)."""

    class_of: I8
    job: I32
    kept_pu: F64 | None = None
    granted_pu: F64 | None = None
    compute_pu: F64 | None = None


class Shared(NamedTuple):
    """The cap of each GPU, the place that holds it back or -1 [n_gpu]; the places where demand alone is too
    much [n_place]."""

    cap_w: F64
    held_by: I64
    short: Bool


@dataclass(frozen=True, slots=True)
class _Devices:
    """GPUs of their own, then synchronous jobs [n]: group of the allocation, class, range (W, or 1), what
    they want of it (0..1), the shares of Claims, and the curve of one GPU (floor, most, idle: W)."""

    group: I32
    class_of: I32
    range_w: F64
    wanted: F64
    kept: F64
    granted: F64
    compute: F64
    least_w: F64
    most_w: F64
    idle_w: F64


class _Pieces(NamedTuple):
    """Rows of the allocation [n]: the device, where in its range the piece begins and how wide it is (0..1),
    and its rank. `owner` is a slice where each device is one piece."""

    owner: I64 | slice
    start: F64
    width: F64
    rank: I32


def shared_out(site: Site, carried: Carried, left_w: F64, want: Wants, claims: Claims) -> Shared | None:
    """Share out `left_w` [n_place], the power for the GPUs of each place; None if every demand fits."""
    gain, capped = gain_of(site), want.capped
    all_w = sums_w(carried, site.sum_by_rack("gpu", want.of_capped(want.most_w)) * gain)
    if (all_w <= left_w).all():
        return None
    floors_w = sums_w(carried, site.sum_by_rack("gpu", want.of_capped(want.floor_w)) * gain)
    left_w = np.maximum(left_w - floors_w, 0.0)
    job, mine = claims.job, claims.job >= 0
    solo, n_job = np.flatnonzero(capped & ~mine), int(job.max(initial=-1)) + 1
    members = _members(site.rack_of_gpu, job, want.most_w - want.floor_w, carried.n_rack)
    budgets, places = budgets_of(carried, site, left_w, members)
    devices = _devices(site, want, claims, solo, n_job)
    pieces = _pieces(devices, len(solo))
    group, range_w = devices.group[pieces.owner], devices.range_w[pieces.owner]
    room_w, n_group = pieces.width * range_w, carried.n_rack + n_job
    wanted_w = np.clip((devices.wanted[pieces.owner] - pieces.start) * range_w, 0.0, room_w)
    first = allocate(Devices(group, pieces.rank, np.zeros(len(group)), wanted_w, room_w), budgets, n_group)
    rest_w = np.maximum(room_w - first.power_w, 0.0)
    second = allocate(Devices(group, pieces.rank, first.power_w, rest_w, room_w), budgets, n_group)
    given = second.power_w
    if not isinstance(pieces.owner, slice):
        given = np.bincount(pieces.owner, given, len(devices.group)).astype(np.float64)
    cap_w = np.full(len(job), np.inf)
    cap_w[solo] = want.floor_w[solo] + given[: len(solo)]
    at = np.flatnonzero(mine)
    cap_w[at] = want.floor_w[at] + given[len(solo) + job[at]] * (want.most_w - want.floor_w)[at]

    def used_up(rest_w: F64) -> I64:
        return places[rest_w <= FULL_PU * np.maximum(carried.limit_w[places], 1.0)]

    short = np.zeros(len(carried.limit_w), np.bool_)
    short[used_up(first.left_w)] = True
    return Shared(cap_w, _held_by(carried, used_up(second.left_w))[site.rack_of_gpu], short)


def whole_jobs_w(want: Wants, job: I64 | I32) -> F64:
    """Return the demand [n_gpu] where the GPUs of a job want as much as the one of them that wants most."""
    range_w, mine = want.most_w - want.floor_w, np.flatnonzero(job >= 0)
    wanted = np.divide(want.demand_w - want.floor_w, range_w, out=np.zeros(len(range_w)), where=range_w > 0)
    most = np.zeros(int(job.max(initial=-1)) + 1)
    np.maximum.at(most, job[mine], wanted[mine])
    wanted[mine] = most[job[mine]]
    return want.floor_w + wanted * range_w


def gpus_w(site: Site, carried: Carried, left_w: F64, want: Wants) -> float:
    """Return the most that all GPUs may draw together, if all have the same class."""
    least_w, most_w = (
        site.sum_by_rack("gpu", np.where(want.capped, x, 0.0)) for x in (want.floor_w, want.most_w)
    )
    budgets, _ = budgets_of(carried, site, left_w)
    racks, room_w = np.arange(carried.n_rack, dtype=np.int32), most_w - least_w
    found = allocate(Devices(racks, np.zeros_like(racks), least_w, room_w, room_w), budgets, carried.n_rack)
    return float(found.power_w.sum())


def _devices(site: Site, want: Wants, claims: Claims, solo: I64, n_job: int) -> _Devices:
    """All that has a share of its own."""
    at = np.flatnonzero(claims.job >= 0)
    job, range_w = claims.job[at], want.most_w - want.floor_w

    def most_of(values: F64) -> F64:
        out = np.zeros(n_job)
        np.maximum.at(out, job, values[at])
        return out

    def both(values: F64 | None, missing: float) -> F64:
        if values is None:
            return np.full(len(solo) + n_job, missing)
        return np.concatenate([values[solo], most_of(values)])

    def mean(values: F64) -> F64:
        of_job = np.bincount(job, values[at], n_job) / np.maximum(np.bincount(job, minlength=n_job), 1)
        return np.concatenate([values[solo], of_job])

    wanted = np.divide(want.demand_w - want.floor_w, range_w, out=np.zeros(len(range_w)), where=range_w > 0)
    group = np.concatenate([site.rack_of_gpu[solo], site.sizes["rack"] + np.arange(n_job)])
    curved = claims.compute_pu is not None
    nothing = np.zeros(0)
    return _Devices(
        group.astype(np.int32),
        both(claims.class_of.astype(np.float64), 0.0).astype(np.int32),
        np.concatenate([range_w[solo], (most_of(range_w) > 0).astype(np.float64)]),
        both(wanted, 0.0),
        both(claims.kept_pu, 0.0),
        both(claims.granted_pu, 0.0),
        mean(claims.compute_pu) if claims.compute_pu is not None else np.full(len(group), np.nan),
        mean(want.floor_w) if curved else nothing,
        mean(want.most_w) if curved else nothing,
        mean(static_w(site.design.gpu_idle_w[site.rack_of_gpu], want.most_w)) if curved else nothing,
    )


def _pieces(devices: _Devices, n_solo: int) -> _Pieces:
    """One piece of each device, and more of those with floors or a curve."""
    n = len(devices.group)
    curved = np.isfinite(devices.compute) & (devices.range_w > 0)
    if np.count_nonzero(curved) > MOST_CURVED:
        curved[:n_solo] = False
    special = curved | (devices.kept > 0) | (devices.granted > 0)
    plain, cut = np.flatnonzero(~special), np.flatnonzero(special)
    rank = devices.class_of * RANKS + STRAIGHT
    if not len(cut):
        return _Pieces(slice(None), np.zeros(n), np.ones(n), rank.astype(np.int32))
    of_curve = np.flatnonzero(curved[cut])
    cuts = np.tile(np.append(np.ones(PIECES), 0.0), (len(cut), 1))  # of the curve, and then 0
    bucket = np.full((len(cut), PIECES), STRAIGHT)
    if len(of_curve):
        cuts[of_curve, :PIECES], bucket[of_curve] = _slopes(devices, cut[of_curve])
    ends = np.sort(np.column_stack([cuts, devices.kept[cut], devices.granted[cut]]), axis=1)
    start, width = ends[:, :-1], np.diff(ends, axis=1)
    middle = start + 0.5 * width
    at = (middle[:, :, None] > cuts[:, None, :PIECES]).sum(axis=2)
    ranks = devices.class_of[cut][:, None] * RANKS + np.take_along_axis(
        bucket, np.minimum(at, PIECES - 1), axis=1
    )
    ranks = np.where(
        middle < devices.kept[cut][:, None], devices.class_of[cut][:, None] * RANKS + KEPT, ranks
    )
    ranks = np.where(middle < devices.granted[cut][:, None], np.maximum(ranks, GRANTED), ranks)
    some = width > 0
    owner = np.broadcast_to(cut[:, None], width.shape)[some]
    return _Pieces(
        np.concatenate([plain, owner]),
        np.concatenate([np.zeros(len(plain)), start[some]]),
        np.concatenate([np.ones(len(plain)), width[some]]),
        np.concatenate([rank[plain], ranks[some]]).astype(np.int32),
    )


def _slopes(devices: _Devices, at: I64) -> tuple[F64, I64]:
    """(where the pieces of these curves end, 0..1, how steep they are) [k, PIECES]."""
    least_w, most_w = devices.least_w[at], devices.most_w[at]
    # The draw without a cap is unknown while a device stands at one: its most counts then
    drawn_w = least_w + devices.wanted[at] * (most_w - least_w)
    curve = Curve(devices.idle_w[at], np.maximum(drawn_w, devices.idle_w[at] + 1.0), devices.compute[at])
    room_w, slope = segments(curve, least_w, most_w, PIECES)
    ends = np.cumsum(room_w, axis=1) / np.maximum(most_w - least_w, 1e-9)[:, None]
    ends[:, -1] = 1.0
    steep = np.maximum(slope * most_w[:, None], 1e-6)
    bucket = np.clip(np.rint(STEPS_PER_OCTAVE * np.log2(steep)) + SLOPE_ONE, 0, STEEPEST).astype(np.int64)
    return np.clip(ends, 0.0, 1.0), np.minimum.accumulate(bucket, axis=1)


def _held_by(carried: Carried, full: I64) -> I64:
    """Of each rack, the place above it that is used up and carries most racks; -1 = none [n_rack]."""
    pairs, out = carried.pairs, np.full(carried.n_rack, -1, np.int64)
    width = np.bincount(pairs.place, minlength=len(carried.limit_w))
    at = np.flatnonzero(np.isin(pairs.place, full))
    at = at[np.lexsort((width[pairs.place[at]], pairs.rack[at]))]
    last = np.append(np.diff(pairs.rack[at]) != 0, True)[: len(at)]
    out[pairs.rack[at[last]]] = pairs.place[at[last]]
    return out


def _members(rack_of_gpu: I32, job: I32, range_w: F64, n_rack: int) -> tuple[I32, I32, F64] | None:
    """(job, rack, range of its GPUs there in W), ascending by job; None without jobs that hang together."""
    mine = np.flatnonzero(job >= 0)
    if not len(mine):
        return None
    key, where = np.unique(job[mine].astype(np.int64) * n_rack + rack_of_gpu[mine], return_inverse=True)
    summed_w = np.bincount(where, range_w[mine]).astype(np.float64)
    return (key // n_rack).astype(np.int32), (key % n_rack).astype(np.int32), summed_w
