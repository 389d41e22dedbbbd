"""The public recordings through the backtest, one after another, as the README's table of results.

Nothing is tuned to them: they are read as a user's files would be, with the forecasters and settings that the
daemon has. Reads files below one folder. Part of the shell.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from models.panel import Panel
from twin.app.cli_backtest import horizons_of, kinds, plain, ratio_words, scored
from twin.app.report_text import clean, duration, number
from twin.app.series_file import read_series
from twin.errors import ConfigError

HELIOS, BIOHPC, AZURE, GRID = (
    "gpu-demand-helios-earth", "gpu-server-hourly-biohpc", "llm-requests-azure-conv", "grid-hourly",
)  # fmt: skip
# source: SOURCE.md of the recording; the log says 0 everywhere, from the first to the last of these minutes
HELIOS_GAPS = (
    ("2020-05-09 23:56", "2020-05-11 00:01"),
    ("2020-05-12 14:01", "2020-05-12 16:02"),
)
# source: Earth_gpu_number.csv of the recording, May 2020: the clusters with at most 16 GPUs
HELIOS_SMALL = ("vcJLV", "vcJkd", "vcdI0", "vcgkz")
SUM = "sum of all"
ZONES = ("DE-LU", "US-TEX-ERCO")
HALF = 0.5  # of the one-step changes are zero: from there on the last value is nearly the best


class DataSet(NamedTuple):
    """A panel and which of its series are summed up; the others are told one by one."""

    panel: Panel
    pooled: list[int]


def helios(root: Path) -> DataSet:
    """GPUs in use of each cluster with more than 16, and of all 16 clusters together."""
    files = sorted((root / HELIOS).glob("*/cluster_sequence_vc.csv.xz"))
    read = read_series(files, "time", ["running_gpu_num"], gap_ranges=HELIOS_GAPS)
    large = [i for i, name in enumerate(read.panel.names) if not name.startswith(HELIOS_SMALL)]
    values = np.column_stack([read.panel.values[:, large], read.panel.values.sum(axis=1)])
    names = (*(read.panel.names[i] for i in large), SUM)
    return DataSet(replace(read.panel, values=values, names=names), list(range(len(large))))


def _whole(panel: Panel) -> DataSet:
    return DataSet(panel, list(range(panel.n)))


def biohpc(root: Path) -> DataSet:
    """Power of three GPU servers, hour by hour."""
    files = sorted((root / BIOHPC).glob("*_usage_stats.txt"))
    return _whole(read_series(files, "timestamp", ["powerave"]).panel)


def azure(step_s: float) -> Callable[[Path], DataSet]:
    """Requests for a language model in each step."""

    def read(root: Path) -> DataSet:
        files = [root / AZURE / "AzureLLMInferenceTrace_conv.csv"]
        return _whole(read_series(files, "TIMESTAMP", [], step_s=step_s, aggregate="count").panel)

    return read


def grid(folder: str, column: str) -> Callable[[Path], DataSet]:
    """Price or carbon intensity of two zones, hour by hour."""

    def read(root: Path) -> DataSet:
        files = [
            next((root / GRID / folder / zone).rglob("*.csv"), root / GRID / folder / zone) for zone in ZONES
        ]
        return _whole(read_series(files, "Datetime (UTC)", [column]).panel)

    return read


DATA_SETS: dict[str, Callable[[Path], DataSet]] = {
    "GPUs in use, Helios Earth": helios,
    "Power of GPU servers, BioHPC": biohpc,
    "LLM requests per 10 s, Azure": azure(10.0),
    "LLM requests per minute, Azure": azure(60.0),
    "Electricity price, two zones": grid("electricity_prices/standardized", "Price (USD/MWh)"),
    "Carbon intensity, two zones": grid("carbon_intensity", "Carbon Intensity gCO₂eq/kWh (direct)"),
}


def run_suite(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Score every recording; print the table as Markdown, or one JSON object."""
    if not args.suite.is_dir():
        raise ConfigError(
            f"--suite {args.suite}: expected the folder of the recordings (racktwin traces fetch)"
        )
    chosen = kinds([args.model] if args.model else args.experts.split(",") if args.experts else None)
    told = []
    for name, read in DATA_SETS.items():
        begun = time.monotonic()
        data = read(args.suite)
        horizons = horizons_of(args.horizons, data.panel.n_time, data.panel.step_s, args.start)
        _, scores = scored(data.panel, horizons, chosen, args.start, err, data.pooled)
        told.append({"name": name, "series": list(data.panel.names), "rows": data.panel.n_time,
                     "step_s": data.panel.step_s, "from": args.start} | scores
                    | {"wall_s": round(time.monotonic() - begun, 3)})  # fmt: skip
        err.print(f"{name}: {told[-1]['wall_s']:.0f} s", style="dim", markup=False)
    if args.json:
        out.file.write(
            msgspec.json.encode(plain({"data_sets": told, "experts": list(chosen)})).decode() + "\n"
        )
    else:
        out.file.write(markdown(told))
    return 0


def markdown(told: Sequence[Mapping[str, Any]]) -> str:
    """The table of all data sets, and where they lose."""
    lines = [
        "| Data set | Ahead | MAE | Best rival | MASE (90 % interval) | Pinball | In 90 % band | Goal |",
        "| --- | --- | ---: | --- | --- | ---: | --- | --- |",
    ]
    lost: list[str] = []
    for data in told:
        for h in data["horizons"]:
            lines.append(_line(data["name"], h["horizon_s"], h))
            if SUM in h["series"]:
                lines.append(_line(f"{data['name']}: {SUM}", h["horizon_s"], h["series"][SUM]))
        lost += _lost(data)
    parts = [data["overall"] for data in told]
    alike = sum(part["coverage90"] for part in parts) / len(parts)
    count = sum(part["independent_targets"] for part in parts)
    by_targets = sum(part["coverage90_by_targets"] * part["independent_targets"] for part in parts) / count
    lines += [
        "",
        f"In the 90 % band over all data sets: {100 * by_targets:.1f} % of targets that do not overlap; "
        f"{100 * alike:.1f} % if each horizon weighs alike, the long ones with few targets too.",
        "",
    ]
    lines += (
        ["Where it loses, with the ratio to the best rival:", "", *lost] if lost else ["It loses nowhere."]
    )
    return "\n".join(lines) + "\n"


def _lost(data: Mapping[str, Any]) -> list[str]:
    """A line for each horizon of a data set with losses: whose, and by how much."""
    by_horizon: dict[float, dict[str, list[str]]] = {}
    for loss in data["losses"]:
        kinds_ = by_horizon.setdefault(loss["horizon_s"], {})
        whose = "all together" if loss["series"] is None else clean(loss["series"])
        kinds_.setdefault(loss["score"], []).append(f"{whose} {ratio_words(loss['value'])}")
    said = {"mase": "MASE of", "pinball": "pinball loss of"}
    return [
        f"- {clean(data['name'])}, {duration(horizon_s)} ahead: "
        + "; ".join(f"{said[score]} {', '.join(units)}" for score, units in found.items())
        for horizon_s, found in by_horizon.items()
    ]


def _line(name: str, horizon_s: float, h: Mapping[str, Any]) -> str:
    rivals = {"last value": h["mae_naive"], "yesterday": h["mae_seasonal"],
              f"EWMA {h['ewma_half_life']}": h["mae_ewma"]}  # fmt: skip
    best = min(rivals, key=rivals.__getitem__)
    ratio = h["pinball"] / h["pinball_persistence"] if h["pinball_persistence"] else math.nan
    within = f"{100 * h['coverage90']:.1f} %"
    if not math.isnan(h["coverage90_low"]):
        within += f" ({100 * h['coverage90_low']:.0f} to {100 * h['coverage90_high']:.0f})"
    still = h["unchanged_share"] > HALF
    met = h["mase"] <= 1.0 if still else h["mase"] < 1.0
    missed = [*([] if met else ["MASE"]), *([] if ratio < 1.0 else ["pinball"])]
    span = f"{ratio_words(h['mase_low'])} to {ratio_words(h['mase_high'])}"
    mase = f"{ratio_words(h['mase'])} ({span})"
    cells = (clean(name), duration(horizon_s), number(h["mae"]), f"{best} {number(rivals[best])}", mase,
             ratio_words(ratio), within, "missed: " + ", ".join(missed) if missed else "met")  # fmt: skip
    return "| " + " | ".join(cells) + " |"
