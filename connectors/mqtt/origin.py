"""Origin of a message: the publisher that a topic names, as the ledger of sources lists it.

A topic tree is too coarse (one for all agents of a site), a topic too fine (one for each point). Pure.
"""

from __future__ import annotations

_IT, _BMS = "IT/v1/PUB/", "BMS/v1/"
MAX_ORIGIN = 160  # characters


def origin_of(topic: str) -> str:
    """Return the source of a topic: its kind, a space, and its name.

    `agent lab/h/r1/node3` (a frame, fault, serial or presence of a node), `jobs NAME` and `outlooks NAME` of
    events, `job reports`, `BMS gateway NAME` (first level of the tag), `Sparkplug node GROUP/NODE`, else
    `topic` with the first two levels, such as `topic telegraf/node7`.
    """
    if topic.startswith(_IT):
        form, _, rest = topic[len(_IT) :].partition("/")
        if form in ("Frame", "Agent"):
            return f"agent {rest}"[:MAX_ORIGIN]
        if form == "Event":
            head, _, tail = rest.partition("/")
            kind = head if head in ("jobs", "outlooks") else "agent"
            return f"{kind} {tail if kind != 'agent' else rest}"[:MAX_ORIGIN]
        if form == "Job":
            return "job reports"
    parts = topic.split("/", 7)
    if topic.startswith(_BMS):
        named = parts[2] == "PUB" and len(parts) > 7
        return f"BMS gateway {parts[6] if named else parts[2]}"[:MAX_ORIGIN]
    if parts[0] == "IT":
        return "answers of agents" if "/Result/" in topic else "topic IT/v1"
    if parts[0] == "spBv1.0" and len(parts) > 3:
        return f"Sparkplug node {parts[1]}/{parts[3]}"[:MAX_ORIGIN]
    return f"topic {'/'.join(parts[:2])}"[:MAX_ORIGIN]
