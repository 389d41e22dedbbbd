"""Summaries of halls as readings of the hub: the source, and a decoder that refuses impossible values.

A summary is a state, of which the newest counts. One of an older epoch, one received before, one of a hall
that the site file does not have and one that reports an impossible power are refused, counted and named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connectors.nats.link import NatsLink
from connectors.nats.wire import EPOCH_AHEAD_S, HallSummary, halls_of, parse_summary
from twin.catalogue import NS, BadMessage
from twin.contracts import Inlet, Item
from twin.site import HALL_BUDGET, Site
from twin.telemetry import Ignored, Message, Reading

SUBJECTS = "cpc.*.v1.summary"
# Beyond its most by this factor a power is no overload, but a wrong unit or a lie. source: estimate
LIE_FACTOR = 2.0
MAX_NAME = 64
SIGNALS = {
    "hall_power_w": "power_w",
    "hall_demand_w": "demand_w",
    "hall_floor_w": "floor_w",
    "hall_budget_readback_w": "budget_w",
    "hall_guaranteed_w": "guaranteed_w",
    "hall_heard_pu": "heard_pu",
    "hall_lapse_s": "lapse_s",
    "hall_gpu_count": "gpus",
    "hall_gpu_out_count": "gpus_out",
}
SEVERITIES = ("critical", "warning", "info")


class SummaryDecoder:
    """Decodes the summaries of a fleet. `newest`: the last accepted one, by hall."""

    def __init__(self, site: Site) -> None:
        self._halls, self._most_w = halls_of(site), site.envelopes[HALL_BUDGET].high
        self.newest: dict[str, HallSummary] = {}

    def decode(self, message: Message) -> Sequence[Item] | Ignored:
        """Return the readings of one hall. Raises BadMessage with the reason."""
        hall = hall_of(message.topic)
        rack = self._halls.get(hall)
        if rack is None:
            known = ", ".join(list(self._halls)[:8])
            raise BadMessage(f"no hall {hall!r} in the site file of this fleet; expected one of {known}")
        summary = parse_summary(message.payload)
        if summary.hall != hall:
            raise BadMessage(f"claims to be hall {summary.hall[:MAX_NAME]!r} on the subject of {hall!r}")
        # If accepted, all later summaries of the hall would be refused, or passed over
        if max(summary.epoch, summary.sequence / 1000) > message.t_ns // NS + EPOCH_AHEAD_S:
            raise BadMessage(
                f"epoch {summary.epoch}, sequence {summary.sequence}: one is more than a day ahead of our "
                "clock: set the clock of the hall, or check who else may publish on this subject"
            )
        before = self.newest.get(hall)
        if before is not None and summary.epoch < before.epoch:
            raise BadMessage(
                f"epoch {summary.epoch} after {before.epoch}: the sender no longer leads its hall"
            )
        if before is not None and (summary.epoch, summary.sequence) <= (before.epoch, before.sequence):
            return Ignored("summary", "a newer summary came before")
        most_w = float(self._most_w[rack])
        for name in ("power_w", "demand_w", "floor_w"):
            value = getattr(summary, name)
            if value is not None and value > LIE_FACTOR * most_w:
                raise BadMessage(
                    f"{name} is {value:g} W and max_w of the hall {most_w:g}; expected W, at most twice that"
                )
        self.newest[hall] = summary
        return _readings(rack, summary, min(summary.t_ns, message.t_ns))


def hall_of(subject: str) -> str:
    """Return the hall of a subject; "" for none."""
    parts = subject.split(".")
    return parts[1][:MAX_NAME] if len(parts) == 4 else ""


def _readings(rack: int, summary: HallSummary, t_ns: int) -> list[Item]:
    out: list[Item] = []
    for signal, name in SIGNALS.items():
        value = getattr(summary, name)
        if value is not None:
            out.append(Reading("rack", rack, signal, float(value), t_ns))
    for severity in SEVERITIES:
        count = float(summary.alarms.get(severity, 0))
        out.append(Reading("rack", rack, f"hall_alarm_{severity}_count", count, t_ns))
    if summary.granted_ns:
        out.append(Reading("rack", rack, "hall_grant_age_s", (t_ns - summary.granted_ns) / NS, t_ns))
    return out


class SummarySource:
    """Reads the summaries of all halls; each hall is a source of its own in the source ledger."""

    def __init__(self, link: NatsLink, decoder: SummaryDecoder, name: str = "halls") -> None:
        self.name, self.link, self.decoder = name, link, decoder
        self.origins: tuple[str, ...] = ()  # they name themselves

    async def run(self, inlet: Inlet) -> None:
        """Stage readings until cancelled. Raises ConnectorError."""
        await self.link.run(
            lambda message: take(message, self.decoder.decode, inlet, f"hall {hall_of(message.topic)}"),
            lambda why, count: inlet.of(self.link.where).drop(SUBJECTS, why, count),
        )


def take(
    message: Message, decode: Callable[[Message], Sequence[Item] | Ignored], inlet: Inlet, name: str
) -> None:
    """Stage the readings of a message under this source, or count the reason for none."""
    source, subject = inlet.of(name, outside=True), message.topic[:200]
    try:
        items = decode(message)
    except BadMessage as error:
        source.reject(subject, str(error))
        return
    except Exception as error:  # a message must not be able to stop all others
        source.reject(subject, f"its decoder failed: {type(error).__name__}: {error}")
        return
    if isinstance(items, Ignored):
        source.skip(items.what, items.why, subject)
    else:
        source.stage(items, message.t_ns)
