"""The gate: both courses foretold as closed forms and as lives drawn one by one find them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.node_replacement.cost_benefit import OptionOutcome, OutcomeTerms, expected_outcome
from tests.support.replacement_gate import DAY, HOUR, hour_of

TERMS = tuple(f.name for f in fields(OutcomeTerms))


def terms(**given: Any) -> OutcomeTerms:
    """One idle node that never fails and never leaves, unless told; what is given may be arrays."""
    plain = (
        dict.fromkeys(TERMS, 0.0)
        | {
            "job_gpus": 64.0,
            "node_gpus": 8.0,
            "next_s": np.inf,
            "period_s": HOUR,
            "repair_s": 20 * HOUR,
            "test_s": 2 * HOUR,
            "idle_pu": 1.0,
            "act_in_s": np.inf,
        }
        | given
    )
    columns = (np.atleast_1d(v).astype(float) for v in plain.values())
    return OutcomeTerms(**dict(zip(plain, map(np.array, np.broadcast_arrays(*columns)), strict=True)))


# ---------------------------------------------------------------- closed forms
@pytest.mark.parametrize("day_pu", [0.0, 0.01, 0.3, 0.95])
def test_a_constant_hazard_without_a_job_is_a_closed_form(day_pu: float) -> None:
    """Out from T on for what is left of the day: 8 GPUs x integral of (24 h - t) r exp(-r t)."""
    for hour_pu in (hour_of(day_pu), np.nan):
        found = expected_outcome(terms(hour_pu=hour_pu, day_pu=day_pu, job_gpus=0.0, repair_s=1e9))
        rate = -np.log1p(-day_pu) / 24.0
        hours = 24.0 - (day_pu / rate if rate > 0 else 24.0)
        assert found.wait_pu[0] == pytest.approx(day_pu)
        assert found.wait_gpu_h[0] == pytest.approx(8.0 * hours, rel=2e-4, abs=1e-9)
        assert found.act_gpu_h[0] == pytest.approx(found.wait_gpu_h[0])
        assert found.act_pu[0] == pytest.approx(day_pu)


def test_a_job_that_loses_always_the_same_costs_its_chance() -> None:
    found = expected_outcome(
        terms(
            day_pu=0.4,
            hour_pu=hour_of(0.4),
            usual_s=1800.0,
            restart_s=600.0,
            notice_s=300.0,
            queue_s=900.0,
            node_gpus=0.0,
        )
    )
    assert found.wait_gpu_h[0] == pytest.approx(0.4 * 64.0 * 1.0)


def test_leaving_at_once_costs_what_is_not_saved_and_the_node_its_repair_or_its_test() -> None:
    found = expected_outcome(terms(day_pu=0.4, act_in_s=0.0, pays_s=1800.0, sure_pu=0.25))
    assert found.act_pu[0] == 0.0
    assert found.act_gpu_h[0] == pytest.approx(64.0 * 0.5 + 8.0 * (0.25 * 20.0 + 0.75 * 2.0))
    spared = expected_outcome(terms(day_pu=0.4, act_in_s=0.0, pays_s=1800.0, sure_pu=0.25, idle_pu=0.25))
    assert spared.act_gpu_h[0] == pytest.approx(64.0 * 0.5 + 2.0 * (0.25 * 20.0 + 0.75 * 2.0))


def test_nothing_after_the_day_counts() -> None:
    for sure_pu in (0.0, 0.5, 1.0):
        found = expected_outcome(terms(act_in_s=10 * HOUR, sure_pu=sure_pu, repair_s=1e9, test_s=20 * HOUR))
        assert found.act_gpu_h[0] == pytest.approx(8.0 * 14.0)


def test_the_first_hour_has_a_hazard_of_its_own() -> None:
    found = expected_outcome(terms(hour_pu=0.5, day_pu=0.6, act_in_s=HOUR))
    assert found.act_pu[0] == pytest.approx(0.5)
    assert found.wait_pu[0] == pytest.approx(0.6)
    # An hour's chance greater than the day's is believed
    assert expected_outcome(terms(hour_pu=0.5, day_pu=0.2)).wait_pu[0] == pytest.approx(0.5)


def test_leaving_after_the_day_is_staying() -> None:
    for act_in_s in (DAY, 2 * DAY, np.inf):
        found = expected_outcome(
            terms(
                day_pu=0.3,
                lost_s=500.0,
                next_s=100.0,
                durable_s=50.0,
                act_in_s=act_in_s,
                pays_s=900.0,
                act_use_pu=2.0,
                wait_use_pu=0.5,
            )
        )
        assert found.act_gpu_h == pytest.approx(found.wait_gpu_h)
        assert found.act_pu == pytest.approx(found.wait_pu)
        assert found.act_use_pu[0] == 0.5


def test_the_spare_may_fail_too() -> None:
    given = {"act_in_s": 0.0, "pays_s": 60.0, "usual_s": HOUR, "restart_s": HOUR, "node_gpus": 0.0}
    sure, risky = expected_outcome(terms(**given)), expected_outcome(terms(**given, spare_day_pu=0.1))
    assert risky.act_pu[0] == pytest.approx(0.1)
    assert risky.act_gpu_h[0] - sure.act_gpu_h[0] == pytest.approx(0.1 * 64.0 * 2.0)


def test_what_nobody_knows_is_not_foretold() -> None:
    found = expected_outcome(terms(day_pu=[np.nan, 0.1], hour_pu=[np.nan, np.nan]))
    assert np.isnan([found.wait_pu[0], found.wait_gpu_h[0]]).all()
    assert np.isfinite([found.wait_pu[1], found.wait_gpu_h[1]]).all()


def test_many_nodes_are_as_one_by_one() -> None:
    rng = np.random.default_rng(3)
    drawn = {name: rng.uniform(0.0, 1.0, 50) for name in TERMS}
    for name in TERMS:
        if name.endswith("_s"):
            drawn[name] *= 2 * HOUR
    together = expected_outcome(terms(**drawn))
    for i in range(0, 50, 7):
        alone = expected_outcome(terms(**{k: v[i] for k, v in drawn.items()}))
        for name in OptionOutcome._fields:
            assert getattr(alone, name)[0] == pytest.approx(getattr(together, name)[i]), name


# ---------------------------------------------------------------- a rival: lives drawn one by one
def lost_at(x: dict[str, float], at_s: np.ndarray) -> np.ndarray:
    """Work that the last durable save before does not hold, save by save."""
    if not np.isfinite(x["next_s"]):
        return np.full(len(at_s), x["usual_s"])
    begins = x["next_s"] + x["period_s"] * np.arange(-1, int(2 * DAY / x["period_s"]))
    begins[0] = -x["lost_s"]
    durable = begins + x["durable_s"]
    durable[0] = -np.inf
    last = np.searchsorted(durable, at_s, side="right") - 1
    return at_s - begins[last]


def drawn_lives(x: dict[str, float], n: int, seed: int) -> tuple[np.ndarray, ...]:
    """(interrupted, GPU-hours) of n days in which the node leaves, and of n others in which it stays."""
    rng = np.random.default_rng(seed)
    hour, day = -np.log1p(-x["hour_pu"]), -np.log1p(-x["day_pu"])
    out = []
    for leaves in (x["act_in_s"], np.inf):
        mark = rng.exponential(size=n)
        fails = np.where(
            mark < hour,
            mark / max(hour, 1e-12) * HOUR,
            HOUR + (mark - hour) / max(day - hour, 1e-12) * (DAY - HOUR),
        )
        broken = fails < min(leaves, DAY)
        at = np.where(broken, fails, 0.0)
        stop = x["restart_s"] + x["queue_s"]
        fixing = np.minimum(x["repair_s"], DAY - at)
        cost = x["job_gpus"] * (lost_at(x, at) + x["notice_s"] + stop)
        cost = np.where(broken, cost + x["node_gpus"] * x["idle_pu"] * fixing, 0.0)
        interrupted = broken.copy()
        if leaves < DAY:
            bad = rng.random(n) < x["sure_pu"]
            away = np.minimum(np.where(bad, x["repair_s"], x["test_s"]), DAY - leaves)
            spare = rng.exponential(size=n) < -np.log1p(-x["spare_day_pu"]) * (DAY - leaves) / DAY
            planned = x["job_gpus"] * x["pays_s"] + x["node_gpus"] * x["idle_pu"] * away
            planned = planned + np.where(spare, x["job_gpus"] * (x["usual_s"] + x["notice_s"] + stop), 0.0)
            cost = cost + np.where(broken, 0.0, planned)
            interrupted |= ~broken & spare
        out += [interrupted, cost / HOUR]
    return tuple(out)


@settings(max_examples=25, deadline=None)
@given(
    chances=st.tuples(st.floats(0.0, 0.9), st.floats(0.0, 0.9)),
    times=st.tuples(*[st.floats(0.0, 2.0)] * 8),
    leaves=st.sampled_from([0.0, 1.0, 2.0, 3.0, 30.0]),
    flags=st.tuples(st.floats(0, 1), st.booleans(), st.booleans(), st.floats(0, 0.3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_both_courses_are_what_drawn_lives_give(
    chances: tuple[float, float], times: tuple[float, ...], leaves: float, flags: Any, seed: int
) -> None:
    x = {
        "hour_pu": min(chances),
        "day_pu": max(chances),
        "sure_pu": flags[0],
        "job_gpus": 512.0,
        "node_gpus": 8.0,
        "lost_s": times[0] * HOUR,
        "next_s": times[1] * HOUR,
        "usual_s": times[2] * HOUR,
        "period_s": (0.3 + times[3]) * HOUR,
        "durable_s": 0.1 * times[4] * HOUR,
        "restart_s": 0.3 * times[5] * HOUR,
        "queue_s": 0.3 * times[6] * HOUR,
        "notice_s": 600.0,
        "test_s": 4 * HOUR,
        "repair_s": 20.0 * times[7] * HOUR,
        "idle_pu": 0.25 if flags[1] else 1.0,
        "act_in_s": 0.7 * leaves * HOUR,
        "pays_s": 900.0 * float(flags[2]),
        "spare_day_pu": flags[3],
        "wait_use_pu": 0.0,
        "act_use_pu": 0.0,
    }
    if leaves == 2.0:  # just as a planned save becomes durable
        x["act_in_s"] = x["next_s"] + x["durable_s"]
    n = 40_000
    found = expected_outcome(terms(**x))
    act_pu, act_h, wait_pu, wait_h = drawn_lives(x, n, seed)
    for mine, drawn in ((found.act_pu, act_pu), (found.wait_pu, wait_pu)):
        assert mine[0] == pytest.approx(drawn.mean(), abs=5.0 * np.sqrt(0.25 / n))
    # Lives without a failure have no standard error. A failure with a chance of 14 / n misses n lives
    # once in 1e6 draws, and it costs as much as any other.
    lost_h = (
        sum(x[key] for key in ("lost_s", "next_s", "usual_s", "period_s", "durable_s", "notice_s")) / HOUR
    )
    dearest_h = x["job_gpus"] * (lost_h + (x["restart_s"] + x["queue_s"]) / HOUR)
    dearest_h += x["node_gpus"] * DAY / HOUR
    for mine, drawn in ((found.act_gpu_h, act_h), (found.wait_gpu_h, wait_h)):
        error = drawn.std() / np.sqrt(n) * 5.0 + 14.0 / n * dearest_h
        assert mine[0] == pytest.approx(drawn.mean(), abs=error + 2e-3 * drawn.mean() + 1e-6)
