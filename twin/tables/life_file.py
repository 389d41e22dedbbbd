"""Life files: recorded lives of devices in published formats, as one life log.

The head line gives the form: the general CSV (`asset,position,begin,end,class`), Titan's GPUs, LANL's nodes,
Grid'5000's nodes, disks with enclosure and slot, or the faults of servers that `fault_log_file` reads. All
that is wrong is reported at once, with file, line and the expectation.
"""

from __future__ import annotations

import csv
import datetime
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from models.failure import FaultLog
from models.lives import SAME_D, LifeLog
from twin.catalogue import ConfigError
from twin.tables.fault_log_file import (
    MOST_PROBLEMS,
    UNKNOWN_CLASS,
    FaultsRead,
    content_of,
    read_faults,
    short,
)

DAY_S = 86_400.0
MOST_LINES = 2_000_000  # source: estimate; Grid'5000 has 588,463
TITAN = ("SN", "location", "insert", "remove", "duration", "out", "event")
LANL = ("System", "nodenumz", "nodes", "Prob Started", "Prob Fixed")
LANL_CLASSES = ("Facilities", "Hardware", "Human Error", "Network", "Undetermined", "Software")
GENERAL = ("asset", "position", "begin", "end", "class")
DISKS = ("Timestamp", "Rack id", "Unique enclosure", "Slot")
G5K = "# event_id component_id node_id platform_id node_name event_type event_start_time event_stop_time"
TITAN_PLACE = re.compile(r"c(\d+)-(\d+)c(\d+)s(\d+)n(\d+)")
LEVEL = re.compile(r"([A-Za-z][A-Za-z _-]*)=([0-9]{1,9})")
# Cages are counted from the bottom, where the air comes in. source: Ostrouchov et al., SC20, section II
TITAN_LEVELS = ("column", "row", "cage", "slot", "node")


@dataclass(frozen=True)
class LivesRead:
    """`log`; `names` of positions by place; `zero`: the date of day 0, None for days; `notes`."""

    log: LifeLog
    form: str
    names: tuple[str, ...]
    zero: datetime.datetime | None
    notes: tuple[str, ...]


@dataclass
class _Lives:
    """Stays and faults as they are read; times in days since 1970, or since the log's own day 0."""

    path: Path
    form: str
    levels: tuple[str, ...] = ()
    dated: bool = True
    stays: list[tuple[str, str, float, float]] = field(default_factory=list)
    faults: list[tuple[str, float, str, str]] = field(default_factory=list)
    places: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    until_d: float = -math.inf

    def wrong(self, line: int, what: str) -> None:
        self.problems.append(f"line {line}: {what}")

    def stay(self, asset: str, place: str, begin_d: float, end_d: float) -> None:
        self.stays.append((asset, place, begin_d, end_d))

    def fault(self, asset: str, day: float, kind: str, place: str) -> None:
        self.faults.append((asset, day, kind, place))


def read_lives(path: Path, nodes: int | None = None) -> LivesRead:
    """Read recorded lives, plain or packed. `nodes`: of the fleet, where only those that failed have names.

    Raises ConfigError for what the operator can mend, StorageError for a file that cannot be read.
    """
    data = content_of(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start}: expected text in UTF-8") from error
    head = text.lstrip("\n").partition("\n")[0].strip()
    form = form_of(head)
    if form == "faults":
        if nodes is None:
            raise ConfigError(
                f"{path}: names only nodes that failed: expected --nodes, with those that never did"
            )
        return _from_faults(path, nodes)
    if form not in READERS:
        known = ", ".join(sorted(READERS))
        raise ConfigError(
            f"{path}: line 1: {short(head)}: expected the head of one of these forms: {known}; the "
            f"general one is {','.join(GENERAL)}"
        )
    lives = _Lives(path, form)
    READERS[form](text, lives)
    return _log(lives)


def form_of(head: str) -> str:
    """The format that a header line declares; "" for none."""
    words = [word.strip() for word in head.split(",")]
    if head[:1] in "[{":
        return "faults"
    for form, needed in (("titan", TITAN), ("lanl", LANL), ("disks", DISKS), ("lives", GENERAL[:4])):
        if set(needed) <= set(words):
            return form
    if head.startswith("# event_id") or head.startswith(G5K):
        return "grid5000"
    return "faults" if {"node", "start", "end"} <= {word.lower() for word in words} else ""


def _rows(text: str, lives: _Lives, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cells by column) of each line of a CSV; columns stand once."""
    lines = csv.reader(io.StringIO(text))
    head: list[str] = []
    try:
        for row in lines:
            if not row:
                continue
            if not head:
                head = [word.strip() for word in row]
                if double := [name for name in needed if head.count(name) != 1]:
                    lives.wrong(lines.line_num, f"column {', '.join(double)}: expected once")
                    return
                continue
            if len(lives.problems) >= 10 * MOST_PROBLEMS:
                lives.wrong(lines.line_num, "too much is wrong: the rest was not read")
                return
            if lines.line_num > MOST_LINES:
                lives.wrong(lines.line_num, f"expected at most {MOST_LINES:,} lines")
                return
            if len(row) != len(head):
                lives.wrong(lines.line_num, f"{len(row)} values, expected {len(head)}")
                continue
            yield lines.line_num, dict(zip(head, (word.strip() for word in row), strict=True))
    except csv.Error as error:
        lives.wrong(lines.line_num, f"{error}: expected CSV")


def _time(
    word: str, line: int, column: str, lives: _Lives, form: str = "a time such as 2014-03-30 12:00:00"
) -> float:
    """Days since 1970 of a time without or with a zone (without: UTC); NaN and a problem for no time."""
    try:
        found = (
            datetime.datetime.strptime(word, "%m/%d/%Y %H:%M")
            if "/" in word
            else datetime.datetime.fromisoformat(word)
        )
    except ValueError:
        lives.wrong(line, f"{column} {short(word)}: expected {form}")
        return math.nan
    if found.tzinfo is None:
        found = found.replace(tzinfo=datetime.UTC)
    if not 1970 <= found.year < 3000:
        lives.wrong(line, f"{column} {short(word)}: expected a year from 1970 on")
        return math.nan
    return found.timestamp() / DAY_S


def _read_general(text: str, lives: _Lives) -> None:
    """Lines of stays, `class` empty unless a fault ended them; without a begin: a fault during one."""
    clock: Callable[[str, int, str], float] | None = None
    for line, cell in _rows(text, lives, GENERAL[:4]):
        first = cell["begin"] or cell["end"]
        if clock is None and first:
            lives.dated = not re.fullmatch(r"[0-9.eE+]+", first)
            clock = _clock(lives)
        begin_d, end_d = (
            clock(cell[column], line, column) if clock and cell[column] else default
            for column, default in (("begin", -math.inf), ("end", math.inf))
        )
        found = LEVEL.findall(cell["position"])
        levels = tuple(name.strip() for name, _ in found)
        lives.levels = lives.levels or levels
        if not cell["asset"]:
            lives.wrong(line, "asset: expected a serial number or a name")
        elif not found or levels != lives.levels:
            asked = " ".join(f"{name}=1" for name in lives.levels) or "rack=3 slot=12"
            lives.wrong(
                line,
                f"position {short(cell['position'])}: expected levels such as {asked!r}, as in line 2",
            )
        elif end_d < begin_d:
            lives.wrong(line, f"end {cell['end']}: expected begin {cell['begin']} or later")
        elif not cell["begin"] and not (cell["end"] and cell.get("class")):
            lives.wrong(
                line, "begin: expected a time, or an end and a class: a fault of a device that stayed"
            )
        elif not (math.isnan(begin_d) or math.isnan(end_d)):
            lives.places[cell["position"]] = tuple(int(number) for _, number in found)
            if cell["begin"]:
                lives.stay(cell["asset"], cell["position"], begin_d, end_d)
            if cell.get("class"):
                lives.fault(cell["asset"], end_d, cell["class"], f"line {line}")


def _clock(lives: _Lives) -> Callable[[str, int, str], float]:
    if lives.dated:
        return lambda word, line, column: _time(word, line, column, lives)

    def days(word: str, line: int, column: str) -> float:
        try:
            found = float(word)
        except ValueError:
            found = math.nan
        if not 0.0 <= found <= 1e6:
            lives.wrong(line, f"{column} {short(word)}: expected days from 0, as in the first line")
            return math.nan
        return found

    return days


def _read_titan(text: str, lives: _Lives) -> None:
    """Lines as R wrote them: a stay, or without `insert` an event during one, at `remove`."""
    lives.levels = TITAN_LEVELS
    for line, cell in _rows(text, lives, TITAN):
        place = TITAN_PLACE.fullmatch(cell["location"])
        if place is None:
            lives.wrong(line, f"location {short(cell['location'])}: expected one such as c11-2c1s4n1")
        if not cell["SN"]:
            lives.wrong(line, "SN: expected a serial number")
        if cell["event"] not in ("", "DBE", "OTB"):
            lives.wrong(line, f"event {short(cell['event'])}: expected DBE, OTB or nothing")
        end_d = _time(cell["remove"], line, "remove", lives)
        begin_d = _time(cell["insert"], line, "insert", lives) if cell["insert"] else math.nan
        if not cell["insert"] and not cell["event"]:
            lives.wrong(line, "insert: expected a time, or an event during a stay")
        if end_d < begin_d:
            lives.wrong(line, f"remove {cell['remove']}: expected insert {cell['insert']} or later")
        elif place is not None and not math.isnan(end_d):
            lives.places[cell["location"]] = tuple(int(number) for number in place.groups())
            if not math.isnan(begin_d):
                lives.stay(cell["SN"], cell["location"], begin_d, end_d)
            if cell["event"]:
                lives.fault(cell["SN"], end_d, cell["event"], f"line {line}")
    lives.notes.append(
        "taken away and put in as inventories saw it, up to 56 days late; faults to the second"
    )


def _read_lanl(text: str, lives: _Lives) -> None:
    """One line per failure of a node; nodes that never failed follow from each system's number of nodes."""
    lives.levels = ("system", "node")
    outages: dict[tuple[int, int], list[tuple[float, float, str, int]]] = {}
    sizes: dict[int, int] = {}
    doubles = nameless = 0
    for line, cell in _rows(text, lives, (*LANL, *LANL_CLASSES)):
        if not cell["nodenumz"]:
            nameless += 1
            continue
        system, node, size = (_whole(cell[column], line, column, lives) for column in LANL[:3])
        if system < 0 or node < 0 or size < 0:
            continue
        begin_d, end_d = (
            _time(cell[column], line, column, lives, "a time such as 6/21/2005 10:54")
            for column in ("Prob Started", "Prob Fixed")
        )
        if end_d < begin_d:
            lives.wrong(
                line,
                f"Prob Fixed {cell['Prob Fixed']}: expected Prob Started {cell['Prob Started']} or later",
            )
        kind = next((name for name in LANL_CLASSES if cell[name]), UNKNOWN_CLASS)
        if not (math.isnan(begin_d) or math.isnan(end_d)):
            sizes[system] = max(sizes.get(system, 0), size, node + 1)
            outages.setdefault((system, node), []).append((begin_d, end_d, kind, line))
    until_d = max((end_d for each in outages.values() for _, end_d, _, _ in each), default=0.0)
    for system, size in sorted(sizes.items()):
        mine = [each for key, each in outages.items() if key[0] == system]
        first_d = math.floor(min(begin_d for each in mine for begin_d, *_ in each))
        for node in range(size):
            name = f"{system}/{node}"
            lives.places[name] = (system, node)
            doubles += _serve(lives, name, first_d, until_d, outages.get((system, node), []))
    if nameless:
        lives.notes.append(f"{nameless} failures left out that name no node")
    if doubles:
        lives.notes.append(f"{doubles} failures left out that began while their node was under repair")
    lives.notes.append(
        "a system is watched from its first failure to the end of the log: it gives neither begin nor end"
    )


def _whole(word: str, line: int, column: str, lives: _Lives) -> int:
    """A whole number of at most six digits; an empty word is 0; -1 and a problem for anything else."""
    if re.fullmatch(r"[0-9]{1,6}(\.0)?", word):
        return int(float(word))
    if not word:
        return 0
    lives.wrong(line, f"{column} {short(word)}: expected a whole number")
    return -1


def _serve(
    lives: _Lives, name: str, begin_d: float, until_d: float, outages: list[tuple[float, float, str, int]]
) -> int:
    """Add the stays of a device between its outages. Return the number of outages that overlap."""
    doubles, up_d = 0, begin_d
    for start_d, end_d, kind, line in sorted(outages):
        if start_d < up_d:
            doubles += 1
        else:
            lives.stay(name, name, up_d, start_d)
            lives.fault(name, start_d, kind, f"line {line}")
        up_d = max(up_d, end_d)
    if up_d < until_d:
        lives.stay(name, name, up_d, math.inf)
    return doubles


def _read_grid5000(text: str, lives: _Lives) -> None:
    """Lines of the Failure Trace Archive: spells of availability (1) and unavailability (0) of nodes."""
    lives.levels = ("site", "cluster", "node")
    spells: dict[str, list[tuple[float, float, int, int]]] = {}
    for line, row in enumerate(text.splitlines(), 1):
        if row.startswith("#") or not row.strip():
            continue
        cell = row.split("\t")
        if len(lives.problems) >= 10 * MOST_PROBLEMS:
            break
        if len(cell) != 9:
            lives.wrong(line, f"{len(cell)} values, expected 9, apart by tabs")
            continue
        name, kind = cell[4].strip(), cell[5].strip()
        place = re.fullmatch(r"G1/site(\d+)/c(\d+)/node(\d+)", name)
        try:
            begin_s, end_s = float(cell[6]), float(cell[7])
        except ValueError:
            begin_s = end_s = math.nan
        if not 0.0 <= begin_s < 1e11 or not 0.0 <= end_s < 1e11:
            lives.wrong(
                line, f"event_start_time, event_stop_time {short((cell[6], cell[7]))}: expected seconds"
            )
        elif place is None:
            lives.wrong(line, f"node_name {short(name)}: expected one such as G1/site1/c1/node1")
        elif kind not in ("0", "1"):
            lives.wrong(line, f"event_type {short(kind)}: expected 0 (unavailable) or 1 (available)")
        elif end_s < begin_s:
            lives.wrong(line, f"event_stop_time {end_s:.0f}: expected {begin_s:.0f} or later")
        else:
            lives.places.setdefault(name, tuple(int(number) for number in place.groups()))
            spells.setdefault(name, []).append((begin_s / DAY_S, end_s / DAY_S, int(kind), line))
    until_d = max((end_d for each in spells.values() for _, end_d, _, _ in each), default=0.0)
    doubles = 0
    for name, each in spells.items():
        each.sort()
        up = [begin_d for begin_d, _, kind, _ in each if kind == 1]
        if up:
            lost = [(b, e, "unavailable", line) for b, e, kind, line in each if kind == 0 and b >= up[0]]
            doubles += _serve(lives, name, up[0], until_d, lost)
    if doubles:
        lives.notes.append(f"{doubles} spells left out that began within another")
    lives.notes.append("a node serves from its first spell of availability on; its place says no row or rack")


def _read_disks(text: str, lives: _Lives) -> None:
    """One line per replaced disk: each slot holds one disk after another."""
    lives.levels = ("rack", "enclosure", "slot")
    failed: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    for line, cell in _rows(text, lives, DISKS):
        word = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", cell["Timestamp"])
        day = _time(word, line, "Timestamp", lives)
        numbers = [cell[column] for column in DISKS[1:]]
        if not all(re.fullmatch(r"[0-9]{1,6}", number) for number in numbers):
            lives.wrong(line, f"{', '.join(DISKS[1:])} {short(numbers)}: expected whole numbers")
        elif not math.isnan(day):
            failed.setdefault(tuple(int(number) for number in numbers), []).append((day, line))
    if lives.problems or not failed:
        return
    first_d = math.floor(min(min(each)[0] for each in failed.values()))
    every = np.array(sorted(failed))
    sizes = [np.unique(every[:, j]) for j in range(3)]
    for rack in sizes[0].tolist():
        for enclosure in sizes[1].tolist():
            for slot in sizes[2].tolist():
                key = (rack, enclosure, slot)
                place = f"{rack}/{enclosure}/{slot}"
                lives.places[place] = key
                up_d = float(first_d)
                for i, (day, line) in enumerate(sorted(failed.get(key, []))):
                    lives.stay(f"{place}#{i}", place, up_d, day)
                    lives.fault(f"{place}#{i}", day, "disk", f"line {line}")
                    up_d = day
                lives.stay(f"{place}#{len(failed.get(key, []))}", place, up_d, math.inf)
    lives.notes.append(
        f"no fleet in the file: {len(lives.places):,} slots are taken to hold disks, of every rack, "
        "enclosure and slot that is named"
    )
    lives.notes.append("no serial number in the file: every replacement counts as a new disk")


READERS: dict[str, Callable[[str, _Lives], None]] = {
    "lives": _read_general,
    "titan": _read_titan,
    "lanl": _read_lanl,
    "grid5000": _read_grid5000,
    "disks": _read_disks,
}


def _from_faults(path: Path, nodes: int) -> LivesRead:
    """A log of faults of servers as lives: they stay where they are; positions are not known."""
    read = read_faults(path, nodes)
    lives = _Lives(path, "faults", ("node",), dated=False, until_d=read.log.until_d)
    log = read.log
    names = [*read.names, *(f"(never failed) {i}" for i in range(len(read.names), nodes))]
    for i, name in enumerate(names):
        lives.places[name] = (i,)
        at = np.flatnonzero(log.node == i)
        outages = [(float(log.start_d[j]), float(log.end_d[j]), log.classes[log.kind[j]], int(j)) for j in at]
        _serve(lives, name, log.begin_d, log.until_d, outages)
    lives.notes.extend(read.notes)
    return _log(lives)


def _log(lives: _Lives) -> LivesRead:
    """The life log of what was read. Raises ConfigError."""
    _check_stays(lives)
    if lives.problems:
        more = len(lives.problems) - MOST_PROBLEMS
        problems = [f"{lives.path}: {problem}" for problem in lives.problems[:MOST_PROBLEMS]]
        raise ConfigError(problems + ([f"{lives.path}: {more} more problems"] if more > 0 else []))
    if not lives.stays or not lives.faults:
        raise ConfigError(f"{lives.path}: expected at least one stay and one fault")
    begin = np.array([stay[2] for stay in lives.stays])
    end = np.array([stay[3] for stay in lives.stays])
    day0 = math.floor(begin.min()) if lives.dated else 0
    assets = {name: i for i, name in enumerate(dict.fromkeys(stay[0] for stay in lives.stays))}
    places = {name: i for i, name in enumerate(lives.places)}
    asset = np.array([assets[stay[0]] for stay in lives.stays], np.int32)
    rows, left_out = _stays_of(lives, assets, asset, begin, end)
    classes = tuple(dict.fromkeys(kind for _, _, kind in rows))
    rows.sort(key=lambda row: row[1])
    ended = end[np.isfinite(end)].tolist()
    last = max(*(row[1] for row in rows), *ended, lives.until_d)
    zero = datetime.datetime.fromtimestamp(day0 * DAY_S, datetime.UTC) if lives.dated else None
    notes = [*lives.notes]
    if left_out:
        notes.append(f"{left_out} faults left out of devices that were in no place at the time")
    if zero is not None:
        notes.append(f"day 0 is {zero.date().isoformat()} (UTC), the day of the first stay")
    log = LifeLog(
        tuple(assets), lives.levels, np.array(list(lives.places.values()), np.int32), asset,
        np.array([places[stay[1]] for stay in lives.stays], np.int32), begin - day0, end - day0,
        np.array([row[0] for row in rows], np.int32), np.array([row[1] - day0 for row in rows]),
        np.array([classes.index(row[2]) for row in rows], np.int32), classes,
        0.0 if lives.dated else float(begin.min()),
        last - day0, np.zeros((0, 2)),
    )  # fmt: skip
    return LivesRead(log, lives.form, tuple(places), zero, tuple(notes))


def _check_stays(lives: _Lives) -> None:
    """Drop the part of a stay in which its device is already somewhere else, and return how many.

    Inventories that missed a removal show a device twice.
    """
    last: dict[str, int] = {}
    order = sorted(range(len(lives.stays)), key=lambda i: lives.stays[i][2])
    cut = 0
    for i in order:
        asset, _, begin_d, _ = lives.stays[i]
        if asset in last:
            j = last[asset]
            name, place, from_d, to_d = lives.stays[j]
            if to_d > begin_d + SAME_D:
                cut += 1
                lives.stays[j] = (name, place, from_d, begin_d)
        last[asset] = i
    if cut:
        lives.notes.append(f"{cut} stays cut short where their device was seen elsewhere")


def _stays_of(
    lives: _Lives, assets: dict[str, int], asset: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[list[tuple[int, float, str]], int]:
    """(stay, day, class) of each fault in a stay of its device, and the number of other faults."""
    by_asset: dict[int, list[int]] = {}
    for i, a in enumerate(asset.tolist()):
        by_asset.setdefault(a, []).append(i)
    rows, left_out = [], 0
    for name, day, kind, _ in lives.faults:
        inside = [
            i for i in by_asset.get(assets.get(name, -1), ()) if begin[i] - SAME_D <= day <= end[i] + SAME_D
        ]
        if inside:
            # The stay that it ended, rather than one that begins there.
            rows.append((min(inside, key=lambda i: (abs(end[i] - day) > SAME_D, begin[i])), day, kind))
        else:
            left_out += 1
    return rows, left_out


def read_node_faults(
    path: Path, nodes: int | None, *, until_d: float | None = None, mend: bool = False, part: str = ""
) -> FaultsRead:
    """Read a log of faults of nodes in any form; `part`: only nodes whose names begin so.

    A node is a place: what sits there changes. Raises as `read_faults` and `read_lives`.
    """
    head = (
        content_of(path).lstrip(b"\xef\xbb\xbf\r\n \t").partition(b"\n")[0].decode("utf-8", "replace").strip()
    )
    if form_of(head) not in READERS:
        if part:
            raise ConfigError(f"--part {part}: expected a file that names all nodes; filter {path} instead")
        if nodes is None:
            raise ConfigError(
                f"--nodes: expected the number of nodes, with those that never failed, for {path}"
            )
        return read_faults(path, nodes, until_d=until_d, mend=mend)
    read = read_lives(path)
    names = tuple(name for name in read.names if name.startswith(part))
    if not names:
        raise ConfigError(f"--part {part}: {path} names no such node; expected one such as {read.names[0]}")
    if nodes is not None and nodes < len(names):
        raise ConfigError(f"--nodes {nodes}: {path} names {len(names)} nodes, expected at least so many")
    return _node_faults(path, read, names, max(nodes or 0, len(names)), until_d)


def _node_faults(
    path: Path, read: LivesRead, names: tuple[str, ...], nodes: int, until_d: float | None
) -> FaultsRead:
    """Faults by place, each until the next stay there begins."""
    log = read.log
    at = {name: i for i, name in enumerate(names)}
    node_of = np.array([at.get(name, -1) for name in read.names], np.int64)
    node = node_of[log.place[log.stay]]
    kept = node >= 0
    end_d = log.until_d if until_d is None else until_d
    kept &= log.day <= end_d
    begins: dict[int, np.ndarray] = {}
    stay_node = node_of[log.place]
    order = np.lexsort((log.from_d, stay_node))
    for part in np.split(order, np.flatnonzero(np.diff(stay_node[order])) + 1):
        if len(part):
            begins[int(stay_node[part[0]])] = log.from_d[part]
    free = np.zeros(max(nodes, 1))
    rows: list[tuple[int, float, float, int]] = []
    doubles = 0
    for i in np.flatnonzero(kept):
        n, day = int(node[i]), float(log.day[i])
        if day < free[n]:
            doubles += 1
            continue
        back = day
        if log.to_d[log.stay[i]] <= day + SAME_D:
            later = begins[n][np.searchsorted(begins[n], day - SAME_D) :]
            back = max(float(later[0]), day) if len(later) else math.inf
        rows.append((n, day, back if back <= end_d else math.inf, int(log.kind[i])))
        free[n] = back
    if not rows:
        raise ConfigError(f"{path}: no fault in it by day {end_d:g}: expected at least one")
    first_d = math.floor(min(row[1] for row in rows))
    failed = FaultLog(
        nodes, np.array([row[0] for row in rows], np.int32), np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]), np.array([row[3] for row in rows], np.int32), log.classes,
        float(first_d), float(end_d),
    )  # fmt: skip
    notes = list(read.notes)
    if doubles:
        notes.append(f"{doubles} faults left out of places under repair")
    return FaultsRead(failed, names, tuple(notes))
