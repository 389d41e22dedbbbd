"""Service levels of nodes as Slurm has them, from `sinfo`: read back, never set. Pure functions of text.

A node that is down or does not answer has no level that we know. May import `twin`.
"""

from __future__ import annotations

from twin.signals import TABLES

FORMAT = "%N|%T"
MAX_NODES = 1_000_000
SIGNAL = "service_level_state"
_LEVELS = TABLES["node"].by_name[SIGNAL].states
# Long states of sinfo(1) without their flags
_LEVEL_OF = {
    "idle": "in_service", "allocated": "in_service", "mixed": "in_service", "completing": "in_service",
    "planned": "in_service", "reserved": "in_service", "maint": "cordoned", "blocked": "cordoned",
    "draining": "draining", "drained": "drained",
}  # fmt: skip
_FLAGS = "~#!%$@+^-"  # power saving, reboot, maintenance, ...; `*` is another matter: no answer


def parse_levels(text: str) -> dict[str, float | None]:
    """Level per host, None for what is not known; of a host in several partitions the last line counts."""
    out: dict[str, float | None] = {}
    for line in text.splitlines()[:MAX_NODES]:
        host, _, state = line.strip().partition("|")
        if host and state and len(host) <= 256:
            level = _LEVEL_OF.get(state.lower().rstrip(_FLAGS))
            out[host] = None if level is None else float(_LEVELS.index(level))
    return out
