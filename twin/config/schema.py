"""Configuration: the schema of the daemon's YAML file; parsing it, and rejecting a faulty one.

`deploy/config/*.yaml` are examples. Secrets are never in it: it names files (or systemd credentials) that
hold them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from connectors.clickhouse import database_problem
from connectors.slurm import expand_hosts
from twin.catalogue import ConfigError, clean, did_you_mean
from twin.config.actuators import Dcmi, Redfish, actuator_problems
from twin.config.engine import read_yaml
from twin.config.fleet import FleetSettings, fleet_problems
from twin.config.logs import conceal
from twin.config.outlooks import OutlookService, outlook_problems
from twin.config.power import Power, power_problems
from twin.config.schedulers import BurnIn, Kubernetes, Slurm, scheduler_problems
from twin.config.section import HOST_LIST, Problems, Strict, path_under, texts_of
from twin.site import convert

log = logging.getLogger(__name__)
_LOCAL = re.compile(r"//(127\.0\.0\.1|\[::1\])(?=[:/]|$)")
_OWN_TREES = ("BMS/", "IT/")  # subscribed to anyway
TLS_PORT = 8883
MIN_TICK_S, MAX_TICK_S = 0.1, 300.0
MAX_CONTACT = 200  # characters
MAX_KEEP_DAYS = 10_000  # beyond 2106 an instant of ClickHouse begins anew, and all would be out of date
# Keys that hold the path of a file or a folder, beside those that end in _file or _files
PATHS = ("site", "state", "folder", "conf", "kubeconfig", "map", "maps", "program")


class _Strict(Strict, msgspec.Struct, frozen=True):
    pass


class Tls(_Strict, frozen=True):
    """Files in PEM; `cert_file` with `key_file` make a client (or server) identity."""

    ca_file: str | None = None  # certificate authorities to trust; default: those of the host
    cert_file: str | None = None  # our certificate, with its chain
    key_file: str | None = None  # its key


class Broker(_Strict, frozen=True):
    """The MQTT broker. `topics` are subscriptions beside the DSX and IT trees, such as `telegraf/#`
    (Influx line protocol); `maps` gives some of them a mapping table of their own: a packaged name or a file.

    `integration` is our name in request topics; the broker lets nobody else publish there.
    """

    host: str  # name or address
    port: int = 1883  # 8883 is usual with TLS
    client_id: str = "racktwin"  # one of its own for every daemon
    username: str | None = None  # the broker lets nobody else publish on */racktwin/*
    password_file: str | None = None  # with `username`
    tls: Tls | None = None  # without it nothing is encrypted
    keepalive_s: float = 15.0  # between signs of life on a quiet connection
    topics: list[str] = []  # subscriptions beside the DSX (BMS/v1) and IT (IT/v1) trees: ["telegraf/#"]
    maps: dict[str, str] = {}  # mapping table of a topic, a packaged one or a file: {"telegraf/#": telegraf}
    integration: str = "racktwin"  # our name in request topics
    queue_messages: int = 5_000  # what waits beyond is dropped, and counted
    queue_bytes: int = 64 * 2**20  # room for messages that wait
    max_message_bytes: int = 4 * 2**20  # a larger message is dropped, and counted


class Scrape(_Strict, frozen=True):
    """Prometheus exporters: one, or with a host list in `url` one for each host, such as
    `http://node[01-18]:9400/metrics`. `map` names a mapping table: a packaged one (see `map`) or a file.

    `place` is the entity that all its series belong to, if the labels do not say: a list as long as that of
    the hosts; without it, the node of the host's name.
    """

    url: str  # "http://node1:9400/metrics"; a host list stands for one exporter each: node[01-18]
    # dcgm, node, ascend, neuron, optics, ufm, dpu, storage, weka, vast, vllm, sglang, triton, dynamo, a file
    map: str
    period_s: float = 15.0  # between two scrapes
    timeout_s: float = 5.0  # of one scrape
    # entity of all its series where labels do not say, or a list as long (of a DPU: NODE#dpu1); default: the
    # node of that name
    place: str | None = None
    token_file: str | None = None  # sent as a bearer's token
    tls: Tls | None = None  # with an https URL


def targets_of(scrape: Scrape, where: str) -> list[tuple[str, str | None]]:
    """(URL, place or None) of each exporter that a section stands for. Raises ConfigError."""
    scheme, _, rest = scrape.url.partition("://")
    host, slash, path = rest.partition("/")
    if not HOST_LIST.search(host):
        return [(scrape.url, scrape.place)]
    try:
        hosts = expand_hosts(host)
        places = expand_hosts(scrape.place) if scrape.place is not None else []
    except ValueError as error:
        raise ConfigError(f"$.{where}: {error}") from None
    if places and len(places) != len(hosts):
        raise ConfigError(f"$.{where}: {len(hosts)} hosts for {len(places)} places; expected as many")
    urls = [f"{scheme}://{h}{slash}{path}" for h in hosts]
    return [(url, places[i] if places else None) for i, url in enumerate(urls)]


def _scrape_problems(scrapes: Sequence[Scrape]) -> list[str]:
    out = Problems()
    known: dict[tuple[str, str], str] = {}
    for i, scrape in enumerate(scrapes):
        out.http(f"scrapes[{i}].url", scrape.url)
        out.within(f"scrapes[{i}].period_s", scrape.period_s, 0.5, 3600)
        out.within(f"scrapes[{i}].timeout_s", scrape.timeout_s, 0.1, 60)
        try:
            targets = targets_of(scrape, f"scrapes[{i}].url")
        except ConfigError as error:
            out += error.problems
            continue
        for given, _ in targets:
            url = re.sub(r"//[^/@]*@", "//", given)  # sources are named without a password
            same = _LOCAL.sub("//localhost", url)
            other = known.setdefault((same, scrape.map), f"$.scrapes[{i}]")
            if other != f"$.scrapes[{i}]":
                out.append(
                    f"$.scrapes[{i}].url: {other} scrapes {url[:80]} with map {scrape.map[:40]} already; "
                    "expected each exporter once"
                )
    return out[:20]


class Jobs(_Strict, frozen=True):
    """Sources of jobs. `mqtt`: job events on the IT tree. With none, jobs are unknown.

    `mqtt` and `folder` are also how jobs report their checkpoints and receive advice; HTTP always is. The
    folder is shared with the jobs, and looked at every `look_s`.
    """

    mqtt: bool = True  # job events on the IT tree; reports of checkpoints, and advice
    slurm: Slurm | None = None  # needs squeue, sinfo and scontrol on this host; docs/schedulers.md
    folder: str | None = None  # reports and advice by a folder that is shared with jobs
    look_s: float = 5.0  # between looks at the folder


class Influx(_Strict, frozen=True):
    """An InfluxDB 2 (or VictoriaMetrics) that history is sent to as well."""

    url: str  # "https://influx.example.net:8086"
    org: str = "racktwin"  # organisation in InfluxDB 2
    bucket: str = "racktwin"  # bucket in InfluxDB 2
    token_file: str | None = None  # file with a token of the server
    tls: Tls | None = None  # with an https URL
    buffer_points: int = 1_000_000  # kept while the server is away; the oldest go first
    resend_s: float = 60.0  # what was acknowledged this recently is sent again after the server restarted


class ClickHouse(_Strict, frozen=True):
    """A ClickHouse that keeps the history of all halls: this daemon's values and journal are sent there, and
    `racktwin fleet history` asks it. `*_days` are what the tables keep, as `--schema` prints them.
    """

    url: str  # "https://clickhouse.example.net:8443", of its HTTP interface
    database: str = "racktwin"  # made by what `racktwin fleet history --schema` prints
    username: str | None = None  # user of the server
    password_file: str | None = None  # with `username`
    tls: Tls | None = None  # with an https URL
    site: str | None = None  # name of our site there; default: as the site file says
    hall: str | None = None  # name of our hall there; default: `fleet.hall`, else the site's
    buffer_mb: int = 256  # of values, kept while the server is away; the oldest go first
    values_days: float = 30.0  # values as they came
    minutes_days: float = 365.0  # mean, least, most and last of each minute
    hours_days: float = 3650.0  # of each hour
    journal_days: float = 3650.0  # findings, commands and decisions


class History(_Strict, frozen=True):
    """The embedded store: a sample of everything each `every_s`, kept `keep_days` within `quota_mb`."""

    embedded: bool = True  # the store built in, below the state folder
    every_s: float = 10.0  # between two samples
    keep_days: float = 30.0  # the oldest go first
    quota_mb: int = 20_000  # of the store built in
    # tables whose expected values and bands are kept beside; `gpu` about doubles the file
    expected: list[Literal["rack", "node", "gpu", "cdu", "loop", "feeder"]] = msgspec.field(
        default_factory=lambda: ["rack", "cdu", "loop", "feeder"]
    )
    influx: Influx | None = None  # sent there as well (InfluxDB 2, VictoriaMetrics)
    clickhouse: ClickHouse | None = None  # sent there as well, for the history of a fleet; docs/fleet.md


class Api(_Strict, frozen=True):
    """The HTTP interface; beyond loopback it needs TLS. `tokens_file` holds hashes, see `racktwin token`."""

    host: str = "127.0.0.1"  # beyond loopback: `tls` and `tokens_file` as well
    port: int = 8077  # 0 is a free one, written to state/api.url
    tls: Tls | None = None  # certificate of the page; with `ca_file`, clients need one too
    # made by `racktwin token add`; default: one administrator in the state folder
    tokens_file: str | None = None
    max_clients: int = 512  # connections at the same time; half of them may be streams of the page


class Notify(_Strict, frozen=True):
    """Receivers of alarms: an Alertmanager (`/api/v2/alerts` under this URL) or a webhook (POST)."""

    kind: Literal["alertmanager", "webhook"]  # alertmanager posts to /api/v2/alerts below the URL
    url: str  # "http://alertmanager.example.net:9093"
    min_severity: Literal["info", "warning", "critical"] = "warning"  # alarms below it are not sent
    token_file: str | None = None  # sent as a bearer's token
    tls: Tls | None = None  # with an https URL


class Leader(_Strict, frozen=True):
    """Election of the one daemon that may act: a lock on this host, or etcd."""

    # of several daemons for one site, one acts: on one host, or by etcd
    kind: Literal["host", "etcd"] = "host"
    endpoints: list[str] = []  # URLs of etcd: [https://etcd1:2379]
    name: str = ""  # of this daemon; default: the host's
    term_s: float = 6.0  # a leader that is gone is followed after this
    username: str | None = None  # account at etcd
    password_file: str | None = None  # file with its password
    tls: Tls | None = None  # of etcd


class Journal(_Strict, frozen=True):
    """Signed heads of the journal, one a minute, by which `racktwin journal verify` proves it."""

    sign_key_file: str | None = None  # the private key that signs them: `racktwin journal key` makes it
    anchor: list[Literal["mqtt", "etcd"]] = []  # where they are kept outside too; etcd is that of `leader`


class Quotas(_Strict, frozen=True):
    """Disk per kind of file; the oldest go first. Windows around findings and commands are pinned."""

    trace_hours: float = 48.0  # what the engine received, for replay
    trace_mb: int = 50_000  # of the trace
    pinned_mb: int = 10_000  # of the trace around findings and commands, which is kept longer
    journal_mb: int = 10_000  # of all decisions
    journal_segment_mb: int = 64  # of one file of the journal
    journal_reserve_mb: int = 16  # kept free for the last words on a full disk
    snapshots: int = 3  # most that are kept


class Config(_Strict, frozen=True):
    """The configuration of `racktwin daemon run`. Relative paths are relative to the file's folder."""

    site: str  # the site file
    broker: Broker | Literal["embedded"]  # `embedded` is one on loopback without identities, to try it out
    state: str | None = None  # default: $STATE_DIRECTORY, else `state` beside the file
    tick_s: float = 1.0  # above 10: raise WatchdogSec= of the unit to three ticks
    snapshot_every_s: float = 600.0  # a restart ticks through the trace since the last
    embedded_port: int = 0  # of the embedded broker; 0 is a free one
    scrapes: list[Scrape] = []  # Prometheus exporters
    jobs: Jobs = Jobs()  # what runs where
    kubernetes: Kubernetes | None = None  # jobs and nodes of a cluster; docs/schedulers.md
    burn_in: BurnIn | None = None  # the test that a node must pass before it returns; docs/schedulers.md
    power: Power | None = None  # demands from outside on what is drawn; docs/load-targets.md
    outlooks: list[OutlookService] = []  # services of prices, carbon and weather; docs/forecasts.md
    fleet: FleetSettings | None = None  # the fleet that it belongs to, as a hall or as the hub; docs/fleet.md
    redfish: list[Redfish] = []  # power limits by BMCs, for nodes without an agent; docs/bmc.md
    dcmi: list[Dcmi] = []  # node limits by IPMI DCMI; needs ipmitool on this host; docs/bmc.md
    history: History = History()  # samples of everything, for graphs
    api: Api | None = Api()  # the page and the HTTP interface; null: none
    notify: list[Notify] = []  # receivers of alarms
    leader: Leader = Leader()  # which daemon may act; docs/high-availability.md
    journal: Journal = Journal()  # signed heads, which prove it; docs/journal.md
    quotas: Quotas = Quotas()  # of the disk; the oldest go first
    contact: str = ""  # whom readers of the page may ask: a name, a channel, a number
    simulated: bool = False  # the site is a simulated pod: `act` is allowed over the embedded broker


@dataclass(frozen=True)
class Loaded:
    """A configuration and where it came from."""

    config: Config
    path: Path

    def file(self, name: str) -> Path:
        """A path that the configuration names; `credential:NAME` is one of systemd. Raises ConfigError."""
        folder = self.path.parent
        if name.startswith("credential:"):
            given, name = os.environ.get("CREDENTIALS_DIRECTORY"), name.partition(":")[2]
            if not given:
                why = "expected systemd's CREDENTIALS_DIRECTORY to be set"
                raise ConfigError(f"{self.path}: credential:{clean(name)}: {why}")
            folder = Path(given)
        try:
            return path_under(folder, name)
        except ValueError as error:
            raise ConfigError(f"{self.path}: {clean(name)}: the path {error}") from None

    @property
    def site_file(self) -> Path:
        """The site file itself, as its profiles stand beside it and not beside a link to it."""
        return self.file(self.config.site).resolve()

    @property
    def state(self) -> Path:
        """The folder that holds trace, journal, snapshots and history."""
        if self.config.state is not None:
            return self.file(self.config.state)
        given = os.environ.get("STATE_DIRECTORY")
        return Path(given.split(":")[0]) if given else self.path.parent / "state"

    @property
    def token_file(self) -> Path:
        """The file of the administrator's token that a daemon without a tokens file makes."""
        return self.state / "admin.token"

    def trust(self, tls: Tls, where: str) -> ssl.SSLContext:
        """A client's side of TLS. Raises ConfigError for files that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=str(self.file(tls.ca_file)) if tls.ca_file else None)
            if tls.cert_file:
                key = str(self.file(tls.key_file)) if tls.key_file else None
                context.load_cert_chain(str(self.file(tls.cert_file)), key)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path}: $.{where}: a file cannot be used: {error}; expected PEM"
            ) from error
        return context

    def secret(self, name: str | None) -> str | None:
        """The text of a file that holds a secret. Raises ConfigError; never quotes what it read."""
        if name is None:
            return None
        path = self.file(name)
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            hint = "; expected a file: variables of the environment are not put in" if "$" in name else ""
            raise ConfigError(f"{path}: the secret cannot be read: {why}{hint}") from error
        if not text:
            raise ConfigError(f"{path}: is empty; expected a secret")
        conceal(text)
        warn_exposed(path)
        return text


def warn_exposed(path: Path) -> None:
    """Say so where everybody on this host can read or change a file that holds a secret."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o007:
            log.warning(
                "%s: mode %o lets every user of this host reach the secret; expected 600 (chmod 600)",
                path,
                mode,
            )


def load_config(path: Path) -> Loaded:
    """The configuration of a file. Raises ConfigError with every fault of its form and of its numbers."""
    tree = read_yaml(path)
    if isinstance(tree, dict) and "halls" in tree:
        raise ConfigError(
            f"{path}: is a site file, which says what stands where; expected the daemon's configuration, "
            "which names it: `site: site.yaml`"
        )
    if isinstance(tree, dict) and isinstance(tree.get("site"), dict):
        raise ConfigError(f"{path}: $.site: expected the path of a site file, got the site itself")
    if tree is None:
        raise ConfigError(
            f"{path}: is empty; expected the daemon's configuration, `site` and `broker` at least"
        )
    config = _convert(tree, str(path))
    loaded = Loaded(config, path.resolve())
    problems = [f"{path}: {p}" for p in (*_problems(config), *_text_problems(loaded))]
    if problems:
        raise ConfigError(problems)
    return loaded


def _convert(tree: Any, file: str) -> Config:
    """`convert` speaks of one kind at a time; a broker is a word or a mapping. Raises ConfigError with the
    faults of the broker and of the rest.
    """
    problems, broker = list[str](), Broker("")
    own = isinstance(tree, dict) and tree.get("broker") != "embedded"
    if own:
        try:
            broker = _broker(tree, file)
        except ConfigError as error:
            problems += error.problems
        tree = {**tree, "broker": "embedded"}
    try:
        config = convert(Config, tree, file)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return msgspec.structs.replace(config, broker=broker) if own else config


def _broker(tree: dict[str, Any], file: str) -> Broker:
    """The broker of a configuration that is not the embedded one. Raises ConfigError."""
    if "broker" not in tree:
        raise ConfigError(
            f"{file}: $.broker: missing; expected `broker: {{host: NAME, ...}}` for a broker of yours, or "
            "`broker: embedded` for one on loopback that racktwin brings up itself"
        )
    if isinstance(tree["broker"], dict):
        return convert_at(Broker, tree["broker"], file, "$.broker")
    hint = "; nothing stands there: check the indentation below it" if tree["broker"] is None else ""
    raise ConfigError(f"{file}: $.broker: expected a mapping with `host`, or `embedded`{hint}")


def convert_at(kind: type[Broker], tree: Any, file: str, at: str) -> Broker:
    """`convert` for a part of a file; the faults name their place in the whole."""
    try:
        return convert(kind, tree, file)
    except ConfigError as error:
        raise ConfigError([p.replace("$", at, 1) for p in error.problems]) from None


def _problems(config: Config) -> list[str]:
    """Errors beyond the types."""
    out = Problems()
    out.within("tick_s", config.tick_s, MIN_TICK_S, MAX_TICK_S)
    out.within("embedded_port", config.embedded_port, 0, 65_535)
    out.within("snapshot_every_s", config.snapshot_every_s, 1, 86_400)
    if len(config.contact) > MAX_CONTACT or not config.contact.isprintable():
        out.append(f"$.contact: expected a line of at most {MAX_CONTACT} characters")
    if isinstance(config.broker, Broker):
        out.within("broker.port", config.broker.port, 1, 65_535)
        out.within("broker.keepalive_s", config.broker.keepalive_s, 2, 3600)
        out.within("broker.queue_messages", config.broker.queue_messages, 10, 10_000_000)
        out.within("broker.queue_bytes", config.broker.queue_bytes, 2**16, 2**34)
        out.within("broker.max_message_bytes", config.broker.max_message_bytes, 1024, 256 * 2**20)
        if config.broker.queue_bytes < config.broker.max_message_bytes:
            out.append("$.broker.queue_bytes: expected room for one message of max_message_bytes at least")
        out += _broker_problems(config.broker)
        if set("+#/") & set(config.broker.integration) or not config.broker.integration:
            out.append(
                f"$.broker.integration: expected a level of a topic, without + # /, got "
                f"{config.broker.integration!r}"
            )
    out += _scrape_problems(config.scrapes)
    out += scheduler_problems(config.jobs.slurm, config.kubernetes, config.burn_in)
    out += power_problems(config.power)
    out += outlook_problems(config.outlooks, list(config.power.outlooks_files) if config.power else [])
    out += fleet_problems(config.fleet)
    out += actuator_problems(config.redfish, config.dcmi)
    out.within("jobs.look_s", config.jobs.look_s, 0.1, 600)
    out.within("history.every_s", config.history.every_s, 0.1, 3600)
    out.within("history.quota_mb", config.history.quota_mb, 10, 10_000_000)
    out.within("history.keep_days", config.history.keep_days, 0.01, 3660)
    if config.history.influx is not None:
        out.http("history.influx.url", config.history.influx.url)
    if config.history.clickhouse is not None:
        _clickhouse_problems(config.history.clickhouse, out)
    if config.api is not None:
        out.within("api.port", config.api.port, 0, 65_535)
        out.within("api.max_clients", config.api.max_clients, 4, 10_000)
        local = config.api.host in ("127.0.0.1", "::1", "localhost")
        if not local and (config.api.tls is None or config.api.tokens_file is None):
            out.append(
                f"$.api.host: {config.api.host} is reachable from outside; expected `tls` with cert_file and "
                "key_file and a `tokens_file` as well, or 127.0.0.1"
            )
    for i, target in enumerate(config.notify):
        out.http(f"notify[{i}].url", target.url)
    if config.leader.kind == "etcd" and not config.leader.endpoints:
        out.append("$.leader.endpoints: expected at least one URL of etcd, such as https://etcd1:2379")
    for i, endpoint in enumerate(config.leader.endpoints):
        out.http(f"leader.endpoints[{i}]", endpoint)
    out.within("leader.term_s", config.leader.term_s, 2, 60)
    if config.journal.anchor and config.journal.sign_key_file is None:
        out.append(
            "$.journal.sign_key_file: missing; expected the key that signs what `anchor` keeps outside"
        )
    if "etcd" in config.journal.anchor and not config.leader.endpoints:
        out.append("$.journal.anchor: etcd, but $.leader.endpoints names none; expected its URLs there")
    if "mqtt" in config.journal.anchor and config.broker == "embedded":
        out.append(
            "$.journal.anchor: mqtt, but the embedded broker keeps nothing; expected a broker of yours"
        )
    out.within("quotas.journal_segment_mb", config.quotas.journal_segment_mb, 1, 4096)
    out.within("quotas.snapshots", config.quotas.snapshots, 1, 100)
    out.within("quotas.trace_hours", config.quotas.trace_hours, 0.01, 10_000)
    return out


def _clickhouse_problems(settings: ClickHouse, out: Problems) -> None:
    """Note errors in the section of ClickHouse."""
    out.http("history.clickhouse.url", settings.url)
    if "@" in settings.url or "?" in settings.url:
        out.append("$.history.clickhouse.url: expected https://HOST:PORT without user and options: the "
                   "user is `username`, the database `database`")  # fmt: skip
    if why := database_problem(settings.database):
        out.append(f"$.history.clickhouse.database: {why}")
    if settings.password_file is not None and settings.username is None:
        out.append(
            "$.history.clickhouse.username: missing; expected the user whose password `password_file` holds"
        )
    if (
        settings.password_file is not None
        and settings.url.startswith("http://")
        and not _LOCAL.search(settings.url)
    ):
        out.append(
            "$.history.clickhouse.url: http:// would show the password to the network; expected https://"
        )
    for name in ("site", "hall"):
        text = getattr(settings, name)
        if text is not None and not (0 < len(text) <= 200 and text.isprintable()):
            out.append(f"$.history.clickhouse.{name}: expected a line of 1 to 200 characters")
    out.within("history.clickhouse.buffer_mb", settings.buffer_mb, 1, 1_000_000)
    for name in ("values_days", "minutes_days", "hours_days", "journal_days"):
        out.within(f"history.clickhouse.{name}", getattr(settings, name), 0.05, MAX_KEEP_DAYS)


def journal_notes(config: Config) -> list[str]:
    """Places outside that could keep signed heads, and do not."""
    settings = config.journal
    has = {"mqtt": isinstance(config.broker, Broker), "etcd": bool(config.leader.endpoints)}
    unused = [place for place, is_there in has.items() if is_there and place not in settings.anchor]
    if settings.sign_key_file is None or not (unused or not settings.anchor):
        return []
    alone = "" if settings.anchor else "signed heads of the journal are kept beside it alone; "
    could = f"{' and '.join(unused)} could keep them too" if unused else "no broker or etcd could keep them"
    return [f"journal.anchor: {alone}{could}"]


def _text_problems(loaded: Loaded) -> list[str]:
    """Errors in what is written, whatever it says: NUL bytes, and paths that no file can have."""
    out = []
    for where, key, text in texts_of(loaded.config):
        if "\0" in text:
            out.append(f"{clean(where)}: holds a NUL byte; expected text")
        elif key in PATHS or key.endswith(("_file", "_files")):
            try:
                path_under(loaded.path.parent, text.removeprefix("credential:"))
            except ValueError as error:
                out.append(f"{clean(where)}: the path {error}")
    return out


def _broker_problems(broker: Broker) -> list[str]:
    """Errors in where the broker is, who we are there, and what is subscribed to."""
    out = []
    host = broker.host
    if not host or "/" in host or host.count(":") == 1 or host != host.strip():
        out.append(
            f"$.broker.host: expected a name or an address alone, got {host[:80]!r}; the port is `port`, "
            "TLS is `tls`"
        )
    if not broker.client_id:
        out.append("$.broker.client_id: is empty; expected a name of one's own for every daemon")
    for topic in broker.maps:
        if topic not in broker.topics:
            near = did_you_mean(topic, broker.topics) or "; expected each as it stands in `topics`"
            out.append(f"$.broker.maps: {topic[:80]!r} is none of `topics`{near}")
    if broker.password_file is not None and broker.username is None:
        out.append("$.broker.username: missing; expected the user whose password `password_file` holds")
    for i, topic in enumerate(broker.topics):
        if topic.startswith(_OWN_TREES) or topic == "#":
            out.append(
                f"$.broker.topics[{i}]: {topic[:80]!r} overlaps BMS/v1 or IT/v1, which come anyway; "
                "expected topics beside them"
            )
        elif topic in broker.topics[:i]:
            out.append(f"$.broker.topics[{i}]: {topic[:80]!r} is there twice; expected each topic once")
    return out


def broker_notes(broker: Broker | Literal["embedded"]) -> list[str]:
    """Notes on the broker for the operator."""
    if isinstance(broker, Broker) and broker.port == TLS_PORT and broker.tls is None:
        return ["broker.port is 8883, where brokers speak TLS, without `tls`; expected `tls: {}` or 1883"]
    return []


def differs(old: Config, new: Config, *names: str) -> bool:
    """True if any of these sections changed."""
    return any(getattr(old, name) != getattr(new, name) for name in names)
