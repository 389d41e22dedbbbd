"""The last XIDs of each GPU, and which GPUs report them again and again.

A ring of instants and codes per GPU; rows of GPUs that report nothing are never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.catalogue import I32, I64, NS, Bool
from twin.telemetry import EntityState, OldOfNew

# The catalogue of NVIDIA says "again": domain.md C has 5 of the same in 24 h for support; three within ten
# minutes are a burst; source: estimate.
XIDS, XID_S = 3, 600.0
XID_KEPT = 32  # per GPU
OFF_BUS_XID = 79
_FAR = 2**31 - 1  # stands for all codes that are no number of 31 bits
_NONE: I32 = np.zeros(0, np.int32)


class Xids(EntityState):
    """XIDs of n GPUs within about ten minutes, the newest `XID_KEPT` of each."""

    def __init__(self, n: int) -> None:
        super().__init__({"gpu": n}, "gpu")
        self.n = n
        self.many: I64 = np.zeros(n, np.int64)  # heard since the last long silence
        self._newest_ns: I64 = np.zeros(n, np.int64)
        self._burst_from_ns: I64 = np.zeros(n, np.int64)  # the last but two
        self.burst_ns: I64 = np.zeros(n, np.int64)  # since when there are so many; 0: there are not
        self._off_bus: I64 = np.zeros(n, np.int64)  # which of the many was the last to say so; 0: none
        self._at_ns, self._code = np.zeros((n, XID_KEPT), np.int64), np.zeros((n, XID_KEPT), np.int32)
        self._text: dict[int, tuple[int, int, str]] = {}
        self._any = False  # of any GPU

    def hear(self, gpu: I32, code: I32, now_ns: int) -> None:
        """XIDs [k] in order of arrival."""
        if not len(gpu):
            return
        order = np.argsort(gpu, kind="stable")
        of = gpu[order]
        first = np.flatnonzero(np.concatenate([[True], of[1:] != of[:-1]]))
        which, count = of[first], np.diff(first, append=len(of))
        nth = self.many[of] + np.arange(len(of)) - np.repeat(first, count)
        self.many[which] += count
        kept = np.flatnonzero(nth >= self.many[of] - XID_KEPT)
        row, place = of[kept], nth[kept] % XID_KEPT
        self._at_ns[row, place], self._code[row, place] = now_ns, code[order][kept]
        self._newest_ns[which] = now_ns
        often = which[self.many[which] >= XIDS]
        self._burst_from_ns[often] = self._at_ns[often, (self.many[often] - XIDS) % XID_KEPT]
        off = code[order] == OFF_BUS_XID
        self._off_bus[of[off]] = nth[off] + 1  # ascending for each GPU: the last one stays
        self._any = True

    def advance(self, now_ns: int) -> None:
        """Forget GPUs that have been quiet for long; note which have begun to report again and again."""
        if not self._any:
            return
        since_ns = now_ns - round(XID_S * NS)
        quiet = np.flatnonzero((self.many > 0) & (self._newest_ns < since_ns))
        if len(quiet):
            self._clear(quiet)
        lasting = (self._burst_from_ns > 0) & (self._burst_from_ns >= since_ns)
        self.burst_ns[~lasting] = 0
        self.burst_ns[lasting & (self.burst_ns == 0)] = now_ns
        self._any = bool(self.many.any())

    def _clear(self, gpu: I64) -> None:
        for column in (self.many, self._newest_ns, self._burst_from_ns, self.burst_ns, self._off_bus):
            column[gpu] = 0
        for one in gpu.tolist() if self._text else ():
            self._text.pop(one, None)  # its next burst may have as many

    def bursts(self, spared: Bool | None, most: int) -> I32:
        """GPUs with bursts, ascending; if there are more than `most`, those whose bursts are the oldest."""
        if not self._any:
            return _NONE
        found = np.flatnonzero(self.burst_ns).astype(np.int32)
        if spared is not None and len(found):
            found = found[~spared[found]]
        if len(found) > most:
            since_ns = self.burst_ns[found]
            last_ns = np.partition(since_ns, most - 1)[most - 1]
            older, same = since_ns < last_ns, np.flatnonzero(since_ns == last_ns)
            older[same[: most - np.count_nonzero(older)]] = True
            found = found[older]
        return found

    def texts(self, gpus: I32, now_ns: int) -> list[str]:
        """Return the number of XIDs that these GPUs reported within ten minutes, and their codes."""
        place = np.arange(XID_KEPT)
        late = (now_ns - self._at_ns[gpus] <= XID_S * NS) & (place < self.many[gpus, None])
        counts, many = np.count_nonzero(late, axis=1).tolist(), self.many[gpus].tolist()
        before, self._text = self._text, {}
        for k, gpu in enumerate(gpus.tolist()):
            known = before.get(gpu)
            if known is None or known[:2] != (many[k], counts[k]):
                codes = ", ".join(map(str, sorted(set(self._code[gpu][late[k]].tolist()))))
                text = f"{counts[k]} XIDs in {XID_S / 60:.0f} min: {codes}"
                known = many[k], counts[k], text
            self._text[gpu] = known
        return [text for _, _, text in self._text.values()]

    def of(self, gpu: int) -> list[int]:
        """Codes heard of a GPU within the last minutes, the newest last."""
        many = int(self.many[gpu])
        codes: list[int] = self._code[gpu, np.arange(max(0, many - XID_KEPT), many) % XID_KEPT].tolist()
        return codes

    def off_bus(self) -> I64:
        """GPUs that said they have fallen off the bus, ascending."""
        said = np.flatnonzero(self._off_bus) if self._any else _NONE.astype(np.int64)
        return said[self.many[said] - self._off_bus[said] < XID_KEPT] if len(said) else said

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot."""
        if table == "gpu":
            self._clear(np.array([entity]))

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum: GPUs [k], and of each its XIDs, the oldest first."""
        gpu = np.flatnonzero(self.many).astype(np.int32)
        kept = np.minimum(self.many[gpu], XID_KEPT)
        row = np.repeat(np.arange(len(gpu)), kept)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(kept) - kept, kept)
        of = gpu[row]
        place = (self.many[of] - kept[row] + nth) % XID_KEPT
        return {"gpu": gpu, "kept": kept, "burst_ns": self.burst_ns[gpu],
                "at_ns": self._at_ns[of, place], "code": self._code[of, place]}  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        gpu, kept = np.array(data["gpu"], np.int32), np.array(data["kept"], np.int64)
        self.many[gpu], self.burst_ns[gpu] = kept, data["burst_ns"]
        of = np.repeat(gpu, kept)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(kept) - kept, kept)
        self._at_ns[of, nth], self._code[of, nth] = data["at_ns"], data["code"]
        self._newest_ns[gpu] = self._at_ns[gpu, np.maximum(kept - 1, 0)]
        often = gpu[kept >= XIDS]
        self._burst_from_ns[often] = self._at_ns[often, self.many[often] - XIDS]
        off = self._code[of, nth] == OFF_BUS_XID
        self._off_bus[of[off]] = nth[off] + 1
        self._any = len(gpu) > 0

    def adopt(self, old: Xids, old_of_new: OldOfNew) -> None:
        """Take over the XIDs of GPUs that the new site still has; rows of others are not touched."""
        source = old_of_new["gpu"]
        there = np.flatnonzero(source >= 0)
        new = there[old.many[source[there]] > 0]
        for name in ("many", "_newest_ns", "_burst_from_ns", "burst_ns", "_off_bus", "_at_ns", "_code"):
            getattr(self, name)[new] = getattr(old, name)[source[new]]
        self._any = len(new) > 0


def codes_of(codes: list[int]) -> I32:
    """Codes as numbers of 31 bits; others are the largest."""
    try:
        found = np.array(codes, np.int64)
    except OverflowError:
        found = np.array([c if abs(c) < _FAR else _FAR for c in codes], np.int64)
    return np.where((found >= 0) & (found < _FAR), found, _FAR).astype(np.int32)
