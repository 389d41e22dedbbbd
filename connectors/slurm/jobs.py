"""Jobs of Slurm as `squeue` lists them, and the changes between two listings.

What changed becomes JobStarted and JobEnded, with ids that a restart repeats. Pure: runs no program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass

from connectors.jobs import StartIds
from connectors.slurm.hostlist import expand_hosts, expand_names, find_node
from twin.catalogue import NS, BadMessage
from twin.telemetry import JobEnded, JobKind, JobStarted, NamedSite

HOLDING = ("RUNNING", "SUSPENDED", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
FINISHED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
            "OUT_OF_MEMORY")  # fmt: skip
GRANTED = (*HOLDING, "CONFIGURING")  # GPUs are taken, be it that their nodes boot
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_FIELDS = ("State", "JobID", "StartTime", "TimeLimit", "PriorityLong", "Account", "UserName", "Partition",
           "NodeList", "NumNodes", "NumTasks", "Sockets", "tres-alloc", "tres-per-job", "tres-per-node",
           "tres-per-task", "tres-per-socket", "ArrayTaskID", "SubmitTime", "EligibleTime", "OverSubscribe",
           "QOS", "Reason")  # fmt: skip
# A width of nothing neither fills nor cuts; only `--Format` has GPUs per job and per task
FORMAT = ",".join(f"{name}:|" for name in _FIELDS)
MAX_JOBS = 1_000_000


@dataclass(frozen=True, slots=True)
class Listed:
    """A job in a listing. `start_s` separates a requeued job from its earlier run."""

    job: str
    state: str
    start_s: int
    time_limit_s: float
    priority: int
    account: str
    user: str
    partition: str
    hosts: str
    node_count: str = ""
    task_count: str = ""
    sockets: str = ""  # of each node
    tres: str = ""  # accounted to it
    per_job: str = ""
    per_node: str = ""
    per_task: str = ""
    per_socket: str = ""
    tasks: str = ""  # of an array, those that wait
    _: KW_ONLY
    submit_s: int = 0
    eligible_s: int = 0
    exclusive: bool = False
    qos: str = ""
    reason: str = ""


def parse_listing(text: str) -> tuple[list[Listed], list[str]]:
    """Return (the jobs, reasons for unreadable lines). Raises BadMessage if no line can be read."""
    jobs: list[Listed] = []
    bad: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        if len(jobs) >= MAX_JOBS:
            raise BadMessage(f"more than {MAX_JOBS} jobs in a listing")
        try:
            if (job := _listed([c.strip() for c in line.split("|")])) is not None:
                jobs.append(job)
        except ValueError as error:
            bad.append(f"squeue: {line[:80]!r}: {str(error)[:80]}; expected {'|'.join(_FIELDS)}")
    if bad and not jobs:
        raise BadMessage(bad[0])
    return jobs, bad


def _listed(cells: list[str]) -> Listed | None:
    """Return the job of a line; None for a job in another state. Raises ValueError."""
    n = len(_FIELDS)
    if len(cells) != n + 1 or cells[n]:
        raise ValueError(f"{len(cells) - 1} cells")
    state, job, start, limit, priority = cells[:5]
    if state not in GRANTED and state not in FINISHED and state not in WAITING:
        return None
    if not (job.isascii() and job.isdigit() and len(job) <= 20):
        raise ValueError("no job number")
    texts = ["" if t in ("(null)", "n/a", "N/A") else t for t in cells[5:18]]
    submit, eligible, shared, qos, reason = cells[18:n]
    return Listed(
        job,
        state,
        _start_s(start),
        _limit_s(limit),
        _priority(priority),
        *texts,
        submit_s=_start_s(submit),
        eligible_s=_start_s(eligible),
        exclusive=shared == "NO",
        qos="" if qos in ("(null)", "n/a", "N/A") else qos,
        reason=reason,
    )


def _start_s(text: str) -> int:
    """Return the instant of a start (SLURM_TIME_FORMAT=%s), or 0 for none."""
    if text in ("N/A", "Unknown", "NONE", ""):
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ValueError(f"start {text[:30]!r}")
    return int(text)


def _limit_s(text: str) -> float:
    """Return the seconds of `[days-]hours:minutes:seconds`, or fewer of them; 0 for no limit."""
    if not text or not text[0].isdigit():
        return 0.0
    days, _, rest = text.rpartition("-")
    parts = [int(p) for p in rest.split(":") if p.isascii() and p.isdigit() and len(p) <= 9]
    if (
        len(parts) != rest.count(":") + 1
        or len(parts) > 3
        or (days and not (days.isdigit() and len(days) <= 6))
    ):
        raise ValueError(f"time limit {text[:30]!r}")
    if days or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return float(int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds)


def _priority(text: str) -> int:
    """Return a priority in racktwin's 31 bits; larger ones are equal (Slurm counts to 2^32)."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ValueError(f"priority {text[:30]!r}")
    return min(int(text), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class _Run:
    """A job that holds nodes: `reported` if some of them are of the site, so that the twin knows of it."""

    id: str
    start_s: int
    hosts: str
    reported: bool


class JobLedger:
    """Table of the jobs that hold nodes, updated by each listing."""

    def __init__(
        self, site: NamedSite, node_names: Mapping[str, str], kinds: Mapping[str, JobKind] | None = None
    ) -> None:
        self._site, self._kinds = site, kinds or {}
        self._names = expand_names(dict(node_names), "$.jobs.slurm.node_names")
        self._running: dict[str, _Run] = {}
        self._ids = StartIds()
        self._nodes: dict[str, str] = {}  # host -> full path
        self.cluster = "cluster"
        self.strangers: dict[str, None] = {}  # hosts that the site does not have; the caller clears it
        self.faults: list[str] = []  # host lists that cannot be read; likewise

    def name_of(self, job: str) -> str:
        """Return a job's name in the twin."""
        return f"slurm:{self.cluster}:{job}"

    def changes(
        self, listing: list[Listed], known: Mapping[str, Collection[str]] | None = None, whole: bool = True
    ) -> list[JobStarted | JobEnded]:
        """Starts and ends of jobs since the last listing. `known` are the nodes of each job that the twin
        takes to be running.

        Of a listing that is not `whole`, a job that is missing has not ended.
        """
        known = known or {}
        ended: list[JobStarted | JobEnded] = []
        started: list[JobStarted | JobEnded] = []
        holding = {j.job: j for j in listing if j.state in HOLDING and j.hosts}
        finished = {j.job: j.state for j in listing if j.state in FINISHED}
        for job in [j for j in self._running if j not in holding and (whole or j in finished)]:
            run = self._running.pop(job)
            reason = finished.get(job, "left the queue").lower()
            if run.reported:
                ended.append(JobEnded(id=f"{run.id}:end", job=self.name_of(job), reason=reason))
        for listed in holding.values():
            event = self._start_of(listed, known.get(self.name_of(listed.job)))
            if event is not None:
                started.append(event)
        mine = {self.name_of(job) for job in self._running} | {event.job for event in ended}
        for name in known if whole else ():
            if name.startswith(self.name_of("")) and name not in mine:
                ended.append(JobEnded(job=name, reason="ended while nobody watched"))
        return ended + started

    def _start_of(self, job: Listed, known: Collection[str] | None) -> JobStarted | None:
        first = f"slurm:{self.cluster}:{job.job}:{job.start_s}"
        was = self._running.get(job.job)
        if was is not None and job.state == "COMPLETING":
            return None  # it leaves its nodes one by one; a requeued one shows its next start already
        if was is not None and was.start_s == job.start_s:
            if was.hosts == job.hosts:
                return None
            first += ":" + hashlib.blake2b(job.hosts.encode(), digest_size=6).hexdigest()  # it was resized
        try:
            hosts = expand_hosts(job.hosts)
        except ValueError as error:
            self.faults.append(f"job {job.job}: {str(error)[:200]}")
            return None
        nodes = [node for host in hosts if (node := self._node(host)) is not None]
        moved = was is None and known is not None and set(known) != set(nodes)
        first = self._ids.use_anew(first) if moved else self._ids.use(first)
        reported = bool(nodes) or (was is not None and was.reported)
        self._running[job.job] = _Run(first, job.start_s, job.hosts, reported)
        if not reported:
            return None
        return JobStarted(
            id=first,
            job=self.name_of(job.job),
            nodes=tuple(nodes),
            kind=self._kinds.get(job.partition, "unknown"),
            priority=job.priority,
            tenant=job.user,
            account=job.account,
            queue=job.partition,
            time_limit_s=job.time_limit_s,
            started_ns=job.start_s * NS,
        )

    def entity_of(self, host: str) -> int | None:
        """Return the node of a host, by the site's number."""
        name = self._node(host)
        return None if name is None else self._site.entity("node", name)

    def host_of(self, entity: int) -> str | None:
        """Return the first known host of a node; None before one was seen."""
        name = self._site.name("node", entity)
        return next((host for host, node in self._nodes.items() if node == name), None)

    def _node(self, host: str) -> str | None:
        """Return the full path of a host: by the configuration, by its own name, or of a rack with one
        node."""
        known = self._nodes.get(host)
        if known is not None:
            return known
        node = find_node(self._site, self._names.get(host, host))
        if node is None:
            if len(self.strangers) < 1000:
                self.strangers[host] = None
            return None
        name = self._nodes[host] = self._site.name("node", node)
        return name
