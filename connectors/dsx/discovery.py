"""Discovery: a first site file from retained DSX metadata of a BMS, as a plain tree with notes.

Values are not looked at. What metadata declares is taken over; what is guessed (the rack behind a tap without
metadata, the sides of the power tree) is marked and explained in the notes, for an operator to check.
Whatever arrives, it does not raise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import yaml

from connectors.dsx.bms import MAX_METADATA_BYTES, MAX_POINT_BYTES, MAX_POINTS, PUB_METADATA
from connectors.dsx.points import (
    Described,
    Edges,
    Metadata,
    Template,
    apply_template,
    find_row,
    find_template,
    site_name as local_name,
    split_areas,
    words_of,
)
from connectors.files import BadRow
from twin.telemetry import Message

MAX_HALLS, MAX_NOTES, MAX_TEMPLATES = 64, 500, 64
MAX_EDGES = 750_000  # of all servesId; with the names themselves, what a site file may write out
MAX_STEPS = 10_000_000  # through equipment that the site file does not hold
COOLING = {"Chiller": "chiller", "CoolingTower": "tower"}  # how such a loop rejects heat

Serves = dict[str, list[str]]
_EDGES = msgspec.json.Decoder(Edges)


@dataclass
class Discovery:
    """Result of a discovery. `site` is a tree for `twin.site.file.convert`; `notes` explain what was found
    and inferred.

    `called` is what the paths of all points say that the site is called, empty where they do not.
    """

    site: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    called: str = ""


@dataclass
class _Topology:
    """Entities in metadata, by their ids on the wire."""

    racks: set[str] = field(default_factory=set)
    referenced: set[str] = field(default_factory=set)
    declared: dict[str, dict[str, set[str]]] = field(default_factory=dict)  # type -> id -> servesId
    edges: int = 0
    steps: int = 0
    cdus: Serves = field(default_factory=dict)
    plant: dict[str, set[str]] = field(default_factory=dict)  # id -> types, of what has signals of a loop
    loops: Serves = field(default_factory=dict)  # CDUs
    meters: Serves = field(default_factory=dict)
    others: Serves = field(default_factory=dict)
    parts: dict[str, set[str]] = field(default_factory=dict)  # id -> types of what is part of it
    halls: set[str] = field(default_factory=set)
    bare: set[str] = field(default_factory=set)  # feeders without telemetry
    inferred: set[str] = field(default_factory=set)
    sides: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, text: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append("".join(c if c.isprintable() else "\ufffd" for c in text[:4000]))
        self.counts["notes"] += 1


def discover(messages: Iterable[Message | BadRow], site_name: str = "site") -> Discovery:
    """Return the site that the retained metadata among `messages` describes."""
    topology = _Topology()
    return _discovered(_points(messages, topology), topology, site_name)


def discover_points(described: Iterable[Described], site_name: str = "site") -> Discovery:
    """Return the site that the points of a decoder describe."""
    topology = _Topology()
    points: dict[str, Edges] = {}
    for key, meta, serves in described:
        known = {name: getattr(meta, name) for name in Metadata.__struct_fields__}
        points[key] = Edges(**known, serves_id=list(serves) or None)
    topology.counts["points"] = len(points)
    return _discovered(points, topology, site_name)


def _discovered(points: dict[str, Edges], topology: _Topology, site_name: str) -> Discovery:
    for key in sorted(points):
        _take(points[key], topology)
    for kind, group in (("CDU", topology.cdus), ("PowerMeter", topology.meters), ("", topology.others)):
        group.update({giver: sorted(served) for giver, served in topology.declared.get(kind, {}).items()})
    _reference_loops(topology)
    _reference_racks(topology)
    _reference_taps(topology)
    _break_cycles(topology)
    _infer_racks(topology)
    _infer_sides(topology)
    site = _tree(topology, local_name(site_name) or "site")
    if more := topology.counts["notes"] - len(topology.notes):
        topology.notes.append(f"{more} further notes are left out")
    return Discovery(site, topology.notes, dict(sorted(topology.counts.items())), _called(points, topology))


def _points(messages: Iterable[Message | BadRow], topology: _Topology) -> dict[str, Edges]:
    """Return the last metadata of each topic; an empty payload clears it, as on a broker."""
    points: dict[str, Edges] = {}
    total_bytes = 0
    for message in messages:
        if isinstance(message, BadRow) or not message.topic.startswith(PUB_METADATA):
            topology.counts["bad_rows" if isinstance(message, BadRow) else "other_messages"] += 1
            continue
        topology.counts["metadata_messages"] += 1
        key = message.topic[len(PUB_METADATA) :]
        if not message.payload:
            points.pop(key, None)
            continue
        full = len(points) >= MAX_POINTS or total_bytes > MAX_POINT_BYTES
        if len(key) > 1024 or len(message.payload) > MAX_METADATA_BYTES or (full and key not in points):
            topology.counts["over_limit"] += 1
            continue
        total_bytes += 0 if key in points else len(message.payload)
        try:
            meta = _EDGES.decode(message.payload)
        except (ValueError, RecursionError) as error:
            topology.counts["bad_metadata"] += 1
            topology.note(f"{key[:120]}: not the metadata of a point: {str(error)[:120]}")
            continue
        if key in points and points[key] != meta:
            topology.counts["changed_metadata"] += 1
            topology.note(f"{key[:120]}: contradictory metadata; the last message counts")
        points[key] = meta
    topology.counts["points"] = len(points)
    return points


def _take(meta: Edges, topology: _Topology) -> None:
    areas, whose = split_areas(meta.process_area), meta.object_id or meta.associate_id
    for wire, meant in areas.misspelt:
        topology.note(f"{whose}, {meta.point_type}: process area {wire!r} is read as {meant!r}")
    if meta.object_type == "Rack":
        if meta.rack_location_id:
            topology.racks.add(meta.rack_location_id)
        return
    owner = meta.associate_id or (meta.object_id if meta.object_type != "Sensor" else None)
    if owner and find_row(meta, areas.known, "loop") is not None:
        topology.plant.setdefault(owner, set()).add(meta.object_type)
    if meta.associate_id:
        topology.parts.setdefault(meta.associate_id, set()).add(meta.object_type)
        return
    if not meta.object_id:
        topology.counts["points_without_object"] += 1
        return
    if meta.object_type == "Sensor":
        topology.halls.update(areas.places[: 1 if len(topology.halls) < MAX_HALLS else 0])
        return
    kind = meta.object_type if meta.object_type in ("CDU", "PowerMeter") else ""
    served = topology.declared.setdefault(kind, {}).setdefault(meta.object_id, set())
    if meta.object_id in (new := {*(meta.serves_id or ())} - served):
        topology.note(f"{meta.object_id} claims to serve itself; this edge is left out")
        new.remove(meta.object_id)
    if topology.edges <= MAX_EDGES < topology.edges + len(new):
        topology.note(
            f"more than {MAX_EDGES} servesId: those of {meta.object_id} and later ones are left out"
        )
    topology.edges += len(new)
    served.update(new if topology.edges <= MAX_EDGES else ())


def _reach(start: str, group: Serves, topology: _Topology, between: Serves | None = None) -> list[str]:
    """Return the entities that `start` serves, through objects that the site file lacks (heat exchangers,
    UPSs)."""
    reached: dict[str, None] = {}
    between = topology.others if between is None else between
    waiting, visited = list(reversed(group.get(start, ()))), {start}
    while waiting and topology.steps <= MAX_STEPS:
        target = waiting.pop()
        topology.steps += 1
        if topology.steps > MAX_STEPS:
            topology.note(f"too many ways through other equipment: what {start} and later ones serve is cut")
        if target in visited:
            continue
        visited.add(target)
        if target in between and target not in topology.racks:
            waiting.extend(reversed(between[target]))
        else:
            reached[target] = None
    return list(reached)


def _reference_loops(topology: _Topology) -> None:
    """Find loops: equipment with signals of a loop. A CDU's loop is the last one before it."""
    known = topology.racks | topology.cdus.keys() | topology.meters.keys()
    loops = topology.plant.keys() - known
    between = {giver: served for giver, served in topology.others.items() if giver not in loops}
    for loop in sorted(loops):
        reached = _reach(loop, topology.others, topology, between)
        topology.loops[loop] = [target for target in reached if target in topology.cdus]
        if not topology.loops[loop]:
            topology.note(f"loop {loop} reports, but no metadata says that it serves a CDU")
    _one_parent(topology.loops, topology.cdus, "loop", topology)


def _reference_racks(topology: _Topology) -> None:
    """Find CDUs: everything they serve is a rack, known or not."""
    served: set[str] = set()
    for cdu in sorted(topology.cdus):
        targets = _reach(cdu, topology.cdus, topology)
        topology.cdus[cdu] = [t for t in targets if t not in topology.cdus and t not in topology.meters]
        served.update(topology.cdus[cdu])
    topology.referenced = served - topology.racks
    for both in sorted(topology.racks & topology.meters.keys()):
        del topology.meters[both]
        topology.note(f"{both} is the id of a rack and of a meter; the meter is left out")
    if topology.referenced:
        topology.note(f"referenced, no telemetry: racks that only a CDU names: {_list(topology.referenced)}")
    for rack in sorted(topology.racks - served) if topology.cdus else ():
        topology.note(f"rack {rack} reports, but no CDU says that it serves it")
    _one_parent(topology.cdus, served, "CDU", topology)


def _one_parent(group: Serves, children: Iterable[str], kind: str, topology: _Topology) -> None:
    """Keep one parent for each: the first CDU of a rack and the first parent of a feeder by name."""
    parent: dict[str, str] = {}
    wanted = set(children)
    for giver in sorted(group):
        lost = {c for c in group[giver] if c in wanted and parent.setdefault(c, giver) != giver}
        for child in sorted(lost):
            topology.note(f"{child} is served by {kind} {parent[child]} and by {giver}: the first is kept")
        group[giver] = [c for c in group[giver] if c not in lost]


def _reference_taps(topology: _Topology) -> None:
    """Find meters: an unknown id behind one is a meter without telemetry, but a rack beside known racks
    only."""
    racks = topology.racks | topology.referenced
    declared = set(topology.meters)
    bare: set[str] = set()
    for meter in sorted(declared):
        reached = _reach(meter, topology.meters, topology)
        if any(t in topology.cdus for t in reached):
            topology.note(f"{meter} feeds a CDU, which the site file cannot say; that edge is left out")
        topology.meters[meter] = targets = [t for t in reached if t not in topology.cdus]
        unknown = [t for t in targets if t not in racks and t not in declared]
        if unknown and any(t in racks for t in targets) and not any(t in declared for t in targets):
            topology.referenced.update(unknown)
            topology.note(
                f"referenced, no telemetry: taken for racks beside those of {meter}: {_list(unknown)}"
            )
        else:
            bare.update(unknown)
    for part in sorted(topology.parts):
        kinds = topology.parts[part]
        if (
            part in racks
            or part in declared
            or part in bare
            or part in topology.cdus
            or part in topology.others
        ):
            continue
        if kinds & {"Shunt", "Breaker"}:
            bare.add(part)
            topology.note(f"feeder {part} is known only from its {_list(kinds)}")
        else:
            topology.note(f"{part} is named by the associateId of a {_list(kinds)} only; left out")
    bare -= topology.referenced
    topology.meters.update({tap: [] for tap in sorted(bare)})
    topology.bare = bare
    topology.counts["feeders_without_telemetry"] = len(bare)


def _break_cycles(topology: _Topology) -> None:
    """Drop the edges by which a meter would feed itself: depth first, in the order of names."""
    done: set[str] = set()
    looped: dict[str, set[str]] = defaultdict(set)
    for root in sorted(topology.meters):
        if root in done:
            continue
        path, on_path = [(root, iter(topology.meters[root]))], {root}
        while path:
            meter, rest = path[-1]
            target = next(rest, None)
            if target is None:
                path.pop()
                on_path.discard(meter)
                done.add(meter)
            elif target in on_path:
                looped[meter].add(target)
                topology.note(f"a cycle: {meter} serves {target}, which serves it; that edge is left out")
            elif target in topology.meters and target not in done:
                path.append((target, iter(topology.meters[target])))
                on_path.add(target)
    topology.meters |= {m: [t for t in topology.meters[m] if t not in lost] for m, lost in looped.items()}
    _one_parent(topology.meters, topology.meters, "feeder", topology)


def _infer_racks(topology: _Topology) -> None:
    """Infer racks of feeders without known loads, by analogy with the names of declared pairs."""
    racks = topology.racks | topology.referenced
    templates: dict[Template, str] = {}
    for meter, rack in ((m, r) for m in sorted(topology.meters) for r in topology.meters[m] if r in racks):
        if len(templates) < MAX_TEMPLATES and (template := find_template(meter, rack)) is not None:
            templates.setdefault(template, f"{meter} -> {rack}")
    for tap in sorted(t for t, targets in topology.meters.items() if not targets):
        guesses = {made: why for t, why in templates.items() if (made := apply_template(t, tap)) in racks}
        if len(guesses) != 1:
            what = f"several racks fit ({_list(guesses)})" if guesses else "no rack fits its name"
            topology.note(f"feeder {tap}: what it serves is unknown, {what}")
            continue
        ((rack, why),) = guesses.items()
        topology.meters[tap] = [rack]
        topology.inferred.add(tap)
        topology.note(f"inferred: feeder {tap} serves rack {rack}, by analogy with {why}")


def _infer_sides(topology: _Topology) -> None:
    """Infer sides A and B where exactly two separate trees of meters feed a rack; otherwise none."""
    roots = sorted(topology.meters.keys() - {t for targets in topology.meters.values() for t in targets})
    members = {root: _descendants(root, topology.meters) for root in roots}
    roots_of: dict[str, list[str]] = defaultdict(list)
    for root in roots:
        for member in members[root]:
            roots_of[member].append(root)
    pairs: dict[str, set[str]] = defaultdict(set)
    for member in sorted(roots_of):
        first, *rest = roots_of[member]
        # A third tree makes a triangle, which no two sides can colour.
        for one, other in [(first, r) for r in rest] + [(rest[0], r) for r in rest[1:]]:
            pairs[one].add(other)
            pairs[other].add(one)
    colour: dict[str, str] = {}
    for root in sorted(pairs):
        if root in colour:
            continue
        part, waiting, clash = {root: "A"}, [root], False
        while waiting:
            at = waiting.pop()
            for other in sorted(pairs[at]):
                side = "B" if part[at] == "A" else "A"
                if other not in part:
                    part[other] = side
                    waiting.append(other)
                clash |= part[other] != side
        if clash:
            topology.note(f"{_list(part)} feed the same racks, but not as two separate sides; none is given")
        colour.update(dict.fromkeys(part, "none") if clash else part)
    for root in sorted(r for r, side in colour.items() if side != "none"):
        topology.sides.update(dict.fromkeys(members[root] & topology.meters.keys(), colour[root]))
        also, side = _list(pairs[root]), colour[root]
        topology.note(f"inferred: {root} and all behind it are side {side}, as {also} feeds the same racks")


def _descendants(root: str, serves: Serves) -> set[str]:
    seen, waiting = {root}, [root]
    while waiting:
        new = {*serves.get(waiting.pop(), ())} - seen
        seen |= new
        waiting += new
    return seen


def _homes(topology: _Topology, hall_of: dict[str, str]) -> dict[str, set[str]]:
    """Return the halls of the racks that each meter feeds, summed from the leaves of the tree."""
    order, waiting = [], sorted(topology.meters.keys() - {t for ts in topology.meters.values() for t in ts})
    while waiting:
        order.append(waiting.pop())
        waiting += [t for t in topology.meters[order[-1]] if t in topology.meters]
    homes: dict[str, set[str]] = {}
    for meter in reversed(order):
        homes[meter] = {hall_of[t] for t in topology.meters[meter] if t in hall_of}
        homes[meter].update(*(homes[t] for t in topology.meters[meter] if t in homes))
    return homes


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:12]) + (f" and {len(ordered) - 12} more" if len(ordered) > 12 else "")


def _called(points: Iterable[str], topology: _Topology) -> str:
    """Return the last common part of all tag paths that is no hall or device: .../titan/pod1C/r1/power."""
    # Behind the kinds of object and of point; the last part names the point itself
    paths = [key.split("/")[2:-1] for key in points]
    ours = {wire.casefold() for wire in _ids(topology)}
    shared = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    places = [part for part in shared if part.casefold() not in ours]
    return local_name(places[-1])[:256] if places else ""


def _ids(topology: _Topology) -> set[str]:
    """Return the wire ids of everything that the site file may name."""
    named = (topology.racks, topology.referenced, topology.cdus, topology.loops, topology.meters)
    return topology.halls.union(*named)


def _local_names(topology: _Topology) -> dict[str, str]:
    """Return wire id -> name of the site file, for every id that can have one."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for wire in sorted(_ids(topology)):
        name = local_name(wire)
        if not 0 < len(name) <= 256 or name in taken:
            topology.note(f"{wire[:60]!r} gives no unique name of 1 to 256 characters; left out")
            continue
        if name != wire:
            topology.note(f"{wire!r} is written {name}: the site file allows letters, digits and _.:+- only")
        taken.add(name)
        names[wire] = name
    return names


def _tree(topology: _Topology, site: str) -> dict[str, Any]:
    names = _local_names(topology)
    halls = sorted(h for h in topology.halls if h in names) or ["hall1"]
    if halls == ["hall1"]:
        topology.note("no sensor names its hall; everything is assigned to hall1")
    racks = sorted(r for r in topology.racks | topology.referenced if r in names)
    tokens = {hall.casefold(): hall for hall in halls}
    hall_of: dict[str, str] = {}
    for rack in racks:
        named = [tokens[t.casefold()] for t in words_of(rack) if t.casefold() in tokens]
        hall_of[rack] = named[0] if named else halls[0]
        if len(halls) > 1 and not named:
            topology.note(f"rack {rack}: no metadata names its hall; assigned to {halls[0]}")
    parts = ("racks", "cdus", "feeders")
    tree: dict[str, Any] = {h: {"name": names.get(h, h)} | {p: [] for p in parts} for h in halls}
    blank = {"profile": None}  # the hardware is for the operator to say; a profile brings its own layout
    for rack in racks:
        mute = {"reports": False} if rack in topology.referenced else {}
        tree[hall_of[rack]]["racks"].append({"name": names[rack], **blank, **mute})
    loop_of = {cdu: loop for loop, served in topology.loops.items() for cdu in served}
    for cdu in sorted(c for c in topology.cdus if c in names):
        served = [r for r in topology.cdus[cdu] if r in hall_of]
        home = Counter(hall_of[r] for r in served).most_common(1)[0][0] if served else halls[0]
        far = [r for r in served if hall_of[r] != home]
        if far:
            what = "serves racks of another hall, which the site file cannot say"
            topology.note(f"CDU {cdu} {what}: {_list(far)}")
        own = [names[r] for r in served if hall_of[r] == home]
        loop = {"loop": names[loop_of[cdu]]} if loop_of.get(cdu) in names else {}
        tree[home]["cdus"].append({"name": names[cdu], "serves": own, **loop})
    across, homes = list[dict[str, Any]](), _homes(topology, hall_of)
    for meter in sorted(m for m in topology.meters if m in names):
        row: dict[str, Any] = {"name": names[meter]}
        row["serves"] = [names[t] for t in topology.meters[meter] if t in names]
        row |= {"side": topology.sides[meter]} if meter in topology.sides else {}
        row |= {"inferred": True} if meter in topology.inferred else {}
        row |= {"reports": False} if meter in topology.bare else {}
        at = sorted(homes[meter]) or halls[:1]
        (across if len(at) > 1 else tree[at[0]]["feeders"]).append(row)
    topology.counts.update(
        halls=len(halls), racks=len(racks), cdus=len(topology.cdus), feeders=len(topology.meters)
    )
    topology.counts.update({"loops": len(topology.loops)} if topology.loops else {})
    topology.counts.update(
        racks_without_telemetry=len(topology.referenced), inferred_edges=len(topology.inferred)
    )
    loops = [_loop(names[p], topology.plant[p]) for p in sorted(topology.loops) if p in names]
    top = {key: rows for key, rows in (("loops", loops), ("feeders", across)) if rows}
    return {"site": site, "schema": 1, "halls": [tree[h] for h in halls], **top, "policies": {}}


def _loop(name: str, types: set[str]) -> dict[str, Any]:
    cooling = [COOLING[kind] for kind in sorted(types) if kind in COOLING]
    return {"name": name} | ({"cooling": cooling[0]} if cooling else {})


def to_yaml(discovery: Discovery) -> str:
    """Return the site as a YAML file, with its origin and the notes at its head."""
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in discovery.counts.items())
    lines = [
        f"A site as a BMS describes itself (DSX BMS v1, retained metadata, no values): {counts}.",
        "Check what is inferred, give the racks their profiles and the feeders their budgets.",
        *(f"- {note}" for note in discovery.notes),
    ]
    # A note may quote an id with line breaks in it; a comment must not.
    head = "".join(f"# {' '.join(line.split())}".rstrip() + "\n" for line in lines)
    return head + yaml.safe_dump(discovery.site, sort_keys=False, allow_unicode=True, width=100)
