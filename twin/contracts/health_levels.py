"""Words of health: how well a part is, what to do about it, and whose doing a lowered clock is.

Levels are ordered by concern, so that the worst of several is their maximum. Data only; imports nothing of
ours.
"""

from __future__ import annotations

HEALTHY, UNKNOWN, WATCH, DEGRADED, FAILED = range(5)
LEVELS = ("healthy", "unknown", "watch", "degraded", "failed")

# Parts that have a health of their own, and the table whose entities they belong to. Pumps and supplies come
# in pairs: part 2 * entity + side.
PARTS = {"gpu": "gpu", "node": "node", "switch": "switch", "link": "link", "pump": "cdu", "psu": "node"}
PAIRED = ("pump", "psu")

# From nothing to the most that can be done; the strongest of several is their maximum.
ACTIONS = (
    "none",
    "watch",
    "restart_app",
    "check_facility",
    "reset_gpu",
    "reboot_node",
    "run_diagnostics",
    "drain",
    "contact_support",
    "replace",
)
ACTION_WORDS = {
    "none": "nothing to do",
    "watch": "watch it",
    "restart_app": "restart the application",
    "check_facility": "check power and cooling: a reset cures nothing here",
    "reset_gpu": "reset the GPU once its node is drained",
    "reboot_node": "drain the node, then restart it",
    "run_diagnostics": "drain the node and run diagnostics",
    "drain": "drain the node",
    "contact_support": "drain the node and ask the vendor's support",
    "replace": "drain the node and replace the part",
}

# One of a pair is exchanged while the other one carries all
PAIR_WORDS = {"replace": "replace it; the other one carries all meanwhile"}

# Whose doing it is that a GPU's clock is lowered
NOT_LOWERED, BY_ITSELF, BY_FACILITY, BY_POWER, BY_WHOM_IS_UNKNOWN = range(5)
ATTRIBUTIONS = ("not lowered", "own", "facility", "power", "unknown")


def action(name: str) -> int:
    """The place of an action in ACTIONS. Raises ValueError for none of them."""
    return ACTIONS.index(name)


def todo_words(name: str, part: str) -> str:
    """Text of an action for a kind of part."""
    return PAIR_WORDS.get(name, ACTION_WORDS[name]) if part in PAIRED else ACTION_WORDS[name]


def name_of_part(part: str, index: int, owner: str) -> str:
    """Name of a part of `owner`: pumps and supplies have a number behind its name."""
    return f"{owner}#{part}{index % 2 + 1}" if part in PAIRED else owner
