"""Energy minimum: the power of a GPU at which a piece of a job's work takes the least energy, as learned.

A cap below it costs time and energy. Where it lies depends on the shape of power over clock, which the rule
of `policies.power_capping` takes as given. Here several shapes are weighed by how well they explain the times
that a job took under different caps (domain.md B), and the power is chosen by the mean of what they expect:
little is known, then no shape rules. Pure mathematics, vectorised over jobs; NumPy.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I64, Bool
from twin.physics import CLOCK_MIN_PU, EXPONENT, clock_of_share_pu, dynamic_share_pu

GRID = np.linspace(0.0, 1.0, 41)  # of the share of the time that waits for the clock
# Scatter of a reading of progress, as thought before any is seen, and how many readings that is worth
SCATTER_PU, WORTH = 0.02, 3.0
# Shapes: static power over what the profile says of it, exponent of power over clock, and the clock below
# which the voltage no longer falls. source: chosen on the measured sweeps of P100 and V100; a coarser grid
# cost 0.1 % more energy there, a finer one saved nothing
SHAPE = np.array([(a, g, k) for a in (0.7, 1.0, 1.3) for g in (1.8, 2.7) for k in (0.0, 0.5, 0.7)])
STATIC_MOST_PU = 0.95  # of what a job wants
# Readings whose x = 1/clock - 1 lies in one bin count as one: many at caps that hardly touch a job say no
# more than a few, and must not rule how it goes at low caps. source: estimate
BIN_EDGE = np.array([0.02, 0.08, 0.2, 0.4, 0.8])
N_BIN = len(BIN_EDGE) + 1
N, X, Y = range(3)  # sums of a bin: of 1, of x, of the time per unit of work
LEAST_BINS = 2
ASKED_PU = np.linspace(1.0, 0.25, 61)  # powers that are judged, over what a job wants; the highest first
BAND = (0.05, 0.95)


def bin_of(x: F64) -> I64:
    """Return the bin of each x [n]."""
    return np.asarray(np.searchsorted(BIN_EDGE, x, side="right"))


def power_share_pu(x: F64, static_pu: F64) -> F64:
    """Return power over a job's wanted power at this x of the profile's own shape."""
    return np.asarray(static_pu + (1.0 - static_pu) * (1.0 + x) ** -EXPONENT)


def bins_of(power_pu: F64, unit_s: F64, static_pu: float) -> F64:
    """Return sums per bin [1, N_BIN, 3] of one job's times per unit of work at these powers over its
    wanted power."""
    share = np.clip((power_pu - static_pu) / (1.0 - static_pu), 0.0, 1.0)
    x = 1.0 / np.maximum(clock_of_share_pu(share, EXPONENT), CLOCK_MIN_PU) - 1.0
    out = np.zeros((1, N_BIN, 3))
    np.add.at(out[0], bin_of(x), np.column_stack([np.ones(len(x)), x, unit_s / unit_s.mean()]))
    return out


def slowed(power_pu: F64, static_pu: F64) -> tuple[F64, F64]:
    """Return (x of every shape at these powers over the wanted power, the power then drawn) [n, n_shape,
    m].

    A GPU does not go below its lowest clock: a cap below what that draws is exceeded.
    """
    static = np.minimum(static_pu[:, None] * SHAPE[:, 0], STATIC_MOST_PU)[:, :, None]
    gamma, knee = SHAPE[:, 1][:, None], SHAPE[:, 2][:, None]
    share = np.clip((power_pu[:, None, :] - static) / (1.0 - static), 0.0, 1.0)
    root, kneed = share ** (1.0 / gamma), clock_of_share_pu(share, gamma, np.maximum(knee, CLOCK_MIN_PU))
    clock = np.where(knee > 0.0, kneed, root)
    least = static + (1.0 - static) * dynamic_share_pu(np.full_like(gamma, CLOCK_MIN_PU), gamma, knee)
    return 1.0 / np.maximum(clock, CLOCK_MIN_PU) - 1.0, np.maximum(power_pu[:, None, :], least)


def fits_of(sums: F64, counts: F64) -> tuple[F64, F64]:
    """Return (log-likelihood of each share of GRID, residual squares) [..., n_grid].

    `sums` [..., 6]: of 1, x, y, x x, x y and y y over readings of x and the time y per unit of work.

    With y = a (1 + c x) the best a leaves Syy - (Sy + c Sxy)^2 / (N + 2 c Sx + c^2 Sxx). Its scatter is not
    known, so that c is distributed as Student's t has it. `counts`: independent readings among the N.
    """
    n, x, y, xx, xy, yy = (sums[..., place, None] for place in range(6))
    counts = counts[..., None]
    size = np.maximum(n + 2.0 * GRID * x + GRID**2 * xx, 1e-12)
    left = np.maximum(yy - (y + GRID * xy) ** 2 / size, 0.0)
    level = (np.maximum(y, 1e-12) / np.maximum(n, 1e-12)) ** 2
    scaled = left / level * counts / np.maximum(n, 1e-12)
    return -0.5 * (np.maximum(counts - 1.0, 0.0) + WORTH) * np.log(WORTH * SCATTER_PU**2 + scaled), left


def _weighed(bins: F64, static_pu: F64) -> tuple[F64, F64, F64]:
    """Return (weight of each shape, time without a cap, time per x) [n, n_shape], the latter two as
    expected."""
    count = np.maximum(bins[..., N], 1e-12)
    worth = np.minimum(bins[..., N], 1.0)  # of a bin: one reading, less once it fades
    power = power_share_pu(bins[..., X] / count, static_pu[:, None])
    x = slowed(power, static_pu)[0]
    unit = np.broadcast_to((bins[..., Y] / count)[:, None, :], x.shape)
    w = worth[:, None, :]
    n, sx, sy, sxx, sxy, syy = (
        (w * part).sum(axis=2) for part in (np.ones_like(x), x, unit, x * x, x * unit, unit * unit)
    )
    fits = fits_of(np.stack([n, sx, sy, sxx, sxy, syy], axis=-1), n)[0]
    weight = np.exp(fits - fits.max(axis=(1, 2), keepdims=True))
    weight /= weight.sum(axis=(1, 2), keepdims=True)
    free = (sy[..., None] + GRID * sxy[..., None]) / np.maximum(
        n[..., None] + 2.0 * GRID * sx[..., None] + GRID**2 * sxx[..., None], 1e-12
    )
    return weight.sum(axis=2), (weight * free).sum(axis=2), (weight * free * GRID).sum(axis=2)


def cover_powers(bins: F64) -> Bool:
    """Return True where a job's readings [n, N_BIN, 3] cover different powers [n]."""
    return np.asarray((bins[..., N] >= 0.5).sum(axis=1) >= LEAST_BINS)


def expected_energy(bins: F64, static_pu: F64, asked_pu: F64, beside_pu: F64) -> F64:
    """Return the energy of a unit of work at these powers [n, m], over that at one watt wanted, expected
    over all shapes.

    `static_pu` [n] and `beside_pu` [n]: what the profile says that a GPU draws without work, and what runs
    beside it as long as it does; as `asked_pu` [n, m] over what the job wants.
    """
    _, free, per_x = _weighed(bins, static_pu)
    x, drawn = slowed(asked_pu, static_pu)
    each = (drawn + beside_pu[:, None, None]) * (free[..., None] + per_x[..., None] * x)
    return np.asarray(each.sum(axis=1))


def least_energy_pu(bins: F64, static_pu: F64, beside_pu: F64) -> F64:
    """Return the power of least energy over a job's wanted power [n, 3]: mean, and a 90 % band."""
    weight, free, per_x = _weighed(bins, static_pu)
    x, drawn = slowed(np.broadcast_to(ASKED_PU, (len(bins), len(ASKED_PU))), static_pu)
    each = (drawn + beside_pu[:, None, None]) * (free[..., None] + per_x[..., None] * x)
    best = ASKED_PU[each.sum(axis=1).argmin(axis=1)]
    # Each shape's own minimum: `free` and `per_x` carry its weight, which moves no minimum
    own = ASKED_PU[each.argmin(axis=2)]
    order = np.argsort(own, axis=1)
    below = np.cumsum(np.take_along_axis(weight, order, axis=1), axis=1)
    ends = [order[np.arange(len(order)), (below >= edge - 1e-9).argmax(axis=1)] for edge in BAND]
    low, high = (own[np.arange(len(own)), end] for end in ends)
    return np.column_stack([best, np.minimum(low, best), np.maximum(high, best)])
