"""Coolant network: the flows of a CDU over its racks, from pumps, inner resistance and a ladder of branches.

Every drop is quadratic, dp = k Q|Q|. Segment i of the manifold (supply and return together) carries the flow
of rack i and all racks beyond it, so that far racks see less pressure. A ladder is made of series and
parallel parts only, and their quadratic laws add up exactly:

    in parallel 1/sqrt(k) = 1/sqrt(k1) + 1/sqrt(k2)        in series k = k1 + k2

So the ladder is folded from its far end into one resistance (`Network.fold`, no iteration, and a blocked
branch is simply a conductance of 0), and Newton is left with one unknown per CDU: the flow of its weaker
pump. That equation is convex and rising, so Newton from its right comes down to the root without overshoot.
All CDUs are solved at once. Resistances are Pa per (l/min)^2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

MAX_STEPS = 15
TOLERANCE = 1e-8  # flows meet within this part of the total flow; one more step is taken after that

LEAST_PA = 1e-9  # a pump that gives less stands still: far below any sensor, far above underflow


@dataclass(frozen=True, slots=True)
class Pumps:
    """Two parallel pumps per CDU [n_cdu, 2]: H = n^2 H0 - a Q|Q| at speed n."""

    speed_pu: F64
    head0_pa: F64  # at full speed and no flow
    curve: F64  # a


@dataclass(frozen=True, slots=True)
class Ladder:
    """A folded manifold: how any flow divides and loses pressure. Valid until a resistance changes."""

    share_pu: F64  # [n_rack] of the flow of its CDU; they add up to 1, or are 0 where every branch is blocked
    drop_share_pu: F64  # [n_rack] drop across the rack over the drop at the head of the manifold
    conductance: F64  # [n_cdu] l/min per sqrt(Pa); 0 = blocked or no racks


@dataclass(frozen=True, slots=True)
class Duty:
    """The operating point of pumps and circuit, per CDU."""

    cdu_lpm: F64  # [n_cdu]
    pump_lpm: F64  # [n_cdu, 2]; check valves keep it from running back
    head_pa: F64  # [n_cdu] rise across the pumps
    drop_pa: F64  # [n_cdu] across the manifold: head less inner losses
    steps: int  # of Newton, of the CDU that took longest
    converged: Bool  # [n_cdu]; False too where an input is NaN or a pump's curve is not above 0


@dataclass(frozen=True, slots=True)
class Flow:
    """A solved network."""

    rack_lpm: F64  # [n_rack]
    rack_drop_pa: F64  # [n_rack] between its own two ends of the manifold, blocked or not
    cdu_lpm: F64  # [n_cdu]
    drop_pa: F64  # [n_cdu] across the manifold, as a CDU measures it
    pump_lpm: F64  # [n_cdu, 2]
    pump_head_pa: F64  # [n_cdu]
    steps: int
    converged: Bool  # [n_cdu]


class Network:
    """The manifolds of all CDUs of a site; which rack hangs where never changes."""

    def __init__(self, start: I32 | I64, rack: I32 | I64, n_rack: int) -> None:
        """Racks of CDU i are `rack[start[i]:start[i + 1]]`, nearest to the CDU first.

        A rack stands at most once; racks of no CDU get no flow. Raises ValueError otherwise.
        """
        self.n_cdu, self.n_rack = len(start) - 1, n_rack
        if len(rack) != int(start[-1]) or (len(rack) and np.bincount(rack, minlength=n_rack).max() > 1):
            raise ValueError("a rack stands at most once, and start ends at the number of racks that do")
        first = np.asarray(start, np.int64)
        count = np.diff(first)
        self.depth = int(count.max()) if self.n_cdu else 0
        # [depth, n_cdu]: the place of a branch along its manifold comes first, so that one step of the fold
        # reads contiguous rows. Empty places point behind the last rack, where a blocked branch is kept.
        self._at = np.full((self.depth, self.n_cdu), n_rack, np.int64)
        cdu = np.repeat(np.arange(self.n_cdu), count)
        place = np.arange(len(rack)) - first[cdu]
        self._at[place, cdu] = rack
        self._place, self._cdu, self._rack = place, cdu, np.asarray(rack, np.int64)
        self._branch, self._segment = np.full(n_rack + 1, np.inf), np.zeros(n_rack + 1)

    def fold(self, branch: F64, segment: F64) -> Ladder:
        """The ladder of `branch` and `segment` [n_rack], exact to rounding.

        A branch may be inf or 1e12 times itself: blocked. Segments are finite and branches above 0; a CDU
        where that does not hold, or where one is NaN, is NaN and later flagged.
        """
        self._branch[:-1], self._segment[:-1] = branch, segment
        beyond = np.zeros(self.n_cdu)
        with np.errstate(divide="ignore", invalid="ignore"):
            own = 1.0 / np.sqrt(self._branch[self._at])
            along = self._segment[self._at]
            passed = np.empty_like(own)  # drop behind a segment over drop before it
            for i in range(self.depth - 1, -1, -1):
                node = own[i] + beyond
                passed[i] = 1.0 / (1.0 + along[i] * node * node)
                beyond = node * np.sqrt(passed[i])
            drop = np.cumprod(passed, axis=0)
            share = np.where(beyond > 0.0, own * np.sqrt(drop) / beyond, 0.0 * beyond)
        return Ladder(self._by_rack(share), self._by_rack(drop), beyond)

    def _by_rack(self, padded: F64) -> F64:
        out = np.zeros(self.n_rack)
        out[self._rack] = padded[self._place, self._cdu]
        return out

    def _to_racks(self, of_cdu: F64) -> F64:
        """A CDU's value at each of its racks; 0 at racks of none."""
        out = np.zeros(self.n_rack)
        out[self._rack] = of_cdu[self._cdu]
        return out

    def flow(self, ladder: Ladder, duty: Duty) -> Flow:
        """The flow of each rack at the operating point `duty`."""
        return Flow(
            rack_lpm=self._to_racks(duty.cdu_lpm) * ladder.share_pu,
            rack_drop_pa=self._to_racks(duty.drop_pa) * ladder.drop_share_pu,
            cdu_lpm=duty.cdu_lpm,
            drop_pa=duty.drop_pa,
            pump_lpm=duty.pump_lpm,
            pump_head_pa=duty.head_pa,
            steps=duty.steps,
            converged=duty.converged,
        )

    def solve(
        self,
        pumps: Pumps,
        inner: F64,
        branch: F64,
        segment: F64,
        start: Flow | None = None,
    ) -> Flow:
        """Flows and pressures at rest. `start`: an earlier solution to begin from.

        `inner` [n_cdu] is the resistance inside a CDU, `branch` and `segment` [n_rack] that of the ladder.
        """
        ladder = self.fold(branch, segment)
        begin = None if start is None else start.pump_lpm
        return self.flow(ladder, duty(pumps, inner, ladder.conductance, begin))


def duty(pumps: Pumps, inner: F64, conductance: F64, start_lpm: F64 | None = None) -> Duty:
    """Duty point of two parallel pumps on a circuit, for all CDUs at once.

    With A the stronger and B the weaker head at no flow, and q the flow through B, the sum of the flows must
    be what the circuit takes at that head:

        g(q) = q + sqrt((A - B + b q^2)/a) - G sqrt(B - b q^2) = 0

    g rises and is convex, so Newton from the right is monotonic; where it starts on the left its first step
    lands on the right, and no step goes beyond the bound from which a cold start begins. Where A alone gives
    more than B at no flow, the check valve of B is shut.
    `start_lpm` [n_cdu, 2]: pump flows of an earlier solution.
    """
    no_flow = pumps.speed_pu * pumps.speed_pu * pumps.head0_pa
    no_flow = np.where(no_flow < LEAST_PA, 0.0, no_flow)
    swap = no_flow[:, 1] > no_flow[:, 0]
    strong, weak = _sorted_columns(no_flow, swap)
    a, b = _sorted_columns(pumps.curve, swap)
    with np.errstate(divide="ignore", invalid="ignore"):
        circuit = conductance / np.sqrt(1.0 + inner * conductance * conductance)
        gap = strong - weak
        ahead = np.sqrt(gap / a) < circuit * np.sqrt(weak)
        both = 1.0 + np.sqrt(b / a)
        most_ahead = circuit * np.sqrt(weak / (b * circuit * circuit + both * both))
        most = np.where(ahead, most_ahead, 0.0)
        begin = most
        if start_lpm is not None:
            warm = np.where(swap, start_lpm[:, 0], start_lpm[:, 1])
            begin = np.where((warm > 1e-3 * most) & (warm < most), warm, most)
        q, steps, converged = _descend(begin, most, (a, b, gap, weak, circuit))
        turned = b * q * q
        open_ = most > 0.0
        alone_pa = strong / (1.0 + a * circuit * circuit)
        strong_lpm = np.where(open_, np.sqrt(np.maximum(gap + turned, 0.0) / a), circuit * np.sqrt(alone_pa))
        total = strong_lpm + q
        # Of two equal expressions for the head, the one that does not take the difference of near numbers
        met = np.where(2.0 * turned > weak, (total / circuit) ** 2, weak - turned)
        head = np.where(open_, met, alone_pa)
        sound = np.isfinite(total + head) & np.isfinite(no_flow).all(axis=1) & (pumps.curve > 0.0).all(axis=1)
    total, head = np.where(sound, total, np.nan), np.where(sound, head, np.nan)
    flows = np.stack((strong_lpm, q), axis=1)
    pump_lpm = np.where(swap[:, None], flows[:, ::-1], flows)
    pump_lpm[~sound] = np.nan
    return Duty(total, pump_lpm, head, head - inner * total * total, steps, converged & sound)


def _sorted_columns(pairs: F64, swap: Bool) -> tuple[F64, F64]:
    first, second = pairs[:, 0], pairs[:, 1]
    return np.where(swap, second, first), np.where(swap, first, second)


def _descend(q: F64, most: F64, of: tuple[F64, F64, F64, F64, F64]) -> tuple[F64, int, Bool]:
    """Newton on g from `q`, never outside 0..`most`: (flow, steps, converged)."""
    a, b, gap, weak, circuit = of
    converged = ~(most > 0.0)
    steps = 0
    while steps < MAX_STEPS and not converged.all():
        steps += 1
        squared = b * q * q
        strong_lpm = np.sqrt(np.maximum(gap + squared, 0.0) / a)
        root = np.sqrt(np.maximum(weak - squared, 0.0))
        value = q + strong_lpm - circuit * root
        slope = 1.0 + b * q / (a * strong_lpm) + circuit * b * q / root
        moved = np.where(converged, q, np.clip(q - value / slope, 0.0, most))
        # |g| is what the flows miss each other by; the step just taken squares it.
        converged = converged | (np.abs(value) <= TOLERANCE * (strong_lpm + q))
        q = moved
    return q, steps, converged
