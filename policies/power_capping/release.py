"""Release: delays the raise of a cap, so that caps neither flap nor rise all at once.

Cuts apply at once. A raise needs a minimum size and a delay since the last cut. Both are pseudorandom, by
device and instant of that cut, so that a replay draws the same values. Where a ramp raises the limit of the
site, the ramp sets the pace, and no raise is delayed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.power_capping.budgets import Carried, gain_of, sums_w
from policies.power_capping.demand import USUAL, Wants
from policies.power_capping.shares import Claims
from twin.catalogue import F64, I64, NS, Bool
from twin.contracts import Memory, View

STEP_PU = 0.02  # of its range by which a cap must differ to be moved up. source: estimate
ALONG_PU = 0.005  # the same along a ramp: what 250 W/s come to in a call. source: estimate
CUT_PU = 0.01  # of its range; a cap that fell by less need not wait anew for a raise. source: estimate
DWELL_S = 30.0  # between a cut and a raise. source: estimate
SPREAD_S = 30.0  # how far apart raises are drawn beyond that. source: estimate
SOON_S = 10.0  # in place of both, for what is high or waited for: two calls. source: estimate


class Raises(NamedTuple):
    """Limits of raises: the power of each place [n_place], W; the GPUs that only the ramp of the
    site holds back (index), None where it is not let up."""

    carried: Carried
    limit_w: F64
    along: I64 | None = None


def drawn_pu(device: I64, epoch_ns: I64) -> F64:
    """Return a pseudorandom number in [0, 1) for each device and instant [k], the same at each call.

    source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
    generators")
    """
    x = epoch_ns.astype(np.uint64) + (device.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(11)
    out: F64 = x.astype(np.float64) * 2.0**-53
    return out


def steadied(
    view: View, want: Wants, cap_w: F64, memory: Memory, claims: Claims, raises: Raises
) -> tuple[F64, I64]:
    """Return (caps, instant of the last cut of each): cuts at once, raises in minimum steps after a delay.

    A raise waits as well where cuts of this very moment and it would together be more than a place has:
    nobody knows which of the two arrives first. A job is raised as a whole.
    """
    site, now_ns, before_w, n, job = view.site, view.now_ns, memory["cap_w"], len(cap_w), claims.job
    carried, stood = raises.carried, before_w > 0
    was_w = np.where(stood, np.clip(before_w, want.floor_w, want.most_w), want.most_w)
    lower = cap_w < was_w
    step_pu: float | F64 = STEP_PU
    if raises.along is not None:
        step_pu = np.full(n, STEP_PU)
        step_pu[raises.along] = ALONG_PU
    worth = (cap_w - was_w >= step_pu * (want.most_w - want.floor_w)) | (cap_w >= want.most_w)
    raised: Bool = stood & ~lower & worth
    at = np.flatnonzero(raised)
    device = np.where(job[at] >= 0, n + job[at], at).astype(np.int64)
    wait_s = DWELL_S + SPREAD_S * drawn_pu(device, memory["cut_ns"][at])
    wait_s = np.where(claims.class_of[at] > USUAL, SOON_S, wait_s)
    if raises.along is not None:
        wait_s = np.where(np.isin(at, raises.along), 0.0, wait_s)
    raised[at] = (now_ns - memory["cut_ns"][at]) / NS >= wait_s
    if raised.any() and lower.any():
        meanwhile_w = np.where(want.capped, np.maximum(was_w, np.where(raised, cap_w, 0.0)), 0.0)
        of_rack = site.sum_by_rack("gpu", meanwhile_w) * gain_of(site)
        crowded = sums_w(carried, of_rack) > raises.limit_w
        racks = np.zeros(carried.n_rack, np.bool_)
        racks[carried.pairs.rack[crowded[carried.pairs.place]]] = True
        raised &= ~racks[site.rack_of_gpu]
    mine = (job >= 0) & ~lower & (cap_w > was_w)
    if mine.any():  # all or none of a job's
        stuck = np.bincount(job[mine], ~raised[mine], int(job.max()) + 1) > 0
        raised[mine] &= ~stuck[job[mine]]
    out = np.where(lower | raised | ~stood, cap_w, was_w)
    cut = was_w - cap_w >= CUT_PU * (want.most_w - want.floor_w)
    return out, np.where(cut | ~stood, now_ns, memory["cut_ns"])
