"""Report coverage of each part now, by kind: the certainty of "healthy", and the evidence that is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.catalogue import F32, Bool, find_signal
from twin.contracts import PAIRED
from twin.health.rules import Look

U16 = NDArray[np.uint16]
Kinds = tuple[tuple[str, tuple[str, ...]], ...]


class Reported:
    """Bit k of `bits`: the kind k is heard now; one number where that holds of all, else [n]."""

    __slots__ = ("bits", "n")

    def __init__(self, n: int, bits: int | U16 = 0) -> None:
        self.n, self.bits = n, bits

    def share(self, many: int) -> float | F32:
        """Share of `many` kinds that is heard; one number where that holds of all, else [n]."""
        if isinstance(self.bits, int):
            return self.bits.bit_count() / many
        return np.asarray(np.bitwise_count(self.bits).astype(np.float32) / np.float32(many))

    def of(self, index: int) -> int:
        """The bits of one part."""
        return self.bits if isinstance(self.bits, int) else int(self.bits[index])

    def dump(self) -> list[Any]:
        return [self.n, self.bits]

    @classmethod
    def restored(cls, data: Any) -> Reported:
        n, bits = data
        return cls(int(n), np.array(bits, np.uint16) if isinstance(bits, np.ndarray) else int(bits))


def look_at(
    look: Look, part: str, n: int, kinds: Kinds, vital: tuple[str, ...]
) -> tuple[Reported, Bool | None]:
    """(what is reported of a part, of which nothing that shows life is heard now [n], None: of none)."""
    if part not in PAIRED:
        return _of_table(look, n, kinds, vital)
    both = []
    for side in ("1", "2"):
        mine = tuple((what, tuple(k.replace("{side}", side) for k in keys)) for what, keys in kinds)
        both.append(_of_table(look, n // 2, mine, tuple(k.replace("{side}", side) for k in vital)))
    (one, dark_one), (other, dark_other) = (
        (found, dark if dark is None else dark & ~_lately(look, vital[0].replace("{side}", side)))
        for side, (found, dark) in zip("12", both, strict=True)
    )
    if isinstance(one.bits, int) and isinstance(other.bits, int) and one.bits == other.bits:
        found = Reported(n, one.bits)
    else:
        bits = np.zeros(n, np.uint16)
        bits[0::2], bits[1::2] = one.bits, other.bits
        found = Reported(n, bits)
    if dark_one is None and dark_other is None:
        return found, None
    dark = np.zeros(n, np.bool_)
    dark[0::2] = False if dark_one is None else dark_one
    dark[1::2] = False if dark_other is None else dark_other
    return found, dark


def never_told(look: Look, keys: tuple[str, ...]) -> Bool | None:
    """Parts that never told any of these [n]; None: none, or there is nothing to be told."""
    ever: Bool | None = None
    for key in keys:
        signal = find_signal(key)
        assert signal is not None, key
        column, row = look.now.state.tables[signal.table], signal.row
        if signal.kind != "counter" and not column.bad_count[row]:
            return None
        mine = column.raw[row] >= 0 if signal.kind == "counter" else np.isfinite(column.value[row])
        ever = mine if ever is None else ever | mine
        if ever.all():
            return None
    return None if ever is None else ~ever


def _of_table(look: Look, n: int, kinds: Kinds, vital: tuple[str, ...]) -> tuple[Reported, Bool | None]:
    whole, some = 0, []
    for k, (_, keys) in enumerate(kinds):
        heard = _any(look, keys)
        if heard is True:
            whole |= 1 << k
        elif heard is not False:
            some.append((k, heard))
    bits: int | U16 = whole
    if some:
        columns = np.full(n, whole, np.uint16)
        for k, mask in some:
            columns |= mask.astype(np.uint16) << np.uint16(k)
        bits = columns
    alive = _any(look, vital)
    if alive is True:
        return Reported(n, bits), None
    return Reported(n, bits), np.ones(n, np.bool_) if alive is False else ~alive


def _lately(look: Look, key: str) -> Bool:
    """Return the entities whose last good reading of the one signal that shows life is not too old [n].

    A reading that is missed once is no silence, whether it is reported as missing or not at all.
    """
    signal = find_signal(key)
    assert signal is not None, key
    return look.now.state.tables[signal.table].lately_good(signal, look.now.now_ns)


def _any(look: Look, keys: tuple[str, ...]) -> bool | Bool:
    """Return the entities of which one of these signals is current [n]; True for all, False for none."""
    out: Bool | None = None
    for key in keys:
        signal = find_signal(key)
        assert signal is not None, key
        if look.now.state.tables[signal.table].all_current(signal, look.now.now_ns):
            return True
        current = look.now.fresh(key)
        out = current if out is None else out | current
    if out is None or not out.any():
        return False
    return True if out.all() else out
