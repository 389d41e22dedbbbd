"""Leadership: what the beginning and the end of a term put to the engine, and when a command may leave."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.builders import spec_of, two_racks
from tests.unit.test_target_handover import goal
from twin.contracts import LeaderRecord
from twin.daemon import leadership as module
from twin.daemon.authority import AuthorityBook
from twin.daemon.handover import Handover, read_handover
from twin.daemon.leader import Term
from twin.daemon.leadership import Leadership
from twin.site import build_site
from twin.telemetry import (
    AuthorityChanged,
    EpochChanged,
    Held,
    LoadTargetWithdrawn,
    MaintenanceBegun,
    MaintenanceEnded,
    OperatorRequest,
    Released,
    RequestWithdrawn,
    Resumed,
)

OWN, NEXT = 7, 9
WINDOW = MaintenanceBegun(id="w1", author="ann", table="rack", names=("lab/h/r1",), until_ns=9)
REQUEST = OperatorRequest(
    id="q1", author="ann", control="gpu.power_cap_w", names=("lab/h/r1/node0/gpu0",), lo=0.0, hi=500.0,
    reason="why", expires_ns=9,
)  # fmt: skip


class Chosen:
    """An election that the test holds."""

    def __init__(self) -> None:
        self.told: Any = None
        self.allows = True
        self.heads: list[tuple[dict[str, Any], bool]] = []

    async def run(self, on_change: Any) -> None:
        self.told = on_change
        await asyncio.Event().wait()

    def may_act(self) -> bool:
        return self.allows

    def publish_head(self, head: str, soon: bool = False) -> None:
        self.heads.append((json.loads(head), soon))

    def status(self) -> dict[str, Any]:
        return {}


class Daemon:
    """A leadership with an engine of plain values; `put` and `notes` are what it gave."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.election = Chosen()
        self._patch = monkeypatch
        monkeypatch.setattr(module, "election_name", lambda site: site.file.site)
        monkeypatch.setattr(module, "make_election", lambda loaded, name: self.election)
        self.put: list[Any] = []
        self.notes: list[Any] = []
        self.changes: list[bool] = []
        arbiter = SimpleNamespace(epoch=0, mode="normal")
        targets = SimpleNamespace(events=tuple)
        self.intake = SimpleNamespace(authority={"guard": "act"}, requests={}, load_targets=targets)
        self.windows: list[Any] = []
        engine = SimpleNamespace(
            site=SimpleNamespace(file=SimpleNamespace(site="lab")),
            arbiter=arbiter,
            intake=self.intake,
            windows=SimpleNamespace(events=lambda: tuple(self.windows)),
            health=SimpleNamespace(book=SimpleNamespace(returned=dict)),
        )
        self.live = SimpleNamespace(
            loaded=None, engine=engine, stopping=False, role="", epoch=0, note=self.notes.append
        )
        opened = SimpleNamespace(
            authority=AuthorityBook(folder, {"guard": "act"}),
            recorder=SimpleNamespace(chain=SimpleNamespace(head="abc")),
        )
        self.arbiter = arbiter
        self.leadership = Leadership(self.live, opened, self.put.extend)  # type: ignore[arg-type]
        self.leadership.on_change = self.changes.append

    def tell(self, *terms: Term | None) -> None:
        """Have the election tell of terms; of none, it does not answer in time."""
        self._patch.setattr(module, "FIRST_TERM_S", 60.0 if terms else 0.0)

        async def hear() -> None:
            task = asyncio.create_task(self.leadership.start())
            await asyncio.sleep(0)
            while self.election.told is None:
                await asyncio.sleep(0)
            for term in terms:
                self.election.told(term)
            await task
            await asyncio.sleep(0)
            running = self.leadership._task
            assert running is not None
            self.leadership._take_term = lambda term: None  # type: ignore[method-assign]
            running.cancel()
            await asyncio.wait([running])

        asyncio.run(hear())

    def levels(self) -> list[tuple[str, str]]:
        return [(e.author, e.authority) for e in self.put if isinstance(e, AuthorityChanged)]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    return Daemon(tmp_path, monkeypatch)


def after(left: Handover, epoch: int = 8) -> Term:
    return Term(NEXT, "here", "there", epoch, left.text())


def test_who_follows_another_adopts_all_that_it_left(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    daemon.intake.requests = {"old": REQUEST}
    gone = MaintenanceBegun(id="w0", author="ann", table="rack", names=("lab/h/r2",), until_ns=9)
    daemon.windows = [gone, WINDOW]
    left = Handover("head", {"guard": "advise"}, {"guard": 5}, "held", (WINDOW,), (REQUEST,))
    left.returned = {"lab/h/r1/node0": 5}
    daemon.tell(after(left))
    assert [type(e) for e in daemon.put] == [
        MaintenanceBegun, OperatorRequest, MaintenanceEnded, RequestWithdrawn, EpochChanged,
        AuthorityChanged, Held,
    ]  # fmt: skip
    ended, withdrawn, begun = daemon.put[2:5]
    assert (ended.author, ended.window) == ("takeover", "w0")
    assert (withdrawn.author, withdrawn.request) == ("takeover", "old")
    assert (begun.epoch, begun.head, begun.adopt) == (NEXT, "head", True)
    assert begun.returned == {"lab/h/r1/node0": 5}
    assert daemon.levels() == [("takeover", "advise")]
    assert daemon.notes == [LeaderRecord(epoch=NEXT, predecessor="there", head="head", adopt=True)]
    assert (daemon.live.role, daemon.live.epoch, daemon.changes) == ("leader", NEXT, [True])
    assert caplog.messages == ["this daemon leads with epoch 9; it adopts the commands in force"]


def test_a_level_of_the_leader_before_counts_though_no_person_set_it(daemon: Daemon) -> None:
    daemon.tell(after(Handover("head", {"guard": "advise", "unknown": "act"})))
    assert daemon.levels() == [("takeover", "advise")]
    assert daemon.leadership.opened.authority.decided_ns == {}


def test_who_follows_itself_adopts_nothing(daemon: Daemon) -> None:
    daemon.arbiter.epoch, daemon.intake.authority = OWN, {"guard": "advise"}
    daemon.tell(after(Handover("head", {"guard": "off"}, mode="released", returned={"n": 5}), OWN))
    assert [type(e) for e in daemon.put] == [EpochChanged, AuthorityChanged]
    assert not daemon.put[0].adopt
    assert daemon.put[0].returned == {}
    assert daemon.levels() == [("takeover", "act")], "its own book holds"


def test_the_first_term_of_all_adopts_nothing_and_a_new_daemon_adopts_what_a_run_before_left(
    daemon: Daemon,
) -> None:
    daemon.tell(Term(NEXT, "here"))
    assert not daemon.put[0].adopt
    daemon.put.clear()
    daemon.election.told(Term(NEXT + 1, "here", "there", 0, Handover("head").text()))
    assert daemon.put[0].adopt


@pytest.mark.parametrize(
    ("before", "own", "head", "adopts"),
    [(8, OWN, True, True), (8, OWN, False, True), (8, 0, False, True), (OWN, OWN, True, False),
     (0, OWN, True, False), (0, 0, True, True), (0, 0, False, False), (0, 1, True, False)],
)  # fmt: skip
def test_what_another_or_a_run_before_left_is_adopted_and_nothing_of_ones_own(
    daemon: Daemon, before: int, own: int, head: bool, adopts: bool
) -> None:
    daemon.arbiter.epoch = own
    daemon.tell(Term(NEXT, "here", "there", before, Handover("head").text() if head else ""))
    (begun,) = (e for e in daemon.put if isinstance(e, EpochChanged))
    assert begun.adopt == daemon.notes[0].adopt == adopts


@pytest.mark.parametrize(
    ("left", "own", "kinds"),
    [
        (Handover(mode="held", windows=()), "normal", [Held]),
        (Handover(mode="released", windows=()), "normal", [Released]),
        (Handover(mode="normal", windows=()), "held", [Resumed]),
        (Handover(mode="normal", windows=()), "normal", []),
        (Handover(mode="", windows=()), "held", []),
    ],
)
def test_a_hold_or_a_release_goes_on_and_its_end_too(
    daemon: Daemon, left: Handover, own: str, kinds: list[type]
) -> None:
    daemon.arbiter.mode = own
    modes: list[Any] = list(daemon.leadership._mode_of(left))
    assert [type(e) for e in modes] == kinds
    assert all(e.author == "takeover" for e in modes)
    assert all(e.reason for e in modes if isinstance(e, Held | Released))


def test_windows_that_are_not_known_hold_the_site(daemon: Daemon) -> None:
    (held,) = daemon.leadership._mode_of(Handover(mode="normal", lost=3))
    assert type(held) is Held
    assert (held.author, held.reason) == ("takeover", "not all maintenance windows are known here")
    assert daemon.leadership._mode_of(Handover(mode="normal")) == []
    assert daemon.leadership._mode_of(Handover(mode="normal", windows=(), lost=3)) == [], "only requests"


def test_the_end_of_a_term_takes_the_authority_back_once(daemon: Daemon) -> None:
    daemon.tell(Term(NEXT, "here"), None, None)
    assert daemon.levels() == [("standby", "advise")]
    assert daemon.notes[-1] == LeaderRecord(lost=NEXT)
    assert (daemon.live.role, daemon.changes) == ("standby", [True, False])


def test_who_hears_of_no_term_stands_by(daemon: Daemon) -> None:
    daemon.tell()
    assert daemon.live.role == "standby"
    assert daemon.levels() == [("standby", "advise")]
    assert daemon.changes == []


def test_a_command_may_leave_in_a_term_that_engine_and_election_know_and_not_at_the_end(
    daemon: Daemon,
) -> None:
    lead = daemon.leadership
    assert not lead.may_act()
    daemon.tell(Term(NEXT, "here"))
    assert not lead.may_act(), "the engine has not begun it"
    daemon.arbiter.epoch = NEXT
    assert lead.may_act()
    daemon.election.allows = False
    assert not lead.may_act()
    daemon.election.allows, daemon.live.stopping = True, True
    assert not lead.may_act()


def test_a_successor_is_told_at_once_what_people_changed_and_the_head_in_time(daemon: Daemon) -> None:
    lead, quiet = daemon.leadership, SimpleNamespace(events=(), now_ns=5)
    lead.after(quiet, None)  # type: ignore[arg-type]
    assert daemon.election.heads == [], "who does not lead leaves nothing"
    daemon.tell(Term(NEXT, "here"))
    daemon.arbiter.epoch = NEXT
    lead.after(quiet, None)  # type: ignore[arg-type]
    lead.opened.recorder.chain.head = "def"
    lead.after(quiet, None)  # type: ignore[arg-type]
    daemon.intake.requests, daemon.windows = {"q1": REQUEST}, [WINDOW]
    daemon.live.engine.health.book.returned = lambda: {"lab/h/r1/node0": 5}
    told = SimpleNamespace(
        events=(AuthorityChanged(author="ann", policy="guard", authority="act"),), now_ns=6
    )
    lead.after(told, None)  # type: ignore[arg-type]
    assert [soon for _, soon in daemon.election.heads] == [True, False, True]
    assert [tree["head"] for tree, _ in daemon.election.heads] == ["abc", "def", "def"]
    left = read_handover(json.dumps(daemon.election.heads[-1][0]))
    assert (left.requests, left.decided_ns, left.mode) == ([REQUEST], {"guard": 6}, "normal")
    assert (left.windows, left.targets, left.authority) == ([WINDOW], [], {"guard": "act"})
    assert (left.returned, left.lost) == ({"lab/h/r1/node0": 5}, 0)
    assert lead.status()["may_act"]


def test_what_is_not_known_of_the_leader_before_ends_nothing_here(daemon: Daemon) -> None:
    daemon.intake.requests, daemon.windows = {"q1": REQUEST}, [WINDOW]
    assert daemon.leadership._requests_of(Handover(lost=2)) == []
    assert daemon.leadership._requests_of(Handover(windows=(), requests=(REQUEST,))) == [
        REQUEST,
        MaintenanceEnded(author="takeover", window="w1"),
    ]


def test_a_load_target_that_the_leader_before_no_longer_had_is_withdrawn(daemon: Daemon) -> None:
    daemon.intake.load_targets.events = lambda: (goal("peak"),)
    (gone,) = daemon.leadership._requests_of(Handover(targets=()))
    assert gone == LoadTargetWithdrawn(author="takeover", target="peak")


def test_a_policy_that_does_not_run_here_is_given_nothing(daemon: Daemon) -> None:
    daemon.leadership.opened.authority.levels["gone"] = "act"
    daemon.tell()
    assert [e.policy for e in daemon.put] == ["guard"]


def test_the_status_says_when_it_was_so(daemon: Daemon) -> None:
    before_s = time.monotonic()
    status = daemon.leadership.status()
    assert status.keys() == {"may_act", "at_s"}
    assert before_s <= status["at_s"] <= time.monotonic()
    assert status["may_act"] is False


def test_who_never_began_has_nothing_to_resign(daemon: Daemon) -> None:
    asyncio.run(daemon.leadership.stop())


def test_a_level_that_is_on_its_way_is_not_asked_for_again(daemon: Daemon) -> None:
    lead = daemon.leadership
    lead.opened.authority.levels |= {"cap": "approve", "log": "advise"}
    daemon.intake.authority = {"guard": "act", "cap": "approve", "log": "advise"}
    daemon.tell()
    asked = [(e.policy, e.authority) for e in daemon.put]
    assert asked == [("guard", "advise"), ("cap", "advise")], "who only advises goes on"
    assert lead._authorities(None, standby=True) == []
    back = lead._authorities(None, standby=False)
    assert back == [
        AuthorityChanged(author="takeover", policy="guard", authority="act"),
        AuthorityChanged(author="takeover", policy="cap", authority="approve"),
    ]
    assert lead._authorities(None, standby=False) == []


@pytest.mark.parametrize("author", ["standby", "takeover", "configuration", "ann"])
def test_only_what_people_decide_counts_as_decided(daemon: Daemon, author: str) -> None:
    event = AuthorityChanged(author=author, policy="guard", authority="off")
    daemon.leadership.after(SimpleNamespace(events=(event,), now_ns=6), None)  # type: ignore[arg-type]
    assert daemon.leadership.opened.authority.decided_ns == ({"guard": 6} if author == "ann" else {})


def test_who_leads_keeps_what_people_allowed_and_says_if_it_cannot(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    lead, book = daemon.leadership, daemon.leadership.opened.authority
    daemon.intake.authority = {"guard": "off"}
    lead.keep_authority()
    assert book.levels == {"guard": "act"}, "a standby holds what is not its own"
    daemon.tell(Term(NEXT, "here"))
    daemon.arbiter.epoch = NEXT
    lead.keep_authority()
    assert AuthorityBook(book.path.parent, {"guard": "act"}).levels == {"guard": "off"}
    book.path = book.path / "below a file" / "authority.json"
    lead.keep_authority()
    assert "authority.json: cannot be written" in caplog.text
    assert "after a restart the authority of before holds again" in caplog.text


ARM, DISARM = (AuthorityChanged(author="ann", policy="guard", authority=v) for v in ("act", "advise"))
HOLD, WITHDRAW = Held(author="ann"), RequestWithdrawn(author="ann", request="q1")


def test_a_standby_takes_withdrawals_and_a_daemon_that_stops_nothing(daemon: Daemon) -> None:
    lead = daemon.leadership
    assert lead.veto(HOLD) == "this daemon is a standby; ask the leader"
    assert lead.veto(WITHDRAW) is None
    lead.term = Term(NEXT, "here")
    assert lead.veto(HOLD) is None
    daemon.live.stopping = True
    assert [lead.veto(e) for e in (HOLD, WITHDRAW)] == ["the daemon stops"] * 2


@pytest.mark.parametrize(
    ("budget_w", "armed", "why"),
    [
        (300_000.0, True, None),
        (50_000.0, True, "lab/h/a: "),
        (50_000.0, False, "the embedded broker knows no identities"),
    ],
)
def test_nobody_is_armed_where_a_lapse_would_break_a_budget(
    daemon: Daemon, budget_w: float, armed: bool, why: str | None
) -> None:
    lead, tree = daemon.leadership, two_racks()
    for feeder in tree["halls"][0]["feeders"]:
        feeder["budget_w"] = budget_w
    spec = spec_of(tree)
    lead.opened.spec = spec
    daemon.live.engine.site = build_site(spec)
    daemon.live.loaded = SimpleNamespace(config=SimpleNamespace(broker="embedded", simulated=armed))
    lead.term = Term(NEXT, "here")
    told = lead.veto(ARM)
    assert (told is None) if why is None else (told is not None and why in told)
    assert lead.veto(DISARM) is None
    assert lead.veto(HOLD) is None


@pytest.mark.parametrize("error", [OSError("no disk"), asyncio.CancelledError()])
def test_an_election_that_fails_ends_the_term_and_is_tried_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    lead, runs, real = daemon.leadership, [0], asyncio.sleep

    async def run(on_change: Any) -> None:
        runs[0] += 1
        if runs[0] == 1:
            on_change(Term(NEXT, "here"))
            raise error
        await asyncio.Event().wait()

    async def play() -> None:
        await lead.start()
        while runs[0] < 2:
            await real(0)
        assert lead.term is None
        assert lead._task is not None
        await lead.stop()
        assert lead._task.cancelled()

    monkeypatch.setattr(module, "FIRST_TERM_S", 60.0)
    monkeypatch.setattr(daemon.election, "run", run)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real(0))
    asyncio.run(play())
    assert daemon.changes == [True, False]
    assert daemon.live.role == "standby"
