"""Pauses between tries: they double up to a limit, spread, and begin anew after a success."""

from __future__ import annotations

from connectors.backoff import Backoff


def test_pauses_double_to_the_longest_and_begin_anew() -> None:
    exact = Backoff(0.5, 4.0, (1.0, 1.0))
    assert [exact.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    exact.reset()
    assert exact.next_s() == 0.5
    assert exact.next_s(3.0) == 3.0
    assert exact.next_s() == 4.0


def test_a_hundred_who_lost_one_server_do_not_return_at_once() -> None:
    pauses = [Backoff(1.0, 8.0).next_s() for _ in range(100)]
    assert all(0.5 <= pause <= 1.5 for pause in pauses)
    assert max(pauses) - min(pauses) > 0.3
