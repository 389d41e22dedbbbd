"""Links: the MQTT link of one site with the sources and sinks on it, made from a configuration."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from connectors.agents import BmsSink, MqttSink, presence_of
from connectors.dsx import STEM, SYSTEM_METADATA, SYSTEM_VALUE, TOPIC, FlexDecoder
from connectors.gauge_parts import FRESH_S
from connectors.jobs import REPORT, FolderSink, FolderSource, JobBook, JobSink, ReportFolder
from connectors.mqtt import LinkSettings, MqttSource, Presence, Router, TopicRoute, extra_route
from connectors.prometheus import PrometheusSource, ScrapeSettings
from connectors.series import SeriesTable, Sums
from connectors.series_map import SeriesMap, load_map
from connectors.slurm import expand_names, find_node
from twin.catalogue import TABLES, ActuationError, ConfigError
from twin.config import Broker, Loaded, Scrape, Tls, targets_of, warn_exposed
from twin.contracts import Sink, Source
from twin.site import Site
from twin.telemetry import Ignored
from twin.wiring.embedded_broker import HOST
from twin.wiring.job_advice import Roster

BEAT_S = 1.0  # between looks whether a heartbeat is due
PLACES_TICKS = 10.0  # a report that was read so many ticks ago is in the trace


@dataclass(frozen=True)
class Member:
    """This daemon among those of its site: its name, its (role, epoch), and whether it may act now."""

    name: str
    role: Callable[[], tuple[str, int]]
    may_act: Callable[[], bool]


class Links:
    """The connection to the broker, and the sinks that publish over it while the `member` may act.

    `roster` knows the jobs that are advised; `flex` decodes DSX Flex.
    """

    def __init__(
        self,
        loaded: Loaded,
        site: Site,
        port: int | None,
        member: Member,
        roster: Roster,
        flex: FlexDecoder | None = None,
    ) -> None:
        broker, jobs = loaded.config.broker, loaded.config.jobs
        options = broker if isinstance(broker, Broker) else Broker(host="")
        settings = link_settings(loaded, port)
        settings = replace(settings, client_id=client_id_of(loaded, settings.client_id, member.name))
        integration = self.integration = options.integration
        topics, extra = routes_of(loaded, options)
        self.router = Router(
            site, extra=extra, ours=(integration,), integration=integration, slot_of=roster.slot_of
        )
        self.router.load()
        if flex is not None:
            self.router.attach(STEM, flex.decode)
            topics = (*topics, TOPIC)
        presence = _presence(integration, settings.client_id, member)
        self.source = MqttSource(settings, self.router, integration, topics, presence)
        publish = self.source.publisher(member.may_act)
        self.agents = MqttSink(site, integration, publish)
        self.bms = BmsSink(site, self.router.bms, integration, publish)
        for prefix in (SYSTEM_METADATA, SYSTEM_VALUE):
            self.router.attach(prefix, self.bms.pulse.receive)
        self.to_jobs: list[JobSink | FolderSink] = []
        if jobs.mqtt:
            self.to_jobs.append(JobSink(integration, publish, _book(roster)))
        else:
            self.router.attach(REPORT, lambda _: Ignored("Job", "jobs.mqtt is off"))
        if jobs.folder is not None:
            self.to_jobs.append(FolderSink(loaded.file(jobs.folder), _book(roster)))

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


def _presence(integration: str, client_id: str, member: Member) -> Presence:
    def online() -> bytes:
        role, epoch = member.role()
        return presence_of(integration, client_id, "online", role, epoch, time.time_ns())[1]

    topic, offline = presence_of(integration, client_id, "offline", "unknown", 0, 0)
    return Presence(topic, online, offline)


def client_id_of(loaded: Loaded, client_id: str, name: str) -> str:
    """Two daemons of one site must not put each other off the broker, nor share a session."""
    if loaded.config.leader.kind == "etcd" or loaded.config.leader.name:
        return f"{client_id}-{name}"
    if not isinstance(loaded.config.broker, Broker) or client_id != Broker(host="").client_id:
        return client_id
    folder = str(loaded.state.resolve()).encode()
    return f"{client_id}-{hashlib.blake2b(folder, digest_size=4).hexdigest()}"


def _book(roster: Roster) -> JobBook:
    return JobBook(roster.job_of, roster.leases())


def routes_of(loaded: Loaded, broker: Broker) -> tuple[tuple[str, ...], list[TopicRoute]]:
    """(topics that the configuration adds, their routes). Raises ConfigError."""
    topics = tuple(dict.fromkeys((*broker.topics, *broker.maps)))
    try:
        return topics, [_route(loaded, broker, topic) for topic in topics]
    except ConfigError as error:
        raise ConfigError(f"{loaded.path}: $.broker.topics: {error}") from None


def _route(loaded: Loaded, broker: Broker, topic: str) -> TopicRoute:
    """A topic of the configuration; a mapping that is a file lies beside it."""
    mapping = broker.maps.get(topic)
    if mapping is not None and (own := loaded.file(mapping)).is_file():
        mapping = str(own)
    return extra_route(topic, mapping)


def make_scrapes(loaded: Loaded, site: Site) -> list[PrometheusSource]:
    """The exporters that are scraped. Raises ConfigError for a mapping that is none."""
    if faults := telemetry_faults(loaded, site):
        raise ConfigError(faults)
    # what several exporters show may be parts of one counter or gauge
    sums = Sums(max([FRESH_S, *(3.0 * part.period_s for part in loaded.config.scrapes)]))
    scrapes = enumerate(loaded.config.scrapes)
    sources = [source for number, part in scrapes for source in _scrape(loaded, site, number, part, sums)]
    times = Counter(source.name for source in sources)
    for source in sources:
        if times[source.name] > 1:  # one exporter, read by two mappings
            source.name += f" ({source.map.removesuffix('.yaml')})"
    return sources


def telemetry_faults(loaded: Loaded, site: Site) -> list[str]:
    """Mappings that cannot be used, and places of exporters that the site does not have."""
    out: list[str] = []
    for where, mapping, file in _mappings(loaded):
        try:
            SeriesTable(mapping, site, file)
        except ConfigError as error:
            out += [f"{loaded.path}: {where}: {problem}" for problem in error.problems]
    for i, scrape in enumerate(loaded.config.scrapes):
        for _, place in targets_of(scrape, f"scrapes[{i}].url"):
            if place is not None and all(site.entity(table, place) is None for table in TABLES):
                out.append(
                    f"{loaded.path}: $.scrapes[{i}].place: the site has no {place[:80]!r}; expected a path"
                )
    return out[:20]


def telemetry_notes(loaded: Loaded, site: Site) -> list[str]:
    """Notes on names in mappings that stand for nothing of the site."""
    out = []
    for where, mapping, file in _mappings(loaded):
        names = expand_names(mapping.names, f"{file}: $.names")
        strange = [
            (k, v)
            for k, v in names.items()
            if all(site.entity(t, v) is None for t in TABLES) and not site.is_elsewhere(v)
        ]
        if strange:
            outside, place = strange[0]
            out.append(
                f"{where}: {file}: $.names: the site has no {place[:80]!r}, that {outside[:60]!r} means, "
                f"and {len(strange) - 1} more; expected full paths"
            )
    return out


def _mappings(loaded: Loaded) -> list[tuple[str, SeriesMap, str]]:
    """(place in the configuration, mapping, its file) of each one named there. Raises ConfigError."""
    broker = loaded.config.broker
    named = [(f"$.scrapes[{i}].map", scrape.map) for i, scrape in enumerate(loaded.config.scrapes)]
    if isinstance(broker, Broker):
        named += [(f"$.broker.maps.{topic}", name) for topic, name in broker.maps.items()]
    return [(where, *load_map(name, loaded.path.parent)) for where, name in dict(named).items()]


def _scrape(loaded: Loaded, site: Site, number: int, scrape: Scrape, sums: Sums) -> list[PrometheusSource]:
    """A source for each exporter of a section."""
    tls = scrape.tls or Tls()

    def path(name: str | None) -> str | None:
        return None if name is None else str(loaded.file(name))

    settings = ScrapeSettings(
        period_s=scrape.period_s,
        timeout_s=scrape.timeout_s,
        token=loaded.secret(scrape.token_file),
        renewed=lambda: loaded.secret(scrape.token_file),
        ca_file=path(tls.ca_file),
        cert_file=path(tls.cert_file),
        key_file=path(tls.key_file),
    )
    mapping, file = load_map(scrape.map, loaded.path.parent)
    targets, out = targets_of(scrape, f"scrapes[{number}].url"), list[PrometheusSource]()
    for url, given in targets:
        host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
        place = given if given is not None else _node_of(site, host)
        own = replace(settings, place=place)
        out.append(PrometheusSource(url, (mapping, file), site, own, sums))
    return out


def _node_of(site: Site, host: str) -> str | None:
    """The full path of the node that a host and its port mean; None for none."""
    node = find_node(site, host.rpartition(":")[0] or host)
    return None if node is None else site.name("node", node)


def make_jobs(loaded: Loaded, roster: Roster) -> list[Source]:
    """Sources of jobs beside MQTT. `roster`: the jobs that the twin takes to run."""
    config = loaded.config
    if config.jobs.folder is None:
        return []
    places = ReportFolder(loaded.state / "job-reports.json", PLACES_TICKS * config.tick_s)
    return [FolderSource(loaded.file(config.jobs.folder), roster.slots, places, config.jobs.look_s)]


def link_settings(loaded: Loaded, embedded_port: int | None = None) -> LinkSettings:
    """Settings of the configured broker. Raises ConfigError for a file that is absent; quotes no secret.

    `embedded_port` is that of the embedded broker, where the configuration asks for it.
    """
    broker = loaded.config.broker
    if not isinstance(broker, Broker):
        if embedded_port is None:
            raise ConfigError(
                f"{loaded.path}: $.broker: the embedded broker is part of a running daemon; expected its port"
            )
        return LinkSettings(HOST, embedded_port)
    tls = broker.tls
    files = {} if tls is None else _tls_files(loaded, tls)
    return LinkSettings(
        host=broker.host,
        port=broker.port,
        client_id=broker.client_id,
        username=broker.username,
        password=loaded.secret(broker.password_file),
        tls=tls is not None,
        ca_file=files.get("ca_file"),
        cert_file=files.get("cert_file"),
        key_file=files.get("key_file"),
        keepalive_s=broker.keepalive_s,
        queue_messages=broker.queue_messages,
        queue_bytes=broker.queue_bytes,
        max_message_bytes=broker.max_message_bytes,
    )


def _tls_files(loaded: Loaded, tls: Tls) -> dict[str, str | None]:
    """Absolute paths of the files, which must be readable. Raises ConfigError with all that are not."""
    if (tls.cert_file is None) != (tls.key_file is None):
        raise ConfigError(f"{loaded.path}: $.broker.tls: expected cert_file and key_file, or neither")
    paths: dict[str, str | None] = {}
    problems: list[str] = []
    for key in ("ca_file", "cert_file", "key_file"):
        name = getattr(tls, key)
        path: Path | None = None if name is None else loaded.file(name)
        if path is not None and not os.access(path, os.R_OK):
            problems.append(f"{loaded.path}: $.broker.tls.{key}: {path}: cannot be read")
        paths[key] = None if path is None else str(path)
        if key == "key_file" and path is not None:
            warn_exposed(path)
    if problems:
        raise ConfigError(problems)
    return paths
