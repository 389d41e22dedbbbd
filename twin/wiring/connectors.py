"""Links: the MQTT link, sources and sinks of one site, made from a configuration."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence

from connectors.agents import BmsSink, MqttSink, presence_of
from connectors.dsx import PUB_METADATA, PUB_VALUE, STEM, FlexDecoder
from connectors.jobs import REPORT, FolderSink, FolderSource, JobBook, JobSink, ReportFolder
from connectors.mqtt import MqttSource, Presence, Router, TopicRoute, extra_route
from connectors.prometheus import PrometheusSource
from connectors.series import Sums
from connectors.series_map import load_map
from twin.catalogue import ActuationError, ConfigError
from twin.config import Broker, Loaded, Scrape, Tls
from twin.contracts import Item, Sink, Source
from twin.site import Site
from twin.telemetry import Ignored, Message
from twin.wiring.grid import flex_topics
from twin.wiring.job_advice import Roster
from twin.wiring.mqtt import link_settings

SYSTEM = (f"{PUB_METADATA}System/", f"{PUB_VALUE}System/")
BEAT_S = 1.0  # between looks whether a heartbeat is due
PLACES_TICKS = 10.0  # a report that was read so many ticks ago is in the trace


class Links:
    """The connection to the broker, and the sinks that publish over it, which they do only while `may_act`.

    `role` says (role, epoch) of us; `roster` knows the jobs that are advised; `flex` decodes DSX Flex.
    """

    def __init__(
        self,
        loaded: Loaded,
        site: Site,
        port: int | None,
        name: str,
        role: Callable[[], tuple[str, int]],
        may_act: Callable[[], bool],
        roster: Roster,
        flex: FlexDecoder | None = None,
    ) -> None:
        broker = loaded.config.broker
        options = broker if isinstance(broker, Broker) else Broker(host="")
        settings = link_settings(loaded, port)
        settings = dataclasses.replace(settings, client_id=_client_id(loaded, settings.client_id, name))
        try:
            extra = [
                _route(loaded, options, topic) for topic in dict.fromkeys((*options.topics, *options.maps))
            ]
        except ConfigError as error:
            raise ConfigError(f"{loaded.path}: $.broker.topics: {error}") from None
        integration, client_id = options.integration, settings.client_id
        router = _Hearing(
            site, extra=extra, ours=(integration,), integration=integration, slot_of=roster.slot_of
        )
        router.load()
        router.hears_jobs, router.flex = loaded.config.jobs.mqtt, flex
        topic, offline = presence_of(integration, client_id, "offline", "unknown", 0, 0)

        def online() -> bytes:
            now, epoch = role()
            return presence_of(integration, client_id, "online", now, epoch, time.time_ns())[1]

        presence = Presence(topic, online, offline)
        topics = tuple(dict.fromkeys((*options.topics, *options.maps, *flex_topics(loaded))))
        self.source = MqttSource(settings, router, integration, topics, presence)

        async def command(topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> None:
            if not may_act():  # asked for each publication: a large batch takes its time
                raise ActuationError("another daemon leads by now")
            await self.source.link.publish(topic, payload, qos, retain)

        self.agents = MqttSink(site, integration, command)
        self.bms = BmsSink(site, router.bms, integration, command)
        router.pulse = self.bms.hear
        self.integration, self.router = integration, router
        self.to_jobs: list[JobSink | FolderSink] = []
        if loaded.config.jobs.mqtt:
            self.to_jobs.append(JobSink(integration, command, _book(roster)))
        if loaded.config.jobs.folder is not None:
            self.to_jobs.append(FolderSink(loaded.file(loaded.config.jobs.folder), _book(roster)))

    @property
    def sinks(self) -> Sequence[Sink]:
        """Sinks of commands."""
        return self.agents, self.bms, *self.to_jobs

    async def beat(self, leads: Callable[[], bool]) -> None:
        """The heartbeat that the BMS expects of its integration, from the daemon that leads."""
        while True:
            await asyncio.sleep(BEAT_S)
            if not (leads() and self.source.link.connected):
                continue
            try:
                await self.bms.beat(time.time_ns())
            except ActuationError:
                continue  # the link's own alarm says why


def _client_id(loaded: Loaded, client_id: str, name: str) -> str:
    """Two daemons of one site must not put each other off the broker, nor share a session."""
    if loaded.config.leader.kind == "etcd" or loaded.config.leader.name:
        return f"{client_id}-{name}"
    if not isinstance(loaded.config.broker, Broker) or client_id != Broker(host="").client_id:
        return client_id
    folder = str(loaded.state.resolve()).encode()
    return f"{client_id}-{hashlib.blake2b(folder, digest_size=4).hexdigest()}"


def _book(roster: Roster) -> JobBook:
    return JobBook(roster.job_of, roster.held())


class _Hearing(Router):
    """A router that shows the BMS's own heartbeats to the sink that answers them, and may be deaf to jobs.

    What the grid's side sets is for `flex`, where the configuration asks for it.
    """

    pulse: Callable[[Message], Ignored | None] | None = None
    flex: FlexDecoder | None = None
    hears_jobs = True

    def decode(self, message: Message) -> Sequence[Item] | Ignored:
        """As a router does."""
        if not self.hears_jobs and message.topic.startswith(REPORT):
            return Ignored("Job", "jobs.mqtt is off")
        if self.pulse is not None and message.topic.startswith(SYSTEM):
            heard = self.pulse(message)
            return () if heard is None else heard
        if self.flex is not None and message.topic.startswith(STEM):
            return self.flex.decode(message)
        return super().decode(message)


def _route(loaded: Loaded, broker: Broker, topic: str) -> TopicRoute:
    """A topic of the configuration; a mapping that is a file lies beside it."""
    mapping = broker.maps.get(topic)
    if mapping is not None and (own := loaded.file(mapping)).is_file():
        mapping = str(own)
    return extra_route(topic, mapping)


def make_scrapes(loaded: Loaded, site: Site) -> list[Source]:
    """The exporters that are scraped. Raises ConfigError for a mapping that is none."""
    sums = Sums()  # a counter may be the sum of what several exporters show
    return [_scrape(loaded, site, n, s, sums) for n, s in enumerate(loaded.config.scrapes)]


def _scrape(loaded: Loaded, site: Site, number: int, scrape: Scrape, sums: Sums) -> Source:
    tls = scrape.tls or Tls()

    def path(name: str | None) -> str | None:
        return None if name is None else str(loaded.file(name))

    return PrometheusSource(
        f"scrape-{number}",
        scrape.url,
        load_map(scrape.map, loaded.path.parent)[0],
        site,
        period_s=scrape.period_s,
        timeout_s=scrape.timeout_s,
        place=scrape.place,
        token=loaded.secret(scrape.token_file),
        ca_file=path(tls.ca_file),
        cert_file=path(tls.cert_file),
        key_file=path(tls.key_file),
        sums=sums,
    )


def make_jobs(loaded: Loaded, roster: Roster) -> list[Source]:
    """Sources of jobs beside MQTT. `roster`: the jobs that the twin takes to run."""
    config = loaded.config
    if config.jobs.folder is None:
        return []
    places = ReportFolder(loaded.state / "job-reports.json", PLACES_TICKS * config.tick_s)
    return [FolderSource(loaded.file(config.jobs.folder), roster.slots, places, config.jobs.look_s)]
