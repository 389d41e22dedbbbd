"""Parts of contract tests: small sites, an engine with a while of telemetry, and bad plug-ins."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from tests.support.saving_jobs import Says
from twin.catalogue import NS
from twin.config import spec_of
from twin.contracts import Columns, Memory, Model, Policy, Proposal, View
from twin.engine import Engine
from twin.site import Site, build_site
from twin.telemetry import Block, Inbox, Reading, events as ev

START_NS = 1_700_000_000 * NS
CAP = "gpu.power_cap_w"
HOT_C = 80.0
RACK_W = 9e3
FULL_W = 9.05e3  # each feeder carries half of two racks: beyond 99 %


def site(racks: int = 2) -> Site:
    """Racks of GB200 with two nodes each, cooled by one CDU, the first two fed from two sides; or nothing at
    all."""
    names = [f"r{i}" for i in range(racks)]
    tree: dict[str, Any] = {"site": "contract", "max_jobs": 4}
    if racks:
        tree["halls"] = [
            {
                "name": "h1",
                "racks": [{"name": n, "profile": "gb200-nvl72", "nodes": 2} for n in names],
                "cdus": [{"name": "cdu1", "serves": names}],
                "feeders": [
                    {"name": "a", "side": "A", "budget_w": FULL_W, "serves": names[:2]},
                    {"name": "b", "side": "B", "budget_w": FULL_W, "serves": names[:2]},
                ],
            }
        ]
    return build_site(spec_of(tree, None, "contract"))


def engine_of(where: Site, policies: list[Policy], models: list[Model], level: str = "act") -> Engine:
    return Engine(where, policies, models, {p.name: level for p in policies})


class Seer(Says):
    """Forecasts that every node fails within a day, nearly."""

    def __init__(self) -> None:
        super().__init__()
        self.day = 0.9


class World:
    """Feeds an engine with readings and events, tick by tick."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.inbox = engine, Inbox(engine.site.sizes)
        self.tick, self.rng = 0, np.random.default_rng(5)

    def step(self, temp_c: float = 60.0, events: tuple[ev.Event, ...] = (), silent: bool = False) -> Any:
        now_ns = START_NS + (self.tick + 1) * NS
        sizes = self.engine.site.sizes
        n = sizes["gpu"]
        for event in events:
            self.inbox.put_event(event)
        if not silent and n:
            rows = np.stack([np.full(n, 900.0), temp_c + self.rng.normal(0, 1, n), np.full(n, 1200.0)])
            names = ("power_w", "temp_c", "power_limit_w")
            counts = np.full((1, n), 1000 * self.tick, np.int64)
            self.inbox.put_block(
                Block("gpu", 0, names, rows.astype(np.float32), ("energy_mj",), counts, now_ns), now_ns
            )
        if not silent:
            for rack in range(sizes["rack"]):
                for signal, value in (("power_w", RACK_W), ("flow_lpm", 60.0), ("supply_temp_c", 33.0)):
                    self.inbox.put(Reading("rack", rack, signal, value, now_ns), now_ns)
            if sizes["rack"] > 2:  # where jobs wait, and a node of the last rack sleeps
                for signal, value in (("gpu_running_count", 4.0), ("gpu_pending_count", 100.0)):
                    self.inbox.put(Reading("site", 0, signal, value, now_ns), now_ns)
                self.inbox.put(Reading("node", sizes["node"] - 1, "standby_state", 2.0, now_ns), now_ns)
            if sizes["rack"] and temp_c > HOT_C:  # and wet
                self.inbox.put(Reading("rack", 0, "leak_state", 1.0, now_ns), now_ns)
                self.inbox.put(Reading("node", 1, "leak_state", 1.0, now_ns), now_ns)
        self.frame = self.inbox.take(self.tick, now_ns, 1.0)
        self.tick += 1
        return self.engine.tick(self.frame)


class Capper:
    """Caps all GPUs at 800 W, and turns bad at a given tick in a given way."""

    name: ClassVar[str] = "capper"
    controls: ClassVar[tuple[str, ...]] = (CAP,)
    rank: ClassVar[int] = 5
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    memory: ClassVar[Columns | None] = Columns(gpu={"seen": "i4"})

    def __init__(self, how: str = "", bad_ns: int = 2**62) -> None:
        self.how, self.bad_ns = how, bad_ns

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        n = view.site.sizes["gpu"]
        index = np.arange(n, dtype=np.int32)
        lo, hi = np.zeros(n), np.full(n, 800.0)
        good = Proposal(CAP, index, lo, hi, hi.copy(), "a cap for all")
        if view.now_ns < self.bad_ns:
            return [good], {"seen": memory["seen"] + 1}
        return getattr(self, f"_{self.how}")(view, memory, good)  # type: ignore[no-any-return]

    def _raises(self, view: View, memory: Memory, good: Proposal) -> Any:
        raise RuntimeError("boom")

    def _undeclared(self, view: View, memory: Memory, good: Proposal) -> Any:
        k = np.arange(1, dtype=np.int32)
        return [Proposal("node.service_level", k, np.ones(1), np.ones(1), np.ones(1), "not mine")], memory

    def _unknown(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [Proposal("gpu.nothing", good.index, good.lo, good.hi, good.want, "no such control")], memory

    def _nan(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [Proposal(CAP, good.index, good.lo, good.hi * np.nan, good.want, "NaN")], memory

    def _crossed(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [Proposal(CAP, good.index, good.hi + 1, good.hi, good.want, "lo > hi")], memory

    def _unsorted(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [Proposal(CAP, good.index[::-1].copy(), good.lo, good.hi, good.want, "unsorted")], memory

    def _twice(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [Proposal(CAP, good.index // 2, good.lo, good.hi, good.want, "not unique")], memory

    def _beyond(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [Proposal(CAP, good.index + 1, good.lo, good.hi, good.want, "no such GPU")], memory

    def _short(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [Proposal(CAP, good.index, good.lo[:-1], good.hi, good.want, "lengths")], memory

    def _many(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [good] * 1001, memory

    def _mutates(self, view: View, memory: Memory, good: Proposal) -> Any:
        view.value("gpu.temp_c")[:] = 0
        return [good], memory

    def _remembers(self, view: View, memory: Memory, good: Proposal) -> Any:
        memory["seen"][:] = 7
        return [good], memory

    def _shape(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [good], {"seen": np.zeros(1, np.int32)}

    def _kind(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [good], {"seen": memory["seen"].astype(np.float64)}

    def _forgets(self, view: View, memory: Memory, good: Proposal) -> Any:
        return [good], {}

    def _nothing(self, view: View, memory: Memory, good: Proposal) -> Any:
        return None


BAD = sorted(name[1:] for name in vars(Capper) if name.startswith("_") and not name.startswith("__"))
