"""What a daemon says of its jobs' checkpoints, fetched and shown. Part of the shell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twin.app.report_text import clean

if TYPE_CHECKING:
    from rich.console import Console

    from twin.app.client import Client

MOST_SHOWN = 1000  # jobs; as many as one answer holds
MOST_NAMED = 5  # of those to which one sentence applies
SAME_PU = 0.01  # of an interval, by which two are the same to people
PATH = "/checkpoints"
FIXED = (("fixed_30_min", "30 min"), ("fixed_60_min", "60 min"), ("fixed_120_min", "120 min"))


def planned(client: Client, job: str | None) -> dict[str, Any]:
    """The daemon's answer. Raises ApiRefused, ConnectorError."""
    told: dict[str, Any] = client.get(PATH, job=job, limit=MOST_SHOWN)
    return told


def say_jobs(told: Mapping[str, Any], out: Console) -> None:
    """A line per job, then what is not known; one job alone in sentences."""
    from rich.table import Table
    from rich.text import Text

    rows = told["jobs"]
    if not rows:
        out.print("no training job runs that the daemon knows of", markup=False, highlight=False)
        return
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    heads = ("job", "nodes", "a failure each", "in force", "keeps", "best", "keeps",
             *(words for _, words in FIXED))  # fmt: skip
    for i, head in enumerate(heads):
        shown.add_column(head, justify="left" if i == 0 else "right", no_wrap=i > 0)
    for row in rows:
        shown.add_row(
            Text(clean(row["job"], 40)), f"{row['nodes']:,}", _each(row), _span(row["interval_s"]),
            _share(row["ettr"]), _span(row["best_interval_s"]), _share(row["best_ettr"]),
            *(_share(row[name]) for name, _ in FIXED),
        )  # fmt: skip
    out.print(shown)
    for row in rows:
        if len(rows) == 1:
            _notes(row, out)
    if len(rows) > 1:
        _doubts(rows, out)
    if (left := told["total"] - len(rows)) > 0:
        out.print(f"and {left:,} more jobs", style="dim", markup=False, highlight=False)


def _notes(row: Mapping[str, Any], out: Console) -> None:
    lines = [f"{clean(row['job'], 40)}: {row['why']}"] if row["why"] else []
    advised_s, kept_s = row["advised_s"], row["interval_s"]
    if advised_s and kept_s and abs(kept_s / advised_s - 1.0) > SAME_PU:
        lines.append(f"it was advised {_span(advised_s)}, and reports that it keeps {_span(kept_s)}")
    costs = f"a save stops it for {_span(row['save_s'])}"
    if row["flush_s"]:
        costs += f" and is durable {_span(row['flush_s'])} later"
    costs += f" ({row['costs']}), a restart takes {_span(row['restart_s'])}"
    source = row.get("restart_costs")  # which a daemon of an older version does not tell
    lines.append(f"{costs} ({source})" if source else costs)
    if row["best_local_interval_s"]:
        lines.append(f"saves in memory every {_span(row['best_local_interval_s'])}")
    for line in lines:
        out.print(line, style="dim", markup=False, soft_wrap=True, highlight=False)


def _doubts(rows: Sequence[Mapping[str, Any]], out: Console) -> None:
    """Why some jobs have no figures, each reason once."""
    of: dict[str, list[str]] = {}
    for row in rows:
        if row["why"]:
            of.setdefault(row["why"], []).append(clean(row["job"], 40))
    for why, jobs in of.items():
        more = f" and {len(jobs) - MOST_NAMED:,} more" if len(jobs) > MOST_NAMED else ""
        out.print(f"{', '.join(jobs[:MOST_NAMED])}{more}: {why}", style="dim", markup=False, soft_wrap=True,
                  highlight=False)  # fmt: skip


def _each(row: Mapping[str, Any]) -> str:
    """The mean time between failures, and where it lies with 90 % confidence."""
    mean, low, high = (row[f"failures_per_day{edge}"] for edge in ("", "_low", "_high"))
    if not mean:
        return "–"
    text = _span(86_400.0 / mean)
    if not low or not high:
        return text
    return f"{text} ({_span(86_400.0 / high)} to {_span(86_400.0 / low)})"


def _span(seconds: float | None) -> str:
    from twin.app.report_text import duration

    return "–" if seconds is None else duration(seconds)


def _share(ettr: float | None) -> str:
    return "–" if ettr is None else f"{100 * ettr:.1f} %"
