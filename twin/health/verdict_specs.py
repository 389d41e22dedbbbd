"""Verdict specs: for each kind of part its rules, the evidence there should be, and the signals that show its
life.

Data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twin.catalogue import F32, Bool, signal_of
from twin.contracts import PAIRED
from twin.health import rules_gpu, rules_node, rules_parts
from twin.health.rules import Rule, RuleContext

U16 = NDArray[np.uint16]
Kinds = tuple[tuple[str, tuple[str, ...]], ...]


Bits = int | U16  # bit k: the kind k is current; one number where that holds of all, else [n]


def share_of(bits: Bits, many: int) -> float | F32:
    """Return the share of `many` kinds that report: one number if it is the same for all parts, otherwise
    [n]."""
    if isinstance(bits, int):
        return bits.bit_count() / many
    return np.asarray(np.bitwise_count(bits).astype(np.float32) / np.float32(many))


def look_at(
    context: RuleContext, part: str, n: int, kinds: Kinds, vital: tuple[str, ...]
) -> tuple[Bits, Bool | None]:
    """Return (signals that report on a part, parts without any current sign of life [n], None for none)."""
    if part not in PAIRED:
        return _of_table(context, n, kinds, vital)
    both = []
    for side in ("1", "2"):
        mine = tuple((what, tuple(k.replace("{side}", side) for k in keys)) for what, keys in kinds)
        both.append(_of_table(context, n // 2, mine, tuple(k.replace("{side}", side) for k in vital)))
    (one, dark_one), (other, dark_other) = (
        (found, dark if dark is None else dark & ~_lately(context, vital, side))
        for side, (found, dark) in zip("12", both, strict=True)
    )
    if isinstance(one, int) and isinstance(other, int) and one == other:
        found: Bits = one
    else:
        found = np.zeros(n, np.uint16)
        found[0::2], found[1::2] = one, other
    if dark_one is None and dark_other is None:
        return found, None
    dark = np.zeros(n, np.bool_)
    dark[0::2] = False if dark_one is None else dark_one
    dark[1::2] = False if dark_other is None else dark_other
    return found, dark


def lacks_reports(context: RuleContext, keys: tuple[str, ...]) -> Bool | None:
    """Return the parts that never reported any of these [n]; None if there are none, or no signal is
    expected."""
    ever: Bool | None = None
    for key in keys:
        signal = signal_of(key)
        column, row = context.now.state.tables[signal.table], signal.row
        if signal.kind != "counter" and not column.bad_count[row]:
            return None
        mine = column.raw[row] >= 0 if signal.kind == "counter" else np.isfinite(column.value[row])
        ever = mine if ever is None else ever | mine
        if ever.all():
            return None
    return None if ever is None else ~ever


def _of_table(context: RuleContext, n: int, kinds: Kinds, vital: tuple[str, ...]) -> tuple[Bits, Bool | None]:
    whole, some = 0, []
    for k, (_, keys) in enumerate(kinds):
        reported = _any(context, keys)
        if reported is True:
            whole |= 1 << k
        elif reported is not False:
            some.append((k, reported))
    bits: Bits = whole
    if some:
        columns = np.full(n, whole, np.uint16)
        for k, mask in some:
            columns |= mask.astype(np.uint16) << np.uint16(k)
        bits = columns
    alive = _any(context, vital)
    if alive is True:
        return bits, None
    return bits, np.ones(n, np.bool_) if alive is False else ~alive


def _lately(context: RuleContext, vital: tuple[str, ...], side: str) -> Bool:
    """Return the entities whose last good reading of a signal that shows life is not too old [n].

    A reading that is missed once is no silence, whether it is reported as missing or not at all.
    """
    signals = [signal_of(key.replace("{side}", side)) for key in vital]
    tables = context.now.state.tables
    found = [tables[s.table].lately_good(s, context.now.now_ns) for s in signals]
    return np.asarray(np.any(found, axis=0))


def _any(context: RuleContext, keys: tuple[str, ...]) -> bool | Bool:
    """Return the entities of which one of these signals is current [n]; True for all, False for none."""
    out: Bool | None = None
    for key in keys:
        signal = signal_of(key)
        if context.now.state.tables[signal.table].all_current(signal, context.now.now_ns):
            return True
        current = context.now.fresh(key)
        out = current if out is None else out | current
    if out is None or not out.any():
        return False
    return True if out.all() else out


@dataclass(frozen=True, slots=True)
class Spec:
    """Specification of a kind of part: its rules, kinds of evidence, and signals of which one shows life."""

    rules: tuple[Rule, ...]
    kinds: Kinds
    vital: tuple[str, ...]
    condition: tuple[str, ...] = ()  # one of these must have been reported; none: what shows life is enough

    def rule(self, rule_id: str) -> Rule | None:
        """Return the rule with this id; None for evidence without a rule."""
        return next((rule for rule in self.rules if rule.id == rule_id), None)


# In this order, since a node is judged by its GPUs, supplies and DPUs
SPECS: dict[str, Spec] = {
    "gpu": Spec(rules_gpu.RULES, rules_gpu.KINDS, rules_gpu.VITAL, rules_gpu.CONDITION),
    "switch": Spec(rules_parts.SWITCH, rules_parts.SWITCH_KINDS, rules_parts.SWITCH_VITAL),
    "link": Spec(rules_parts.LINK, rules_parts.LINK_KINDS, rules_parts.LINK_VITAL),
    "pump": Spec(rules_parts.PUMPS, rules_parts.PUMP_KINDS, rules_parts.PUMP_VITAL),
    "psu": Spec(rules_parts.PSUS, rules_parts.PSU_KINDS, rules_parts.PSU_VITAL),
    "dpu": Spec(rules_parts.DPUS, rules_parts.DPU_KINDS, rules_parts.DPU_VITAL),
    "node": Spec(rules_node.RULES, rules_node.KINDS, rules_node.VITAL),
}
