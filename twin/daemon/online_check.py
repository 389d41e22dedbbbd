"""Online check: asks each endpoint of a configuration once, through the daemon's own sources.

It commands and publishes nothing, and touches no state folder. The ledger of sources lists the data that a
daemon would read, and the data that it would not use, with the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlencode

import aiohttp
import msgspec

from connectors.clickhouse import VALUE_COLUMNS
from connectors.http_answer import body_of, failing_as
from connectors.mqtt import LinkSettings, MqttLink, MqttSource, Router, subscriptions
from connectors.orders import SinkContext
from twin.catalogue import ConnectorError
from twin.config import Broker, Loaded, make_engine
from twin.contracts import Source
from twin.daemon.etcd import leader_of, make_etcd
from twin.daemon.ingest import Ingest
from twin.daemon.leader import election_name
from twin.site import Site
from twin.sources import SourceAccount
from twin.telemetry import Message
from twin.wiring import (
    Roster,
    WiringContext,
    link_settings,
    make_actuators,
    make_outlooks,
    make_schedulers,
    make_scrapes,
    routes_of,
)

ANSWER_S = 15.0  # for what is asked
POLL_S = 0.05
LOOK_S = 0.2  # between two looks at a BMC: the first comes within this time
SETTLE_S = 1.0  # in which the rest of an answer comes: a scheduler's nodes after its jobs
MAX_ANSWER = 2**20  # bytes of what is asked over HTTP
ELSEWHERE_S = 3.0  # in which topics beside ours are looked at, where nothing reported on ours
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
        asked: list[Source] = [*make_scrapes(loaded, site), *make_outlooks(loaded), *schedulers.sources]
        work = [self._ask(source) for source in asked]
        broker = loaded.config.broker
        if isinstance(broker, Broker):
            work.append(self._listen(broker, Roster(lambda: engine)))
        if loaded.config.history.influx is not None:
            work.append(_ask_http(_history(loaded)))
        if loaded.config.history.clickhouse is not None:
            work.append(_ask_http(_fleet_history(loaded)))
        unasked = []
        for i, target in enumerate(loaded.config.notify):
            if target.kind == "alertmanager":
                work.append(_ask_http(_receiver(loaded, i)))
            else:
                unasked.append(
                    EndpointAnswer(f"notify[{i}]", True, "not asked: any request would be an alarm")
                )
        if loaded.config.leader.kind == "etcd":
            work.append(_ask_etcd(loaded, election_name(site)))
        return [answer for some in await asyncio.gather(*work) for answer in some] + unasked

    async def _ask(self, source: Source) -> list[EndpointAnswer]:
        """Run a source until each of those it speaks for has answered once."""
        names = getattr(source, "origins", (source.name,))
        accounts = [self.ingest.of(name) for name in names]
        failure = await _run_until(
            lambda: source.run(self.ingest.inlet_of(source)),
            lambda: all(a.messages or a.lines for a in accounts),
            ANSWER_S,
            lambda: all(a.readings for a in accounts),
        )
        return [_verdict(account, failure) for account in accounts]

    async def _listen(self, broker: Broker, roster: Roster) -> list[EndpointAnswer]:
        """Listen to the topics that the daemon would subscribe to."""
        topics, extra = routes_of(self.loaded, broker)
        router = Router(self.site, extra=extra, integration=broker.integration, slot_of=roster.slot_of)
        settings = link_settings(self.loaded)
        client_id = f"{broker.client_id}-check-{os.getpid()}"
        settings = replace(settings, client_id=client_id, persistent=False)
        source = MqttSource(settings, router, broker.integration, topics, is_guest=True)
        failure = await _run_until(
            lambda: source.run(self.ingest.inlet_of(source)), lambda: False, self.listen_s
        )
        name = source.link.where
        if failure:
            return [EndpointAnswer(name, False, failure)]
        accounts = [a for a in self.ledger.listing(0) if a.outside and (a.messages or a.lines)]
        if not accounts:
            wanted = ", ".join(
                topic for topic, _ in subscriptions(broker.integration, topics, router.own_racks[:1])
            )
            elsewhere = await _topics_elsewhere(replace(settings, client_id=f"{client_id}-2"))
            text = f"nothing came in {self.listen_s:g} s on {wanted}; {elsewhere}"
            return [EndpointAnswer(name, False, text)]
        messages, readings = sum(a.messages for a in accounts), sum(a.readings for a in accounts)
        text = (
            f"{messages} messages with {readings} readings of {len(accounts)} sources in {self.listen_s:g} s"
        )
        if not readings:
            text += ": nothing can be used, see below; look longer with --listen"
        return [EndpointAnswer(name, readings > 0, text)]


def _reading_only(loaded: Loaded) -> Loaded:
    """Return the configuration without all parts that command or test."""
    config, changed = loaded.config, msgspec.structs.replace
    jobs, slurm, cluster = config.jobs, config.jobs.slurm, config.kubernetes
    if slurm is not None:
        jobs = changed(jobs, slurm=changed(slurm, command=False))
    config = changed(
        config,
        jobs=jobs,
        kubernetes=changed(cluster, command=False) if cluster is not None else None,
        burn_in=None,
        redfish=[changed(part, command=[], power=False, period_s=LOOK_S) for part in config.redfish],
        dcmi=[changed(part, command=False, power=False, period_s=LOOK_S) for part in config.dcmi],
    )
    return Loaded(config, loaded.path)


async def _run_until(
    run: Callable[[], Awaitable[None]],
    done: Callable[[], bool],
    limit_s: float,
    has_read: Callable[[], bool] = lambda: True,
) -> str:
    """Run a source until it ends or the time is over; return the reason if it ended by itself, else "".

    Where it is done and has read nothing, the rest of its answer has SETTLE_S to come.
    """
    task = asyncio.ensure_future(run())
    end = time.monotonic() + limit_s
    try:
        while not task.done() and not done() and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        settled = time.monotonic() + SETTLE_S
        while not task.done() and not has_read() and time.monotonic() < settled:
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
        return EndpointAnswer(account.name, True, "answers; it has nothing to report just now")
    return EndpointAnswer(account.name, False, why or f"no answer within {ANSWER_S:g} s")


async def _topics_elsewhere(settings: LinkSettings) -> str:
    """Return a text on other topics of the broker, if the broker allows to read them."""
    found: dict[str, int] = {}

    def take(message: Message) -> None:
        stem = "/".join(message.topic.split("/")[:2])
        if stem in found or len(found) < 100:
            found[stem] = found.get(stem, 0) + 1

    link = MqttLink(settings, (("#", 0),))
    await _run_until(lambda: link.run(take, lambda *_: None), lambda: False, ELSEWHERE_S)
    if not found:
        return "check that the publishers run, and that the broker's ACL lets this user read them"
    most = sorted(found, key=lambda stem: -found[stem])[:SHOWN_TOPICS]
    stems = ", ".join(f"{stem}/..." for stem in most)
    return f"it carries {stems}: is the prefix right, or is one of these for `broker.topics`?"


@dataclass(frozen=True)
class _Question:
    """One request over HTTP. `answers`: status -> what it means; those below 300 are well."""

    name: str
    url: str
    method: str = "GET"
    headers: dict[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    answers: dict[int, str] = field(default_factory=dict)


async def _ask_http(question: _Question) -> list[EndpointAnswer]:
    shown = re.sub(r"//[^/@]*@", "//", question.url)  # without a password
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    tls = True if question.tls is None else question.tls
    try:
        with failing_as(ConnectorError, shown, ANSWER_S):
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
                session.request(
                    question.method, question.url, headers=question.headers, ssl=tls, allow_redirects=False
                ) as answer,
            ):
                text, status = await body_of(answer, shown, MAX_ANSWER, ConnectorError), answer.status
    except ConnectorError as error:
        return [EndpointAnswer(question.name, False, str(error))]
    is_well = status < 300 or (status == 400 and b"requires points" in text)  # InfluxDB on an empty write
    means = "" if is_well else "; " + question.answers.get(status, "expected 200 or 204: is it that server?")
    if is_well and text.lstrip()[:1] == b"<":
        is_well, means = False, " with what is a page of HTML: is it that server?"
    return [EndpointAnswer(question.name, is_well, f"{shown}: answers {status}{means}")]


def _history(loaded: Loaded) -> _Question:
    """Check token, organisation and bucket by an empty write."""
    influx = loaded.config.history.influx
    assert influx is not None
    token = loaded.secret(influx.token_file)
    names = urlencode({"org": influx.org, "bucket": influx.bucket, "precision": "ns"})
    refused = "expected the token of a user who may write there, in `history.influx.token_file`"
    return _Question(
        "history.influx",
        f"{influx.url.rstrip('/')}/api/v2/write?{names}",
        "POST",
        {"Authorization": f"Token {token}"} if token else {},
        answers={
            401: refused,
            403: refused,
            404: f"expected the bucket {influx.bucket!r} of {influx.org!r} at an InfluxDB 2: check `url`, "
            "`org` and `bucket`",
            405: "expected an InfluxDB 2 or a VictoriaMetrics: check `url`",
        },
    )


def _fleet_history(loaded: Loaded) -> _Question:
    """Check user, database and tables by an empty insert."""
    settings = loaded.config.history.clickhouse
    assert settings is not None
    password = loaded.secret(settings.password_file)
    login = {"X-ClickHouse-User": settings.username or "", "X-ClickHouse-Key": password or ""}
    sql = f"INSERT INTO {settings.database}.value ({', '.join(VALUE_COLUMNS)}) FORMAT JSONEachRow"
    trust = loaded.trust(settings.tls, "history.clickhouse.tls") if settings.tls is not None else None
    refused = "expected the user and password of `history.clickhouse`, and the rights that `--schema` names"
    return _Question(
        "history.clickhouse",
        f"{settings.url.rstrip('/')}/?{urlencode({'query': sql})}",
        "POST",
        {name: value for name, value in login.items() if value},
        trust,
        {
            401: refused,
            403: refused,
            404: "expected the tables that `racktwin fleet history --schema` prints",
            500: "the server failed: its log says why",
        },
    )


def _receiver(loaded: Loaded, i: int) -> _Question:
    target = loaded.config.notify[i]
    token = loaded.secret(target.token_file)
    tls = loaded.trust(target.tls, f"notify[{i}].tls") if target.tls is not None else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{target.url.rstrip('/')}/-/ready"
    refused = f"expected its token in `notify[{i}].token_file`"
    return _Question(f"notify[{i}]", url, headers=headers, tls=tls, answers={401: refused, 403: refused})


async def _ask_etcd(loaded: Loaded, site: str) -> list[EndpointAnswer]:
    """Read the key of the election, which needs a cluster with a leader and read permission."""
    etcd = make_etcd(loaded)
    await etcd.open()
    try:
        leader = await leader_of(etcd, site)
        leads = f"{leader} leads" if leader else "nobody leads yet"
        return [EndpointAnswer("leader.etcd", True, f"{etcd.endpoint}: {leads}")]
    except ConnectorError as error:
        return [EndpointAnswer("leader.etcd", False, str(error))]
    finally:
        with contextlib.suppress(ConnectorError):
            await etcd.close()
