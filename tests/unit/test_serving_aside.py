"""A pod that serves from a thread of its own: whatever ends the thread reaches the test that relies on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process_daemon import Desk, serving_aside


class Broken(Desk):
    """One that cannot be made."""

    def __init__(self, *given: Any) -> None:
        raise ZeroDivisionError("at the start")


def with_a_desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Desk], object], kind: type[Desk] = Desk
) -> None:
    """Run a test that relies on a desk."""
    with serving_aside(tmp_path, monkeypatch, kind) as desk:
        act(desk)


def test_what_is_done_on_its_loop_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    with serving_aside(tmp_path, monkeypatch) as desk:
        assert desk.do(lambda: desk.pod.live.role) == "leader"
        with pytest.raises(ZeroDivisionError):
            desk.do(lambda: 1 // 0)
        assert desk.run("status", role="viewer") == 0
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError, match="at the start"):
        with_a_desk(tmp_path, monkeypatch, lambda desk: pytest.fail("it serves"), Broken)


def test_an_error_while_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tick(*_: Any) -> None:
        raise ZeroDivisionError("in a tick")

    def act(desk: Desk) -> None:
        monkeypatch.setattr(desk.pod, "tick", tick)
        desk.run("control", "hold", "--reason", "x")
        pytest.fail("nobody told")

    with pytest.raises(ZeroDivisionError, match="in a tick"):
        with_a_desk(tmp_path, monkeypatch, act)


def test_an_error_after_the_last_question_is_raised_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="stopped before Future completed"):
        with_a_desk(tmp_path, monkeypatch, lambda desk: desk._loop.call_soon_threadsafe(desk._loop.stop))
