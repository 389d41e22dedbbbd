"""Pending repairs: nodes that a command keeps out of service until people repair, replace or check them.

Such a node is idle. Its readings often look normal again and its alarm ends, although nobody has repaired it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from twin.catalogue import F64, TABLES
from twin.contracts import Finding, Windows
from twin.site import Site

_STATES = TABLES["node"].by_name["service_level_state"].states
DRAINED, REPLACE = _STATES.index("drained"), _STATES.index("replace")


def awaited_repairs(
    site: Site, service_level: F64, windows: Windows, active: Collection[str]
) -> list[Finding]:
    """One finding per node that waits for people at `replace` or `drained` and has no alarm of its health.

    `service_level` [n_node]: at which a node waits, NaN where it does not. `active`: ids of the findings that
    stand. Nodes in maintenance are left out.
    """
    waits = service_level >= DRAINED
    if (worked_on := windows.mask("node")) is not None:
        waits &= ~worked_on
    found = [(site.name("node", i), service_level[i] >= REPLACE) for i in np.flatnonzero(waits).tolist()]
    return [_finding(name, repair) for name, repair in found if f"health/{name}" not in active]


def _finding(name: str, repair: bool) -> Finding:
    identity = f"replacement/{name}"
    if repair:
        return Finding(
            identity,
            "warning",
            f"{name} is out of service until its repair is reported",
            (name,),
            ("its service level is `replace`; it shows no fault now, and nobody reported a repair",),
            1.0,
            f"Repair it, then report the repair: `racktwin device repaired {name}`.",
        )
    return Finding(
        identity,
        "warning",
        f"{name} is out of service until it is checked",
        (name,),
        ("its service level is `drained`; it shows no fault now, and no test is under way",),
        1.0,
        f"Check it. If it is fit, report it: `racktwin device repaired {name}`.",
    )
