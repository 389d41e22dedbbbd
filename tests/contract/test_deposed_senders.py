"""Requests of one command that are still to be sent when the term ends are not sent."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import numpy as np
import pytest

from connectors.bmc import RedfishClient
from connectors.kubernetes import KubernetesClient, client as kubernetes_client
from connectors.kubernetes.access import Access
from connectors.nats import BudgetSink
from tests.support.builders import site_of
from tests.support.kubernetes_apiserver import Cluster
from tests.support.redfish_service import PASSWORD, ROOT, USER, Services
from tests.support.two_levels import top_tree
from twin.catalogue import NS, ActuationError, ConnectorError
from twin.contracts import CommandBatch
from twin.site import HALL_BUDGET
from twin.wiring.bmc import Http

DEPOSED = "another daemon leads now"
RESET = f"{ROOT}/Systems/Board_0/Actions/ComputerSystem.Reset"


@pytest.mark.parametrize("deposed", [False, True])
def test_a_reset_waits_for_its_sign_in_and_is_not_sent_after_the_term(deposed: bool) -> None:
    async def run() -> list[str]:
        async with Services() as services:
            one, http = services[0], Http()
            client = RedfishClient(f"http://{one.host}", USER, lambda: PASSWORD, http)
            client.may_change = lambda: not deposed
            with pytest.raises(ConnectorError, match=DEPOSED) if deposed else nullcontext():
                await client.post(RESET, {"ResetType": "ForceOff"})
            assert one.signed_in == 1
            await client.close()
            assert not one.tokens, "its session is given back"
            await http.close()
            return one.resets

    assert asyncio.run(run()) == ([] if deposed else ["ForceOff"])


@pytest.mark.parametrize("deposed", [False, True])
def test_a_change_of_a_node_is_repeated_only_within_the_term(
    deposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers the first request with 503; meanwhile the term ends."""
    monkeypatch.setattr(kubernetes_client, "FIRST_S", 0.01)
    monkeypatch.setattr(kubernetes_client, "LONGEST_S", 0.02)

    async def run() -> tuple[int, bool]:
        cluster = Cluster()
        async with cluster.serving():
            cluster.put_node("n0")
            cluster.failing = [("PATCH", 503)]
            client = KubernetesClient(
                lambda: Access(f"http://127.0.0.1:{cluster.port}"),
                may_change=lambda: not (deposed and cluster.asked("PATCH", "/")),
            )
            with pytest.raises(ConnectorError, match=DEPOSED) if deposed else nullcontext():
                await client.patch("/api/v1/nodes/n0", {"spec": {"unschedulable": True}})
            await client.get("/api/v1/nodes/n0")
            await client.close()
            return cluster.asked("PATCH", "/"), bool(cluster.node("n0")["spec"].get("unschedulable"))

    assert asyncio.run(run()) == ((1, False) if deposed else (2, True))


def test_grants_of_the_other_halls_are_not_sent_after_the_term() -> None:
    site, sent = site_of(top_tree()), list[str]()

    class Link:
        async def publish(self, subject: str, payload: bytes, key: str = "") -> None:
            sent.append(subject)

    index = np.arange(2, dtype=np.int32)
    columns = index, np.zeros(2, np.int32), np.arange(2, dtype=np.int64), np.full(2, 1e6)
    batch = CommandBatch(HALL_BUDGET, "hall_budgets", 7, *columns, "a test", 0, 10 * NS, 3 * NS, False)
    for leads, expected in ((lambda: not sent, 1), (lambda: True, 2)):
        sink = BudgetSink(site, Link(), leads)  # type: ignore[arg-type]
        if expected == 1:
            with pytest.raises(ActuationError, match=DEPOSED):
                asyncio.run(sink.apply((batch,)))
        else:
            asyncio.run(sink.apply((batch,)))
        assert len(sent) == expected
        sent.clear()
