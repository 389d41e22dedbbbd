"""XID bursts: the last XIDs of each GPU in a ring of instants and codes, and the GPUs that keep reporting
them."""

from __future__ import annotations

import numpy as np

from twin.catalogue import I32, I64, NS, Bool
from twin.telemetry import SparseState, cell

# The catalogue of NVIDIA says "again": domain.md C has 5 of the same in 24 h for support; three within ten
# minutes are a burst; source: estimate.
XIDS, XID_S = 3, 600.0
XID_KEPT = 32  # per GPU
# From 1 / STORM_SHARE of the GPUs on all have a row, until fewer than 1 / FADED_SHARE of the rows are in use
STORM_SHARE, FADED_SHARE = 8, 32
OFF_BUS_XID = 79
_FAR = 2**31 - 1  # stands for all codes that are no number of 31 bits


class Xids(SparseState):
    """XIDs of GPUs within about ten minutes, the newest `XID_KEPT` of each; a row per GPU that has any."""

    many: I64 = cell("i8")  # since the last long silence; 0: the row is to be dropped
    newest_ns: I64 = cell("i8")
    burst_from_ns: I64 = cell("i8")  # the last but two
    burst_ns: I64 = cell("i8")  # since when there are so many; 0: there are not
    off_bus: I64 = cell("i8")  # which of the many was the last to say so; 0: none
    at_ns: I64 = cell("i8", lead=(XID_KEPT,))
    code: I32 = cell("i4", lead=(XID_KEPT,))

    def __init__(self, n: int) -> None:
        super().__init__({"gpu": n}, "gpu")
        self._text: dict[int, tuple[int, int, str]] = {}

    def add(self, gpu: I32, code: I32, now_ns: int) -> None:
        """Take in XIDs [k] in order of arrival."""
        if not len(gpu):
            return
        order = np.argsort(gpu, kind="stable")
        of = gpu[order]
        first = np.flatnonzero(np.concatenate([[True], of[1:] != of[:-1]]))
        which, count = of[first], np.diff(first, append=len(of))
        new = which[~self.find(which)[1]]
        if len(new):
            if STORM_SHARE * (len(self) + len(new)) > self.sizes["gpu"]:  # rows for all, at once
                new = np.setdiff1d(np.arange(self.sizes["gpu"], dtype=np.int32), self.index)
            self.insert(new)
        at, _ = self.find(which)
        row = np.repeat(at, count)
        nth = self.many[row] + np.arange(len(row)) - np.repeat(first, count)
        self.many[at] += count
        kept = np.flatnonzero(nth >= self.many[row] - XID_KEPT)
        place = nth[kept] % XID_KEPT
        self.at_ns[place, row[kept]], self.code[place, row[kept]] = now_ns, code[order][kept]
        self.newest_ns[at] = now_ns
        often = at[self.many[at] >= XIDS]
        self.burst_from_ns[often] = self.at_ns[(self.many[often] - XIDS) % XID_KEPT, often]
        off = code[order] == OFF_BUS_XID
        self.off_bus[row[off]] = nth[off] + 1  # ascending for each GPU: the last one stays

    def advance(self, now_ns: int) -> None:
        """Forget GPUs after a long quiet time; note GPUs with a new burst."""
        if not len(self):
            return
        since_ns = now_ns - round(XID_S * NS)
        quiet = np.flatnonzero((self.many > 0) & (self.newest_ns < since_ns))
        if len(quiet):
            for column in (self.many, self.newest_ns, self.burst_from_ns, self.burst_ns, self.off_bus):
                column[quiet] = 0
            for gpu in self.index[quiet].tolist() if self._text else ():
                self._text.pop(gpu, None)  # its next burst may have as many
            if FADED_SHARE * np.count_nonzero(self.many) < len(self):
                self.keep(self.many > 0)
        lasting = (self.burst_from_ns > 0) & (self.burst_from_ns >= since_ns)
        self.burst_ns[~lasting] = 0
        self.burst_ns[lasting & (self.burst_ns == 0)] = now_ns

    def derive(self) -> None:
        """Drop the cached texts."""
        self._text.clear()

    def bursts(self, in_maintenance: Bool | None, most: int) -> I32:
        """Return the GPUs with bursts, ascending; of more than `most`, those with the oldest bursts."""
        rows = np.flatnonzero(self.burst_ns)
        gpus = self.index[rows]
        if in_maintenance is not None and len(gpus):
            rows, gpus = rows[~in_maintenance[gpus]], gpus[~in_maintenance[gpus]]
        if len(gpus) > most:
            since_ns = self.burst_ns[rows]
            last_ns = np.partition(since_ns, most - 1)[most - 1]
            older, same = since_ns < last_ns, np.flatnonzero(since_ns == last_ns)
            older[same[: most - np.count_nonzero(older)]] = True
            gpus = gpus[older]
        return gpus

    def texts(self, gpus: I32, now_ns: int) -> list[str]:
        """Return the number of XIDs that these GPUs reported within ten minutes, and their codes."""
        rows, _ = self.find(gpus)
        place = np.arange(XID_KEPT)
        late = (now_ns - self.at_ns[:, rows].T <= XID_S * NS) & (place < self.many[rows, None])
        counts, many = np.count_nonzero(late, axis=1).tolist(), self.many[rows].tolist()
        before, self._text = self._text, {}
        for k, gpu in enumerate(gpus.tolist()):
            known = before.get(gpu)
            if known is None or known[:2] != (many[k], counts[k]):
                codes = ", ".join(map(str, sorted(set(self.code[late[k], rows[k]].tolist()))))
                text = f"{counts[k]} XIDs in {XID_S / 60:.0f} min: {codes}"
                known = many[k], counts[k], text
            self._text[gpu] = known
        return [text for _, _, text in self._text.values()]

    def of(self, gpu: int) -> list[int]:
        """Return the codes that a GPU reported within the last minutes, the newest last."""
        (row,), (known,) = self.find(np.array([gpu], np.int32))
        if not known:
            return []
        many = int(self.many[row])
        codes: list[int] = self.code[np.arange(max(0, many - XID_KEPT), many) % XID_KEPT, row].tolist()
        return codes

    def fallen(self) -> I32:
        """Return the GPUs whose last XIDs report that they left the bus, ascending."""
        return self.index[(self.off_bus > 0) & (self.many - self.off_bus < XID_KEPT)]


def codes_of(codes: I64) -> I32:
    """Return codes as numbers of 31 bits; larger ones become the largest."""
    return np.where((codes >= 0) & (codes < _FAR), codes, _FAR).astype(np.int32)
