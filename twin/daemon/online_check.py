"""Online check: each endpoint of a configuration is asked once, by the daemon's own sources.

Commands and publishes nothing, and touches no state folder. The ledger says what would be read, and what
of it not and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import aiohttp
import msgspec

from connectors.mqtt import LinkSettings, MqttLink, MqttSource, Router, subscriptions
from connectors.orders import SinkContext
from twin.catalogue import ConnectorError
from twin.config import Broker, Loaded, make_engine
from twin.contracts import Source
from twin.daemon.etcd import make_etcd
from twin.daemon.ingest import Ingest
from twin.daemon.source_account import SourceAccount
from twin.site import Site
from twin.telemetry import Message
from twin.wiring import (
    Roster,
    WiringContext,
    link_settings,
    make_actuators,
    make_schedulers,
    make_scrapes,
    routes_of,
)

ANSWER_S = 15.0  # for what is asked
POLL_S = 0.05
ELSEWHERE_S = 3.0  # in which topics beside ours are looked at, where nothing was heard on ours
SHOWN_TOPICS = 6


@dataclass(frozen=True)
class EndpointAnswer:
    """The answer of one endpoint: whether it can be used, and why not or what it brought."""

    name: str
    is_ok: bool
    text: str


class OnlineCheck:
    """Asks all endpoints at once. `listen_s`: how long the broker is listened to. `ledger` has what came."""

    def __init__(self, loaded: Loaded, site: Site, listen_s: float = 10.0) -> None:
        self.loaded, self.site, self.listen_s = _reading_only(loaded), site, listen_s
        self.ingest = Ingest(site, {}, loaded.config.tick_s)
        self.ledger = self.ingest.ledger

    async def run(self) -> list[EndpointAnswer]:
        """Ask, and wait for all answers. Raises ConfigError for a configuration that is wrong."""
        loaded, site = self.loaded, self.site
        engine = make_engine(site, {})
        context = WiringContext(loaded, site, lambda: engine, SinkContext(self.ingest.stage, lambda: False))
        schedulers = make_schedulers(context)
        make_actuators(context, schedulers)
        work = [self._ask(source) for source in (*make_scrapes(loaded, site), *schedulers.sources)]
        broker = loaded.config.broker
        if isinstance(broker, Broker):
            work.append(self._listen(broker, Roster(lambda: engine)))
        influx, leader = loaded.config.history.influx, loaded.config.leader
        if influx is not None:
            work.append(_ask_http("history.influx", f"{influx.url.rstrip('/')}/ping"))
        for i, target in enumerate(loaded.config.notify):
            if target.kind == "alertmanager":
                work.append(_ask_http(f"notify[{i}]", f"{target.url.rstrip('/')}/-/ready"))
        if leader.kind == "etcd":
            work.append(_ask_etcd(loaded))
        return [answer for some in await asyncio.gather(*work) for answer in some]

    async def _ask(self, source: Source) -> list[EndpointAnswer]:
        """Run a source until each of those it speaks for has answered once."""
        names = getattr(source, "origins", (source.name,))
        accounts = [self.ingest.of(name) for name in names]
        failure = await _run_until(
            lambda: source.run(self.ingest.of(source.name)),
            lambda: all(a.messages or a.lines for a in accounts),
            ANSWER_S,
        )
        return [_verdict(account, failure) for account in accounts]

    async def _listen(self, broker: Broker, roster: Roster) -> list[EndpointAnswer]:
        """Hear what comes on the topics that the daemon would subscribe to."""
        topics, extra = routes_of(self.loaded, broker)
        router = Router(self.site, extra=extra, integration=broker.integration, slot_of=roster.slot_of)
        settings = link_settings(self.loaded)
        client_id = f"{broker.client_id}-check-{os.getpid()}"
        settings = replace(settings, client_id=client_id, persistent=False)
        source = MqttSource(settings, router, broker.integration, topics, is_guest=True)
        failure = await _run_until(lambda: source.run(self.ingest.of("mqtt")), lambda: False, self.listen_s)
        name = source.link.where
        if failure:
            return [EndpointAnswer(name, False, failure)]
        heard = [a for a in self.ledger.listing(0) if a.outside and (a.messages or a.lines)]
        if not heard:
            wanted = ", ".join(topic for topic, _ in subscriptions(broker.integration, topics))
            elsewhere = await _topics_elsewhere(replace(settings, client_id=f"{client_id}-2"))
            text = f"nothing came in {self.listen_s:g} s on {wanted}; {elsewhere}"
            return [EndpointAnswer(name, False, text)]
        messages, readings = sum(a.messages for a in heard), sum(a.readings for a in heard)
        text = f"{messages} messages with {readings} readings of {len(heard)} sources in {self.listen_s:g} s"
        if not readings:
            text += ": nothing can be used, see below; look longer with --listen"
        return [EndpointAnswer(name, readings > 0, text)]


def _reading_only(loaded: Loaded) -> Loaded:
    """The same configuration without anything that commands or tests."""
    config, changed = loaded.config, msgspec.structs.replace
    jobs, slurm, cluster = config.jobs, config.jobs.slurm, config.kubernetes
    if slurm is not None:
        jobs = changed(jobs, slurm=changed(slurm, command=False))
    config = changed(
        config,
        jobs=jobs,
        kubernetes=changed(cluster, command=False) if cluster is not None else None,
        burn_in=None,
        redfish=[changed(part, command=[], period_s=1.0) for part in config.redfish],
        dcmi=[changed(part, command=False, period_s=1.0) for part in config.dcmi],
    )
    return Loaded(config, loaded.path)


async def _run_until(run: Callable[[], Awaitable[None]], done: Callable[[], bool], limit_s: float) -> str:
    """Run a source until it is done or the time is over; why it ended by itself, or an empty text."""
    task = asyncio.ensure_future(run())
    end = time.monotonic() + limit_s
    try:
        while not task.done() and not done() and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        if not task.done():
            return ""
        error = task.exception()
        return str(error) if isinstance(error, ConnectorError) else f"{type(error).__name__}: {error}"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _verdict(account: SourceAccount, failure: str) -> EndpointAnswer:
    if account.readings:
        return EndpointAnswer(account.name, True, f"{account.readings} readings")
    bad = [line for line in account.lines.values() if line.remedy]
    why = f"{bad[-1].why}; {bad[-1].remedy}" if bad else failure
    if not why and account.messages:
        return EndpointAnswer(account.name, True, "answers; it has nothing to tell just now")
    return EndpointAnswer(account.name, False, why or f"no answer within {ANSWER_S:g} s")


async def _topics_elsewhere(settings: LinkSettings) -> str:
    """Text on what else the broker carries, where it lets us look."""
    found: dict[str, int] = {}

    def take(message: Message) -> None:
        stem = "/".join(message.topic.split("/")[:2])
        if stem in found or len(found) < 100:
            found[stem] = found.get(stem, 0) + 1

    link = MqttLink(settings, (("#", 0),))
    await _run_until(lambda: link.run(take, lambda *_: None), lambda: False, ELSEWHERE_S)
    if not found:
        return "look whether the publishers run, and whether the broker's ACL lets this user read them"
    most = sorted(found, key=lambda stem: -found[stem])[:SHOWN_TOPICS]
    stems = ", ".join(f"{stem}/..." for stem in most)
    return f"it carries {stems}: is the prefix right, or is one of these for `broker.topics`?"


async def _ask_http(name: str, url: str) -> list[EndpointAnswer]:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S), trust_env=False) as session,
            session.get(url, allow_redirects=False) as answer,
        ):
            text = f"{url}: answers {answer.status}"
            if answer.status < 400:
                return [EndpointAnswer(name, True, text)]
            return [EndpointAnswer(name, False, f"{text}; expected 200 or 204: is it that server?")]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return [EndpointAnswer(name, False, f"{url}: {str(error)[:200] or 'no answer'}; is it running?")]


async def _ask_etcd(loaded: Loaded) -> list[EndpointAnswer]:
    etcd = make_etcd(loaded)
    await etcd.open()
    try:
        answer = await etcd.call("/v3/maintenance/status", {})
        return [EndpointAnswer("leader.etcd", True, f"{etcd.endpoint}: version {answer.get('version', '?')}")]
    except ConnectorError as error:
        return [EndpointAnswer("leader.etcd", False, str(error))]
    finally:
        with contextlib.suppress(ConnectorError):
            await etcd.close()
