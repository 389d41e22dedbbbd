"""Jobs, levels and placement read from Slurm by `squeue`, `sinfo`, `scontrol show`: `--json` needs a plugin.

Runs the programs; what they write is read elsewhere. A scheduler that does not answer ends no job. Sees what
Slurm shows its user: with PrivateData=jobs that must be an operator.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from connectors.demand import DemandBook
from connectors.jobs import skip_start_times
from connectors.program import run_program
from connectors.slurm.demand import SlurmGpus
from connectors.slurm.jobs import FORMAT, JobLedger, Listed, parse_listing
from connectors.slurm.marks import NODES, RESERVATIONS, SIGNAL as PLACEMENT, Marks, parse_marks, placements
from connectors.slurm.nodes import FORMAT as NODE_FORMAT, OWNER, SIGNAL, STANDBY, SlurmNode, parse_nodes
from twin.catalogue import BadMessage, ConnectorError
from twin.contracts import Inlet, Item
from twin.site import Site
from twin.telemetry import JobKind, Reading

FRESH_PERIODS = 2.0  # a listing this old still says whether renewals need anything
# Placement is read back each so many periods, or in its signal's period: of 10,800 nodes that is 10 MB
MARKS_PERIODS, MARKS_S = 12.0, 60.0
# A listing is asked for no sooner than after so many times what the last took
RESTS = 4.0
REMEDY = "check that `sinfo` and `squeue` work for the user of the daemon on this host"
# Advice on errors of Slurm, by the first words that fit (src/common/slurm_errno.c)
HINTS = (
    ("nable to contact", "check that slurmctld runs, and that `jobs.slurm.conf` is its slurm.conf"),
    ("uthentication", "check that munged runs on this host, with the key of the cluster"),
    ("onfig", "check the slurm.conf of this host, or set its path in `jobs.slurm.conf`"),
)
MAX_OUTPUT = 64 * 2**20  # bytes


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Settings of a source. `conf` is SLURM_CONF; `node_names` maps host lists to entities.

    `period_s`: between two listings; those that take Slurm long come less often, of jobs and of nodes each by
    themselves. `kinds` gives the kind of job by partition; a job of no named partition is "unknown".
    `placement`: also read which nodes Slurm gives last, or to nobody: two more calls each `marks_every_s`.
    `demand`: where what jobs hold and wait for is added up.
    """

    period_s: float = 5.0
    timeout_s: float = 10.0
    conf: str | None = None
    node_names: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, JobKind] | None = None
    placement: bool = False
    demand: DemandBook | None = None


class SlurmSource:
    """Lists the jobs each period. `known` gives the nodes of jobs that run in the twin."""

    name = "slurm"

    def __init__(
        self,
        site: Site,
        settings: SlurmSettings,
        known: Callable[[], Mapping[str, Collection[str]]] = dict,
    ) -> None:
        period_s = settings.period_s
        self._site, self._settings = site, settings
        self._listing: list[Listed] | None = None  # the last, if it was whole
        self.ledger = JobLedger(site, settings.node_names, settings.kinds)
        self.period_s, self._known = period_s, known
        self._asked_s = self._rests_until_s = -math.inf  # monotonic; a call that fails is followed by a rest
        # A run that lasts longer has had an answer: it may rest, and then hang
        self.settle_s = (RESTS + 1.0) * settings.timeout_s + 3.0
        self.nodes_every_s = self._jobs_every_s = period_s  # as long as Slurm answers quickly
        self._nodes: dict[str, SlurmNode] | None = None  # the last listing, if the last could be read
        self._nodes_s = -math.inf  # when it was asked for (monotonic)
        # Called with each listing of nodes and its instant (monotonic); the events it returns are staged.
        self.watch: Callable[[Mapping[str, SlurmNode], float], Sequence[Item]] | None = None
        self.power_saving = False  # whether Slurm may power nodes down
        self._placement = settings.placement
        self.marks_every_s = max(min(MARKS_PERIODS * period_s, MARKS_S), period_s)
        self.marks = Marks({}, None)  # as last read, for the read-back or for a sink
        self._marks_ns, self.marks_s = 0, -1e9  # when that was asked: since 1970, and monotonic
        self._staged_s = -1e9  # the same of the marks that were staged last
        # Settings of the user's environment (SQUEUE_FORMAT, ...) would change the listing.
        self._env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        self._env["SLURM_BITSTR_LEN"] = "0"  # lists of an array's tasks are not cut
        if settings.conf is not None:
            self._env["SLURM_CONF"] = settings.conf

    async def run(self, inlet: Inlet) -> None:
        """List each period. Raises ConnectorError when the scheduler does not answer; no job ends by that."""
        await asyncio.sleep(max(self._rests_until_s - time.monotonic(), 0.0))
        self._asked_s = time.monotonic()
        try:
            await self._follow(inlet)
        except ConnectorError as error:
            now_s = time.monotonic()
            self._rests_until_s = now_s + RESTS * (now_s - self._asked_s)
            inlet.fail(str(error), REMEDY)
            raise

    async def _follow(self, inlet: Inlet) -> None:
        self.ledger.cluster, self.power_saving = await self._cluster()
        known = self._known()
        due_s = time.monotonic()
        while True:
            self._asked_s = time.monotonic()
            if await self._list(inlet, known):
                known = {}
            self._jobs_every_s = max(self.period_s, RESTS * (time.monotonic() - self._asked_s))
            # Half a period less: listings are never quite a period apart
            if time.monotonic() - self._nodes_s > self.nodes_every_s - self.period_s / 2:
                await self._levels(inlet)
            self._stage_demand(inlet)
            for host in self.ledger.strangers:
                why = f"{host[:60]!r} of Slurm is not a node of the site"
                inlet.skip("host", why, host[:60], "name its node in `jobs.slurm.node_names`")
            self.ledger.strangers.clear()
            due_s = max(due_s + self._jobs_every_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())

    async def _list(self, inlet: Inlet, known: Mapping[str, Collection[str]]) -> bool:
        """Take one listing. Return True if it could be read whole."""
        text = await self.ask("squeue", "--noheader", "--all", "--states=all", f"--Format={FORMAT}")
        try:
            listing, bad = await asyncio.to_thread(parse_listing, text)
        except BadMessage as error:
            raise ConnectorError(f"squeue: {str(error)[:300]}") from error
        self._listing = None if bad else listing
        events = self.ledger.changes(listing, known, whole=not bad)
        for why in (*bad, *self.ledger.faults):
            inlet.reject(self.name, why, REMEDY)
        self.ledger.faults.clear()
        if events:
            skip_start_times(events, inlet, now_ns := time.time_ns())
            inlet.stage(events, now_ns)
        return not bad

    async def _levels(self, inlet: Inlet) -> None:
        """Stage the service level of each node, with its owner; a failure here does not stop the list of
        jobs."""
        self._nodes, self._nodes_s = None, time.monotonic()
        try:
            nodes = await self.nodes()
        except ConnectorError as error:
            inlet.fail(str(error), REMEDY)
            return
        finally:
            self.nodes_every_s = max(self.period_s, RESTS * (time.monotonic() - self._nodes_s))
        self._nodes, now_ns = nodes, time.time_ns()
        items: list[Item] = [
            Reading("node", entity, signal, value, now_ns)
            for host, node in nodes.items()
            if (entity := self.ledger.entity_of(host)) is not None
            for signal, value in ((SIGNAL, node.level), (OWNER, node.owner), (STANDBY, node.standby))
            if signal != STANDBY or self.power_saving
        ]
        if self.watch is not None:
            items += self.watch(nodes, self._nodes_s)
        if items:
            inlet.stage(items, now_ns, self.nodes_every_s)
        if self._placement:
            await self._placements(inlet)

    def _stage_demand(self, inlet: Inlet) -> None:
        """Stage demand from the last listings; nothing if one was incomplete."""
        book, listing, nodes, now_ns = self._settings.demand, self._listing, self._nodes, time.time_ns()
        if book is None or listing is None or nodes is None:
            return
        inventory = SlurmGpus(nodes, self._gpus_of)
        stock = inventory.stock(self.marks.keeps)
        fresh_s = FRESH_PERIODS * self._jobs_every_s + self._settings.timeout_s
        found = book.take(self.name, inventory.claims(listing), stock, inventory.partitions, now_ns, fresh_s)
        book.report(inlet)
        inlet.stage(found, now_ns, self._jobs_every_s)

    def _gpus_of(self, host: str) -> int:
        """Return the GPUs of a host by the site."""
        entity = self.ledger.entity_of(host)
        return 0 if entity is None else int(np.diff(self._site.gpu_start_of_node[entity : entity + 2])[0])

    async def _placements(self, inlet: Inlet) -> None:
        """Stage the placement of each node, once per reading; a sink's own reading counts as one."""
        try:
            # Half a period less: listings are never quite a period apart
            if time.monotonic() - self.marks_s > self.marks_every_s - self.period_s / 2:
                await self.read_marks()
        except ConnectorError as error:
            inlet.fail(str(error), REMEDY)
        if self._staged_s == self.marks_s:
            return
        self._staged_s, at_ns = self.marks_s, self._marks_ns
        places = placements(self.marks, self.ledger.entity_of).items()
        items = [Reading("node", e, PLACEMENT, value, at_ns) for e, value in places]
        inlet.stage(items, time.time_ns(), self.marks_every_s)

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

    async def nodes(self) -> dict[str, SlurmNode]:
        """Return all nodes as they are now. Raises ConnectorError."""
        # With --Node, a line each, sinfo takes time with the square of the nodes
        return parse_nodes(await self.ask("sinfo", "--noheader", "--all", f"--Format={NODE_FORMAT}"))

    async def _cluster(self) -> tuple[str, bool]:
        """Return (the cluster's name, True if it may power nodes down)."""
        text = await self.ask("scontrol", "show", "config")
        pairs = (line.partition("=") for line in text.splitlines())
        words = {key.strip(): value.strip() for key, _, value in pairs}
        if not words.get("ClusterName"):
            raise ConnectorError("scontrol show config: has no ClusterName")
        programs = [words.get(key, "(null)") for key in ("SuspendProgram", "ResumeProgram")]
        saves = "(null)" not in programs and words.get("SuspendTime", "INFINITE") not in ("INFINITE", "NONE")
        return words["ClusterName"][:100], saves

    async def ask(self, *command: str) -> str:
        """Return the output of a Slurm command. Raises ConnectorError if it fails or takes too long."""
        name = command[0]
        try:
            answer = await run_program(command, self._env, self._settings.timeout_s, MAX_OUTPUT)
        except TimeoutError:
            raise ConnectorError(f"{name}: no answer within {self._settings.timeout_s:g} s") from None
        except OSError as error:
            why = error.strerror or error
            text = f"{name}: cannot be run: {why}; expected Slurm's client commands on this host"
            raise ConnectorError(text) from error
        if answer.is_cut:
            raise ConnectorError(f"{name}: more than {MAX_OUTPUT} bytes of answer")
        if answer.code != 0:
            why = answer.errors.strip().replace("\n", "; ")[:300]
            hint = next((f"; {hint}" for words, hint in HINTS if words in why), "")
            raise ConnectorError(f"{name}: ends with {answer.code}: {why or 'no reason given'}{hint}")
        return answer.out
