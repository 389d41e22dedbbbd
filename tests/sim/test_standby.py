"""Two daemons for one site, of which one may act: what the other does meanwhile, and what happens when it
takes over, is deposed, or nobody can be elected. Agents, broker and etcd are real; devices are simulated."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.daemon_process import RunningDaemon
from tests.support.standby_pair import CAP, HOT_C, SAFE_W, TERM_S, TOP_W, Pair, epoch, levels, pair, role
from twin.run import journal_lines
from twin.run.journal import line_hash

pytestmark = [pytest.mark.slow, pytest.mark.long]
Server = Callable[..., Path]
TARGETS = "/api/v1/load-targets"


def heads(one: RunningDaemon) -> list[str]:
    """The head of its journal after each line, from the oldest."""
    return [line_hash(line) for line in journal_lines(one.run_folder / "journal.jsonl")]


def term_of(one: RunningDaemon) -> dict[str, Any]:
    """Return the last term that this daemon won, as its journal has it."""
    said = [line["body"] for line in one.journal("leader") if "epoch" in line["body"]]
    assert said, "no term in the journal"
    return said[-1]


def test_a_standby_takes_over_from_a_frozen_leader_which_gets_nothing_through(
    server: Server, tmp_path: Path
) -> None:
    with pair(server, tmp_path) as two:
        two.start(hot=3)
        caps = two.capped(two.a, node=3)
        the_standby_looks_on(two)
        old, mark = epoch(two.a), two.client.mark()
        forged = [m for m in two.client.heard if "/Request/" in m.topic][-1]
        two.a.send(signal.SIGSTOP)
        stopped = time.monotonic()
        two.until_leads(two.b)
        new = epoch(two.b)
        assert new > old
        first = two.client.wait(lambda m: "/Request/" in m.topic and m.body["epoch"] == new, mark)
        print(f"\nfrozen: the first command after {first.at_s - stopped:.2f} s")
        two.b.until(lambda: settled_on(two, new, caps), what="every cap under the new epoch")
        # A protective decrease passes at once, while all else rests; the frozen one would say so too.
        two.racks.heat(7, HOT_C)
        mark = two.client.mark()
        two.a.send(signal.SIGCONT)
        two.a.until(lambda: role(two.a) == "standby", what="the deposed one to notice")
        two.b.until(lambda: two.racks.caps(7).max() < SAFE_W, what="caps on the second hot node")
        late = [m for m in two.client.heard[mark:] if "/Request/" in m.topic and m.body["epoch"] == old]
        assert not late
        two.a.until(lambda: two.a.journal("leader")[-1]["body"] == {"lost": old}, what="its lost term")
        limits = two.eye.since(stopped - 1)
        # Of GPUs that warm up so fast the whole rack may be cut: its coolant may have stopped
        rack = np.arange(len(caps)) < 72
        assert (limits[:, ~rack] == caps[~rack]).all(), "nothing else moves: neither up nor to safe values"
        assert (np.diff(limits[:, rack], axis=0) <= 0).all(), "downwards alone"
        the_old_epoch_is_refused(two, forged, old, new)
        handed_over(two.b, new, two.a)
        # Later the first leads again, above both.
        time.sleep(1.5)
        two.b.kill()
        took = two.until_leads(two.a)
        assert epoch(two.a) > new
        armed = {"thermal_guard": "act", "operator": "act"}
        two.a.until(lambda: levels(two.a).items() >= armed.items(), what="its policies to be armed")
        two.a.until(lambda: two.eye.epochs()[-1] > new, what="commands of the new term")
        print(f"\nkill -9, and back: {took:.2f} s")
        handed_over(two.a, epoch(two.a), two.b)
        accepted = two.eye.epochs()
        assert accepted == sorted(accepted)
        assert two.racks.caps()[4 * 3 : 4 * 4].max() < SAFE_W


def handed_over(to: RunningDaemon, new: int, by: RunningDaemon) -> None:
    """The journal of the new leader names the old one and a recent head of its journal, and adopts."""
    term = term_of(to)
    assert (term["epoch"], term["predecessor"], term["adopt"]) == (new, by.folder.name, True)
    assert term["head"] in heads(by)[-60:]
    assert any(e["body"]["event"].get("head") == term["head"] for e in to.journal("event"))
    assert to.journal("settling")


def settled_on(two: Pair, new: int, caps: Any) -> bool:
    """Return True if every cap that was in force is leased under the new epoch, at its value."""
    held = two.b.get(f"/api/v1/leases?control={CAP}&limit=1000")["leases"]
    done = {row["name"] for row in held if row["state"] == "done"}
    leased = [i for n in two.racks.fleet.nodes.values() for i in n.book.leases.values() if i.epoch == new]
    count = int((caps < TOP_W).sum())
    return len(done) >= count and len(leased) >= count


def the_standby_looks_on(two: Pair) -> None:
    """`b` sees what `a` sees, says so, and nobody may ask it for anything."""
    b = two.b
    assert role(b) == "standby"
    assert set(levels(b).values()) == {"advise"}
    a_temp, b_temp = (
        np.array(one.get("/api/v1/state/gpu?signals=temp_c&limit=1000")["signals"]["temp_c"]["value"], float)
        for one in (two.a, b)
    )
    np.testing.assert_allclose(a_temp, b_temp, atol=2.0)
    b.until(lambda: b.journal("advice"), what="advice: what it would do")
    assert not b.journal("command")
    asked = {
        "hold": {"reason": "a test"},
        "requests": {"control": CAP, "names": ["lab/h/r1"], "hi": 900, "reason": "a test", "for_s": 60},
        "maintenance": {"table": "node", "names": ["lab/h/r1/node1"], "reason": "a test", "for_s": 60},
        "authority": {"policy": "thermal_guard", "authority": "off", "reason": "a test"},
    }
    for path, body in asked.items():
        status, answer = b.ask("POST", f"/api/v1/{path}", body)
        assert status == 409
        assert "is a standby; ask the leader" in json.dumps(answer)
    led = epoch(two.a)
    assert set(two.eye.epochs()) == {led}, "only the leader's commands were accepted"
    said = {(m.body["state"], m.body["role"]) for m in two.client.heard if "/Daemon/" in m.topic}
    assert ("online", "standby") in said, said
    assert ("online", "leader") in said, said


def the_old_epoch_is_refused(two: Pair, forged: Any, old: int, new: int) -> None:
    """Agents refuse a late batch of the deposed leader and say why."""
    now_ns = time.time_ns()
    count = len(forged.body["names"])
    late = forged.body | {"issued_ns": now_ns, "expires_ns": now_ns + 30 * 10**9, "renewal": False}
    late |= {"commands": list(range(900_000, 900_000 + count)), "values": [1100.0] * count}
    assert late["epoch"] == old
    mark = two.client.mark()
    two.client.say(forged.topic, json.dumps(late).encode())
    answer = two.client.wait(lambda m: "/Result/" in m.topic and "failed" in m.body["states"], mark)
    assert f"epoch {old} is older than {new}: another daemon leads" in answer.body["details"]
    assert two.racks.caps().max() <= TOP_W
    assert not (two.racks.caps() == 1100.0).any()


@pytest.mark.parametrize("to_the_lapse", [False, pytest.param(True, marks=pytest.mark.storm)])
def test_without_etcd_the_leader_acts_to_the_end_of_its_term_and_no_longer(
    server: Server, tmp_path: Path, to_the_lapse: bool
) -> None:
    with pair(server, tmp_path) as two:
        assert two.etcd is not None
        two.start(hot=1)
        two.capped(two.a, node=1)
        led = epoch(two.a)
        two.etcd.stop()
        gone = time.monotonic()
        two.a.until(lambda: role(two.a) == "standby", "its term to end")
        ended = time.monotonic()
        assert 0.3 < ended - gone < TERM_S + 1
        print(f"\netcd gone: no leader after {ended - gone:.2f} s")
        if to_the_lapse:
            two.a.until(lambda: two.racks.caps(1).min() == SAFE_W, "leases to lapse to the safe value")
            print(f"safe after {time.monotonic() - gone:.1f} s")
        two.a.until(lambda: time.monotonic() > ended + 2, what="some ticks without a term")
        assert (role(two.a), role(two.b)) == ("standby", "standby")
        accepted = [t for t in two.eye.taken if t.at_s > ended + 0.5]
        assert not accepted, "nobody commands without a term"
        two.etcd.start()
        both = (two.a, two.b)
        one = two.a.until(lambda: next((d for d in both if role(d) == "leader"), None), "a leader")
        assert epoch(one) > led
        one.until(lambda: two.racks.caps(1).max() < SAFE_W - 50, what="the hot node to be capped again")
        assert sorted((role(two.a), role(two.b))) == ["leader", "standby"]


def test_what_people_decided_holds_at_the_successor(server: Server, tmp_path: Path) -> None:
    with pair(server, tmp_path) as two:
        two.start()
        a = two.a
        why = {"reason": "a test", "for_s": 600}
        asked = a.post("/api/v1/requests", {"control": CAP, "names": ["lab/h/r2"], "hi": 900, **why})
        window = a.post("/api/v1/maintenance", {"table": "node", "names": ["lab/h/r1/node1"], **why})
        a.until(lambda: two.racks.caps()[72:].max() <= 900, what="the request to be carried out")
        a.post(TARGETS, {"name": "night", "limit_w": 4e5, "for_s": 3600})
        a.post(TARGETS, {"name": "peak", "limit_w": 3e5})
        assert targets(two.b) == {}
        a.post("/api/v1/hold", {"reason": "wait"})
        a.post("/api/v1/authority", {"policy": "thermal_guard", "authority": "off", "reason": "a test"})
        a.post(TARGETS, {"name": "peak", "limit_w": 2e5})
        time.sleep(0.1)  # disarmed nearly at the last moment
        a.kill()
        b = two.b
        two.until_leads(b)
        b.until(lambda: levels(b)["operator"] == "act", what="its policies to be armed")
        assert levels(b)["thermal_guard"] == "off", "not armed again by the takeover"
        assert b.get("/api/v1/summary")["mode"] == "held"
        assert [r["id"] for r in b.get("/api/v1/requests")["requests"]] == [asked["id"]]
        assert [w["id"] for w in b.get("/api/v1/maintenance")["windows"]] == [window["id"]]
        assert targets(b) == {"night": 4e5, "peak": 2e5}
        # People go on at the successor; the first, when it leads again, knows what they decided there.
        b.post("/api/v1/authority", {"policy": "thermal_guard", "authority": "act", "reason": "a test",
                                     "acknowledge": "thermal_guard may act on lab"})  # fmt: skip
        b.post("/api/v1/resume", {})
        for path in (f"maintenance/{window['id']}", f"requests/{asked['id']}", "load-targets/night"):
            assert b.ask("DELETE", f"/api/v1/{path}")[0] == 200
        nothing_rises_while_it_settles(two, b)
        a.start()
        assert role(a) == "standby"
        assert levels(a)["thermal_guard"] == "off"
        assert set(targets(a)) == {"night", "peak"}, "its own, from before"
        b.send(signal.SIGTERM)
        print(f"\netcd, SIGTERM: {two.until_leads(a):.2f} s")
        assert b.stop() == 0
        a.until(lambda: levels(a)["thermal_guard"] == "act", what="its policies to be armed")
        assert a.get("/api/v1/summary")["mode"] == "normal"
        assert not a.get("/api/v1/requests")["requests"]
        assert not a.get("/api/v1/maintenance")["windows"]
        assert targets(a) == {"peak": 2e5}


def targets(one: RunningDaemon) -> dict[str, float]:
    """Its load targets."""
    return {t["name"]: t["limit_w"] for t in one.get(TARGETS)["targets"]}


def nothing_rises_while_it_settles(two: Pair, one: RunningDaemon) -> None:
    """Somebody asks a leader that is new for more than it found: not before a lease has passed."""
    body = {"control": CAP, "names": ["lab/h/r2"], "lo": 1000, "reason": "a test", "for_s": 600}
    asked = one.post("/api/v1/requests", body)
    one.until(lambda: one.get("/api/v1/summary")["ticks"]["tick"] >= asked["tick"] + 3, what="three ticks")
    assert (two.racks.caps()[72:] == 900).all()
    assert one.ask("DELETE", f"/api/v1/requests/{asked['id']}")[0] == 200


@pytest.mark.storm
@pytest.mark.parametrize("kind", ["etcd", "host"])
def test_a_clean_stop_hands_over_sooner_than_a_term(server: Server, tmp_path: Path, kind: str) -> None:
    with pair(server, tmp_path, kind) as two:
        two.start(hot=4)
        caps = two.capped(two.a, node=4)
        old, began = epoch(two.a), time.monotonic()
        assert two.a.process is not None
        two.a.send(signal.SIGTERM)
        two.until_leads(two.b)
        took = time.monotonic() - began
        print(f"\n{kind}, SIGTERM: {took:.2f} s")
        assert took < TERM_S
        assert epoch(two.b) > old
        assert two.a.stop() == 0
        two.b.until(lambda: settled_on(two, epoch(two.b), caps), what="every cap under the new epoch")
        assert (two.eye.since(began) == caps).all()
        told = term_of(two.b)
        assert told["adopt"]
        assert told["head"] in heads(two.a)[-60:]
        if kind == "host":  # and when it ends without a word
            two.a.start()
            assert role(two.a) == "standby"
            two.b.kill()
            two.until_leads(two.a)
