"""Configuration of schedulers: refusals, warnings of the check, and when a node may be tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from connectors.jobs import BurnInSink
from connectors.orders import SinkContext
from connectors.slurm import SlurmPlacement, SlurmSink, SlurmStandby
from tests.support.builders import START_NS, Twin, site_of, two_racks
from twin.catalogue import NS, ConfigError
from twin.config import Kubernetes, Slurm, burn_in_notes, load_config, scheduler_notes
from twin.config.schedulers import BurnIn as BurnInPart
from twin.telemetry import JobEnded, JobStarted, NodeTested
from twin.wiring import WiringContext, make_schedulers
from twin.wiring.schedulers import Nodes

NODE = "lab/h/r1/node0"


def loaded(folder: Path, **sections: Any) -> Any:
    path = folder / "racktwin.yaml"
    path.write_text(yaml.safe_dump({"site": "site.yaml", "broker": "embedded", **sections}))
    return load_config(path)


@pytest.mark.parametrize(
    "sections, problem",
    [
        ({"jobs": {"slurm": {"requeue": True}}}, "$.jobs.slurm.requeue: expected `command: true`"),
        ({"jobs": {"slurm": {"period_s": 0}}}, "$.jobs.slurm.period_s: expected a number from 1 to 3600"),
        (
            {"jobs": {"slurm": {"command": True}}, "kubernetes": {"command": True}},
            "$.kubernetes.command: Slurm commands the nodes of this site (jobs.slurm.command); expected one",
        ),
        ({"kubernetes": {"autoscaler": True}}, "$.kubernetes.autoscaler: expected `command: true` with it"),
        ({"kubernetes": {"wake_template": "gpu/whole"}},
         "$.kubernetes.wake_template: expected `autoscaler: true` with it"),
        ({"kubernetes": {"wake_template": "whole"}},
         "$.kubernetes.wake_template: expected NAMESPACE/NAME of a PodTemplate"),
        ({"kubernetes": {"timeout_s": 0}}, "$.kubernetes.timeout_s: expected a number from 1 to 60, got 0"),
        ({"burn_in": {"command": []}}, "$.burn_in.command: expected a program and its words"),
        ({"burn_in": {"command": ["a\0b"]}}, "$.burn_in.command: expected a program and its words"),
        ({"burn_in": {"command": "test {host}"}}, "$.burn_in.command"),
        ({"burn_in": {"command": ["x"], "at_once": 0}}, "$.burn_in.at_once: expected a number from 1 to 256"),
        ({"burn_in": {"command": ["x"], "timeout_s": 1e6}}, "$.burn_in.timeout_s: expected a number from 1"),
        ({"burn_in": {"comand": ["x"]}}, "comand"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, **sections)
    assert problem in str(error.value)


def test_a_section_that_may_be_left_out_is_judged_key_by_key_and_quotes_no_secret(tmp_path: Path) -> None:
    slurm = {"kinds": {"train": "trianing"}}
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, kubernetes={"token": "eyJhb", "command": 1}, burn_in={"at_once": "x"},
               jobs={"slurm": slurm})  # fmt: skip
    said = str(error.value)
    for what in (
        "$.kubernetes.token: unknown key; expected one of autoscaler, cluster, command,",
        "$.kubernetes.command: expected true or false",
        "$.burn_in.command: missing",
        "$.burn_in.at_once: expected a whole number",
        "$.jobs.slurm.kinds.train: expected one of training,",
    ):
        assert what in said
    assert "eyJhb" not in said


def test_what_people_are_told() -> None:
    reads, commands = Slurm(), Slurm(command=True)
    (note,) = scheduler_notes(reads, None, None)
    assert "commands on node.service_level get no answer, and nobody reads or changes node.placement" in note
    safe, waits, untested = scheduler_notes(commands, None, None)
    assert safe.startswith("Slurm cannot enforce `safe`")
    assert "jobs run to their end" in waits
    assert untested.startswith("no burn_in")
    (safe,) = scheduler_notes(Slurm(command=True, requeue=True), None, BurnInPart(command=["x"]))
    assert safe.startswith("Slurm")
    (safe,) = scheduler_notes(reads, Kubernetes(command=True), BurnInPart(command=["x"]))
    assert safe.startswith("Kubernetes cannot enforce `safe`")


SINK = SinkContext(lambda items, now_ns: None, lambda: True)


def test_who_counts_on_tests_that_nobody_makes_is_told() -> None:
    part = BurnInPart(command=["x"])
    (note,) = burn_in_notes(None, True)
    assert "nobody tests what was withdrawn" in note
    (note,) = burn_in_notes(part, False)
    assert "asks for no tests" in note
    assert burn_in_notes(part, True) == burn_in_notes(None, False) == burn_in_notes(part, None) == []


def test_what_is_made_of_it(tmp_path: Path) -> None:
    site = site_of(two_racks())

    def made(**sections: Any) -> Any:
        twin = Twin(two_racks())
        return make_schedulers(WiringContext(loaded(tmp_path, **sections), site, lambda: twin.engine, SINK))

    nothing = made()
    assert (nothing.sources, nothing.sinks, nothing.works) == ([], [], {})
    reads = made(jobs={"slurm": {}})
    assert not reads.sources[0]._placement
    assert ([s.name for s in reads.sources], reads.sinks) == (["slurm"], [])
    acts = made(jobs={"slurm": {"command": True}}, burn_in={"command": ["x"]})
    assert acts.sources[0]._placement
    assert [type(s) for s in acts.sinks] == [SlurmSink, SlurmPlacement, SlurmStandby, BurnInSink]
    assert list(acts.works) == ["slurm-standby-work", "burn-in-work"]
    assert set(acts.counts) == {"slurm", "slurm-placement", "slurm-standby", "burn-in"}
    assert acts.sinks[3].places.folder == tmp_path / "state" / "burn-in"


def test_a_cluster_is_commanded_beside_a_slurm_that_is_read(tmp_path: Path) -> None:
    conf = tmp_path / "kubeconfig"
    conf.write_text(
        "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n"
        "clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: u, user: {}}]\n"
    )
    twin = Twin(two_racks())

    def made(**kubernetes: Any) -> Any:
        sections = {"jobs": {"slurm": {}}, "kubernetes": {"command": True, **kubernetes}}
        context = WiringContext(loaded(tmp_path, **sections), twin.site, lambda: twin.engine, SINK)
        return make_schedulers(context)

    parts = made(kubeconfig="kubeconfig")
    assert [s.name for s in parts.sources] == ["slurm", "kubernetes"]
    names = ["kubernetes", "kubernetes-placement"]
    assert [s.name for s in parts.sinks] == names
    assert list(parts.works) == [f"{name}-work" for name in names]
    assert [parts.faults[name]() for name in names] == ["", ""]
    for command in (True, False):  # nobody is asked for what nobody would answer
        source = made(kubeconfig="kubeconfig", command=command).sources[1]
        assert ("placement_state" in source._signals) == command
        assert "standby_state" not in source._signals
    scaled = made(kubeconfig="kubeconfig", autoscaler=True)
    assert [s.name for s in scaled.sinks] == [*names, "kubernetes-standby"]
    assert list(scaled.works)[-1] == "kubernetes-standby-work"
    assert scaled.faults["kubernetes-standby"]() == ""
    assert "standby_state" in scaled.sources[1]._signals
    with pytest.raises(ConfigError):
        made(kubeconfig="nowhere")


def test_a_node_is_tested_where_nothing_runs_and_it_is_out_of_service() -> None:
    twin = Twin(two_racks())
    nodes = Nodes(lambda: twin.engine)

    def why(level: float | None, *events: Any) -> str:
        twin.tick(None if level is None else {"node.service_level_state": level}, *events)
        return nodes.why_not_now(0)

    assert "nobody says whether the node is in service" in why(None)
    assert why(0.0) == "waits: the node is in service"
    assert nodes.returned(0)
    assert "nobody says what runs" in why(1.0)
    assert "nobody says what runs" in why(2.0)
    assert why(3.0) == ""  # read back of an empty node, also where no job ever ran
    job = JobStarted(job="train", nodes=(NODE,))
    assert why(3.0, job) == "waits: train runs on the node"
    assert not nodes.returned(0)
    assert why(3.0, JobStarted(job="beside", nodes=(NODE,)), JobEnded(job="beside")) == (
        "waits: train runs on the node"
    )
    assert why(3.0, JobEnded(job="train")) == ""
    assert why(1.0) == ""


def test_the_service_book_is_asked() -> None:
    twin = Twin(two_racks())
    nodes = Nodes(lambda: twin.engine)
    assert nodes.tested(0) is None
    for k, passed in enumerate((True, False, None)):
        began_ns = START_NS - (100 - k) * NS
        twin.tick(None, NodeTested(name=NODE, began_ns=began_ns, ended_ns=began_ns + NS, passed=passed))
        assert nodes.tested(0) == (None if passed is None else (began_ns, passed))
