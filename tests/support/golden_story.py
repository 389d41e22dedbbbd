"""A made-up run that has in four minutes what a year brings: a GPU is replaced, a rack added, jobs come, go
and tell of their saves, a model is fitted anew, GPUs get hot and one breaks, a person asks for a cap, people
work at a rack, a node sleeps while jobs wait, one leaks, a feed is lost, a new term begins, weather and a
plan are told ahead. Seeded, so that it is always the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twin.catalogue import NS
from twin.config import make_engine, spec_of
from twin.contracts import Decision
from twin.engine import Engine
from twin.run import Arrival, Outcome, replay_arrivals
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import Block, Frame, Reading, events as ev

START_NS = 1_700_000_000 * NS
SECONDS = 230
REPLACED_AT, WARM_FROM, WARM_UNTIL, CHANGED_AT, LEAK_AT, SECOND_LEAK_AT = 30, 60, 83, 130, 105, 205
WORKED_UNTIL = 190
OUTLOOK_FROM = 15
ASLEEP_AT, AWAKE_AT = 8, 16
CAP = "gpu.power_cap_w"
FEED_W = 23_000.0  # two racks want a little more than that
FEED_LOST_AT, FEED_BACK_AT = 195, 199
SHARES = {"site_share": 1.0, "rack_share": 1.0, "domain_share": 1.0, "job_share": 1.0}


def tree(racks: list[str], **more: Any) -> dict[str, Any]:
    """A small site as its file would say; the rack that comes later stands before the first one."""
    served = list(racks)
    return {
        "site": "golden",
        "halls": [
            {
                "name": "h1",
                "racks": [{"name": r, "profile": "gb200-nvl72", "nodes": 2} for r in racks],
                "cdus": [{"name": "cdu1", "serves": served}],
                "feeders": [
                    {"name": "a", "side": "A", "budget_w": FEED_W, "serves": served},
                    {"name": "b", "side": "B", "budget_w": FEED_W, "serves": served},
                ],
            }
        ],
        "max_jobs": 4,
        "history_s": {"rack.power_w": 120},
        # Of two nodes one is out for repair when the other one breaks
        "controls": {"node.service_level": {"blast_radius": 4}},
        "policies": {
            p: {"authority": "act"}
            for p in (
                "thermal_guard",
                "leak_guard",
                "operator",
                "checkpoint",
                "cooling_setpoint",
                "idle_power",
            )
        }
        | {
            "replacement": {"authority": "act", "settings": SHARES},
            "power_guard": {"authority": "act"},
            "power_cap": {"authority": "act", "settings": {"margin_pu": 0.0}},
        },
        "models": {"persistence": {"horizons_s": [4, 10], "settings": {"fit_every_s": 60}}},
        **more,
    }


def spec(racks: list[str], **more: Any) -> SiteSpec:
    """The tree with its profile."""
    return spec_of(tree(racks, **more), None, "golden")


def engine_for(site_spec: SiteSpec) -> Engine:
    """Make the engine of the site that a segment describes, as a start of the daemon does."""
    return make_engine(build_site(site_spec))


class Story:
    """Devices of a site, their messages second by second; hears the commands and obeys."""

    def __init__(self, seconds: int = SECONDS, seed: int = 3) -> None:
        self.rng = np.random.default_rng(seed)
        self.spec = spec(["r1"])
        self.site = build_site(self.spec)
        self.seconds = seconds
        self._acks: list[ev.Event] = []
        self._equip(self.site)

    def _equip(self, site: Site) -> None:
        self.site = site
        self.limit_w = np.full(site.sizes["gpu"], 1200.0)
        self.energy_mj = np.zeros(site.sizes["gpu"], np.int64)

    def __iter__(self) -> Iterator[Arrival]:
        for second in range(self.seconds):
            t_ns = START_NS + second * NS
            items: list[Any] = [*self._events(second), *self._acks]
            self._acks = []
            yield Arrival(t_ns + NS // 4, items)
            yield Arrival(t_ns + NS // 2, self._readings(second, t_ns + NS // 2))

    def _events(self, second: int) -> list[ev.Event]:
        node = "golden/h1/r1/node0"
        match second:
            case 5:
                saves = {"checkpoint_interval_s": 6e5, "checkpoint_save_s": 60.0}  # far too seldom
                return [ev.JobStarted(id="j1", job="train", nodes=(node,), kind="training", **saves)]
            case 10:
                return [self._outlook("o1", "site.outdoor_temp_c", "", (12.5, None, 14.0)),
                        self._outlook("o2", "rack.power_w", "r1", (9000.0,) * 60),
                        self._outlook("o3", "rack.power_w", "r9", (1.0,))]  # fmt: skip
            case 20:
                cap = {"control": CAP, "names": ("golden/h1/r1/node1/gpu3",), "lo": 0.0, "hi": 1000.0}
                return [ev.OperatorRequest(id="q1", author="ada", want=900.0, reason="noisy", **cap)]
            case 25:
                drain = {"control": "node.service_level", "names": ("r1/node1",), "lo": 3.0, "hi": 3.0}
                return [ev.OperatorRequest(id="q2", author="ada", want=3.0, reason="repair", **drain)]
            case 30:
                self.energy_mj[2] = 0
                return [ev.EntityReplaced(id="e1", table="gpu", name="golden/h1/r1/node0/gpu2", serial="S2")]
            case 70:
                told = {"began_ns": START_NS + 40 * NS, "save_s": 20.0, "block_s": 9.0, "interval_s": 6e4}
                return [ev.CheckpointTold(id="c1", job="train", at_ns=START_NS + 69 * NS, **told)]
            case 72:
                return [ev.FaultReported(id="f1", table="gpu", name=f"{node}/gpu1", code=79)]
            case 100:
                return [ev.RequestWithdrawn(id="w1", author="ada", request="q1")]
            case 130:
                later = spec(["r0", "r1"])
                self._equip(build_site(later))
                return [ev.SiteChanged(id="s1", site_hash=later.digest(), spec=later.packed())]
            case 150:
                return [ev.JobEnded(id="j2", job="train"), ev.JobStarted(id="j3", job="b", nodes=(node,))]
            case 160:
                until_ns = START_NS + WORKED_UNTIL * NS
                work = {"table": "rack", "names": ("golden/h1/r0",), "until_ns": until_ns}
                return [ev.MaintenanceBegun(id="m1", author="ada", reason="filter", **work)]
            case 200:
                return [ev.EpochChanged(id="t1", epoch=2)]
        return []

    def _outlook(self, key: str, quantity: str, name: str, values: tuple[float | None, ...]) -> ev.Event:
        when: dict[str, Any] = {"start_ns": START_NS + OUTLOOK_FROM * NS, "step_s": 30.0}
        return ev.OutlookTold(id=key, author="feed", quantity=quantity, name=name, values=values, **when)

    def _readings(self, second: int, t_ns: int) -> list[Any]:
        rng, n, racks = self.rng, self.site.sizes["gpu"], self.site.sizes["rack"]
        power = np.minimum(850.0 + rng.normal(0, 10, n), self.limit_w)
        self.energy_mj += (power * 1000).astype(np.int64)
        temp = 55.0 + rng.normal(0, 1, n)
        warm = WARM_FROM <= second < WARM_UNTIL
        if warm:
            temp[: n // 2] += (second - WARM_FROM) * 1.5  # past the guard of 82 degC, then past the limit
        values = np.array([power, temp, self.limit_w], np.float32)
        names = ("power_w", "temp_c", "power_limit_w")
        out: list[Any] = [
            Block("gpu", 0, names, values, ("energy_mj",), self.energy_mj[None, :].copy(), t_ns)
        ]
        for rack in range(racks):
            it_w = float(power[self.site.gpus_of_rack(rack)].sum()) + 5000.0
            for signal, value in (("power_w", it_w), ("flow_lpm", 60.0), ("supply_temp_c", 33.0)):
                out.append(Reading("rack", rack, signal, value * float(1 + rng.normal(0, 0.001)), t_ns))
            out.append(Reading("rack", rack, "return_temp_c", 33.0 + 0.95 * it_w / 3900.0, t_ns))
        if second in (ASLEEP_AT, AWAKE_AT):
            out.append(Reading("node", 1, "standby_state", 2.0 * (second == ASLEEP_AT), t_ns))
            for signal, value in (("gpu_running_count", 4.0), ("gpu_pending_count", 8.0)):
                out.append(Reading("site", 0, signal, value, t_ns))
        if second in (FEED_LOST_AT, FEED_BACK_AT):
            lost = float(second == FEED_LOST_AT)
            out.append(Reading("feeder", 0, "energised_state", lost, t_ns))
            out.append(Reading("feeder", 1, "power_w", FEED_W * (0.8 + 0.195 * lost), t_ns))
        if second == LEAK_AT:
            out.append(Reading("rack", 0, "leak_state", 1.0, t_ns))
        if second == SECOND_LEAK_AT:
            tray = int(self.site.node_start_of_rack[-2])
            out.append(Reading("node", tray, "leak_state", 1.0, t_ns))
        return out

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """Obey the caps, and say so."""
        for batch in decision.commands:
            if batch.control == CAP and len(self.limit_w) == engine.site.sizes["gpu"]:
                self.limit_w[batch.index] = batch.value
            if batch.renewal or batch.final:
                continue
            table = batch.control.partition(".")[0]
            for k, entity in enumerate(batch.index.tolist()):
                self._acks.append(
                    ev.CommandAcked(
                        control=batch.control,
                        name=engine.site.name(table, entity),
                        generation=int(batch.generation[k]),
                        command=f"{batch.epoch}-{batch.command[k]}",
                        state="done",
                    )
                )


class Kept:
    """Everything that a run decided, and the checksum after each tick if asked for."""

    def __init__(self, checksums: bool = False) -> None:
        self.decisions: list[Decision] = []
        self.frames: list[Frame] = []
        self.checksums: dict[int, str] = {}
        self._wanted = checksums

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        self.decisions.append(decision)
        self.frames.append(frame)
        if self._wanted:
            self.checksums[frame.tick] = engine.checksum()


def record(folder: Path, seconds: int = SECONDS, kept: Kept | None = None) -> tuple[Engine, Outcome]:
    """Run the story and record it."""
    story = Story(seconds)
    engine = engine_for(story.spec)
    observers = (story, kept) if kept is not None else (story,)
    return engine, replay_arrivals(engine, story.spec, story, 1.0, folder, observers)  # type: ignore[arg-type]
