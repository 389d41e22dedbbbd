"""Power curves that caps reveal: simulated jobs of known truth under an engine with the model.

The plant of these tests slows a job by what `twin.physics.gpu_power` says; all figures are simulated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.power_curve import KEY, LEAST_KEY, PowerCurve
from policies.power_capping import Curve, energy_minimum_w
from tests.support.builders import Twin, eight_nodes
from twin.catalogue import ContractError, digest
from twin.contracts import Forecast
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.physics import capped, performance_pu
from twin.telemetry import Event, JobEnded, JobStarted

MOST_W, SAFE_W, IDLE_W = 350.0, 200.0, 50.0
CAPS = (350.0, 260.0, 300.0, 350.0, 220.0, 350.0)
STEP_S = 20.0


class Lab:
    """Eight GPUs; a job on each half, whose truth is `share`; progress is read once a minute."""

    def __init__(
        self, share: tuple[float, float] = (0.9, 0.15), noise_pu: float = 0.01, seed: int = 3
    ) -> None:
        self.share, self.noise_pu, self.rng = share, noise_pu, np.random.default_rng(seed)
        self.model = PowerCurve()
        self.twin = Twin(eight_nodes(max_jobs=4), [], [self.model])
        self.cap_w, self.demand_w = np.full(8, MOST_W), np.full(8, 330.0)
        self.static_w, self.gamma = np.full(8, IDLE_W), 2.7
        self.unit = np.array([2.0, 0.03])  # progress per second without a cap
        self.whim = np.ones(2)  # what else slows a job
        self.speed = np.full((0, 2), 1.0)
        self.time_s = 0.0
        self.silent = False
        self.twin.tick({}, self.started("hungry", 0), self.started("patient", 4))

    def started(self, job: str, first: int, coupling: Any = "synchronous") -> JobStarted:
        nodes = tuple(self.twin.site.name("node", i) for i in range(first, first + 4))
        return JobStarted(job=job, nodes=nodes, kind="training", coupling=coupling)

    def step(self, *events: Event) -> None:
        power, clock = capped(self.static_w, self.demand_w, self.cap_w, self.gamma)
        pace = [
            float(performance_pu(clock[a : a + 4], c).min())
            for a, c in ((0, self.share[0]), (4, self.share[1]))
        ]
        self.speed = np.vstack([self.speed, pace])
        self.time_s += STEP_S
        values: dict[str, Any] = {"gpu.power_w": power, "gpu.power_limit_w": self.cap_w}
        if self.time_s % 60.0 == 0.0:
            noise = 1.0 + self.noise_pu * self.rng.normal(size=2)
            told = np.full(4, np.nan)
            told[:2] = self.unit * self.speed.mean(axis=0) * noise * self.whim
            self.speed = np.full((0, 2), 1.0)
            if not self.silent:
                values["job.progress_per_s"] = told
        self.twin.tick(values, *events, dt_s=STEP_S)

    def run(self, minutes: float, cap_w: float | None = None) -> None:
        if cap_w is not None:
            self.cap_w[:] = cap_w
        for _ in range(round(minutes * 60.0 / STEP_S)):
            self.step()

    def moved(self) -> Lab:
        for cap_w in CAPS:
            self.run(5, cap_w)
        return self

    @property
    def said(self) -> Forecast:
        return self.twin.engine.forecasts[(KEY, 0.0)]


@pytest.mark.slow  # an hour and a half of two jobs
@pytest.mark.parametrize("seed", range(2))
def test_a_job_that_computes_and_one_that_waits_for_memory_are_told_apart(seed: int) -> None:
    lab = Lab(seed=seed).moved()
    assert lab.twin.engine.suspended == {}
    assert lab.said.mean[:2] == pytest.approx(lab.share, abs=0.1)
    assert (lab.said.lo[:2] <= lab.share).all()
    assert (lab.said.hi[:2] >= lab.share).all()
    assert (lab.said.hi - lab.said.lo)[:2] == pytest.approx([0.2, 0.2], abs=0.2)
    assert np.isnan(lab.said.mean[2:]).all(), "no job, nothing said"
    assert "2 jobs" in lab.said.basis


@pytest.mark.slow
@pytest.mark.parametrize("cap_w", [MOST_W, 260.0])
def test_nothing_is_learned_while_caps_never_move(cap_w: float) -> None:
    lab = Lab(noise_pu=0.05)
    lab.run(25, cap_w)
    assert np.isnan(lab.said.mean).all()


@pytest.mark.slow
def test_of_a_job_that_goes_at_its_own_whim_little_is_claimed() -> None:
    lab = Lab(seed=0)
    for cap_w in CAPS:
        lab.whim = lab.rng.uniform(0.7, 1.0, 2)
        lab.run(5, cap_w)
    known = np.isfinite(lab.said.mean[:2])
    inside = (lab.said.lo[:2] <= lab.share) & (lab.share <= lab.said.hi[:2])
    assert (inside | ~known).all(), (lab.said.lo[:2], lab.said.hi[:2])


@pytest.mark.parametrize(("white", "drift", "slowness"), [(0.01, 0.0, 1), (0.01, 0.03, 20), (0.01, 0.1, 100)])
def test_bands_hold_what_they_promise_although_jobs_drift(white: float, drift: float, slowness: int) -> None:
    """2,000 simulated jobs, of which caps move every ten readings."""
    rng, n = np.random.default_rng(7), 2000
    model = PowerCurve()
    model._begin(n, 1)
    share, x, off = rng.uniform(0, 1, n), np.zeros(n), np.zeros(n)
    kept = np.exp(-1.0 / slowness)
    for _reading in range(120):
        moved = rng.random(n) < 0.1
        x = np.where(moved, rng.uniform(0, 0.4, n) * (rng.random(n) < 0.5), x)
        off = kept * off + drift * np.sqrt(1 - kept**2) * rng.normal(size=n)
        model._learn(np.arange(n), x.copy(), (1 + share * x) * np.exp(off + white * rng.normal(size=n)))
    said, _ = model.predict(Lab.__new__(Lab))  # type: ignore[arg-type]
    known = np.isfinite(said.mean)
    assert known.mean() > 0.5
    assert ((said.lo <= share) & (share <= said.hi))[known].mean() > 0.85


@pytest.mark.slow
def test_a_save_now_and_then_is_no_clock() -> None:
    lab = Lab()
    for cap_w in CAPS:
        lab.run(4, cap_w)
        lab.whim[:] = 0.5  # it saves for half of that minute
        lab.run(1)
        lab.whim[:] = 1.0
    assert lab.said.mean[:2] == pytest.approx(lab.share, abs=0.15)
    assert (lab.said.lo[:2] <= lab.share).all()
    assert (lab.said.hi[:2] >= lab.share).all()


@pytest.mark.slow
def test_what_the_profile_has_wrong_of_a_gpu_moves_the_share_and_hardly_the_speed() -> None:
    lab = Lab()
    lab.static_w[:], lab.gamma = 75.0, 2.4
    lab.moved()
    cap = np.full(2, 240.0)
    true_clock = capped(np.full(2, 75.0), np.full(2, 330.0), cap, 2.4)[1]
    said_clock = capped(np.full(2, IDLE_W), np.full(2, 330.0), cap, 2.7)[1]
    said = performance_pu(said_clock, lab.said.mean[:2].astype(np.float64))
    assert said == pytest.approx(performance_pu(true_clock, np.array(lab.share)), abs=0.03)


@pytest.mark.long
def test_the_power_of_least_energy_is_learned_although_the_profile_is_wrong() -> None:
    """A GPU with more static power, another exponent and a knee: the rule would cap it too low."""
    lab = Lab(share=(0.9, 0.5))
    lab.static_w[:], lab.gamma = 90.0, 1.9
    for cap_w in (350.0, 300.0, 260.0, 350.0, 220.0, 180.0, 150.0, 350.0, 200.0):
        lab.run(5, cap_w)
    least = lab.twin.engine.forecasts[(LEAST_KEY, 0.0)]
    beside = lab.twin.site.beside_gpu_w(np.arange(8))[[0, 4]]
    assert ((least.lo <= least.mean) & (least.mean <= least.hi))[:2].all()
    assert np.isnan(least.mean[2:]).all()

    def energy(cap_w: np.ndarray, share: float, beside_w: float) -> np.ndarray:
        power, clock = capped(np.full(len(cap_w), 90.0), np.full(len(cap_w), 330.0), cap_w, 1.9)
        return np.asarray((power + beside_w) / performance_pu(clock, share))

    design = lab.twin.site.design
    for job, share in enumerate(lab.share):
        best = energy(np.linspace(100.0, 330.0, 200), share, beside[job]).min()
        ruled = energy_minimum_w(Curve(design.gpu_idle_w[0], 330.0, share), beside[job])
        mine, rule = (energy(w, share, beside[job])[0] / best - 1.0 for w in (least.mean[[job]], ruled))
        assert mine < 0.015
        assert mine <= rule + 0.002, (mine, rule)


@pytest.mark.slow
def test_of_more_jobs_than_one_look_settles_none_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.power_curve.MOST_SETTLED", 1)
    lab = Lab()
    lab.step()
    kept, waited = lab.model._kept, set[int]()
    for _ in range(40):
        lab.step()
        kept["bins"][:2, :3, 0] = 1.0  # read at powers that differ
        kept["due"][:2] = True
        lab.model._settle(lab.twin.engine.view())
        waited |= set(np.flatnonzero(~kept["due"][:2]).tolist())
    assert waited == {0, 1}


def test_the_slowest_gpu_sets_the_pace_of_a_synchronous_job() -> None:
    lab = Lab()
    for cap_w in CAPS:
        lab.cap_w[[1, 6]] = cap_w
        lab.run(5)
    assert lab.said.mean[:2] == pytest.approx(lab.share, abs=0.1)


@pytest.mark.slow
def test_a_job_that_begins_in_a_slot_begins_afresh() -> None:
    lab = Lab().moved()
    lab.step(lab.started("patient", 4))  # again, as after a failure
    assert np.isfinite(lab.said.mean[0])
    assert np.isnan(lab.said.mean[1])
    lab.step(JobEnded(job="hungry"))
    assert np.isnan(lab.said.mean[0])
    assert np.isnan(lab.model._kept["wants_w"]).all() | np.isfinite(lab.model._kept["wants_w"][4:]).all()
    assert np.isnan(lab.model._kept["wants_w"][:4]).all(), "what it wanted is not what another will"


@pytest.mark.long
def test_silence_is_no_progress_and_no_standstill() -> None:
    lab = Lab().moved()
    before = lab.said.mean.copy()
    lab.silent = True
    for cap_w in (250.0, 350.0, 230.0):
        lab.run(12, cap_w)
    lab.silent = False
    heard = lab.model.memory()["sums"][:2, 0]
    lab.run(1, 350.0)  # more than half an hour in one reading: nobody knows under which caps
    assert (lab.model.memory()["sums"][:2, 0] <= heard).all()
    assert lab.said.mean == pytest.approx(before, abs=0.01, nan_ok=True)


@pytest.mark.slow
def test_a_snapshot_and_another_site_keep_what_was_learned() -> None:
    lab = Lab().moved()
    other = Twin(eight_nodes(max_jobs=4), [], [PowerCurve()])
    other.engine.restore(decode(encode(lab.twin.engine.dump())))
    assert other.engine.checksum() == lab.twin.engine.checksum()
    before, memory = lab.said, lab.model.memory()
    gpus = np.array([-1, 7, 6, 5, 4, 3, 2, 1, 0], np.int32)
    lab.model.remap({"job": np.array([0, 1], np.int32), "gpu": gpus})
    said, least = lab.model.predict(lab.twin.engine.view(1.0))
    assert said.mean == pytest.approx(before.mean[:2])
    assert np.array_equal(least.mean, memory["least_w"][:2, 0].astype(np.float32))
    assert lab.model.memory()["wants_w"][1:] == pytest.approx(memory["wants_w"][::-1])
    fresh = PowerCurve()
    fresh.restore(memory)
    assert digest(fresh.memory()) == digest(memory)
    older = {name: array for name, array in memory.items() if name not in ("bins", "least_w", "due")}
    fresh.restore(older)  # from before the least energy was learned
    assert np.array_equal(fresh.memory()["sums"], memory["sums"], equal_nan=True)
    assert np.isnan(fresh.memory()["least_w"]).all()
    memory["sums"] = memory["sums"][:, :3]
    with pytest.raises(ContractError, match="sums"):
        fresh.restore(memory)
