"""Costs of the history: taking a sample on the loop, writing it, asking for a day of a rack, line protocol.

`python -m tests.evaluation.bench.history`; points are readings, and a rate is per second of one core.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from connectors.influx import heads_of
from connectors.influx.lines import lines
from tests.evaluation.bench.load import COUNTERS, GAUGES, GPUS_PER_RACK, START_NS, spec_for
from twin.catalogue import NS, TABLES
from twin.engine import Engine
from twin.run import FILE_NAME, HistoryReader, HistoryStore, Layout, Sample, take_sample
from twin.site import Site, build_site
from twin.telemetry import GOOD, State

EVERY_S = 10.0
BASELINE_ROWS, BASELINE_LINES = 100_000, 500
FIELDS = 7  # of noise, shifted from sample to sample
Figures = dict[str, float | int]


class _Source:
    """A state whose GPUs report what the benchmark's load reports, a little else at each instant."""

    def __init__(self, gpus: int) -> None:
        self.site: Site = build_site(spec_for(max(1, round(gpus / GPUS_PER_RACK))), "bench")
        self.state, self.layout = State(self.site.sizes), Layout(self.site)
        rng, gpu = np.random.default_rng(1), self.state.tables["gpu"]
        self.rows = [TABLES["gpu"].by_name[name].row for name in GAUGES]
        self.steps = np.array([[TABLES["gpu"].by_name[name].quantum] for name in GAUGES], np.float32)
        shape = (len(GAUGES), gpu.n)
        base = np.stack([rng.normal(mean, over, gpu.n) for mean, over, _ in GAUGES.values()])
        self.base = np.rint(base / self.steps).astype(np.float32)
        sigma = np.array([[s] for *_, s in GAUGES.values()], np.float32) / self.steps
        self.noise = [np.rint(sigma * rng.standard_normal(shape, np.float32)) for _ in range(FIELDS)]
        gpu.quality[self.rows] = GOOD
        gpu.bad_count[self.rows] = 0
        self.counts = [TABLES["gpu"].by_name[name].row for name in COUNTERS]
        gpu.raw[self.counts] = 0

    def sample(self, number: int) -> tuple[Sample, float]:
        """The sample of an instant, and how long it took to take."""
        now_ns, gpu = START_NS + round(number * EVERY_S * NS), self.state.tables["gpu"]
        rng = np.random.default_rng(number)
        noise = np.roll(self.noise[number % FIELDS], int(rng.integers(gpu.n)), axis=1)  # never twice alike
        gpu.value[self.rows] = (self.base + noise) * self.steps
        gpu.total[self.counts] += rng.integers(8_000_000, 9_000_000, (len(self.counts), gpu.n))
        gpu.t_ns[:] = now_ns
        began = time.perf_counter()
        taken = take_sample(cast(Engine, SimpleNamespace(state=self.state)), self.layout, now_ns)
        return taken, time.perf_counter() - began


def _stored(folder: Path, source: _Source, samples: int) -> Figures:
    """Everything about one store: `samples` in, and all of them compacted but the last window."""
    store, points, took_s = HistoryStore(folder / FILE_NAME, EVERY_S, 30.0, 10**12), 0, []
    writing_s, longest_s, step_s = 0.0, 0.0, 0.0
    for number in range(samples):
        sample, took = source.sample(number)
        took_s.append(took)
        points += sample.points
        began = time.perf_counter()
        store.add(sample)
        longest_s = max(longest_s, time.perf_counter() - began)
        while True:
            at = time.perf_counter()
            more = store.upkeep()
            step_s = max(step_s, time.perf_counter() - at)
            if not more:
                break
        writing_s += time.perf_counter() - began
    kept = store.db.execute("SELECT SUM(LENGTH(data)) FROM chunk").fetchone()[0] or 0
    raw = store.db.execute("SELECT COUNT(*) FROM sample").fetchone()[0]
    store.close()
    packed = points * (samples - raw) / samples
    return {
        "sample_ms_p50": 1e3 * float(np.median(took_s)),
        "sample_ms_max": 1e3 * max(took_s),
        "add_ms_max": 1e3 * longest_s,
        "upkeep_step_ms_max": 1e3 * step_s,
        "store_points_per_s": points / writing_s,
        "store_bytes_per_point": kept / packed if packed else float("nan"),
    }


def _asked(folder: Path, samples: int) -> Figures:
    """A day of a rack's GPUs and of one GPU, cold (the names are read too) and again."""
    reader, out = HistoryReader(folder / FILE_NAME, EVERY_S), {}
    rack = [f"bench/hall1/r0001/node{k // 4}/gpu{k % 4}" for k in range(GPUS_PER_RACK)]
    until_ns = START_NS + round(samples * EVERY_S * NS)
    for name, names, step_s in (("rack_day_first", rack, None), ("rack_day", rack, None),
                                ("rack_day_5min", rack, 300.0), ("gpu_day", rack[:1], None),
                                ("gpu_day_raw", rack[:1], EVERY_S)):  # fmt: skip
        began = time.perf_counter()
        reader.query("gpu.temp_c", names, START_NS, until_ns, step_s, 10_000 if step_s == EVERY_S else 2000)
        out[f"query_{name}_ms"] = 1e3 * (time.perf_counter() - began)
    return cast(Figures, out)


def _spelled(source: _Source) -> Figures:
    """Line protocol of one sample, as the writer spells it."""
    gpu = next(t for t in source.sample(0)[0].tables if t.table == "gpu")
    heads, n = heads_of("gpu", source.layout.names("gpu")), gpu.value.shape[1]
    began = time.perf_counter()
    size = 0
    for first in range(0, n, 5000):
        size += len(lines(heads, cast(Any, gpu), first, min(n, first + 5000), START_NS)[0])
    took_s = time.perf_counter() - began
    points = gpu.value.size + gpu.total.size
    return {
        "influx_text_points_per_s": points / took_s,
        "influx_text_lines_per_s": n / took_s,
        "influx_text_bytes_per_point": size / points,
    }


def _plain_rows(folder: Path, source: _Source) -> float:
    """Measure a table with a row per point: the baseline of the store, in points per second."""
    gpu = next(t for t in source.sample(0)[0].tables if t.table == "gpu")
    rows = ((START_NS, k, i, v) for k, row in enumerate(gpu.value.tolist()) for i, v in enumerate(row))
    some = list(itertools.islice(rows, BASELINE_ROWS))
    with contextlib.closing(sqlite3.connect(folder / "plain.sqlite")) as db:
        db.execute("CREATE TABLE point (t_ns INTEGER, signal INTEGER, entity INTEGER, value REAL)")
        began = time.perf_counter()
        db.executemany("INSERT INTO point VALUES (?, ?, ?, ?)", some)
        db.commit()
        return len(some) / (time.perf_counter() - began)


def _client_points(source: _Source) -> float:
    """Line protocol by the client library's own Point, in points per second."""
    from influxdb_client.client.write import point as client

    make: Any = client.Point
    gpu = next(t for t in source.sample(0)[0].tables if t.table == "gpu")
    names = source.layout.names("gpu")[:BASELINE_LINES]
    columns = gpu.value[:, : len(names)].T.tolist()
    began, count = time.perf_counter(), 0
    for name, column in zip(names, columns, strict=True):
        point = make("gpu").tag("name", name).time(START_NS)
        for key, value in zip(GAUGES, column, strict=False):
            point.field(key, value)
            count += 1
        point.to_line_protocol()
    return count / (time.perf_counter() - began)


def bench_history(day_samples: int = 8640, large_gpus: int = 100_000, large_samples: int = 61) -> Figures:
    """Figures by name: of a site of 576 GPUs over a day, and of a large one over one window."""
    out: Figures = {}
    for label, gpus, samples in (("history.n576", 576, day_samples),
                                 (f"history.n{large_gpus // 1000}k", large_gpus, large_samples)):  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="bench-history-") as folder:
            source = _Source(gpus)
            found = _stored(Path(folder), source, samples)
            if gpus == 576:
                found |= _asked(Path(folder), samples)
            found |= _spelled(source)
            rows_per_s, client_per_s = _plain_rows(Path(folder), source), _client_points(source)
            found["plain_rows_points_per_s"], found["client_point_points_per_s"] = rows_per_s, client_per_s
            found["store_per_plain_rows"] = found["store_points_per_s"] / rows_per_s
            found["influx_text_per_client_point"] = found["influx_text_points_per_s"] / client_per_s
        out |= {f"{label}.{key}": value for key, value in found.items()}
    return out


if __name__ == "__main__":
    for name, figure in bench_history().items():
        print(f"{name:50} {figure:14,.4g}" if figure < 1e4 else f"{name:50} {figure:14,.0f}")
