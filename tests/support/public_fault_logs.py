"""Public records of node faults as logs of faults, for scores: LANL's 22 systems and Grid5000.

Both are read from files of `Derek-Jones/ESEUR-code-data` that a user fetched. A node of Grid5000 that was not
there from the first day on is taken to be under repair, of class `absent`, until it is first seen.
"""

from __future__ import annotations

import csv
import lzma
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from models.failure import FaultLog

DAY_S = 86_400.0
CAUSES = ("Facilities", "Hardware", "Human Error", "Network", "Undetermined", "Software")
ABSENT = "absent"
UNAVAILABLE = "0"  # event_type of the Failure Trace Archive: 1 is available
Fault = tuple[str, float, float, str]  # node, start and end in seconds since 1970, class


def lanl_system(path: Path, system: int) -> FaultLog:
    """Faults of one of LANL's systems, with as many nodes as the table states or names."""
    faults, n = [], 0
    with lzma.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            if row["System"] != str(system) or not row["nodenum"]:
                continue
            n = max(n, int(row["nodes"] or 1))
            cause = next((name for name in CAUSES if row[name]), "Undetermined")
            faults.append((row["nodenum"], _instant(row["Prob Started"]), _instant(row["Prob Fixed"]), cause))
    return merged_log(faults, n)


def _instant(text: str) -> float:
    return datetime.strptime(text, "%m/%d/%Y %H:%M").replace(tzinfo=UTC).timestamp()


def grid5000(path: Path, cluster: str = "") -> FaultLog:
    """Times at which nodes of a cluster (`G1/site8/c1`), or of all, were not available."""
    faults: list[Fault] = []
    first: dict[str, float] = {}
    last = 0.0
    with lzma.open(path, "rt") as file:
        next(file)
        for line in file:
            _, _, _, _, node, kind, start, end, *_ = (part.strip() for part in line.split("\t"))
            if cluster and not node.startswith(f"{cluster}/"):
                continue
            first[node] = min(first.get(node, np.inf), float(start))
            last = max(last, float(end))
            if kind == UNAVAILABLE:
                faults.append((node, float(start), float(end), "down"))
    begin = min(first.values())
    # What was down as the trace ends was not seen to come back.
    faults = [(node, start, end if end < last else np.inf, kind) for node, start, end, kind in faults]
    absent = [(node, begin, at, ABSENT) for node, at in first.items() if at > begin + DAY_S]
    return merged_log([*absent, *faults], len(first), last)


def merged_log(faults: Iterable[Fault], n: int, until_s: float = 0.0) -> FaultLog:
    """Faults of a node that overlap or touch are one, of the class of the first. Days since the first day."""
    rows: list[Fault] = []
    open_: dict[str, int] = {}
    for node, start, end, kind in sorted(faults, key=lambda fault: fault[1]):
        at = open_.get(node)
        if at is not None and start <= rows[at][2]:
            rows[at] = (*rows[at][:2], max(rows[at][2], end), rows[at][3])
            continue
        open_[node] = len(rows)
        rows.append((node, start, end, kind))
    names = {name: i for i, name in enumerate(dict.fromkeys(row[0] for row in rows))}
    classes = tuple(sorted({row[3] for row in rows}))
    day_0 = np.floor(rows[0][1] / DAY_S) * DAY_S
    start_d = (np.array([row[1] for row in rows]) - day_0) / DAY_S
    return FaultLog(
        max(n, len(names)),
        np.array([names[row[0]] for row in rows], np.int32),
        start_d,
        (np.array([row[2] for row in rows]) - day_0) / DAY_S,
        np.array([classes.index(row[3]) for row in rows], np.int32),
        classes,
        0.0,
        max(float(start_d[-1]), (until_s - day_0) / DAY_S),
    )
