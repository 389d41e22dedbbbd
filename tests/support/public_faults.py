"""Public fault logs as CSV files: `python -m tests.support.public_faults FOLDER OUT`.

FOLDER holds lanl.csv.xz and g5k_event_trace.tab.xz (Derek-Jones/ESEUR-code-data) and gc_full.csv
(olcf/TitanGPULife). One CSV, for `racktwin backtest failures`, for each system of 16 nodes or more;
OUT/fleets.tsv lists name and nodes.
LANL: systems; Titan: nodes are locations, a fault begins when a GPU that failed (OTB, DBE) was taken out and
ends when the next came; Grid5000: sites, a fault is a time of an hour or more in which a node was away.
Faults of one node that overlap are one.
"""

from __future__ import annotations

import bisect
import csv
import io
import lzma
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

DAY_S = 86_400.0
LEAST_NODES = 16
LEAST_AWAY_S = 3600.0  # Grid5000: a shorter absence is mostly a restart between two jobs
CAUSES = ("Facilities", "Hardware", "Human Error", "Network", "Undetermined", "Software")
Fault = tuple[str, float, float, str]  # node, start, end in seconds, class


def _seconds(text: str, form: str) -> float:
    return (datetime.strptime(text, form) - datetime(1970, 1, 1)).total_seconds()


def _packed(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(lzma.open(path), "utf-8")


def lanl(path: Path) -> dict[str, tuple[int, list[Fault]]]:
    """System -> (nodes, faults)."""
    faults: dict[str, list[Fault]] = defaultdict(list)
    nodes: dict[str, int] = defaultdict(int)
    with _packed(path) as lines:
        for row in csv.DictReader(lines):
            name = f"lanl{int(row['System']):02d}"
            if not row["nodenumz"]:
                continue
            cause = next((cause for cause in CAUSES if row[cause].strip()), "unknown")
            begin, end = (_seconds(row[key], "%m/%d/%Y %H:%M") for key in ("Prob Started", "Prob Fixed"))
            faults[name].append((row["nodenumz"], begin, end, cause))
            nodes[name] = max(nodes[name], int(row["nodes"] or 0))
    return {name: (max(nodes[name], len({f[0] for f in faults[name]})), faults[name]) for name in faults}


def titan(path: Path) -> dict[str, tuple[int, list[Fault]]]:
    """As `lanl`."""
    form = "%Y-%m-%d %H:%M:%S"
    inserted: dict[str, list[float]] = defaultdict(list)
    failed: list[tuple[str, float, str]] = []
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["insert"]:
                inserted[row["location"]].append(_seconds(row["insert"], form))
                if row["remove"] and row["event"] in ("OTB", "DBE"):
                    failed.append((row["location"], _seconds(row["remove"], form), row["event"]))
    for times in inserted.values():
        times.sort()
    faults = []
    for where, at, event in failed:
        later = bisect.bisect_right(inserted[where], at)
        end = inserted[where][later] if later < len(inserted[where]) else float("inf")
        faults.append((where, at, end, event))
    return {"titan": (len(inserted), faults)}


def grid5000(path: Path) -> dict[str, tuple[int, list[Fault]]]:
    """As `lanl`."""
    faults: dict[str, list[Fault]] = defaultdict(list)
    nodes: dict[str, set[str]] = defaultdict(set)
    with _packed(path) as lines:
        for line in lines:
            if line.startswith("#"):
                continue
            word = line.split()
            name = f"g5k_{word[4].split('/')[1]}"
            nodes[name].add(word[4])
            begin, end = float(word[6]), float(word[7])
            if word[5] == "0" and end - begin >= LEAST_AWAY_S:
                faults[name].append((word[4], begin, end, "away"))
    return {name: (len(nodes[name]), faults[name]) for name in faults}


def rows_of(faults: Iterable[Fault]) -> list[str]:
    """Lines of the CSV in order of start; days since midnight before the first."""
    apart: list[Fault] = []
    for node, start, end, kind in sorted(faults):
        if apart and apart[-1][0] == node and start <= apart[-1][2]:
            apart[-1] = (node, apart[-1][1], max(apart[-1][2], end), apart[-1][3])
        else:
            apart.append((node, start, end, kind))
    apart.sort(key=lambda fault: fault[1])
    zero = apart[0][1] // DAY_S * DAY_S
    days = [(node, (start - zero) / DAY_S, (end - zero) / DAY_S, kind) for node, start, end, kind in apart]
    return [
        f"{node},{start:.5f},{f'{end:.5f}' if end < 1e9 else ''},{kind}" for node, start, end, kind in days
    ]


def main(folder: Path, out: Path) -> None:
    """Write all files."""
    out.mkdir(parents=True, exist_ok=True)
    fleets = lanl(folder / "lanl.csv.xz") | titan(folder / "gc_full.csv")
    fleets |= grid5000(folder / "g5k_event_trace.tab.xz")
    listed = []
    for name, (nodes, faults) in sorted(fleets.items()):
        if nodes >= LEAST_NODES:
            (out / f"{name}.csv").write_text("\n".join(["node,start,end,class", *rows_of(faults)]) + "\n")
            listed.append(f"{name}\t{nodes}")
    (out / "fleets.tsv").write_text("\n".join(listed) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
