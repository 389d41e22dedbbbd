"""Worst-case alarms: silent entities that may exceed a limit, and the second signals that support the alarm.

Silence alone is never more than a warning. It is critical only if another signal shows that the cooling of
the silent entity fails: coolant beyond its guard, a cooling fault, or clocks lowered by heat. Such a signal
arrives on another path, or it would be silent too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from twin.alerts.never_reported import SHOWN_ENTITIES
from twin.catalogue import F32, F64, I32, Bool, counted, duration, quantity, signal_of, signal_words
from twin.contracts import Fault, Finding, View
from twin.diagnosis import finding_of
from twin.estimation import HEATED
from twin.site import Site
from twin.telemetry import GOOD

COOLANT = ("rack.flow_lpm", "rack.supply_temp_c", "rack.return_temp_c", "rack.inlet_temp_c")
CLOCKS, POWER_ON = "gpu.clock_event_bits", "node.power_on_state"
BY_HEAT = 0x60  # thermal slowdown by software and by hardware. source: NVML, nvmlClocksEventReasons

# Deadbands: devices give whole degrees; of other quantities a share of the bound. source: EEMUA 191, which
# ISA-18.2 follows, has 2 % for pressures and 5 % for flows and levels
STEP_K, EASED_PU = 1.0, 0.02


def exceeds(key: str, value: F32, bound: F64) -> Bool:
    """Return where a value [k] is on the dangerous side of a bound [k]."""
    return np.asarray(value < bound if signal_of(key).danger == "low" else value > bound, np.bool_)


def eased(key: str, bound: F64) -> F64:
    """The value [k] at which what was beyond a bound is so no longer, on the safe side of it."""
    signal = signal_of(key)
    by = np.full_like(bound, STEP_K) if signal.unit in ("degC", "K") else EASED_PU * np.abs(bound)
    return np.asarray(bound + by if signal.danger == "low" else bound - by, np.float64)


def may_exceed(site: Site, view: View, key: str, index: I32) -> Bool:
    """Return which of these entities [k] are beyond their limit in the worst case, and not as last read."""
    bound = site.limits[key].max[index]
    return exceeds(key, view.worst(key)[index], bound) & ~exceeds(key, view.value(key)[index], bound)


def worst_cases(site: Site, view: View, members: Mapping[str, I32]) -> tuple[str, ...]:
    """Sentences about members of an outage [m per table] that may be beyond a limit by now."""
    out = []
    for key in site.limits:
        table, _, name = key.partition(".")
        if table in members and (n := np.count_nonzero(may_exceed(site, view, key, members[table]))):
            out.append(f"worst case: {name} of {counted(table, int(n))} may be beyond its limit by now")
    return tuple(out)


def feared_findings(site: Site, view: View, excused: Callable[[str], Bool]) -> list[Finding]:
    """Return a finding per limit for the silent GPUs that may be beyond it, if a second signal indicates so.

    `excused(table)`: the mask of entities of which nothing is expected [n].
    """
    out = []
    for key in HEATED:
        if key not in site.limits or not len(index := view.beyond(key)):
            continue
        silent = (view.quality(key)[index] != GOOD) & may_exceed(site, view, key, index)
        if silent.any():
            silent &= ~(excused("gpu") | _switched_off(site, view))[index]
        if not len(index := index[silent]):
            continue
        spoken, evidence = np.zeros(len(index), np.bool_), list[str]()
        for mask, sentence in _second_signals(site, view, index):
            spoken |= mask
            evidence.append(sentence)
        if spoken.any():
            out.append(_finding(site, view, key, index[spoken], evidence))
    return out


def _switched_off(site: Site, view: View) -> Bool:
    """Return the GPUs whose node reports that it is off: they make no heat [n_gpu]."""
    off: Bool = (view.value(POWER_ON) == 0.0) & (view.quality(POWER_ON) == GOOD)
    return off[site.node_of_gpu]


def _second_signals(site: Site, view: View, gpu: I32) -> Iterator[tuple[Bool, str]]:
    """Yield what speaks for heat at some of these GPUs: (which [k], a sentence)."""
    rack = site.rack_of_gpu[gpu]
    racks = np.unique(rack)
    for key in COOLANT:
        if (limit := site.limits.get(key)) is None:
            continue
        read = view.value(key)[racks]
        off = (view.quality(key)[racks] == GOOD) & exceeds(key, read, limit.guard[racks])
        if off.any():
            signal, at = signal_of(key), int(np.argmax(off))
            guard = quantity(limit.guard[racks[at]], signal.unit, 4)
            text = f"{signal_words(signal.name)} reads {quantity(read[at], signal.unit, 4)}, guard {guard}"
            yield np.isin(rack, racks[off]), f"{site.name('rack', int(racks[at]))}: {text}"
    bits = np.nan_to_num(view.value(CLOCKS)[gpu]).astype(np.int64)
    slowed = (view.quality(CLOCKS)[gpu] == GOOD) & (bits & BY_HEAT != 0)
    if slowed.any():
        first = site.name("gpu", int(gpu[np.argmax(slowed)]))
        yield slowed, f"{first}: heat lowers its clock, which another source still reports"
    for fault in view.faults():
        if fault.cooling and fault.severity == "critical":
            mask = _served(site, fault, gpu)
            if mask.any():
                yield mask, finding_of(fault, site).title


def _served(site: Site, fault: Fault, gpu: I32) -> Bool:
    """Return which GPUs [k] are cooled by what has this fault."""
    rack = site.rack_of_gpu[gpu]
    cdu = site.cdu_of_rack[rack]
    of = {"rack": rack, "cdu": cdu, "hall": site.hall_of_rack[rack]}.get(fault.table)
    if fault.table == "loop":
        of = np.where(cdu >= 0, site.loop_of_cdu[cdu], -1) if len(site.loop_of_cdu) else None
    if of is None:
        return np.full(len(gpu), fault.table == "site", np.bool_)
    return np.asarray(of == fault.entity, np.bool_)


def _finding(site: Site, view: View, key: str, gpu: I32, evidence: list[str]) -> Finding:
    signal, first = signal_of(key), int(gpu[0])
    read, worst, bound = view.value(key)[first], view.worst(key)[first], site.limits[key].max[first]
    age_s = view.age_s(key)[first]
    text = (
        f"{site.name('gpu', first)}: read {quantity(read, signal.unit, 4)} {duration(round(age_s))} ago, "
        f"by now perhaps {quantity(worst, signal.unit, 4)}, limit {quantity(bound, signal.unit, 4)}"
    )
    return Finding(
        f"beyond/{key}/feared",
        "critical",
        f"The {signal_words(signal.name)} of {counted('gpu', len(gpu))} may be beyond its limit: "
        "silent while cooling fails",
        tuple(site.name("gpu", int(i)) for i in gpu[:SHOWN_ENTITIES]),
        (text, *evidence[:SHOWN_ENTITIES]),
        1.0,
        "First take the load off these GPUs and check their coolant; then find out why they are silent.",
        len(gpu),
    )
