"""Budgets of halls over NATS: the hub's sink publishes them, and a hall's source makes events of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connectors.nats.link import NatsLink
from connectors.nats.summaries import take
from connectors.nats.wire import EPOCH_AHEAD_S, HallGrant, budget_subject, encode, halls_of, parse_grant
from connectors.orders import always, order_rows, summary_of
from twin.catalogue import NS, ActuationError, BadMessage, ConnectorError
from twin.contracts import CommandBatch, Inlet, Item
from twin.site import HALL_BUDGET, Site
from twin.telemetry import BudgetGranted, Ignored, Message

MOST_S = 60.0  # that a grant runs from its issue; the lease of a hub is 10 s. source: estimate
AHEAD_S = 2.0  # a grant that was issued later than now, by our clock: clocks differ. source: estimate


class BudgetSink:
    """Publishes budgets as leases while `may_act`. A hall returns to its guaranteed share when one lapses."""

    name = "halls"
    controls: tuple[str, ...] = (HALL_BUDGET,)
    enforces_safe = True

    def __init__(self, site: Site, link: NatsLink, may_act: Callable[[], bool] = always) -> None:
        self._may_act = may_act
        self._link, self._names = link, {rack: hall for hall, rack in halls_of(site).items()}
        self.sent = 0

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Publish a grant for each hall. Raises ActuationError, after all the others were sent."""
        problems: list[str] = []
        for batch in commands:
            if batch.control != HALL_BUDGET:
                continue
            for rack, order in order_rows(batch):
                hall = self._names[rack]
                grant = HallGrant(
                    hall=hall,
                    epoch=order.epoch,
                    command=order.number,
                    budget_w=order.value,
                    issued_ns=batch.issued_ns,
                    expires_ns=batch.expires_ns,
                )
                key = f"{hall}:{order.epoch}:{batch.issued_ns}"
                if not self._may_act():  # for each grant, as the server may take its time
                    raise ActuationError(f"{self.name}: another daemon leads now")
                try:
                    await self._link.publish(budget_subject(hall), encode(grant), key)
                    self.sent += 1
                except ConnectorError as error:
                    problems.append(f"{hall}: {error}")
        if problems:
            raise ActuationError(f"{self.name}: {summary_of(problems)}")


class BudgetDecoder:
    """Decodes the grants of one hall into events for the external feeder `feeder`.

    The engine orders them; here is refused what is not ours, is over, or comes from a clock that is ahead.
    """

    def __init__(self, hall: str, feeder: str) -> None:
        self.hall, self.feeder = hall, feeder

    def decode(self, message: Message) -> Sequence[Item] | Ignored:
        """Return the event of a grant. Raises BadMessage with the reason."""
        grant = parse_grant(message.payload)
        if grant.hall != self.hall:
            raise BadMessage(f"is for hall {grant.hall[:64]!r}; expected {self.hall!r}")
        ahead_s = (grant.issued_ns - message.t_ns) / NS
        if ahead_s > AHEAD_S:
            raise BadMessage(
                f"issued {ahead_s:.1f} s after now by our clock; expected at most {AHEAD_S:g} s: set the "
                "clocks of the hub and of this hall"
            )
        runs_s = (grant.expires_ns - grant.issued_ns) / NS
        if not 0.0 < runs_s <= MOST_S:
            raise BadMessage(
                f"runs {runs_s:.0f} s from its issue; expected at most {MOST_S:g} s: look who else may "
                "publish on this subject"
            )
        if grant.epoch > message.t_ns // NS + EPOCH_AHEAD_S:
            raise BadMessage(
                f"epoch {grant.epoch} is more than a day ahead of our clock: set the clock of the hub, or "
                "check who else may publish on this subject"
            )
        if grant.expires_ns <= message.t_ns:
            return Ignored("budget", "it has expired", f"{self.hall}: synchronise the clocks if this goes on")
        return [
            BudgetGranted(
                id=f"{grant.epoch}-{grant.command}-{grant.issued_ns}",
                author="fleet",
                feeder=self.feeder,
                budget_w=grant.budget_w,
                expires_ns=grant.expires_ns,
                issued_ns=grant.issued_ns,
                epoch=grant.epoch,
            )
        ]


class BudgetSource:
    """Reads the grants of one hall from its link."""

    def __init__(self, link: NatsLink, decoder: BudgetDecoder) -> None:
        self.name, self.link, self.decoder = f"budgets {link.where}", link, decoder

    async def run(self, inlet: Inlet) -> None:
        """Stage events until cancelled. Raises ConnectorError."""
        await self.link.run(
            lambda message: take(message, self.decoder.decode, inlet, self.name),
            lambda why, count: inlet.drop(self.link.subject, why, count),
        )
