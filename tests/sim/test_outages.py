"""A publisher stops on a simulated site: one alarm names it, none is critical, and it ends by itself.

May import `twin`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from policies.leak_guard import LeakGuard
from policies.thermal_guard import ThermalGuard
from tests.support.muted_publishers import BUILDING, OUTSIDE, MutedSite, of_node, of_rack, of_tables
from twin.catalogue import Bool
from twin.site import Site

KNOWN_S = 60  # until the rates of all publishers are known
Stopped = Callable[[Site], dict[str, Bool]]
PUBLISHERS: dict[str, tuple[Stopped, str, str]] = {
    "rack": (of_rack, "silence/lab/h/r1", "No data from rack lab/h/r1 since 00:0"),
    "gateway": (
        lambda site: of_tables(site, *BUILDING),
        "silence/lab/h/cdu+feeder+hall+rack",
        "No data from hall lab/h, CDU lab/h/cdu1, 2 feeders and 2 racks since 00:0",
    ),
    "exporter": (
        lambda site: {"gpu": site.rack_of_gpu == 0},
        "silence/lab/h/r1/gpu",
        "No data from 72 GPUs of rack lab/h/r1 since 00:0",
    ),
    "agent": (lambda site: of_node(site, 5), "fault/node_silent/lab/h/r1/node5", "lab/h/r1/node5 or all of"),
    "broker": (
        lambda site: of_tables(site, *BUILDING, *OUTSIDE, "node", "gpu", "link"),
        "silence/lab/h",
        "No data from hall lab/h since 00:0",
    ),
}


@functools.cache
def _running(leak: bool) -> MutedSite:
    return MutedSite([LeakGuard(), ThermalGuard()], leak_s=KNOWN_S + 1.0 if leak else None).run(KNOWN_S)


def running(leak: bool = False) -> MutedSite:
    """A site of its own that has run for a while."""
    return _running(leak).fork()


@pytest.mark.long
@pytest.mark.parametrize("publisher", PUBLISHERS)
def test_a_publisher_that_stops_is_one_alarm_that_ends_when_it_is_back(publisher: str) -> None:
    stopped, identity, title = PUBLISHERS[publisher]
    pod = running()
    assert pod.raised == {}
    pod.stop(**stopped(pod.site)).run(100)
    assert list(pod.raised) == [identity], "exactly one, and always the same"
    assert pod.ids == [identity]
    assert pod.raised[identity].title.startswith(title)
    assert pod.raised[identity].severity == "warning", "silence alone is never critical"
    pod.stop().run(40)
    assert pod.ids == []


@pytest.mark.long
@pytest.mark.parametrize("publisher", ["rack", "exporter", "agent"])
def test_a_real_leak_in_the_same_moment_is_reported_and_the_only_critical(publisher: str) -> None:
    stopped, identity, _ = PUBLISHERS[publisher]
    pod = running(leak=True)
    pod.stop(**stopped(pod.site)).run(60)
    critical = [f for f in pod.raised.values() if f.severity == "critical"]
    assert [f.id for f in critical] == ["fault/leak/lab/h/r2/node3"]
    assert identity in pod.ids


@pytest.mark.long
def test_a_leak_that_was_seen_stays_while_its_detectors_are_silent() -> None:
    pod = running(leak=True)
    pod.run(20)
    assert "fault/leak/lab/h/r2/node3" in pod.ids
    pod.stop(**of_tables(pod.site, *BUILDING, "node", "gpu")).run(100)
    assert "fault/leak/lab/h/r2/node3" in pod.ids


def test_guards_go_on_with_the_worst_case_of_what_is_silent() -> None:
    pod = running()
    pod.stop(**of_rack(pod.site)).run(30)
    proposals = pod.sim.engine.in_force["thermal_guard"]
    assert sum(len(p.index) for p in proposals) == 72
    assert "may be beyond its limit by now" in " ".join(pod.raised["silence/lab/h/r1"].evidence)


@pytest.mark.long
def test_two_outages_at_different_times_are_two() -> None:
    pod = running()
    first = {"gpu": pod.site.rack_of_gpu == 0}
    pod.stop(**first).run(60)
    pod.stop(**first, rack=of_rack(pod.site, 1)["rack"]).run(60)
    assert sorted(pod.ids) == ["silence/lab/h/r1/gpu", "silence/lab/h/r2/rack"]
    pod.stop(**first).run(30)
    assert pod.ids == ["silence/lab/h/r1/gpu"]
