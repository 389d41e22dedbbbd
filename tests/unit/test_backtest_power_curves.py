"""Curves learned from measured power limits: made-up sweeps of known truth, the public ones, bad files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from twin.backtest import run_backtest
from twin.backtest.power_curves import trials
from twin.backtest.power_sweeps import (
    BOX,
    NAMED_BY,
    NUMBERS,
    Sweep,
    Sweeps,
    model_ranges,
    predict,
    read_sweeps,
    sweep_curve,
)
from twin.catalogue import ConfigError
from twin.cli.main import main as racktwin

LIMITS = np.array([100.0, 125, 150, 175, 200, 225, 250])
PUBLIC = "gpu-power-limit-sweeps-zeus"


def made(n: int, seed: int = 0, noise_pu: float = 0.005) -> list[Sweep]:
    """Sweeps of curves that were drawn from the ranges, in three networks; simulated."""
    rng = np.random.default_rng(seed)
    low, high = np.array(list(BOX.values())).T
    drawn = rng.uniform(low, high, (n, len(low)))
    drawn[:, 0] = np.log(rng.uniform(0.7, 1.2, n))
    drawn[:, 1] = rng.uniform(0.7, 1.0, n)
    drawn[:, [4, 6, 7]] = 0.25, 0.95, 0.6  # of the GPU model
    time, power = sweep_curve(LIMITS / LIMITS[-1], drawn)
    noise = np.exp(noise_pu * rng.normal(size=(2, *time.shape)))
    return [
        Sweep(("d", f"net{i % 3}", "o", str(i)), 300.0 * np.exp(time[i]) * noise[0, i],
              250.0 * np.exp(power[i]) * noise[1, i])
        for i in range(n)
    ]  # fmt: skip


def written(folder: Path, sweeps: list[Sweep], name: str = "summary_power_x.csv") -> Path:
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*NAMED_BY, *NUMBERS])
        for sweep in sweeps:
            for limit, time, power in zip(LIMITS, sweep.time_s, sweep.power_w, strict=True):
                rows.writerow([*sweep.job, limit, time, power])
    return folder


def sweeps(n: int = 6) -> Sweeps:
    return Sweeps("x", LIMITS, tuple(made(n)), 0)


def test_what_is_held_out_is_not_seen() -> None:
    for splits in trials(7).values():
        for train, asked in splits:
            assert not set(train.tolist()) & set(asked.tolist())
            assert (np.diff(train) > 0).all()
    whole = sweeps()
    box = model_ranges(whole, whole.jobs[:2])
    train, sweep = np.array([0, 3, 6]), whole.jobs[4]
    seen = np.isin(np.arange(7), train)
    other = sweep._replace(
        time_s=np.where(seen, sweep.time_s, 9e9), power_w=np.where(seen, sweep.power_w, 1.0)
    )
    for a, b in zip(predict(LIMITS, sweep, train, box), predict(LIMITS, other, train, box), strict=True):
        assert (a == b).all()


def test_curves_of_known_truth_are_foretold() -> None:
    whole = sweeps(30)
    box = model_ranges(whole, whole.jobs[:10])
    wrong = []
    for sweep in whole.jobs[10:]:
        time, energy = predict(LIMITS, sweep, np.array([0, 3, 6]), box)
        wrong.append([np.abs(time / sweep.time_s - 1), np.abs(energy / sweep.energy_j - 1)])
    assert np.quantile(wrong, 0.9, axis=(0, 2)) == pytest.approx([0.01, 0.01], abs=0.01)


def test_constants_of_the_gpu_model_are_found() -> None:
    whole = sweeps(30)
    box = model_ranges(whole, whole.jobs)
    assert np.mean(box["static_pu"]) == pytest.approx(0.25, abs=0.04)
    assert np.mean(box["held_pu"]) == pytest.approx(0.95, abs=0.02)
    assert box["gamma"] == BOX["gamma"], "a job's own is not"
    assert model_ranges(whole, []) == BOX


def test_a_limit_measured_again_and_again_where_it_is_flat_moves_no_curve_at_low_limits() -> None:
    """Of jobs that upper limits do not touch: twelve of these limits say no more than two."""
    whole = sweeps(12)
    few = np.array([1, 2, 3, 6, 6])
    many = np.concatenate([few, np.full(10, 6)])
    for sweep in whole.jobs[:4]:
        once, again = (predict(LIMITS, sweep, train, BOX)[0][0] for train in (few, many))
        assert again == pytest.approx(once, rel=1e-2)


@pytest.mark.slow
def test_the_command_tells_scores_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, made(6))
    assert racktwin(["backtest", "power-curves", "--sweeps", str(tmp_path), "--json"]) == 0
    [gpu] = json.loads(capsys.readouterr().out)["gpus"]
    assert gpu["jobs"] == 6
    assert {(s["trial"], s["method"]) for s in gpu["scores"]} >= {
        ("from three", "curve"),
        ("from three", "line"),
    }
    assert racktwin(["backtest", "power-curves", "--sweeps", str(tmp_path)]) == 0
    assert "least energy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: "", "no column dataset"),
        (lambda text: text.replace("average_power", "watts"), "no column average_power"),
        (lambda text: text.replace("100.0,", "much,", 1), "line 2: expected power_limit"),
        (lambda text: text.replace("100.0,", "-5,", 1), "line 2: expected power_limit"),
        (lambda text: text + text.splitlines()[1] + "\n", "line 16: a second row of 100 W"),
        (lambda text: "\n".join(text.splitlines()[:4]), "3 different limits: expected 4 to 64"),
        (lambda text: text + "\n".join(["d,n,o,9,500.0,3,3", "d,n,o,9,600.0,3,3"]), "at least one job"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(
    tmp_path: Path, change: Callable[[str], str], why: str
) -> None:
    file = written(tmp_path, made(2)) / "summary_power_x.csv"
    file.write_text(change(file.read_text()))
    with pytest.raises(ConfigError, match=r"summary_power_x\.csv") as caught:
        read_sweeps(tmp_path)
    assert why in str(caught.value)


def test_a_folder_without_sweeps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected files summary_power_GPU\.csv"):
        read_sweeps(tmp_path / "nowhere")


@pytest.mark.evaluation
@pytest.mark.slow
def test_measured_sweeps_are_foretold(recording: Callable[[str], Path]) -> None:
    told = run_backtest(recording(PUBLIC))
    for gpu in told["gpus"]:
        scores = {(s["trial"], s["method"]): s for s in gpu["scores"]}
        for trial in ("one limit out", "from three"):
            curve, line = scores[trial, "curve"], scores[trial, "line"]
            for what in ("time", "energy"):
                found = curve[f"{what}_touched"]
                assert found["median_pu"] < 0.02
                assert found["within_goal_pu"] > 0.75
                assert found["within_goal_pu"] > line[f"{what}_touched"]["within_goal_pu"] - 0.05
        least = gpu["energy_minimum"]
        assert least["curve"]["mean_pu"] < 0.01
        assert least["policy"]["mean_pu"] < 0.01 < least["no limit"]["mean_pu"]
        assert least["policy"]["mean_pu"] <= least["rule"]["mean_pu"] + 1e-3
        assert least["policy"]["worst_pu"] < 0.07
