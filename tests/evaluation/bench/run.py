"""One measurement of the benchmark, in a process of its own so that its peak memory is its own.

`live` feeds the simulated devices through decoder, Inbox, trace, engine and journal with a clock at every
joint; `replay` runs such a recording again and compares the journal. Part of the shell: this file may look at
the clock, what it measures may not.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from connectors.agents import ItDecoder
from tests.evaluation.bench.load import COUNTERS, GAUGES, RACK, START_NS, Arrivals, Load, spec_for
from tests.evaluation.harness import answer_parent, percentiles
from twin.catalogue import NS
from twin.config import make_engine
from twin.contracts import Decision, EndRecord
from twin.daemon import collect_garbage, freeze_heap
from twin.engine import Engine
from twin.run import JournalWriter, TraceReader, TraceWriter, manifest, replay_frames, write_snapshot
from twin.site import SiteSpec, build_site
from twin.telemetry import Frame, Inbox, Reading

SIGNALS = len(GAUGES) + len(COUNTERS)
SPARSE_PERIOD_S = 10.0  # where a tenth of the racks speaks in each tick, the site file says so
LOOP = ("take", "trace", "tick", "journal")  # what happens at a tick; decoding and staging happen between
PARTS = ("decode", "stage", *LOOP)
NAIVE_SAMPLES = 200_000
Times = dict[str, list[float]]


class TickLoad(msgspec.Struct, frozen=True):
    """Task of a measuring process. `folder` holds the recording."""

    mode: Literal["live", "replay"]
    racks: int
    ticks: int
    warmup: int
    folder: str
    share: float = 1.0
    aside: bool = True  # fsyncs and a snapshot, which are measured apart


class Laps:
    """Seconds spent in each part of a tick; a part entered several times in a tick adds up."""

    def __init__(self) -> None:
        self.times: Times = {}
        self._now: dict[str, float] = {}
        self._kept = 0

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with a clock before and after."""

        def run(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self._now[part] = self._now.get(part, 0.0) + time.perf_counter() - begun

        return run

    def close(self, keep: bool) -> None:
        """End of a tick; what belongs to the warm-up is not kept."""
        if keep:
            for part in {*self.times, *self._now}:
                self.times.setdefault(part, [0.0] * self._kept).append(self._now.get(part, 0.0))
            self._kept += 1
        self._now = {}


def watch_engine(engine: Engine, laps: Laps) -> None:
    """Clocks at the joints of a tick, put on these very objects and no others."""
    joints: list[tuple[str, Any, tuple[str, ...]]] = [
        ("events", engine.intake, ("apply",)), ("apply", engine.state, ("apply",)),
        ("history", engine.history, ("push",)), ("estimator", engine.estimator, ("update",)),
        ("arbiter", engine.arbiter, ("settle", "limit", "command", "withdraw", "resend")),
        ("findings", engine.findings, ("deviations", "outages", "coverage", "limits", "mismatches")),
        ("marks", engine.state, ("marks",)),
        *[(policy.name, policy, ("propose",)) for policy in engine.policies],
        *[(name, model, ("update", "predict")) for name, model in engine.models.items()],
    ]  # fmt: skip
    for part, owner, names in joints:
        for name in names:
            vars(owner)[name] = laps.timed(f"tick_{part}", getattr(owner, name))


class GcWatch:
    """Delays of the tick by the garbage collector, by generation."""

    def __init__(self) -> None:
        self.pauses: list[tuple[int, float]] = []
        self._begun = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self.pauses.append((info["generation"], time.perf_counter() - self._begun))

    def figures(self, ticks: int) -> dict[str, float]:
        """Milliseconds per tick, and the longest pause of the oldest generation."""
        gc.callbacks.remove(self._called)
        spent = sum(s for _, s in self.pauses)
        longest = max((s for _, s in self.pauses), default=0.0)
        full = sum(1 for generation, _ in self.pauses if generation == 2)
        per_tick = 1e3 * spent / ticks
        return {"gc_ms_per_tick": per_tick, "gc_pause_ms_max": 1e3 * longest, "gc_full_count": full}


class Run:
    """A daemon in miniature: the same parts in the same order, without network and scheduler."""

    def __init__(self, task: TickLoad, spec: SiteSpec | None = None) -> None:
        self.task, self.folder = task, Path(task.folder)
        begun = time.perf_counter()
        spec = spec or spec_for(task.racks, 1.0 if task.share == 1.0 else SPARSE_PERIOD_S)
        self.site = build_site(spec, "bench")
        built = time.perf_counter()
        self.engine = make_engine(self.site)
        ready = time.perf_counter()
        self.set_up_ms = {"site_build_ms": 1e3 * (built - begun), "engine_build_ms": 1e3 * (ready - built)}
        self.inbox, self.decoder = Inbox(self.site.sizes), ItDecoder(self.site)
        self.trace = TraceWriter(self.folder, self.site.spec_hash, spec.packed())
        self.journal = JournalWriter(self.folder, durable=False)
        # The same lines once more, forced to the disk, so that what fsync costs is known apart.
        self.durable = JournalWriter(self.folder / "durable", durable=True)
        self.load = Load(self.site, task.share)
        self.laps = Laps()
        watch_engine(self.engine, self.laps)
        counted = ("trace_bytes_per_tick", "commands_per_tick", "leases", "journal_bytes_per_tick", "cpu_s")
        self.counts: Times = {name: [] for name in counted}
        self.journal.append([self.journal.chain.line(manifest(self.engine), -1, 0)])

    def tick(self, number: int, keep: bool) -> None:
        """One second of the site."""
        now_ns = START_NS + (number + 1) * NS
        arrivals = self.load.arrive(number, now_ns)
        written, laps = self.trace.bytes_written, self.laps
        blocks = laps.timed("decode", self._decode)(arrivals)
        laps.timed("stage", self._stage)(blocks, arrivals, now_ns)
        cpu_s = time.process_time()
        frame: Frame = laps.timed("take", self.inbox.take)(number, now_ns, 1.0)
        laps.timed("trace", self.trace.write)(frame)
        decision: Decision = laps.timed("tick", self.engine.tick)(frame)
        lines: list[bytes] = laps.timed("journal", self._journal)(decision)
        cpu_s = time.process_time() - cpu_s
        if self.task.aside:
            laps.timed("journal_fsync", self.durable.append)(lines)
            laps.timed("trace_fsync", self.trace.sync)()
        laps.close(keep)
        if keep:
            new = sum(len(c.index) for c in decision.commands if not c.renewal)
            leases = sum(int(x.running().sum()) for x in self.engine.arbiter.leases.values())
            figures = (self.trace.bytes_written - written, new, leases, sum(map(len, lines)), cpu_s)
            for name, figure in zip(self.counts, figures, strict=True):
                self.counts[name].append(figure)
        collect_garbage(number)
        self.load.obey(decision)

    def _decode(self, arrivals: Arrivals) -> list[Any]:
        blocks: list[Any] = []
        for message in arrivals.messages:
            blocks += self.decoder.decode(message)
        return blocks

    def _stage(self, blocks: list[Any], arrivals: Arrivals, now_ns: int) -> None:
        for block in blocks:
            self.inbox.put_block(block, now_ns)
        for block in arrivals.blocks:
            self.inbox.put_block(block, now_ns)
        for event in arrivals.events:
            self.inbox.put_event(event)

    def _journal(self, decision: Decision) -> list[bytes]:
        lines = self.journal.chain.lines(decision)
        self.journal.append(lines)
        return lines

    def finish(self) -> dict[str, float]:
        """Close the recording as a run does; the time of a snapshot."""
        end = EndRecord(state_checksum=self.engine.checksum())
        state = self.engine.state
        self.journal.append([self.journal.chain.line(end, state.tick, state.now_ns)])
        for writer in (self.trace, self.journal, self.durable):
            writer.close()
        if not self.task.aside:
            return {}
        begun = time.perf_counter()
        write_snapshot(self.folder, state.tick, self.engine.dump())
        return {"snapshot_ms": 1e3 * (time.perf_counter() - begun)}


def peak_rss_bytes() -> int:
    """The most memory that this process held so far (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def live(task: TickLoad) -> dict[str, float]:
    """Run the load, record it, and measure every part."""
    run = Run(task)
    freeze_heap()
    watch = None
    for number in range(task.warmup + task.ticks):
        if number == task.warmup:
            watch = GcWatch()
        run.tick(number, number >= task.warmup)
    pauses = watch.figures(task.ticks) if watch else {}
    peak = peak_rss_bytes()
    out = run.set_up_ms | run.finish() | pauses | figures(run, task.ticks)
    n = run.site.sizes["gpu"]
    out |= {"gpus": n, "ticks": task.ticks, "cells_per_tick": SIGNALS * n}
    out |= {"peak_rss_bytes": peak, "load_rss_bytes": run.load.own_bytes}
    return out | baselines(run, out)


def figures(run: Run, ticks: int) -> dict[str, float]:
    """Percentiles of every part, and the rates that follow from the medians."""
    out: dict[str, float] = {}
    times = {part: 1e3 * np.array(t) for part, t in run.laps.times.items() if len(t) == ticks}
    times["take_trace_tick_journal"] = np.sum([times[part] for part in LOOP], axis=0)
    times["take_trace_tick_journal_cpu"] = 1e3 * np.array(run.counts.pop("cpu_s"))
    times["tick_rest"] = times["tick"] - sum(t for part, t in times.items() if part.startswith("tick_"))
    for part, t in times.items():
        out |= percentiles(f"{part}_ms", t)
    for name, values in run.counts.items():
        out |= {f"{name}_p50": float(np.median(values)), f"{name}_max": float(np.max(values))}
    out["trace_bytes_per_tick_mean"] = float(np.mean(run.counts["trace_bytes_per_tick"]))
    cells = SIGNALS * run.site.sizes["gpu"] * run.task.share
    for part in PARTS:
        out[f"{part}_updates_per_s"] = 1e3 * cells / out[f"{part}_ms_p50"]
    way_in = times["decode"] + times["stage"] + times["take"] + times["tick_apply"]
    out["decode_stage_take_apply_ms_p50"] = float(np.median(way_in))
    out["decode_stage_take_apply_updates_per_s"] = 1e3 * cells / float(np.median(way_in))
    return out


def baselines(run: Run, out: dict[str, float]) -> dict[str, float]:
    """Measure plain NumPy and plain Python at the same work, so that machines can be compared."""
    load, again = run.load, 15
    values = np.vstack([load.value, load.counts.astype(np.float32)])
    scale = np.ones((SIGNALS, 1), np.float32)
    scale[: len(GAUGES)] = 1.0 / load.quantum
    copy, scratch, whole = np.empty_like(values), np.empty_like(values), np.empty(values.shape, np.int32)

    def quantise() -> None:
        np.multiply(values, scale, out=scratch)
        np.rint(scratch, out=scratch)
        np.copyto(whole, scratch, casting="unsafe")

    np.clip(values, -1e6, 1e6, out=values)
    names, latest = tuple(GAUGES), dict[tuple[int, str], tuple[float, int]]()
    rows = load.value[:, : max(1, NAIVE_SAMPLES // len(names))].T.tolist()

    def naive() -> None:
        for entity, row in enumerate(rows):
            for name, value in zip(names, row, strict=True):
                latest[entity, name] = (value, START_NS)

    naive_per_s = 1e3 * len(rows) * len(names) / _median_ms(naive, 5)
    now_ns = START_NS + (run.task.warmup + run.task.ticks + 2) * NS
    some = range(min(run.task.racks, 500))
    single = [Reading("rack", r, name, 30.0, now_ns) for name in RACK[1:5] for r in some]
    begun = time.perf_counter()
    for reading in single:
        run.inbox.put(reading, now_ns)
    single_per_s = len(single) / (time.perf_counter() - begun)
    copy_ms = _median_ms(lambda: np.copyto(copy, values), again)
    quantise_ms = _median_ms(quantise, again)
    return {
        "numpy_copy_ms": copy_ms, "numpy_quantise_ms": quantise_ms, "python_dict_updates_per_s": naive_per_s,
        "single_reading_updates_per_s": single_per_s,
        "take_trace_tick_journal_per_numpy_quantise": out["take_trace_tick_journal_ms_p50"] / quantise_ms,
        "decode_stage_take_apply_per_numpy_quantise": out["decode_stage_take_apply_ms_p50"] / quantise_ms,
        "decode_stage_take_apply_per_python_dict": out["decode_stage_take_apply_updates_per_s"] / naive_per_s,
    }  # fmt: skip


def _median_ms(call: Callable[[], None], again: int) -> float:
    taken = []
    for _ in range(again):
        begun = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - begun))
    return float(np.median(taken))


def replay(task: TickLoad) -> dict[str, float]:
    """Run a recording again, every line and the final state compared, as `racktwin trace replay` does."""
    folder = Path(task.folder)
    spec = spec_for(task.racks, 1.0 if task.share == 1.0 else SPARSE_PERIOD_S)
    engine = make_engine(build_site(spec, "bench"))
    begun, cpu_s = time.perf_counter(), time.process_time()
    outcome = replay_frames(engine, TraceReader(folder), folder / "journal.jsonl")
    took, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
    expected = task.warmup + task.ticks
    if outcome.damage or outcome.ticks != expected:
        raise RuntimeError(f"{outcome.ticks} ticks replayed, {outcome.damage}; expected {expected}")
    size = sum(p.stat().st_size for p in folder.glob("trace-*.rt"))
    rates = {"x_real_time": outcome.ticks / took, "x_real_time_cpu": outcome.ticks / cpu_s}
    return rates | {
        "ms_per_tick": 1e3 * took / outcome.ticks,
        "ticks": outcome.ticks,
        "compared_lines": outcome.compared_lines,
        "trace_bytes": size,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def measured(task: TickLoad) -> dict[str, float | int]:
    """Figures of a task."""
    return live(task) if task.mode == "live" else replay(task)


if __name__ == "__main__":
    answer_parent(TickLoad, measured)
