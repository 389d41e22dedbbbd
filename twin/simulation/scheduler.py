"""Scheduler of a simulated site: which job runs on which nodes, and what Slurm's programs would say of it.

It gives a job the nodes that it had before, then free ones, spares last, and none that is drained or
broken. `answer` speaks as `sinfo`, `squeue` and `scontrol` do, as far as racktwin asks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from connectors.slurm import expand_hosts
from twin.catalogue import I32, NS, Bool
from twin.plant import HeldJob, Kind, PlacedWorkload, Plant
from twin.site import Site
from twin.telemetry import Event, JobEnded, JobStarted

CLUSTER = "demo"
PARTITIONS: dict[Kind, str] = {"training": "train", "inference": "serve", "batch": "batch"}
OURS = "racktwin:"
NO_CAUSE = "none"


class JobRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job of the roster: how many nodes from `begin_s` to `end_s` (None: for ever), and its saves.

    `racks` are preferred for its nodes. A job that does not save has `checkpoint_interval_s` 0.
    """

    number: int
    kind: Kind
    nodes: int
    priority: int = 0
    user: str = "ann"
    begin_s: float = 0.0
    end_s: float | None = None
    period_s: float = 20.0
    checkpoint_interval_s: float = 0.0
    checkpoint_save_s: float = 0.0
    restart_s: float = 10.0
    racks: list[str] = []

    @property
    def name(self) -> str:
        """Its name in the twin, as the Slurm source has it."""
        return f"slurm:{CLUSTER}:{self.number}"


@dataclass(slots=True)
class Run:
    """A job that waits or runs. `nodes` is empty while it waits; `before` are those that it had."""

    request: JobRequest
    due_s: float
    nodes: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    before: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    started_ns: int = 0
    starts: int = 0


class Scheduler:
    """The jobs of a roster on the nodes of a plant. `drains`: the reason, by node."""

    def __init__(self, plant: Plant, roster: Sequence[JobRequest], seed: int = 0) -> None:
        self.plant, self.site = plant, plant.site
        self.work = PlacedWorkload(plant.site, seed)
        plant.workload = self.work
        self.runs = [Run(r, r.begin_s) for r in sorted(roster, key=lambda r: (-r.priority, r.number))]
        self.drains: dict[int, str] = {}
        self.commanded = False  # by its own programs; else levels are read off the plant
        self.over: list[tuple[Run, str]] = []  # ended runs that a listing still names
        self.hosts = host_names(self.site)
        self.weights = [1] * len(self.hosts)
        self._of_host = {host: node for node, host in enumerate(self.hosts)}

    def node_of(self, host: str) -> int:
        """The node that a host is. Raises KeyError."""
        return self._of_host[host]

    def reschedule(self, roster: Sequence[JobRequest]) -> None:
        """Take a new roster for the jobs that have not begun yet."""
        begun = [run for run in self.runs if run.starts]
        known = {run.request.number for run in begun}
        runs = [*begun, *(Run(r, r.begin_s) for r in roster if r.number not in known)]
        self.runs = sorted(runs, key=lambda run: (-run.request.priority, run.request.number))

    def step(self, dt_s: float) -> list[Event]:
        """Place, end and requeue jobs before a step of the plant; what happened, as its events."""
        if not self.commanded:
            levels = self.plant.truth.node_service_level
            self.drains = {int(i): f"{OURS}{levels[i]}:by the twin" for i in np.flatnonzero(levels >= 1)}
        time_s, events = self.plant.truth.time_s, list[Event]()
        alive = {job.name for job in self.work.jobs}
        emptied = {i for i, why in self.drains.items() if why.startswith((f"{OURS}3", f"{OURS}4"))}
        for run in self.runs:
            request = run.request
            if not len(run.nodes):
                continue
            if request.end_s is not None and time_s + dt_s > request.end_s:
                events += self._end(run, "completed", None)
            elif request.name not in alive:
                events += self._end(run, "node_fail", time_s + request.restart_s)
            elif not self.commanded and emptied & set(run.nodes.tolist()):
                events += self.requeue(run)
        for run in self.runs:
            if not len(run.nodes) and run.due_s < time_s + dt_s and not self._is_past(run, time_s):
                events += self._place(run, time_s)
        return events

    def requeue(self, run: Run) -> list[Event]:
        """Take a job off its nodes; it starts again where there is room."""
        return self._end(run, "requeued", self.plant.truth.time_s + run.request.restart_s)

    def _is_past(self, run: Run, time_s: float) -> bool:
        return run.request.end_s is not None and time_s >= run.request.end_s

    def _end(self, run: Run, why: str, due_s: float | None) -> list[Event]:
        name = run.request.name
        self.over.append((Run(run.request, 0.0, run.nodes, run.before, run.started_ns), why))
        del self.over[:-50]
        self.work.remove(name, lost=why != "completed")
        run.before, run.nodes = run.nodes, np.zeros(0, np.int32)
        run.due_s = np.inf if due_s is None else due_s
        return [JobEnded(job=name, reason=why)] if why != "node_fail" else []

    def _place(self, run: Run, time_s: float) -> list[Event]:
        request, fit = run.request, self._fit()
        for other in self.runs:
            fit[other.nodes] = False
        order = self._preference(run)
        chosen = [i for i in order.tolist() if fit[i]][: request.nodes]
        if len(chosen) < request.nodes:
            return []
        run.nodes = np.sort(np.array(chosen, np.int32))
        run.started_ns, run.starts = self.plant.now_ns, run.starts + 1
        saves = request.checkpoint_interval_s
        interval_s = saves or np.inf
        nothing = np.zeros(0, np.int32)
        training = request.kind == "training"
        job = HeldJob(
            request.name, request.kind, training, request.priority, request.user, run.nodes, nothing,
            interval_s, request.checkpoint_save_s, request.checkpoint_save_s, request.restart_s,
            time_s, time_s, own_interval_s=interval_s,
        )  # fmt: skip
        self.work.place(job, request.kind, request.period_s, restarted=run.starts > 1)
        return [self._started(run)]

    def running(self) -> list[JobStarted]:
        """The jobs that run, as the events of their starts."""
        return [self._started(run) for run in self.runs if len(run.nodes)]

    def _started(self, run: Run) -> JobStarted:
        request = run.request
        return JobStarted(
            job=request.name, nodes=tuple(self.site.name("node", int(i)) for i in run.nodes),
            kind=request.kind, coupling="synchronous" if request.kind == "training" else "independent",
            priority=request.priority, tenant=request.user,
            checkpoint_interval_s=request.checkpoint_interval_s,
            checkpoint_save_s=request.checkpoint_save_s, checkpoint_restart_s=request.restart_s,
        )  # fmt: skip

    def _fit(self) -> Bool:
        """Nodes that are on, whole and not drained [n_node]."""
        t = self.plant.truth
        dead = np.concatenate(([0], np.cumsum(~t.gpu_alive)))
        fit: Bool = t.node_on & ~t.node_unfit & (np.diff(dead[self.site.gpu_start_of_node]) == 0)
        fit[list(self.drains)] = False
        return fit

    def _preference(self, run: Run) -> I32:
        """All nodes, the best for this job first: those that it had, those of its racks, spares last."""
        site, n = self.site, self.site.sizes["node"]
        mine = np.zeros(n, np.bool_)
        mine[run.before] = True
        racks = [site.entity("rack", name) for name in run.request.racks]
        near = np.isin(site.rack_of_node, [r for r in racks if r is not None])
        order: I32 = np.lexsort((np.arange(n), np.array(self.weights), ~near, site.spare_node, ~mine)).astype(
            np.int32
        )
        return order

    # As Slurm's programs.

    def answer(self, words: Sequence[str]) -> tuple[int, str]:
        """(exit code, output) of a program with its arguments."""
        options = dict(word.partition("=")[::2] for word in words[1:])
        if words[0] == "sinfo":
            return 0, "".join(f"{line}\n" for line in self._nodes())
        if words[0] == "squeue":
            if "--nodelist" in options:
                nodes = {self._of_host.get(host) for host in expand_hosts(options["--nodelist"])}
                found = [run for run in self.runs if nodes & set(run.nodes.tolist())]
                return 0, "".join(f"{r.request.number} {r.request.number} N/A\n" for r in found)
            return 0, "".join(f"{line}\n" for line in self._jobs())
        if list(words[1:3]) == ["show", "config"]:
            return 0, f"ClusterName = {CLUSTER}\nBOOT_TIME = 1\n"
        if "show" in words:
            return 0, self._shown("nodes" in words)
        if words[1] == "requeue":
            for run in self.runs:
                if str(run.request.number) in words[2].split(",") and len(run.nodes):
                    self.requeue(run)
            return 0, ""
        if words[1] == "update" and "State" in options:
            for host in expand_hosts(options["NodeName"]):
                self._set(self._of_host[host], options["State"], options.get("Reason", NO_CAUSE))
            return 0, ""
        if words[1] == "update" and "Weight" in options:
            for host in expand_hosts(options["NodeName"]):
                self.weights[self._of_host[host]] = int(options["Weight"])
            return 0, ""
        return 1, f"scontrol: error: {' '.join(words[1:])}: not of this stand-in"

    def _set(self, node: int, state: str, reason: str) -> None:
        if state == "DRAIN":
            self.drains[node] = reason
        else:
            self.drains.pop(node, None)
        level = reason[len(OURS)] if state == "DRAIN" and reason.startswith(OURS) else "0"
        self.plant.truth.node_service_level[node] = int(level) if level.isdigit() else 3

    def _nodes(self) -> list[str]:
        busy = {int(i) for run in self.runs for i in run.nodes}
        out, fit, starts = list[str](), self.plant.truth, self.site.gpu_start_of_node
        for node, host in enumerate(self.hosts):
            if (reason := self.drains.get(node)) is not None:
                state = "draining" if node in busy else "drained"
            elif not fit.node_on[node] or fit.node_unfit[node]:
                state, reason = "down", "Not responding"
            else:
                state, reason = "allocated" if node in busy else "idle", NO_CAUSE
            gpus = int(starts[node + 1] - starts[node])
            gres = f"gpu:{gpus}|gpu:{gpus if node in busy else 0}"
            out += [f"{host}|{state}|{name}|{gres}|{reason}|" for name in PARTITIONS.values()]
        return out

    def _jobs(self) -> list[str]:
        states = {"completed": "COMPLETED", "node_fail": "NODE_FAIL"}
        over = [(run, states.get(why, "CANCELLED")) for run, why in self.over]
        rows = [*over, *((run, "RUNNING") for run in self.runs if len(run.nodes))]
        now_s = self.plant.truth.time_s
        due = (run for run in self.runs if not len(run.nodes) and run.due_s <= now_s)
        rows += ((run, "PENDING") for run in due if not self._is_past(run, now_s))
        return [self._row(run, state) for run, state in rows]

    def _row(self, run: Run, state: str) -> str:
        request, start_s = run.request, run.started_ns // NS
        hosts = ",".join(self.hosts[int(i)] for i in run.nodes)
        cells = (state, request.number, start_s, "UNLIMITED", request.priority, request.user, request.user)
        gres = "gres:gpu:" + str(int(np.diff(self.site.gpu_start_of_node).max(initial=0)))
        unsaid, reason = "N/A", "Resources" if state == "PENDING" else NO_CAUSE
        asked = (
            request.nodes,
            request.nodes,
            "*",
            unsaid,
            unsaid,
            gres,
            *[unsaid] * 5,
            "OK",
            "normal",
            reason,
            "",
        )
        return "|".join(map(str, (*cells, PARTITIONS[request.kind], hosts, *asked)))

    def _shown(self, nodes: bool) -> str:
        if not nodes:
            return "No reservations in the system\n"
        return "".join(f"NodeName={h} Weight={w}\n" for h, w in zip(self.hosts, self.weights, strict=True))


def host_names(site: Site) -> list[str]:
    """Names of the nodes in the scheduler: `r1n07`."""
    first = site.node_start_of_rack
    return [
        f"{site.name('rack', int(rack)).rpartition('/')[2]}n{node - int(first[rack]):02d}"
        for node, rack in enumerate(site.rack_of_node.tolist())
    ]
