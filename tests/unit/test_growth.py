"""Counters that grow: a burst is information, growth that goes on is an alarm. May import `twin`."""

from __future__ import annotations

import pytest

from tests.support.builders import START_NS, site_of, two_racks
from twin.catalogue import NS, TABLES
from twin.diagnosis import AlarmBudget
from twin.diagnosis.growth import EVERY_S, Growth
from twin.telemetry import State


class Counter:
    """A counter of one GPU that has counted nothing for an hour."""

    def __init__(self, name: str) -> None:
        site = site_of(two_racks())
        self.growth, self.state = Growth(site, AlarmBudget(site)), State(site.sizes)
        self.total = self.state.tables["gpu"].total[TABLES["gpu"].by_name[name].row]
        self.growth.watched_s, self.state.now_ns = 3600.0, START_NS
        self.looks()

    def looks(self, *counts: int) -> list[str]:
        """Severities of GPU 5 after each look, "" for that of its kind and "none" for no cause."""
        out = []
        for count in counts or (0, 0):
            self.state.now_ns += round(EVERY_S * NS)
            self.total[5] += count
            causes = self.growth.causes(self.state, [], {})
            out.append(next((c.severity for c in causes if c.entity == 5), "none"))
        return out


@pytest.mark.parametrize("name", ["ecc_sbe_count", "nvlink_error_count"])
def test_errors_that_all_come_at_once_are_information_until_more_come(name: str) -> None:
    counter = Counter(name)
    assert counter.looks(300, 0, 0, 0) == ["info"] * 4
    assert counter.looks(50) == [""]
    assert Counter(name).looks(300, 300, 300, 300) == ["info", "info", "", ""]
    once_a_minute = Counter(name).looks(*([300] + 29 * [0]) * 3)
    assert "" in once_a_minute
    apart = Counter(name)
    assert "" not in apart.looks(300, *75 * [0], 300, *30 * [0])


def test_errors_that_ask_for_an_action_are_no_information() -> None:
    assert Counter("ecc_dbe_count").looks(1) == [""]


def test_all_devices_that_a_counter_shows_are_counted_and_none_by_two_counters() -> None:
    counter = Counter("ecc_sbe_count")
    for name in ("ecc_sbe_count", "ecc_dbe_count"):
        counter.state.tables["gpu"].total[TABLES["gpu"].by_name[name].row] += 300
    counter.state.now_ns += round(EVERY_S * NS)
    causes = counter.growth.causes(counter.state, [], {})
    n = counter.growth.sizes["gpu"]
    assert n == 144
    assert sum(1 + cause.more for cause in causes) == n
