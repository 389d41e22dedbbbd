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

import numpy as np
from rich.console import Console

from models.failure import FaultLog
from twin.catalogue import ConfigError, ContractError, clean, duration, number, seconds_of
from twin.cli.arguments import present
from twin.cli.grammar import Verb
from twin.report import grid, print_line

HORIZONS, TOP = "1d,7d,30d", "10,20,40"
DAY_S = 86_400.0
MOST_HORIZON_D = 366.0
LEAST_ORIGINS = 14  # scored days. source: estimate
WARM_SHARE = 0.5  # of the log, before the first scored day unless --from says otherwise
COLUMNS = (  # the last are left out first where a terminal is narrow
    *("within", "forecast", "PR-AUC", "precision", "lead time", "Brier", "ECE"),
    *("recall", "lift", "ROC-AUC", "resolution"),
)


def run_failures(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Score and print. Raises ConfigError for what the operator can mend."""
    from models.backtest import backtest_failures, score_failures
    from twin.run import ProgressBar
    from twin.tables import read_node_faults

    spans_d = horizons_of(args.horizons)
    for name, day in (("--from", args.start), ("--until", args.until)):
        if day is not None and not math.isfinite(day):
            raise ConfigError(f"{name} {day}: expected a day of the log")
    read = read_node_faults(args.events, args.nodes, until_d=args.until, mend=args.mend, part=args.part)
    log = read.log
    if args.prior is not None:
        return _run_new_site(args, log, out, err)
    ks = top_of(args.top, log.n)
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
        "nodes_failed": len(np.unique(log.node)),
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
    for note in read.notes:
        print_line(err, note, "dim")
    return present(args, summary, say, out)


def _run_new_site(args: argparse.Namespace, log: FaultLog, out: Console, err: Console) -> int:
    """Score a site that begins to watch, with a prior of other sites and without."""
    from models.backtest import backtest_new_site, score_new_site
    from twin.federation import prior_of, read_file
    from twin.run import ProgressBar

    prior = prior_of(read_file(args.prior))
    try:
        with ProgressBar(err, "backtest") as bar:
            issued = backtest_new_site(log, prior, most_spans=args.spans or 0, progress=bar.move)
    except ContractError as error:
        raise ConfigError(f"{args.events}: {error}") from error
    found = score_new_site(issued)
    summary = {"events": str(args.events), "nodes": log.n, "faults": log.k, "prior": prior.text, **found}
    return present(args, summary, _say_new_site, out)


def _say_new_site(report: Mapping[str, Any], out: Console) -> None:
    rows = []
    for metric, name in (("pr_auc", "PR-AUC"), ("brier", "Brier")):
        gain = report[f"{metric}_gain"]
        ends = (
            f"{100 * gain['low']:+.2g} to {100 * gain['high']:+.2g} %" if math.isfinite(gain["low"]) else "-"
        )
        values = [number(report[who][metric]) for who in ("own", "with_prior")]
        rows.append([name, *values, f"{100 * gain['relative']:+.2g} %", ends])
    out.print(
        f"{report['spans']} times the first 30 days, one day ahead: {report['positives']:,} failures in "
        f"{report['pairs']:,} days of nodes",
        markup=False, soft_wrap=True, highlight=False,
    )  # fmt: skip
    grid(out, ("score", "own", "with the prior", "change", "90 % interval"), rows, right=range(1, 5))


def horizons_of(text: str) -> tuple[float, ...]:
    """Days, ascending. Raises ConfigError."""
    problems, out = [], set()
    for word in text.split(","):
        days = (seconds_of(word) or 0.0) / DAY_S
        if not 1 / 24 - 1e-9 <= days <= MOST_HORIZON_D:
            problems.append(
                f"--horizons {clean(word, 40)}: expected durations such as 12h, 7d or 4w, 1h to 366d"
            )
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


def say(report: Mapping[str, Any], out: Console) -> None:
    """Tables: each forecaster's scores, the champion beside the reference, the fleet's numbers of faults."""
    middle = report["top"][len(report["top"]) // 2]
    heads = [
        f"{Path(report['events']).name}: {report['faults']:,} faults of {report['nodes_failed']} of "
        f"{report['nodes']:,} nodes",
        f"scored: day {number(report['from_day'])} to {number(report['until_day'])}; lists and lead times: "
        f"first {middle} nodes",
    ]
    for head in heads:
        out.print(clean(head, 200), markup=False, soft_wrap=True, highlight=False)
    rows = [
        _cells(h, name, s, middle)
        for h in report["horizons"]
        for name, s in (("champion", h), *h["methods"].items())
    ]
    grid(out, COLUMNS, rows, right=range(2, len(COLUMNS)))
    for h in report["horizons"]:
        _say_beside(h, out)
    _say_fleet(report["fleet"], out)
    days = report["lookahead_days_checked"]
    checked = f"{days} days were forecast again with other events after them: the same"
    for line in (shock_words(report["shocks"]), checked):
        out.print(line, style="dim", markup=False, soft_wrap=True, highlight=False)


def _cells(h: Mapping[str, Any], name: str, s: Mapping[str, Any], k: int) -> list[str]:
    lead = s["lead_time_h"][str(k)]
    precision, recall, lift = (number(s[f"{kind}_at_k"][str(k)]) for kind in ("precision", "recall", "lift"))
    ahead = f"{number(lead['median'])} h" if lead["foreseen"] else "-"
    scores = (number(s["brier"]), number(s["ece"], 2), recall, lift, number(s["roc_auc"]))
    head = [duration(86_400 * h["horizon_d"]), name.replace("_", " "), number(s["pr_auc"]), precision, ahead]
    return [*head, *scores, number(s["resolution"], 2)]


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
        hours = "-"
        if latest:
            mean, low, high = (latest[f"mtbf{edge}_h"] for edge in ("", "_low", "_high"))
            hours = f"{number(mean)} h" + (
                f" ({number(low)} to {number(high)})" if math.isfinite(low) else ""
            )
        rows.append([
            duration(86_400 * c["span_d"]), number(c["mean_forecast"]), number(c["mean_actual"]),
            f"{number(100 * c['coverage90'])} %" if c["intervals"] else "-", number(c["interval_width"]),
            f"{c['intervals']} of {c['origins']}",
            hours,
        ])  # fmt: skip
    heads = ("in the next", "forecast", "came", "inside 90 %", "width", "given on days", "latest MTBF")
    grid(out, heads, rows, right=range(1, len(heads)))
    for reason in sorted({c["without_interval"] for c in counts if c["without_interval"]}):
        out.print(reason, style="dim", markup=False, soft_wrap=True, highlight=False)


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


LOG = """
    --until DAY  end the log on this day; default: at its last event
    --mend  accept duplicates and disorder in the log, and report them
"""
VERBS = {
    "backtest failures": Verb(
        run_failures,
        f"""
        --events FILE!  JSON with fault_start and fault_end, CSV with node,start,end,class, LANL, or Grid'5000
        --nodes COUNT  number of nodes of the fleet, with those that never failed; default: nodes in the file
        --part PREFIX=  only nodes whose names begin with this, such as 20/ for one system
        --horizons H,H,..={HORIZONS}  durations such as 12h, 7d, 4w
        --top K,K,..={TOP}  lengths of the list of suspects
        --from DAY>start  first day to forecast from; default: half of the log
        --prior FILE  score a new site's first 30 days instead, with this prior and without
        --spans COUNT  with --prior: maximum number of 30-day spans, evenly over the log
        {LOG}
        """,
        ("--events faults.csv --nodes 400", "--events faults.json --nodes 400 --horizons 1d,7d --top 10"),
        rows="horizons",
    )
}
