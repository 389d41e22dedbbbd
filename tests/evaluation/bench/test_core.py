"""The benchmark yields every key, finite and positive, and its load is as noisy as it says."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.bench import bench, compare
from tests.evaluation.bench.load import COUNTERS, GAUGES, START_NS, Load, spec_for
from tests.evaluation.bench.run import PARTS
from twin.catalogue import NS, TABLES
from twin.site import build_site

# Zero is an honest answer to these.
MAY_BE_ZERO = ("gc_", "commands_per_tick", "load_average", "tick_", "_max")


@pytest.mark.evaluation
def test_a_quick_run_yields_all_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "bench.json"
    assert evaluate(["bench", "--quick", "--only", "core", "--out", str(out)]) == 0
    found = msgspec.json.decode(out.read_bytes(), type=dict[str, float | int | str])
    for key, value in found.items():
        if isinstance(value, int | float):
            assert math.isfinite(value), key
            assert value > 0 or (value == 0 and any(part in key for part in MAY_BE_ZERO)), (key, value)
    for label, gpus in (("n72", 72), ("n576", 576)):
        assert found[f"{label}.gpus"] == gpus
        for _, key, _ in bench.ROWS:
            for name in [f"{key}_p50", f"{key}_p99", f"{key}_max"] if key.endswith("_ms") else [key]:
                assert f"{label}.{name}" in found
        for part in PARTS:
            assert f"{label}.{part}_updates_per_s" in found
        assert found[f"{label}.replay_ticks"] == 15
        assert found[f"{label}.replay_compared_lines"] > 15
    for key in ("git_commit", "machine.cpu", "machine.cores", "machine.python", "machine.numpy"):
        assert found[key], key
    assert list(out.parent.iterdir()) == [out], "recordings are thrown away"
    assert "replay, x real time" in capsys.readouterr().out


def checkout(folder: Path, entry: str, **figures: object) -> Path:
    """One whose benchmark writes these figures, whatever it is asked."""
    for path in (folder / entry, folder / ".venv" / "bin" / "python"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    figures["folder"] = str(folder)
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nassert os.getcwd() == {str(folder)!r}\n"
        "with open(sys.argv[sys.argv.index('--out') + 1], 'w') as f:\n"
        f"    json.dump({figures!r}, f)\n"
    )
    path.chmod(0o755)
    return folder


def test_two_checkouts_run_in_turns_and_are_compared_by_what_both_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [entry for entry, _ in compare.ENTRIES]
    new = checkout(tmp_path / "new", entries[0], tick_ms_p50=2.0, tick_ms_p99=9.0, peak_rss_bytes=50, gone=1)
    old = checkout(tmp_path / "old", entries[1], tick_ms_p50=4.0, tick_ms_p99=8.0, peak_rss_bytes=50, came=1)
    monkeypatch.setattr(compare, "HERE", new)
    monkeypatch.setattr(sys, "executable", str(new / ".venv" / "bin" / "python"))
    out = tmp_path / "out.json"
    assert evaluate(["bench", "--against", str(old), "--rounds", "3", "--quick", "--out", str(out)]) == 0
    told = msgspec.json.decode(out.read_bytes())
    assert [(c["key"], c["ratio"], c["verdict"]) for c in told["compared"]] == [
        ("tick_ms_p50", 0.5, "better")
    ]
    assert [run["folder"] for run in told["before"]] == [str(old)] * 3
    turns = re.findall(r"round \d of 3: (\w+)", capsys.readouterr().err)
    assert turns == ["before", "after", "after", "before", "before", "after"]


def test_figures_within_the_spread_are_no_better_and_no_worse() -> None:
    before = [{"a_ms": 1.0, "b_per_s": 10.0}, {"a_ms": 3.0, "b_per_s": 11.0}]
    after = [{"a_ms": 2.0, "b_per_s": 8.0}, {"a_ms": 2.5, "b_per_s": 9.0}]
    a, b = compare.judged(before, after)
    assert (a.before, a.after, a.verdict, a.spread_pu) == (2.0, 2.25, "", 1.0)
    assert (b.ratio, b.verdict) == (pytest.approx(8.5 / 10.5), "worse")


def test_every_signal_of_every_gpu_is_refreshed_with_noise() -> None:
    site = build_site(spec_for(8), "bench")
    load = Load(site)
    before, counted, quantum = np.zeros_like(load.value), load.counts.copy(), TABLES["gpu"].by_name
    for tick in range(3):
        arrivals = load.arrive(tick, START_NS + (tick + 1) * NS)
        assert len(arrivals.messages) == 8
        assert {b.table for b in arrivals.blocks} == {"rack", "feeder", "cdu"}
        noisy = [k for k, (name, (_, _, sigma)) in enumerate(GAUGES.items()) if sigma > quantum[name].quantum]
        assert len(noisy) >= 9
        assert ((load.value[noisy] != before[noisy]).mean(axis=1) > 0.7).all()
        assert (load.counts[0] > counted[0]).all()
        before, counted = load.value.copy(), load.counts.copy()
    assert len(GAUGES) + len(COUNTERS) == 20
    power = load.value[0] - load.base[0]
    assert 4.0 < power.std() < 6.0
    hot = load.value[list(GAUGES).index("temp_c")] > 80
    assert hot.sum() == round(0.01 * 576)
