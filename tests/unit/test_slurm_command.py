"""Commands to Slurm that set levels of nodes: differences only, nodes of ours only, in few calls."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from connectors.slurm.command import (
    MAX_LINE,
    MAX_REASON,
    NodeUpdate,
    Wanted,
    answer_of,
    compress_hosts,
    explain,
    jobs_of,
    plan,
    reason_of,
    refused_jobs,
    to_empty,
)
from connectors.slurm.hostlist import expand_hosts
from connectors.slurm.nodes import SlurmNode, parse_nodes

# States in which nodes may be found
FREE, DOWN, MAINT = "idle|none", "down*|Not responding", "maint|none"
THEIRS, THEIRS_BUSY = "drained|fan broke", "draining|fan broke"


def ours(level: int, busy: bool = False, silent: bool = False) -> str:
    return f"{'draining' if busy else 'drained'}{'*' if silent else ''}|racktwin:{level}:why a|b"


def found(text: str) -> SlurmNode:
    return parse_nodes(f"gpu1|{text.replace('|', '||||', 1)}|\n")["gpu1"]


@pytest.mark.parametrize(
    "text, mine, level",
    [
        (FREE, None, 0), ("idle|racktwin:2:left over", None, 0), (DOWN, None, None), (MAINT, None, 1),
        (THEIRS, None, 3), (THEIRS_BUSY, None, 2), ("drained*|fan broke", None, None),
        ("drained|racktwin:7:no level", None, 3), ("drained|racktwin: 2", None, 3), ("drained|", None, 3),
        (ours(1), 1, 1), (ours(1, busy=True), 1, 1), (ours(2), 2, 2), (ours(2, busy=True), 2, 2),
        (ours(3), 3, 3), (ours(3, busy=True), 3, 2), (ours(4), 4, 4), (ours(4, busy=True), 4, 2),
        (ours(4, silent=True), 4, 4), ("drained@|racktwin:3:x", 3, 3), ("down|racktwin:3:x", None, None),
    ],
)  # fmt: skip
def test_a_reason_tells_the_level(text: str, mine: int | None, level: float | None) -> None:
    node = found(text)
    assert (node.ours, node.level) == (mine, level)


@pytest.mark.parametrize(
    "level, text, state, answer",
    [
        (0, FREE, None, "done"), (0, ours(2), "UNDRAIN", "failed"),
        (0, ours(4, busy=True), "UNDRAIN", "failed"), (0, THEIRS, None, "failed"),
        (0, DOWN, None, "done"), (0, MAINT, None, "done"),
        (1, FREE, "DRAIN", "failed"), (1, ours(1, busy=True), None, "done"), (1, ours(3), "DRAIN", "failed"),
        (1, THEIRS, None, "done"), (2, DOWN, "DRAIN", "failed"), (2, ours(1), "DRAIN", "failed"),
        (2, ours(2), None, "done"), (2, ours(2, silent=True), None, "done"), (2, THEIRS_BUSY, None, "done"),
        (3, FREE, "DRAIN", "failed"), (3, ours(3), None, "done"),
        (3, ours(3, busy=True), None, "in_progress"),
        (3, THEIRS_BUSY, None, "in_progress"), (3, THEIRS, None, "done"), (3, MAINT, "DRAIN", "failed"),
        (4, ours(3), "DRAIN", "failed"), (4, ours(4), None, "done"),
        (4, ours(4, busy=True), None, "in_progress"),
    ],
)  # fmt: skip
def test_only_what_differs_is_asked_for(level: int, text: str, state: str | None, answer: str) -> None:
    nodes = {"gpu1": found(text)}
    updates = plan({"gpu1": Wanted(level, "why")}, nodes)
    reason = "" if level == 0 else f"racktwin:{level}:why"
    assert updates == ([] if state is None else [NodeUpdate(state, reason, ("gpu1",))])  # type: ignore[arg-type]
    assert answer_of("gpu1", level, nodes["gpu1"]).state == answer


DRAINS = [ours(k, b) for k in (1, 2, 3, 4) for b in (False, True)]
FOUND = st.sampled_from([FREE, DOWN, MAINT, THEIRS, THEIRS_BUSY, *DRAINS])


@given(st.lists(st.tuples(st.integers(0, 4), FOUND)))
def test_what_others_drained_stays_and_a_second_plan_is_empty(
    cases: list[tuple[int, str]],
) -> None:
    nodes = {f"gpu{i}": found(text) for i, (_, text) in enumerate(cases)}
    wanted = {f"gpu{i}": Wanted(level, "w") for i, (level, _) in enumerate(cases)}
    updates = plan(wanted, nodes)
    touched = [h for u in updates for h in u.hosts]
    assert len(touched) == len(set(touched))
    assert not [h for h in touched if nodes[h].drain and nodes[h].ours is None]
    assert not [h for u in updates for h in u.hosts if u.state == "UNDRAIN" and nodes[h].ours is None]
    after = dict(nodes)
    for update in updates:
        for host in update.hosts:
            state = ("draining" if nodes[host].busy else "drained") if update.state == "DRAIN" else "idle"
            after[host] = found(f"{state}|{update.reason}")
    assert plan(wanted, after) == []
    held = {h for h, w in wanted.items() if w.level >= 3 and after[h].busy and after[h].ours is not None}
    assert set(to_empty(wanted, after)) == held


def test_one_call_for_each_level_and_reason() -> None:
    nodes = {f"gpu{i:04d}": found(FREE) for i in range(1, 1001)} | {"log1": found(ours(2))}
    wanted = {h: Wanted(2, "hot") for h in nodes if h != "log1"} | {"log1": Wanted(0, "well")}
    wanted["gpu0500"] = Wanted(4, "hot")
    drain, replace, back = plan(wanted, nodes)
    assert drain.arguments() == [
        "update",
        "NodeName=gpu[0001-0499,0501-1000]",
        "State=DRAIN",
        "Reason=racktwin:2:hot",
    ]
    assert replace.arguments()[1:] == ["NodeName=gpu0500", "State=DRAIN", "Reason=racktwin:4:hot"]
    assert back.arguments() == ["update", "NodeName=log1", "State=UNDRAIN"]


def test_a_call_has_an_end() -> None:
    nodes = {f"{'x' * 200}{i}y": found(FREE) for i in range(1000)}
    updates = plan(dict.fromkeys(nodes, Wanted(1, "w")), nodes)
    assert sorted(h for u in updates for h in u.hosts) == sorted(nodes)
    assert len(updates) == 4
    assert max(len(" ".join(u.arguments())) for u in updates) < MAX_LINE + 1000


@pytest.mark.parametrize("host", ["gpu1,gpu2", "gpu[1-2]", "-a", "a b", "ALL;x", "a=b", "é1"])
def test_a_name_that_is_none_is_not_passed_on(host: str) -> None:
    assert plan({host: Wanted(2, "w")}, {host: found(FREE)}) == []
    assert answer_of(host, 2, found(FREE)).state == "failed"


def test_a_node_that_slurm_does_not_have() -> None:
    assert plan({"gpu9": Wanted(2, "w")}, {}) == []
    assert answer_of("gpu9", 0, None) == ("failed", "Slurm has no node gpu9")


@given(st.text())
def test_a_reason_is_one_short_line_that_is_known_again(why: str) -> None:
    reason = reason_of(3, why)
    assert len(reason) <= MAX_REASON
    assert reason.isascii()
    assert reason.isprintable()
    assert not set(reason) & set("\"'`\\|\n\r\t")
    assert found(f"drained|{reason}").ours == 3


def test_a_reason_keeps_what_it_can() -> None:
    assert (
        reason_of(2, 'chance 3.1 %/h (XID 79); "soon"\n  now')
        == "racktwin:2:chance 3.1 %/h (XID 79); soon now"
    )
    assert reason_of(1, "\n") == "racktwin:1:no reason given"


@given(st.lists(st.from_regex(r"[a-c]{0,2}[0-9]{0,4}(-[ab][0-9]{0,12})?[ab]?", fullmatch=True).filter(bool)))
def test_host_lists_say_what_they_stand_for(hosts: list[str]) -> None:
    text = compress_hosts(hosts)
    assert sorted(expand_hosts(text)) == sorted(set(hosts))


@pytest.mark.parametrize(
    "hosts, text",
    [
        (["gpu1"], "gpu1"), (["gpu1", "gpu2", "gpu3"], "gpu[1-3]"), (["gpu9", "gpu10"], "gpu9,gpu10"),
        (["gpu09", "gpu10", "gpu12"], "gpu[09-10,12]"), (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["a", "b"], "a,b"), ([], ""),
    ],
)  # fmt: skip
def test_host_lists(hosts: list[str], text: str) -> None:
    assert compress_hosts(hosts) == text


def test_the_words_of_slurm() -> None:
    text = "scontrol: ends with 1: slurm_update error: Invalid user id"
    assert explain(text).startswith(
        f"{text}: Slurm lets this user change neither nodes nor reservations; run racktwin as SlurmUser"
    )
    assert "sacctmgr modify user" in explain(text)
    assert explain("Invalid node name specified") == "Invalid node name specified"
    said = "Job is pending execution for job 1\nRequested operation is presently disabled for job 2\nodd\n"
    said += "7_3: Job is finished\nodd: this\n"
    assert refused_jobs(said) == {
        "1": "Job is pending execution", "2": "Requested operation is presently disabled",
        "7_3": "Job is finished"}  # fmt: skip


def test_a_task_of_an_array_is_named_by_its_place_in_it() -> None:
    assert jobs_of("5 5 N/A\n7 7 3\n8 7 1\n8 7 1\n\nodd\n-1 x y\n") == ["5", "7_3", "7_1"]
