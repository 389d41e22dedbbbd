"""Leaks: scenarios in which coolant leaves a circuit or detectors lie, and which racks leak.

What is developed on is drawn from `develop`; a figure that is to be reported comes from `held_back`, whose
seeds and profiles nothing was ever tuned on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tests.support.builders import spec_of
from tests.support.flow_losses import DRAWS, RACKS, at_most_pu
from twin.plant import Disturbance, SensorFault
from twin.site import Site, build_site

WARM_S, AFTER_S = 30, 420  # before the leak; after it
# Kinds of which one plant lives through several, each on a circuit of its own and so much later than the one
# before: detectors of other kinds get wet for minutes, and the guard asks what comes at one instant
SIDE_BY_SIDE, CIRCUITS, LATER_S = ("unseen", "release", "healthy"), 8, 10
TRAYS = 18
LIED_S = 20.0  # before the leak a detector that lies says that it is wet
FLICKERS_PER_S = 0.02  # wet readings of a rack whose detectors flicker
FLAPS_PU = 0.5  # of its readings, of a detector that flaps, say that it is dry
TRAY_LPM, RACK_LPM = (0.1, 0.5), (0.5, 4.0)
# Kind -> what happens
LEAK_KINDS = {
    "tray": "a tray leaks",
    "tray_flaps": "a tray leaks, and every detector of its rack flaps",
    "manifold": "the manifold of a rack leaks beside a tray",
    "two_racks": "trays of two racks of one circuit leak",
    "liar_and_leak": "a detector lies, and another rack of its circuit leaks",
    "unseen": "a rack leaks whose detectors all say that they are dry",
    "liar": "a detector is stuck wet, and those of other racks flicker",
    "release": "all trays of three racks say at one instant that they are wet",
    "healthy": "nothing leaks",
    "gateway_lies": "the building's gateway says of one rack, one after the other, that all of it is wet",
}


class LeakPlaces(NamedTuple):
    """Leaking trays with their racks (-1: none), and the rack of the detector that lies."""

    tray: int
    rack: int
    second: int
    liar: int


@dataclass(frozen=True)
class Leak:
    """One scenario: its kind, and the plant's seed."""

    kind: str
    profile: str
    seed: int
    lpm: float = field(init=False)
    places: LeakPlaces = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng((self.seed, 0x1EAC))
        racks = rng.permutation(RACKS)
        places = LeakPlaces(int(rng.integers(3, TRAYS)), *(int(r) for r in racks[:3]))
        object.__setattr__(self, "places", places)
        low, high = TRAY_LPM if "tray" in self.kind or self.kind == "two_racks" else RACK_LPM
        object.__setattr__(self, "lpm", float(np.exp(rng.uniform(np.log(low), np.log(high)))))

    @property
    def leaking(self) -> set[int]:
        """Racks that leak where a detector can tell."""
        _, rack, second, _ = self.places
        if self.kind in ("liar", "gateway_lies", "release", "healthy", "unseen"):
            return set()
        return {rack, second} if self.kind == "two_racks" else {rack}

    def site(self, circuits: int = 1) -> Site:
        """So many CDUs with four racks each, of which two may be isolated at once."""
        racks = f"r[1-{RACKS * circuits}]"
        hall = {
            "name": "h",
            "racks": [{"name": racks, "profile": self.profile, "nodes_from": "bottom"}],
            "cdus": [{"name": f"cdu[1-{circuits}]", "serves": [racks], "loop": "fws0"}],
            "feeders": [{"name": "a", "side": "A", "budget_w": 1e6 * circuits, "serves": [racks]}],
        }
        controls = {
            "node.service_level": {"blast_radius": RACKS * TRAYS * circuits},
            "rack.liquid_isolation": {"blast_radius": 2 * circuits},
            "rack.electrical_isolation": {"blast_radius": 2 * circuits},
        }
        loop = {"name": "fws0", "cooling": "tower"}
        tree = {"site": "cooling", "halls": [hall], "loops": [loop], "controls": controls}
        return build_site(spec_of(tree), "cooling")

    def apply(self, d: Disturbance, since_s: float, circuit: int = 0) -> None:
        """Set the disturbance of a circuit `since_s` after its leak began; earlier sensor faults are gone."""
        tray, *racks = self.places
        rack, second, liar = (RACKS * circuit + x for x in racks)
        rng = np.random.default_rng((self.seed, 0xF1A9, round(since_s + 1e4)))
        begun = since_s >= 0.0
        if begun and self.kind not in ("liar", "gateway_lies", "release", "healthy"):
            leaks_at_tray = self.kind in ("tray", "tray_flaps", "two_racks", "liar_and_leak")
            if leaks_at_tray or self.kind == "manifold":
                d.node_leak_lpm[rack * TRAYS + tray] = min(self.lpm, TRAY_LPM[1])
            if self.kind in ("manifold", "unseen"):
                d.rack_leak_lpm[rack] = self.lpm
            if self.kind == "two_racks":
                d.node_leak_lpm[second * TRAYS + tray] = self.lpm
        if self.kind == "tray_flaps":
            dry = np.flatnonzero(rng.random(TRAYS) < FLAPS_PU)
            d.sensors += [_says("node", rack * TRAYS + int(k), -1.0) for k in dry]
            if rng.random() < FLAPS_PU:
                d.sensors.append(_says("rack", rack, -1.0))
        elif self.kind == "unseen":
            d.sensors += [_says("node", rack * TRAYS + k, -1.0) for k in range(TRAYS)]
            d.sensors += [_says("rack", rack, -1.0), _says("rack", rack, -1.0, "tray_leak_state")]
        elif self.kind in ("liar", "liar_and_leak") and since_s >= -LIED_S:
            d.sensors.append(_says("node", liar * TRAYS + tray, 1.0))
            if self.kind == "liar":  # each says every second what it reads, as what was spoilt would stand
                flickers = int(rng.integers(TRAYS)) if rng.random() < FLICKERS_PER_S else -1
                d.sensors += [
                    _says("node", second * TRAYS + k, 1.0 if k == flickers else -1.0) for k in range(TRAYS)
                ]
        elif self.kind == "gateway_lies" and begun:
            says = (
                ("rack", rack, "leak_state"),
                ("rack", rack, "tray_leak_state"),
                ("cdu", circuit, "leak_state"),
            )
            for late, (table, entity, signal) in enumerate(says):
                if since_s >= LIED_S * late:
                    d.sensors.append(_says(table, entity, 1.0, signal))
        elif self.kind == "release" and begun:
            trays = np.arange(RACKS * TRAYS) + RACKS * TRAYS * circuit
            d.sensors += [_says("node", k, 1.0) for k in trays[trays // TRAYS != liar].tolist()]


def _says(table: str, entity: int, amount: float, signal: str = "leak_state") -> SensorFault:
    return SensorFault(table, entity, signal, "biased", amount)


def leaks_together(leaks: Sequence[Leak]) -> list[tuple[Leak, ...]]:
    """The same in lots for one plant each, of one kind and profile."""
    out: list[tuple[Leak, ...]] = []
    for key in dict.fromkeys((x.kind, x.profile) for x in leaks):
        mine = [x for x in leaks if (x.kind, x.profile) == key]
        size = CIRCUITS if key[0] in SIDE_BY_SIDE else 1
        out += [tuple(mine[k : k + size]) for k in range(0, len(mine), size)]
    return out


def leaks_of(draw: str, kinds: list[str], each: int) -> list[Leak]:
    """So many of each kind, in turn over the profiles."""
    chosen = DRAWS[draw]
    return [
        Leak(kind, chosen.racks[k % len(chosen.racks)], chosen.first_seed + 100_000 + 1000 * at + k)
        for at, kind in enumerate(LEAK_KINDS)
        if kind in kinds
        for k in range(each)
    ]


LEAK_HEADS = (
    "kind", "plants", "racks leak", "isolated", "missed, at most", "wrongly", "in plants, at most",
    "nodes off", "of these dry", "wet, left on", "of other racks", "loss told", "command, s p50", "max",
    "after reading, s p50", "p99", "max", "lost, l max",
)  # fmt: skip


def leak_row(kind: str, some: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts of a kind over its scenarios, as they lived through."""
    command_s = [x["command_s"] for x in some if np.isfinite(x["command_s"])]
    evidence_s = [x["evidence_s"] for x in some if np.isfinite(x["evidence_s"])]
    counts = ("switched_off", "dry_off", "wet_left", "wrong_nodes", "told")
    leaking, isolated, wrong = (sum(x[k] for x in some) for k in ("leaking", "isolated", "wrong_racks"))
    return {
        "kind": kind,
        "scenarios": len(some),
        "leaking": leaking,
        "isolated": isolated,
        "missed_at_most_pu": at_most_pu(leaking - isolated, leaking) if leaking else None,
        "wrong_racks": wrong,
        "wrong_at_most_pu": at_most_pu(sum(x["wrong_racks"] > 0 for x in some), len(some)),
        **{name: sum(x[name] for x in some) for name in counts},
        "command_s_p50": float(np.median(command_s)) if command_s else None,
        "command_s_max": max(command_s) if command_s else None,
        "evidence_s_p50": float(np.median(evidence_s)) if evidence_s else None,
        "evidence_s_p99": float(np.percentile(evidence_s, 99)) if evidence_s else None,
        "evidence_s_max": max(evidence_s) if evidence_s else None,
        "lost_l_max": max(x["lost_l"] for x in some),
    }
