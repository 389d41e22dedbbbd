"""Load targets at a change of leadership: what a successor takes over of those that the leader before held.

What came over MQTT or out of a file the successor has heard itself, as late as the leader or later: of these
it takes what it lacks. What people set or withdrew, it knows from the leader alone. Part of the shell; pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from twin.app.target_files import AUTHOR
from twin.events import Event, LoadTargetSet, LoadTargetWithdrawn


def taken_over(left: Sequence[LoadTargetSet] | None, own: Sequence[LoadTargetSet]) -> list[Event]:
    """Events that take `own` to what the leader before `left`; None: not known, and nothing is done."""
    if left is None:
        return []
    held, known = {o.target: o for o in own}, {t.target for t in left}
    out: list[Event] = [
        # Without its id: it counts, whatever became of one with this id here
        msgspec.structs.replace(target, id="")
        for target in left
        if target.target not in held or (_by_people(target) and held[target.target] != target)
    ]
    out += [
        LoadTargetWithdrawn(author="takeover", target=name)
        for name, target in held.items()
        if name not in known and _by_people(target)
    ]
    return out


def _by_people(target: LoadTargetSet) -> bool:
    return target.author != AUTHOR and not target.author.startswith("//grid/")
