"""Ledger of sources: the data that each source sent, its use, and the entities that the source covers.

A source is whoever publishes or is asked: an agent, a branch of the BMS, a topic tree, a scraped exporter, a
BMC, Slurm, Kubernetes, a file. Whatever arrives and is not used has a line under its source: a count, the
reason, an example, and what to do. All of it is bounded, since strangers invent names.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from twin.catalogue import I32, NS, TABLES, Bool, Signal, duration, find_signal, utc
from twin.contracts import Item
from twin.site import Site
from twin.sources.account import OTHERS, REMEDIES, WRONG_S, Outcome, SharedSignal, SourceAccount, UnusedLine
from twin.telemetry import PollPeriodChanged

log = logging.getLogger(__name__)
Stage = Callable[[Sequence[Item], int, SourceAccount], tuple[int, int]]
MAX_SOURCES = 100_000  # that have a reading to their name: 25,000 nodes with an agent and two exporters each
MAX_STRANGERS = 500  # of names from outside, without any
MAX_LOGGED = 1000  # kinds of reason that have a line in the log
MAX_SHARED = 50  # signals of one source that another carries as well
SHARED_S = 150.0  # after its last sight, two sources no longer share a signal
# Sources that must seem to have stepped, for the clock of this host to be suspected. source: estimate
LEAST_WITNESSES, NEARLY_ALL_PU = 3, 0.8
NOT_UNUSED = ("failed", "clock", "range")  # lines that count no message that was not used
RECENT_S = 3600.0  # what has not happened for so long is no longer shown on the first screen


class SourceLedger:
    """Accounts of all sources of a daemon. `stage` hands items to the Inbox: (late cells, newest stamp)."""

    def __init__(
        self, sizes: dict[str, int], stage: Stage, now_ns: Callable[[], int], is_logged: bool = True
    ) -> None:
        self.stage, self.now_ns, self._is_logged = stage, now_ns, is_logged
        self.passed_ns: Callable[[], int] | None = None  # time by a clock that never steps
        self.counts = {"staged": 0, "ignored": 0, "bad": 0, "dropped": 0, "failed": 0}
        self.accounts: dict[str, SourceAccount] = {}
        self._sizes = sizes
        self._strangers: OrderedDict[str, SourceAccount] = OrderedDict()
        self._numbered: list[SourceAccount] = []
        self._carriers: dict[str, np.ndarray] = {}  # signal key -> number of the source that carries a cell
        self._blamed: dict[str, SourceAccount] = {}
        self._logged: set[tuple[str, str, str]] = set()
        self._polls: dict[tuple[str, tuple[str, ...], float], list[tuple[int, int]]] = {}
        self._overview: tuple[int, list[dict[str, Any]]] = 0, []

    def account(self, name: str, outside: bool = False) -> SourceAccount:
        """The account of a source. One whose name comes from outside stays only if it brings readings."""
        account = self.accounts.get(name) or self._strangers.get(name)
        if account is None:
            account = SourceAccount(self, name, outside)
            if outside:
                self._strangers[name] = account
                self._limit_strangers()
            else:
                self.accounts[name] = account
        elif not outside and name in self._strangers:
            self.accounts[name] = self._strangers.pop(name)
        return account

    def line_of(self, source: str, outcome: Outcome, what: str) -> UnusedLine | None:
        """One reason of a source, if it has it."""
        account = self.accounts.get(source)
        return account.lines.get((outcome, what)) if account is not None else None

    def note_stranger(self, account: SourceAccount) -> None:
        """Note a message of a source without readings; the one that is silent longest is dropped first."""
        if account.name in self._strangers:
            self._strangers.move_to_end(account.name)

    def _limit_strangers(self) -> None:
        while len(self._strangers) > MAX_STRANGERS:
            name, gone = self._strangers.popitem(last=False)
            self._blamed.pop(name, None)
            rest = self.accounts.setdefault(OTHERS, SourceAccount(self, OTHERS, False))
            for line in gone.lines.values():
                rest.note(line, line.count, line.last_ns)

    def change_site(self, sizes: dict[str, int]) -> None:
        """Begin anew for a site in other numbers; sources that the configuration names are made again."""
        self._sizes = sizes
        self._carriers.clear()
        self._polls.clear()
        for account in self._numbered:
            account.number = -1
            account.shared.clear()
            account.claims.clear()
        self._numbered.clear()
        for name in [n for n, a in self.accounts.items() if not a.outside]:
            self._blamed.pop(name, None)
            del self.accounts[name]

    def claim(
        self, account: SourceAccount, table: str, signals: Iterable[str], run: tuple[int, int], now_ns: int
    ) -> None:
        """The source carries these signals of a run of entities (first, number of them) from now on.

        Whoever carried them before may still do.
        """
        size, (start, n) = self._sizes.get(table, 0), run
        if not 0 <= start < start + n <= size or not self._number(account):
            return
        for signal in signals:
            if signal not in TABLES[table].by_name:
                continue
            key = f"{table}.{signal}"
            column = self._carriers.get(key)
            if column is None:
                column = self._carriers[key] = np.full(size, -1, np.int32)
            cells = column[start : start + n]
            before = int(cells[0])
            if before not in (-1, account.number):
                self._share(account, key, before, now_ns)
            cells[:] = account.number

    def poll(self, table: str, signals: tuple[str, ...], run: tuple[int, int], period_s: float) -> None:
        """A run of entities (first, number of them) is polled for these signals at this period."""
        self._polls.setdefault((table, signals, period_s), []).append(run)

    def take_polls(self, site: Site) -> list[PollPeriodChanged]:
        """The periods that became known since the last time, as events; each is given out once."""
        polls, self._polls = self._polls, {}
        return [
            PollPeriodChanged(
                table=table,
                signals=signals,
                names=tuple(site.name(table, i) for first, n in runs for i in range(first, first + n)),
                period_s=period_s,
            )
            for (table, signals, period_s), runs in polls.items()
            if table in site.sizes and max(first + n for first, n in runs) <= site.sizes[table]
        ]

    def _number(self, account: SourceAccount) -> bool:
        if account.number >= 0:
            return True
        if len(self._numbered) >= MAX_SOURCES:
            return False
        account.number = len(self._numbered)
        self._numbered.append(account)
        if self._strangers.pop(account.name, None) is not None:
            self.accounts[account.name] = account
        return True

    def _share(self, account: SourceAccount, key: str, other: int, now_ns: int) -> None:
        known = account.shared.get(key)
        if known is not None and known.other == other:
            known.looks, known.last_ns = known.looks + 1, now_ns
        elif len(account.shared) < MAX_SHARED or key in account.shared:
            account.shared[key] = SharedSignal(other, 1, now_ns)

    def carriers_of(self, key: str) -> np.ndarray | None:
        """Number of the source of each entity's latest reading of a signal [n], -1 for none; None: nobody."""
        return self._carriers.get(key)

    def numbered(self, number: int) -> SourceAccount:
        """The account of a number of `carriers_of`."""
        return self._numbered[number]

    def carried_by(self, sources: Collection[str]) -> tuple[dict[str, I32], int]:
        """Return all that these sources carry: (entities of each table, number of signals)."""
        numbers = [a.number for name in sources if (a := self.accounts.get(name)) and a.number >= 0]
        of: dict[str, Bool] = {}
        count = 0
        for key, column in self._carriers.items() if numbers else ():
            mine = np.isin(column, numbers)
            if n := int(np.count_nonzero(mine)):
                table = key.partition(".")[0]
                of[table] = of[table] | mine if table in of else mine
                count += n
        return {table: np.flatnonzero(mine).astype(np.int32) for table, mine in of.items()}, count

    def carriers(self) -> tuple[list[tuple[str, bool, int]], dict[str, I32]]:
        """Return (name, whether it came from outside, when it last reported) of each number, and copies of
        all columns of `carriers_of`.
        """
        sources = [(a.name, a.outside, a.last_ns) for a in self._numbered]
        return sources, {key: column.copy() for key, column in self._carriers.items()}

    def resume(self, sources: Sequence[tuple[str, bool, int] | None], columns: Mapping[str, I32]) -> None:
        """Take over what `carriers` gave, before any message; not of sources that are None."""
        number = np.full(len(sources) + 1, -1, np.int32)  # the last for none
        for i, source in enumerate(sources):
            if source is not None:
                account = self.account(source[0], source[1])
                if self._number(account):
                    number[i], account.last_ns = account.number, source[2]
        for key, column in columns.items():
            if find_signal(key) is not None and len(column) == self._sizes.get(key.partition(".")[0]):
                self._carriers[key] = number[np.clip(column, -1, len(sources))]

    def offsets_ns(self) -> dict[str, int]:
        """Offsets of the source clocks that are behind."""
        return {a.name: a.clock.back_ns for a in self._numbered if a.clock.back_ns}

    def resume_offsets(self, back_ns: Mapping[str, int]) -> None:
        """Take over what `offsets_ns` gave, of the sources that are known, before any message."""
        for name in back_ns.keys() & self.accounts.keys():
            self.accounts[name].clock.resume(max(back_ns[name], 0))

    def publishers(self) -> list[str]:
        """The sources that carry something and were named from outside: all that a broker brings."""
        return [a.name for a in self._numbered if a.outside]

    def out_of_range(self, signal: Signal, entity: int, example: str, count: int) -> None:
        """Values beyond the range of a signal came, `count` of them, the first of this entity."""
        column = self._carriers.get(signal.key)
        number = int(column[entity]) if column is not None else -1
        account = self._numbered[number] if number >= 0 else self.account(OTHERS)
        unit = "" if signal.unit in ("1", "state") else f" {signal.unit}"
        why = f"{signal.key} out of range: expected {signal.low:g} to {signal.high:g}{unit}"
        account.note(UnusedLine("range", signal.key, why, REMEDIES["range"], example), count)

    def blame(self, account: SourceAccount, line: UnusedLine) -> None:
        """A source has a reason that is worth a line: the first of each kind is logged."""
        self._blamed[account.name] = account
        kind = (account.name.partition(" ")[0], line.outcome, line.what[:80])
        if not self._is_logged or kind in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(kind)
        example = f", such as {line.example}" if line.example else ""
        log.warning("source %s: %s%s; %s", account.name, line.why, example, line.remedy)

    def shared(self, account: SourceAccount, now_ns: int) -> dict[str, str]:
        """Signals that another source carries as well -> that source."""
        return {
            key: self._numbered[s.other].name
            for key, s in account.shared.items()
            if s.looks > 1 and now_ns - s.last_ns < SHARED_S * NS and s.other < len(self._numbered)
        }

    def overview(self, now_ns: int) -> list[dict[str, Any]]:
        """Reasons of the last hour over all sources, the most frequent first; computed every few seconds."""
        if 0 <= now_ns - self._overview[0] < 3 * NS:
            return self._overview[1]
        recent_ns = now_ns - RECENT_S * NS
        rows = _merged(
            (account, line)
            for account in self._blamed.values()
            for line in account.worth_a_line()
            if line.last_ns >= recent_ns
        )
        for account in self._numbered:
            if twice := self.shared(account, now_ns) if account.shared else {}:
                other = next(iter(twice.values()))
                row = rows.setdefault(("twice", "twice"), {
                    "outcome": "twice", "what": "twice", "sources": 0, "count": 0, "source": account.name,
                    "why": f"carries what {other} carries too", "example": ", ".join([*twice][:3]),
                    "remedy": "keep one of the two: readings of both take turns", "last_ns": now_ns,
                })  # fmt: skip
                row["sources"] += 1
                row["count"] += len(twice)
        found = sorted(rows.values(), key=lambda r: -int(r["count"]))
        self._overview = now_ns, found
        return found

    def reasons(self) -> list[dict[str, Any]]:
        """Every reason why something was not used, routine ones too, over all sources, the frequent first."""
        rows = _merged((account, line) for account in self.listing(0) for line in account.lines.values())
        return sorted(rows.values(), key=lambda r: -int(r["count"]))

    def wrong_clocks(self, now_ns: int) -> list[str]:
        """Clocks that are wrong by minutes, each as a sentence: of sources, or of this host."""
        if (host := self._host_clock(now_ns)) is not None:
            return [host[0]] if host[1] >= WRONG_S * NS else []
        texts = (account.wrong_clock(now_ns) for account in self._numbered)
        return [text for text in texts if text is not None]

    def odd_clocks(self, now_ns: int) -> list[str]:
        """Clocks that are ahead by seconds, or stepped lately, each as a sentence."""
        if (host := self._host_clock(now_ns)) is not None:
            return [host[0]]
        texts = (account.odd_clock(now_ns) for account in self._numbered)
        return [text for text in texts if text is not None]

    def _host_clock(self, now_ns: int) -> tuple[str, int] | None:
        """Return (a sentence, by how much it is wrong) on the clock of this host, where those of nearly all
        sources are off to the same side.
        """
        sending = [a for a in self._numbered if a.sends(now_ns) and a.has_clock() and not a.clock.is_held]
        enough = max(LEAST_WITNESSES, NEARLY_ALL_PU * len(sending))
        behind_s = [a.clock.back_ns / NS for a in sending if a.stepped(now_ns)]
        ahead_s = [s for a in sending if (s := a.ahead_s(now_ns))]
        off_s, side = (behind_s, "ahead of") if len(behind_s) >= enough else (ahead_s, "behind")
        if len(off_s) < enough:
            return None
        by_s, who = sorted(off_s)[len(off_s) // 2], f"{len(off_s)} of {len(sending)} sources"
        if by_s:
            return f"this host: {duration(by_s)} {side} the clocks of {who}", round(by_s * NS)
        at = utc(
            min(a.clock.found_ns for a in sending if not a.clock.back_ns and a.stepped(now_ns)), "%H:%M:%S"
        )
        return f"this host: stepped at {at} against the clocks of {who}, and is right again", 0

    def listing(self, now_ns: int) -> list[SourceAccount]:
        """All sources, those with something unused first, then by name."""
        every = [*self.accounts.values(), *self._strangers.values()]
        return sorted(every, key=lambda a: (not a.worth_a_line(), a.name))

    def rows(self, accounts: Iterable[SourceAccount], now_ns: int) -> list[dict[str, Any]]:
        """Sources as interfaces show them."""
        carried = self._carried()
        out = []
        for a in accounts:
            every_s, messages, readings = a.rate.means(now_ns) or (math.nan, 0.0, 0.0)
            lines = sorted(a.lines.values(), key=lambda line: (not line.remedy, -line.count))
            out.append({
                "name": a.name, "messages": a.messages, "readings": a.readings,
                "every_s": None if math.isnan(every_s) else round(every_s, 1),
                "messages_per_s": _per_s(messages, every_s), "readings_per_s": _per_s(readings, every_s),
                "answers": a.answers, "failures": a.failures,
                "last_failure": _last_failure(a, now_ns) if a.failures else None,
                "last_ns": a.last_ns, "age_s": round((now_ns - a.last_ns) / NS, 1) if a.last_ns else None,
                "clock_offset_s": _rounded(a.clock_offset_s()),
                "clock_corrected_s": round(a.clock.back_ns / NS, 3), "latency_s": _rounded(a.latency_s()),
                "unused": sum(line.count for line in lines if line.outcome not in NOT_UNUSED),
                "reasons": [_row(line) for line in lines],
                "carries": carried.get(a.number, {}),
                "also_by": self.shared(a, now_ns),
            })  # fmt: skip
        return out

    def _carried(self) -> dict[int, dict[str, dict[str, int]]]:
        """Source number -> table -> number of entities and signals that it carries."""
        out: dict[int, dict[str, dict[str, int]]] = {}
        for key, column in self._carriers.items():
            table = key.partition(".")[0]
            for number, n in zip(*np.unique(column, return_counts=True), strict=True):
                if number >= 0:
                    known = out.setdefault(int(number), {}).setdefault(table, {"entities": 0, "signals": 0})
                    known["entities"], known["signals"] = max(known["entities"], int(n)), known["signals"] + 1
        return out


def _merged(lines: Iterable[tuple[SourceAccount, UnusedLine]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Lines of one reason as one row, which names the source and the example of the latest."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for account, line in lines:
        row = rows.setdefault((line.outcome, line.what), {**_row(line), "sources": 0, "count": 0})
        row["sources"] += 1
        row["count"] += line.count
        if line.last_ns >= row["last_ns"]:
            row |= {k: v for k, v in _row(line).items() if k != "count"} | {"source": account.name}
    return rows


def _row(line: UnusedLine) -> dict[str, Any]:
    return {"outcome": line.outcome, "what": line.what, "count": line.count, "why": line.why,
            "example": line.example, "remedy": line.remedy, "last_ns": line.last_ns}  # fmt: skip


def _per_s(count: float, every_s: float) -> float | None:
    return None if math.isnan(every_s) else round(count / every_s, 4)


def _last_failure(account: SourceAccount, now_ns: int) -> dict[str, Any]:
    return {"why": account.failure, "last_ns": account.failure_ns,
            "age_s": round(max(now_ns - account.failure_ns, 0) / NS, 1)}  # fmt: skip


def _rounded(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s, 3)
