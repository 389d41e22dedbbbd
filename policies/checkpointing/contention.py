"""Contention: durations of saves and restarts on a file system with other traffic.

Transfers share a file system equally (processor sharing). Under Poisson arrivals a transfer of x seconds
alone takes x / (1 - load) on average, whatever the sizes of the others are.
source: Kleinrock, Queueing Systems II, section 4.4 (M/G/1 with processor sharing).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from twin.catalogue import F64, Bool

MOST_LOAD_PU = 0.9  # beyond, a mean says little of what comes. source: estimate


def shared_s(alone_s: ArrayLike, load_pu: ArrayLike) -> F64:
    """Return the mean time of transfers of `alone_s` beside others that keep the storage busy by
    `load_pu`."""
    load = np.clip(np.nan_to_num(np.asarray(load_pu, np.float64)), 0.0, MOST_LOAD_PU)
    return np.asarray(alone_s, np.float64) / (1.0 - load)


def alone_s(measured_s: ArrayLike, load_pu: ArrayLike) -> F64:
    """Return the inverse of `shared_s`: the time without others, from one measured beside them."""
    load = np.clip(np.nan_to_num(np.asarray(load_pu, np.float64)), 0.0, MOST_LOAD_PU)
    return np.asarray(measured_s, np.float64) * (1.0 - load)


def restart_under_load_s(
    restart_s: F64, transfer_s: F64, load_then_pu: F64, load_now_pu: F64, known: Bool | None = None
) -> F64:
    """Return the present restart times [n], from measurements under another load.

    transfer_s: what reading the checkpoint takes alone, at most all of the restart; the rest of it (to find
    nodes, to start processes) does not depend on the storage. Where not `known`, as measured.
    """
    then_s = np.minimum(shared_s(transfer_s, load_then_pu), restart_s)
    now_s = restart_s - then_s + shared_s(alone_s(then_s, load_then_pu), load_now_pu)
    return now_s if known is None else np.where(known, now_s, restart_s)
