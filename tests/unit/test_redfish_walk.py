"""The walk through a Redfish service that says anything: limits hold, and nothing but errors of ours come."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from connectors.bmc import GPU_CAP, NODE_CAP, Key, RedfishBmc, RedfishCaps, RedfishClient, RedfishDpu
from connectors.bmc.redfish import MAX_GETS, _natural
from connectors.bmc.redfish_client import Gone, HttpAnswer, Refusal, decoded, is_path
from connectors.bmc.redfish_dpus import DpuSpot, dpu_values
from tests.support.redfish_service import ROOT, Adapter, Service
from twin.catalogue import ActuationError, ConnectorError

WORDS = ["@odata.id", "Members", "Members@odata.nextLink", "Links", "Systems", "Chassis", "Processors",
         "ProcessorType", "EnvironmentMetrics", "PowerLimitWatts", "PowerWatts", "SetPoint", "Reading",
         "AllowableMin", "AllowableMax", "ControlMode", "Controls", "ControlType", "RelatedItem",
         "Id"]  # fmt: skip
AT = ["/redfish/v1/a", "/redfish/v1/b", "//evil/x", "http://evil"]
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from(["GPU", "Power", "Disabled", *AT]),
)  # fmt: skip
TREES = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=6)
    ),
    max_leaves=12,
)  # fmt: skip


class Fake:
    """In a client's place: `bodies` by path; what has none is gone, or is `other`."""

    def __init__(self, bodies: dict[str, Any], other: Any = None) -> None:
        self.bodies, self.other, self.asked = bodies, other, 0

    async def get(self, path: str) -> HttpAnswer:
        assert is_path(path)
        self.asked += 1
        body = self.bodies.get(path, self.other)
        if body is None:
            raise Gone(path)
        return HttpAnswer(decoded(json.dumps(body).encode(), path), '"1"')

    async def root(self) -> Any:
        return self.bodies.get(f"{ROOT}/", {})

    async def close(self) -> None:
        """Nothing is open."""


def bmc_of(fake: Any, gpus: int = 2, **more: Any) -> RedfishBmc:
    return RedfishBmc("bmc", 0, fake, range(gpus), RedfishCaps(command=("gpus", "node"), **more))


def tree_of(service: Service) -> dict[str, Any]:
    return {p: dict(body) for p, (body, _) in service._tree().items()} | {f"{ROOT}/": service._root()}


def with_adapters(*adapters: Adapter) -> Service:
    service = Service(2, True, 1200.0, "control")
    service.adapters += adapters
    return service


TWO = (Adapter("NIC_10"), Adapter("NIC_2", temp_c=61.5, errors=[(3, 4), (0, 5)]))
WHOLE = sorted(tree_of(with_adapters(*TWO)))


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from(WHOLE), TREES, max_size=4), TREES)
def test_whatever_a_service_says_is_read_or_an_error_of_ours(changes: dict[str, Any], other: Any) -> None:
    async def look() -> None:
        fake = Fake({**tree_of(with_adapters(*TWO)), **changes}, other)
        bmc = bmc_of(fake)
        for _ in range(2):
            try:
                seen = await bmc.read()
            except (ConnectorError, ActuationError):
                continue
            for cap in seen.caps:
                assert 0 <= cap.low_w <= cap.high_w <= 1e6
                assert math.isfinite(cap.limit_w)
            assert all(math.isfinite(w) and w >= 0 for _, _, w in seen.power_w)
            assert all(math.isfinite(value) for _, value in seen.dpus)
        assert fake.asked <= 2 * (MAX_GETS + 20)

    def root(value: Any) -> Any:
        return value if isinstance(value, dict) else {}

    changes = {path: root(v) if path == f"{ROOT}/" else v for path, v in changes.items()}
    asyncio.run(look())


def test_a_service_without_end_is_left_at_a_limit() -> None:
    class Endless(Fake):
        async def get(self, path: str) -> HttpAnswer:
            self.asked += 1
            more = [{"@odata.id": f"{path[:200]}/{i}"} for i in range(50)]
            here = {"@odata.id": f"{path[:200]}/x"}
            return HttpAnswer({"Members": more, "Members@odata.nextLink": f"{path[:200]}/n",
                              "Processors": here,
                           "Controls": here}, "")  # fmt: skip

    fake = Endless(
        {f"{ROOT}/": {"Systems": {"@odata.id": f"{ROOT}/S"}, "Chassis": {"@odata.id": f"{ROOT}/C"}}}
    )
    with pytest.raises(ConnectorError, match=f"more than {MAX_GETS} resources"):
        asyncio.run(bmc_of(fake).read())
    assert fake.asked == MAX_GETS


def test_limits_of_gpus_that_are_controls_of_a_chassis() -> None:
    tree = tree_of(Service(2, False, 1200.0, "control"))
    chassis = f"{ROOT}/Chassis/Module_0"
    tree[chassis]["Controls"] = {"@odata.id": f"{chassis}/Controls"}
    tree[f"{chassis}/Controls"] = {"Members": [{"@odata.id": f"{chassis}/Controls/{i}"} for i in range(2)]}
    for i in range(2):
        gpu = f"{ROOT}/Systems/Board_0/Processors/GPU_{i + 1}"
        tree[f"{chassis}/Controls/{i}"] = {"ControlType": "Power", "SetPoint": 600 + i, "AllowableMax": 700,
                                           "RelatedItem": [{"@odata.id": gpu}]}  # fmt: skip
        del tree[f"{gpu}/EnvironmentMetrics"]["PowerLimitWatts"]
    seen = asyncio.run(bmc_of(Fake(tree)).read())
    assert [(cap.key, cap.limit_w, cap.high_w) for cap in seen.caps] == [
        (Key(GPU_CAP, 0), 600.0, 700.0), (Key(GPU_CAP, 1), 601.0, 700.0)
    ]  # fmt: skip
    assert seen.power_w == (("gpu", 0, 300.0), ("gpu", 1, 301.0))
    assert seen.faults == ("has no power limit of the node",)


def test_a_limit_of_a_part_is_not_the_nodes() -> None:
    service = Service(1, True, 1200.0, "control")
    part = {"Id": "Cpu", "ControlType": "Power", "SetPoint": 1.0, "PhysicalContext": "CPU"}
    other = {"Id": "Of", "ControlType": "Power", "SetPoint": 1.0, "RelatedItem": [
        {"@odata.id": f"{ROOT}/Systems/Board_0/Processors/CPU_0"}]}  # fmt: skip
    service.extra_controls += [part, other, {"Id": "Fan", "ControlType": "Temperature", "SetPoint": 1.0}]
    seen = asyncio.run(bmc_of(Fake(tree_of(service)), 1).read())
    assert [cap.limit_w for cap in seen.caps if cap.key.control == NODE_CAP] == [6600.0]


def dpus_seen(*adapters: Adapter, **more: Any) -> tuple[dict[str, float], tuple[str, ...]]:
    """(what a node's BMC says of DPUs, what it leaves out)."""
    seen = asyncio.run(bmc_of(Fake(tree_of(with_adapters(*adapters))), **more).read())
    return dict(seen.dpus), seen.faults


def test_adapters_that_say_that_they_are_dpus_are_read_in_their_natural_order() -> None:
    plain = Adapter("NIC_1", model="ConnectX-7", health="Critical")
    assert dpus_seen(*TWO, plain) == ({
        "dpu1_health_state": 0.0, "dpu1_temp_c": 61.5, "dpu1_port_error_count": 12,
        "dpu2_health_state": 0.0, "dpu2_temp_c": 70.0, "dpu2_port_error_count": 0,
    }, ())  # fmt: skip
    assert dpus_seen(plain) == ({}, ())


def test_a_dpu_that_does_not_say_all_is_unknown_in_that_and_not_well() -> None:
    ill = Adapter("BlueField_0", "x", "Critical", temp_c=None, errors=[(1, None), (None, None)])
    assert dpus_seen(ill)[0] == {"dpu1_health_state": 2.0}  # of a port that tells nothing there is no sum
    assert dpus_seen(Adapter("DPU_0", health="odd", errors=[]))[0] == {"dpu1_temp_c": 70.0}
    assert "dpu1_health_state" not in dpus_seen(Adapter("DPU_0", state="Absent"))[0]
    assert dpus_seen(Adapter("DPU_0", health="Warning", errors=[(2, None)]))[0]["dpu1_port_error_count"] == 2


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "Status": st.one_of(VALUES, st.fixed_dictionaries({"Health": VALUES})),
            "TemperatureCelsius": st.one_of(VALUES, st.fixed_dictionaries({"Reading": st.floats()})),
            "RXErrors": st.one_of(VALUES, st.floats()),
        },
    )
)
@example({"TemperatureCelsius": {"Reading": math.nan}})
@example({"RXErrors": math.inf})
def test_whatever_a_dpu_reports_gives_finite_values_or_none(body: dict[str, Any]) -> None:
    spot = DpuSpot(health=("/h",), heat=("/t",), ports=("/p",))
    values = dict(dpu_values(2, spot, dict.fromkeys(spot.paths, body)))
    assert set(values) <= {"dpu2_health_state", "dpu2_temp_c", "dpu2_port_error_count"}
    assert all(math.isfinite(value) for value in values.values())
    assert ("dpu2_health_state" in values) <= isinstance(body.get("Status"), dict)


def test_a_dpu_with_a_bmc_of_its_own_is_not_read_twice() -> None:
    found, faults = dpus_seen(*TWO, own_bmc=(2,))
    assert (sorted(found), faults) == (
        ["dpu1_health_state", "dpu1_port_error_count", "dpu1_temp_c"], ()
    )  # fmt: skip


def test_what_is_gone_of_a_dpu_costs_that_alone() -> None:
    tree = tree_of(with_adapters(*TWO))
    nic = f"{ROOT}/Chassis/Module_0/NetworkAdapters/NIC_2"
    del tree[f"{nic}/EnvironmentMetrics"], tree[f"{nic}/Ports/1"]
    seen = asyncio.run(bmc_of(Fake(tree)).read())
    assert (len(seen.caps), seen.faults) == (3, ())
    mine = {name: value for name, value in seen.dpus if "dpu1" in name}
    assert mine == {"dpu1_health_state": 0.0}, "of one port alone there is no sum"


@pytest.mark.parametrize("error", [ConnectorError("answers 500"), Refusal("answers 403", 403)])
@pytest.mark.parametrize("part", ["", "/NIC_2", "/NIC_2/EnvironmentMetrics"])
def test_a_dpu_that_cannot_be_read_costs_no_cap_its_reading(part: str, error: Exception) -> None:
    broken = f"{ROOT}/Chassis/Module_0/NetworkAdapters{part}"

    class Failing(Fake):
        async def get(self, path: str) -> HttpAnswer:
            if path == broken:
                raise error
            return await super().get(path)

    bmc = bmc_of(Failing(tree_of(with_adapters(*TWO))))
    for _ in range(2):
        seen = asyncio.run(bmc.read())
        assert len(seen.caps) == 3
        assert [why for why in seen.faults if "DPU" in why and str(error) in why]
        assert not [name for name, _ in seen.dpus if "dpu1" in name]


def test_a_dpu_that_left_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.bmc.redfish.WALK_S", 0.0)
    fake = Fake(tree_of(with_adapters(*TWO)))
    bmc = bmc_of(fake)
    assert len(asyncio.run(bmc.read()).dpus) == 6
    fake.bodies = tree_of(with_adapters(TWO[0]))
    seen = asyncio.run(bmc.read())
    assert (len(seen.caps), "NIC_2" in seen.faults[0]) == (3, True)
    seen = asyncio.run(bmc.read())
    assert (len(seen.caps), len(seen.dpus), seen.faults) == (3, 3, ())


def test_more_adapters_than_a_node_has_dpus_are_not_guessed() -> None:
    three = [Adapter(f"DPU_{i}", temp_c=60.0 + i) for i in range(3)]
    found, (why,) = dpus_seen(*three)
    assert (found, "3 DPUs; expected at most 2" in why) == ({}, True)
    found, faults = dpus_seen(*three, dpu_ids=("DPU_2", "DPU_0"))
    assert (found["dpu1_temp_c"], found["dpu2_temp_c"], faults) == (62.0, 60.0, ())
    found, (why,) = dpus_seen(*three, dpu_ids=("DPU_2", "DPU_9"))
    assert (found, "1 of the 2 network adapters" in why) == ({}, True)


def test_the_bmc_of_a_dpu_tells_of_its_system_its_card_and_its_ports() -> None:
    card, system = f"{ROOT}/Chassis/Card1", f"{ROOT}/Systems/Bluefield"
    service = with_adapters(Adapter("NvidiaNetworkAdapter", temp_c=None, errors=[(6, 1)]))
    tree = {path: body for path, body in tree_of(service).items() if "Module_0" in path}
    tree |= {
        f"{ROOT}/": service._root(), f"{ROOT}/Systems": {"Members": [{"@odata.id": system}]},
        f"{ROOT}/Chassis": {"Members": [{"@odata.id": card}, {"@odata.id": f"{ROOT}/Chassis/Module_0"}]},
        system: {"Status": {"Health": "OK", "HealthRollup": "Warning"}},
        card: {"EnvironmentMetrics": {"@odata.id": f"{card}/Env"},
               "Sensors": {"@odata.id": f"{card}/Sensors"}},
        f"{card}/Env": {"TemperatureCelsius": {"Reading": 50.0}},
        f"{card}/Sensors": {"Members": [{"@odata.id": f"{card}/Sensors/{n}"} for n in
                                        ("p0_temp", "bluefield_temp")]},
        f"{card}/Sensors/bluefield_temp": {"Reading": 66.0}, f"{card}/Sensors/p0_temp": {"Reading": 99.0},
    }  # fmt: skip
    fake = Fake(tree)
    seen = asyncio.run(RedfishDpu("bf", 0, 2, fake).read())  # type: ignore[arg-type]
    assert dict(seen.dpus) == {
        "dpu2_health_state": 1.0, "dpu2_temp_c": 66.0, "dpu2_port_error_count": 7
    }  # fmt: skip
    assert (seen.caps, seen.power_w, seen.level, seen.faults) == ((), (), None, ())
    del tree[f"{card}/Sensors"]
    seen = asyncio.run(RedfishDpu("bf", 0, 2, fake).read())  # type: ignore[arg-type]
    assert dict(seen.dpus)["dpu2_temp_c"] == 50.0
    bare = RedfishDpu("bf", 0, 1, Fake({f"{ROOT}/": service._root()}))  # type: ignore[arg-type]
    assert "describes no DPU" in asyncio.run(bare.read()).faults[0]


def test_two_comes_before_ten() -> None:
    names = [f"/p/GPU_{i}" for i in range(12)]
    assert sorted(sorted(names), key=_natural) == names


@pytest.mark.parametrize(
    "path, good",
    [
        ("/redfish/v1/Systems", True), ("//evil/redfish", False), ("http://evil/redfish/v1", False),
        ("/redfish/../etc", False), ("/other", False), ("/redfish/v1/a b", False), ("/redfish/\\x", False),
        (None, False), (7, False), ("/redfish/" + "x" * 1000, False), ("/redfish/v1/a\r\nHost: evil", False),
    ],
)  # fmt: skip
def test_paths(path: object, good: bool) -> None:
    assert is_path(path) is good


@pytest.mark.parametrize(
    "location, to",
    [
        ("/redfish/v1/x?y=1", "/redfish/v1/x?y=1"), ("https://bmc/redfish/v1/z", "/redfish/v1/z"),
        ("http://bmc/redfish/v1/z", None), ("https://bmc:444/z", None), ("//evil/z", None), ("", None),
        ("https://bmc.evil/z", None), ("https://bmc@evil/z", None), ("https://[::1", None),
    ],
)  # fmt: skip
def test_redirects_stay_on_the_host(location: str, to: str | None) -> None:
    client = RedfishClient("https://bmc", "u", lambda: "p", lambda: None)  # type: ignore
    if to is not None:
        assert client._same_host("https://bmc/redfish/v1", location) == to
        return
    with pytest.raises(ConnectorError, match="redirects to another host"):
        client._same_host("https://bmc/redfish/v1", location)
