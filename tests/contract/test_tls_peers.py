"""Clients of the product before servers whose certificates are sound, expired, another host's, a stranger's.

To a server that cannot show who it is, no client says a word: no request, no password, no token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import pytest
import yaml
from racktwin_agent.config import Broker
from racktwin_agent.link import Link
from racktwin_agent.publish import Out
from racktwin_client.mqtt import Broker as JobBroker
from racktwin_client.wires import HttpWire

from connectors.bmc import RedfishClient
from connectors.clickhouse import ClickHouseError, ClickHouseLink, Login
from connectors.influx import InfluxSettings, InfluxWriter
from connectors.kubernetes.access import from_kubeconfig
from connectors.kubernetes.client import KubernetesClient
from connectors.mqtt.link import LinkSettings, MqttLink
from connectors.prometheus import PrometheusSource, ScrapeSettings
from tests.support.builders import site_of, two_racks
from tests.support.history_samples import rack_sample
from tests.support.inlets import RecordingInlet
from tests.support.tls_peers import Papers, TlsServer, issue_papers
from twin.api import Client
from twin.catalogue import NS, ActuationError, ConfigError, ConnectorError
from twin.config import Config, History, Loaded, Notify, Redfish, Tls
from twin.config.schema import Influx
from twin.daemon.etcd import Etcd
from twin.daemon.notify import Receiver
from twin.daemon.services import _whole_paths
from twin.wiring.bmc import _trust as redfish_trust

Ask = Callable[[int, Path, Path], Awaitable[None]]  # (port, the authority to trust, a folder)
TROUBLE = (ConnectorError, ActuationError, ClickHouseError, aiohttp.ClientError, OSError)


def loaded_in(folder: Path) -> Loaded:
    return Loaded(Config(site="site.yaml", broker="embedded"), folder / "racktwin.yaml")


async def mqtt(port: int, ca: Path, folder: Path) -> None:
    settings = LinkSettings("127.0.0.1", port, username="u", password="secret", tls=True, ca_file=str(ca))
    await MqttLink(settings).run(lambda *_: None, lambda *_: None)


async def etcd(port: int, ca: Path, folder: Path) -> None:
    tls = loaded_in(folder).trust(Tls(ca_file=str(ca)), "leader.tls")
    client = Etcd([f"https://127.0.0.1:{port}"], 30.0, "u", "secret", tls)
    await client.open()
    try:
        await client.call("/v3/kv/range", {})
    finally:
        await client.close()


async def prometheus(port: int, ca: Path, folder: Path) -> None:
    settings = ScrapeSettings(timeout_s=30.0, token="secret", ca_file=str(ca))
    url = f"https://127.0.0.1:{port}/metrics"
    await PrometheusSource(url, "dcgm", site_of(two_racks()), settings).run(RecordingInlet())


async def kubernetes(port: int, ca: Path, folder: Path) -> None:
    tree = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": f"https://127.0.0.1:{port}",
                                               "certificate-authority": str(ca)}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }  # fmt: skip
    (folder / "kubeconfig").write_text(yaml.safe_dump(tree))
    client = KubernetesClient(lambda: from_kubeconfig(folder / "kubeconfig"))
    try:
        await client.post("/api", {})
    finally:
        await client.close()


async def redfish(port: int, ca: Path, folder: Path) -> None:
    part = Redfish(bmcs={}, user="u", password_file="pw", ca_file=str(ca))
    tls = redfish_trust(loaded_in(folder), part, "$.redfish[0]")
    async with aiohttp.ClientSession() as http:
        url = f"https://127.0.0.1:{port}"
        await RedfishClient(url, "u", lambda: "secret", lambda: http, timeout_s=30.0, tls=tls).root()


async def webhook(port: int, ca: Path, folder: Path) -> None:
    (folder / "token").write_text("secret")
    (folder / "token").chmod(0o600)
    url, tls = f"https://127.0.0.1:{port}/alarm", Tls(ca_file=str(ca))
    target = Notify(kind="webhook", url=url, token_file=str(folder / "token"), tls=tls)
    receiver = Receiver(target, loaded_in(folder), "lab", lambda: NS)
    receiver._put("1", {"severity": "critical", "event": {}})
    async with aiohttp.ClientSession() as session:
        await receiver.run(session)


async def influx(port: int, ca: Path, folder: Path) -> None:
    settings = InfluxSettings(ca_file=str(ca))
    writer = InfluxWriter(f"https://127.0.0.1:{port}", "o", "b", "secret", settings)
    sample = rack_sample(site_of(two_racks()), NS, [1.0, 2.0])
    writer.offer(NS, sample.layout, sample.tables)
    writer.start()
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(writer.close, 0.0)


async def clickhouse(port: int, ca: Path, folder: Path) -> None:
    tls = loaded_in(folder).trust(Tls(ca_file=str(ca)), "history.clickhouse.tls")
    link = ClickHouseLink(f"https://127.0.0.1:{port}", "racktwin", Login("u", "secret"), tls, timeout_s=5.0)
    try:
        await asyncio.to_thread(link.ask, "SELECT 1")
    finally:
        link.close()


async def command_line(port: int, ca: Path, folder: Path) -> None:
    client = Client(f"https://127.0.0.1:{port}", "rt_secret", ca_file=str(ca))
    await asyncio.to_thread(client.get, "/whoami")


async def job_over_http(port: int, ca: Path, folder: Path) -> None:
    wire = HttpWire(f"https://127.0.0.1:{port}", "job", lambda: "secret", str(ca))
    await asyncio.to_thread(wire.fetch)


async def job_over_mqtt(port: int, ca: Path, folder: Path) -> None:
    broker = JobBroker(f"mqtts://u@127.0.0.1:{port}", "job", lambda: "secret", str(ca))
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(broker.close)


async def agent(port: int, ca: Path, folder: Path) -> None:
    (folder / "pw").write_text("secret")
    broker = Broker("127.0.0.1", port, "agent", "u", folder / "pw", ca_file=ca)
    will = Out("IT/v1/PUB/Agent/n", b"{}", 1, True)
    link = Link(broker, [], will, lambda *_: None, lambda *_: None)
    link.start()
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(link.stop)


CLIENTS: dict[str, Ask] = {
    "mqtt": mqtt, "etcd": etcd, "prometheus": prometheus, "kubernetes": kubernetes, "redfish": redfish,
    "webhook": webhook, "influx": influx, "clickhouse": clickhouse, "command line": command_line,
    "job over http": job_over_http, "job over mqtt": job_over_mqtt, "agent": agent,
}  # fmt: skip


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Papers]:
    return issue_papers(tmp_path_factory.mktemp("papers"))


async def heard_from(ask: Callable[[], Awaitable[None]], server: TlsServer) -> bytes:
    """Return the first bytes that a client sends to the server, and end the client."""
    asking = asyncio.ensure_future(ask())
    said = await asyncio.to_thread(server.heard)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError, *TROUBLE):
        await asking
    return said


# paho leaves a socket whose handshake failed to the collector of garbage
@pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("shown", ["sound", "expired", "other-host", "wrong-authority"])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_talks_only_to_whom_it_knows(
    papers: dict[str, Papers], tmp_path: Path, name: str, shown: str
) -> None:
    with TlsServer(papers[shown]) as server:
        ask = partial(CLIENTS[name], server.port, papers[shown].trusted, tmp_path)
        said = asyncio.run(heard_from(ask, server))
    assert bool(said) == (shown == "sound")


def test_no_part_of_the_configuration_turns_the_check_off_by_default() -> None:
    """Redfish alone has a switch, for BMCs whose certificates name no host; it is on by default."""
    switches = [
        (kind.__name__, field.name, field.default)
        for kind in (Tls, Redfish, Notify, Config)
        for field in msgspec.structs.fields(kind)
        if "verify" in field.name or "insecure" in field.name
    ]
    assert switches == [("Redfish", "verify", True)]


def test_files_of_the_history_server_are_found_beside_the_configuration(
    papers: dict[str, Papers], tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_bytes(papers["sound"].trusted.read_bytes())
    settings = Influx(url="https://i", tls=Tls(ca_file="ca.pem"))
    config = Config(site="site.yaml", broker="embedded", history=History(influx=settings))
    loaded = Loaded(config, tmp_path / "racktwin.yaml")
    found = _whole_paths(loaded).influx
    assert found is not None
    assert found.tls == Tls(ca_file=str(tmp_path / "ca.pem"))
    (tmp_path / "ca.pem").write_text("none")
    with pytest.raises(ConfigError, match=r"history\.influx\.tls"):
        _whole_paths(loaded)


def test_a_cluster_whose_authority_was_renewed_is_found_again(
    papers: dict[str, Papers], tmp_path: Path
) -> None:
    """The file `ca.crt` of a pod, and that of a kubeconfig, is replaced while the daemon runs."""
    ours, ca = papers["sound"].trusted, tmp_path / "ca.crt"
    ca.write_bytes((ours.parent / ours.name.replace("ours", "stranger")).read_bytes())

    async def story(server: TlsServer) -> None:
        tree = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": f"https://127.0.0.1:{server.port}",
                                                   "certificate-authority": str(ca)}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
        }  # fmt: skip
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(tree))
        client = KubernetesClient(lambda: from_kubeconfig(tmp_path / "kubeconfig"))
        with pytest.raises(ConnectorError, match="not trusted"):
            await client.post("/api", {})
        ca.write_bytes(ours.read_bytes())
        await client.close()  # as its source does where the server does not answer
        assert await client.post("/api", {}) == b"{}"
        await client.close()

    with TlsServer(papers["sound"]) as server:
        asyncio.run(story(server))
