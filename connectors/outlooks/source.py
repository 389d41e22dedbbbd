"""Outlook source: polls one service; future values become outlooks, present ones readings.

A failure changes nothing: an outlook in force stays until it ends. `fault` is the message for people.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Protocol

from connectors.backoff import Backoff
from connectors.outlooks.client import HttpsClient, ServiceError
from connectors.outlooks.series import OutlookAnswer, OutlookSeries
from twin.catalogue import NS, BadMessage, find_quantity
from twin.contracts import Inlet
from twin.telemetry import OutlookTold, Reading

LOOK_S = 300.0  # between two readings of a value in force, as often as the site's weather is read
FIRST_S, LONGEST_S = 30.0, 3600.0  # pauses after failures. source: estimate
FAILURES = 3  # requests on end before people are notified, while values to come are known
CLOCK_S = 60.0  # a server's clock that differs by more is reported. source: estimate
OLD_S = 12 * 3600.0  # what was made longer ago is reported as old. source: estimate
FAR_NS = 366 * 86_400 * NS


class OutlookProvider(Protocol):
    """Reader of one service for `quantities`; the present value of those in `in_force` is a reading."""

    name: str
    quantities: tuple[str, ...]
    in_force: tuple[str, ...]

    async def fetch(self, client: HttpsClient, now_ns: int) -> OutlookAnswer:
        """Fetch once. Raises ServiceError without a valid answer, BadMessage for a wrong one."""
        ...


class OutlookSource:
    """Queries `provider` each `period_s`, and sooner after a failure, but not before the service allows
    it."""

    def __init__(
        self,
        provider: OutlookProvider,
        client: HttpsClient,
        period_s: float,
        now_ns: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.provider, self.period_s = provider, period_s
        self.name = f"outlook {provider.name}"
        self._client, self._now_ns, self._monotonic = client, now_ns, monotonic
        self._backoff = Backoff(FIRST_S, min(LONGEST_S, max(period_s, FIRST_S)), (1.0, 1.25))
        self._due_s = -1e18
        self._failed = 0
        self._failure = ""
        self._refused = False
        self._series: dict[str, OutlookSeries] = {}

    async def run(self, inlet: Inlet, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Fetch repeatedly until cancelled."""
        async with self._client:
            while True:
                await sleep(await self.step(inlet))

    async def step(self, inlet: Inlet) -> float:
        """Fetch if due, and stage values in force; returns the seconds until the next step."""
        if self._monotonic() >= self._due_s:
            await self._ask(inlet)
        self._stage_in_force(inlet)
        return max(0.0, min(self._due_s - self._monotonic(), LOOK_S))

    @property
    def fault(self) -> str:
        """Return a text for an alarm; "" while future values are known and requests succeed."""
        now_ns = self._now_ns()
        over = [series for series in self._series.values() if series.end_ns <= now_ns]
        if self._refused or self._failed >= FAILURES:
            holds = "; all values are over" if over else "; what it said before holds" if self._series else ""
            return self._failure + holds
        if over:
            end = datetime.fromtimestamp(over[0].end_ns // NS, UTC)
            why = f"; {self._failure}" if self._failure else ""
            return f"{self.name}: the last value of {over[0].quantity} ended at {end:%Y-%m-%dT%H:%MZ}{why}"
        return ""

    async def _ask(self, inlet: Inlet) -> None:
        now_ns = self._now_ns()
        try:
            answer = await self.provider.fetch(self._client, now_ns)
            outlooks = self._outlooks(answer, now_ns)
        except (ServiceError, BadMessage) as error:
            after_s = error.after_s if isinstance(error, ServiceError) else 0.0
            self._refused = isinstance(error, ServiceError) and error.refused
            self._failed, self._failure = self._failed + 1, str(error)
            self._due_s = self._monotonic() + self._backoff.next_s(after_s)
            inlet.fail(str(error), "check the service, and its keys in `outlooks`")
            return
        self._failed, self._failure, self._refused = 0, "", False
        self._backoff.reset()
        self._due_s = self._monotonic() + self.period_s
        inlet.stage([*outlooks, *answer.readings], now_ns, self.period_s)
        self._note(answer, now_ns, inlet)

    def _outlooks(self, answer: OutlookAnswer, now_ns: int) -> list[OutlookTold]:
        """Return the events of future values. Raises BadMessage for empty or invalid ones."""
        coming = {}
        for series in answer.series:
            found = series.to_come(now_ns)
            what = find_quantity(series.quantity)
            assert what is not None, series.quantity
            if found is None:
                continue
            if found.start_ns > now_ns + FAR_NS:
                raise BadMessage(f"{self.name}: begins in more than a year; check the clock of this host")
            wrong = [v for v in found.values if v is not None and not what.low <= v <= what.high]
            if wrong:
                raise BadMessage(
                    f"{self.name}: {series.quantity} of {wrong[0]:g}; expected {what.low:g} to {what.high:g} "
                    f"{what.unit}"
                )
            coming[series.quantity] = found
        if not coming:
            raise BadMessage(f"{self.name}: no future values; expected values of the next hours")
        self._series |= coming
        return [
            OutlookTold(
                author=self.name[:100],
                quantity=series.quantity,
                start_ns=series.start_ns,
                step_s=series.step_ns / NS,
                values=series.values,
            )
            for series in coming.values()
        ]

    def _note(self, answer: OutlookAnswer, now_ns: int, inlet: Inlet) -> None:
        """Report gaps, old values and differing clocks, all of which are used."""
        missing = [q for q in self.provider.quantities if q not in {s.quantity for s in answer.series}]
        for quantity in missing:
            inlet.skip(
                "gap",
                f"no value of {quantity}",
                self.name,
                "check that the service provides it for this place",
            )
        for series in self._series.values():
            if series.unknown and series.quantity not in missing:
                text = f"{series.unknown} of {len(series.values)} values of {series.quantity} are unknown"
                inlet.skip("gap", text, self.name, "the service left values out: they count as unknown")
        if answer.made_ns and now_ns - answer.made_ns > OLD_S * NS:
            age_h = (now_ns - answer.made_ns) / NS / 3600.0
            inlet.skip("age", f"made {age_h:.0f} h ago", self.name, "check the status of the service")
        if abs(self._client.ahead_s) > CLOCK_S:
            side = "ahead of" if self._client.ahead_s > 0 else "behind"
            text = f"its clock is {abs(self._client.ahead_s):.0f} s {side} ours"
            inlet.skip("clock", text, self.name, "check the clock of this host (chronyc tracking)")

    def _stage_in_force(self, inlet: Inlet) -> None:
        now_ns = self._now_ns()
        readings = []
        for quantity in self.provider.in_force:
            series = self._series.get(quantity)
            value = None if series is None else series.at(now_ns)
            if value is not None:
                readings.append(Reading("site", 0, quantity.partition(".")[2], value, now_ns))
        if readings:
            inlet.stage(readings, now_ns, LOOK_S)
