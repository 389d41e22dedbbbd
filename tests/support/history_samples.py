"""Small histories: samples with plain numbers, stores made of them, questions in seconds from the begin."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.builders import START_NS
from tests.support.patience import PATIENCE_S
from twin.catalogue import NS
from twin.run import FILE_NAME, HistoryReader, HistoryStore, Layout, Sample
from twin.run.history_sample import TableSample
from twin.site import Site

T0 = START_NS // (600 * NS) * (600 * NS)


def rack_sample(site: Site, t_ns: int, power_w: Any, energy_mj: Any = None) -> Sample:
    """Power of each rack, and energy of each feeder."""
    value = np.broadcast_to(np.asarray(power_w, np.float32), (1, site.sizes["rack"])).copy()
    tables = [TableSample("rack", ("power_w",), value, (), np.zeros((0, value.shape[1]), np.int64))]
    if energy_mj is not None:
        total = np.broadcast_to(np.asarray(energy_mj, np.int64), (1, site.sizes["feeder"])).copy()
        none = np.zeros((0, total.shape[1]), np.float32)
        tables.append(TableSample("feeder", (), none, ("energy_mj",), total))
    return Sample(t_ns, Layout(site), tuple(tables), 0)


def store_in(folder: Path, every_s: float = 10.0, days: float = 30.0, quota: int = 10**9) -> HistoryStore:
    return HistoryStore(folder / FILE_NAME, every_s, days, quota)


def settle(store: HistoryStore) -> None:
    for _ in range(100_000):
        if not store.upkeep():
            return
    raise AssertionError("upkeep never ends")


def filled(folder: Path, site: Site, count: int, first: int = 0) -> HistoryStore:
    """A store of `count` samples 10 s apart: power is the number of the sample, energy ten times that."""
    store = store_in(folder)
    for i in range(first, first + count):
        store.add(rack_sample(site, T0 + i * 10 * NS, [i, i + 0.5], 10 * i))
    settle(store)
    return store


def ask(folder: Path, key: str, names: list[str], since: int, until: int, **more: Any) -> dict[str, Any]:
    """`since` and `until` in seconds from the begin."""
    reader = HistoryReader(folder / FILE_NAME, more.pop("every_s", 10.0), more.pop("timeout_s", 10.0))
    return reader.query(key, names, T0 + since * NS, T0 + until * NS, **more)


def wait_for(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    ends = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(0.01)
