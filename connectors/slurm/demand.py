"""Demand in Slurm: GPUs that jobs hold and request, by partition and account, and idle nodes' GPUs. Pure.

A job's GPUs are what Slurm accounts to it (TRES), else what it asked for. In a Slurm that counts no GPUs
(GRES), and of an exclusive job, they are all GPUs of its nodes. Seen of Slurm 22.05.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

from connectors.demand import JobClaim, Stock
from connectors.slurm.hostlist import MAX_HOSTS, expand_hosts
from connectors.slurm.jobs import GRANTED, WAITING, Listed
from connectors.slurm.nodes import SlurmNode, gpus_in

# Reasons of a job that waits, but not for free GPUs. Others want resources: "Resources", "Priority", "None",
# "ReqNodeNotAvail", "Nodes_required_for_job_are_DOWN,...". source: squeue(1), JOB REASON CODES
HELD = re.compile(
    r"Dependency.*|JobHeld.*|JobHoldMaxRequeue|BeginTime|Cleaning|JobArrayTaskLimit|Licenses|Deadline"
    r"|Partition(Down|Inactive|NodeLimit|TimeLimit|Config)|Reservation.*|InvalidAccount|InvalidQOS"
    r"|BadConstraints|Prolog|launch_failed_requeued_held|job_requeued_in_held_state|MaxRequeue.*"
    r"|(QOS|Assoc|Max|Grp|AccountNotAllowed|QOSNotAllowed)\w*",
    re.ASCII,
)
_TRES = re.compile(r"(?:^|,)gres/gpu=([0-9]{1,9})(?=,|$)", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\.([0-9]+))?([KM]?)", re.ASCII)
_FACTOR = {"": 1, "K": 1024, "M": 1024**2}
_BUSY = ("allocated", "mixed", "completing", "draining")
_FREE = ("idle", "mixed", "allocated", "planned", "completing")  # whose free GPUs jobs may get


def count_of(text: str) -> int:
    """Return a number that Slurm shortens: "1K", or the lower end of "2-4"; 0 if it is invalid."""
    found = _COUNT.match(text)
    return 0 if found is None else round(float(f"{found[1]}.{found[2] or 0}") * _FACTOR[found[3]])


def tasks_of(text: str) -> int:
    """Return the number of array tasks of a line: `1-5,9%2` is six; 1 for a single job."""
    total = 0
    for part in text.partition("%")[0].strip("[]").split(","):
        first, _, last = part.partition(":")[0].partition("-")
        step = part.partition(":")[2]
        if not (first.isascii() and first.isdigit()):
            return 1
        if last.isascii() and last.isdigit():
            total += max(int(last[:9]) - int(first[:9]), 0) // max(count_of(step), 1) + 1
        else:
            total += 1
    return max(total, 1)


class SlurmGpus:
    """GPUs of the nodes of a Slurm. `gpus_of` gives a host's GPUs by the site: some Slurms count none."""

    def __init__(self, nodes: Mapping[str, SlurmNode], gpus_of: Callable[[str], int]) -> None:
        self.nodes, self._gpus_of = nodes, gpus_of
        self.counted = any(node.share.gpus for node in nodes.values())
        seen: dict[str, Counter[int]] = {}
        for host, node in nodes.items():
            for name in node.share.partitions:
                seen.setdefault(name, Counter())[self.gpus(host)] += 1
        self.usual = {name: counts.most_common(1)[0][0] for name, counts in seen.items()}
        """GPUs that most nodes of a partition have."""

    @property
    def partitions(self) -> Collection[str]:
        """Return the names of the partitions with nodes."""
        return self.usual.keys()

    def gpus(self, host: str) -> int:
        """Return the GPUs of a node."""
        if not self.counted:
            return self._gpus_of(host)
        return self.nodes[host].share.gpus if host in self.nodes else 0

    def used(self, host: str) -> int:
        """Return the GPUs of a node that jobs hold."""
        node = self.nodes[host]
        if self.counted:
            return node.share.used
        return self._gpus_of(host) if node.base_state in _BUSY else 0

    def stock(self, kept: Callable[[str], bool]) -> Stock:
        """Return the GPUs of nodes that no job holds. `kept`: a spare that gets no jobs."""
        idle = spare = out = 0
        for host, node in self.nodes.items():
            free = max(self.gpus(host) - self.used(host), 0)
            if node.base_state not in _FREE:
                out += free
            elif kept(host):
                spare += free
            else:
                idle += free
        return Stock(idle, spare, out)

    def claims(self, listing: Iterable[Listed]) -> list[JobClaim]:
        """Return the claims of all jobs that hold or request nodes."""
        return [self._claim(job) for job in listing if job.state in GRANTED or job.state in WAITING]

    def _claim(self, job: Listed) -> JobClaim:
        state = _state_of(job)
        queues = tuple(dict.fromkeys(q for part in job.partition.split(",") if (q := part.strip())))
        gpus, hosts = gpus_asked(job), tuple[tuple[str, int], ...]()
        if gpus is None or (job.exclusive and not _TRES.search(job.tres)):
            gpus = 0
            if (not self.counted or job.exclusive) and state == "running":
                hosts = tuple((host, self.gpus(host)) for host in _hosts(job.hosts))
            elif not self.counted or job.exclusive:
                each = min((self.usual[q] for q in queues if q in self.usual), default=0)
                gpus = count_of(job.node_count) * each
        jobs = 1 if state == "running" else tasks_of(job.tasks)
        return JobClaim(
            state,
            gpus * jobs,
            queues,
            (job.account, job.user),
            jobs=jobs,
            limit_s=job.time_limit_s,
            since_s=float(job.eligible_s or job.submit_s),
            start_s=float(job.start_s) if state == "pending" else 0.0,
            hosts=hosts,
            priorities=(job.qos,),
            priority=job.priority,
        )


def _state_of(job: Listed) -> Literal["running", "pending", "held"]:
    if job.state in GRANTED:
        return "running"
    return "held" if job.state != "PENDING" or HELD.fullmatch(job.reason.partition(",")[0]) else "pending"


def gpus_asked(job: Listed) -> int | None:
    """Return the GPUs that Slurm accounts to a job or task, otherwise the requested ones; None if it names
    none."""
    found = _TRES.findall(job.tres)
    if found:
        return sum(map(int, found))
    nodes = count_of(job.node_count)
    for spec, times in (
        (job.per_job, 1),
        (job.per_node, nodes),
        (job.per_task, count_of(job.task_count)),
        (job.per_socket, nodes * max(count_of(job.sockets), 1)),
    ):
        if gpus := gpus_in(spec):
            return gpus * times
    return None


def _hosts(text: str) -> list[str]:
    try:
        return expand_hosts(text)[:MAX_HOSTS]
    except ValueError:  # the ledger of jobs reports it
        return []
