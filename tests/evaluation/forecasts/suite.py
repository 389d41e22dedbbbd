"""Forecast suite: the public recordings through `racktwin backtest load`, one after another, as one table.

Nothing is tuned to them: they are read as a user's files would be, with the forecasters and settings that the
daemon has. `--rival lstm` adds the LSTM, which the product does not hold.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from models.load import SeriesPanel
from tests.evaluation.forecasts.goals import coverage_by_targets, goals, mase_met, summary, wholes
from tests.evaluation.forecasts.lstm_rival import RIVALS, check_installed
from twin.backtest import amount, better_of, find_rival, ratio_span, ratio_words
from twin.catalogue import ConfigError, clean, duration
from twin.cli import SCORING, BacktestCase, chosen_forecasters, declare, horizons_of, scored, write_json
from twin.tables import SeriesOptions, read_series

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


class DataSet(NamedTuple):
    """A panel and which of its series are summed up; the others are told one by one."""

    panel: SeriesPanel
    pooled: list[int]


def _found(folder: Path, pattern: str) -> list[Path]:
    """Files of a recording, in order. ConfigError without any."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise ConfigError(
            f"no {folder / pattern}: expected the recordings (racktwin trace fetch), or --only some"
        )
    return files


def helios(root: Path) -> DataSet:
    """GPUs in use of each cluster with more than 16, and of all 16 clusters together."""
    files = _found(root / HELIOS, "*/cluster_sequence_vc.csv.xz")
    read = read_series(files, "time", ["running_gpu_num"], SeriesOptions(gap_ranges=HELIOS_GAPS))
    large = [i for i, name in enumerate(read.panel.names) if not name.startswith(HELIOS_SMALL)]
    values = np.column_stack([read.panel.values[:, large], read.panel.values.sum(axis=1)])
    names = (*(read.panel.names[i] for i in large), SUM)
    return DataSet(replace(read.panel, values=values, names=names), list(range(len(large))))


def _whole(panel: SeriesPanel) -> DataSet:
    return DataSet(panel, list(range(panel.n)))


def biohpc(root: Path) -> DataSet:
    """Power of three GPU servers, hour by hour."""
    files = _found(root / BIOHPC, "*_usage_stats.txt")
    return _whole(read_series(files, "timestamp", ["powerave"]).panel)


def azure(step_s: float) -> Callable[[Path], DataSet]:
    """Requests for a language model in each step."""

    def read(root: Path) -> DataSet:
        files = _found(root / AZURE, "AzureLLMInferenceTrace_conv.csv")
        return _whole(
            read_series(files, "TIMESTAMP", [], SeriesOptions(step_s=step_s, aggregate="count")).panel
        )

    return read


def grid(folder: str, column: str) -> Callable[[Path], DataSet]:
    """Price or carbon intensity of two zones, hour by hour."""

    def read(root: Path) -> DataSet:
        files = [_found(root / GRID / folder / zone, "**/*.csv")[0] for zone in ZONES]
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m tests.evaluation forecasts`."""
    parser.add_argument("suite", type=Path, metavar="DIR", help="the folder of the recordings")
    parser.add_argument(
        "--only", metavar="WORD,..", help="data sets with one of these words in their name (default: all)"
    )
    declare(parser, SCORING)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Score every recording; print the table as Markdown, or one JSON object."""
    if args.model is not None and args.experts is not None:
        args.refuse("--model is one forecaster alone: expected no --experts")
    if not args.suite.is_dir():
        raise ConfigError(f"{args.suite}: expected the folder of the recordings (racktwin trace fetch)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, on odd data: what matters is told as a note
        return _score(args, out, err)


def _score(args: argparse.Namespace, out: Console, err: Console) -> int:
    chosen, rival = chosen_forecasters(args), find_rival(args.rival, RIVALS)
    if rival is not None:
        check_installed(rival)
    begun = time.monotonic()
    read = {name: DATA_SETS[name](args.suite) for name in chosen_sets(args.only)}
    cases = [
        BacktestCase(
            name,
            d.panel,
            horizons_of(args.horizons, d.panel.n_time, d.panel.step_s, args.start),
            d.pooled,
            args.refits,
        )
        for name, d in read.items()
    ]
    told = [
        {"name": case.name, "series": list(case.panel.names), "rows": case.panel.n_time,
         "step_s": case.panel.step_s, "from": args.start} | scores
        for case, (_, scores) in zip(
            cases, scored(cases, chosen, args.start, err, rival, args.jobs), strict=True
        )
    ]  # fmt: skip
    judged = goals(told)
    wall_s = round(time.monotonic() - begun, 3)
    if args.json:
        whole = {"data_sets": told, "experts": list(chosen), "goals": judged, "wall_s": wall_s}
        write_json(whole, out)
    else:
        out.file.write(markdown(told, judged))
        out.file.flush()
    err.print(f"{len(cases)} data sets: {duration(wall_s)}", style="dim", markup=False)
    return 0


def chosen_sets(only: str | None) -> list[str]:
    """Names of the data sets that one of these words, between commas, is part of. ConfigError for others."""
    if only is None:
        return list(DATA_SETS)
    words = [word.strip().lower() for word in only.split(",")]
    if lost := [word for word in words if not word or not any(word in name.lower() for name in DATA_SETS)]:
        named = ", ".join(f"{word!r}" for word in lost)
        raise ConfigError(f"--only {named}: expected words in the names: {'; '.join(DATA_SETS)}")
    return [name for name in DATA_SETS if any(word in name.lower() for word in words)]


def markdown(told: Sequence[Mapping[str, Any]], judged: Sequence[Mapping[str, Any]]) -> str:
    """The table of all data sets, what a rival did, where they lose, and the goals."""
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
        lines += [_whole_line(*whole) for whole in wholes(data)]
        lost += _lost(data)
    parts = [data["overall"] for data in told]
    alike = sum(part["coverage90"] for part in parts) / len(parts)
    by_targets, count = coverage_by_targets(told)
    lines += [
        "",
        f"In the 90 % band, each horizon alike: {100 * alike:.1f} %; {100 * by_targets:.1f} % of {count:,} "
        "targets that do not overlap, most of which are one step ahead.",
        "",
    ]
    if "rival" in told[0]:
        lines += [*_rival_markdown(told), ""]
    lines += (
        ["Where it loses, with the ratio to the best rival:", "", *lost] if lost else ["It loses nowhere."]
    )
    return "\n".join([*lines, "", "Goals:", "", *summary(judged)]) + "\n"


def _rival_markdown(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of our blend beside the rival, for all data sets that have one."""
    name = clean(told[0]["rival"]["name"])
    lines = [
        f"| Data set | Ahead | MAE | MAE of {name} | Ratio (90 % interval) | Better |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]

    def line(title: str, ahead: str, part: Mapping[str, Any]) -> str:
        maes = [amount(part[k]) if k in part else "" for k in ("mae", "mae_rival")]
        return "| " + " | ".join((clean(title), ahead, *maes, ratio_span(part), better_of(part, name))) + " |"

    for data in told:
        rival, called = data["rival"], data["name"]
        for h in rival["horizons"]:
            ahead = duration(h["horizon_s"])
            lines.append(line(called, ahead, h))
            lines += [line(f"{called}: {n}", ahead, part) for n, part in h["series"].items()]
        lines.append(line(called, "all", rival["overall"]))
        lines += [line(f"{called}: {n}", "all", part) for n, part in rival["overall_of"].items()]
    lines += [""] + [f"- {clean(data['name'])}: {data['rival']['budget_words']}" for data in told]
    return lines


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
    met = mase_met(h["mase"], h["unchanged_share"])
    missed = [*([] if met else ["MASE"]), *([] if ratio < 1.0 else ["pinball"])]
    span = f"{ratio_words(h['mase_low'])} to {ratio_words(h['mase_high'])}"
    mase = f"{ratio_words(h['mase'])} ({span})"
    cells = (clean(name), duration(horizon_s), amount(h["mae"]), f"{best} {amount(rivals[best])}", mase,
             ratio_words(ratio), within, "missed: " + ", ".join(missed) if missed else "met")  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _whole_line(name: str, whole: Mapping[str, Any], still: float) -> str:
    """All horizons of a data set, alike."""
    span = f"{ratio_words(whole['mase_low'])} to {ratio_words(whole['mase_high'])}"
    met = "met" if mase_met(whole["mase"], still) else "missed: MASE"
    mase = f"**{ratio_words(whole['mase'])}** ({span})"
    return "| " + " | ".join((clean(name), "all, alike", "", "", mase, "", "", met)) + " |"
