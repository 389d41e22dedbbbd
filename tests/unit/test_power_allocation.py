"""Allocation against rival solvers on random trees, against its definition, and at its edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import linprog

from policies.power_capping import Budgets, Devices, allocate
from policies.power_capping.allocation import Allocated
from twin.catalogue import F64


def a_site(
    seed: int, n: int = 24, n_group: int = 6, classes: int = 3, overlap: bool = True
) -> tuple[Devices, Budgets]:
    """Devices in racks under random budgets: each rack, a tree above, and, if they overlap, a second one."""
    rng = np.random.default_rng(seed)
    group = np.sort(rng.integers(0, n_group, n)).astype(np.int32)
    room_w = np.where(rng.random(n) < 0.1, 0.0, rng.uniform(10.0, 900.0, n))
    weight = rng.choice([0.5, 1.0, 2.0], n) if seed % 2 else rng.uniform(0.2, 3.0, n)
    devices = Devices(
        group, rng.integers(0, classes, n).astype(np.int32), rng.uniform(0, 200.0, n), room_w, weight
    )
    floor_w = np.bincount(group, devices.floor_w, n_group)
    full_w = np.bincount(group, room_w, n_group)
    rows: list[np.ndarray] = [np.array([g]) for g in range(n_group)]
    for _tree in range(2 if overlap else 1):
        order = rng.permutation(n_group)
        cut = int(rng.integers(1, n_group))
        rows += [order[:cut], order[cut:], order]
    share, limit_w, kept = [], [], []
    for members in rows:
        if rng.random() < 0.2:
            continue
        part = rng.choice([0.5, 1.0], len(members)) if overlap else np.ones(len(members))
        kept.append(members)
        share.append(part)
        limit_w.append(part @ (floor_w + rng.uniform(0.1, 1.2) * full_w)[members])
    if not kept:
        kept, share, limit_w = (
            [np.arange(n_group)],
            [np.ones(n_group)],
            [float(floor_w.sum() + 0.5 * full_w.sum())],
        )
    start = np.concatenate([[0], np.cumsum([len(k) for k in kept])]).astype(np.int32)
    return devices, Budgets(
        start, np.concatenate(kept).astype(np.int32), np.concatenate(share), np.array(limit_w)
    )


def matrix(devices: Devices, budgets: Budgets) -> F64:
    """Watts of devices -> watts of rows."""
    out = np.zeros((len(budgets.limit_w), len(devices.group)))
    for row in range(len(budgets.limit_w)):
        for pair in range(budgets.start[row], budgets.start[row + 1]):
            out[row, devices.group == budgets.group[pair]] += budgets.share[pair]
    return out


def filled_by_programs(devices: Devices, budgets: Budgets) -> F64:
    """Weighted max-min by linear programs: raise the common level, fix whoever can get no more, again."""
    a = matrix(devices, budgets)
    power_w = devices.floor_w.copy()
    for priority in np.unique(devices.priority)[::-1]:
        mine = np.flatnonzero((devices.priority == priority) & (devices.room_w > 0))
        left_w = np.maximum(budgets.limit_w - a @ power_w, 0.0)
        fixed: dict[int, float] = {}
        level = 0.0
        while len(fixed) < len(mine):
            free = [d for d in mine if d not in fixed]
            full = {d: devices.room_w[d] / devices.weight[d] for d in free}
            rest_w = left_w - sum((a[:, d] * x for d, x in fixed.items()), np.zeros(len(left_w)))
            # highest common level of the free ones, none beyond its room
            rise = a[:, free] @ devices.weight[free]
            bound = min(full.values())
            answer = linprog([-1.0], A_ub=rise[:, None], b_ub=np.maximum(rest_w, 0), bounds=[(level, bound)])
            level = float(answer.x[0]) if answer.success else level
            spent = rise * level
            bind = (rest_w - spent) <= 1e-7 * np.maximum(budgets.limit_w, 1.0)
            stuck = [d for d in free if full[d] <= level * (1 + 1e-12) or (a[bind, d] > 0).any()]
            if not stuck:
                break
            for d in stuck:
                fixed[d] = min(level * devices.weight[d], devices.room_w[d])
        for d, x in fixed.items():
            power_w[d] += x
    return power_w


def agrees(seed: int, overlap: bool) -> None:
    n, n_group = 5 + seed % 9, 3 + seed % 3
    devices, budgets = a_site(seed, n=n, n_group=n_group, classes=1 + seed % 2, overlap=overlap)
    got = allocate(devices, budgets, n_group + 1).power_w
    want = filled_by_programs(devices, budgets)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-4, err_msg=f"seed {seed}")


@pytest.mark.parametrize("overlap", [False, True])
def test_as_linear_programs_have_it(overlap: bool) -> None:
    for seed in range(12):
        agrees(seed, overlap)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(3))
def test_as_linear_programs_have_it_on_hundreds_of_sites(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        agrees(seed, overlap=seed % 2 == 0)


@pytest.mark.parametrize("block", range(4))
def test_the_highest_class_gets_as_much_as_any_plan_could_give_it(block: int) -> None:
    """Under one tree the sum of watts of the highest class is that of a linear program that maximises it."""
    for seed in range(50 * block, 50 * block + 50):
        devices, budgets = a_site(seed, overlap=False)
        a, top = matrix(devices, budgets), devices.priority == devices.priority.max()
        got = allocate(devices, budgets, 6)
        left_w = np.maximum(budgets.limit_w - a @ devices.floor_w, 0.0)
        best = linprog(-np.ones(top.sum()), A_ub=a[:, top], b_ub=left_w,
                       bounds=[(0.0, float(x)) for x in devices.room_w[top]])  # fmt: skip
        assert (got.power_w - devices.floor_w)[top].sum() == pytest.approx(-best.fun, rel=1e-6, abs=1e-3)


SITES = st.builds(
    a_site, st.integers(0, 10**6), st.integers(1, 40), st.just(6), st.integers(1, 4), st.booleans()
)


@settings(max_examples=150, deadline=None)
@given(SITES)
def test_no_budget_is_exceeded_and_none_is_left_over(site: tuple[Devices, Budgets]) -> None:
    devices, budgets = site
    out = allocate(devices, budgets, 6)
    a = matrix(devices, budgets)
    carried_w = a @ out.power_w
    np.testing.assert_allclose(out.carried_w, carried_w, rtol=1e-9, atol=1e-6)
    floors_w = a @ devices.floor_w
    assert (carried_w <= np.maximum(budgets.limit_w, floors_w) * (1 + 1e-9) + 1e-6).all()
    assert (out.power_w >= devices.floor_w - 1e-9).all()
    assert (out.power_w <= devices.floor_w + devices.room_w + 1e-6).all()
    # Work-conserving: whoever has less than he has room for stands under a budget that is full
    full_row = carried_w >= budgets.limit_w * (1 - 1e-7) - 1e-5
    short = out.power_w < devices.floor_w + devices.room_w - 1e-4
    assert (a[full_row][:, short] > 0).any(axis=0).all()


@settings(max_examples=100, deadline=None)
@given(SITES, st.integers(0, 39), st.integers(1, 3))
def test_more_priority_is_never_less_power(site: tuple[Devices, Budgets], who: int, more: int) -> None:
    devices, budgets = site
    who %= len(devices.group)
    priority = devices.priority.copy()
    priority[who] += more
    before, after = allocate(devices, budgets, 6), allocate(devices._replace(priority=priority), budgets, 6)
    assert after.power_w[who] >= before.power_w[who] - 1e-6


@settings(max_examples=100, deadline=None)
@given(SITES, st.integers(0, 39), st.floats(1.0, 500.0))
def test_more_demand_is_never_less_power(site: tuple[Devices, Budgets], who: int, more_w: float) -> None:
    devices, budgets = site
    who %= len(devices.group)
    room_w = devices.room_w.copy()
    room_w[who] += more_w
    before, after = allocate(devices, budgets, 6), allocate(devices._replace(room_w=room_w), budgets, 6)
    assert after.power_w[who] >= before.power_w[who] - 1e-6


@settings(max_examples=60, deadline=None)
@given(SITES, st.randoms(use_true_random=False))
def test_the_order_of_devices_is_nothing(site: tuple[Devices, Budgets], random: object) -> None:
    devices, budgets = site
    order = np.random.default_rng(len(devices.group)).permutation(len(devices.group))
    turned = Devices(*(column[order] for column in devices))
    np.testing.assert_allclose(
        allocate(turned, budgets, 6).power_w,
        allocate(devices, budgets, 6).power_w[order],
        rtol=1e-9,
        atol=1e-6,
    )


def two(limit_w: float, **more: object) -> Allocated:
    devices = Devices(
        np.array([0, 1], np.int32),
        np.zeros(2, np.int32),
        np.full(2, 100.0),
        np.array([300.0, 900.0]),
        np.ones(2),
    )._replace(**more)  # type: ignore[arg-type]
    both = Budgets(np.array([0, 2], np.int32), np.array([0, 1], np.int32), np.ones(2), np.array([limit_w]))
    return allocate(devices, both, 2)


@pytest.mark.parametrize(
    ("limit_w", "power_w"),
    [(150.0, [100, 100]), (200.0, [100, 100]), (400.0, [200, 200]), (900.0, [400, 500]), (9e9, [400, 1000])],
)
def test_two_that_share(limit_w: float, power_w: list[float]) -> None:
    out = two(limit_w)
    np.testing.assert_allclose(out.power_w, power_w)
    assert out.left_w[0] == pytest.approx(limit_w - sum(power_w))


def test_the_first_class_is_served_before_the_second_gets_more_than_its_floor() -> None:
    np.testing.assert_allclose(two(500.0, priority=np.array([0, 1], np.int32)).power_w, [100, 400])
    np.testing.assert_allclose(two(1200.0, priority=np.array([0, 1], np.int32)).power_w, [200, 1000])


def test_classes_may_be_far_apart() -> None:
    far = np.array([-(2**31), 2**31 - 1], np.int32)
    np.testing.assert_allclose(two(500.0, priority=far).power_w, [100, 400])


def test_what_no_row_names_has_all_and_what_is_held_has_none_beyond_its_budget() -> None:
    """Rows with limits of nothing and of infinity; a group without devices; a device with a tiny weight."""
    group = np.array([0, 0, 1, 3], np.int32)
    weight = np.array([1.0, 1e-6, 1.0, 1.0])
    devices = Devices(group, np.zeros(4, np.int32), np.full(4, 10.0), np.full(4, 90.0), weight)
    start = np.array([0, 1, 2, 4], np.int32)
    rows = Budgets(start, np.array([0, 1, 1, 2], np.int32), np.ones(4), np.array([80.0, 0.0, np.inf]))
    out = allocate(devices, rows, 4)
    np.testing.assert_allclose(out.power_w, [70.0, 10.0, 10.0, 100.0], rtol=1e-5)
    np.testing.assert_allclose(out.left_w, [0.0, -10.0, np.inf], atol=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_one_class_of_all_and_devices_in_order_are_shared_as_any_others_are(seed: int) -> None:
    """A device that wants nothing adds a class and a mask; those of a group need not come sorted."""
    devices, budgets = a_site(seed, classes=1)
    devices = devices._replace(room_w=np.maximum(devices.room_w, 10.0))
    order = np.lexsort((devices.room_w / devices.weight, devices.group))
    full = Devices(*(column[order] for column in devices))
    power_w = allocate(full, budgets, 6).power_w
    assert (power_w < full.floor_w + full.room_w).any() or not len(budgets.limit_w)
    idle = Devices(
        *(np.append(c, x).astype(c.dtype) for c, x in zip(full, (0, -5, 0.0, 0.0, 1.0), strict=True))
    )
    assert allocate(idle, budgets, 6).power_w[:-1] == pytest.approx(power_w)
    back = Devices(*(column[::-1] for column in full))
    assert allocate(back, budgets, 6).power_w[::-1] == pytest.approx(power_w)


def test_nobody_and_nothing_to_share() -> None:
    none = np.zeros(0, np.int32)
    empty = Devices(none, none, np.zeros(0), np.zeros(0), np.zeros(0))
    rows = Budgets(np.zeros(1, np.int32), none, np.zeros(0), np.zeros(0))
    assert allocate(empty, rows, 0).power_w.shape == (0,)
    np.testing.assert_allclose(two(0.0).power_w, [100, 100])
    np.testing.assert_allclose(two(900.0, room_w=np.zeros(2)).power_w, [100, 100])
    np.testing.assert_allclose(two(900.0, weight=np.zeros(2)).power_w, [100, 100])
