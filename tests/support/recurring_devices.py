"""Devices to which trouble comes when a test says so, straight to the test of what recurs: no engine needed.

watch = Watched(racks(4))
watch.look(3600.0, {"gpu.gap": [3]})
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.builders import START_NS, Twin, site_of, two_racks
from twin.catalogue import NS
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.health.recurring import KEYS, Recurring
from twin.site import Site
from twin.telemetry import Block, Event

HOUR_S, DAY_S = 3600.0, 86_400.0
LIFE = {
    "gpu": {"temp_c": 60.0, "power_w": 700.0, "util_pu": 0.9},
    "node": {"power_w": 4000.0, "cpu_temp_c": 60.0},
}


def racks(count: int, **more: Any) -> Site:
    """So many racks of 18 nodes with 4 GPUs each."""
    return site_of(two_racks(racks=f"r[1-{count}]", **more))


def mask(n: int, index: Collection[int]) -> np.ndarray:
    """True at these [n]."""
    out = np.zeros(n, np.bool_)
    out[list(index)] = True
    return out


class Watched:
    """The recurrences of a site, and the time; all devices are heard by all counters from the first look."""

    def __init__(self, site: Site, keys: Collection[str] = KEYS, begin_ns: int = START_NS) -> None:
        self.site, self.keys, self.begin_ns = site, keys, begin_ns
        self.recurring = Recurring(site)
        self.alarmed: set[int] = set()  # nodes, at any look so far
        self.failed: set[int] = set()  # GPUs on an NVLink that recovers again and again
        self.look(0.0)

    def look(
        self,
        at_s: float,
        came: Mapping[str, Sequence[int] | np.ndarray] | None = None,
        *,
        hushed: Mapping[str, Collection[int]] | None = None,
        work: Mapping[str, Collection[int]] | None = None,
        asleep: Mapping[str, Collection[int]] | None = None,
        broken: Collection[int] = (),
        life: Mapping[str, np.ndarray] | None = None,
        grown: tuple[float, float] = (1.0, 10.0),
    ) -> None:
        """A look so long after the first: who has trouble anew, who else is silent, worked at or asleep.

        `life`: counters as devices have them [n], zero without; `grown`: by how much those with trouble grew,
        and in how many seconds.
        """
        sizes = self.site.sizes
        index = {k: np.unique(np.asarray(i, np.int32)) for k, i in (came or {}).items()}
        none = np.zeros(0, np.int32)
        counters: dict[str, Any] = {}
        spoke, fell, silent = ({t: np.zeros(sizes[t], np.bool_) for t in ("gpu", "node")} for _ in range(3))
        for key in self.keys:
            table = key.partition(".")[0]
            heard = np.ones(sizes[table], np.bool_)
            if key.endswith(".gap"):
                spoke[table], fell[table] = heard, index.get(key, none)
                silent[table] = mask(sizes[table], {*fell[table].tolist(), *(hushed or {}).get(table, ())})
            else:
                moved = index.get(key, none)
                by, in_s = (np.full(len(moved), x) for x in grown)
                counters[key] = SimpleNamespace(heard=heard, moved=moved, moved_by=by, moved_in_s=in_s)
        rates: Any = SimpleNamespace(counters=counters, spoke=spoke, fell=fell, hushed=silent)
        worked, off = ({t: mask(sizes[t], i) for t, i in (some or {}).items()} for some in (work, asleep))
        counted = life or {}
        now: Any = SimpleNamespace(
            now_ns=self.begin_ns + round(at_s * NS),
            under_work=lambda table, asleep=True: (
                off.get(table) if asleep and table in off else worked.get(table)
            ),
            raw=lambda key: counted.get(key, np.zeros(sizes[key.partition(".")[0]], np.int64)),
        )
        self.recurring.update(now, rates, mask(sizes["node"], broken))
        self.alarmed |= set(np.flatnonzero(self.recurring.standing).tolist())

    def live(
        self,
        troubles: Sequence[tuple[float, str, int]],
        until_s: float,
        step_s: float = 10.0,
        life: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Troubles (when, stream, device), each at the first look after it, and a look every hour from now.

        Looks at which nothing comes only let scores fall: an hour is short for that.
        """
        now_s = (self.recurring.now_ns - self.begin_ns) / NS
        looks: dict[int, dict[str, list[int]]] = {}
        for at_s, key, device in troubles:
            looks.setdefault(int(-(-at_s // step_s)), {}).setdefault(key, []).append(device)
        every = max(1, round(HOUR_S / step_s))
        for hour in range(every, int(until_s / step_s) + 1, every):
            looks.setdefault(hour, {})
        for number in sorted(looks):
            if now_s < number * step_s <= until_s:
                self.look(number * step_s, looks[number], life=life)
                self.failed |= set(np.flatnonzero(self.recurring.failing).tolist())


def chance(
    rng: np.random.Generator, per_day: np.ndarray, days: float, key: str
) -> list[tuple[float, str, int]]:
    """Poisson trouble of each device [n] over so many days."""
    return [
        (float(at_s), key, device)
        for device, times in enumerate(rng.poisson(per_day * days).tolist())
        for at_s in rng.uniform(0.0, days * DAY_S, times)
    ]


def every(
    hours: float, times: int, key: str, device: int, begin_s: float = 0.0
) -> list[tuple[float, str, int]]:
    """Trouble of one device at so many hours from one time to the next."""
    return [(begin_s + k * hours * HOUR_S, key, device) for k in range(times)]


class Living(Twin):
    """An engine with counters: all of it is well, but for what `look` is told."""

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__(tree)
        self.tree = tree

    def look(
        self,
        *events: Event,
        counts: Mapping[str, Sequence[int] | np.ndarray] | None = None,
        silent: Mapping[str, Collection[int]] | None = None,
        dt_s: float = 60.0,
    ) -> None:
        """A tick so much later: counters that stand so high, and who says nothing."""
        self.now_ns += round(dt_s * NS)
        mute = {t: mask(self.site.sizes[t], (silent or {}).get(t, ())) for t in ("gpu", "node")}
        for table, names in LIFE.items():
            values = np.where(mute[table], np.nan, np.array([[value] for value in names.values()]))
            self._put(table, tuple(names), values.astype(np.float32), (), np.empty((0, values.shape[1])))
        for key, total in (counts or {}).items():
            table, _, name = key.partition(".")
            told = np.array(total, np.int64).reshape(1, -1)
            if table in mute:
                told = np.where(mute[table], -1, told)
            self._put(table, (), np.empty((0, told.shape[1]), np.float32), (name,), told)
        for event in events:
            self.inbox.put_event(event)
        self.frame = self.inbox.take(self.number, self.now_ns, dt_s)
        self.number += 1
        self.decision = self.engine.tick(self.frame)

    def _put(self, table: str, gauges: Any, values: Any, counters: Any, counts: Any) -> None:
        block = Block(table, 0, gauges, values, counters, counts.astype(np.int64), self.now_ns)
        self.inbox.put_block(block, self.now_ns)

    def rests(self, hours: float, **more: Any) -> None:
        """Nothing new for so long, with a tick every ten minutes."""
        for _ in range(round(6 * hours)):
            self.look(dt_s=600.0, **more)

    @property
    def recurring(self) -> Recurring:
        """Return the engine's record of recurring faults."""
        return self.engine.health.recurring

    def again(self) -> Living:
        """The same after a restart; what it hears next are this one's frames."""
        out = Living(self.tree)
        out.engine.restore(decode(encode(self.engine.dump())))
        return out
