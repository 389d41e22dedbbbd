"""The formulas of checkpoints against jobs that are lived through event by event, with drawn failures.

The simulations know no formula: they keep a clock, what is saved where, and when the next failure comes. Each
yields, per stretch between two failures that need the durable tier, the time it took and the training it
kept. The ratio of their sums has a known error, so a formula is right where the differences of many random
settings, each divided by its error, look like draws of a standard normal: none is far out and their mean
square is 1. Seeds are fixed. A formula that is wrong by a part in a hundred fails.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gamma, inf, sqrt
from typing import NamedTuple

import numpy as np
import pytest

from policies.checkpointing import SaveTerms, best_interval, ettr, ettr_ahead, ettr_at, ettr_weibull

COUNT, FAILURES = 50, 100  # settings, failures in each
WORTH_A_LOOK = 0.05  # an ETTR below: too few saves are kept for the error to be known
HARD, SOFT = "hard", "soft"


class Setting(NamedTuple):
    """One job: seconds and failures per second."""

    interval: float  # training between two saves to memory, or between saves where there is no such tier
    block: float
    flush: float
    restart: float
    hard: float
    soft: float = 0.0
    parts: int = 0  # saves to memory per durable save; 0: no memory tier
    local_block: float = 0.0
    local_restart: float = 0.0
    shape: float = 1.0  # Weibull, of the time from one failure to the next


class Stretches:
    """Sums of (time, kept) over stretches, and the error of their ratio."""

    def __init__(self) -> None:
        self.time: list[float] = []
        self.kept: list[float] = []

    def add(self, time: float, kept: float) -> None:
        self.time.append(time)
        self.kept.append(kept)

    def ratio(self) -> tuple[float, float]:
        """(kept over time, its standard error)."""
        time, kept = np.array(self.time), np.array(self.kept)
        found = kept.sum() / time.sum()
        spread = np.sqrt(np.mean((kept - found * time) ** 2) / len(time))
        return float(found), float(spread / time.mean())


class Life:
    """A job lived through, phase by phase, until a failure strikes."""

    def __init__(self, setting: Setting, rng: np.random.Generator) -> None:
        self.x, self.rng, self.now = setting, rng, 0.0
        self.scale = 1.0 / gamma(1.0 + 1.0 / setting.shape)  # of a Weibull time of mean 1
        self.level = self.memory = self.durable = 0.0  # training done, saved to memory, saved durably
        self.flushing: list[tuple[float, float]] = []  # (when it ends, what it holds)
        self.since = self.held = (
            0  # saves to memory since the last durable one: now, and of what memory holds
        )
        self.next = {HARD: self.until(setting.hard), SOFT: self.until(setting.soft)}
        self.stretches, self.began, self.kept = Stretches(), 0.0, 0.0

    def until(self, rate: float) -> float:
        """Draw the instant of the next failure of a kind."""
        if rate == 0.0:
            return inf
        if self.x.shape == 1.0:
            return self.now + self.rng.exponential(1.0 / rate)
        return self.now + self.scale / rate * self.rng.weibull(self.x.shape)

    def struck_in(self, length: float) -> str | None:
        """Let time pass; what struck before the end, if anything did."""
        kind = min(self.next, key=self.next.__getitem__)
        struck = self.next[kind] < self.now + length
        self.now = self.next[kind] if struck else self.now + length
        while self.flushing and self.flushing[0][0] <= self.now:
            self.durable = self.flushing.pop(0)[1]
        if not struck:
            return None
        self.next[kind] = self.until(self.x.hard if kind == HARD else self.x.soft)
        return kind

    def fall(self, kind: str | None) -> None:
        """A failure: what it loses, and the restart, begun again for whatever strikes it."""
        restart = self.x.local_restart
        while kind:
            if kind == HARD or not self.x.parts:
                self.stretches.add(self.now - self.began, self.durable - self.kept)
                self.began, self.kept = self.now, self.durable
                self.memory, self.held, self.flushing = self.durable, 0, []
                restart = self.x.restart
            self.level, self.since = self.memory, self.held
            kind = self.struck_in(restart)

    def step(self) -> str | None:
        """Training and the save after it, or a durable save that is due; what struck."""
        x = self.x
        if not x.parts or self.since < x.parts:
            if kind := self.struck_in(x.interval):
                return kind
            self.level += x.interval
        if self.since < x.parts:
            if kind := self.struck_in(x.local_block):
                return kind
            self.since += 1
            self.memory, self.held = self.level, self.since
            if self.since < x.parts:
                return None
        if kind := self.struck_in(x.block):
            return kind
        self.memory, self.since, self.held = self.level, 0, 0
        if x.flush:
            self.flushing.append((self.now + x.flush, self.level))
        else:
            self.durable = self.level
        return None


def lived(setting: Setting, failures: int, rng: np.random.Generator) -> tuple[float, float]:
    """(ETTR, error) of a job that lives through so many failures that need the durable tier."""
    life = Life(setting, rng)
    life.fall(HARD)  # the first stretch begins, as all do, with a restart
    del life.stretches.time[0], life.stretches.kept[0]
    while len(life.stretches.time) < failures:
        life.fall(life.step())
    return life.stretches.ratio()


class Foretold(NamedTuple):
    """One job with one tier and with predictions: seconds; alarms are answered from `answered` of work on."""

    interval: float
    save: float
    restart: float
    mttf: float
    recall: float
    precision: float
    answered: float


def lived_ahead(x: Foretold, failures: int, rng: np.random.Generator) -> tuple[float, float]:
    """(ETTR, error) of a job that is told of failures beforehand, as `checkpoint_prediction` has it."""
    now, kept, work, out, began = 0.0, 0.0, 0.0, Stretches(), 0.0
    every = x.precision * x.mttf / x.recall if x.recall else inf  # between alarms
    blind = x.mttf / (1.0 - x.recall) if x.recall < 1.0 else inf  # between failures that nobody foretells
    draw = rng.exponential
    alarm, failure = draw(every) if every < inf else inf, draw(blind) if blind < inf else inf

    def passed(length: float, answered: bool) -> str:
        """Return the end of a phase: "done", "failed", "told" (a true alarm) or "false"."""
        nonlocal now, alarm, failure
        ends, told = now + length, ""
        while True:
            at = min(ends, alarm, failure)
            now = at
            if at == ends:
                return told or "done"
            if at == failure:
                failure = now + draw(blind)
                return "failed"
            alarm, true = now + draw(every), rng.random() < x.precision
            if answered == "training":
                return "told" if true else "false"
            if true and answered == "saving":
                told = "told"
            elif true:
                return "failed"

    while len(out.time) < failures:
        work, what = 0.0, passed(min(x.answered, x.interval), "")
        begun = now
        if what == "done":
            what = passed(max(x.interval - x.answered, 0.0), "training")
            work = min(x.answered, x.interval) + now - begun
        if what != "failed":
            foretold = what == "told"
            what = passed(x.save, "saving" if x.answered < x.interval else "")
            if what != "failed":
                kept += work
                what = "failed" if foretold or what == "told" else "done"
        while what == "failed":
            out.add(now - began, kept)
            began, kept = now, 0.0
            what = passed(x.restart, "")
    return out.ratio()


def lived_with_lead(x: Foretold, lead: float, failures: int, rng: np.random.Generator) -> float:
    """ETTR of a job in the field: failures come when they come, warnings a `lead` before; it trains on."""
    when = np.cumsum(rng.exponential(x.mttf, failures))
    told = when[rng.random(failures) < x.recall] - lead
    false = rng.uniform(0.0, when[-1], rng.poisson(len(told) * (1.0 / x.precision - 1.0)))
    now, work, kept, phase, ends = 0.0, 0.0, 0.0, "train", x.interval
    for at, fails in sorted([(t, True) for t in when] + [(t, False) for t in (*told, *false)]):
        while ends <= at:
            if phase == "train":
                work, now, phase, ends = work + ends - now, ends, "save", ends + x.save
                continue
            if phase == "save":
                kept, work = kept + work, 0.0
            now, phase, ends = ends, "train", ends + x.interval
        work, now = work + (at - now if phase == "train" else 0.0), at
        if fails:
            work, phase, ends = 0.0, "restart", at + x.restart
        elif phase == "train" and work >= x.answered:
            phase, ends = "save", at + x.save
    return float(kept / now)


def settings(count: int, seed: int, tiered: bool) -> list[Setting]:
    """Random jobs whose intervals are up to 5 times too short or too long."""
    rng = np.random.default_rng(seed)

    def drawn(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    out = []
    for _ in range(count):
        mttf = drawn(1e3, 1e6)
        block, restart = mttf * drawn(1e-3, 0.3), mttf * drawn(1e-3, 0.5)
        interval = float(best_interval(block, restart, mttf)[0]) * drawn(0.2, 5.0)
        flush = interval * rng.choice([0.0, rng.random()])
        if not tiered:
            soft = rng.choice([0.0, rng.random()]) / mttf
            out.append(Setting(interval, block, flush, restart, 1.0 / mttf - soft, soft))
            continue
        parts = int(rng.integers(1, 9))
        soft, local_block, local_restart = drawn(0.05, 10.0), drawn(1e-4, 3e-2), drawn(1e-4, 0.1)
        out.append(Setting(interval / parts, block, flush, restart, 1.0 / mttf, soft / mttf, parts,
                           mttf * local_block, mttf * local_restart))  # fmt: skip
    return out


Pairs = list[tuple[float, float, float]]  # (lived, its error, the formula's)


def assert_the_same(pairs: Pairs) -> None:
    """Differences as a standard normal would have them, where anything is kept at all.

    Each bound is broken by chance less than once in 100,000 draws. The mean catches what is wrong a little
    everywhere, the others what is wrong somewhere.
    """
    lives, errors, formulas = np.array([p for p in pairs if p[2] > WORTH_A_LOOK]).T
    n = len(lives)
    assert n > 0.9 * len(pairs), "too few settings in which anything is kept"
    z = (lives - formulas) / errors
    assert np.abs(z).max() < 5.5, f"a setting of {n} is {np.abs(z).max():.1f} standard errors off"
    assert abs(z.mean()) < 4.5 / sqrt(n), f"{n} settings are {z.mean():.2f} standard errors off on average"
    assert np.mean(z**2) < 1.0 + 5.0 * sqrt(2.0 / n), f"mean square {np.mean(z**2):.2f} of {n}, expected 1"


def compared(formula: Callable[[Setting], float], jobs: list[Setting], failures: int, seed: int) -> Pairs:
    return [(*lived(x, failures, np.random.default_rng([seed, i])), formula(x)) for i, x in enumerate(jobs)]


def one_tier(x: Setting) -> float:
    return float(ettr(x.interval, x.block, x.restart, 1.0 / (x.hard + x.soft), x.flush))


def weibull(x: Setting) -> float:
    return float(ettr_weibull(x.interval, x.block, x.restart, 1.0 / x.hard, x.shape, x.flush)[0])


def two_tiers(x: Setting) -> float:
    """Through the plan's own door, which must give the same as the scheme's formula."""
    given = (x.block, x.flush, x.restart, x.local_block, x.local_restart, inf, x.hard, x.soft)
    terms = SaveTerms(*(np.array([g]) for g in given))
    return float(ettr_at(terms, x.interval * x.parts, x.interval)[0])


def weibull_jobs(count: int, seed: int) -> list[Setting]:
    rng = np.random.default_rng(seed)
    plain = settings(count, seed, tiered=False)
    return [x._replace(hard=x.hard + x.soft, soft=0.0, shape=float(rng.uniform(0.5, 1.0))) for x in plain]


def foretold_jobs(count: int, seed: int) -> list[Foretold]:
    rng = np.random.default_rng(seed)
    out = []
    for i, x in enumerate(settings(count, seed, tiered=False)):
        recall, precision = rng.choice([0.0, 1.0, rng.random()], p=[0.1, 0.1, 0.8]), rng.uniform(0.05, 1.0)
        answered = (0.0, x.block / precision, x.interval * rng.random(), 2.0 * x.interval)[i % 4]
        out.append(
            Foretold(x.interval, x.block, x.restart, 1.0 / (x.hard + x.soft), recall, precision, answered)
        )
    return out


def compared_ahead(jobs: list[Foretold], failures: int, seed: int) -> Pairs:
    found = []
    for i, x in enumerate(jobs):
        formula = ettr_ahead(x.interval, x.save, x.restart, x.mttf, x.recall, x.precision, x.answered)
        found.append((*lived_ahead(x, failures, np.random.default_rng([seed, i])), float(formula)))
    return found


def test_one_tier_with_flushes() -> None:
    assert_the_same(compared(one_tier, settings(COUNT, 11, tiered=False), FAILURES, 11))


def test_weibull_times_between_failures() -> None:
    assert_the_same(compared(weibull, weibull_jobs(COUNT, 12), FAILURES, 12))


def test_two_tiers_with_flushes() -> None:
    assert_the_same(compared(two_tiers, settings(COUNT, 13, tiered=True), FAILURES, 13))


def test_saves_ahead_of_foretold_failures() -> None:
    assert_the_same(compared_ahead(foretold_jobs(COUNT, 14), FAILURES, 14))


def test_alarms_that_come_in_long_saves() -> None:
    """Saves of half an MTTF, where what happens inside of them counts."""
    jobs = [Foretold(0.6, 0.5, 0.1, 1.0, recall, precision, answered)
            for recall in (0.6, 1.0) for precision in (0.2, 0.5) for answered in (0.0, 0.3, 1.0)]  # fmt: skip
    assert_the_same(compared_ahead(jobs, 3000, 15))


def test_warnings_of_the_field() -> None:
    """Cases outside the model: alarms in saves and restarts; training that goes on after an early save."""
    rng, mttf = np.random.default_rng(16), 7.9 * 3600.0
    for save, recall, precision in ((60.0, 0.7, 0.85), (60.0, 0.3, 0.3), (10.0, 0.7, 0.85)):
        interval = float(np.sqrt(2.0 * save * mttf / (1.0 - recall)))
        x = Foretold(interval, save, 600.0, mttf, recall, precision, save / precision)
        formula = float(ettr_ahead(*x))
        assert lived_with_lead(x, save, 6000, rng) == pytest.approx(formula, abs=0.002)
        early = formula - recall * (300.0 - save) / mttf
        assert lived_with_lead(x, 300.0, 6000, rng) == pytest.approx(early, abs=0.0025)


def test_what_is_wrong_by_two_parts_in_a_hundred_fails() -> None:
    """The bounds have teeth: else all of this could pass for nothing."""
    pairs = compared(one_tier, settings(COUNT, 11, tiered=False), FAILURES, 11)
    for wrong in (0.98, 1.02):
        with pytest.raises(AssertionError, match="standard errors off"):
            assert_the_same([(lives, error, wrong * formula) for lives, error, formula in pairs])
