"""NVLinks: which one recovers is named by both ends at the first sweep that shows it, and no other ever."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from tests.support.builders import START_NS, site_of, two_racks
from tests.support.nvlink_case import (
    DAYS_TO_FAILURE,
    GPU,
    GPUS,
    LIFETIME,
    LINK,
    LINKS,
    MORE,
    NODE,
    NODES,
    SWEEP_S,
    TREE,
    LinkCase,
    sweep,
)
from tests.support.recurring_devices import DAY_S, HOUR_S, Watched, chance, racks
from twin.api.answers import Refused
from twin.api.health import of_name
from twin.catalogue import NS
from twin.cli.operate.health import show
from twin.contracts import DEGRADED, HEALTHY, WATCH
from twin.health.nvlinks import NAMED_NS, PORTS, Nvlinks
from twin.health.recurring import RECOVERIES, lifetime_nats
from twin.telemetry import FaultReported, NvlinksCounted

ALARM = "health/lab/h/r4/node2"
ENDS = f"lab/h/r4/node2/gpu0/nvlink{LINK} to switch chip {LINK} of lab/h/r4 (by its profile, not reported)"


@pytest.fixture
def case() -> LinkCase:
    """The five racks after two sweeps that found the same counts."""
    case = LinkCase()
    for _ in range(2):
        assert case.sweeps(LIFETIME, 60.0) == []
    return case


def levels(case: LinkCase) -> dict[int, int]:
    """GPUs of whom the verdict is worse than unknown."""
    level = case.engine.health.health("gpu").level
    return {int(i): int(level[i]) for i in np.flatnonzero(level >= WATCH)}


def told(case: LinkCase, part: str = "gpu", index: int = GPU) -> dict[str, str]:
    """The evidence on a part, by rule."""
    return {e.rule: e.text for e in case.engine.health.verdicts.evidence(part, index)}


# -- the case of a public report, see tests/support/nvlink_case.py


def test_a_life_of_recoveries_alone_is_watched(case: LinkCase) -> None:
    assert levels(case) == {GPU: WATCH}
    text = told(case)["nvlink_recovered"]
    assert f"{ENDS} had recovered 505 times before it was watched, of the other 5,759 links none did" in text


@pytest.mark.parametrize(("more", "sweep_s"), [(MORE, SWEEP_S), (1, SWEEP_S), (1, 10.0)])
def test_the_first_sweep_that_shows_growth_names_the_link(case: LinkCase, more: int, sweep_s: float) -> None:
    assert case.sweeps(LIFETIME + more, sweep_s) == [ALARM]
    assert levels(case) == {GPU: DEGRADED}
    (finding,) = (f for f in case.decision.findings if f.id == ALARM)
    assert finding.severity == "warning"
    assert finding.title == "lab/h/r4/node2: gpu0: an NVLink keeps recovering"
    assert finding.action == "Drain the node and ask the vendor's support."
    times = "once" if more == 1 else f"{more} times"
    assert (
        f"{ENDS} had recovered 505 times before it was watched and recovered {times}" in finding.evidence[0]
    )
    assert "loses 1 of its 18 links to the other 63 GPUs of lab/h/r4" in finding.evidence[0]


def test_the_fatal_xid_five_days_later_is_of_the_same_alarm(case: LinkCase) -> None:
    assert case.sweeps(LIFETIME + MORE, SWEEP_S) == [ALARM]
    assert case.passes(6.0) == {ALARM}
    assert case.sweeps(LIFETIME + MORE + 1, 60.0) == [ALARM]
    for _ in range(round((DAYS_TO_FAILURE - 0.25) * 8)):
        case.look(dt_s=3 * HOUR_S)
        assert case.alarms() == [ALARM]  # at every look, so that it is one alarm
    first = NODE // NODES * NODES * GPUS
    assert case.dies([g for g in range(first, first + NODES * GPUS) if g != GPU]) == [ALARM]
    (finding,) = (f for f in case.decision.findings if f.id == ALARM)
    assert finding.severity == "critical"
    assert "XID 149" in finding.title
    assert any("XID 149 names it" in text and ENDS in text for text in finding.evidence)
    case.look(dt_s=60.0)
    assert case.alarms() == [ALARM]


def test_nodes_that_a_known_link_takes_down_are_of_its_alarm(case: LinkCase) -> None:
    case.sweeps(LIFETIME + MORE, SWEEP_S)
    first = NODE // NODES * NODES * GPUS
    case.dies([g for g in range(first, first + NODES * GPUS) if g != GPU], "Fatal")
    assert case.alarms() == [ALARM]
    (finding,) = (f for f in case.decision.findings if f.id == ALARM)
    assert finding.severity == "critical"
    assert finding.evidence[1].startswith("15 more nodes of its scale-up domain failed with it")
    strangers = LinkCase()  # the same XIDs, of which no link was known before
    strangers.dies([g for g in range(first, first + NODES * GPUS) if g != GPU], "Fatal")
    assert strangers.alarms() == ["health/shared"]


def together(case: LinkCase, recoveries: int, *events: Any) -> list[str]:
    """A sweep that finds as many recoveries on links of two nodes of a rack; the ids of the alarms."""
    total = np.zeros(case.site.sizes["gpu"], np.int64)
    total[[GPU, GPU + GPUS]] = recoveries
    told = [*sweep(case.site, recoveries)[: NODE + 1], *sweep(case.site, recoveries, NODE + 1)[NODE + 1 :]]
    case.look(*told, *events, counts={RECOVERIES: total})
    return case.alarms()


def test_none_of_two_links_that_recover_is_hidden_behind_the_other() -> None:
    case = LinkCase()
    both = [ALARM, "health/lab/h/r4/node3"]
    for recoveries in (LIFETIME, LIFETIME, LIFETIME + 1):
        ids = together(case, recoveries)
    assert ids == both
    first = NODE // NODES * NODES * GPUS
    rack = range(first, first + NODES * GPUS)
    assert case.dies([g for g in rack if g != GPU], "Fatal") == both


def test_a_link_that_recovers_stands_beside_nodes_that_went_down_with_it_unnamed(case: LinkCase) -> None:
    case.sweeps(LIFETIME + MORE, SWEEP_S)
    first = NODE // NODES * NODES * GPUS
    xids = [case._xid(gpu, 149, "NETIR_LINK_DOWN Fatal") for gpu in range(first, first + NODES * GPUS)]
    case.look(*xids, dt_s=10.0)
    assert case.alarms() == [ALARM, "health/shared"]


def test_a_node_that_was_down_before_is_no_follower(case: LinkCase) -> None:
    other = GPU + GPUS
    case.look(case._xid(other, 149, "NETIR_LINK_DOWN Fatal"), dt_s=10.0)
    down = ["health/lab/h/r4/node3"]
    assert case.alarms() == down
    case.passes(6.0)
    assert case.sweeps(LIFETIME + MORE, SWEEP_S) == [ALARM, *down]
    assert case.dies() == [ALARM, *down]


def test_a_link_that_goes_on_recovering_for_weeks_is_not_taken_for_usual() -> None:
    watch = Watched(racks(5))
    for hour in range(8, 21 * 24, 8):
        watch.look(hour * HOUR_S, {RECOVERIES: [7]})
        assert watch.recurring.failing[7] or hour < 24
    watch.look((hour + 7 * 24) * HOUR_S)
    assert not watch.recurring.failing.any()


def test_without_a_life_before_one_recovery_is_no_alarm_and_four_in_four_hours_are() -> None:
    case = LinkCase()
    for _ in range(2):
        assert case.sweeps(0, 60.0) == []
    assert [case.sweeps(k, HOUR_S) for k in (1, 2)] == [[], []]
    assert case.alarms() == []
    assert "nvlink_recovered" not in told(case)
    case.sweeps(3, HOUR_S)
    assert case.sweeps(4, HOUR_S) == [ALARM]
    assert f"{ENDS} recovered 4 times" in told(case)["nvlink_recovering"]


@pytest.mark.parametrize(("sweep_s", "times"), [(40 * 60.0, 4), (21 * 60.0, 3), (60.0, 1)])
def test_recoveries_of_a_long_sweep_count_at_most_one_in_ten_minutes(sweep_s: float, times: int) -> None:
    case = LinkCase()
    for _ in range(2):
        case.sweeps(0, 60.0)
    case.sweeps(4, sweep_s)
    cycles = case.engine.health.recurring.cycles[RECOVERIES]
    assert (cycles.index.tolist(), cycles.count.tolist()) == ([GPU], [times])
    assert (case.now_ns - cycles.first_ns[0]) / NS == (sweep_s if times > 1 else 0.0)


# -- quiet


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_noisy_links_raise_no_alarm_in_ten_days(seed: int) -> None:
    """5,760 links, of which 1 % are noisy. Rates of both are estimates: no site has published them.

    A usual link has an error or replay in some hundred days. A noisy one errs once and replays twice a day,
    recovers once in 20 days, and did so a few times before.
    """
    rng = np.random.default_rng([9086, seed])
    site = site_of(TREE)
    watch = Watched(site)
    gpus, days = site.sizes["gpu"], 10.0
    noisy = rng.choice(gpus * LINKS, gpus * LINKS // 100, replace=False) // LINKS
    many = np.bincount(noisy, minlength=gpus)
    life = rng.poisson(3.0 * many).astype(np.int64)
    rates = {
        "gpu.nvlink_error_count": 0.005 + 1.0 * many,
        "gpu.nvlink_replay_count": 0.02 + 2.0 * many,
        RECOVERIES: 0.05 * many,
    }
    troubles = [t for key, per_day in rates.items() for t in chance(rng, per_day, days, key)]
    watch.live(troubles, days * DAY_S, life={RECOVERIES: life})
    assert len(noisy) == 57
    assert len(troubles) > 1000
    assert watch.alarmed == set()
    assert watch.failed == set()


def test_what_all_links_of_a_site_do_is_nobodys() -> None:
    watch = Watched(racks(2))
    gpus = watch.site.sizes["gpu"]
    life = {RECOVERIES: np.full(gpus, LIFETIME, np.int64)}
    for hour in range(1, 30):
        watch.look(hour * HOUR_S, {RECOVERIES: np.arange(hour % 7, gpus, 7)}, life=life)
    assert not watch.recurring.failing.any()


# -- how odd a life is


def test_the_nats_of_a_life_are_the_log_of_how_few_have_one_so_long() -> None:
    index = np.arange(320, dtype=np.int32)
    none = np.zeros(320)
    count = np.zeros(320, np.int64)
    assert not lifetime_nats(count, index, none).any()
    count[7] = LIFETIME
    nats = lifetime_nats(count, index, none)
    assert np.flatnonzero(nats).tolist() == [7]
    assert nats[7] == pytest.approx(np.log(320))
    assert lifetime_nats(count, index[7:8], np.array([LIFETIME - 9.0])).tolist() == [0.0]  # all of it is new
    count[20:40] = 60  # a tenth of 505 is not far from those of the others that have any
    assert not lifetime_nats(count, index, none).any()
    count[20:40] = 50
    assert np.flatnonzero(lifetime_nats(count, index, none)).tolist() == [7]
    count[8] = LIFETIME + 1
    assert lifetime_nats(count, index, none)[[7, 8]] == pytest.approx(np.log([160, 320]))
    count[9:12] = LIFETIME + np.arange(2, 5)  # a used site: of more than four none is odd but those
    assert np.flatnonzero(lifetime_nats(count, index, none)).tolist() == [8, 9, 10, 11]
    count[7:12] = LIFETIME
    assert not lifetime_nats(count, index, none).any()
    count[7:12] = [LIFETIME, LIFETIME + 1, 0, 0, 0]
    count[100:] = -1  # not read
    assert lifetime_nats(count, index, none)[8] == pytest.approx(np.log(100))


# -- the rows


def book() -> Nvlinks:
    """The counts of two racks of 18 nodes."""
    return Nvlinks(site_of(two_racks()))


def counted(node: str = "lab/h/r1/node1", read: int = 18, **rows: Any) -> NvlinksCounted:
    """Counts of a node's links."""
    return NvlinksCounted(name=node, read=(read,) * 4, **rows)


def test_only_links_that_counted_anything_take_a_row() -> None:
    links = book()
    for node in range(18):
        links.take([counted(f"lab/h/r1/node{node}")], START_NS)
    assert len(links) == 0
    assert links.read.sum() == 18 * 4 * 18
    links.take([counted(gpu=(2, 0), link=(17, 3), recoveries=(4, 0), errors=(9, 1))], START_NS)
    assert links.index.tolist() == [PORTS * 4 + 3, PORTS * 6 + 17]
    assert links.recoveries.tolist() == [0, 4]
    assert links.before.tolist() == [0, 0]  # it was read before, and stood at zero
    assert links.text(4) == ""
    assert "gpu2/nvlink17 to switch chip 17 of lab/h/r1" in links.text(6)


def test_recoveries_are_kept_by_day_for_four_weeks() -> None:
    nvlinks = book()
    days = [0, 1, 1, 20, 28]
    for k, day in enumerate(days):
        told = counted(gpu=(0,), link=(3,), recoveries=(10 + k,))
        nvlinks.take([told], START_NS + round(day * DAY_S) * NS)
    gpu = int(nvlinks.index[0]) // PORTS
    assert [count for _, count in nvlinks.recovered(gpu, 3)] == [2, 1, 1], "ten were before"
    again = book()
    again.restore(nvlinks.dump())
    assert again.recovered(gpu, 3) == nvlinks.recovered(gpu, 3)
    nvlinks.fade(START_NS + round(49 * DAY_S) * NS)
    assert [count for _, count in nvlinks.recovered(gpu, 3)] == [1]
    assert nvlinks.recovered(gpu, 4) == []


def test_a_count_of_a_day_ends_at_its_largest_number() -> None:
    nvlinks = book()
    for k, recoveries in enumerate((1, 5, 2**62)):
        nvlinks.take([counted(gpu=(0,), link=(3,), recoveries=(recoveries,))], START_NS + k * NS)
    ((_, count),) = nvlinks.recovered(int(nvlinks.index[0]) // PORTS, 3)
    assert count == 2**31 - 1


def test_counts_from_before_the_first_reading_are_told_apart() -> None:
    links = book()
    links.take([counted(gpu=(0,), link=(5,), recoveries=(7,))], START_NS)
    assert links.before.tolist() == [7]
    links.take([counted(gpu=(0,), link=(5,), recoveries=(9,), failures=(1,))], START_NS + 1)
    assert (
        "had recovered 7 times before it was watched and recovered 2 times, failed to recover once"
        in links.text(4)
    )
    links.take([counted(gpu=(0,), link=(5,), recoveries=(1,))], START_NS + 2)  # its driver was loaded again
    assert (links.before.tolist(), links.recoveries.tolist()) == ([0], [1])


def test_a_driver_that_was_loaded_again_leaves_its_links_no_past() -> None:
    links = book()
    rows: dict[str, Any] = {"gpu": (0, 1), "link": (5, 6), "recoveries": (505, 7), "far": ("a", "b")}
    links.take([counted(**rows)], START_NS)
    links.receive(
        [FaultReported(table="gpu", name="lab/h/r1/node1/gpu0", code=149, detail="Link 5")], START_NS
    )
    links.take([counted(read=17)], START_NS + 1)  # links that cannot be read now
    links.take([counted(read=0)], START_NS + 2)  # a GPU that left the bus
    assert links.recoveries.tolist() == [505, 7]
    links.take([counted(gpu=(1,), link=(6,), recoveries=(8,))], START_NS + 3)
    assert links.index.tolist() == [PORTS * 5 + 6]
    assert links.far == {PORTS * 5 + 6: "b"}
    assert links.level(4, 5, False) == HEALTHY


def test_of_several_counts_of_a_node_at_once_the_last_holds() -> None:
    links = book()
    rows: dict[str, Any] = {"gpu": (0,), "link": (5,)}
    links.take([counted(**rows, recoveries=(7,)), counted()], START_NS)
    assert len(links) == 0


@pytest.mark.parametrize(
    ("told", "kept"), [(1e300, 1.0), (-1.0, 0.0), (float("nan"), 0.0), (float("inf"), 0.0), (5e-12, 5e-12)]
)
def test_a_rate_that_cannot_be_is_within_bounds(told: float, kept: float) -> None:
    links = book()
    links.take([counted(gpu=(0,), link=(5,), recoveries=(7,), symbol_ber=(told,))], START_NS)
    assert links.symbol_ber.tolist() == pytest.approx([kept])


def test_an_xid_of_long_ago_names_no_link_any_more() -> None:
    links = book()
    links.take([counted(gpu=(0,), link=(5,), recoveries=(7,))], START_NS)
    xids = [
        FaultReported(table="gpu", name=f"lab/h/r1/node1/gpu{k}", code=149, detail="Link 5") for k in (0, 1)
    ]
    links.receive(xids, START_NS)
    links.receive(xids, START_NS + 1)
    assert [links.named_ns(gpu) for gpu in (4, 5)] == [START_NS, 0]
    links.fade(START_NS + NAMED_NS - 1)
    assert links.index.tolist() == [PORTS * 4 + 5, PORTS * 5 + 5]
    links.fade(START_NS + NAMED_NS)
    assert links.index.tolist() == [PORTS * 4 + 5]
    assert (links.named_ns(4), links.level(4, 5, False)) == (0, WATCH)


def test_the_link_that_grew_last_is_the_one_that_is_named() -> None:
    links = book()
    links.take([counted(gpu=(0, 0), link=(1, 2), recoveries=(900, 3))], START_NS)
    assert "nvlink1 " in links.text(4)
    links.take([counted(gpu=(0, 0), link=(1, 2), recoveries=(900, 4))], START_NS + 1)
    assert "nvlink2 " in links.text(4)


def test_what_the_device_tells_of_the_other_end_goes_before_the_profile() -> None:
    links = book()
    links.take([counted(gpu=(0,), link=(5,), recoveries=(7,), far=("NVSwitch 0000:05:00",))], START_NS)
    assert "gpu0/nvlink5 to NVSwitch 0000:05:00 " in links.text(4)
    wired = Nvlinks(site_of(two_racks("dgx-superpod-h100-su", "r[1-8]")))
    name = wired.name(PORTS * 9 + 5)
    assert name == (
        "lab/h/r1/node1/gpu1/nvlink5 to one of the 4 switch chips of lab/h/r1/node1 "
        "(by its profile, not reported)"
    )
    bare = Nvlinks(site_of({"site": "s", "halls": [{"name": "h", "racks": [
        {"name": "r", "nodes": 1, "gpus_per_node": 1}]}]}))  # fmt: skip
    assert bare.name(5) == "s/h/r/node0/gpu0/nvlink5 (far end not known)"


def test_rows_that_cannot_be_are_left_out() -> None:
    links = book()
    links.take([counted("lab/h/r9/node1", gpu=(0,), link=(5,), recoveries=(7,))], START_NS)
    links.take([counted(gpu=(4, -1, 0, 0), link=(0, 0, PORTS, -1), recoveries=(7,) * 4)], START_NS)
    links.take([counted(gpu=(0, 1), link=(5,), recoveries=())], START_NS)
    assert links.index.tolist() == [PORTS * 4 + 5]
    assert links.recoveries.tolist() == [0]
    for detail in ("Link 99", "Link -1", "no link", "Link 14"):
        links.receive(
            [FaultReported(table="gpu", name="lab/h/r9/node1/gpu0", code=149, detail=detail)], START_NS
        )
    links.receive(
        [FaultReported(table="gpu", name="lab/h/r1/node1/gpu0", code=79, detail="Link 14")], START_NS
    )
    assert not links.code.any()


def test_another_gpu_in_the_slot_has_other_links() -> None:
    links = book()
    links.take([counted(gpu=(0, 1), link=(5, 5), recoveries=(7, 8), far=("a", "b"))], START_NS)
    links.forget("gpu", 4)
    assert links.index.tolist() == [PORTS * 5 + 5]
    assert (links.far, links.read[4:6].tolist()) == ({PORTS * 5 + 5: "b"}, [0, 18])


def test_links_move_with_their_gpus_and_survive_a_snapshot() -> None:
    links = book()
    links.take([counted(gpu=(1,), link=(5,), recoveries=(8,), far=("b",))], START_NS)
    one = site_of(two_racks(racks="r2"))
    moved, back = Nvlinks(one), Nvlinks(links.site)
    gpu = np.concatenate([np.full(67, -1), np.arange(1, 6)]).astype(np.int32)  # the sixth comes last
    moved.adopt(links, {"gpu": gpu})
    assert (moved.index.tolist(), moved.far) == ([PORTS * 71 + 5], {PORTS * 71 + 5: "b"})
    back.restore(links.dump())
    assert back.text(5) == links.text(5) != ""


def test_counts_press_no_ids_of_other_events_out() -> None:
    case = LinkCase()
    known = dict(case.engine.intake.seen)
    case.look(*(msgspec.structs.replace(e, id=f"{e.name}#1") for e in sweep(case.site, 7)))
    assert dict(case.engine.intake.seen) == known
    assert case.engine.health.nvlinks.recoveries.tolist() == [7]


def test_a_healthy_site_says_nothing_of_its_links() -> None:
    case = LinkCase()
    case.sweeps(0, 60.0)
    assert set(case.engine.health.health("gpu").level[[0, GPU]].tolist()) == {HEALTHY}


# -- asked by name


def shown(case: LinkCase, name: str) -> tuple[dict[str, Any], str]:
    """(answer, page on a terminal) on the health of a name."""
    live: Any = SimpleNamespace(engine=case.engine)
    tree = of_name(live, name)
    out = Console(width=300, record=True, file=io.StringIO())
    show(tree, out)
    return tree, out.export_text()


def test_a_link_is_asked_for_by_name(case: LinkCase) -> None:
    name = f"lab/h/r4/node2/gpu0/nvlink{LINK}"
    tree, page = shown(case, name)
    assert (tree["part"], tree["name"], tree["level"], tree["action"]) == ("nvlink", name, "watch", "watch")
    assert tree["counts"] == {"recoveries": 505, "failures": 0, "errors": 0, "replays": 0, "symbols": 0}
    case.sweeps(LIFETIME + MORE, SWEEP_S)
    tree, page = shown(case, name)
    assert (tree["level"], tree["action"], tree["ends"]) == ("degraded", "contact_support", ENDS)
    assert sum(told["count"] for told in tree["recovered"]) == MORE, "those before it was watched have no day"
    for text in (
        ENDS,
        f"{MORE} on 20",
        "recoveries 508",
        "drain the node and ask the vendor's support",
        "1 of its 18 links",
    ):
        assert text in page
    other, page = shown(case, "lab/h/r4/node2/gpu0/nvlink13")
    assert (other["level"], other["why"], other["do"]) == ("healthy", "", "nothing to do")
    unread, page = shown(case, "lab/h/r4/node2/gpu0/nvlink40")
    assert (unread["level"], unread["counts"]) == ("unknown", {})
    assert "recovered not known: the link is not read" in " ".join(page.split())
    for stranger in ("lab/h/r4/node2/gpu0/nvlink64", "lab/h/r4/node2/gpu9/nvlink1", "gpu0/nvlinkx"):
        with pytest.raises(Refused):
            shown(case, stranger)


def test_a_gpu_lists_those_of_its_links_that_counted(case: LinkCase) -> None:
    case.sweeps(LIFETIME + MORE, SWEEP_S)
    tree, page = shown(case, "lab/h/r4/node2/gpu0")
    assert tree["nvlinks"]["read"] == 18
    assert "18 read, 1 of them with counts or an XID" in page
    assert f"degraded  {ENDS}: recoveries 508" in page
    (row,) = tree["nvlinks"]["counted"]
    assert (row["link"], row["name"], row["level"]) == (LINK, ENDS, "degraded")
    assert (row["counts"]["recoveries"], row["recovered"]) == (LIFETIME + MORE, MORE)
    assert shown(case, "lab/h/r4/node2/gpu1")[0]["nvlinks"] == {"read": 18, "counted": []}


def test_a_link_that_an_xid_names_is_degraded() -> None:
    case = LinkCase()
    case.sweeps(0, 60.0)
    case.dies()
    assert shown(case, f"lab/h/r4/node2/gpu0/nvlink{LINK}")[0]["level"] == "degraded"
    assert shown(case, f"lab/h/r4/node2/gpu0/nvlink{LINK - 1}")[0]["level"] == "healthy"
