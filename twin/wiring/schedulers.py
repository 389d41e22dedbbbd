"""Scheduler wiring: sources, sinks and services for Slurm, Kubernetes and burn-in tests of one site."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from connectors.demand import DemandBook
from connectors.jobs import BurnInProgram, BurnInSink
from connectors.orders import SinkContext
from connectors.slurm import (
    CONTROL,
    SlurmPlacement,
    SlurmSettings,
    SlurmSink,
    SlurmSource,
    SlurmStandby,
    expand_names,
    find_node,
)
from twin.catalogue import signal_of
from twin.config import Kubernetes, Loaded, Slurm
from twin.contracts import FAILED_TEST, PASSED, Sink, Source
from twin.engine import Engine
from twin.site import Site
from twin.telemetry import GOOD
from twin.wiring.job_advice import Roster

LEVEL = signal_of("node.service_level_state")
DRAINED = 3  # of its states
HostOf = Callable[[int], str | None]
Work = Callable[[], Awaitable[None]]


@dataclass
class Schedulers:
    """Parts to be started. `works`: services beside the sinks, by name; `counts` and `fault` likewise."""

    sources: list[Source] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    works: dict[str, Work] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    faults: dict[str, Callable[[], str]] = field(default_factory=dict)

    def add(self, sink: Sink, counts: dict[str, int]) -> None:
        """A sink, with what it counts."""
        self.sinks.append(sink)
        self.counts[sink.name] = counts


@dataclass(frozen=True)
class WiringContext:
    """The parts of a daemon that sources and sinks need; its engine is looked up at each use."""

    loaded: Loaded
    site: Site
    engine: Callable[[], Engine]
    sink: SinkContext


def make_schedulers(context: WiringContext) -> Schedulers:
    """All that the configuration asks for. Raises ConfigError; starts nothing."""
    out, loaded, config = Schedulers(), context.loaded, context.loaded.config
    hosts: list[HostOf] = []
    read = (("slurm", config.jobs.slurm), ("kubernetes", config.kubernetes))
    demand = DemandBook(context.site, [name for name, part in read if part is not None])
    if config.jobs.slurm is not None:
        hosts.append(_slurm(out, config.jobs.slurm, context, demand))
    if config.kubernetes is not None:
        hosts.append(_kubernetes(out, config.kubernetes, context, demand))
    if config.burn_in is not None:
        part, nodes = config.burn_in, Nodes(context.engine, hosts)
        program = BurnInProgram(
            command=part.command, at_once=part.at_once, timeout_s=part.timeout_s, test=part.test
        )
        sink = BurnInSink(context.site, program, loaded.state / "burn-in", context.sink, nodes)
        out.add(sink, sink.counts)
        out.works["burn-in-work"] = sink.run
    return out


def host_notes(loaded: Loaded, site: Site) -> list[str]:
    """Notes on hosts of schedulers that are given to nodes which the site does not have."""
    out: list[str] = []
    for where, part in (("jobs.slurm", loaded.config.jobs.slurm), ("kubernetes", loaded.config.kubernetes)):
        pairs = expand_names(part.node_names, f"$.{where}.node_names") if part is not None else {}
        strange = [
            (host, node)
            for host, node in pairs.items()
            if find_node(site, node) is None and not site.is_elsewhere(node)
        ]
        if strange:
            host, node = strange[0]
            out.append(
                f"{where}.node_names: the site has no node {node[:80]!r}, so {host[:60]} and "
                f"{len(strange) - 1} more hosts are left out; expected full paths"
            )
    return out


def _slurm(out: Schedulers, part: Slurm, context: WiringContext, demand: DemandBook) -> HostOf:
    settings = SlurmSettings(
        period_s=part.period_s,
        timeout_s=part.timeout_s,
        conf=None if part.conf is None else str(context.loaded.file(part.conf)),
        node_names=part.node_names,
        kinds=part.kinds,
        placement=part.command,
        demand=demand,
    )
    source = SlurmSource(context.site, settings, Roster(context.engine).nodes)
    out.sources.append(source)
    if part.command:
        sink = SlurmSink(context.site, source, context.sink, requeue=part.requeue)
        placement = SlurmPlacement(context.site, source, context.sink)
        standby = SlurmStandby(context.site, source, context.sink)
        out.add(sink, sink.counts)
        out.add(placement, placement.counts)
        out.add(standby, standby.counts)
        out.works["slurm-standby-work"] = standby.run
    return source.ledger.host_of


def _kubernetes(out: Schedulers, part: Kubernetes, context: WiringContext, demand: DemandBook) -> HostOf:
    # Only here: a site without Kubernetes need not load what speaks to it.
    from connectors.kubernetes import (
        PLACEMENT,
        STANDBY,
        Hosts,
        KubernetesClient,
        KubernetesPlacement,
        KubernetesSink,
        KubernetesSource,
        KubernetesStandby,
        PodLabels,
        PodTemplateName,
        load_access,
    )

    path = None if part.kubeconfig is None else context.loaded.file(part.kubeconfig)
    load = partial(load_access, path, part.context)
    load()  # so that a wrong file is refused now
    hosts = Hosts(context.site, part.node_names)
    labels = PodLabels(
        cluster=part.cluster, job_labels=part.job_labels, gpu_resources=part.gpu_resources, kinds=part.kinds
    )
    known = Roster(context.engine).nodes

    def client() -> KubernetesClient:
        return KubernetesClient(load, timeout_s=part.timeout_s, may_change=context.sink.may_act)

    also = [s for s, read in ((PLACEMENT, part.command), (STANDBY, part.autoscaler)) if read]
    source = KubernetesSource(client(), hosts, labels, known=known, also=also)
    source.demand_book = demand
    out.sources.append(source)
    if part.command:
        sink = KubernetesSink(client(), hosts, context.sink, evict_bare_pods=part.evict_bare_pods)
        out.add(sink, sink.counts)
        out.works["kubernetes-work"] = sink.run
        out.faults[sink.name] = lambda: sink.fault
        placement = KubernetesPlacement(client(), hosts, context.sink, source.node_of)
        out.add(placement, placement.counts)
        out.works["kubernetes-placement-work"] = placement.run
        out.faults[placement.name] = lambda: placement.fault
    if part.autoscaler:
        template = None if part.wake_template is None else PodTemplateName(*part.wake_template.split("/", 1))
        standby = KubernetesStandby(client(), hosts, context.sink, source, template)
        out.add(standby, standby.counts)
        out.works["kubernetes-standby-work"] = standby.run
        out.faults[standby.name] = lambda: standby.fault
    return hosts.host_of


class Nodes:
    """Nodes to be tested, as an engine knows them; `hosts` are their names in schedulers."""

    def __init__(self, engine: Callable[[], Engine], hosts: Sequence[HostOf] = ()) -> None:
        self._engine, self._hosts = engine, hosts

    def host_of(self, node: int) -> str | None:
        """The name of a node in the first scheduler that has it."""
        return next((host for name in self._hosts if (host := name(node))), None)

    def why_not_now(self, node: int) -> str:
        """The reason why a node cannot be tested now; "" if it is out of service and nothing runs on it.

        A scheduler reads `drained` back of a node that is empty: that counts where no job was ever reported.
        """
        jobs, level = self._engine().jobs, self._level(node)
        if np.isnan(level):
            return f"waits: nobody says whether the node is in service ({CONTROL}_state)"
        if level < 1:
            return "waits: the node is in service"
        if not jobs.known and level < DRAINED:
            return "waits: nobody says what runs on the node"
        slot = int(jobs.job_of_node[node])
        if slot >= 0:
            return f"waits: {jobs.names[slot][:80]} runs on the node"
        if any(node in nodes for nodes in jobs.unslotted.values()):
            return "waits: a job runs on the node"
        return ""

    def returned(self, node: int) -> bool:
        """True if a node is back in service, so that a test must end."""
        return bool(self._level(node) == 0)

    def tested(self, node: int) -> tuple[int, bool] | None:
        """Return the begin and the result of the last test that had a result; None without one."""
        service = self._engine().book.service()
        result = int(service.result[node])
        return (int(service.began_ns[node]), result == PASSED) if result in (PASSED, FAILED_TEST) else None

    def _level(self, node: int) -> float:
        """The service level that is read back; NaN where it is not current."""
        state = self._engine().state
        table = state.tables["node"]
        if table.quality_of(LEVEL, state.now_ns)[node] != GOOD:
            return float("nan")
        return float(table.value[LEVEL.row, node])
