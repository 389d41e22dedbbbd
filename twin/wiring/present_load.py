"""Present load: power of the site and each feeder, beside their external limits.

The site is its racks together: the meter of each, or the power of its GPUs where the meter is silent. A rack
without any reading is counted, so that a part is not taken for the whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I64
from twin.config import explain_topic
from twin.contracts import LoadTarget
from twin.engine import Engine


class LoadNow(NamedTuple):
    """Load of the site (W, NaN where nothing was ever heard), its unheard racks, and of each feeder (W, NaN
    unknown) [n_feeder]."""

    site_w: float
    unheard_racks: int
    feeder_w: F64


def load_now(engine: Engine) -> LoadNow:
    """Loads of the site and its feeders, as bad as they may be where a meter has fallen silent."""
    found = explain_topic(engine, "feeds")
    site, *feeders = (float_of(row["load_w"]) for row in found.table("feeds"))
    unheard = found.figure("unheard_racks")
    return LoadNow(site, unheard if isinstance(unheard, int) else 0, np.array(feeders, np.float64))


def float_of(value: object) -> float:
    """A cell as a number; NaN for none."""
    return float(value) if isinstance(value, int | float) else np.nan


def places_of(target: LoadTarget, load: LoadNow) -> tuple[I64, F64]:
    """(feeder of each place that a target holds, -1 = the site; its load in W), the highest load first."""
    if target.feeders is None:
        return np.array([-1], np.int64), np.array([load.site_w])
    order = np.argsort(-np.nan_to_num(load.feeder_w[target.feeders], nan=np.inf), kind="stable")
    index = target.feeders[order].astype(np.int64)
    return index, load.feeder_w[index]
