"""Marks by which Slurm places nodes: weights and the reservation of spares; parsed and requested. Pure.

"last" is a weight raised by MARK: Slurm gives jobs the nodes of least weight first. "kept" is being a member
of the reservation SPARES, which ends by itself when nobody moves its end on. Nothing else says what is ours:
a weight that others set at MARK or more cannot be distinguished from ours; from twice MARK on it can, and is
left.

Seen of Slurm 22.05: weights set by `scontrol` are lost when slurmctld starts again and at `scontrol
reconfigure` (the nodes then have those of slurm.conf), reservations are kept; `sinfo` cuts weights off after
seven digits, so `scontrol show nodes` is read; SPEC_NODES is no flag that one may give, it comes with
`Nodes=`; `Nodes+=` is no word; an empty `Nodes=` changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, cast

from connectors.slurm.command import NODE_NAME, CommandProgress, compress_hosts, pieces
from connectors.slurm.hostlist import expand_hosts
from connectors.slurm.nodes import MAX_NODES, MAX_TEXT
from twin.catalogue import TABLES, BadMessage, Control, find_control

CONTROL, SIGNAL = "node.placement", "placement_state"
STATES = TABLES["node"].by_name[SIGNAL].states
USUAL, LAST, KEPT = map(STATES.index, ("usual", "last", "kept"))
MARK = 2_000_000_000
MAX_WEIGHT = 0xFFFFFFF0  # scontrol refuses what is more
SPARES = "racktwin_spares"
LEASE_S = cast(Control, find_control(CONTROL)).lease_s
END_S = 2 * LEASE_S  # the reservation ends this long after it was last moved on
# It is moved on when less than this is left: by each renewal, as those come half a lease apart
RENEW_S = 1.6 * LEASE_S
assert 2 * MARK <= MAX_WEIGHT

NODES = ("scontrol", "--all", "show", "nodes", "--oneliner")
RESERVATIONS = ("scontrol", "--all", "show", "reservation", "--oneliner")
NONE = "No reservations in the system"
# The first weight of a line is Slurm's: a reason or a comment, which may hold anything, comes after it.
_NODE = re.compile(r"NodeName=(\S+) (?:.*? )??Weight=(\S+)(?: |$)", re.ASCII)
_NAMED = re.compile(r"NodeName=(\S+)")


class Reservation(NamedTuple):
    """A reservation of Slurm. `shares`: it may overlap with others; times in s since 1970."""

    name: str
    hosts: frozenset[str]
    start_s: int
    end_s: int
    active: bool
    shares: bool


class Marks(NamedTuple):
    """Placement in Slurm: weights of all nodes (None: unknown), our reservation, those of others."""

    weights: Mapping[str, int | None]
    spares: Reservation | None
    others: tuple[Reservation, ...] = ()

    @property
    def reserved(self) -> frozenset[str]:
        """Return the members of our reservation, in force or not."""
        return frozenset() if self.spares is None else self.spares.hosts

    def keeps(self, host: str) -> bool:
        """Return True if a node is in our reservation, and that is in force."""
        return self.spares is not None and self.spares.active and host in self.spares.hosts

    def placement(self, host: str) -> float | None:
        """Return the state of `placement_state`; None: unknown."""
        weight = self.weights.get(host)
        if self.keeps(host):
            return float(KEPT)
        return None if weight is None else float(LAST if weight >= MARK else USUAL)

    def own_mark(self, host: str) -> bool:
        """Return True if a node has our mark in its weight."""
        weight = self.weights.get(host)
        return weight is not None and MARK <= weight < 2 * MARK


class Weigh(NamedTuple):
    """One `scontrol update`: these nodes get this weight."""

    weight: int
    hosts: tuple[str, ...]

    def arguments(self) -> list[str]:
        """Return the words of the command; no shell reads them."""
        return ["update", f"NodeName={compress_hosts(self.hosts)}", f"Weight={self.weight}"]


def parse_weights(text: str) -> dict[str, int | None]:
    """Weights by node, as NODES writes them; None where one is no number. Other text is left out."""
    out: dict[str, int | None] = {}
    for line in text.splitlines()[:MAX_NODES]:
        found = _NODE.match(line)
        named = found or _NAMED.match(line)
        if named is not None and len(named[1]) <= MAX_TEXT:
            digits = "" if found is None else found[2]
            out[named[1]] = int(digits) if re.fullmatch(r"[0-9]{1,10}", digits, re.ASCII) else None
    return out


def parse_reservations(text: str) -> tuple[Reservation | None, tuple[Reservation, ...]]:
    """Return (our reservation, those of others) from the output of RESERVATIONS. Raises BadMessage.

    Of others', nodes and times that cannot be read are none: they only say who may be in our way.
    """
    ours: Reservation | None = None
    others: list[Reservation] = []
    for line in text.splitlines():
        if not line.strip() or line.strip() == NONE:
            continue
        # Of several words with one name the first counts
        words = dict(word.partition("=")[::2] for word in reversed(line.split()))
        if not line.startswith("ReservationName="):
            raise BadMessage(f"expected `ReservationName=...` or {NONE!r}, got {line[:80]!r}")
        try:
            reservation = _reservation(words)
        except ValueError as error:
            if words["ReservationName"] == SPARES:
                raise BadMessage(f"reservation {SPARES}: {str(error)[:200]}") from error
            continue
        if reservation.name == SPARES:
            ours = reservation
        else:
            others.append(reservation)
    return ours, tuple(others)


def parse_marks(nodes: str, reservations: str) -> Marks:
    """Parse the output of NODES and RESERVATIONS. Raises BadMessage."""
    return Marks(parse_weights(nodes), *parse_reservations(reservations))


def placements(marks: Marks, entity_of: Callable[[str], int | None]) -> dict[int, float | None]:
    """Return the placement of each node of the site; None if unknown, or if hosts of one node differ."""
    out: dict[int, float | None] = {}
    for host in marks.weights:
        entity, placement = entity_of(host), marks.placement(host)
        if entity is not None:
            out[entity] = placement if out.get(entity, placement) == placement else None
    return out


def _reservation(words: Mapping[str, str]) -> Reservation:
    nodes, flags = words.get("Nodes", "(null)"), words.get("Flags", "").split(",")
    times = [words.get(key, "") for key in ("StartTime", "EndTime")]
    for text in times:
        if not re.fullmatch(r"[0-9]{1,12}", text, re.ASCII):
            raise ValueError(f"expected an instant in seconds, got {text[:30]!r}")
    hosts = frozenset[str]() if nodes in ("(null)", "") else frozenset(expand_hosts(nodes))
    return Reservation(
        words["ReservationName"],
        hosts,
        int(times[0]),
        int(times[1]),
        words.get("State") == "ACTIVE",
        "MAINT" in flags or "OVERLAP" in flags,
    )


def raised(wanted: Mapping[str, int], marks: Marks) -> list[Weigh]:
    """Return the calls that mark nodes as last, except those with our mark or an equal one of others."""
    weights = {h: w for h, p in wanted.items() if p == LAST and (w := marks.weights.get(h)) is not None}
    return _weighed({host: weight + MARK for host, weight in weights.items() if weight < MARK})


def lowered(wanted: Mapping[str, int], marks: Marks) -> list[Weigh]:
    """Return the calls that remove our mark from nodes that become `usual`, or are `kept`."""
    return _weighed(
        {
            host: (marks.weights[host] or 0) - MARK
            for host, p in wanted.items()
            if marks.own_mark(host) and (p == USUAL or (p == KEPT and marks.keeps(host)))
        }
    )


def _weighed(targets: Mapping[str, int]) -> list[Weigh]:
    groups: dict[int, list[str]] = {}
    for host, weight in targets.items():
        if NODE_NAME.fullmatch(host):
            groups.setdefault(weight, []).append(host)
    return [Weigh(weight, part) for weight in sorted(groups) for part in pieces(groups[weight])]


def members(wanted: Mapping[str, int], marks: Marks) -> frozenset[str]:
    """Return the nodes that the reservation shall hold. Nodes without an order stay in it.

    A node of unknown weight does not leave it to be scheduled last, since no weight could be set.
    """
    known = {h: p for h, p in wanted.items() if NODE_NAME.fullmatch(h) and h in marks.weights}
    leave = {h for h, p in known.items() if p == USUAL or (p == LAST and marks.weights[h] is not None)}
    return (marks.reserved - leave) | {h for h, p in known.items() if p == KEPT}


def reserve(hosts: Collection[str], marks: Marks, user: str, now_s: float, renew: bool) -> list[str]:
    """Return the words of the call that gives our reservation these members; none if nothing changes.

    `renew`: some of them are wanted now, so that its end is moved on.
    """
    name, end = f"ReservationName={SPARES}", f"EndTime=now+{END_S:.0f}"
    nodes = f"Nodes={compress_hosts(sorted(hosts))}"
    if marks.spares is None:
        if not hosts:
            return []
        # IGNORE_JOBS: what runs on them goes on
        words = ["create", "reservation", name, nodes, "StartTime=now", end]
        return [*words, f"Users={user}", "Flags=IGNORE_JOBS"]
    if not hosts:
        return ["delete", name]
    if marks.reserved != frozenset(hosts):
        return ["update", name, nodes, *([end] if renew else [])]
    return ["update", name, end] if renew and marks.spares.end_s - now_s < RENEW_S else []


def in_the_way(hosts: Iterable[str], marks: Marks, now_s: float) -> dict[str, str]:
    """Return those of these nodes that others have reserved before ours would end, with that reservation's
    name."""
    busy: dict[str, str] = {}
    for other in marks.others:
        if not other.shares and other.start_s < now_s + END_S and other.end_s > now_s:
            busy |= dict.fromkeys(other.hosts, other.name)
    return {host: busy[host] for host in hosts if host in busy}


def answer_of(host: str, placement: int, marks: Marks) -> CommandProgress:
    """Return the progress of a placement, by the present state in Slurm."""
    if host not in marks.weights or not NODE_NAME.fullmatch(host):
        return CommandProgress("failed", f"Slurm has no node {host[:60]}")
    weight, found = marks.weights[host], marks.placement(host)
    theirs = f"others gave it the weight {weight}" if weight is not None and weight >= 2 * MARK else ""
    if placement == KEPT and not marks.keeps(host):
        why = "is not in force" if host in marks.reserved else "has it not"
        return CommandProgress("failed", f"reservation {SPARES} {why}")
    if placement == KEPT:
        return CommandProgress(
            "done", theirs or ("its weight still has racktwin's mark" if marks.own_mark(host) else "")
        )
    if found is None:
        return CommandProgress("failed", "Slurm reports no weight for it")
    if placement == USUAL and found == LAST and theirs:
        return CommandProgress("failed", f"{theirs}, so it is scheduled last; racktwin does not change it")
    if found != placement:
        return CommandProgress("failed", f"Slurm has it {STATES[int(found)]}")
    return CommandProgress("done", theirs)
