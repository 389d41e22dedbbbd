"""Silent cells: the missing readings behind a finding about silence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from twin.catalogue import I32, table_noun
from twin.diagnosis.cause import finding_of
from twin.diagnosis.diagnosis import Diagnosis
from twin.diagnosis.outages import where
from twin.site import noun_key


@dataclass(frozen=True, slots=True)
class SilentCells:
    """Silent readings of an alarm: entities [m per table], of these `signals` alone if it names any.

    `since_ns` and `count` are 0 where the alarm does not say them.
    """

    members: Mapping[str, I32] = field(default_factory=dict)
    place: str = ""
    signals: Collection[str] = ()
    since_ns: int = 0
    count: int = 0


def silent_cells(identity: str, diagnosis: Diagnosis) -> SilentCells:
    """Return the silent readings of an outage, or of a device or sensor that is silent alone; else none."""
    site, outages = diagnosis.site, diagnosis.silence.outages
    if (outage := outages.known.get(identity)) is not None:
        members = outages.members[identity]
        return SilentCells(members, where(site, outage), (), outage.since_ns, outage.signals)
    fault = next(
        (f for f in diagnosis.book.alarms(diagnosis.faults) if finding_of(f, site).id == identity), None
    )
    if fault is None or fault.count > 1:  # many at once, as one fault of their place
        return SilentCells()
    index, name = np.array([fault.entity], np.int32), site.name(fault.table, fault.entity)
    place = f"{table_noun(noun_key(site, fault.table))} {name}"
    if fault.signal:
        return SilentCells({fault.table: index}, place, {fault.signal})
    members = {fault.table: index}
    if fault.table == "node":
        members["gpu"] = np.arange(*site.gpu_start_of_node[fault.entity : fault.entity + 2], dtype=np.int32)
    return SilentCells(members, place)
