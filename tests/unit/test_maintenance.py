"""Maintenance windows: no alarms, no commands, no learning, and their end. May import `twin`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.operator import Operator
from policies.thermal_guard import ThermalGuard
from tests.support.builders import START_NS, Twin, Wish, eight_nodes, profile_tree, site_of, two_racks
from tests.support.journal_bodies import bodies_of
from twin.catalogue import NS, digest
from twin.contracts import Windows, below, maintenance
from twin.contracts.maintenance import MAX_LENGTH_S
from twin.engine import Engine
from twin.site import SiteSpec
from twin.telemetry import Frame, events as ev

CAP, LEVEL = "gpu.power_cap_w", "node.service_level"
OK = {"gpu.temp_c": 60.0, "gpu.power_limit_w": 1200.0}


def begun(*names: str, table: str = "rack", seconds: float = 600.0, key: str = "m", **more: Any) -> Any:
    until_ns = more.pop("until_ns", START_NS + round(seconds * NS))
    return ev.MaintenanceBegun(id=key, author="ann", table=table, names=names, until_ns=until_ns, **more)


def ended(key: str = "m") -> ev.MaintenanceEnded:
    return ev.MaintenanceEnded(author="ann", window=key)


def request(cap_w: float, *names: str) -> ev.OperatorRequest:
    return ev.OperatorRequest(
        id=f"q{cap_w}", author="ann", control=CAP, names=names, lo=0.0, hi=cap_w, want=cap_w
    )


def in_first_rack(twin: Twin) -> np.ndarray:
    return twin.site.rack_of_gpu == 0


@pytest.mark.parametrize(
    "table, name, expected",
    [
        ("rack", "r1", {"rack": 1, "node": 18, "gpu": 72}),
        ("node", "r1/node3", {"node": 1, "gpu": 4}),
        ("gpu", "r2/node0/gpu1", {"gpu": 1}),
        ("cdu", "cdu1", {"cdu": 1}),
        ("feeder", "a", {"feeder": 1}),
        ("hall", "h", {"hall": 1, "rack": 2, "node": 36, "gpu": 144, "cdu": 1}),
    ],
)
def test_a_window_covers_what_is_inside_and_nothing_beside(
    table: str, name: str, expected: dict[str, int]
) -> None:
    site = site_of(two_racks())
    entity = site.entity(table, name)
    assert entity is not None
    found = {t: len(x) for t, x in below(site, table, np.array([entity], np.int32)).items()}
    assert {t: n for t, n in found.items() if t not in ("link", "supernode")} == expected


def test_the_whole_site_but_its_jobs() -> None:
    site = site_of(two_racks())
    found = below(site, "site", np.array([0], np.int32))
    assert {t: len(x) for t, x in found.items()} == {t: n for t, n in site.sizes.items() if n and t != "job"}


@pytest.mark.parametrize(
    "event, why",
    [
        (begun("r1", key=""), "needs an id"),
        (begun("r1", table="nonsense"), "no table nonsense; expected one of site, hall"),
        (begun("job0", table="job"), "no table job"),
        (begun(), "names no rack"),
        (begun("r1", "r9"), "r9: this site has no such rack"),
        (begun("r1", until_ns=START_NS - 5 * NS), "over already, 6 s ago"),
        (begun("r1", until_ns=-(2**62)), "over already"),
        (begun("r1", seconds=MAX_LENGTH_S + 2), "longer than 30 days"),
        (begun("r1", until_ns=2**63), "longer than 30 days"),
        (begun(*["r1"] * 100_001), "more than 100000 entities"),
        (ended("ghost"), "no maintenance window ghost"),
        (begun("r1", seconds=MAX_LENGTH_S), None),
    ],
)
def test_what_is_refused_and_why(event: ev.Event, why: str | None) -> None:
    twin = Twin(two_racks())
    twin.tick(None, event)
    (body,) = twin.records("event")
    if why is None:
        assert "refused" not in body
        assert twin.engine.windows.mask("rack") is not None
    else:
        assert why in body["refused"]
        assert twin.engine.windows.mask("rack") is None


def test_windows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "MAX_WINDOWS", 2)
    twin = Twin(two_racks())
    twin.tick(None, begun("r1", key="a"), begun("r2", key="b"), begun("r2", key="c"))
    assert [r.get("refused") for r in twin.records("event")] == [
        None,
        None,
        "more than 2 maintenance windows",
    ]
    twin.tick(None, ended("a"), begun("r2", key="d"))
    assert [r.get("refused") for r in twin.records("event")] == [None, None]


def test_it_ends_by_itself_and_is_journaled() -> None:
    twin = Twin(two_racks())
    twin.tick(OK, begun("r1", seconds=5.0, reason="filter"))
    (body,) = twin.records("event")
    assert (body["event"]["author"], body["event"]["reason"]) == ("ann", "filter")
    for second in range(2, 8):
        twin.tick(OK)
        told = [(r["id"]) for r in twin.records("maintenance_expired")]
        assert told == (["m"] if second == 5 else [])
        assert (twin.engine.windows.mask("gpu") is None) == (second >= 5)
    assert twin.engine.windows.mask("rack") is None


def test_where_windows_overlap_the_longer_one_holds() -> None:
    twin = Twin(two_racks())
    twin.tick(OK, begun("r1", key="a"), begun("r1/node0", table="node", key="b"))
    twin.tick(OK, ended("a"))
    assert twin.engine.windows.mask("rack") is None
    mask = twin.engine.windows.mask("gpu")
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [0, 1, 2, 3]
    assert twin.engine.windows.ended_ns["gpu"][4] > 0
    assert twin.engine.windows.ended_ns["gpu"][3] == 0


def test_no_commands_and_running_leases_lapse() -> None:
    twin = Twin(two_racks(), [Operator()], act=True)
    names = ("r1/node0/gpu0", "r2/node0/gpu0")
    there = np.array([0, 72])
    twin.tick(OK, request(900.0, *names))
    twin.tick(OK, begun("r1"))
    sent: set[int] = set()
    for _ in range(40):
        readback = np.full(144, 1200.0)
        readback[there] = np.nan_to_num(twin.lease(CAP)[there], nan=750.0)
        for batch in twin.tick(OK | {"gpu.power_limit_w": readback}).commands:
            sent |= set(batch.index.tolist())
    assert sent == {72}, "the other rack is renewed"
    assert np.isnan(twin.lease(CAP)[0])
    assert twin.lease(CAP)[72] == 900.0
    assert twin.engine.findings.active == {}


@pytest.mark.parametrize("event", [ev.Held(author="ann"), ev.EpochChanged(epoch=7)])
def test_neither_a_hold_nor_a_new_term_commands_there(event: ev.Event) -> None:
    twin = Twin(two_racks(), [Operator()], act=True)
    twin.tick(OK, request(900.0, "r1/node0/gpu0", "r2/node0/gpu0"))
    sent = [*twin.tick(OK, begun("r1"), event).commands]
    for _ in range(40):
        sent += twin.tick(OK | {"gpu.power_limit_w": 900.0}).commands
    assert sent
    assert {tuple(batch.index.tolist()) for batch in sent} == {(72,)}
    assert np.isnan(twin.lease(CAP)[0])


def test_commands_that_nobody_answered_are_not_repeated_there() -> None:
    twin = Twin(two_racks(), [Operator()], act=True)
    twin.tick({"gpu.temp_c": 60.0}, request(900.0, "r1/node0/gpu0", "r2/node0/gpu0"))
    twin.tick({"gpu.temp_c": 60.0}, begun("r1"))
    again: list[int] = []
    for _ in range(29):
        again += [i for c in twin.tick({"gpu.temp_c": 60.0}).commands for i in c.index.tolist()]
    assert set(again) == {72}
    assert len(again) > 1
    twin.run(40, {"gpu.temp_c": 60.0})
    assert twin.engine.findings.active[f"unanswered/{CAP}"].count == 1


def test_a_protective_move_is_kept_back_and_told_once_per_window() -> None:
    twin = Twin(two_racks(), [ThermalGuard()], act=True)
    twin.run(3, OK)
    twin.tick(OK, begun("r1"), begun("r1/node0", table="node", key="n"))
    told: list[dict[str, Any]] = []
    for _ in range(20):
        twin.tick(OK | {"gpu.temp_c": 90.0})
        told += twin.records("kept_back")
        for batch in twin.commands():
            assert (batch.index >= 72).all()
    assert [(r["window"], r["control"], r["count"]) for r in told] == [("m", CAP, 72), ("n", CAP, 4)]
    assert (twin.lease(CAP)[72:] == 200.0).all()
    assert twin.engine.findings.active["beyond/gpu.temp_c/limit"].count == 72
    twin.tick(OK | {"gpu.temp_c": 90.0}, ended("m"), ended("n"))
    assert (twin.lease(CAP) == 200.0).all(), "at once when the people are gone"


def test_no_advice_there() -> None:
    wish = Wish()
    twin = Twin(eight_nodes(), [wish])
    wish.ask(CAP, [0, 1], 200, 300, 300)
    twin.tick({"gpu.power_limit_w": 350.0}, begun("r1/node0", table="node"))
    assert [a.index.tolist() for a in twin.decision.advice] == [[1]]
    assert twin.records("kept_back") == [], "nothing was kept back that could have been sent"


def alarmed(twin: Twin) -> list[str]:
    """Findings, but for those about who never speaks in these stories."""
    return [i for i in twin.engine.findings.active if not i.startswith("unheard/")]


@pytest.mark.long
def test_alarms_of_what_is_worked_at_end_and_begin_again() -> None:
    twin = Twin(two_racks())
    silent = OK | {"gpu.temp_c": np.where(in_first_rack(twin), np.nan, 60.0)}
    twin.run(30, OK)
    twin.run(20, silent)
    assert twin.engine.findings.active["silence/lab/h/r1"].count == 72
    twin.tick(silent, begun("r1"))
    assert alarmed(twin) == [], "at once"
    twin.run(200, silent)
    assert alarmed(twin) == []
    twin.tick(silent, ended())
    for _ in range(3):
        twin.engine.findings.silence_ns = 0  # looked at in each tick
        twin.tick(silent)
        assert alarmed(twin) == [], "there has been no time to speak"
    twin.run(20, silent)
    assert twin.engine.findings.active["silence/lab/h/r1"].count == 72


def test_a_read_back_that_differs_is_no_alarm_there() -> None:
    twin = Twin(two_racks(), [Operator()], act=True)
    twin.tick(OK, request(900.0, "r1/node0/gpu0", "r2/node0/gpu0"))
    twin.run(20, OK)
    assert twin.engine.findings.active[f"readback/{CAP}"].count == 2
    twin.tick(OK, begun("r1"))
    assert twin.engine.findings.active[f"readback/{CAP}"].entities == ("lab/h/r2/node0/gpu0",)
    twin.run(5, OK)
    assert twin.engine.findings.active[f"readback/{CAP}"].count == 1


def test_nothing_is_learned_of_racks_that_are_touched() -> None:
    rng = np.random.default_rng(3)
    twin = Twin(two_racks())

    def tick(*events: ev.Event) -> None:
        power = 100e3 * (1 + rng.normal(0, 0.01, 2))
        rise = 0.9 * power / (80 / 60e3 * 1012 * 3950)
        meters = np.full(2, power.sum() / 2) * (1 + rng.normal(0, 0.004, 2))
        twin.tick({"rack.power_w": power, "rack.flow_lpm": 80.0, "rack.supply_temp_c": 32.0,
                   "rack.return_temp_c": 32.0 + rise, "feeder.power_w": meters}, *events)  # fmt: skip

    for _ in range(100):
        tick()
    estimator = twin.engine.estimator
    learned = estimator.capture_count.copy()
    balances = estimator.balance_noise.count.copy()
    heat = estimator.heat_noise.count.copy()
    tick(begun("r1/node0/gpu0", table="gpu"))
    for _ in range(49):
        tick()
    assert (estimator.capture_count - learned).tolist() == [0, 50]
    assert (estimator.heat_noise.count - heat).tolist() == [0, 50]
    assert (estimator.balance_noise.count == balances).all(), "the sum of both racks contains the one"
    assert np.isfinite(estimator.residuals["rack.heat"].difference).all(), "but is still computed"
    tick(ended())
    assert estimator.capture_count.tolist() == [learned[0] + 1, learned[1] + 51]
    tick(begun("a", table="feeder", key="f"))
    assert (estimator.balance_noise.count == balances + 1).all()


@pytest.mark.long
def test_an_odd_balance_of_what_is_worked_at_is_no_finding() -> None:
    rng = np.random.default_rng(4)
    twin = Twin(two_racks())

    def tick(flow: float, *events: ev.Event) -> None:
        power = 100e3 * (1 + rng.normal(0, 0.01, 2))
        rise = 0.9 * power / (80 / 60e3 * 1012 * 3950)
        twin.tick({"rack.power_w": power, "rack.flow_lpm": 80.0 * np.array([flow, 1.0]),
                   "rack.supply_temp_c": 32.0, "rack.return_temp_c": 32.0 + rise}, *events)  # fmt: skip

    for _ in range(200):
        tick(1.0)
    tick(1.4, begun("r1", seconds=9000.0))
    for _ in range(100):
        tick(1.4)
    assert not [f for f in twin.engine.findings.active if f.startswith(("heat/", "fault/"))]
    tick(1.4, ended())
    for _ in range(70):
        tick(1.4)
    assert "heat/lab/h/r1" in twin.engine.findings.active


def test_after_a_window_silence_counts_from_its_end() -> None:
    """An hour of silence is no heat; what stays silent afterwards drifts as it would have then."""
    twin = Twin(two_racks())
    twin.run(3, OK)
    twin.tick(OK, begun("r1", seconds=9000.0))
    quiet = {"gpu.power_limit_w": 1200.0}
    twin.tick(quiet, dt_s=3600.0)
    view = twin.engine.view(1.0)
    assert (view.worst("gpu.temp_c") == 130.0).all()
    twin.tick(quiet, ended())
    after = []
    for _ in range(4):
        after.append(twin.engine.view(1.0).worst("gpu.temp_c").copy())
        twin.tick(quiet)
    for step, worst in enumerate(after):
        assert worst[72:].tolist() == [130.0] * 72
        np.testing.assert_allclose(worst[:72], 60.0 + max(0.0, step - 1.5) * 8.0, atol=1e-3)
    twin.run(20, quiet)
    assert (twin.engine.view(1.0).worst("gpu.temp_c") == 130.0).all()


@pytest.mark.parametrize("stands, expected", [(750.0, 1200.0), (400.0, 400.0)])
def test_what_people_set_by_hand_is_not_given_back(stands: float, expected: float) -> None:
    """Found at 1200 W and lapsed to the safe 750 W: given back, unless somebody has set something else."""
    twin = Twin(two_racks(), [Operator()], act=True)
    limit = np.full(144, 1200.0)
    twin.run(2, OK)
    twin.tick(OK, request(900.0, "r1/node0/gpu0"))
    twin.tick(OK, begun("r1"), ev.RequestWithdrawn(author="ann", request="q900.0"))
    limit[0] = stands
    for _ in range(40):
        twin.tick(OK | {"gpu.power_limit_w": limit})
    twin.tick(OK | {"gpu.power_limit_w": limit}, ended())
    for _ in range(60):
        for batch in twin.commands(CAP):
            limit[batch.index] = batch.value
        twin.tick(OK | {"gpu.power_limit_w": limit})
    assert limit[0] == expected


def site_changed(tree: dict[str, Any]) -> ev.SiteChanged:
    spec = SiteSpec(tree, {"gb200-nvl72": profile_tree("gb200-nvl72")})
    return ev.SiteChanged(site_hash=spec.digest(), spec=spec.packed())


def test_windows_move_with_their_entities() -> None:
    twin = Twin(two_racks(), [Wish()])
    twin.tick(OK, begun("r2"), begun("r1/node0", table="node", key="gone"), begun("r1", key="old"))
    twin.tick(OK, ended("old"))
    twin.tick(None, site_changed(two_racks(racks="r[2-3]")))
    windows = twin.engine.windows
    assert [r["id"] for r in twin.records("maintenance_dropped")] == ["gone"]
    mask = windows.mask("gpu")
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == list(range(72))
    assert [(e.id, e.names) for e in windows.events()] == [("m", ("lab/h/r2",))]
    assert windows.site is twin.engine.site
    assert "gpu" not in windows.ended_ns, "nothing is left of what ended"


@pytest.mark.long
def test_windows_survive_a_restart_and_change_the_checksum() -> None:
    twin = Twin(two_racks(), [ThermalGuard()], act=True)
    plain = Twin(two_racks(), [ThermalGuard()], act=True)
    for pod, events in ((twin, [begun("r1", seconds=50.0), begun("r2", key="x")]), (plain, [])):
        pod.tick(OK, *events)
        pod.run(3, OK | {"gpu.temp_c": 90.0})
    twin.tick(OK, ended("x"))
    plain.tick(OK)
    assert twin.engine.checksum() != plain.engine.checksum()
    back = twin.restarted(two_racks(), [ThermalGuard()])
    assert back.engine.checksum() == twin.engine.checksum()
    for _ in range(60):
        one, other = (p.tick(OK | {"gpu.temp_c": 88.0}) for p in (twin, back))
        assert digest(bodies_of(one)) == digest(bodies_of(other))
    assert back.engine.checksum() == twin.engine.checksum()


@pytest.mark.long
def test_the_same_frames_give_the_same_decisions() -> None:
    rng = np.random.default_rng(9)
    twin = Twin(two_racks(), [ThermalGuard(), Operator()], act=True)
    frames: list[Frame] = []
    take = twin.inbox.take

    def kept(*args: Any) -> Frame:
        frames.append(take(*args))
        return frames[-1]

    twin.inbox.take = kept  # type: ignore[method-assign]
    said = []
    for second in range(120):
        events: list[ev.Event] = []
        if second % 20 == 5:
            events.append(begun(f"r{second // 20 % 2 + 1}", key=f"w{second}", seconds=second + 15.0))
        if second % 30 == 8:
            events.append(ended(f"w{second - 3}"))
        temp = 60.0 + 35.0 * (rng.random(144) < 0.2)
        twin.tick({"gpu.temp_c": temp, "gpu.power_limit_w": 1200.0}, *events)
        said.append(digest(bodies_of(twin.decision)))
    again = Engine(site_of(two_racks()), [ThermalGuard(), Operator()], [],
                   {"thermal_guard": "act", "operator": "act"})  # fmt: skip
    assert [digest(bodies_of(again.tick(frame))) for frame in frames] == said
    assert again.checksum() == twin.engine.checksum()


def test_without_windows_nothing_is_masked() -> None:
    windows = Windows(site_of(two_racks()))
    assert windows.mask("gpu") is None
    assert windows.racks_touched() is None
    assert windows.excused("gpu", 0, 1.0) is None
    assert windows.expire(10**18) == []


@pytest.mark.parametrize("temp_c", [60.0, np.nan], ids=["silent", "bad"])
def test_who_has_spoken_since_a_window_drifts_as_ever(temp_c: float) -> None:
    """Of two that came out of a window one spoke again and then fell silent."""
    twin = Twin(eight_nodes())
    twin.run(3, {"gpu.temp_c": 50.0})
    twin.tick(None, begun("r1", seconds=9000.0))
    twin.tick(None, dt_s=600.0)
    twin.tick(None, ended())
    twin.tick({"gpu.temp_c": [40.0] + [np.nan] * 7})
    slew = float(twin.site.limits["gpu.temp_c"].slew_per_s[0])
    row = {"gpu.temp_c": np.full(8, np.nan)} if np.isnan(temp_c) else None
    for step in range(1, 6):
        twin.tick(row)
        worst = twin.engine.view(1.0).worst("gpu.temp_c")
        assert worst[0] == pytest.approx(40.0 + max(0.0, step - 1.5) * slew, abs=1e-3)
        assert worst[1] == pytest.approx(50.0 + max(0.0, step + 1 - 1.5) * slew, abs=1e-3)


def test_a_window_that_ends_as_the_site_changes_leaves_what_people_set() -> None:
    twin = Twin(two_racks(), [Operator()], act=True)
    limit = np.full(144, 1200.0)
    twin.run(2, OK)
    twin.tick(OK, request(900.0, "r2/node0/gpu0"))
    twin.tick(OK, begun("r2"), ev.RequestWithdrawn(author="ann", request="q900.0"))
    limit[72] = 400.0
    twin.run(40, OK | {"gpu.power_limit_w": limit})
    twin.tick(None, ended(), site_changed(two_racks(racks="r[2-3]")))
    twin.run(5)
    assert np.isnan(twin.lease(CAP)).all()
    assert np.isnan(twin.engine.arbiter.leases[CAP].found).all()
