"""The estimator's score on a recording of a real site: calibrated on its first half, judged on its second.

    python -m tests.support.score_capture PATH

Prints, beside persistence, how far each rack's return temperature was from the one expected of supply, flow
and power, and how well the meters of the power tree agree.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from connectors.dsx import discover
from connectors.files import BadRow, read_capture
from twin.catalogue import F64, NS
from twin.config import make_engine, spec_of
from twin.engine import Engine
from twin.run import Cutter, MessageSource
from twin.site import build_site

AGREED_SIGMAS = 4.0  # of a meter's noise, as learned in the first half


@dataclass(frozen=True, slots=True)
class RackScore:
    """Errors of one rack's return temperature over the second half, K."""

    name: str
    capture_pu: float  # as learned in the first half
    readings: int
    mean_k: float  # mean absolute error
    worst_k: float
    held_mean_k: float  # of the last reading of the first half, held
    held_worst_k: float


@dataclass(frozen=True, slots=True)
class BalanceScore:
    """Errors of one sum of the power tree, over the load."""

    name: str
    noise_pu: float  # learned in the first half, what is constant included
    mean_pu: float  # in the second
    worst_pu: float

    @property
    def agrees(self) -> bool:
        """Return True if the sum stayed within its noise."""
        return self.worst_pu <= AGREED_SIGMAS * self.noise_pu


@dataclass(frozen=True, slots=True)
class Score:
    """Of a recording."""

    learned_s: float
    judged_s: float
    racks: list[RackScore]
    balances: list[BalanceScore]


def score(path: Path, dt_s: float = 1.0) -> Score:
    """Replay a capture of DSX messages through a twin of the site that its metadata describe."""
    messages = [m for m in read_capture(path) if not isinstance(m, BadRow)]
    engine = make_engine(build_site(spec_of(discover(iter(messages)).site, None, path.name), path.name))
    source = MessageSource([path], engine.site)
    times = [m.t_ns for m in messages]
    half_ns = (min(times) + max(times)) // 2
    held: F64 | None = None
    sigma_pu = np.zeros(0)
    heat: list[tuple[F64, F64]] = []
    balance: list[F64] = []
    for frame in Cutter(engine, dt_s, lambda _now_ns, _hash: []).frames(source):
        if held is None and frame.now_ns > half_ns:
            engine.estimator.freeze()
            held = engine.estimator.residuals["rack.heat"].measured.copy()
            noise = engine.estimator.balance_noise  # of fewer readings than it takes to call it learned
            learned = np.maximum(np.sqrt(noise.variance), noise.floor)
            sigma_pu = np.where(noise.count > 0, learned, np.nan)
        engine.tick(frame)
        if held is not None:
            residual, tree = (engine.estimator.residuals[k] for k in ("rack.heat", "feeder.balance"))
            heat.append((residual.difference, residual.measured - held))
            with np.errstate(divide="ignore", invalid="ignore"):
                balance.append(tree.difference / tree.expected)
    return Score(
        (half_ns - min(times)) / NS,
        (max(times) - half_ns) / NS,
        _racks(engine, heat),
        _tree(engine, balance, sigma_pu),
    )


def _racks(engine: Engine, heat: list[tuple[F64, F64]]) -> list[RackScore]:
    off, away = (np.abs(np.array([pair[k] for pair in heat])) for k in (0, 1))
    out = []
    for rack in np.flatnonzero(np.isfinite(off).any(axis=0)).tolist():
        known = np.isfinite(off[:, rack]) & np.isfinite(away[:, rack])
        mine, held = off[known, rack], away[known, rack]
        out.append(RackScore(engine.site.name("rack", rack), float(engine.estimator.capture[rack]), len(mine),
                             float(mine.mean()), float(mine.max()), float(held.mean()),
                             float(held.max())))  # fmt: skip
    return out


def _tree(engine: Engine, balance: list[F64], sigma_pu: F64) -> list[BalanceScore]:
    off = np.array(balance)
    return [
        BalanceScore(
            b.name, float(sigma_pu[i]), float(np.nanmean(off[:, i])), float(np.nanmax(np.abs(off[:, i])))
        )
        for i, b in enumerate(engine.estimator.balances)
        if np.isfinite(off[:, i]).any() and np.isfinite(sigma_pu[i])
    ]


def table(found: Score) -> str:
    """The score as text."""
    lines = [f"learned on {found.learned_s:.0f} s, judged on {found.judged_s:.0f} s",
             "return temperature, K: mean and worst error, beside the last value held",
             f"{'rack':32} {'capture':>8} {'mean':>7} {'worst':>7} {'held':>7} {'worst':>7}"]  # fmt: skip
    lines += [f"{r.name:32} {r.capture_pu:8.3f} {r.mean_k:7.3f} {r.worst_k:7.3f} {r.held_mean_k:7.3f} "
              f"{r.held_worst_k:7.3f}" for r in found.racks]  # fmt: skip
    lines += ["power tree: noise learned, then mean and worst difference, %", f"{'sum':32} {'noise':>8}"]
    lines += [f"{b.name:32} {100 * b.noise_pu:8.3f} {100 * b.mean_pu:7.3f} {100 * b.worst_pu:7.3f} "
              f"{'agrees' if b.agrees else 'differs'}" for b in found.balances]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(score(Path(sys.argv[1]))))
