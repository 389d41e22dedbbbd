"""Sink order: the command in force for one entity, which a sink keeps until a newer one comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from twin.contracts import CommandBatch, Item
from twin.telemetry import CommandAcked

State = Literal["accepted", "in_progress", "done", "failed"]
# A policy that withdraws a node again sooner may not know yet that somebody returned it to service: that is
# read back once a minute, and shall have lasted for a while. source: estimate
RESUMED_S = 180.0
# Policies that a hand does not stop: people speak by the one, the other sees water
OUTRANK = ("operator", "leak_guard")


def always() -> bool:
    """Return True: of what may be sent whoever leads."""
    return True


@dataclass(slots=True, eq=False)
class SinkOrder:
    """A command on one entity: `epoch` of its daemon, its `number`, the `generation` of the entity."""

    epoch: int
    number: int
    generation: int
    value: float

    @property
    def key(self) -> tuple[int, int]:
        """Return the key that sorts orders of one entity by age."""
        return self.epoch, self.number

    def acked(self, control: str, name: str, state: State, detail: str) -> CommandAcked:
        """Return the answer to the order."""
        return CommandAcked(
            control=control,
            name=name,
            generation=self.generation,
            command=f"{self.epoch}-{self.number}",
            state=state,
            detail=detail[:200],
        )


@dataclass(frozen=True, slots=True)
class SinkContext:
    """A sink's connection to its daemon: `stage` takes answers, `may_act` is checked before each change.

    `now_ns` is the clock by which leases are given.
    """

    stage: Callable[[Sequence[Item], int], None]
    may_act: Callable[[], bool]
    now_ns: Callable[[], int] = time.time_ns


Kept = TypeVar("Kept", bound=SinkOrder)


def order_rows(batch: CommandBatch) -> Iterator[tuple[int, SinkOrder]]:
    """Return (entity, its order) for each row of a batch."""
    columns = (batch.index, batch.generation, batch.command, batch.value)
    for entity, generation, number, value in zip(*(c.tolist() for c in columns), strict=True):
        yield entity, SinkOrder(batch.epoch, number, generation, value)


def keep_newest(
    orders: dict[int, Kept], batch: CommandBatch, make: Callable[[int, int, int, float], Kept]
) -> tuple[list[int], int]:
    """Return (the entities of a batch, the number of its orders that are older than the stored ones).

    `make` gives the record of an order from its epoch, number, generation and value. An order that is sent
    again leaves the record that there is.
    """
    concerned: list[int] = []
    old = 0
    for entity, order in order_rows(batch):
        known = orders.get(entity)
        if known is not None and order.key < known.key:
            old += 1
            continue
        record = make(order.epoch, order.number, order.generation, order.value)
        if known is None or record.key != known.key or not _same(record.value, known.value):
            orders[entity] = record
        concerned.append(entity)
    return concerned, old


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def state_number(value: float, states: Sequence[str]) -> int:
    """Return the number of a command's state; -1 for an unknown state."""
    return int(value) if value == value and value in range(len(states)) else -1


def summary_of(problems: Sequence[str]) -> str:
    """Return the first of some problems, and the number of the others."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"
