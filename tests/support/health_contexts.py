"""Looks at a site as the parts of health are given them, made of plain values: no engine runs.

look = Look(site)
look.fail(3)
look.at(60.0)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.builders import START_NS
from twin.catalogue import NS, find_signal
from twin.contracts import FAILED, HEALTHY, UNKNOWN
from twin.health import find
from twin.site import Site
from twin.telemetry import JobSlots, State


class Look:
    """A moment, with a fault book and verdicts that say what they are told to."""

    def __init__(self, site: Site) -> None:
        n_node, n_gpu = site.sizes["node"], site.sizes["gpu"]
        self.site, self.now_ns = site, START_NS
        self.jobs = JobSlots(max(site.sizes["job"], 64), n_node)
        self.faults: tuple[Any, ...] = ()
        self.told: dict[tuple[str, str, int, str], None] = {}
        self.diagnosis = SimpleNamespace(
            book=SimpleNamespace(reported=self.told),
            reports=SimpleNamespace(dark_ns=np.zeros(site.sizes["feeder"], np.int64)),
            silence=SimpleNamespace(unpowered_ns=np.zeros(site.sizes["rack"], np.int64)),
        )
        self.parameters: dict[str, Any] = {}
        self.estimator = SimpleNamespace(parameters=self.parameters, clogged_pu=np.zeros(site.sizes["cdu"]))
        self.state = State(site.sizes)
        self.work: dict[str, np.ndarray] = {}
        self.quiet: set[str] = set()  # signals that are stale
        self.level = {"node": np.full(n_node, HEALTHY, np.uint8), "gpu": np.full(n_gpu, HEALTHY, np.uint8)}
        self.open = {t: [np.zeros(site.sizes[t], np.uint8), np.zeros(site.sizes[t], np.int32)]
                     for t in ("node", "gpu")}  # fmt: skip
        self.heard: dict[tuple[str, int], tuple[Any, ...]] = {}
        self.classes: tuple[str, ...] = ()
        self.faded = np.zeros((0, n_gpu), np.float32)
        self.rules: dict[tuple[str, int], tuple[Any, ...]] = {}

    # the moment

    def n(self, table: str) -> int:
        return self.site.sizes[table]

    def _row(self, key: str) -> np.ndarray:
        signal = find_signal(key)
        return self.state.tables[signal.table].value[signal.row]

    def good(self, key: str) -> np.ndarray:
        return np.where(self.fresh(key), self._row(key), np.float32(np.nan))

    def fresh(self, key: str) -> np.ndarray:
        return np.full(self.n(key.partition(".")[0]), key not in self.quiet)

    def total(self, key: str) -> np.ndarray:
        signal = find_signal(key)
        return self.state.tables[signal.table].total[signal.row]

    def under_work(self, table: str) -> np.ndarray | None:
        return self.work.get(table)

    # the verdicts and the book

    def health(self, part: str) -> Any:
        return SimpleNamespace(level=self.level[part])

    def evidence(self, part: str, index: int) -> tuple[Any, ...]:
        return self.rules.get((part, index), ())

    def rules_of(self, part: str, index: Any, least: int) -> dict[int, list[tuple[int, float, str]]]:
        told = {i: [e for e in self.evidence(part, i) if e.level >= least] for i in index.tolist()}
        own = {i: [e for e in some if not e.rule.startswith("gpu:")] for i, some in told.items()}
        return {i: [(e.level, 1.0, e.rule) for e in some] for i, some in own.items() if some}

    def open_action(self, table: str) -> np.ndarray:
        return self.open[table][0]

    def open_code(self, table: str) -> np.ndarray:
        return self.open[table][1]

    def of(self, table: str, entity: int) -> tuple[Any, ...]:
        return self.heard.get((table, entity), ())

    def last_ns(self, table: str, kind: str) -> np.ndarray:
        last = np.zeros(self.site.sizes[table], np.int64)
        for (of, entity), some in self.heard.items():
            at_ns = [h.at_ns for h in some if of == table and find(h.code, table).kind == kind]
            last[entity] = max([int(last[entity]), *at_ns])
        return last

    def by_class(self) -> tuple[tuple[str, ...], np.ndarray]:
        return self.classes, self.faded

    # what a test says

    def put(self, key: str, value: Any, *index: int) -> None:
        """Values of a signal, of all or of some entities."""
        self._row(key)[list(index) if index else slice(None)] = value

    def fail(self, *nodes: int, level: int = FAILED) -> None:
        """Verdicts on nodes."""
        self.level["node"][list(nodes)] = level

    def well(self, *nodes: int) -> None:
        """These are well again, with their GPUs."""
        self.fail(*nodes, level=HEALTHY)
        self.level["gpu"][np.isin(self.site.node_of_gpu, nodes)] = HEALTHY

    def unknown(self, *nodes: int) -> None:
        """Nothing is known of these and their GPUs."""
        self.fail(*nodes, level=UNKNOWN)
        self.level["gpu"][np.isin(self.site.node_of_gpu, nodes)] = UNKNOWN

    def pass_s(self, seconds: float) -> Look:
        """Time goes on."""
        self.now_ns += round(seconds * NS)
        return self
