"""The walk through a Redfish service that says anything: limits hold, and nothing but errors of ours come."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from connectors.bmc import GPU_CAP, NODE_CAP, Key, RedfishBmc, RedfishCaps, RedfishClient
from connectors.bmc.redfish import MAX_GETS, _natural
from connectors.bmc.redfish_client import Gone, HttpAnswer, decoded, is_path
from tests.support.redfish_service import ROOT, Service
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


WHOLE = sorted(tree_of(Service(2, True, 1200.0, "control")))


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from(WHOLE), TREES, max_size=4), TREES)
def test_whatever_a_service_says_is_read_or_an_error_of_ours(changes: dict[str, Any], other: Any) -> None:
    async def look() -> None:
        fake = Fake({**tree_of(Service(2, True, 1200.0, "control")), **changes}, other)
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
    with pytest.raises(ConnectorError, match="leads elsewhere"):
        client._same_host("https://bmc/redfish/v1", location)
