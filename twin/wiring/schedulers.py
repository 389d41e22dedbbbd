"""Scheduler wiring: sources, sinks and services for Slurm, Kubernetes and burn-in tests of one site."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from connectors.jobs import BurnInSink
from connectors.slurm import CONTROL, SlurmPlacement, SlurmSink, SlurmSource
from twin.catalogue import find_signal
from twin.config import Kubernetes, Loaded, Slurm
from twin.contracts import FAILED_TEST, PASSED, Item, Sink, Source
from twin.engine import Engine
from twin.site import Site
from twin.telemetry import GOOD
from twin.wiring.job_advice import Roster

LEVEL = find_signal("node.service_level_state")
DRAINED = 3  # of its states
Stage = Callable[[Sequence[Item], int], None]
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


def make_schedulers(
    loaded: Loaded,
    site: Site,
    engine: Callable[[], Engine],
    stage: Stage,
    may_act: Callable[[], bool],
) -> Schedulers:
    """All that the configuration asks for. Raises ConfigError; starts nothing."""
    out, config = Schedulers(), loaded.config
    names: list[Callable[[int], str | None]] = []
    if config.jobs.slurm is not None:
        names.append(_slurm(out, loaded, config.jobs.slurm, site, engine, stage, may_act))
    if config.kubernetes is not None:
        names.append(_kubernetes(out, loaded, config.kubernetes, site, engine, stage, may_act))
    if config.burn_in is not None:
        part = config.burn_in
        state = Nodes(engine)
        sink = BurnInSink(
            site, part.command, loaded.state / "burn-in", stage, may_act, ready=state.why_not_now,
            returned=state.returned, tested=state.tested,
            host_of=lambda node: next((host for name in names if (host := name(node))), None),
            at_once=part.at_once, timeout_s=part.timeout_s, test=part.test,
        )  # fmt: skip
        out.add(sink, sink.counts)
        out.works["burn-in-work"] = sink.run
    return out


def _slurm(
    out: Schedulers, loaded: Loaded, part: Slurm, site: Site, engine: Callable[[], Engine], stage: Stage,
    may_act: Callable[[], bool],
) -> Callable[[int], str | None]:  # fmt: skip
    source = SlurmSource(
        site,
        period_s=part.period_s,
        timeout_s=part.timeout_s,
        conf=None if part.conf is None else str(loaded.file(part.conf)),
        node_names=part.node_names,
        kinds=part.kinds,
        known=Roster(engine).nodes,
        placement=part.command,
    )
    out.sources.append(source)
    if part.command:
        sink = SlurmSink(site, source, stage, may_act, requeue=part.requeue)
        placement = SlurmPlacement(site, source, stage, may_act)
        out.add(sink, sink.counts)
        out.add(placement, placement.counts)
    return source.ledger.host_of


def _kubernetes(
    out: Schedulers, loaded: Loaded, part: Kubernetes, site: Site, engine: Callable[[], Engine], stage: Stage,
    may_act: Callable[[], bool],
) -> Callable[[int], str | None]:  # fmt: skip
    # Only here: a site without Kubernetes need not load what speaks to it.
    from connectors.kubernetes import (
        Hosts,
        KubernetesClient,
        KubernetesPlacement,
        KubernetesSink,
        KubernetesSource,
        load_access,
    )

    path = None if part.kubeconfig is None else loaded.file(part.kubeconfig)
    load = partial(load_access, path, part.context)
    load()  # so that a wrong file is refused now
    hosts = Hosts(site, part.node_names)
    source = KubernetesSource(
        KubernetesClient(load, timeout_s=part.timeout_s), hosts, cluster=part.cluster,
        job_labels=part.job_labels, gpu_resources=part.gpu_resources, kinds=part.kinds,
        known=Roster(engine).nodes, placement=part.command,
    )  # fmt: skip
    out.sources.append(source)
    if part.command:
        sink = KubernetesSink(
            KubernetesClient(load, timeout_s=part.timeout_s), hosts, stage=stage, may_act=may_act,
            evict_bare_pods=part.evict_bare_pods,
        )  # fmt: skip
        out.add(sink, sink.counts)
        out.works["kubernetes-work"] = sink.run
        out.faults[sink.name] = lambda: sink.fault
        client = KubernetesClient(load, timeout_s=part.timeout_s)
        placement = KubernetesPlacement(client, hosts, stage=stage, may_act=may_act, seen=source.seen)
        out.add(placement, placement.counts)
        out.works["kubernetes-placement-work"] = placement.run
        out.faults[placement.name] = lambda: placement.fault
    return hosts.host_of


class Nodes:
    """Nodes to be tested, as an engine knows them, looked up anew each time."""

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine

    def why_not_now(self, node: int) -> str:
        """Why a node cannot be tested now, in words; "" if it can: out of service, and nothing runs on it.

        A scheduler reads `drained` back of a node that is empty: that counts where no job was ever heard of.
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
        """When the last test that had a result began, and whether it passed; None without one."""
        service = self._engine().book.service()
        result = int(service.result[node])
        return (int(service.began_ns[node]), result == PASSED) if result in (PASSED, FAILED_TEST) else None

    def _level(self, node: int) -> float:
        """The service level that is read back; NaN where it is not current."""
        state = self._engine().state
        assert LEVEL is not None  # it is of the catalogue
        table = state.tables["node"]
        if table.quality_of(LEVEL, state.now_ns)[node] != GOOD:
            return float("nan")
        return float(table.value[LEVEL.row, node])
