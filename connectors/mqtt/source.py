"""MQTT source: decodes the messages of a link by topic, stages them, and only then acknowledges them.

`CORE` and `COMMON` are routes of every site; a configuration adds its own between them, such as `plant/#` for
line protocol. A replay of a capture uses the same `Router`. A message that cannot be decoded is counted under
its source and never stops the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from connectors.agents import ItDecoder, Publish, ResultDecoder
from connectors.dsx import BmsDecoder, Described
from connectors.influx import LineDecoder
from connectors.jobs import REPORT, JobDecoder
from connectors.mqtt.lane import Lane, RefusalCount
from connectors.mqtt.origin import origin_of
from connectors.series import SeriesFaults, remedy_of
from connectors.series_map import load_map
from connectors.sparkplug import SparkplugDecoder, rebirth
from twin.catalogue import ActuationError, BadMessage, ConfigError, ConnectorError
from twin.contracts import Decoder, Inlet, Item
from twin.site import Site
from twin.telemetry import OWN_MESSAGE, Ignored, Message

if TYPE_CHECKING:
    from connectors.mqtt.link import LinkSettings, Presence

Form = Literal["bms", "it", "answer", "job", "line", "sparkplug", "own"]
Decode = Callable[[Message], Sequence[Item] | Ignored]
MAX_TOPIC_BYTES = 65_535
CHECK_EVERY_S = 1.0
FLOODED = "job reports"  # the source under which refusals of the lane are counted
MAX_JOB_CHARS = 80  # of a job's name in a line
REBIRTH_EVERY_S, MAX_NODES = 60.0, 10_000
SPARKPLUG = "spBv1.0/"
# Topics of the IT side below IT/v1/PUB: those of a rack go on with its path
OF_RACK, OF_SITE = ("Frame", "Event", "Agent"), ("Event/jobs", "Event/outlooks", "Job")


class TopicRoute(NamedTuple):
    """Form of the topics that match `topic` (an MQTT filter); `map` is for line protocol and Sparkplug."""

    topic: str
    form: Form
    map: str = ""  # a packaged mapping or a path


CORE = (
    TopicRoute("BMS/v1/#", "bms"),
    TopicRoute("IT/v1/PUB/Agent/#", "answer"),
    TopicRoute("IT/v1/PUB/Job/#", "job"),
    TopicRoute("IT/v1/PUB/#", "it"),
    TopicRoute("IT/v1/+/Result/#", "answer"),
    TopicRoute("IT/v1/#", "own"),  # requests, contingency caps, advice and presence of daemons, canaries
)
COMMON = (TopicRoute("spBv1.0/#", "sparkplug", "sparkplug"), TopicRoute("telegraf/#", "line", "telegraf"))


def matcher(topic_filter: str) -> Callable[[str], bool]:
    """Return a predicate that matches topics with an MQTT filter. Raises ConfigError for an invalid
    filter."""
    levels = topic_filter.split("/")
    if (
        not 0 < len(topic_filter.encode()) <= MAX_TOPIC_BYTES
        or any(set("+#\0") & set(level) and level not in ("+", "#") for level in levels)
        or "#" in levels[:-1]
    ):
        raise ConfigError(
            f"topic {topic_filter[:80]!r}: expected an MQTT filter: + is a whole level, # the last one"
        )
    if "+" not in levels:
        if levels[-1] != "#":
            return partial(str.__eq__, topic_filter)
        if len(levels) == 1:
            return lambda topic: not topic.startswith("$")
        stem = topic_filter[:-1]
        return lambda topic: topic.startswith(stem) or topic == stem[:-1]
    return partial(_matches, levels)


def _matches(levels: list[str], topic: str) -> bool:
    parts = topic.split("/")
    if topic.startswith("$") and levels[0] in ("+", "#"):
        return False
    open_ended = levels[-1] == "#"
    fixed = levels[:-1] if open_ended else levels
    if len(parts) < len(fixed) or (not open_ended and len(parts) != len(fixed)):
        return False
    return all(level in ("+", part) for level, part in zip(fixed, parts, strict=False))


def extra_route(topic_filter: str, mapping: str | None = None) -> TopicRoute:
    """Return the route of a topic that a configuration adds: Sparkplug under its own name, otherwise line
    protocol.

    `mapping` is a packaged mapping or a file's path; without it the packaged one of that form.
    """
    matcher(topic_filter)
    form: Form = "sparkplug" if topic_filter.startswith(SPARKPLUG) else "line"
    return TopicRoute(topic_filter, form, mapping or ("sparkplug" if form == "sparkplug" else "telegraf"))


class Router:
    """Decodes any message of a site. Decoders are created with their first message.

    `ours` are the integrations in whose name we may publish BMS requests; `integration` is our name in topics
    of requests and results (None: results of any); `extra` are routes of the configuration; `slot_of` says in
    which slot a job runs (see `JobDecoder`).
    """

    def __init__(
        self,
        site: Site,
        *,
        extra: Sequence[TopicRoute] = (),
        ours: Collection[str] = (),
        integration: str | None = None,
        slot_of: Callable[[str], int | None] | None = None,
    ) -> None:
        self.site, self.ours, self.integration, self._slot_of = site, tuple(ours), integration, slot_of
        self._routes = [(matcher(r.topic), r.form, r.map) for r in (*CORE, *extra, *COMMON)]
        self._decoders: dict[tuple[Form, str], Decoder] = {}
        self._inner: list[SeriesFaults] = []  # of the decoders that read messages in part
        self._strange: list[SeriesFaults] = []
        self._noted: set[str] = set()
        self._attached: list[tuple[str, Decode]] = []

    @property
    def own_racks(self) -> list[str]:
        """Return the full paths of the racks with individual subscriptions: those of a part of a site."""
        return [n for n in self.site.names["rack"] if "+" not in n] if self.site.elsewhere else []

    def attach(self, prefix: str, decode: Decode) -> None:
        """Pass messages on topics that begin with `prefix` to `decode`, before all routes."""
        self._attached.append((prefix, decode))

    def decode(self, message: Message) -> Sequence[Item] | Ignored:
        """Decode a message, or return the reason that it is not for us. Raises BadMessage for nonsense."""
        topic = message.topic
        for prefix, decode in self._attached:
            if topic.startswith(prefix):
                return decode(message)
        for fits, form, mapping in self._routes:
            if fits(topic):
                if form == "own":
                    return Ignored(OWN_MESSAGE, "a request, a canary or the presence of a daemon")
                decoder = self._decoders.get((form, mapping)) or self.decoder(form, mapping)
                return decoder.decode(message)
        return Ignored("topic", "no route: neither BMS/v1/, IT/v1/ nor a topic of the configuration")

    def take(self, every: Inlet, message: Message) -> Literal["decoded", "ignored", "bad"]:
        """Decode a message and stage its items, under the source of its topic; returns the outcome."""
        topic = message.topic[:200]
        try:
            items = self.decode(message)
        except BadMessage as error:
            every.of(origin_of(topic), outside=True).reject(topic, str(error))
            return "bad"
        except Exception as error:  # a message must not be able to stop all others
            why = f"its decoder failed: {type(error).__name__}: {error}"
            every.of(origin_of(topic), outside=True).reject(topic, why)
            return "bad"
        if isinstance(items, Ignored) and items.what == OWN_MESSAGE:  # a daemon is no source of telemetry
            return "ignored"
        inlet = every.of(origin_of(topic), outside=True)
        if isinstance(items, Ignored):
            inlet.skip(items.what, items.why, topic, items.remedy)
        elif items:
            inlet.stage(items, message.t_ns)
        for why, count in self.faults():
            inlet.reject(topic, why if count == 1 else f"{why} ({count} times)")
        for why, _ in self.strangers():
            inlet.skip("name", why, topic, remedy_of(why))
        return "ignored" if isinstance(items, Ignored) else "decoded"

    def decoder(self, form: Form, mapping: str = "") -> Decoder:
        """Return the decoder of a form and mapping, always the same. Raises ConfigError for an invalid
        mapping."""
        decoder = self._decoders.get((form, mapping))
        if decoder is None:
            decoder = self._decoders[form, mapping] = self._make(form, mapping)
            self._gather_faults()
        return decoder

    def load(self) -> None:
        """Create the decoders of all mappings now. Raises ConfigError for an invalid mapping file."""
        for _, form, mapping in self._routes:
            if mapping:
                self.decoder(form, mapping)

    @property
    def bms(self) -> BmsDecoder:
        """Return the decoder of the BMS tree, which also encodes requests to it."""
        return cast(BmsDecoder, self.decoder("bms"))

    @property
    def answers(self) -> ResultDecoder:
        """Return the decoder of agents' answers; its `epoch` may be set."""
        return cast(ResultDecoder, self.decoder("answer"))

    @property
    def reports(self) -> JobDecoder:
        """Return the decoder of job reports, with its counts."""
        return cast(JobDecoder, self.decoder("job"))

    def _gather_faults(self) -> None:
        in_parts = [
            d for d in self._decoders.values() if isinstance(d, LineDecoder | SparkplugDecoder | ItDecoder)
        ]
        self._inner, self._strange = [d.faults for d in in_parts], [d.strangers for d in in_parts]

    def faults(self) -> list[tuple[str, int]]:
        """Return the faults inside messages that were otherwise decoded, with their numbers, since the
        last call."""
        return [fault for inner in self._inner if inner.kinds for fault in inner.take()]

    def strangers(self) -> list[tuple[str, int]]:
        """Return names outside the site in messages that were partly decoded, since the last call."""
        return [named for strange in self._strange if strange.kinds for named in strange.take()]

    def notes(self) -> list[str]:
        """Return notes on ambiguous metadata of the BMS, each once."""
        bms = self._decoders.get(("bms", ""))
        new = [text for text in bms.notes if text not in self._noted] if isinstance(bms, BmsDecoder) else []
        self._noted.update(new)
        return new

    def described(self) -> list[Described]:
        """Return the metadata of all points of the BMS."""
        bms = self._decoders.get(("bms", ""))
        return bms.described() if isinstance(bms, BmsDecoder) else []

    def unplaced(self) -> dict[str, int]:
        """Return the paths of agents outside the site, with the GPUs in a frame of each."""
        agents = self._decoders.get(("it", ""))
        return dict(agents.unplaced) if isinstance(agents, ItDecoder) else {}

    def wanted_births(self) -> list[str]:
        """Return topics of Sparkplug nodes that must announce themselves again, since the last call."""
        out: list[str] = []
        for decoder in self._decoders.values():
            if isinstance(decoder, SparkplugDecoder):
                out += decoder.wants_rebirth
                decoder.wants_rebirth.clear()
        return out

    def _make(self, form: Form, mapping: str) -> Decoder:
        if form == "bms":
            halls = self.site.names["hall"]
            others = {"/".join(n.split("/")[:2]) for n in self.site.elsewhere if n.count("/") > 1}
            default = halls[0].rpartition("/")[2] if len(others.union(halls)) == 1 else None
            elsewhere = self.site.is_elsewhere
            return BmsDecoder(self.site, ours=self.ours, default_hall=default, elsewhere=elsewhere)
        if form == "it":
            return ItDecoder(self.site, self.site.is_elsewhere)
        if form == "answer":
            return ResultDecoder(self.site, self.integration)
        if form == "job":
            return JobDecoder(self._slot_of)
        series, file = load_map(mapping)
        if form == "line":
            return LineDecoder(self.site, series, file)
        return SparkplugDecoder(self.site, series, file)


def subscriptions(
    integration: str, topics: Sequence[str] = (), racks: Sequence[str] = ()
) -> tuple[tuple[str, int], ...]:
    """Return the subscriptions of a daemon: the BMS, the IT side, the answers to its requests, and
    `topics`.

    With `racks`, full paths of a part of a site: of the IT side what they publish, and what is of no rack.

    Each at QoS 1, so that a publisher's own QoS decides: frames come at 0, metadata and events at 1. They
    do not overlap, for a broker may deliver twice what matches two of them.
    """
    it = ["IT/v1/PUB/#"]
    if racks:
        it = [f"IT/v1/PUB/{kind}/{rack}/#" for rack in racks for kind in OF_RACK]
        it += [f"IT/v1/PUB/{kind}/#" for kind in OF_SITE]
    own = ("BMS/v1/#", *it, f"IT/v1/{integration}/Result/#")
    return tuple((topic, 1) for topic in dict.fromkeys((*own, *topics)))


def flood_of(refused: RefusalCount) -> str:
    """Return a line on a flood: its rate, the number dropped, and the job that sent most."""
    rate, job = refused.number / refused.within_s, refused.topic[len(REPORT) :][:MAX_JOB_CHARS]
    job = "".join(c if c.isprintable() else "?" for c in job)
    text = f"{rate:,.0f}/s over the limit, {refused.number:,} dropped, "
    return f"{text}{refused.of_topic:,} of them from job {job}; check its client"


def canary_topic(integration: str, client_id: str) -> str:
    """Return the topic on which a client publishes to itself to test the broker."""
    level = "".join("_" if c in "+#/" else c for c in client_id)
    return f"IT/v1/{integration}/Canary/{level}"


class MqttSource:
    """Stages the messages of one broker; `link` and `publisher` also publish. A guest only listens."""

    name = "mqtt"
    origins = ()  # topics name the sources

    def __init__(
        self,
        settings: LinkSettings,
        router: Router,
        integration: str = "racktwin",
        topics: Sequence[str] = (),
        presence: Presence | None = None,
        is_guest: bool = False,
    ) -> None:
        from connectors.mqtt.link import MqttLink  # a replay routes messages and needs no client library

        self.router, self.lane, self._is_guest = router, Lane(REPORT), is_guest
        self.link = MqttLink(
            settings,
            subscriptions(integration, topics, router.own_racks),
            presence,
            None if is_guest else canary_topic(integration, settings.client_id),
            self.lane,
        )

    def publisher(self, may_act: Callable[[], bool]) -> Publish:
        """Publish over the link while `may_act`; raises ActuationError once another daemon leads."""

        async def publish(topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> None:
            if not may_act():  # for each publication, as a large batch takes its time
                raise ActuationError("another daemon leads now")
            await self.link.publish(topic, payload, qos, retain, may_act)

        return publish

    async def run(self, inlet: Inlet) -> None:
        """Maintain the link until cancelled. Raises ConnectorError when it is down."""
        checks = asyncio.ensure_future(self._check(inlet))
        try:
            await self.link.run(
                partial(self.router.take, inlet), lambda *lost: inlet.of(self.link.where).drop(*lost)
            )
        finally:
            checks.cancel()

    async def _check(self, inlet: Inlet) -> None:
        """Report floods and faults of the link, and request missed births of Sparkplug nodes."""
        requested_s: dict[str, float] = {}
        fault = ""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if (refused := self.lane.take_refusals(time.time_ns())) is not None:
                inlet.of(FLOODED).drop(FLOODED, flood_of(refused), refused.number)
            for text in self.router.notes():
                inlet.of("bms metadata").skip(text[:80], text, remedy="correct the metadata in the BMS")
            if self.link.fault and not fault:
                inlet.of(self.link.where).reject(self.link.where, self.link.fault)
            fault = self.link.fault
            now = time.monotonic()
            for topic in () if self._is_guest else self.router.wanted_births():
                last_s = requested_s.get(topic, -REBIRTH_EVERY_S)
                if now - last_s >= REBIRTH_EVERY_S and len(requested_s) < MAX_NODES:
                    requested_s[topic] = now
                    with contextlib.suppress(ConnectorError):
                        await self.link.publish(topic, rebirth(time.time_ns() // 10**6))
