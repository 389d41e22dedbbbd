"""What a leader leaves behind, and what a successor makes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from twin.daemon.authority import AuthorityBook
from twin.daemon.handover import Handover, read_handover
from twin.daemon.leader import MAX_HEAD
from twin.telemetry import MaintenanceBegun, OperatorRequest


def window(number: int, names: int = 1) -> MaintenanceBegun:
    return MaintenanceBegun(id=f"m{number}", author="ann", table="node", until_ns=2**60,
                            names=tuple(f"lab/h/r{number}/node{i}" for i in range(names)))  # fmt: skip


def request(number: int, names: int = 1) -> OperatorRequest:
    return OperatorRequest(id=f"r{number}", author="bob", control="gpu.power_cap_w", lo=-math.inf, hi=900.0,
                           names=tuple(f"lab/h/r{number}/node{i}/gpu0" for i in range(names)))  # fmt: skip


def noise(count: int) -> tuple[OperatorRequest, ...]:
    """Requests that hardly shrink."""
    import hashlib

    return tuple(
        OperatorRequest(id=hashlib.blake2b(bytes([i % 256, i // 256])).hexdigest(), author="x", control="c",
                        names=("n",), lo=0, hi=1) for i in range(count)
    )  # fmt: skip


def test_it_comes_back_whole() -> None:
    left = Handover("ab" * 16, {"p": "off"}, {"p": 7}, "held", [window(1)], [request(1, 2000)])
    text = left.text()
    assert len(text) <= MAX_HEAD
    again = read_handover(text)
    assert again == left
    assert again.same_but_head(left)
    assert not again.same_but_head(None)


def test_what_finds_no_room_is_told_windows_last() -> None:
    left = Handover("h", windows=[window(i) for i in range(20)], requests=noise(400))
    text = left.text()
    assert len(text) <= MAX_HEAD
    again = read_handover(text)
    assert again.windows == left.windows
    assert (again.requests, again.lost) == (None, 400)
    many = [MaintenanceBegun(id=r.id, author="a", table="node", names=("n",), until_ns=1) for r in noise(400)]
    again = read_handover(Handover("h", windows=many, requests=[request(1)]).text())
    assert (again.windows, again.requests, again.lost) == (None, None, 401)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "7", "[" * 100_000,
        json.dumps({"asked": "no base 85 \x00", "mode": 3, "authority": [1], "decided_ns": {"p": "x"}}),
        json.dumps({"asked": "VPaz", "lost": -1, "mode": "mad", "authority": {"p": "king"}}),
        json.dumps({"asked": 5, "lost": True, "decided_ns": {"p": 2**70}}),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_left_out(text: str) -> None:
    assert read_handover(text) == Handover()


def test_the_later_decision_of_people_holds_within_the_configuration(tmp_path: Path) -> None:
    book = AuthorityBook(tmp_path, {"a": "act", "b": "advise"})
    assert book.after("a", "off", 5) == "off", "disarmed at the leader before"
    assert book.after("b", "act", 5) == "advise", "armed there; here the configuration says no"
    book.set({"a": "off", "b": "advise"})
    again = AuthorityBook(tmp_path, {"a": "act", "b": "advise"})
    assert again.levels == {"a": "off", "b": "advise"}
    assert again.after("a", "act", 5) == "off", "no newer decision: the stricter"
    assert again.after("a", "act", 4) == "off"
    assert again.after("a", "act", 9) == "act", "armed again since"
    assert again.after("a", "advise", 8) == "off", "until the book is set, what it held"


def test_a_book_of_the_version_before_is_read(tmp_path: Path) -> None:
    (tmp_path / "authority.json").write_text('{"a": {"level": "off", "configured": "act"}}')
    book = AuthorityBook(tmp_path, {"a": "act"})
    assert (book.levels, book.decided_ns) == ({"a": "off"}, {"a": 0})
