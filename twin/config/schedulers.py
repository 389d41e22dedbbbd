"""Scheduler sections of the configuration: Slurm, Kubernetes and burn-in tests of nodes."""

from __future__ import annotations

import re

import msgspec

from twin.config.section import Problems, Strict
from twin.site import short
from twin.telemetry import JobKind

OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)  # of Kubernetes


class Slurm(Strict, msgspec.Struct, frozen=True):
    """Jobs and service levels, read from Slurm by its own commands (`squeue`, `sinfo`, text form).

    `node_names` maps Slurm's names (host lists too) to entities where they differ; `kinds` maps by partition
    what jobs are: one of no named partition is unknown, and protected. With `command`, service levels and
    placement are carried out by `scontrol`; with `requeue`, jobs are requeued where nothing shall run any
    more.
    """

    period_s: float = 5.0  # between two looks; longer where Slurm answers slowly
    timeout_s: float = 10.0  # of one command of Slurm
    conf: str | None = None  # SLURM_CONF
    # who is who, where names differ: {"gpu[001-018]": "lab/hall1/r1/node[0-17]"}
    node_names: dict[str, str] = {}
    # what runs in a partition: {train: training}; others are unknown, and protected
    kinds: dict[str, JobKind] = {}
    command: bool = False  # whether nodes are drained, returned and placed by scontrol: an admin's rights
    requeue: bool = False  # whether jobs are requeued where nothing shall run any more


class Kubernetes(Strict, msgspec.Struct, frozen=True):
    """Jobs and service levels of a Kubernetes cluster. Without `kubeconfig`: the pod's own service account.

    `node_names` maps its nodes (host lists too) to entities where they differ; `kinds` maps by namespace
    what jobs are (or the pod label racktwin.io/kind); `job_labels` are looked at before the usual ones.
    With `command`, service levels and placement are carried out: cordon, taints, eviction; with `autoscaler`,
    standby too, by the annotation that keeps a node from the cluster autoscaler; with `wake_template`, nodes
    that it took away are asked back by ProvisioningRequests before pods wait for them.
    """

    kubeconfig: str | None = None  # a file; without it, the service account of our pod
    context: str | None = None  # of the kubeconfig; default: its current one
    cluster: str = "cluster"  # in names of jobs: k8s:CLUSTER:NAMESPACE:JOB
    timeout_s: float = 10.0  # of a request
    node_names: dict[str, str] = {}  # who is who, where names differ: {"w[01-18]": "lab/hall1/r1/node[0-17]"}
    job_labels: list[str] = []  # looked at before the usual ones: [example.com/job]
    gpu_resources: list[str] = []  # beside the usual ones
    kinds: dict[str, JobKind] = {}  # by namespace: {research: training}; others are unknown, and protected
    command: bool = False  # whether nodes are cordoned, emptied and placed; with Slurm's off
    autoscaler: bool = False  # whether the cluster autoscaler runs there, and is informed which nodes to keep
    wake_template: str | None = None  # NAMESPACE/NAME of a PodTemplate whose pods each fill a node
    evict_bare_pods: bool = False  # pods that no controller makes anew are lost when evicted


class BurnIn(Strict, msgspec.Struct, frozen=True):
    """The site's own test of a node that is out of service: `command` is a list of words, no shell.

    {node} in it is the node's full path and {host} its name in the scheduler. Exit 0 is a passed test, 1 to
    125 a failed one; anything else says nothing of the node. It runs only where nothing else does.
    """

    command: list[str]  # words, no shell: [/etc/racktwin/dcgm-diag.sh, "{host}"]
    at_once: int = 4  # tests at the same time
    timeout_s: float = 3600.0  # of one test
    test: str = "burn-in"  # its name in events


def scheduler_problems(
    slurm: Slurm | None, kubernetes: Kubernetes | None, burn_in: BurnIn | None
) -> list[str]:
    """Errors of these sections beyond their types."""
    out = Problems()
    if slurm is not None:
        out.within("jobs.slurm.period_s", slurm.period_s, 1, 3600)
        if slurm.requeue and not slurm.command:
            out.append(
                "$.jobs.slurm.requeue: expected `command: true` with it: else nothing is asked of Slurm"
            )
    if kubernetes is not None:
        out.within("kubernetes.timeout_s", kubernetes.timeout_s, 1, 60)
        if kubernetes.autoscaler and not kubernetes.command:
            out.append("$.kubernetes.autoscaler: expected `command: true` with it: else no node is kept")
        if kubernetes.wake_template is not None:
            namespace, slash, name = kubernetes.wake_template.partition("/")
            if not (slash and OBJECT_NAME.fullmatch(namespace) and OBJECT_NAME.fullmatch(name)):
                out.append(
                    "$.kubernetes.wake_template: expected NAMESPACE/NAME of a PodTemplate, got "
                    f"{short(kubernetes.wake_template)}"
                )
            if not kubernetes.autoscaler:
                out.append(
                    "$.kubernetes.wake_template: expected `autoscaler: true` with it: else none is woken"
                )
        if kubernetes.command and slurm is not None and slurm.command:
            out.append(
                "$.kubernetes.command: Slurm commands the nodes of this site (jobs.slurm.command); "
                "expected one of the two"
            )
    if burn_in is not None:
        out.within("burn_in.at_once", burn_in.at_once, 1, 256)
        out.within("burn_in.timeout_s", burn_in.timeout_s, 1, 86_400)
        if not burn_in.command or not burn_in.command[0] or any("\0" in word for word in burn_in.command):
            out.append("$.burn_in.command: expected a program and its words: [/opt/site/test, '{host}']")
    return out


def scheduler_notes(slurm: Slurm | None, kubernetes: Kubernetes | None, burn_in: BurnIn | None) -> list[str]:
    """Notes on these sections for the operator, before a daemon acts by them."""
    out: list[str] = []
    commanded = [
        name
        for name, section in (("Slurm", slurm), ("Kubernetes", kubernetes))
        if section and section.command
    ]
    if not commanded:
        out.append(
            "no scheduler is commanded (jobs.slurm.command or kubernetes.command): commands on "
            "node.service_level get no answer, and nobody reads or changes node.placement"
        )
    for name in commanded:
        out.append(
            f"{name} cannot enforce `safe`: a node stays as it was last commanded when its lease or the "
            "daemon ends; only the daemon or people return it"
        )
    if slurm is not None and slurm.command and not slurm.requeue:
        out.append("jobs.slurm.requeue is off: at `drained` and `replace` jobs run to their end")
    if burn_in is None and commanded:
        out.append("no burn_in: nodes that were withdrawn are not tested before people return them")
    return out


def burn_in_notes(burn_in: BurnIn | None, counts_on_it: bool | None) -> list[str]:
    """Differences between the daemon and the policy `replacement` on whether the site tests its nodes.

    `counts_on_it`: the policy's setting `burn_in`; None where the policy does not run.
    """
    if counts_on_it and burn_in is None:
        return [
            "policies.replacement.settings.burn_in is true and no `burn_in:` is here: nobody tests what "
            "was withdrawn, unless people do (racktwin device tested)"
        ]
    if counts_on_it is False and burn_in is not None:
        return [
            "`burn_in:` is here and policies.replacement.settings.burn_in is not true: the policy asks "
            "for no tests"
        ]
    return []
