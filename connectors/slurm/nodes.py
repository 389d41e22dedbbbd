"""Nodes from `sinfo` of Slurm: state, owner of a drain, service level, standby. Pure functions.

A drain of ours says so in its reason, with the level: `racktwin:LEVEL:WHY`. Any other drain is somebody
else's. A node that is down or does not answer has no level that we know, unless the drain is ours.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from connectors.slurm.hostlist import expand_hosts
from twin.catalogue import TABLES

# The reason comes last, as it may hold anything
_FIELDS = ("NodeList", "StateLong", "PartitionName", "Gres", "GresUsed", "Reason")
FORMAT = ",".join(f"{name}:|" for name in _FIELDS)
MAX_NODES = 1_000_000
MAX_TEXT = 256  # characters of a name or a reason
SIGNAL, OWNER, STANDBY = "service_level_state", "service_owner_state", "standby_state"
LEVELS = TABLES["node"].by_name[SIGNAL].states
NOBODY, OURS, OTHERS = map(float, range(3))  # of service_owner_state
CORDONED, DRAINING, DRAINED, REPLACE = (LEVELS.index(name) for name in LEVELS[1:])
# Long states of sinfo(1) without their flags
_LEVEL_OF = {
    "idle": "in_service", "allocated": "in_service", "mixed": "in_service", "completing": "in_service",
    "planned": "in_service", "reserved": "in_service", "maint": "cordoned", "blocked": "cordoned",
    "draining": "draining", "drained": "drained",
}  # fmt: skip
_FLAGS = "~#!%$@+^-"  # power saving, reboot, maintenance, ...; `*` is another matter: no answer
READY, WAKING, ASLEEP = range(3)  # of standby_state
# Flags of power saving (sinfo(1)): off, powering down, powering up; `!` will power down once no job is on it
_OFF, _STOPPING, _STARTING, _WILL_STOP = "~%#!"
_WORKING = ("allocated", "mixed", "completing", "draining", "planned")
_OURS = re.compile(r"racktwin:([1-4]):")
_GPUS = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?::[^:,=]*?)??(?:[:=]([0-9]{1,9}))?(?=,|$)", re.ASCII)
_NOTE = re.compile(r"\([^()]*\)")  # which sockets, or which devices


class NodeShare(NamedTuple):
    """GPUs of a node as Slurm counts them, those of jobs among them, and the partitions that it is in."""

    gpus: int = 0
    used: int = 0
    partitions: tuple[str, ...] = ()


class SlurmNode(NamedTuple):
    """A node of Slurm. `drain`: it gets no jobs; `busy`: and still holds some; `level` None: unknown.

    `share` says how many GPUs it brings, to which partitions.
    """

    state: str
    drain: bool
    busy: bool
    reason: str
    level: float | None
    share: NodeShare = NodeShare()

    @property
    def base_state(self) -> str:
        """Return its long state without flags."""
        return _name_of(self.state)

    @property
    def works(self) -> bool:
        """Return True if jobs hold it, or will soon."""
        return self.base_state in _WORKING

    @property
    def standby(self) -> float | None:
        """Return the state of `standby_state`; None if the node does not answer, or is down."""
        named = self.base_state
        flags = self.state[len(named) :]
        if named not in _LEVEL_OF:
            return None
        if _STARTING in flags:
            return float(WAKING)
        if _OFF in flags or _STOPPING in flags or (_WILL_STOP in flags and not self.works):
            return float(ASLEEP)
        return None if "*" in flags else float(READY)

    @property
    def stopping(self) -> bool:
        """Return True while it goes to sleep."""
        return self.standby == ASLEEP and _OFF not in self.state

    @property
    def ours(self) -> int | None:
        """Return the level of our own drain of the node; None if it is not drained by us."""
        return _level_of_reason(self.reason) if self.drain else None

    @property
    def owner(self) -> float | None:
        """Return the owner that has it out of service, as `service_owner_state`; None if its level is
        unknown."""
        if self.level is None:
            return None
        return NOBODY if self.level == 0 else OTHERS if self.ours is None else OURS


def parse_nodes(text: str) -> dict[str, SlurmNode]:
    """Nodes by name, of lines for groups of nodes that are alike; of one in several partitions the last line
    counts. What is no line is left out.
    """
    out: dict[str, SlurmNode] = {}
    for line in text.splitlines()[:MAX_NODES]:
        cells = line.strip().removesuffix("|").split("|", len(_FIELDS) - 1)
        if len(cells) != len(_FIELDS):
            continue
        listed, state, partition, gres, used, reason = cells
        try:
            hosts = expand_hosts(listed) if state else []
        except ValueError:
            continue
        node = _node(state.lower(), "" if reason == "none" else reason[:MAX_TEXT])
        gpus, in_use = gpus_in(gres), gpus_in(used)
        for host in hosts:
            if len(host) > MAX_TEXT or (host not in out and len(out) >= MAX_NODES):
                continue
            # Sorted, as sinfo lists the partitions of a node in any order
            known = {*(out[host].share.partitions if host in out else ()), partition} - {""}
            out[host] = node._replace(share=NodeShare(gpus, in_use, tuple(sorted(known))))
    return out


def gpus_in(spec: str) -> int:
    """Return the GPUs in a list of generic resources of Slurm: `gpu:a100:8(S:0-1),nic:2` has 8."""
    if "gpu" not in spec:
        return 0
    return sum(int(count or 1) for count in _GPUS.findall(_NOTE.sub("", spec)))


def _node(state: str, reason: str) -> SlurmNode:
    plain = state.rstrip(_FLAGS)
    named = _name_of(state)
    drain, busy = named in ("draining", "drained"), named == "draining"
    ours = _level_of_reason(reason) if drain else None
    name = _LEVEL_OF.get(plain)
    level = None if name is None else float(LEVELS.index(name))
    if ours is not None:
        # That it shall be empty is not read back before it is.
        level = float(DRAINING if busy and ours > DRAINING else ours)
    return SlurmNode(state, drain, busy, reason, level)


def _name_of(state: str) -> str:
    """Return a long state without its flags."""
    return state.rstrip("*" + _FLAGS)


def _level_of_reason(reason: str) -> int | None:
    match = _OURS.match(reason)
    return None if match is None else int(match[1])
