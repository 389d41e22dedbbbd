"""Losses of flow: scenarios in which coolant stops or thins at full load, and some in which a sensor lies.

What is developed on is drawn from `develop`; a figure that is to be reported comes from `held_back`, whose
seeds and profiles nothing was ever tuned on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tests.support.builders import spec_of
from twin.catalogue import F64
from twin.plant import Backup, Disturbance, SensorFault
from twin.site import Site, build_site

RACKS, WARM_S, AFTER_S = 4, 120, 600  # of each circuit; before the cause; after it
SPANS = {"cloudmatrix384": 16}  # racks of a supernode of several; those of nodes come first
# Scenarios that one plant lives through, each on a circuit of its own: nothing that the guard does joins them
CIRCUITS = 8
BLOCKED = 1e12  # on a hydraulic resistance: no flow
SLOW_S = (60.0, 400.0)  # until a slow loss is whole


class LossDraw(NamedTuple):
    """The first seed, and the profiles."""

    first_seed: int
    profiles: tuple[str, ...]

    @property
    def racks(self) -> tuple[str, ...]:
        """Those whose supernode is one rack."""
        return tuple(p for p in self.profiles if p not in SPANS)


DRAWS = {
    "develop": LossDraw(60_000, ("gb200-nvl72", "cloudmatrix384")),
    "held_back": LossDraw(60_000_000, ("gb200-nvl72", "gb300-nvl72", "cloudmatrix384")),
}
# Kind -> whether GPUs are truly in danger. The others are healthy sites with a sensor that lies, pumps of
# which one is enough, and losses of the utility that UPSs of the pumps bridge or that last for 1-3 s
KINDS = {
    "rack_blocked": True,
    "rack_clogs": True,
    "rack_starves": True,
    "pumps_lost": True,
    "pumps_wear": True,
    "filter_clogs": True,
    "blocked_unseen": True,
    "pump_lost": False,
    "meter_lies": False,
    "gpu_lies": False,
    "utility_lost": True,
    "utility_bridged": False,
    "utility_dips": False,
}
# Until a generator carries load: NFPA 110 types 10 to 120. Racks have a UPS; pumps of CDUs only where bridged
GENERATOR_S, BRIDGED_S, DIP_S = (10.0, 120.0), (130.0, 600.0), (1, 3)


@dataclass(frozen=True)
class FlowLoss:
    """One scenario: its kind, the plant's seed, and how it proceeds."""

    kind: str
    profile: str
    seed: int

    def site(self, controls: dict[str, dict[str, float]] | None = None, circuits: int = 1) -> Site:
        """So many CDUs with four racks, or a supernode, and a loop each, with these limits of controls."""
        n = SPANS.get(self.profile, RACKS)
        racks = [f"r[{n * k + 1}-{n * k + n}]" for k in range(circuits)]
        hall = {
            "name": "h",
            "racks": [{"name": f"r[1-{n * circuits}]", "profile": self.profile}],
            "cdus": [{"name": f"cdu{k}", "serves": [x], "loop": f"fws{k}"} for k, x in enumerate(racks)],
            "feeders": [
                {"name": f"a{k}", "side": "A", "budget_w": 1e6, "serves": [x]} for k, x in enumerate(racks)
            ],
        }
        loops = [{"name": f"fws{k}", "cooling": "tower"} for k in range(circuits)]
        tree = {"site": "cooling", "halls": [hall], "loops": loops, "controls": controls or {}}
        return build_site(spec_of(tree), "cooling")

    def apply(self, d: Disturbance, flow_lpm: F64, since_s: float, circuit: int = 0) -> None:
        """Set the disturbance of a circuit `since_s` after the cause began, without the sensor faults of
        before; `flow_lpm` [n_rack] is the nominal flow."""
        rng = np.random.default_rng((self.seed, 0xC001))
        rack, slow_s = RACKS * circuit + int(rng.integers(RACKS)), float(rng.uniform(*SLOW_S))
        part = min(since_s / slow_s, 1.0)
        d.utility_ok = not self.kind.startswith("utility")
        if self.kind == "utility_dips":
            d.utility_ok = since_s >= int(rng.integers(DIP_S[0], DIP_S[1] + 1))
        kind = self.kind
        if kind in ("rack_blocked", "blocked_unseen"):
            d.rack_branch_factor[rack] = BLOCKED
        elif kind == "rack_clogs":  # 1 to 1e6: the flow falls to a thousandth
            d.rack_branch_factor[rack] = 10.0 ** (6.0 * part)
        elif kind == "rack_starves":
            d.rack_branch_factor[rack] = 10.0 ** rng.uniform(1.5, 4.0)
        elif kind == "filter_clogs":
            d.cdu_filter_factor[circuit] = 10.0 ** (7.0 * part)
        elif kind == "pumps_lost":
            d.cdu_pump_ok[circuit] = False
        elif kind == "pumps_wear":
            d.cdu_pump_head_factor[circuit] = 1.0 - 0.999 * part
        elif kind == "pump_lost":
            d.cdu_pump_ok[circuit, int(rng.integers(2))] = False
        if kind == "blocked_unseen":  # the meter repeats what it read before
            d.sensors.append(SensorFault("rack", rack, "flow_lpm", "frozen"))
        elif kind == "meter_lies":
            d.sensors.append(SensorFault("rack", rack, "flow_lpm", "biased", -0.85 * float(flow_lpm[rack])))
        elif kind == "gpu_lies":
            each = len(d.gpu_plate_factor) // len(d.cdu_pump_ok)
            gpu = each * circuit + int(rng.integers(each))
            d.sensors.append(SensorFault("gpu", gpu, "temp_c", "biased", 28.0))

    def backup(self) -> Backup:
        """UPSs and generator of the site. Facility pumps, fans and chillers have none: they wait."""
        rng = np.random.default_rng((self.seed, 0x0B5))
        generator_s = float(np.exp(rng.uniform(*np.log(GENERATOR_S))))
        pumps_s = float(rng.uniform(*BRIDGED_S)) if self.kind == "utility_bridged" else 0.0
        return Backup(it_s=600.0, pumps_s=pumps_s, generator_s=generator_s)


def together(losses: Sequence[FlowLoss]) -> list[tuple[FlowLoss, ...]]:
    """The same in lots for one plant each: of one profile. A loss of the utility strikes a whole site, and a
    supernode of several racks is one."""
    out: list[tuple[FlowLoss, ...]] = []
    for profile in dict.fromkeys(x.profile for x in losses):
        mine = [x for x in losses if x.profile == profile]
        single = [x for x in mine if x.kind.startswith("utility") or profile in SPANS]
        out += [(x,) for x in single]
        others = [x for x in mine if x not in single]
        out += [tuple(others[k : k + CIRCUITS]) for k in range(0, len(others), CIRCUITS)]
    return out


def losses_of(draw: str, kinds: list[str], each: int, profiles: Sequence[str] = ()) -> list[FlowLoss]:
    """So many of each kind, in turn over the profiles; by default those of the draw."""
    chosen = DRAWS[draw]
    profiles = profiles or chosen.profiles
    return [
        FlowLoss(kind, profiles[k % len(profiles)], chosen.first_seed + 1000 * at + k)
        for at, kind in enumerate(KINDS)
        if kind in kinds
        for k in range(each)
    ]


LOSS_HEADS = (
    "kind", "plants", "GPUs", "shut down", "in plants", "at most", "caps alone", "hottest over, K",
    "nodes off", "needless", "first cap, s p50", "p99",
)  # fmt: skip


def loss_row(kind: str, some: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts of a kind over its scenarios, as they were lived through."""
    caps_s = [x["first_cap_s"] for x in some if np.isfinite(x["first_cap_s"])]
    lossy = sum(x["shut_down"] > 0 for x in some)
    return {
        "kind": kind,
        "scenarios": len(some),
        "gpus": sum(x["gpus"] for x in some),
        "shut_down": sum(x["shut_down"] for x in some),
        "scenarios_with_loss": lossy,
        "with_loss_at_most_pu": at_most_pu(lossy, len(some)),
        "shut_down_capped": sum(x["shut_down_capped"] for x in some),
        "hottest_over_shutdown_k": max(x["over_k"] for x in some),
        "nodes_off": sum(x["ordered"] for x in some),
        "nodes_off_needless": sum(x["needless"] for x in some),
        "first_cap_s_p50": float(np.median(caps_s)) if caps_s else None,
        "first_cap_s_p99": float(np.percentile(caps_s, 99)) if caps_s else None,
    }


def at_most_pu(hits: int, trials: int) -> float:
    """Upper end of the two-sided 95 % interval of a share by Wilson; of none, by the rule of three."""
    if hits == 0:
        return min(3.0 / max(trials, 1), 1.0)
    z, share = 1.959964, hits / trials
    middle = share + z * z / (2.0 * trials)
    half = z * float(np.sqrt(share * (1.0 - share) / trials + z * z / (4.0 * trials * trials)))
    return min((middle + half) / (1.0 + z * z / trials), 1.0)
