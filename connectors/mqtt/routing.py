"""Routes: a table of topic filters, each with its decoder; live and in a replay of a capture alike.

`CORE` and `COMMON` are routes of every site; a configuration adds its own between them, such as `plant/#` for
line protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal, NamedTuple, cast

from connectors.agents import ItDecoder, ResultDecoder
from connectors.dsx import BmsDecoder
from connectors.influx import LineDecoder
from connectors.jobs import JobDecoder
from connectors.series_map import load_map
from connectors.sparkplug import SparkplugDecoder
from twin.catalogue import ConfigError
from twin.contracts import Decoder, Item
from twin.site import Site
from twin.telemetry import Ignored, Message

Form = Literal["bms", "it", "answer", "job", "line", "sparkplug", "own"]
MAX_TOPIC_BYTES = 65_535
SPARKPLUG = "spBv1.0/"


class TopicRoute(NamedTuple):
    """Topics that match `topic` (an MQTT filter) have this form; `map` is for line protocol and Sparkplug."""

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
    """A function that tells if a topic matches an MQTT filter. Raises ConfigError for what is no filter."""
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
    """The route of a topic that a configuration adds: Sparkplug under its own name, else line protocol.

    `mapping` is a packaged mapping or a file's path; without it the packaged one of that form.
    """
    matcher(topic_filter)
    form: Form = "sparkplug" if topic_filter.startswith(SPARKPLUG) else "line"
    return TopicRoute(topic_filter, form, mapping or ("sparkplug" if form == "sparkplug" else "telegraf"))


class Router:
    """Decodes any message of a site. Decoders are made when their first message comes.

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

    def decode(self, message: Message) -> Sequence[Item] | Ignored:
        """Decode a message, or say why it is not for us. Raises BadMessage for nonsense."""
        topic = message.topic
        for fits, form, mapping in self._routes:
            if fits(topic):
                if form == "own":
                    return Ignored("own", "a request, a canary or the presence of a daemon")
                decoder = self._decoders.get((form, mapping)) or self.decoder(form, mapping)
                return decoder.decode(message)
        return Ignored("topic", "no route: neither BMS/v1/, IT/v1/ nor a topic of the configuration")

    def decoder(self, form: Form, mapping: str = "") -> Decoder:
        """The decoder of a form and mapping; the same each time. Raises ConfigError for a bad mapping."""
        found = self._decoders.get((form, mapping))
        if found is None:
            found = self._decoders[form, mapping] = self._make(form, mapping)
        return found

    def load(self) -> None:
        """Make the decoders of all mappings now. Raises ConfigError for a mapping file that is wrong."""
        for _, form, mapping in self._routes:
            if mapping:
                self.decoder(form, mapping)

    @property
    def bms(self) -> BmsDecoder:
        """The decoder of the BMS tree, which also encodes requests to it."""
        return cast(BmsDecoder, self.decoder("bms"))

    @property
    def answers(self) -> ResultDecoder:
        """The decoder of agents' answers; its `epoch` may be set."""
        return cast(ResultDecoder, self.decoder("answer"))

    @property
    def reports(self) -> JobDecoder:
        """The decoder of what jobs report, with its counts."""
        return cast(JobDecoder, self.decoder("job"))

    def rebind(self, site: Site) -> None:
        """The site changed: what comes is in its numbering. What decoders know of devices stays."""
        self.site = site
        for key, decoder in list(self._decoders.items()):
            if isinstance(decoder, BmsDecoder | ResultDecoder | SparkplugDecoder):
                decoder.rebind(site)
            elif not isinstance(decoder, JobDecoder):
                del self._decoders[key]

    def faults(self) -> list[tuple[str, int]]:
        """Faults inside messages that were decoded all the same, and how often, since the last call."""
        decoders = (d for d in self._decoders.values() if isinstance(d, LineDecoder | SparkplugDecoder))
        return [fault for decoder in decoders for fault in decoder.faults.take()]

    def wanted_births(self) -> list[str]:
        """Topics of Sparkplug nodes that should announce themselves anew, since the last call."""
        out: list[str] = []
        for decoder in self._decoders.values():
            if isinstance(decoder, SparkplugDecoder):
                out += decoder.wants_rebirth
                decoder.wants_rebirth.clear()
        return out

    def _make(self, form: Form, mapping: str) -> Decoder:
        if form == "bms":
            halls = self.site.names["hall"]
            default = halls[0].rpartition("/")[2] if len(halls) == 1 else None
            return BmsDecoder(self.site, ours=self.ours, default_hall=default)
        if form == "it":
            return ItDecoder(self.site)
        if form == "answer":
            return ResultDecoder(self.site, self.integration)
        if form == "job":
            return JobDecoder(self._slot_of)
        found, file = load_map(mapping)
        if form == "line":
            return LineDecoder(self.site, found, file)
        return SparkplugDecoder(self.site, found, file)
