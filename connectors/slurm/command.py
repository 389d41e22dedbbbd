"""Slurm commands that set the service level of nodes, and the acknowledgements to them. Pure.

A node that is as wanted, or that somebody else drained, is left as it is; only a drain of ours is ever ended.
Slurm takes a list of nodes per call, so those with the same level and reason go together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from connectors.slurm.nodes import DRAINED, LEVELS, REPLACE, SlurmNode

MAX_REASON = 160  # characters of a reason that people read in `sinfo -R`
MAX_HOSTS, MAX_LINE = 4000, 60_000  # per call; Linux takes 131,072 bytes in one argument
OUR = "racktwin"
_PARTS = re.compile(r"(.*?)([0-9]*)", re.ASCII | re.DOTALL)
NODE_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,255}", re.ASCII)
_JOB = re.compile(r"[0-9]+(_[0-9]+)?", re.ASCII)
_UNFIT = re.compile(r"[^ !#$%&()*+,./0-9:;<=>?@A-Za-z\[\]^_{}~-]+")
RIGHTS = (
    "Slurm lets this user change neither nodes nor reservations; run racktwin as SlurmUser, or set the "
    "user's AdminLevel: sacctmgr modify user racktwin set adminlevel=Administrator"
)
# Words of a call that got no answer: it is no refusal, and may have been carried out
AWAY = (
    "cannot be run", "ends with -", "no answer within", "Unable to contact", "Socket timed out",
    "Zero Bytes were", "standby mode", "authentication error",
)  # fmt: skip
NOT_OURS = ("Invalid user id", "Access/permission denied", "Security violation")


class Wanted(NamedTuple):
    """The wanted level of a node, by its number, and the reason."""

    level: int
    why: str


class NodeUpdate(NamedTuple):
    """One `scontrol update`: these nodes get this state, with this reason ("" for none)."""

    state: Literal["DRAIN", "UNDRAIN"]
    reason: str
    hosts: tuple[str, ...]

    def arguments(self) -> list[str]:
        """Return the words of the command; no shell reads them."""
        words = ["update", f"NodeName={compress_hosts(self.hosts)}", f"State={self.state}"]
        return [*words, f"Reason={self.reason}"] if self.reason else words


class CommandProgress(NamedTuple):
    """Progress of a command, in the terms of `CommandAcked`."""

    state: Literal["in_progress", "done", "failed"]
    detail: str = ""


def reason_of(level: int, why: str) -> str:
    """Return the reason in Slurm, which identifies our drains: one line, no quotes, limited."""
    text = " ".join(_UNFIT.sub(" ", why).split()) or "no reason given"
    return f"{OUR}:{level}:{text}"[:MAX_REASON].rstrip()


def plan(wanted: Mapping[str, Wanted], nodes: Mapping[str, SlurmNode]) -> list[NodeUpdate]:
    """Return the calls that bring these nodes to the wanted levels; ends of drains come last."""
    groups: dict[tuple[Literal["DRAIN", "UNDRAIN"], str], list[str]] = {}
    for host, (level, why) in wanted.items():
        node = nodes.get(host)
        if node is None or not NODE_NAME.fullmatch(host):
            continue
        if level == 0:
            if node.ours is not None:
                groups.setdefault(("UNDRAIN", ""), []).append(host)
        elif node.ours != level and (node.ours is not None or not node.drain):
            groups.setdefault(("DRAIN", reason_of(level, why)), []).append(host)
    order = sorted(groups, key=lambda key: (key[0], key[1]))
    return [NodeUpdate(*key, part) for key in order for part in pieces(groups[key])]


def answer_of(host: str, level: int, node: SlurmNode | None) -> CommandProgress:
    """Return the progress of a node towards a level, by its present state in Slurm."""
    if node is None or not NODE_NAME.fullmatch(host):
        return CommandProgress("failed", f"Slurm has no node {host[:60]}")
    theirs = node.drain and node.ours is None
    others = f"others drained it: {node.reason[:80] or 'no reason given'}"
    if level == 0:
        if theirs:
            return CommandProgress("failed", f"{others}; racktwin does not resume it")
        if node.drain:
            return CommandProgress("failed", f"Slurm still has it {node.state}")
        return CommandProgress(
            "done", "" if node.level == 0 else f"not drained any more; Slurm has it {node.state}"
        )
    if not node.drain:
        return CommandProgress("failed", f"Slurm has it {node.state}")
    if not theirs and node.ours != level:
        return CommandProgress("failed", f"Slurm has it {LEVELS[node.ours or 0]}")
    if level >= DRAINED and node.busy:
        return CommandProgress("in_progress", f"jobs still run on it{'; ' + others if theirs else ''}")
    return CommandProgress("done", others if theirs else "")


def to_empty(wanted: Mapping[str, Wanted], nodes: Mapping[str, SlurmNode]) -> list[str]:
    """Return the nodes that must not run anything any more but do, without those that others drained."""
    hosts = (h for h, w in wanted.items() if w.level in (DRAINED, REPLACE))
    return [h for h in hosts if h in nodes and nodes[h].busy and nodes[h].ours is not None]


def refused_jobs(text: str) -> dict[str, str]:
    """Return the reason for each job that was not requeued, from the output of `scontrol requeue`."""
    out: dict[str, str] = {}
    for line in text.splitlines():
        why, _, job = line.strip().rpartition(" for job ")
        if not why:  # of tasks of arrays it speaks the other way round
            job, _, why = line.strip().partition(": ")
        if why and _JOB.fullmatch(job):
            out[job] = why[:100]
    return out


def jobs_of(text: str) -> list[str]:
    """Return jobs from lines of `squeue --format="%A %F %K"`, each by its unambiguous name.

    One task of an array has the number of the array as a whole: asked for by it, all tasks would be requeued.
    """
    out: dict[str, None] = {}
    for line in text.splitlines():
        number, array, task = [*line.split(), "", "", ""][:3]
        name = f"{array}_{task}" if task.isdigit() else number
        if _JOB.fullmatch(name):
            out[name] = None
    return list(out)


def explain(words: str) -> str:
    """Return Slurm's own words, with the remedy if it denies access."""
    return f"{words}: {RIGHTS}" if any(text in words for text in NOT_OURS) else words


def pieces(hosts: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Return these nodes in as many parts as calls are needed."""
    part: list[str] = []
    length = 0
    for host in sorted(hosts, key=_split):
        if part and (len(part) >= MAX_HOSTS or length + len(host) >= MAX_LINE):
            yield tuple(part)
            part, length = [], 0
        part.append(host)
        length += len(host) + 1
    yield tuple(part)


def _split(host: str) -> tuple[str, int, int]:
    """Return (text before the last number, its digits, the number; -1 without one)."""
    match = _PARTS.fullmatch(host)
    assert match is not None  # it matches any text
    digits = match[2][-9:]  # as many as host lists are read with
    return host[: len(host) - len(digits)], len(digits), int(digits or -1)


def compress_hosts(hosts: Iterable[str]) -> str:
    """Return a host list such as `gpu[001-004,007]` for these names."""
    groups: dict[tuple[str, int], list[int]] = {}
    for host in hosts:
        prefix, width, number = _split(host)
        groups.setdefault((prefix, width), []).append(number)
    out: list[str] = []
    for (prefix, width), numbers in groups.items():
        if width == 0:
            out.append(prefix)
            continue
        runs: list[list[int]] = []
        for number in sorted(set(numbers)):
            if runs and runs[-1][1] == number - 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        ranges = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs]
        single = len(ranges) == 1 and "-" not in ranges[0]
        out.append(prefix + (ranges[0] if single else f"[{','.join(ranges)}]"))
    return ",".join(out)
