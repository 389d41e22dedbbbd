"""Health vocabulary: levels of parts, actions, and causes of lowered clocks.

Levels are ordered by concern, so that the worst of several is their maximum. Data only; imports nothing of
ours.
"""

from __future__ import annotations

HEALTHY, UNKNOWN, WATCH, DEGRADED, FAILED = range(5)
LEVELS = ("healthy", "unknown", "watch", "degraded", "failed")

# Parts that have a health of their own, and the table whose entities they belong to. Pumps, supplies and DPUs
# come in pairs: part 2 * entity + side.
PARTS = {"gpu": "gpu", "node": "node", "switch": "switch", "link": "link", "pump": "cdu", "psu": "node",
         "dpu": "node"}  # fmt: skip
PAIRED = ("pump", "psu", "dpu")

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
    "check_facility": "check power and cooling: a reset does not help",
    "reset_gpu": "reset the GPU once its node is drained",
    "reboot_node": "drain the node, then restart it",
    "run_diagnostics": "drain the node and run diagnostics",
    "drain": "drain the node",
    "contact_support": "drain the node and ask the vendor's support",
    "replace": "drain the node and replace the part",
}

# One of a pair of pumps or supplies is exchanged while the other one carries all
_PAIR_WORDS = {"replace": "replace it; the other one carries all meanwhile"}
_WORDS_OF_PART = {
    "pump": {**_PAIR_WORDS, "check_facility": "have it and its CDU checked"},
    "psu": {**_PAIR_WORDS, "check_facility": "check its feed"},
}

# Cause of a lowered clock of a GPU
NOT_LOWERED, BY_ITSELF, BY_FACILITY, BY_POWER, BY_WHOM_IS_UNKNOWN = range(5)
ATTRIBUTIONS = ("not lowered", "own", "facility", "power", "unknown")


def action(name: str) -> int:
    """The place of an action in ACTIONS. Raises ValueError for none of them."""
    return ACTIONS.index(name)


def todo_words(name: str, part: str) -> str:
    """Text of an action for a kind of part."""
    return _WORDS_OF_PART.get(part, {}).get(name, ACTION_WORDS[name])


def drained_words(node: str) -> str:
    """Text of what people do about a node that is drained already; `node`: its name."""
    return f"it is drained. Repair it, then report the repair: `racktwin device repaired {node}`."


def name_of_part(part: str, index: int, owner: str) -> str:
    """Name of a part of `owner`: one of a pair has a number behind its name."""
    return f"{owner}#{part}{index % 2 + 1}" if part in PAIRED else owner
