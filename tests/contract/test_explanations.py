"""Every registered policy explains itself: on a silent site, twice alike, and as it proposes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from policies import REGISTRY
from tests.contract.test_policies import POLICIES, ask, seen
from tests.support.contract_plugins import CAP, Capper, World, engine_of, site
from tests.support.in_process_daemon import Pod, serving
from twin.catalogue import NS, ContractError, find_control
from twin.contracts import (
    PAGE,
    ExplainRequest,
    Explanation,
    ExplanationRefused,
    FigureMetric,
    KeyFigure,
    Memory,
    Policy,
    Proposal,
    Sentence,
    Topic,
    TopicOption,
    View,
    control_cell,
    entities_within,
)
from twin.engine import Engine, Inquiry, explain, topics_of


def explained(engine: Engine, policy: Policy, **more: Any) -> Explanation:
    found = explain(engine, policy, Inquiry(**more))
    return found if isinstance(found, Explanation) else found()


def topics(policy: Policy) -> list[str]:
    return ["", *(t.name for t in topics_of(policy) if not any(o.default is None for o in t.options))]


@POLICIES
@pytest.mark.parametrize("racks", [0, 2])
def test_a_site_that_was_never_heard_is_explained(name: str, racks: int) -> None:
    policy: Policy = REGISTRY[name]()
    engine = engine_of(site(racks), [policy], [])
    for silent_ticks in range(3):
        for topic in topics(policy):
            found = explained(engine, policy, topic=topic)
            assert (found.policy, found.topic) == (name, topic), silent_ticks
            assert found.sentences or found.tables or topic in ("metrics", "page"), topic
        World(engine).step(silent=True) if silent_ticks == 0 else None


@POLICIES
def test_it_is_the_same_twice_changes_nothing_and_survives_json(name: str) -> None:
    engine, policy, _ = seen(name)
    checksum = engine.checksum()
    for topic in topics(policy):
        first, second = (explained(engine, policy, topic=topic) for _ in range(2))
        assert first == second
        assert msgspec.json.decode(msgspec.json.encode(first), type=Explanation) == first
    assert engine.checksum() == checksum


@POLICIES
def test_its_numbers_are_those_of_its_proposals(name: str) -> None:
    engine, policy, _ = seen(name)
    in_force = engine.in_force[name] = ask(engine, policy)[0]
    rows = explained(engine, policy).table("proposals")
    assert rows
    assert len(rows) == len(in_force)
    for row, p in zip(rows, in_force, strict=True):
        control = find_control(p.control)
        assert control is not None
        assert (row["control"], row["count"], row["reason"]) == (p.control, len(p.index), p.reason[:300])
        first = int(p.index[0])
        names = engine.view().jobs.names if control.table == "job" else None
        assert row["first"] == (names[first] if names else engine.site.name(control.table, first))
        for bound, value in (("lo", p.lo.min()), ("hi", p.hi.max())):
            assert row[bound] == control_cell(value, control)
    # Of one entity: those that name it, and no other
    p = in_force[0]
    control = find_control(p.control)
    assert control is not None
    entity = engine.site.name(control.table, int(p.index[-1]))
    rows = explained(engine, policy, entity=entity).table("proposals")
    mine = [r for r in rows if r["control"] == p.control and r["reason"] == p.reason[:300]]
    assert [r["count"] for r in mine] == [1]
    assert mine[0]["lo"] == control_cell(p.lo[-1], control)


@pytest.mark.parametrize("name", [n for n, cls in REGISTRY.items() if PAGE in getattr(cls, "topics", ())])
def test_a_guard_shows_nothing_on_the_page_until_it_proposes(name: str) -> None:
    engine, policy, _ = seen(name)
    found = explained(engine, policy, topic="page")
    assert found.sentences
    assert found.tables
    engine.in_force[name] = []
    found = explained(engine, policy, topic="page")
    assert (found.sentences, found.tables) == ((), ())


def test_the_commands_of_a_policy_that_run_are_shown() -> None:
    engine, policy, _ = seen("operator")
    (row,) = explained(engine, policy).table("leases")
    assert (row["control"], row["count"], row["low"], row["high"]) == (CAP, 1, 700.0, 700.0)
    assert row["first"] == "contract/h1/r0/node0/gpu1"
    lease = engine.arbiter.leases[CAP]
    assert row["ends_s"] == round((int(lease.expires_ns[1]) - engine.state.now_ns) / NS, 1)
    assert explained(engine, policy, entity="r1").table("leases") == []


def test_names_stand_for_all_that_they_hold() -> None:
    engine, _, _ = seen("thermal_guard")
    view = engine.view()
    for name, table, gpus in (("r0", "rack", 8), ("contract/h1/r0/node0", "node", 4), ("a", "feeder", 16),
                              ("cdu1", "cdu", 24), ("site", "site", 24), ("train", "job", 4)):  # fmt: skip
        kind, full, inside = entities_within(view, name)
        assert (kind, len(inside["gpu"])) == (table, gpus), name
        assert full
    with pytest.raises(ExplanationRefused, match="no entity or job nowhere"):
        entities_within(view, "nowhere")


class Talker(Capper):
    """Caps all GPUs, and explains it with a metric, a topic and an option."""

    name: ClassVar[str] = "talker"
    topics: ClassVar[tuple[Topic, ...]] = (
        Topic("twice", "the cap, times a factor", (TopicOption("factor", "how often", "number", 2.0, 0, 9),)),
    )

    def explain(self, view: View, memory: Memory, request: ExplainRequest) -> Explanation:
        caps = [p for p in request.status(self.name).proposals if isinstance(p, Proposal)]
        cap_w = float(caps[0].hi[0]) if caps else 0.0
        factor = request.options.get("factor", 1.0)
        assert isinstance(factor, float)
        if request.options.get("factor") == 9.0:
            raise RuntimeError("boom")
        bad = {"factor": float("nan")}.get("factor", 0.0) if request.options.get("factor") == 8.0 else cap_w
        return Explanation(
            policy=self.name, now_ns=view.now_ns, sentences=(Sentence("all are capped"),),
            figures=(KeyFigure("cap", bad * factor, "W", "the cap of every GPU",
                               FigureMetric("talker_cap_watts", labels={"unit": "W"})),
                     KeyFigure("taken", 1.0, metric=FigureMetric("ticks"))),
        )  # fmt: skip


def test_options_are_checked_and_a_bad_explanation_is_refused() -> None:
    policy = Talker()
    engine = engine_of(site(), [policy], [])
    World(engine).step()
    assert explained(engine, policy, topic="twice").figure("cap") == 1600.0
    assert explained(engine, policy, topic="twice", options={"factor": "3"}).figure("cap") == 2400.0
    for topic, options, expected in (
        ("thrice", {}, "talker has no 'thrice'; expected one of twice"),
        ("twice", {"factor": "10"}, "factor: expected a number from 0 to 9"),
        ("twice", {"factor": "x"}, "factor: expected a number"),
        ("twice", {"fact": "1"}, "unknown parameter fact; expected factor"),
        ("", {"factor": "1"}, "unknown parameter factor"),
    ):
        with pytest.raises(ExplanationRefused, match=expected):
            explained(engine, policy, topic=topic, options=options)
    for value, expected in (("9", "talker cannot explain: RuntimeError: boom"), ("8", "plain data")):
        with pytest.raises(ContractError, match=expected):
            explained(engine, policy, topic="twice", options={"factor": value})


def test_explanations_over_http_and_as_metrics(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, more=[Talker()]) as pod:
            pod.tick({"gpu.temp_c": 60.0})
            await _ask_all(pod)

    asyncio.run(main())


async def _ask_all(pod: Pod) -> None:
    status, tree = await pod.ask("GET", "/api/v1/explain")
    assert status == 200
    mine = next(p for p in tree["policies"] if p["policy"] == "talker")
    assert [(t["name"], t["options"][0]["name"]) for t in mine["topics"]] == [("twice", "factor")]
    assert (await pod.ask("GET", "/api/v1/explain/talker", "none"))[0] == 401
    status, tree = await pod.ask("GET", "/api/v1/explain/talker")
    assert (status, tree["authority"], tree["sentences"][0]["text"]) == (200, "act", "all are capped")
    assert tree["tables"][0]["name"] == "proposals"
    status, tree = await pod.ask("GET", "/api/v1/explain/talker?topic=twice&factor=3")
    assert (status, tree["figures"][0]["value"]) == (200, 2400.0)
    status, tree = await pod.ask("GET", "/api/v1/explain/thermal_guard/r1")
    assert (status, tree["entity"], tree["figures"][0]["value"]) == (200, "lab/h/r1", 0)
    for path, expected in (("nobody", 404), ("thermal_guard/nowhere", 404), ("talker?factor=1", 400),
                           ("talker?topic=twice&factor=10", 400), ("talker?topic=x", 404),
                           ("talker?topic=twice&factor=9", 500)):  # fmt: skip
        status, tree = await pod.ask("GET", f"/api/v1/explain/{path}")
        assert status == expected, (path, tree)
    _, text = await pod.ask("GET", "/metrics")
    assert 'racktwin_talker_cap_watts{unit="W"} 800.0' in text
    assert text.count("# TYPE racktwin_ticks ") + text.count("# TYPE racktwin_ticks_total") == 1
