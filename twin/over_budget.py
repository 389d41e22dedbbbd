"""Feeders beyond their budgets, as a finding: what has to be seen even where nobody may act on it.

May import contracts, the site, the state and maintenance windows. Decides nothing.
"""

from __future__ import annotations

import numpy as np

from twin.contracts import Finding, View
from twin.maintenance import Windows
from twin.site import Site
from twin.state import GOOD

SHOWN_ENTITIES = 8


def over_budgets(site: Site, view: View, windows: Windows) -> list[Finding]:
    """At most one finding: feeders whose last good reading is above the budget that is in force."""
    if not site.sizes["feeder"]:
        return []
    read_w, budget_w = view.value("feeder.power_w"), view.budget_w()
    over = read_w > budget_w
    if over.any() and (spared := windows.mask("feeder")) is not None:
        over = over & ~spared
    index = np.flatnonzero(over)
    if not len(index):
        return []
    first = int(index[np.argmax(read_w[index] - budget_w[index])])
    surely = (view.quality("feeder.power_w")[index] == GOOD).all()
    evidence = f"{site.name('feeder', first)}: read {read_w[first]:.4g} W, budget {budget_w[first]:.4g} W"
    return [
        Finding(
            "beyond/feeder.power_w/budget",
            "critical",
            f"power_w of {len(index)} feeder {'is' if surely else 'may be'} beyond the budget",
            tuple(site.name("feeder", int(i)) for i in index[:SHOWN_ENTITIES]),
            (evidence,),
            1.0,
            "See whether power_guard acts, and shed load before a breaker does.",
            len(index),
        )
    ]
