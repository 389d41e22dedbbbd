"""Shares: no budget is exceeded, nothing is left that somebody may have, floors and curves in order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.power_capping import Carried, Curve, gain_of, pairs_of, perf, sums_w
from policies.power_capping.budgets import budgets_of
from policies.power_capping.demand import HIGH, USUAL, WAITED_FOR, Wants
from policies.power_capping.shares import Claims, Shared, gpus_w, shared_out
from tests.support.builders import site_of

RACKS, GPUS = 4, 8  # of the site, and of a rack
N = RACKS * GPUS
SITE = site_of({
    "site": "lab",
    "loops": [{"name": "l1"}],
    "halls": [{
        "name": "h",
        "racks": [{"name": f"r[1-{RACKS}]", "profile": "gb200-nvl72", "nodes": 2, "gpus_per_node": 4}],
        "cdus": [{"name": "c1", "loop": "l1", "serves": ["r[1-2]"]},
                 {"name": "c2", "loop": "l1", "serves": ["r[3-4]"]}],
        "feeders": [{"name": "a", "side": "A", "serves": ["a1", "a2"]},
                    {"name": "a1", "side": "A", "serves": ["r[1-2]"]},
                    {"name": "a2", "side": "A", "serves": ["r[3-4]"]},
                    {"name": "b", "side": "B", "serves": ["r[1-4]"]}],
    }],
})  # fmt: skip
NONE_DEAD = np.zeros(4, np.bool_)


class Case(NamedTuple):
    carried: Carried
    left_w: np.ndarray
    want: Wants
    claims: Claims

    def solved(self) -> Shared | None:
        return shared_out(SITE, self.carried, self.left_w, self.want, self.claims)

    def cap_w(self) -> np.ndarray:
        found = self.solved()
        return self.want.most_w.copy() if found is None else found.cap_w

    def sums_w(self, gpu_w: np.ndarray) -> np.ndarray:
        return sums_w(self.carried, SITE.sum_by_rack("gpu", gpu_w) * gain_of(SITE))


def case(seed: int, failover: bool = True, extras: bool = True) -> Case:
    rng = np.random.default_rng(seed)
    pairs = pairs_of(SITE, NONE_DEAD, failover)
    n_place = int(pairs.place.max()) + 1
    floor_w, most_w = np.full(N, 200.0), np.where(np.arange(N) // (2 * GPUS), 1200.0, 1000.0)
    demand_w = rng.uniform(floor_w, most_w)
    want = Wants(demand_w, floor_w, most_w, demand_w, demand_w, np.ones(N, np.bool_))
    job = np.repeat(rng.integers(-1, 3, N // 4), 4).astype(np.int32)
    _, job = np.unique(job, return_inverse=True)
    job = (job - (1 if rng.random() < 0.7 else 0)).astype(np.int32)
    class_of = np.repeat(rng.integers(0, 4, N // 4), 4)
    for k in range(int(job.max()) + 1):
        class_of[job == k] = class_of[job == k].max()
    carried = Carried(np.full(n_place, np.inf), pairs, RACKS, 4)
    some = Case(carried, carried.limit_w, want, Claims(class_of.astype(np.int8), job))
    least_w, full_w = some.sums_w(floor_w), some.sums_w(most_w)
    limit_w = np.where(
        rng.random(n_place) < 0.5, least_w + rng.uniform(0, 1.1, n_place) * (full_w - least_w), np.inf
    )
    if extras:
        kept = np.repeat(np.where(rng.random(N // 4) < 0.3, rng.random(N // 4), 0.0), 4)
        granted = np.repeat(np.where(rng.random(N // 4) < 0.2, rng.random(N // 4), 0.0), 4)
        compute = np.repeat(np.where(rng.random(N // 4) < 0.6, rng.random(N // 4), np.nan), 4)
        for k in range(int(job.max()) + 1):
            kept[job == k], granted[job == k] = kept[job == k].max(), granted[job == k].max()
            compute[job == k] = compute[job == k][0]
        some = some._replace(
            claims=some.claims._replace(kept_pu=kept, granted_pu=granted, compute_pu=compute)
        )
    return some._replace(carried=carried._replace(limit_w=limit_w), left_w=limit_w)


def seeds(most: int = 60) -> Any:
    def deco(test: Any) -> Any:
        return settings(max_examples=most, deadline=None)(given(st.integers(0, 10**6), st.booleans())(test))

    return deco


@seeds()
def test_no_budget_is_exceeded_and_a_job_has_one_share(seed: int, failover: bool) -> None:
    x = case(seed, failover)
    cap_w = x.cap_w()
    assert (cap_w >= x.want.floor_w - 1e-6).all()
    assert (cap_w <= x.want.most_w + 1e-6).all()
    assert (x.sums_w(cap_w) <= x.left_w * (1 + 1e-9) + 1e-3).all()
    share = (cap_w - x.want.floor_w) / (x.want.most_w - x.want.floor_w)
    for k in range(int(x.claims.job.max()) + 1):
        assert np.ptp(share[x.claims.job == k]) < 1e-9


@seeds()
def test_either_side_carries_all_alone(seed: int, failover: bool) -> None:
    """Loads of feeders with the other side lost, computed without the shares in use."""
    x = case(seed, True)
    cap_w = x.cap_w()
    for side in (1, 2):
        lost = pairs_of(SITE, SITE.side_of_feeder == side, False)
        alone = Carried(x.carried.limit_w, lost, RACKS, 4)
        carried_w = sums_w(alone, SITE.sum_by_rack("gpu", cap_w) * gain_of(SITE))[RACKS : RACKS + 4]
        assert (carried_w <= x.left_w[RACKS : RACKS + 4] + 1e-3).all()


@seeds()
def test_nothing_is_left_that_somebody_may_have(seed: int, failover: bool) -> None:
    x = case(seed, failover)
    cap_w = x.cap_w()
    full = x.sums_w(cap_w) >= x.left_w * (1 - 1e-6) - 1e-3
    racks = np.zeros(RACKS, np.bool_)
    racks[x.carried.pairs.rack[full[x.carried.pairs.place]]] = True
    stuck = racks[SITE.rack_of_gpu]
    for k in range(int(x.claims.job.max()) + 1):
        mine = x.claims.job == k
        stuck[mine] = stuck[mine].any()
    assert (stuck | (cap_w >= x.want.most_w - 1e-3)).all()


def rank_of(x: Case, which: int) -> np.ndarray:
    """GPUs that move with this one."""
    return (
        np.flatnonzero(x.claims.job == x.claims.job[which]) if x.claims.job[which] >= 0 else np.array([which])
    )


@seeds()
def test_nobody_has_less_for_being_in_a_higher_class(seed: int, failover: bool) -> None:
    x = case(seed, failover)
    which = seed % N
    class_of = x.claims.class_of.copy()
    class_of[rank_of(x, which)] = np.minimum(class_of[which] + 1, WAITED_FOR)
    higher = x._replace(claims=x.claims._replace(class_of=class_of))
    assert higher.cap_w()[which] >= x.cap_w()[which] - 1e-3


@seeds()
def test_nobody_has_less_for_wanting_more(seed: int, failover: bool) -> None:
    x = case(seed, failover, extras=False)
    which = seed % N
    mine = rank_of(x, which)
    demand_w = x.want.demand_w.copy()
    demand_w[mine] = np.minimum(demand_w[mine] + 150.0, x.want.most_w[mine])
    more = x._replace(want=x.want._replace(demand_w=demand_w))
    assert more.cap_w()[which] >= x.cap_w()[which] - 1e-3


def one_budget(left_pu: float, class_of: Any, job: Any, demand_w: Any = 1200.0, **claims: Any) -> np.ndarray:
    """Shares of ranges [n_gpu] below one budget of the site, so much of all ranges together."""
    pairs = pairs_of(SITE, NONE_DEAD, False)
    n_place = int(pairs.place.max()) + 1
    floor_w, most_w = np.full(N, 200.0), np.full(N, 1200.0)
    demand = np.broadcast_to(np.asarray(demand_w, np.float64), (N,))
    want = Wants(demand, floor_w, most_w, demand, demand, np.ones(N, np.bool_))
    carried = Carried(np.full(n_place, np.inf), pairs, RACKS, 4)
    given = Claims(np.asarray(class_of, np.int8), np.asarray(job, np.int32), **claims)
    x = Case(carried, carried.limit_w, want, given)
    limit_w = carried.limit_w.copy()
    limit_w[-1] = x.sums_w(floor_w + left_pu * (most_w - floor_w))[-1]
    found = x._replace(carried=carried._replace(limit_w=limit_w), left_w=limit_w).cap_w()
    return (found - floor_w) / 1000.0


EACH = np.repeat(np.arange(RACKS), GPUS)  # a job in each rack


def test_floors_come_before_others_of_the_class_and_after_higher_ones() -> None:
    kept = np.where(EACH == 1, 0.8, 0.0)
    share = one_budget(0.5, np.full(N, USUAL), EACH, kept_pu=kept)
    np.testing.assert_allclose(share.reshape(RACKS, -1)[:, 0], [0.375, 0.875, 0.375, 0.375])
    class_of = np.where(EACH == 0, HIGH, USUAL)
    share = one_budget(0.35, class_of, EACH, kept_pu=kept)
    np.testing.assert_allclose(share.reshape(RACKS, -1)[:, 0], [1.0, 0.4, 0.0, 0.0], atol=1e-9)


def test_what_a_tenant_is_guaranteed_comes_before_all_but_what_people_wait_for() -> None:
    granted = np.where(EACH == 1, 0.6, 0.0)
    class_of = np.choose(EACH, [HIGH, USUAL, WAITED_FOR, USUAL])
    share = one_budget(0.45, class_of, EACH, granted_pu=granted)
    np.testing.assert_allclose(share.reshape(RACKS, -1)[:, 0], [0.2, 0.6, 1.0, 0.0], atol=1e-9)


def test_a_floor_that_nobody_draws_is_others_to_use() -> None:
    kept, demand_w = np.where(EACH == 1, 0.8, 0.0), np.where(EACH == 1, 400.0, 1200.0)
    share = one_budget(0.5, np.full(N, USUAL), EACH, demand_w, kept_pu=kept)
    np.testing.assert_allclose(share.reshape(RACKS, -1)[:, 0], [0.6, 0.2, 0.6, 0.6])


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("left_pu", [0.2, 0.4, 0.6])
def test_watts_go_where_they_buy_most(left_pu: float, together: bool) -> None:
    """Two jobs wait for the clock and two for memory: no other split does more than 1 % more work."""
    compute = np.choose(EACH, [1.0, 0.9, 0.3, 0.1])
    idle_w = np.nan_to_num(SITE.design.gpu_idle_w)[0]
    job = EACH if together else np.full(N, -1)

    def work(share: np.ndarray) -> float:
        return float(
            perf(200.0 + 1000.0 * share, Curve(np.full(N, idle_w), np.full(N, 1200.0), compute)).sum()
        )

    found = one_budget(left_pu, np.full(N, USUAL), job, compute_pu=compute)
    np.testing.assert_allclose(found.mean(), left_pu, rtol=1e-6)
    grid = np.linspace(0.0, 1.0, 21)
    best = 0.0
    for a in grid:
        for b in grid:
            for c in grid:
                d = RACKS * left_pu - a - b - c
                if 0.0 <= d <= 1.0:
                    best = max(best, work(np.choose(EACH, [a, b, c, d])))
    assert work(found) >= 0.985 * best
    assert work(found) >= work(np.full(N, left_pu))


def test_too_many_curves_of_single_gpus_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("policies.power_capping.shares.MOST_CURVED", 3)
    job = np.where(EACH == 0, 0, -1)
    found = one_budget(0.5, np.full(N, USUAL), job, compute_pu=np.full(N, 0.2))
    np.testing.assert_allclose(found.mean(), 0.5, rtol=1e-6)
    assert np.ptp(found[EACH > 0]) < 1e-9


@seeds(20)
def test_what_all_gpus_may_have_together(seed: int, failover: bool) -> None:
    x = case(seed, failover, extras=False)
    found = gpus_w(SITE, x.carried, x.left_w, x.want)
    alike = x._replace(claims=Claims(np.zeros(N, np.int8), np.full(N, -1, np.int32)))
    everything = x.want._replace(demand_w=x.want.most_w)
    assert found == pytest.approx(alike._replace(want=everything).cap_w().sum(), rel=1e-6)
    assert len(budgets_of(x.carried, SITE, x.left_w)[1]) == np.isfinite(x.left_w).sum()
