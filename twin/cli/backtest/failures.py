"""The command `backtest failures`: how well failure forecasts would have done on a log of faults and repairs.

Reads the log, runs the backtest, prints tables or one JSON object.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from twin.catalogue import ConfigError, clean, duration, number
from twin.cli.arguments import write_json
from twin.report import grid

HORIZONS, TOP = "1d,7d,30d", "10,20,40"
UNIT_D = {"h": 1.0 / 24.0, "d": 1.0, "w": 7.0}
MOST_HORIZON_D = 366.0
LEAST_ORIGINS = 14  # scored days. source: estimate
WARM_SHARE = 0.5  # of the log, before the first scored day unless --from says otherwise
_SPAN = re.compile(r"^([0-9]+(?:\.[0-9]+)?)\s*([hdw])$")
WIDE_COLUMNS = 116  # of a terminal that has room for all
COLUMNS = (
    "within",
    "forecast",
    "PR-AUC",
    "ROC-AUC",
    "precision",
    "recall",
    "lift",
    "Brier",
    "ECE",
    "resolution",
    "lead time",
)
NARROW = ("within", "forecast", "PR-AUC", "precision", "Brier", "ECE", "lead time")


def add_failures(subparsers: Any) -> argparse.ArgumentParser:
    """The arguments of `racktwin backtest failures`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "failures", help="which nodes fail next, beside ranking by decayed fault count"
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--events",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON of fault_start, fault_end; or CSV with node,start,end,class",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        required=True,
        metavar="N",
        help="nodes of the fleet, those that never failed too",
    )
    parser.add_argument(
        "--horizons",
        default=HORIZONS,
        metavar="H,H,..",
        help=f"spans such as 12h, 7d, 4w (default: {HORIZONS})",
    )
    parser.add_argument(
        "--top", default=TOP, metavar="K,K,..", help=f"lengths of the list of suspects (default: {TOP})"
    )
    parser.add_argument(
        "--from",
        dest="start",
        type=float,
        metavar="DAY",
        help="first day to forecast from (default: half of the log)",
    )
    parser.add_argument(
        "--until", type=float, metavar="DAY", help="the log ends this day (default: with its last event)"
    )
    parser.add_argument(
        "--mend", action="store_true", help="let doubles and disorder in the log pass, and tell of them"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run_failures(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Score and print. Raises ConfigError for what the operator can mend."""
    from models.backtest import backtest_failures, score_failures
    from twin.run import ProgressBar
    from twin.tables import read_faults

    spans_d = horizons_of(args.horizons)
    ks = top_of(args.top, args.nodes)
    for name, day in (("--from", args.start), ("--until", args.until)):
        if day is not None and not math.isfinite(day):
            raise ConfigError(f"{name} {day}: expected a day of the log")
    read = read_faults(args.events, args.nodes, until_d=args.until, mend=args.mend)
    log = read.log
    half = math.ceil(log.begin_d + WARM_SHARE * (log.until_d - log.begin_d))
    from_d = float(half) if args.start is None else args.start
    last = log.until_d - max(spans_d) - LEAST_ORIGINS
    if not log.begin_d < from_d <= last:
        raise ConfigError(
            f"--from {from_d:g}: expected a day after day {log.begin_d:g} and up to day {last:.4g}, so that "
            f"{LEAST_ORIGINS} days are scored {number(max(spans_d))} days ahead; the log ends on day "
            f"{log.until_d:.4g}"
        )
    begun = time.monotonic()
    with ProgressBar(err, "backtest") as bar:
        result = backtest_failures(log, spans_d, from_d, progress=bar.move)
    summary = {
        "events": str(args.events),
        "nodes": log.n,
        "nodes_failed": len(read.names),
        "faults": log.k,
        "open_repairs": int((~log.returned).sum()),
        "classes": list(log.classes),
        "begin_day": log.begin_d,
        "until_day": log.until_d,
        "from_day": from_d,
        "top": list(ks),
        "notes": list(read.notes),
        **score_failures(result, ks),
        "wall_s": round(time.monotonic() - begun, 3),
    }
    if args.json:
        write_json(summary, out)
    else:
        for note in read.notes:
            err.print(clean(note, 500), style="dim", markup=False, soft_wrap=True)
        say(summary, out)
    return 0


def horizons_of(text: str) -> tuple[float, ...]:
    """Days, ascending. Raises ConfigError."""
    problems, out = [], set()
    for word in text.split(","):
        found = _SPAN.match(word.strip())
        days = float(found[1]) * UNIT_D[found[2]] if found else math.nan
        if not UNIT_D["h"] - 1e-9 <= days <= MOST_HORIZON_D:
            problems.append(f"--horizons {clean(word, 40)}: expected spans such as 12h, 7d or 4w, 1h to 366d")
        else:
            out.add(days)
    if problems:
        raise ConfigError(problems)
    return tuple(sorted(out))


def top_of(text: str, nodes: int) -> tuple[int, ...]:
    """Lengths of the list, ascending. Raises ConfigError."""
    problems, out = [], set()
    for word in text.split(","):
        k = int(word) if re.fullmatch(r"\s*[0-9]{1,9}\s*", word) else 0
        if not 1 <= k <= max(nodes, 1):
            problems.append(f"--top {clean(word, 40)}: expected whole numbers from 1 to {nodes}")
        out.add(k)
    if problems:
        raise ConfigError(problems)
    return tuple(sorted(out))


def say(told: Mapping[str, Any], out: Console) -> None:
    """Tables: each forecaster's scores, the champion beside the reference, the fleet's numbers of faults."""
    middle = told["top"][len(told["top"]) // 2]
    heads = [
        f"{Path(told['events']).name}: {told['faults']:,} faults of {told['nodes_failed']} of "
        f"{told['nodes']:,} nodes",
        f"scored: day {number(told['from_day'])} to {number(told['until_day'])}; lists and lead times: first "
        f"{middle} nodes",
    ]
    for head in heads:
        out.print(clean(head, 200), markup=False, soft_wrap=True, highlight=False)
    columns = [c for c in COLUMNS if out.width >= WIDE_COLUMNS or c in NARROW]
    rows = []
    for h in told["horizons"]:
        for name, s in (("champion", h), *h["methods"].items()):
            cells = dict(zip(COLUMNS, _cells(h, name, s, middle), strict=True))
            rows.append([cells[head] for head in columns])
    grid(out, columns, rows, right=range(2, len(columns)))
    for h in told["horizons"]:
        _say_beside(h, out)
    _say_fleet(told["fleet"], out)
    days = told["lookahead_days_checked"]
    checked = f"{days} days were forecast again with other events after them: the same"
    for line in (shock_words(told["shocks"]), checked):
        out.print(line, style="dim", markup=False, soft_wrap=True, highlight=False)


def _cells(h: Mapping[str, Any], name: str, s: Mapping[str, Any], k: int) -> list[str]:
    lead = s["lead_time_h"][str(k)]
    kinds = (s[f"{kind}_at_k"][str(k)] for kind in ("precision", "recall", "lift"))
    return [
        duration(86_400 * h["horizon_d"]),
        name.replace("_", " "),
        number(s["pr_auc"]),
        number(s["roc_auc"]),
        *map(number, kinds),
        number(s["brier"]),
        number(s["ece"], 2),
        number(s["resolution"], 2),
        f"{number(lead['median'])} h" if lead["foreseen"] else "-",
    ]


def _say_beside(h: Mapping[str, Any], out: Console) -> None:
    """The champion of one horizon against the reference, a line per score."""
    who = ", ".join(f"{name.replace('_', ' ')} on {days} days" for name, days in h["champion_days"].items())
    span = duration(86_400 * h["horizon_d"])
    for line in (
        "",
        f"within {span}: {number(100 * h['base_rate'])} % of nodes that are up fail; Brier of that rate "
        f"{number(h['brier_base_rate'])}",
        f"champion: {who}; {number(h['blocks'], 2)} spans that do not overlap",
    ):
        out.print(line, markup=False, soft_wrap=True, highlight=False)
    rows = []
    for metric, found in h["against_reference"].items():
        known = math.isfinite(found["low"])
        ends = f"{found['low']:+.2g} to {found['high']:+.2g}" if known else "-"
        rows.append([metric.replace("_", " "), f"{found['difference']:+.2g}", ends, found["verdict"]])
    grid(out, ("against decayed count", "difference", "90 % interval", "champion is"), rows, right=(1, 2, 3))


def _say_fleet(counts: Sequence[Mapping[str, Any]], out: Console) -> None:
    out.print("\nfaults of the whole fleet, mean of the days scored", markup=False, highlight=False)
    rows = []
    for c in counts:
        latest = c["latest"]
        hours = [number(latest[f"mtbf{edge}_h"]) for edge in ("", "_low", "_high")] if latest else []
        rows.append([
            duration(86_400 * c["span_d"]), number(c["mean_forecast"]), number(c["mean_actual"]),
            f"{number(100 * c['coverage90'])} %", c["origins"],
            f"{hours[0]} h ({hours[1]} to {hours[2]})" if latest else "-",
        ])  # fmt: skip
    heads = ("in the next", "forecast", "came", "inside 90 %", "days", "latest MTBF")
    grid(out, heads, rows, right=range(1, len(heads)))


def shock_words(found: Mapping[str, Any]) -> str:
    """Causes in common as a sentence."""
    within = f"{number(found['window_min'])} min"
    if not found["count"]:
        return f"no cause in common: never did more nodes fail within {within} than by chance"
    most = found["greatest"][0]
    cases = "1 cause" if found["count"] == 1 else f"{found['count']} causes"
    return (
        f"{cases} in common: {found['faults']} faults, more within {within} than by chance;\nthe greatest on "
        f"day {number(most['day'])} of {most['nodes']} nodes; no mark against the nodes it struck"
    )
