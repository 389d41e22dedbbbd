"""A serving pod that has something of everything that boards show, for Prometheus to scrape.

Names are as odd as a site file allows, or, where they come from outside, as odd as text can be.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.capped_pod import Rig
from tests.support.in_process_daemon import Pod
from twin.api import Part
from twin.catalogue import TABLES, Signal
from twin.contracts import Forecast

SITE = "lab"
ODD_HALL, ODD_RACK = "lab/h", "lab/h/r.1+a:1"
NASTY = '<img src=x onerror=alert(1)>"}} or vector(1) #\\\n{{name}}$daemon'
MEASURED = ("site", "hall", "rack", "cdu", "feeder")
AHEAD_S = (3600.0, 86_400.0)
EXPECTED = {"site.power_w": 240_000.0, "site.node_failure_count": 0.4, "node.failure_pu": 0.01}


def tree() -> dict[str, Any]:
    """A hall with oddly named racks, and another; each has a CDU and feeds A and B with tight budgets."""
    halls = [
        {
            "name": name,
            "racks": [{"name": racks, "profile": "gb200-nvl72"}],
            "cdus": [{"name": "cdu1", "serves": [racks]}],
            "feeders": [
                {"name": side, "side": side.upper(), "budget_w": 150_000, "serves": [racks]} for side in "ab"
            ],
        }
        for name, racks in (("h", "r.1+a:[1-2]"), ("hall2", "r[1-2]"))
    ]
    return {"site": SITE, "halls": halls}


def fill(pod: Pod) -> None:
    """Half a minute of load that is capped; then a reading of every signal, forecasts, and nasty names."""
    Rig(pod).run(30, 1100.0)
    loads = ("power_w", "power_w_max")
    pod.tick({s.key: _usual(s) for t in MEASURED for s in TABLES[t].gauges if s.name not in loads})
    engine = pod.twin.engine
    for key, mean in EXPECTED.items():
        n = pod.twin.site.sizes[key.partition(".")[0]]
        for horizon_s in AHEAD_S:
            centre = np.full(n, mean, np.float32)
            engine.forecasts[key, horizon_s] = Forecast(
                key, horizon_s, centre, centre * 0.9, centre * 1.1, "test"
            )
    pod.live.parts[NASTY] = Part(NASTY, "source", "running", 0)
    pod.live.counts[NASTY] = 1
    pod.live.messages = lambda: {"topics": {NASTY: {"bad": 2}}, "staged": 1}


def _usual(signal: Signal) -> float:
    """In order for a state, else the middle of what is possible."""
    return 0.0 if signal.kind == "state" else (signal.low + signal.high) / 2
