"""Small sites, and an engine that can be driven by plain values: what tests of the core are built from.

pod = Twin(two_racks(), [ThermalGuard()], act=True)
pod.tick({"gpu.temp_c": 60.0, "rack.flow_lpm": [96.0, 96.0]})
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.support.journal_bodies import bodies_of
from twin.catalogue import NS, find_signal
from twin.contracts import CommandBatch, Decision, Explanation, Model, Policy
from twin.engine import Engine, Inquiry, explain
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import Block, Event, Frame, Inbox

PROFILES = Path(__file__).resolve().parents[2] / "twin" / "profiles"
START_NS = 1_700_000_000 * NS


@cache
def _profile_pickled(name: str) -> bytes:
    text = (PROFILES / f"{name}.yaml").read_text(encoding="utf-8")
    return pickle.dumps(yaml.load(text, Loader=yaml.CSafeLoader))


@cache
def _profile_names() -> tuple[str, ...]:
    return tuple(sorted(p.stem for p in PROFILES.glob("*.yaml")))


def profile_tree(name: str) -> dict[str, Any]:
    """A packaged profile as YAML gives it; a fresh copy each time."""
    tree: dict[str, Any] = pickle.loads(_profile_pickled(name))
    return tree


def spec_of(tree: dict[str, Any]) -> SiteSpec:
    """A site's tree with the packaged profiles that it names."""
    text = repr(tree)
    return SiteSpec(tree, {n: profile_tree(n) for n in _profile_names() if f"'{n}'" in text})


def site_of(tree: dict[str, Any]) -> Site:
    """The built site of a tree."""
    return build_site(spec_of(tree), "test.yaml")


def two_racks(profile: str = "gb200-nvl72", racks: str = "r[1-2]", **more: Any) -> dict[str, Any]:
    """A hall with two racks, one CDU, and feeds A and B; `more` are keys of the site file."""
    return {
        "site": "lab",
        "halls": [{
            "name": "h",
            "racks": [{"name": racks, "profile": profile}],
            "cdus": [{"name": "cdu1", "serves": [racks]}],
            "feeders": [
                {"name": "a", "side": "A", "budget_w": 300_000, "serves": [racks]},
                {"name": "b", "side": "B", "budget_w": 300_000, "serves": [racks]},
            ],
        }],
        **more,
    }  # fmt: skip


def eight_nodes(**more: Any) -> dict[str, Any]:
    """One rack of eight nodes with a GPU each; GPUs may be capped to 200..350 W, safe 200 W."""
    return {
        "site": "lab",
        "halls": [{"name": "h", "racks": [
            {"name": "r1", "profile": "air-8gpu", "nodes": 8, "gpus_per_node": 1}]}],
        **more,
    }  # fmt: skip


class Twin:
    """An engine with its inbox and clock."""

    def __init__(
        self,
        tree: dict[str, Any],
        policies: Sequence[Policy] = (),
        models: Sequence[Model] = (),
        act: bool = False,
        authority: dict[str, str] | None = None,
    ) -> None:
        self.site = site_of(tree)
        given = authority or ({p.name: "act" for p in policies} if act else {})
        self.engine = Engine(self.site, policies, models, given)
        self.inbox = Inbox(self.site.sizes)
        self.now_ns, self.number = START_NS, 0
        self.decision = Decision(-1, 0)

    def tick(
        self, values: Mapping[str, Any] | None = None, *events: Event, dt_s: float = 1.0, urgent: bool = False
    ) -> Decision:
        """One tick later, with these values (a number or one per entity) and events."""
        self.now_ns += round(dt_s * NS)
        for key, value in (values or {}).items():
            signal = find_signal(key)
            assert signal is not None, key
            n = self.site.sizes[signal.table]
            column = np.broadcast_to(np.asarray(value, np.float32), (n,)).reshape(1, n)
            none = np.empty((0, n), np.int64)
            self.inbox.put_block(
                Block(signal.table, 0, (signal.name,), column, (), none, self.now_ns), self.now_ns
            )
        for event in events:
            self.inbox.put_event(event)
        self.inbox.urgent |= urgent
        frame = self.inbox.take(self.number, self.now_ns, dt_s)
        self.number += 1
        self.decision = self._decide(frame)
        return self.decision

    def _decide(self, frame: Frame) -> Decision:
        return self.engine.tick(frame)

    def run(self, seconds: int, values: Mapping[str, Any] | None = None) -> Decision:
        """So many ticks of a second with the same values."""
        for _ in range(seconds):
            self.tick(values)
        return self.decision

    def commands(self, control: str | None = None) -> list[CommandBatch]:
        """New commands of the last tick: no renewals."""
        return [c for c in self.decision.commands if not c.renewal and control in (None, c.control)]

    def lease(self, control: str) -> np.ndarray:
        """Return the values that leases of a control command now [n]."""
        return self.engine.arbiter.leases[control].value.copy()

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Journal bodies of one kind of the last tick."""
        return [r for r in bodies_of(self.decision) if r["kind"] == kind]

    def restarted(
        self, tree: dict[str, Any], policies: Sequence[Policy], models: Sequence[Model] = ()
    ) -> Twin:
        """A twin that a restart from this one's snapshot would give."""
        from twin.engine import encode
        from twin.engine.snapshot import decode

        out = Twin(tree, policies, models)
        out.engine.restore(decode(encode(self.engine.dump())))
        out.now_ns, out.number = self.now_ns, self.number
        return out


def explained(twin: Twin, name: str, entity: str = "") -> Explanation:
    """The main explanation of a policy."""
    policy = next(p for p in twin.engine.policies if p.name == name)
    found = explain(twin.engine, policy, Inquiry(entity=entity))
    assert isinstance(found, Explanation)
    return found


class Wish:
    """A policy that says what a test tells it to: `proposals` is given out at every tick."""

    name = "wish"
    controls: tuple[str, ...] = ("gpu.power_cap_w", "node.service_level", "cdu.supply_temp_target_c")
    rank = 5
    period_s = 0.0
    urgent = True
    memory = None

    def __init__(self, name: str = "wish", rank: int = 5) -> None:
        self.name, self.rank = name, rank  # type: ignore[misc]
        self.proposals: list[Any] = []

    def ask(self, control: str, index: Any, lo: Any, hi: Any, want: Any = np.nan) -> None:
        """One proposal for the ticks to come; numbers are spread over the index."""
        from twin.contracts import Proposal

        at = np.array(index, np.int32)
        spread = [np.broadcast_to(np.asarray(x, np.float64), at.shape).copy() for x in (lo, hi, want)]
        self.proposals = [Proposal(control, at, *spread, "a wish")]

    def propose(self, view: Any, memory: Any) -> tuple[list[Any], Any]:
        return list(self.proposals), memory
