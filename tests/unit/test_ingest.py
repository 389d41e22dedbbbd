"""The ingest of what sources decoded: staged, counted by place within bounds, urgent at once."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.builders import site_of, spec_of, two_racks
from twin.catalogue import NS
from twin.contracts import Inlet
from twin.daemon import Ingest, ingest as ingest_module
from twin.telemetry import EntityReplaced, IdentityTold, JobEnded, Reading, SiteChanged, inbox as inbox_module

T = 1_700_000_000 * NS


@pytest.fixture
def ingest() -> Ingest:
    return Ingest(site_of(two_racks()), {})


def test_it_is_an_inlet(ingest: Ingest) -> None:
    inlet: Inlet = ingest
    inlet.stage([Reading("rack", 0, "power_w", 1000.0, T), JobEnded(id="e", job="j")], T)
    frame = ingest.take(0, T, 1.0)
    assert len(frame.updates) >= 1
    assert frame.events == (JobEnded(id="e", job="j"),)
    assert ingest.counts["staged"] == 1
    assert ingest.last_ns == T


def test_what_does_not_fit_is_counted_and_the_rest_is_staged(ingest: Ingest) -> None:
    ingest.stage([Reading("rack", 0, "no_such_signal", 1.0, T), Reading("rack", 1, "power_w", 5.0, T)], T)
    assert ingest.counts["bad"] == 1
    assert ingest.take(0, T, 1.0).updates


def test_an_urgent_reading_wakes_the_loop(ingest: Ingest) -> None:
    async def scene() -> bool:
        asyncio.get_running_loop().call_soon(
            lambda: ingest.stage([Reading("rack", 0, "leak_state", 1.0, T)], T)
        )
        async with asyncio.timeout(2):
            await ingest.urgent.wait()
        ingest.take(0, T, 0.1)
        return ingest.urgent.is_set()

    assert not asyncio.run(scene())


def test_what_is_not_used_is_counted_under_its_source(ingest: Ingest) -> None:
    agent = ingest.of("agent lab/h/r1/node0", outside=True)
    agent.reject("IT/v1/PUB/Frame/lab/h/r1/node0", "not an IT frame")
    agent.drop("the queue", "it is full", 2)
    agent.skip("Frame", "its rack or node is not in the site file", "topic", "name it")
    ingest.reject("somewhere", "nonsense")
    told = ingest.summary()
    assert (told["bad"], told["dropped"], told["ignored"]) == (2, 2, 1)
    assert {line.outcome for line in agent.lines.values()} == {"bad", "dropped", "ignored"}


def test_a_changed_site_takes_the_events_along_and_drops_old_numbers(ingest: Ingest) -> None:
    ingest.stage([Reading("rack", 1, "power_w", 5.0, T), JobEnded(id="e", job="j")], T)
    spec = spec_of(two_racks(racks="r[1-3]"))
    site = ingest.change_site(SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
    assert site.sizes["rack"] == 3
    ingest.stage([Reading("rack", 2, "power_w", 7.0, T)], T)
    frame = ingest.take(0, T, 1.0)
    assert [type(e).__name__ for e in frame.events] == ["JobEnded", "SiteChanged"]
    assert frame.updates[0].entity is not None
    assert frame.updates[0].entity.tolist() == [2]


def test_a_changed_site_reaches_the_engine_where_the_queue_is_full(
    ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "MAX_EVENTS", 1)
    ingest.stage([JobEnded(id="e", job="j")], T)
    spec = spec_of(two_racks(racks="r[1-3]"))
    ingest.change_site(SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
    assert [type(e).__name__ for e in ingest.take(0, T, 1.0).events] == ["JobEnded", "SiteChanged"]


def test_a_replaced_device_counts_from_its_own_beginning(ingest: Ingest) -> None:
    ingest.stage([Reading("gpu", 0, "energy_mj", 5_000_000, T)], T)
    ingest.take(0, T, 1.0)
    ingest.put_event(EntityReplaced(id="x", table="gpu", name="lab/h/r1/node0/gpu0", serial="new"))
    ingest.stage([Reading("gpu", 0, "energy_mj", 1_000, T + NS)], T + NS)
    frame = ingest.take(1, T + NS, 1.0)
    assert frame.counts[0].gain.tolist() == [[0]]


def told(serial: str, name: str = "lab/h/r1/node0/gpu0") -> IdentityTold:
    return IdentityTold(id=f"i-{name}-{serial}", table="gpu", name=name, serial=serial)


def test_an_identity_that_is_known_is_not_queued_and_another_counts_from_its_own_beginning() -> None:
    serials: dict[str, str] = {}
    ingest = Ingest(site_of(two_racks()), serials)
    ingest.stage([Reading("gpu", 0, "energy_mj", 5_000_000, T), told("S-0001")], T)
    assert [type(e).__name__ for e in ingest.take(0, T, 1.0).events] == ["IdentityTold"]
    serials["gpu:lab/h/r1/node0/gpu0"] = "S-0001"  # as the engine notes it
    ingest.stage([told("S-0001"), Reading("gpu", 0, "energy_mj", 5_000_700, T + NS)], T + NS)
    frame = ingest.take(1, T + NS, 1.0)
    assert frame.events == ()
    assert frame.counts[0].gain.tolist() == [[700]], "the same device counts on"
    ingest.stage([told("S-0002"), Reading("gpu", 0, "energy_mj", 1_000, T + 2 * NS)], T + 2 * NS)
    frame = ingest.take(2, T + 2 * NS, 1.0)
    assert [type(e).__name__ for e in frame.events] == ["IdentityTold"]
    assert frame.counts[0].gain.tolist() == [[0]]
    assert ingest.inbox.counts["counter_jumps"] == 0


def test_a_device_that_is_named_in_short_and_stays_counts_on() -> None:
    ingest = Ingest(site_of(two_racks()), {"gpu:lab/h/r1/node0/gpu0": "S-0001"})
    ingest.stage([Reading("gpu", 0, "energy_mj", 5_000_000, T)], T)
    ingest.take(0, T, 1.0)
    ingest.put_event(EntityReplaced(id="x", table="gpu", name="r1/node0/gpu0", serial="S-0001"))
    ingest.stage([Reading("gpu", 0, "energy_mj", 5_000_700, T + NS)], T + NS)
    assert ingest.take(1, T + NS, 1.0).counts[0].gain.tolist() == [[700]]


def test_a_fleet_that_starts_at_once_does_not_crowd_out_its_faults(
    ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_module, "MAX_IDENTITIES", 5)
    for tick in range(2):
        ingest.stage([told(f"S-{i:04}", f"lab/h/r1/node{i}/gpu0") for i in range(8)], T)
        assert ingest.put_event(JobEnded(id=f"e{tick}", job="j"))
        assert len(ingest.take(tick, T + tick * NS, 1.0).events) == 6
    assert ingest.counts["dropped"] == 6
    assert ingest.of("others").lines["dropped", "identities"].count == 6


def test_events_beyond_the_queue_are_told_of_their_source(
    ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "MAX_EVENTS", 2)
    ingest.of("jobs slurm").stage([JobEnded(id=f"e{n}", job="j") for n in range(5)], T)
    (line,) = ingest.of("jobs slurm").lines.values()
    assert (line.outcome, line.count, ingest.counts["dropped"]) == ("dropped", 3, 3)


def test_while_ticks_wait_for_a_clock_that_was_set_back_all_stamps_are_on_their_line(ingest: Ingest) -> None:
    """Sources go by the wall clock; what the daemon itself stages, as a cap that it read back, does not."""
    ingest.ahead_ns, wall_ns = 3600 * NS, T - 3600 * NS
    ingest.of("gateway", outside=True).stage([Reading("rack", 0, "power_w", 1.0, wall_ns)], wall_ns)
    ingest.stage([Reading("gpu", 0, "power_limit_w", 700.0, T)], T)
    stamps = {u.table: set(u.t_ns.tolist()) for u in ingest.take(0, T, 1.0).updates}
    assert stamps == {"rack": {T}, "gpu": {T}}
    account = ingest.of("BMC b1")
    for k in range(1, 4):
        account.stage([Reading("gpu", 0, "power_limit_w", 690.0, wall_ns + k * NS)], wall_ns + k * NS, 1.0)
        (update,) = ingest.take(k, T + k * NS, 1.0).updates
        assert update.t_ns.tolist() == [T + k * NS]
    assert ingest.inbox.counts["older"] == 0
