"""Configuration of BMCs: refusals, warnings of the check, and which source commands a GPU or a node."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from connectors.bmc import GPU_CAP, NODE_CAP, POWER, Key
from connectors.orders import SinkContext
from tests.support.builders import START_NS, Twin, eight_nodes, site_of, two_racks
from twin.catalogue import NS, ConfigError
from twin.cli.main import main
from twin.config import actuator_notes, load_config
from twin.wiring import Schedulers, WiringContext, actuator_faults, make_actuators, reading_notes
from twin.wiring.bmc import Agents

NODE = "lab/h/r1/node0"
RED: dict[str, Any] = {"bmcs": {"bmc1": NODE}, "user": "admin", "password_file": "secret"}


def loaded(folder: Path, **sections: Any) -> Any:
    path = folder / "racktwin.yaml"
    path.write_text(yaml.safe_dump({"site": "site.yaml", "broker": "embedded", **sections}))
    return load_config(path)


def made(folder: Path, site: Any, **sections: Any) -> Schedulers:
    out = Schedulers()
    (folder / "secret").write_text("a secret of tests")
    sink = SinkContext(lambda items, t: None, lambda: True)
    engine: Any = lambda: None  # noqa: E731
    make_actuators(WiringContext(loaded(folder, **sections), site, engine, sink), out)
    return out


@pytest.mark.parametrize(
    "sections, problem",
    [
        ({"redfish": [RED | {"bmcs": {}}]}, "$.redfish[0].bmcs: expected hosts and their nodes"),
        ({"redfish": [RED | {"bmcs": {"b[1-2]": NODE}}]}, "2 names for 1 entities"),
        ({"redfish": [RED | {"bmcs": {"a b": NODE}}]}, "$.redfish[0].bmcs.a b: expected a host's name"),
        ({"redfish": [RED | {"bmcs": {"a/b": NODE}}]}, "expected a host's name"),
        ({"redfish": [RED | {"bmcs": {"u@b": NODE}}]}, "expected a host's name"),
        ({"redfish": [RED | {"bmcs": {"-b": NODE}}]}, "expected a host's name"),
        ({"redfish": [RED | {"scheme": "http"}]}, "http shows the password to the network"),
        ({"redfish": [RED | {"verify": False, "ca_file": "x"}]}, "expected one of the two"),
        ({"redfish": [RED | {"period_s": 0.1}]}, "$.redfish[0].period_s: expected a number from 1 to 3600"),
        ({"redfish": [RED | {"timeout_s": 0}]}, "$.redfish[0].timeout_s"),
        ({"redfish": [RED | {"at_once": 0}]}, "$.redfish[0].at_once: expected a number from 1 to 256"),
        ({"redfish": [RED | {"gpu_ids": ["a", "a"]}]}, "each once"),
        ({"redfish": [RED | {"dpu_ids": ["a", "b", "c"]}]}, "$.redfish[0].dpu_ids: expected at most 2 Ids"),
        ({"redfish": [RED | {"bmcs": {"b": f"{NODE}#dpu2"}, "power": True}]}, "of its own that only reads"),
        ({"redfish": [RED | {"command": ["cpus"]}]}, "$.redfish[0].command"),
        ({"redfish": [RED | {"password": "x"}]}, "password"),
        ({"redfish": [RED | {"user": "-P"}]}, "$.redfish[0].user: expected a name"),
        ({"dcmi": [RED | {"correction_ms": 0}]}, "$.dcmi[0].correction_ms: expected a number from 1 to"),
        ({"dcmi": [RED | {"exception": "power_off"}]}, "$.dcmi[0].exception"),
        ({"dcmi": [RED | {"cipher": 99}]}, "$.dcmi[0].cipher"),
        ({"redfish": [RED | {"bmcs": {"a": NODE, "b": NODE}}]}, "has a BMC already; expected one"),
        (
            {"redfish": [RED | {"command": ["node"]}], "dcmi": [RED | {"command": True}]},
            f"$.dcmi[0].command: redfish[0] commands the node cap of {NODE} already; expected one writer",
        ),
        (
            {"redfish": [RED | {"command": ["gpus"]}, RED | {"command": ["gpus"]}]},
            f"redfish[0] commands the gpus cap of {NODE} already",
        ),
        (
            {"redfish": [RED | {"power": True}], "dcmi": [RED | {"power": True}]},
            f"$.dcmi[0].power: redfish[0] commands the power of {NODE} already; expected one writer",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, **sections)
    assert problem in str(error.value)


def test_gpus_by_redfish_and_the_node_by_dcmi_is_no_conflict(tmp_path: Path) -> None:
    site = site_of(two_racks())
    sections = {"redfish": [RED | {"command": ["gpus"]}], "dcmi": [RED | {"command": True}]}
    out = made(tmp_path, site, **sections)
    assert [s.name for s in out.sources] == ["redfish", "dcmi"]
    assert {s.name: (s.controls, s.enforces_safe) for s in out.sinks} == {
        "redfish": ((GPU_CAP,), False), "dcmi": ((NODE_CAP,), False)
    }  # fmt: skip
    assert list(out.works) == ["redfish-work", "dcmi-work"]
    assert [fault() for fault in out.faults.values()] == ["", ""]


def test_a_section_that_commands_nothing_only_reads(tmp_path: Path) -> None:
    out = made(tmp_path, site_of(two_racks()), redfish=[RED, RED])
    assert ([s.name for s in out.sources], out.sinks) == (["redfish", "redfish-1"], [])


def test_bmcs_of_dpus_are_read_beside_that_of_their_node(tmp_path: Path) -> None:
    bmcs = {"bmc1": NODE, "bf[1-2]": f"{NODE}#dpu[1-2]"}
    out = made(tmp_path, site_of(two_racks()), redfish=[RED | {"bmcs": bmcs}])
    (source,) = out.sources
    assert source.origins == ("BMC bf1", "BMC bf2", "BMC bmc1")  # type: ignore[attr-defined]
    assert [bmc._ids.own_bmc for bmc in source._fleet.bmcs if bmc.name == "bmc1"] == [[1, 2]]  # type: ignore[attr-defined]
    (wrong,) = actuator_faults(
        loaded(tmp_path, redfish=[RED | {"bmcs": {"b": f"{NODE}#dpu3"}}]), site_of(two_racks())
    )
    assert "has no node" in wrong


def test_power_is_commanded_only_where_the_section_says_so(tmp_path: Path) -> None:
    out = made(tmp_path, site_of(two_racks()), redfish=[RED], dcmi=[RED | {"power": True}])
    assert [(s.name, s.controls, s.enforces_safe) for s in out.sinks] == [("dcmi-power", (POWER,), False)]
    assert list(out.works) == ["dcmi-power-work"]
    assert out.faults["dcmi-power"]() == ""


def test_host_lists_name_racks_of_nodes(tmp_path: Path) -> None:
    part = RED | {"bmcs": {"bmc[01-18].lab:8443": "lab/h/r1/node[0-17]"}, "command": ["gpus", "node"]}
    out = made(tmp_path, site_of(two_racks()), redfish=[part])
    fleet = out.sinks[0]._fleet  # type: ignore[attr-defined]
    assert len(fleet.bmcs) == 18
    assert len(fleet.of) == 18 * 5
    assert fleet.bmcs[17].name == "bmc18.lab:8443"


def test_what_the_site_does_not_have_is_refused(tmp_path: Path) -> None:
    some = loaded(tmp_path, redfish=[RED | {"bmcs": {"b": "lab/h/r9/node0"}}])
    (fault,) = actuator_faults(some, site_of(two_racks()))
    assert "the site has no node 'lab/h/r9/node0'; expected a full path" in fault
    some = loaded(tmp_path, dcmi=[RED | {"command": True}])
    (fault,) = actuator_faults(some, site_of(eight_nodes()))
    assert "node.power_cap_w of lab/h/r1/node0 has no limits and no safe value" in fault


def test_a_password_is_there_and_not_longer_than_ipmi_takes(tmp_path: Path) -> None:
    site = site_of(two_racks())
    (tmp_path / "long").write_text("x" * 21)
    with pytest.raises(ConfigError, match="a password of 21 characters; expected one line of at most 20"):
        made(tmp_path, site, dcmi=[RED | {"password_file": "long"}])
    made(tmp_path, site, redfish=[RED | {"password_file": "long"}])
    with pytest.raises(ConfigError, match="absent: the secret cannot be read"):
        made(tmp_path, site, redfish=[RED | {"password_file": "absent"}])


def test_certificates_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"\$\.redfish\[0\]\.ca_file: expected certificates in PEM"):
        made(tmp_path, site_of(two_racks()), redfish=[RED | {"ca_file": "ca"}])


def test_people_are_told_what_bmcs_do_not_hold(tmp_path: Path) -> None:
    config = loaded(tmp_path, redfish=[RED | {"command": ["gpus"], "verify": False}], dcmi=[RED]).config
    first, second = actuator_notes(config.redfish, config.dcmi)
    assert first.startswith("redfish[0]: a BMC cannot enforce `safe`")
    assert "verify is false" in second


def test_people_are_told_where_looks_are_too_seldom(tmp_path: Path) -> None:
    some = loaded(tmp_path, redfish=[RED])
    (note,) = reading_notes(some, site_of(two_racks(periods_s={"gpu": 1.0})))
    assert "periods_s sets 1 s for gpu.power_limit_w" in note
    assert reading_notes(some, site_of(two_racks())) == [], "the cadence is learned"
    assert reading_notes(some, site_of(two_racks(periods_s={"gpu.power_limit_w": 15}))) == []


def test_check_tells_of_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = two_racks(policies={"operator": {"authority": "act"}})
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(tree))
    loaded(tmp_path, redfish=[RED | {"command": ["gpus"]}], simulated=True)
    assert main(["daemon", "check", "--config", str(tmp_path / "racktwin.yaml")]) == 78
    assert "$.redfish[0].password_file" in capsys.readouterr().err
    (tmp_path / "secret").write_text("a secret of tests")
    (tmp_path / "secret").chmod(0o600)
    assert main(["daemon", "check", "--config", str(tmp_path / "racktwin.yaml")]) == 0
    assert "cannot enforce `safe`" in capsys.readouterr().out
    loaded(tmp_path, redfish=[RED | {"bmcs": {"b": "lab/h/r9/node0"}}], simulated=True)
    assert main(["daemon", "check", "--config", str(tmp_path / "racktwin.yaml")]) == 78
    assert "the site has no node" in capsys.readouterr().err


def test_a_gpu_is_its_agents_while_that_is_online_and_a_lease_beyond() -> None:
    pod = Twin(two_racks())
    agents = Agents(pod.site, lambda: pod.engine)
    n = pod.site.sizes["node"]
    first, other = Key(GPU_CAP, 0), Key(GPU_CAP, 4)
    pod.tick()
    assert agents.why_theirs(first) == ""  # never heard
    state = [float("nan")] * n
    state[0] = 0.0
    pod.tick({"node.agent_state": state})
    assert "agent carries it out" in agents.why_theirs(first)
    assert agents.why_theirs(other) == ""
    assert agents.why_theirs(Key(NODE_CAP, 0)) == ""  # agents have no control of it
    state[0] = 1.0
    pod.tick({"node.agent_state": state})
    assert "went offline just now" in agents.why_theirs(first)
    for _ in range(31):
        pod.tick()
    assert agents.why_theirs(first) == ""
    state[0] = 0.0
    pod.tick({"node.agent_state": state})
    pod.tick(dt_s=3000.0)  # online was long ago: unknown is not online
    assert agents.why_theirs(first) == ""
    assert pod.now_ns > START_NS + NS


def test_what_a_lease_found_is_known_where_it_began_before_the_sinks() -> None:
    pod = Twin(two_racks())
    agents, lease = Agents(pod.site, lambda: pod.engine, START_NS), pod.engine.arbiter.leases[GPU_CAP]
    lease.found[:2], lease.begun_ns[:2] = 900.0, (START_NS, START_NS + 1)
    assert agents.found_before(Key(GPU_CAP, 0)) == 900.0
    assert math.isnan(agents.found_before(Key(GPU_CAP, 1)))


def test_the_power_of_a_node_is_known_as_read_back_while_its_agent_is_online() -> None:
    pod = Twin(two_racks())
    agents = Agents(pod.site, lambda: pod.engine)
    n = pod.site.sizes["node"]
    some = [float("nan")] * n
    some[0] = 1.0
    pod.tick({"node.power_readback_state": some})
    assert agents.power_level(0) is None  # no agent
    pod.tick({"node.agent_state": [0.0, 0.0] + [1.0] * (n - 2)})
    assert agents.power_level(0) == 1.0
    level = agents.power_level(1)
    assert level is not None
    assert level != level  # online, and reads back nothing
    assert agents.power_level(2) is None
    assert agents.power_level(n) is None
    pod.tick({"node.agent_state": [1.0, 1.0] + [1.0] * (n - 2)})
    assert (agents.power_level(0), agents.power_level(1)) == (1.0, None)  # the first one stops its system
    for _ in range(61):
        pod.tick({"node.power_readback_state": some})
    assert agents.power_level(0) is None
