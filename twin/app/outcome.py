"""What a replay came to: its counts, and the one JSON object that programs read. Part of the shell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twin.app.report_text import number
from twin.engine import Engine
from twin.frame import NS
from twin.site import Site

KWH_J = 3.6e6


@dataclass
class Outcome:
    """What a replay came to."""

    ticks: int = 0
    commands: int = 0
    advice: int = 0
    first_ns: int = 0
    last_ns: int = 0
    journal_head: str = ""
    compared_lines: int = 0
    damage: list[str] = field(default_factory=list)
    inbox: dict[str, int] = field(default_factory=dict)


def summary(
    engine: Engine, outcome: Outcome, messages: dict[str, Any] | None, wall_s: float
) -> dict[str, Any]:
    """The replay as one JSON object; its keys are kept stable."""
    site = engine.site
    power = engine.state.tables["rack"].value[
        next(s.row for s in engine.state.tables["rack"].signals if s.name == "power_w")
    ]
    capture = engine.estimator.liquid_capture()
    racks = {
        _shortest(site, "rack", i): {
            "power_w": _number(power[i]),
            "liquid_capture": _number(capture[i], 4),
        }
        for i in range(site.sizes["rack"])
    }
    residual, inferred = engine.estimator.tree_residual_pu()
    return {
        "site": site.file.site,
        "messages": messages,
        "racks": racks,
        "power_tree": {"residual_pu": _number(residual, 6), "inferred_edges": inferred},
        "ticks": outcome.ticks,
        "commands": outcome.commands,
        "advice": outcome.advice,
        "findings": [f.title for f in engine.findings.active.values()],
        "span_s": (outcome.last_ns - outcome.first_ns) / NS,
        "inbox": outcome.inbox,
        "events": engine.intake.counts,
        "compared_lines": outcome.compared_lines,
        "damage": outcome.damage,
        "state_checksum": engine.checksum(),
        "journal_head": outcome.journal_head,
        "wall_s": round(wall_s, 3),
    }


# Of a plant's figures, for people: key, words, unit, and by what to divide.
PLANT_WORDS = (
    ("it_energy_j", "IT energy", "kWh", KWH_J), ("cooling_energy_j", "cooling energy", "kWh", KWH_J),
    ("total_energy_j", "total energy", "kWh", KWH_J), ("pue", "PUE", "", 1.0), ("tue", "TUE", "", 1.0),
    ("wue_l_per_kwh", "WUE", "l/kWh", 1.0), ("water_l", "water evaporated", "l", 1.0),
    ("carbon_g", "carbon", "kg CO2", 1e3), ("cost_usd", "cost of the energy", "USD", 1.0),
    ("coolant_leaked_l", "coolant leaked", "l", 1.0), ("gpu_trips", "GPUs shut down by heat", "", 1.0),
    ("breaker_trips", "breakers tripped", "", 1.0),
    ("throttle_s", "throttled by heat", "GPU h", 3600.0),
    ("lost_gpu_s", "work not done, as clocks were low", "GPU h", 3600.0),
    ("lost_work_gpu_s", "work lost since the last checkpoint", "GPU h", 3600.0),
    ("checkpoint_gpu_s", "time spent on checkpoints", "GPU h", 3600.0),
)  # fmt: skip


def plant_words(figures: dict[str, float]) -> list[tuple[str, str]]:
    """A plant's figures as (words, value with unit); what is nothing or unknown is left out."""
    out = []
    for key, words, unit, per in PLANT_WORDS:
        value = figures.get(key, 0.0) / per
        if np.isfinite(value) and value != 0.0:
            out.append((words, f"{number(value, 4)} {unit}".rstrip()))
    return out


def _shortest(site: Site, table: str, entity: int) -> str:
    """The local name where it is the only one, else the full path."""
    path = site.name(table, entity)
    local = path.rpartition("/")[2]
    return local if site.entity(table, local) == entity else path


def _number(value: Any, digits: int = 1) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), digits)
