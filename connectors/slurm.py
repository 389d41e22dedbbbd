"""Jobs, levels and placement read from Slurm by `squeue`, `sinfo`, `scontrol show`: `--json` needs a plugin.

What changed between two listings becomes JobStarted and JobEnded, with ids that a restart repeats.
A scheduler that does not answer ends no job. `parse_listing` and `Ledger` are pure; `SlurmSource` runs the
program. Sees what Slurm shows its user: with PrivateData=jobs that must be an operator. May import `twin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from connectors.hostlist import expand_hosts, expand_names, find_node
from connectors.slurm_marks import NODES, RESERVATIONS, Marks, parse_marks, placements
from connectors.slurm_marks import SIGNAL as PLACEMENT
from connectors.slurm_nodes import FORMAT as NODE_FORMAT
from connectors.slurm_nodes import OWNER, SIGNAL, Node, parse_nodes
from twin.contracts import Inlet, Item
from twin.errors import BadMessage, ConnectorError
from twin.events import JobEnded, JobKind, JobStarted
from twin.reading import Reading

FRESH_PERIODS = 2.0  # a listing this old still says whether renewals need anything
# Placement is read back each so many periods, or in its signal's period: of 10,800 nodes that is 10 MB
MARKS_PERIODS, MARKS_S = 4.0, 60.0
HOLDING = ("RUNNING", "SUSPENDED", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
FINISHED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
            "OUT_OF_MEMORY")  # fmt: skip
# state, job, start, limit, priority, account, user, partition, nodes
FORMAT = "%T|%A|%S|%l|%Q|%a|%u|%P|%N"
MAX_OUTPUT, MAX_REASON = 64 * 2**20, 2**16  # bytes
MAX_JOBS = 1_000_000


class Places(Protocol):
    """What is asked of a site: indices and full paths of nodes, and which racks have one node only."""

    def entity(self, table: str, name: str) -> int | None:
        """Index of the entity with this full path or unique local name, or None."""
        ...

    def name(self, table: str, entity: int) -> str:
        """Full path of an entity."""
        ...


@dataclass(frozen=True, slots=True)
class Listed:
    """A job as a listing has it. `start_s` tells a requeued job from its earlier run."""

    job: str
    state: str
    start_s: int
    time_limit_s: float
    priority: int
    account: str
    user: str
    partition: str
    hosts: str


def parse_listing(text: str) -> tuple[list[Listed], list[str]]:
    """(the jobs, why single lines could not be read). Raises BadMessage if no line can be."""
    jobs: list[Listed] = []
    bad: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        if len(jobs) >= MAX_JOBS:
            raise BadMessage(f"more than {MAX_JOBS} jobs in a listing")
        cells = [c.strip() for c in line.split("|")]
        try:
            if len(cells) != FORMAT.count("|") + 1:
                raise ValueError(f"{len(cells)} cells")
            state, job, start, limit, priority, account, user, partition, hosts = cells
            if state in HOLDING or state in FINISHED:
                if not (job.isascii() and job.isdigit() and len(job) <= 20):
                    raise ValueError("no job number")
                texts = ["" if t in ("(null)", "n/a") else t for t in (account, user, partition, hosts)]
                jobs.append(Listed(job, state, _start_s(start), _limit_s(limit), _priority(priority), *texts))
        except ValueError as error:
            bad.append(f"squeue: {line[:80]!r}: {str(error)[:80]}; expected {FORMAT}")
    if bad and not jobs:
        raise BadMessage(bad[0])
    return jobs, bad


def _start_s(text: str) -> int:
    """The instant of a start (SLURM_TIME_FORMAT=%s), or 0 for none."""
    if text in ("N/A", "Unknown", "NONE", ""):
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise ValueError(f"start {text[:30]!r}")
    return int(text)


def _limit_s(text: str) -> float:
    """`[days-]hours:minutes:seconds`, or fewer of them; 0 for what is no limit."""
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
    """A priority, in the 31 bits that ours has; of those beyond, all are equal (Slurm counts to 2^32)."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ValueError(f"priority {text[:30]!r}")
    return min(int(text), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class _Run:
    """A job that holds nodes: `told` if some of them are of the site, so that the twin knows of it."""

    id: str
    start_s: int
    hosts: str
    told: bool


class Ledger:
    """Which jobs hold nodes, from one listing to the next."""

    def __init__(
        self, site: Places, node_names: Mapping[str, str], kinds: Mapping[str, JobKind] | None = None
    ) -> None:
        self._site, self._kinds = site, kinds or {}
        self._names = expand_names(dict(node_names), "$.jobs.slurm.node_names")
        self._running: dict[str, _Run] = {}
        self._nodes: dict[str, str] = {}  # host -> full path
        self.cluster = "cluster"
        self.strangers: dict[str, None] = {}  # hosts that the site does not have; the caller clears it
        self.faults: list[str] = []  # host lists that cannot be read; likewise

    def name_of(self, job: str) -> str:
        """A job's name in the twin."""
        return f"slurm:{self.cluster}:{job}"

    def changes(
        self, listing: list[Listed], known: Collection[str] = (), whole: bool = True
    ) -> list[JobStarted | JobEnded]:
        """What happened since the last listing. `known` are jobs that the twin takes to be running.

        Of a listing that is not `whole`, a job that is missing has not ended.
        """
        ended: list[JobStarted | JobEnded] = []
        started: list[JobStarted | JobEnded] = []
        holding = {j.job: j for j in listing if j.state in HOLDING and j.hosts}
        finished = {j.job: j.state for j in listing if j.state in FINISHED}
        for job in [j for j in self._running if j not in holding and (whole or j in finished)]:
            run = self._running.pop(job)
            reason = finished.get(job, "left the queue").lower()
            if run.told:
                ended.append(JobEnded(id=f"{run.id}:end", job=self.name_of(job), reason=reason))
        for listed in holding.values():
            event = self._start_of(listed)
            if event is not None:
                started.append(event)
        mine = {self.name_of(job) for job in self._running} | {event.job for event in ended}
        for name in known if whole else ():
            if name.startswith(self.name_of("")) and name not in mine:
                ended.append(JobEnded(job=name, reason="ended while nobody watched"))
        return ended + started

    def _start_of(self, job: Listed) -> JobStarted | None:
        first = f"slurm:{self.cluster}:{job.job}:{job.start_s}"
        was = self._running.get(job.job)
        if was is not None and was.start_s == job.start_s:
            # A job that completes gives its nodes back one by one: it ends when it has left all.
            if was.hosts == job.hosts or job.state == "COMPLETING":
                return None
            first += ":" + hashlib.blake2b(job.hosts.encode(), digest_size=6).hexdigest()  # it was resized
        try:
            hosts = expand_hosts(job.hosts)
        except ValueError as error:
            self.faults.append(f"job {job.job}: {str(error)[:200]}")
            return None
        nodes = [node for host in hosts if (node := self._node(host)) is not None]
        told = bool(nodes) or (was is not None and was.told)
        self._running[job.job] = _Run(first, job.start_s, job.hosts, told)
        if not told:
            return None
        return JobStarted(
            id=first,
            job=self.name_of(job.job),
            nodes=tuple(nodes),
            kind=self._kinds.get(job.partition, "unknown"),
            priority=job.priority,
            tenant=job.user,
            account=job.account,
            time_limit_s=job.time_limit_s,
        )

    def entity_of(self, host: str) -> int | None:
        """The node that a host is, by the site's number."""
        name = self._node(host)
        return None if name is None else self._site.entity("node", name)

    def host_of(self, entity: int) -> str | None:
        """The first host by that a node is known here; None before one was seen."""
        name = self._site.name("node", entity)
        return next((host for host, node in self._nodes.items() if node == name), None)

    def _node(self, host: str) -> str | None:
        """Full path of a host: as named in the configuration, else by its own name, or of a rack of one."""
        known = self._nodes.get(host)
        if known is not None:
            return known
        found = find_node(self._site, self._names.get(host, host))
        if found is None:
            if len(self.strangers) < 1000:
                self.strangers[host] = None
            return None
        name = self._nodes[host] = self._site.name("node", found)
        return name


class SlurmSource:
    """Lists the jobs each period. `known` gives those that the twin has as running when it begins.

    `kinds` tells by partition what jobs are; a job of no named partition is "unknown". `conf` is SLURM_CONF.
    `placement`: also read which nodes Slurm gives last, or to nobody: two more calls each `marks_every_s`.
    """

    def __init__(
        self, site: Places, *, period_s: float = 15.0, timeout_s: float = 10.0, conf: str | None = None,
        node_names: Mapping[str, str] | None = None, kinds: Mapping[str, JobKind] | None = None,
        known: Callable[[], Collection[str]] = tuple, name: str = "slurm", placement: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.ledger = Ledger(site, node_names or {}, kinds)
        self.period_s, self._timeout_s, self._known = period_s, timeout_s, known
        # Told of each listing of nodes, with when (monotonic) it was asked for; what it gives is staged.
        self.watch: Callable[[Mapping[str, Node], float], Sequence[Item]] | None = None
        self._placement = placement
        self.marks_every_s = max(min(MARKS_PERIODS * period_s, MARKS_S), period_s)
        self.marks = Marks({}, None)  # as last read, for the read-back or for a sink
        self._marks_ns, self.marks_s = 0, -1e9  # when that was asked: since 1970, and monotonic
        self._told_s = -1e9  # the same of what was told last
        # Settings of the user's environment (SQUEUE_FORMAT, ...) would change the listing.
        self._env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        if conf is not None:
            self._env["SLURM_CONF"] = conf

    async def run(self, inlet: Inlet) -> None:
        """List each period. Raises ConnectorError when the scheduler does not answer; no job ends by that."""
        self.ledger.cluster = await self._cluster()
        known = self._known()
        due_s = time.monotonic()
        while True:
            if await self._list(inlet, known):
                known = ()
            await self._levels(inlet)
            due_s = max(due_s + self.period_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())

    async def _list(self, inlet: Inlet, known: Collection[str]) -> bool:
        """Take one listing; whether it could be read whole."""
        states = ",".join((*HOLDING, *FINISHED))
        text = await self.ask("squeue", "--noheader", "--all", f"--states={states}", f"--format={FORMAT}")
        try:
            listing, bad = await asyncio.to_thread(parse_listing, text)
        except BadMessage as error:
            raise ConnectorError(f"squeue: {str(error)[:300]}") from error
        events = self.ledger.changes(listing, known, whole=not bad)
        for why in (*bad, *self.ledger.faults):
            inlet.spoil(self.name, why)
        self.ledger.faults.clear()
        for host in self.ledger.strangers:
            inlet.ignore("host of Slurm", f"{host[:60]} is no node of the site; name it in node_names")
        self.ledger.strangers.clear()
        if events:
            inlet.stage(events, time.time_ns())
        return not bad

    async def _levels(self, inlet: Inlet) -> None:
        """Stage the service level of each node, and whose it is; jobs are listed also where this fails."""
        asked_s = time.monotonic()
        try:
            nodes = await self.nodes()
        except ConnectorError as error:
            inlet.spoil(self.name, str(error))
            return
        now_ns = time.time_ns()
        items: list[Item] = [Reading("node", entity, signal, value, now_ns)
                             for host, node in nodes.items()
                             if (entity := self.ledger.entity_of(host)) is not None
                             for signal, value in ((SIGNAL, node.level), (OWNER, node.owner))]  # fmt: skip
        if self.watch is not None:
            items += self.watch(nodes, asked_s)
        if items:
            inlet.stage(items, now_ns)
        if self._placement:
            await self._placements(inlet)

    async def _placements(self, inlet: Inlet) -> None:
        """Stage how each node is placed, once per reading of it; a sink's own counts as one."""
        try:
            # Half a period less: listings are never quite a period apart
            if time.monotonic() - self.marks_s > self.marks_every_s - self.period_s / 2:
                await self.read_marks()
        except ConnectorError as error:
            inlet.spoil(self.name, str(error))
        if self._told_s == self.marks_s:
            return
        self._told_s, at_ns = self.marks_s, self._marks_ns
        found = placements(self.marks, self.ledger.entity_of).items()
        inlet.stage([Reading("node", e, PLACEMENT, value, at_ns) for e, value in found], time.time_ns())

    async def read_marks(self) -> None:
        """Read how nodes are placed, into `marks`; one asked for later stays. Raises ConnectorError."""
        asked_s, asked_ns = time.monotonic(), time.time_ns()
        nodes, reservations = await self.ask(*NODES), await self.ask(*RESERVATIONS)
        try:
            marks = await asyncio.to_thread(parse_marks, nodes, reservations)
        except BadMessage as error:
            raise ConnectorError(f"scontrol show: {str(error)[:300]}") from error
        if asked_s >= self.marks_s:
            self.marks, self.marks_s, self._marks_ns = marks, asked_s, asked_ns

    async def nodes(self) -> dict[str, Node]:
        """All nodes as they are now. Raises ConnectorError."""
        return parse_nodes(
            await self.ask("sinfo", "--noheader", "--all", "--Node", f"--format={NODE_FORMAT}")
        )

    async def _cluster(self) -> str:
        text = await self.ask("scontrol", "show", "config")
        for line in text.splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "ClusterName" and value.strip():
                return value.strip()[:100]
        raise ConnectorError("scontrol show config: has no ClusterName")

    async def ask(self, *command: str) -> str:
        """What a command of Slurm writes. Raises ConnectorError if it fails or takes too long."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=self._env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ConnectorError(f"{command[0]}: cannot be run: {error.strerror or error}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                pipes = (process.stdout, MAX_OUTPUT), (process.stderr, MAX_REASON)
                out, err = await asyncio.gather(*(_upto(process, *pipe) for pipe in pipes))
                code = await process.wait()
        except TimeoutError:
            raise ConnectorError(f"{command[0]}: no answer within {self._timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                _kill(process)
                with contextlib.suppress(TimeoutError):  # its pipes are read to their end, or stay open
                    await asyncio.wait_for(process.communicate(), 2)
        if len(out) > MAX_OUTPUT:
            raise ConnectorError(f"{command[0]}: more than {MAX_OUTPUT} bytes of answer")
        if code != 0:
            why = err.decode("utf-8", "replace").strip().replace("\n", "; ")[:300]
            raise ConnectorError(f"{command[0]}: ends with {code}: {why or 'no reason given'}")
        return out.decode("utf-8", "replace")


def _kill(process: asyncio.subprocess.Process) -> None:
    """End a command and what it started: it leads a group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _upto(
    process: asyncio.subprocess.Process, stream: asyncio.StreamReader | None, limit: int
) -> bytes:
    """All that a command writes to a pipe; it is ended beyond `limit`."""
    got = bytearray()
    while stream is not None and (part := await stream.read(2**16)):
        if len(got) <= limit:
            got += part
            if len(got) > limit:
                _kill(process)
    return bytes(got)
