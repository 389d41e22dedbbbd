"""Simulated lives: fleets of devices whose true effects of position, batch and frailty are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.lives import LifeLog


@dataclass(frozen=True)
class LifeTruth:
    """A fleet's truth: failures per day of a usual device, ratios by cage, shares and factors of lemons."""

    rate: float = 4e-4
    cage: tuple[float, ...] = (1.0, 2.0, 4.0)
    lemon_share: float = 0.0
    lemon_factor: float = 1.0
    removed_per_day: float = 0.0
    replaced: bool = False  # a device that fails goes, and another takes its place
    columns: int = 10
    slots: int = 40
    days: float = 900.0


def simulated_lives(seed: int, truth: LifeTruth) -> LifeLog:
    """Lives of one fleet. Devices that are removed alive are put back under another serial at once."""
    rng = np.random.default_rng(seed)
    places = [
        (column, cage, slot)
        for column in range(truth.columns)
        for cage in range(len(truth.cage))
        for slot in range(truth.slots)
    ]
    stays: list[tuple[int, int, float, float]] = []
    faults: list[tuple[int, float]] = []
    asset = 0
    for place, (_, cage, _) in enumerate(places):
        day, lemon = 0.0, rng.random() < truth.lemon_share
        while day < truth.days:
            rate = truth.rate * truth.cage[cage] * (truth.lemon_factor if lemon else 1.0)
            fail_d = day + rng.exponential(1.0 / rate)
            gone_d = day + rng.exponential(1.0 / truth.removed_per_day) if truth.removed_per_day else np.inf
            end_d = min(fail_d, gone_d)
            if end_d >= truth.days:
                stays.append((asset, place, day, np.inf))
                asset += 1
                break
            if fail_d <= gone_d:
                faults.append((len(stays), fail_d))
            stays.append((asset, place, day, end_d))
            if fail_d > gone_d or truth.replaced:
                asset, lemon = asset + 1, rng.random() < truth.lemon_share
            day = end_d
        else:
            asset += 1
    faults.sort(key=lambda fault: fault[1])
    column = [np.array([stay[j] for stay in stays]) for j in range(4)]
    return LifeLog(
        tuple(f"d{i}" for i in range(asset + 1)), ("column", "cage", "slot"), np.array(places, np.int32),
        column[0].astype(np.int32), column[1].astype(np.int32), column[2], column[3],
        np.array([stay for stay, _ in faults], np.int32), np.array([day for _, day in faults]),
        np.zeros(len(faults), np.int32), ("board",), 0.0, truth.days, np.zeros((0, 2)),
    )  # fmt: skip
