"""Faults of eight nodes of one GPU each, and the book that heard them.

book = heard(fault(3, 95, ago_s=60))
within(book, 3), opened(book, 3)
"""

from __future__ import annotations

from typing import Any

from tests.support.builders import START_NS, eight_nodes, site_of
from twin.catalogue import NS
from twin.contracts import ACTIONS
from twin.health.error_log import FaultBook
from twin.telemetry import FaultReported

SITE = site_of(eight_nodes())  # r1/node0/gpu0 .. r1/node7/gpu0: GPU i is node i's
MINUTE, HOUR, DAY = 60, 3600, 86_400
NOW = START_NS


def fault(gpu: int = 0, code: int = 95, ago_s: float | None = None, **more: Any) -> FaultReported:
    at_ns = 0 if ago_s is None else NOW - round(ago_s * NS)
    given = {"table": "gpu", "name": f"r1/node{gpu}/gpu0", "code": code, "at_ns": at_ns}
    return FaultReported(**(given | more))


def heard(*events: FaultReported, now_ns: int = NOW) -> FaultBook:
    book = FaultBook(SITE)
    book.receive(events, now_ns)
    return book


def within(book: FaultBook, gpu: int = 0, table: str = "gpu") -> tuple[int, ...]:
    return tuple(int(book.within(table, span)[gpu]) for span in (600, DAY, 28 * DAY))


def opened(book: FaultBook, gpu: int = 0, table: str = "gpu") -> tuple[str, int]:
    return ACTIONS[book.open_action(table)[gpu]], int(book.open_code(table)[gpu])
