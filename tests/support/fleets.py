"""A small fleet: the site file of a hub with two halls that both feeds serve."""

from __future__ import annotations

from typing import Any

GUARANTEED_W, MOST_W, FEEDER_W = (400e3, 300e3), 1e6, 1.2e6


def fleet_tree(**more: Any) -> dict[str, Any]:
    """Halls of priorities 2 and 0 below feeders of sides A and B."""
    halls = [
        {"name": f"hall-{name}", "priority": priority, "guaranteed_w": least_w, "max_w": MOST_W}
        for name, priority, least_w in zip("ab", (2, 0), GUARANTEED_W, strict=True)
    ]
    feeders = [
        {"name": f"f{side.lower()}", "side": side, "budget_w": FEEDER_W, "serves": ["hall-a", "hall-b"]}
        for side in "AB"
    ]
    return {"site": "fleet", "halls": [{"name": "campus", "racks": halls, "feeders": feeders}], **more}
