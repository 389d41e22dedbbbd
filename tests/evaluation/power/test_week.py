"""The power test sites, their demand, the light plant and a week: closed forms, and steps that agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evaluation.power.arms import CAP, Ours
from tests.evaluation.power.demand import BATCH, INFERENCE, TRAINING, Demand, draw, recorded, weeks_of
from tests.evaluation.power.plant import FeedLoss, Plant
from tests.evaluation.power.rivals import Uncapped
from tests.evaluation.power.scores import (
    CapWeek as ScoreTask,
    agreement,
    compared,
    counts,
    goals,
    live,
    suite,
)
from tests.evaluation.power.site import GPU_IDLE_W, GPU_MAX_W, PowerSite, power_site
from tests.evaluation.power.week import Watch, Week
from twin.catalogue import F64, ConfigError

A, B = power_site("a"), power_site("b")


def flat(site: PowerSite, minutes: int, level: float = 1.0, kinds: tuple[int, ...] = (BATCH,)) -> Demand:
    """One job on every node; kinds by turns; half of each job's time waits for the clock."""
    n = site.nodes
    kind = np.array([kinds[i % len(kinds)] for i in range(n)], np.int32)
    dips = kind == TRAINING
    phase_s = (np.arange(n) % 20).astype(np.float64)
    return Demand(
        np.ones(1), np.tile(np.arange(n, dtype=np.int32), (minutes, 1)), np.full((minutes, n), level), kind,
        site.high.astype(np.int32), np.full(n, 0.5), np.full(n, 3.0), np.full(n, 17.0), phase_s,
        np.where(dips, 2.5, 0.0), np.where(dips, 0.3, 1.0), np.ones(site.gpus),
    )  # fmt: skip


def running(hours: int, seed: int = 0) -> F64:
    return np.random.default_rng(seed).uniform(0.6, 0.95, hours)


def test_the_node_is_calibrated_and_the_sites_are_as_stated() -> None:
    assert (A.nodes, A.gpus, B.nodes, B.gpus) == (144, 576, 174, 696)
    plant = Plant(A, flat(A, 1))
    plant.step(1)
    assert plant.rack_w.sum() == pytest.approx(144 * 5600.0)
    assert plant.feeder_w[:2] == pytest.approx([806_400.0] * 2)
    assert plant.feeder_w[2:] == pytest.approx([201_600.0] * 4)
    for site in (A, B):
        assert site.high.mean() == pytest.approx(0.3, abs=0.01)
        per_rack = np.bincount(site.site.rack_of_node[site.high])
        assert np.ptp(per_rack) <= 1


@pytest.mark.parametrize("kinds", [(TRAINING,), (TRAINING, INFERENCE, BATCH)])
def test_a_minute_in_one_step_is_sixty_of_a_second(kinds: tuple[int, ...]) -> None:
    plants = [Plant(B, flat(B, 4, 0.9, kinds)) for _ in range(2)]
    rng, series = np.random.default_rng(1), []
    for _ in range(3):
        cap_w = rng.uniform(250.0, 1200.0, B.gpus)
        for plant in plants:
            plant.command(cap_w)
        plants[0].step(60)
        fine = []
        for _ in range(60):
            plants[1].step(1)
            fine.append(plants[1].rack_w.copy())
        series.append(np.abs(np.array(fine).T - plants[0].rack_series[:, -60:]).max())
    assert max(series) < 1e-6
    for name in ("work", "free_work", "energy_j", "theta", "held_s", "needed_s"):
        assert getattr(plants[0], name) == pytest.approx(getattr(plants[1], name)), name


def test_pace_under_a_cap_is_the_closed_form_and_the_slowest_sets_it_for_all() -> None:
    demand = flat(A, 1)
    plant = Plant(A, demand)
    plant.command(np.full(A.gpus, 840.0), delay_s=0.0)
    plant.step(60)
    clock = ((840.0 - GPU_IDLE_W) / (GPU_MAX_W - GPU_IDLE_W)) ** (1.0 / 3.0)
    assert plant.work / plant.free_work == pytest.approx(1.0 / (0.5 / clock + 0.5))
    two = demand._replace(job=np.where(np.arange(A.nodes) < 2, 0, demand.job).astype(np.int32))
    cap_w = np.full(A.gpus, GPU_MAX_W)
    cap_w[0] = 840.0  # one GPU of eight
    for kind, slow in ((TRAINING, 8), (BATCH, 1)):
        plant = Plant(A, two._replace(kind=np.full(A.nodes, kind, np.int32), dip_s=np.zeros(A.nodes)))
        plant.command(cap_w, delay_s=0.0)
        plant.step(60)
        lost = (plant.free_work - plant.work)[:2].sum() / 60.0
        assert lost == pytest.approx(slow * (1.0 - 1.0 / (0.5 / clock + 0.5)))


@pytest.mark.parametrize(
    ("over", "over_s", "late_s", "longest_s"),
    [([0, 1, 1, 1, 0], 3, 0, 3), ([1, 1, 1, 1, 1], 5, 2, 5), ([1, 0, 1, 0, 1, 1, 1, 1], 6, 1, 4)],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_spells_above_a_limit(
    over: list[int], over_s: int, late_s: int, longest_s: int, at_once: bool
) -> None:
    watch, load = Watch(np.array([100.0])), 100.0 + 20.0 * np.array([over], np.float64)
    if at_once:
        watch.look(load, 0)
    else:
        for k in range(len(over)):
            watch.look(load[:, k : k + 1], k)
    assert (watch.over_s, watch.late_s, watch.longest_s) == (over_s, late_s, longest_s)
    assert watch.worst_pu == pytest.approx(0.2)


def test_demand_follows_the_recording_on_both_kinds_of_nodes() -> None:
    hours = running(24)
    demand = draw(B, hours, 3, 24)
    for nodes in (B.high, ~B.high):
        busy = (demand.job[:, nodes] >= 0).mean(axis=1).reshape(24, 60)
        assert np.abs(busy[:, -1] - hours).max() < 0.04
        assert abs(busy.mean() - hours.mean()) < 0.05
    kinds = demand.kind[demand.job[demand.job >= 0]]
    assert set(np.unique(demand.kind[np.unique(demand.job[:, B.high])[1:]])) <= {TRAINING, INFERENCE}
    assert 0.5 < (kinds == TRAINING).mean() < 0.8
    assert ((demand.level > 0) == (demand.job >= 0)).all()
    again, other = draw(B, hours, 3, 24), draw(B, hours, 4, 24)
    assert all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(demand, again, strict=True))
    assert not np.array_equal(demand.job, other.job)
    assert draw(B, hours, 3, 24, scale=0.5).running_pu == pytest.approx(0.5 * hours)


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["time,running_gpu_num", *(f"t,{row}" for row in rows)]) + "\n")
    return path


def test_the_recording_is_summed_by_the_hour_and_its_gaps_are_no_hours(tmp_path: Path) -> None:
    for name, value in (("x", 107), ("y", 321)):
        rows = [value] * 60 + [0] * 5 + [value] * 55 + [2 * value] * 60
        write(tmp_path / name / "cluster_sequence_vc.csv", rows)
    found = recorded(tmp_path)
    assert found[[0, 2]].tolist() == [0.5, 1.0]
    assert np.isnan(found[1])
    month = np.ones(10 * 24)
    month[50] = np.nan
    assert weeks_of(month, 168) == [72]
    with pytest.raises(ConfigError, match="without a gap"):
        draw(A, np.where(np.arange(240) % 30 == 7, np.nan, 1.0), 1, 168)


def test_without_anybody_a_lost_feed_overloads_the_other() -> None:
    demand = flat(B, 6)
    week = Week(B, demand, Uncapped(), FeedLoss(0, 100, 300))
    figures = week.run()
    over_pu = 174 * 5600.0 / 750e3 - 1.0
    assert figures["over_s"] == 200
    assert figures["late_s"] == 197
    assert figures["after_loss_s"] == 200
    assert figures["longest_over_s"] == 200
    assert figures["worst_over_pu"] >= over_pu
    assert figures["exposed_s"] == 360
    assert figures["needed_pu"] == 1.0
    assert (figures["lost_pu"], figures["binds_pu"]) == (0.0, 0.0)
    assert figures["late_where"][0]["over_w"] > 0


@pytest.mark.evaluation
def test_with_our_policies_it_does_not_and_little_work_is_lost() -> None:
    demand = flat(B, 5, 0.85)  # 15 kW beyond what a feed carries alone, and beyond all PDUs
    ours = Ours(B)
    figures = Week(B, demand, ours, FeedLoss(0, 180, 240)).run()
    assert figures["trips"] == 0
    assert figures["after_loss_s"] <= 3
    assert figures["late_s"] == 0
    assert 0.0 < figures["lost_pu"] < 0.10
    assert figures["lost_high_pu"] < figures["lost_low_pu"]
    assert figures["close_pu"] == pytest.approx(0.8), "all but the minute between the cut and the loss"
    assert np.isfinite(ours.engine.arbiter.leases[CAP].value).any()


@pytest.mark.evaluation
def test_a_suite_tells_the_same_twice_and_pairs_by_seed() -> None:
    told = [suite(["a"], running(24), [1, 2], ["none", "static"], days=1 / 24) for _ in range(2)]
    for part in (x["sites"][0] for x in told):
        for row in part["rows"]:
            row.pop("cpu_s")
        assert "agreement" not in part
    assert told[0]["sites"][0]["rows"] == told[1]["sites"][0]["rows"]
    assert told[0]["goals"] == []


@pytest.mark.evaluation
def test_both_rates_agree_on_a_few_minutes() -> None:
    found = agreement(ScoreTask("b", "racktwin", 1, 2, 1.0, tuple(running(24).tolist())), 3, warm=1)
    assert found["agrees"], found
    assert (found["minutes"], found["warm_minutes"]) == (3, 1)
    for kind in ("each_second", "mixed"):
        assert found["each_second"]["ticks"] == 240
        assert 0.0 < found[kind]["energy_mwh"] < 0.75 * 3 / 60, "of three minutes within what a feed carries"


def row(arm: str, seed: int, **changes: Any) -> dict[str, Any]:
    task = ScoreTask("a", "none", seed, 1, 1.0, tuple(running(24).tolist()))
    if not _ROW:
        _ROW.update(live(task))
    return _ROW | {"arm": arm, "seed": seed, "needed_pu": 0.3} | changes


_ROW: dict[str, Any] = {}


def test_runs_that_show_nothing_do_not_count_and_goals_say_so() -> None:
    rows = [row("racktwin", 1, lost_high_pu=0.002, lost_low_pu=0.02),
            row("racktwin", 2, lost_high_pu=0.5, lost_low_pu=0.5, needed_pu=0.049),
            row("polca", 1, lost_low_pu=0.05), row("polca", 2, lost_low_pu=0.9, needed_pu=0.049)]  # fmt: skip
    assert [counts(r) for r in rows] == [True, False, True, False]
    arms = {arm["arm"]: arm for arm in compared(rows)}
    assert arms["polca"]["lost_low_pu_more_than_ours"]["mean"] == pytest.approx((0.03 + 0.4) / 2)
    assert arms["racktwin"]["runs_that_count"] == 1
    told = goals([{"site": "a", "rows": rows}])
    work = {g["goal"]: g for g in told if "work lost" in g["goal"]}
    assert [g["met"] for g in work.values()] == [True, True]
    assert next(iter(work.values()))["value"] == pytest.approx(0.002)
    idle = goals([{"site": "a", "rows": [row("racktwin", 1, needed_pu=0.0)]}])
    assert {g["met"] for g in idle} == {None}
    late = goals([{"site": "a", "rows": [row("racktwin", 1, late_s=4, lost_low_pu=0.06, after_loss_s=5)]}])
    assert [g["met"] for g in late] == [True, False, True, False, False]
