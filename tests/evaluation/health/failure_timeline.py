"""Timeline writer: turns drawn failures and benign events into the events of a failure timeline."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tests.evaluation.health.failure_classes import (
    BENIGN,
    CRASH_GPUS,
    CRASH_PU,
    DAY_S,
    EXCURSION_S,
    FAILURES,
    GAP_S,
    GAP_SPREAD,
    KINDS,
    PENDING_S,
    PENDING_SPREAD,
    REBOOT_S,
    REBOOT_SPREAD,
    SPARE_S,
    SPARE_SPREAD,
    Benign,
    Sign,
)
from tests.evaluation.health.failure_draws import Failing, draw_failing, draw_shared, failure_table
from twin.catalogue import Bool
from twin.plant import FailureTimeline, TimelineEvent
from twin.site import Site

SHOWING, HARMLESS = 33, 34  # words of the seeds
PIECES = 48  # of the growth of a precursor
RESET_GPU, REBOOT_NODE = 1, 2  # of gpu.recovery_action_state
XID_REMAPPED = 63
GONE = ("off_bus", "pcie", "thermal")  # the GPU leaves the bus; with others it stays but does no more work
USERS = ("xid 13", "xid 31", "xid 43", "xid 45")
WITHOUT_LINKS = Sign("node_silent", 1.0, 20.0, 0.5)  # shows the network where a site knows no links


class TimelineWriter:
    """Strokes of one timeline; the causes of what is held are numbered as they come."""

    def __init__(self, site: Site, seed: int, strength: float) -> None:
        self.site, self.seed, self.strength = site, seed, strength
        self.events: list[TimelineEvent] = []
        self.reboots: list[tuple[int, float, float]] = []
        self._causes = count(1)

    def hold(self, field: str, at: int | tuple[int, int], value: float, begin_s: float, end_s: float) -> None:
        """A field holds a value from one instant to another; for no time at all it holds none."""
        cause = next(self._causes)
        if not begin_s < end_s:  # as events of one instant it would be freed first, and held for ever
            return
        self.events += (
            TimelineEvent(begin_s, "hold", field, at, value, cause),
            TimelineEvent(end_s, "free", field, at, 0.0, cause),
        )

    def happen(self, what: str, at: int, time_s: float, size: int, rng: np.random.Generator) -> None:
        """One event of a precursor or a benign kind: a count, a report, a silence or a restart."""
        if what.startswith("xid "):
            self.events += [TimelineEvent(time_s, "xid", "", at, float(what[4:]))] * max(size, 1)
        elif what in ("gpu_silent", "node_silent", "gpu_slowed"):
            self.last(what, at, time_s, _drawn(GAP_S, GAP_SPREAD, rng))
        elif what == "node_reboots":
            self.reboot(at, time_s, rng)
        else:
            self.events.append(TimelineEvent(time_s, "count", what, at, float(size)))
            if what == "gpu_row_remaps":
                self.events.append(TimelineEvent(time_s, "xid", "", at, XID_REMAPPED))
                wait_s = _drawn(PENDING_S, PENDING_SPREAD, rng)
                self.hold("gpu_remap_pending", at, 1.0, time_s, time_s + wait_s)

    def last(self, what: str, at: int, begin_s: float, seconds: float) -> None:
        """A silence or a slowdown; of the latter devices also count the time."""
        self.hold(what, at, 1.0, begin_s, begin_s + seconds)
        if what == "gpu_slowed":
            self.events.append(
                TimelineEvent(begin_s + seconds, "count", "throttle_s", at, float(round(seconds)))
            )

    def reboot(self, node: int, time_s: float, rng: np.random.Generator, planned: bool = False) -> None:
        """A node restarts: its agent is silent meanwhile, and its work is lost unless it was planned."""
        end_s = time_s + _drawn(REBOOT_S, REBOOT_SPREAD, rng)
        self.hold("node_silent", node, 1.0, time_s, end_s)
        if planned:
            self.events.append(TimelineEvent(time_s, "work", "node", node, 2.0 * (end_s - time_s)))
        else:
            self.hold("node_unfit", node, 1.0, time_s, end_s)
        self.events.append(TimelineEvent(end_s, "count", "node_reboots", node, 1.0))
        self.reboots.append((node, time_s, end_s))

    def fail(self, f: Failing) -> None:
        """A node becomes unusable, is switched off, repaired, and back."""
        name, put = KINDS[f.kind], self.events
        if f.feeder < 0:
            for side in (0, 1):
                dark_s = f.begin_s if name == "power" else f.off_s
                self.hold("node_psu_ok", (f.node, side), 0.0, dark_s, f.end_s)
        if not f.shared:
            self.hold("node_unfit", f.node, 1.0, f.begin_s, f.end_s)
        if f.code:
            put.append(TimelineEvent(f.begin_s, "xid", "", f.device, float(f.code)))
        if name in GONE:
            self.hold("gpu_alive", f.device, 0.0, f.begin_s, f.end_s)
        elif f.code:
            action = REBOOT_NODE if name == "firmware" else RESET_GPU
            self.hold("gpu_recovery_action", f.device, float(action), f.begin_s, f.end_s)
        if name == "memory":
            put.append(TimelineEvent(f.begin_s, "count", "gpu_dbe_count", f.device, 1.0))
            if f.code == 64:  # no row is left to remap to
                self.hold("gpu_remap_failed", f.device, 1.0, f.begin_s, f.end_s)
        if name in ("host", "network"):
            self.hold("node_silent", f.node, 1.0, f.begin_s, f.end_s)
        if name == "network":
            for link in _links(self.site, f.node):
                self.hold("link_down", link, 1.0, f.begin_s, f.end_s)
        if f.replaced:
            table = FAILURES[f.kind].table
            put.append(TimelineEvent(f.end_s, "replace", table, f.device))
        put.append(TimelineEvent(f.end_s, "count", "node_reboots", f.node, 1.0))

    def timeline(self, days: float, failing: list[Failing], lemons: Bool) -> FailureTimeline:
        """Return the written timeline, in order of time."""
        within = sorted(
            (s for s in self.events if s.time_s < days * DAY_S), key=lambda s: (s.time_s, s.act, s.cause)
        )
        reboots = tuple(sorted(self.reboots, key=lambda r: r[1]))
        table = failure_table(failing)
        return FailureTimeline(days, self.seed, self.strength, tuple(within), table, lemons, reboots)

    def show(self, number: int, f: Failing) -> None:
        """The precursors of a failure; at least one of its signs."""
        if f.shared or not np.isfinite(f.precursor_s) or self.strength == 0.0:
            return
        rng = np.random.default_rng([self.seed, SHOWING, number])
        signs = FAILURES[f.kind].signs
        shown = rng.random(len(signs)) < [s.share_pu for s in signs]
        shown[0] |= not shown.any()
        seeds = rng.integers(2**31, size=len(signs))
        for sign, there, seed in zip(signs, shown.tolist(), seeds.tolist(), strict=True):
            if there:
                self._sign(f, sign, np.random.default_rng([self.seed, SHOWING, number, seed]))

    def _sign(self, f: Failing, sign: Sign, rng: np.random.Generator) -> None:
        at = f.node if sign.what.startswith("node_") else f.device
        if sign.what.startswith("link_"):
            links = _links(self.site, f.node)
            sign, at = (sign, int(rng.choice(links))) if links else (WITHOUT_LINKS, f.node)
        size = _drawn(sign.size, sign.spread, rng) * self.strength
        lead_s = f.begin_s - f.precursor_s
        edges = f.precursor_s + lead_s * np.linspace(0.0, 1.0, PIECES + 1)
        if sign.what == "psu_lost":
            # All or nothing: half as strong is half as often
            if rng.random() < self.strength:
                self.hold("node_psu_ok", (f.node, int(rng.integers(2))), 0.0, f.precursor_s, f.end_s)
            return
        if sign.what.endswith("_factor"):
            cause = next(self._causes)
            for k, edge_s in enumerate(edges[:-1].tolist(), 1):
                value = 1.0 + size * (k / PIECES) ** 2
                self.events.append(TimelineEvent(edge_s, "hold", sign.what, at, value, cause))
            self.events.append(TimelineEvent(f.end_s, "free", sign.what, at, 0.0, cause))
            return
        total = size * lead_s / DAY_S / 3.0  # the integral of growth with the square
        means = total * np.diff(np.linspace(0.0, 1.0, PIECES + 1) ** 3)
        many = rng.poisson(means)
        at_s = edges[:-1] + rng.random(PIECES) * (lead_s / PIECES)
        for k in np.flatnonzero(many).tolist():
            if sign.what.endswith(("_silent", "_slowed", "_reboots", "_remaps")):
                for part in range(min(int(many[k]), 10)):
                    late_s = part * lead_s / PIECES / 10.0
                    self.happen(sign.what, at, min(float(at_s[k]) + late_s, f.begin_s), 1, rng)
            else:
                self.happen(sign.what, at, float(at_s[k]), int(many[k]), rng)

    def benign(self, days: float, down: dict[int, list[tuple[float, float]]]) -> None:
        """All that happens without consequence to nodes while they are in service."""
        for number, kind in enumerate(BENIGN):
            rng = np.random.default_rng([self.seed, HARMLESS, number])
            n = self.site.sizes[kind.table]
            for at, time_s in _times(kind, n, days, rng):
                if not _is_down(down.get(_node(self.site, kind.table, at), ()), time_s):
                    self._harmless(kind, at, time_s, rng)

    def _harmless(self, kind: Benign, at: int, time_s: float, rng: np.random.Generator) -> None:
        size = _drawn(kind.size, kind.spread, rng)
        if kind.what == "maintenance":
            self.reboot(at, time_s, rng, planned=True)
        elif kind.what == "psu_lost":
            end_s = time_s + _drawn(SPARE_S, SPARE_SPREAD, rng)
            self.hold("node_psu_ok", (at, int(rng.integers(2))), 0.0, time_s, end_s)
        elif kind.what.endswith("_factor"):
            self.hold(kind.what, at, 1.0 + size, time_s, time_s + float(rng.uniform(*EXCURSION_S)))
        elif kind.what in ("gpu_silent", "node_silent", "gpu_slowed"):
            self.last(kind.what, at, time_s, 60.0 * size)
        else:
            self.happen(kind.what, at, time_s, max(1, round(size)), rng)


def draw_timeline(site: Site, seed: int, days: float, strength: float = 1.0) -> FailureTimeline:
    """Return the failures of `site` in so many days; `strength` scales precursors and nothing else.

    The same failures and the same noise come at every strength. Raises ValueError for no days or a strength
    outside 0..10.
    """
    if not days > 0.0 or not 0.0 <= strength <= 10.0:
        raise ValueError(f"expected more than 0 days and a strength in 0..10, got {days:g} and {strength:g}")
    single, lemons = draw_failing(site, seed, days)
    failing = single + draw_shared(site, seed, days, single)
    writer = TimelineWriter(site, seed, strength)
    down: dict[int, list[tuple[float, float]]] = {}
    for number, one in enumerate(failing):
        writer.fail(one)
        writer.show(number, one)
        down.setdefault(one.node, []).append((one.begin_s, one.end_s))
    for feeder, begin_s, end_s in sorted({(f.feeder, f.begin_s, f.end_s) for f in failing if f.feeder >= 0}):
        writer.hold("feeder_ok", feeder, 0.0, begin_s, end_s)
    writer.benign(days, down)
    return writer.timeline(days, failing, lemons)


def ordinary_life(site: Site, seed: int, days: float) -> FailureTimeline:
    """Return so many days of `site` in which nothing fails: what happens without consequence, and no more."""
    writer = TimelineWriter(site, seed, 0.0)
    writer.benign(days, {})
    return writer.timeline(days, [], np.zeros(site.sizes["node"], np.bool_))


def _times(kind: Benign, n: int, days: float, rng: np.random.Generator) -> Iterable[tuple[int, float]]:
    """(entity, instant) of each event."""
    if not n:
        return
    weight = np.exp(kind.over * rng.standard_normal(n))
    crash = kind.what in USERS
    mean = kind.per_day * n * days / (1.0 + CRASH_PU * (CRASH_GPUS - 1) if crash else 1.0)
    many = int(rng.poisson(mean))
    entity = rng.choice(n, many, p=weight / weight.sum())
    at_s = rng.uniform(0.0, days * DAY_S, many)
    together: NDArray[np.bool_] = rng.random(many) < (CRASH_PU if crash else 0.0)
    for first, time_s, crowd in zip(entity.tolist(), at_s.tolist(), together.tolist(), strict=True):
        for k in range(CRASH_GPUS if crowd else 1):
            yield (first + k) % n, time_s


def _links(site: Site, node: int) -> list[int]:
    return np.flatnonzero(site.node_of_link == node).tolist()


def _node(site: Site, table: str, at: int) -> int:
    if table == "gpu":
        return int(site.node_of_gpu[at])
    return int(site.node_of_link[at]) if table == "link" else at


def _is_down(spans: Iterable[tuple[float, float]], time_s: float) -> bool:
    return any(a <= time_s < b for a, b in spans)


def _drawn(median: float, spread: float, rng: np.random.Generator) -> float:
    return median * float(np.exp(spread * rng.standard_normal()))
