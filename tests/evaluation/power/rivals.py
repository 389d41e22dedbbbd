"""Rivals of the power policies: no caps, static ones, proportional cuts, and thresholds after POLCA.

They read the same meters and know the same limits: what each feeder would carry with the other side lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.evaluation.power.plant import Reading
from tests.evaluation.power.site import (
    CPU_MAX_W,
    GPU_IDLE_W,
    GPU_MAX_W,
    GPU_MIN_W,
    GPUS,
    LOSS_PU,
    OTHER_W,
    PowerSite,
    shares_at_worst,
)
from twin.catalogue import F64, Bool
from twin.telemetry import Event

CUT_PU, AIM_PU, CALM_PU, CALM_S = 0.98, 0.95, 0.90, 60  # of proportional cuts. source: estimate
RISE_PU_PER_S = 0.05 / 60  # of the range, once calm. source: estimate
PEAK_S = 60.0  # for which what a GPU drew is remembered. source: estimate
# POLCA (arXiv 2308.12908): above 80 % of the limit low priority goes to a first clock, above 89 % to a second
# and then high priority to a third; at the limit all brake; given back 5 % below. The clocks are of an A100,
# whose highest is 1,410 MHz. source: estimate, recalled from the paper
FIRST_PU, SECOND_PU, BACK_PU = 0.80, 0.89, 0.05
LOW_CLOCK, LOWER_CLOCK, HIGH_CLOCK, BRAKE_CLOCK = 1275 / 1410, 1110 / 1410, 1305 / 1410, 288 / 1410
CLOCK_EXPONENT = 2.75  # of power over the clock: the middle of domain.md B
STAGE_S = 5  # from one stage to the next: until the meters know of it. source: estimate
BACK_S = 40  # below, before a stage is left: the time that its controls take. source: estimate, as above
BEGINS_PU = np.array([0.0, FIRST_PU, SECOND_PU, SECOND_PU, SECOND_PU])  # of stages


class Uncapped:
    """Nobody acts."""

    name, still = "none", True

    def decide(self, read: Reading, second: int, dt_s: int, events: Sequence[Event]) -> F64 | None:
        """Never anything."""
        return None


class Static:
    """Each node has its equal part of the tightest budget above it, for ever."""

    name, still = "static", True

    def __init__(self, site: PowerSite) -> None:
        self.cap_w: F64 | None = static_caps(site)

    def decide(self, read: Reading, second: int, dt_s: int, events: Sequence[Event]) -> F64 | None:
        """The caps, once."""
        out, self.cap_w = self.cap_w, None
        return out


def static_caps(site: PowerSite) -> F64:
    """Caps under which all nodes at full keep every budget, with a side lost [n_gpu]."""
    core, shares = site.site, shares_at_worst(site.site)
    nodes = np.bincount(core.rack_of_node, minlength=core.sizes["rack"]).astype(np.float64)
    of_feeder = site.budget_w / np.maximum(shares @ nodes, 1e-9)
    of_rack = np.where(shares > 0, of_feeder[:, None], np.inf).min(axis=0)
    gpu_w = ((of_rack - OTHER_W) / (1.0 + LOSS_PU) - CPU_MAX_W) / GPUS
    return np.asarray(np.clip(gpu_w, GPU_MIN_W, GPU_MAX_W)[core.rack_of_gpu])


def use_of_racks(site: PowerSite, shares: F64, read: Reading) -> F64:
    """Return the use of each rack's tightest feeder limit, with a side lost [n_rack]."""
    use = (shares @ read.rack_w) / site.budget_w
    return np.asarray(np.where(shares > 0, use[:, None], 0.0).max(axis=0))


class Proportional:
    """All GPUs below a limit give the same share of what they drew; caps rise by and by once it is calm."""

    name, still = "proportional", False

    def __init__(self, site: PowerSite) -> None:
        self.site, self.shares = site, shares_at_worst(site.site)
        self.cap_w, self.peak_w = np.full(site.gpus, GPU_MAX_W), np.zeros(site.gpus)
        self.calm_s = np.zeros(site.site.sizes["rack"])
        self.cut_s = np.full(site.site.sizes["rack"], -STAGE_S)

    def decide(self, read: Reading, second: int, dt_s: int, events: Sequence[Event]) -> F64 | None:
        """A cut where a limit is near, else some more."""
        use, rack = use_of_racks(self.site, self.shares, read), self.site.site.rack_of_gpu
        self.peak_w = np.maximum(self.peak_w * np.exp(-dt_s / PEAK_S), read.gpu_w)
        self.calm_s = np.where(use < CALM_PU, self.calm_s + dt_s, 0.0)
        over = (use > CUT_PU) & (second - self.cut_s >= STAGE_S)
        self.cut_s = np.where(over, second, self.cut_s)
        drawn_w = np.minimum(self.peak_w, self.cap_w)
        cut_w = np.where(over[rack], drawn_w * (AIM_PU / np.maximum(use, CUT_PU))[rack], np.inf)
        rise_w = np.where((self.calm_s >= CALM_S)[rack], RISE_PU_PER_S * dt_s * (GPU_MAX_W - GPU_MIN_W), 0.0)
        cap_w = np.clip(np.minimum(self.cap_w + rise_w, cut_w), GPU_MIN_W, GPU_MAX_W)
        same = bool((cap_w == self.cap_w).all())
        self.cap_w = cap_w
        return None if same else cap_w


class Thresholds:
    """POLCA's stages, for the racks below each limit."""

    name, still = "polca", False

    def __init__(self, site: PowerSite) -> None:
        self.site, self.shares = site, shares_at_worst(site.site)
        n = site.site.sizes["rack"]
        self.stage, self.since_s = np.zeros(n, np.int64), np.full(n, -STAGE_S)
        self.calm_s = np.zeros(n, np.int64)
        self.cap_w = np.full(site.gpus, GPU_MAX_W)

    def decide(self, read: Reading, second: int, dt_s: int, events: Sequence[Event]) -> F64 | None:
        """Caps of the stages that the racks' feeders are at."""
        use = use_of_racks(self.site, self.shares, read)
        stage, settled = self.stage, second - self.since_s >= STAGE_S
        above: Bool = use > SECOND_PU
        up = np.where(use > FIRST_PU, 1, 0)
        up = np.where(above, np.where((stage >= 2) & settled, 3, 2), up)
        up = np.where(use >= 1.0, 4, up)
        # A stage is left, one at a time, once the load was so far below where it began for long enough
        self.calm_s = np.where(use < BEGINS_PU[stage] - BACK_PU, self.calm_s + dt_s, 0)
        left = self.calm_s >= BACK_S
        new = np.maximum(up, np.where(left, np.maximum(stage - 1, 0), stage))
        self.since_s = np.where(new != stage, second, self.since_s)
        self.calm_s = np.where(new != stage, 0, self.calm_s)
        self.stage = new
        clock = np.where(self.site.high[:, None], _HIGH, _LOW)[
            np.arange(self.site.nodes), new[self.site.site.rack_of_node]]  # fmt: skip
        cap_w = (GPU_IDLE_W + (GPU_MAX_W - GPU_IDLE_W) * clock**CLOCK_EXPONENT)[self.site.site.node_of_gpu]
        same = bool((cap_w == self.cap_w).all())
        self.cap_w = cap_w
        return None if same else cap_w


_LOW = np.array([1.0, LOW_CLOCK, LOWER_CLOCK, LOWER_CLOCK, BRAKE_CLOCK])
_HIGH = np.array([1.0, 1.0, 1.0, HIGH_CLOCK, BRAKE_CLOCK])
