"""Draft of a site: expands ranges, distributes the members of groups, and checks every value of the file.

Knows names only; `twin.site.build` turns them into indices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from twin.catalogue import TABLES, find_quantity, find_signal
from twin.physics import COOLANTS
from twin.site.file import (
    MAX_PATTERN,
    PRIORITIES,
    REST_CLASS,
    CduGroup,
    FeederGroup,
    Hall,
    LeafGroup,
    LoopGroup,
    Plane,
    RackGroup,
    SiteFile,
    SwitchGroup,
    expand,
    short,
)
from twin.site.profile import Profile

MAX_GPUS = 4_000_000  # and nodes
LOOP_APPROACH_K = (1.0, 30.0)  # that coolers and towers are built for; source: estimate
MAX_MACHINES = 1000  # chillers or pumps of one loop
MAX_NAMED = 200_000  # halls, racks, feeders, CDUs, loops, leaves, switches: what has a name of its own
MAX_NAMES = 1_000_000  # names written out in all, those that say who serves whom included
MAX_LINKS = 8_000_000
MAX_HALL_W = 1e9  # the bound of hall_power_w
MAX_JOBS = 1_000_000


@dataclass
class Draft:
    """Draft of a site: what its file expands to, before it becomes arrays."""

    problems: list[str] = field(default_factory=list)
    names_lost: bool = False  # some names could not be read: a name that is not found proves nothing
    too_large: bool = False
    written: int = 0  # names so far, see MAX_NAMES
    loops: list[str] = field(default_factory=list)
    halls: list[str] = field(default_factory=list)
    racks: list[str] = field(default_factory=list)
    rack_hall: list[int] = field(default_factory=list)
    rack_group: list[RackGroup] = field(default_factory=list)
    rack_nodes: list[int] = field(default_factory=list)
    rack_gpus_per_node: list[int] = field(default_factory=list)
    supernodes: list[str] = field(default_factory=list)
    node_supernode: list[int] = field(default_factory=list)
    cdus: list[str] = field(default_factory=list)
    cdu_hall: list[int] = field(default_factory=list)
    cdu_loop: list[str | None] = field(default_factory=list)
    loop_group: list[LoopGroup] = field(default_factory=list)
    loop_serves: list[tuple[str, list[str]]] = field(default_factory=list)
    cdu_serves: list[tuple[str, list[str]]] = field(default_factory=list)
    feeders: list[str] = field(default_factory=list)
    feeder_group: list[FeederGroup] = field(default_factory=list)
    feeder_serves: list[tuple[str, list[str]]] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)  # no table: they show which racks are near each other
    leaf_serves: list[tuple[str, list[str]]] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)
    switch_ways: list[int] = field(default_factory=list)  # switches of its line
    switch_serves: list[tuple[str, list[str], list[str]]] = field(default_factory=list)  # with planes
    storage: list[str] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    priorities: list[str] = field(default_factory=list)
    services: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)  # full paths of what other daemons mirror
    planes: dict[str, int] = field(default_factory=dict)  # their order
    plane_rows: list[tuple[int, int, list[str]]] = field(default_factory=list)  # plane, links, racks

    def named(self) -> dict[str, list[str]]:
        """Return the full paths of entities with a name of their own in the file, by table."""
        return {
            "rack": self.racks,
            "cdu": self.cdus,
            "feeder": self.feeders,
            "hall": self.halls,
            "loop": self.loops,
            "switch": self.switches,
            "storage": self.storage,
            "queue": self.queues,
            "tenant": self.tenants,
            "priority": self.priorities,
            "service": self.services,
        }

    def unknown(self, problem: str) -> None:
        """Note a name that the file does not have, unless it may be one that could not be read."""
        if not self.names_lost:
            self.problems.append(problem)

    def refuse(self, problem: str) -> None:
        """Note what makes the site too large, once: from there on nothing is expanded."""
        if not self.too_large:
            self.problems.append(problem)
        self.too_large = self.names_lost = True

    def count(self, path: str, n: int) -> bool:
        """Return True if this many more names may be written out."""
        self.written += max(1, n)  # one that cannot be read costs work as well
        if self.written > MAX_NAMES:
            self.refuse(f"{path}: more than {MAX_NAMES} names with this one; expected fewer for one daemon")
        return not self.too_large


def draft_of(file: SiteFile, profiles: dict[str, Profile], names_lost: bool) -> Draft:
    """Return all names of a site, and the problems with its values."""
    draft = Draft(names_lost=names_lost)
    if file.schema != 1:
        draft.problems.append(f"$.schema: expected 1, got {file.schema}")
    if file.coolant not in COOLANTS:
        draft.problems.append(f"$.coolant: expected one of {', '.join(COOLANTS)}, got {short(file.coolant)}")
    if _names(draft, "$.site", file.site) not in ([], [file.site]):
        draft.problems.append(f"$.site: expected one name without a range, got {short(file.site)}")
    for i, hall in enumerate(file.halls):
        _expand_hall(draft, file, hall, f"$.halls[{i}]", profiles)
    for i, group in enumerate(file.feeders):
        _expand_feeders(draft, group, f"$.feeders[{i}]", file.site)
    for i, loop in enumerate(file.loops):
        _expand_loops(draft, loop, f"$.loops[{i}]", file.site)
    for key, names, paths in (
        ("storage", [group.name for group in file.storage], draft.storage),
        ("queues", [group.name for group in file.queues], draft.queues),
        ("tenants", [group.name for group in file.tenants], draft.tenants),
        ("priorities", [group.name for group in file.priorities], draft.priorities),
        ("services", [group.name for group in file.services], draft.services),
    ):
        for i, name in enumerate(names):
            paths += [f"{file.site}/{n}" for n in _names(draft, f"$.{key}[{i}].name", name)]
    for i, pattern in enumerate(file.elsewhere):
        head, _, tail = pattern.rpartition("/")
        if head and _names(draft, f"$.elsewhere[{i}]", head) != [head]:
            draft.problems.append(f"$.elsewhere[{i}]: expected HALL/NAMES or NAMES, got {short(pattern)}")
        stem = f"{file.site}/{head}/" if head else f"{file.site}/"
        draft.elsewhere += [f"{stem}{n}" for n in _names(draft, f"$.elsewhere[{i}]", tail)]
    _add_rest(draft, file)
    _check_keys(draft, file)
    for plane in draft.planes:
        stem = plane.rstrip("0123456789")
        if any(plane[:k] in draft.planes for k in range(len(stem), len(plane))):
            draft.problems.append(
                f"$.halls.planes: links of {plane} would be named like those of another plane"
            )
    for table, names in {**draft.named(), "leaf": draft.leaves}.items():
        seen: set[str] = set()
        for name in names:
            if name in seen:
                draft.problems.append(f"$: the {table} {name} is described twice; expected unique names")
            seen.add(name)
    here = {name for names in draft.named().values() for name in names}
    for name in [n for n in draft.elsewhere if n in here][:3]:
        draft.problems.append(f"$.elsewhere: {name} is described here as well; expected one of both")
    return draft


def _add_rest(draft: Draft, file: SiteFile) -> None:
    """Add the class of all priorities that belong to no other, where there are any."""
    bands: dict[int, int] = {}
    for i, group in enumerate(file.priorities):
        path = f"$.priorities[{i}]"
        if group.name == REST_CLASS:
            draft.problems.append(
                f"{path}.name: {REST_CLASS} is the class of all others; expected another name"
            )
        if group.least is None:
            continue
        if not PRIORITIES[0] <= group.least <= PRIORITIES[1]:
            expected = f"expected {PRIORITIES[0]} to {PRIORITIES[1]}"
            draft.problems.append(f"{path}.least: {expected}, got {group.least}")
        elif "[" in group.name:
            draft.problems.append(f"{path}.least: expected one name without a range, got {short(group.name)}")
        elif bands.setdefault(group.least, i) != i:
            other = f"$.priorities[{bands[group.least]}]"
            draft.problems.append(f"{path}.least: {other} begins there as well; expected another number")
    if file.priorities and draft.count("$.priorities", 1):
        draft.priorities.append(f"{file.site}/{REST_CLASS}")


def _names(draft: Draft, path: str, pattern: str) -> list[str]:
    if draft.too_large:
        return []
    try:
        names = expand(pattern)
    except ValueError as error:
        draft.problems.append(f"{path}: {error}")
        draft.names_lost = True
        draft.count(path, 1)
        return []
    if len(names) + len(draft.leaves) + sum(map(len, draft.named().values())) > MAX_NAMED:
        draft.refuse(f"{path}: more than {MAX_NAMED} names with this one; expected fewer for one daemon")
        return []
    return names if draft.count(path, len(names)) else []


def _expand_loops(draft: Draft, group: LoopGroup, path: str, prefix: str) -> None:
    names = _names(draft, f"{path}.name", group.name)
    served = [n for p in group.serves for n in _names(draft, f"{path}.serves", p)]
    for name, share in zip(names, shares(served, max(1, len(names))), strict=False):
        draft.loops.append(f"{prefix}/{name}")
        draft.loop_group.append(group)
        draft.loop_serves.append((path, share))
    _check_loop(draft, group, path)


def _check_loop(draft: Draft, loop: LoopGroup, path: str) -> None:
    low_k, high_k = LOOP_APPROACH_K
    if loop.approach_k is not None and not low_k <= loop.approach_k <= high_k:
        draft.problems.append(f"{path}.approach_k: expected {low_k:g} to {high_k:g} K, got {loop.approach_k}")
    for key in ("pumps_w", "fans_w", "heat_w", "flow_lpm"):
        value = getattr(loop, key)
        if value is not None and not 0.0 < value < math.inf:
            draft.problems.append(f"{path}.{key}: expected a number > 0, got {value}")
    if not 0.0 < loop.heat_pu <= 1.0:
        draft.problems.append(f"{path}.heat_pu: expected a share above 0 and at most 1, got {loop.heat_pu}")
    if loop.machines is not None and not 1 <= loop.machines <= MAX_MACHINES:
        draft.problems.append(f"{path}.machines: expected 1 to {MAX_MACHINES}, got {loop.machines}")
    stated = [key for key in ("heat_w", "machines", "flow_lpm") if getattr(loop, key) is not None]
    if loop.serves and not {"heat_w", "machines"} <= set(stated):
        draft.problems.append(f"{path}: serves halls; expected `heat_w` and `machines`, which they share")
    if stated and not loop.serves:
        draft.problems.append(
            f"{path}.{stated[0]}: is of a loop that serves halls of a fleet; expected `serves` with them: "
            "what a loop of CDUs takes follows from the profiles of their racks"
        )


def _expand_hall(draft: Draft, file: SiteFile, hall: Hall, path: str, profiles: dict[str, Profile]) -> None:
    for hall_name in _names(draft, f"{path}.name", hall.name):
        index, prefix, first = len(draft.halls), f"{file.site}/{hall_name}", len(draft.racks)
        draft.halls.append(prefix)
        for i, group in enumerate(hall.racks):
            _expand_racks(draft, group, f"{path}.racks[{i}]", prefix, index, profiles)
        for i, cdu in enumerate(hall.cdus):
            _expand_cdus(draft, cdu, f"{path}.cdus[{i}]", prefix, index)
        for i, feeder in enumerate(hall.feeders):
            _expand_feeders(draft, feeder, f"{path}.feeders[{i}]", prefix)
        for i, plane in enumerate(hall.planes):
            _expand_plane(draft, plane, f"{path}.planes[{i}]", prefix, draft.racks[first:])
        for i, leaf in enumerate(hall.leaves):
            _expand_leaves(draft, leaf, f"{path}.leaves[{i}]", prefix)
        for i, switch in enumerate(hall.switches):
            _expand_switches(draft, switch, f"{path}.switches[{i}]", prefix)
        if draft.too_large:
            return


def _expand_plane(draft: Draft, plane: Plane, path: str, prefix: str, racks: list[str]) -> None:
    if _names(draft, f"{path}.name", plane.name) not in ([], [plane.name]):
        draft.problems.append(f"{path}.name: expected one name, got {short(plane.name)}")
    if len(plane.name) <= MAX_PATTERN:
        draft.planes.setdefault(plane.name, len(draft.planes))
    if not 1 <= plane.links_per_node <= 10_000:
        draft.problems.append(f"{path}.links_per_node: expected 1 to 10000, got {plane.links_per_node}")
        return
    names = [f"{prefix}/{n}" for p in plane.racks for n in _names(draft, f"{path}.racks", p)]
    if not names and draft.count(path, len(racks)):
        names = racks
    if not draft.too_large:
        draft.plane_rows.append((draft.planes.get(plane.name, 0), plane.links_per_node, names))


def _expand_racks(
    draft: Draft, group: RackGroup, path: str, prefix: str, hall: int, profiles: dict[str, Profile]
) -> None:
    profile = profiles.get(group.profile) if group.profile else None
    if group.profile and profile is None:
        draft.problems.append(
            f"{path}.profile: no profile named {short(group.profile)}; "
            f"expected one of {', '.join(profiles) or 'none'}"
        )
    for key, value in (("nodes", group.nodes), ("gpus_per_node", group.gpus_per_node)):
        if value is not None and not 0 <= value <= 10_000:
            draft.problems.append(f"{path}.{key}: expected 0 to 10000, got {value}")
            draft.names_lost = True
            return
    _check_share(draft, group, path)
    if abs(group.priority) >= 2**31:
        draft.problems.append(f"{path}.priority: expected a number of 32 bits, got {group.priority}")
    names = _names(draft, f"{path}.name", group.name)
    span, compute, domain_nodes, gpus = 1, 1, group.nodes or 0, 0
    if profile is not None:
        layout = profile.layout
        span, compute = int(layout.racks.value), int(layout.compute_racks.value)
        domain_nodes, gpus = int(layout.nodes.value), int(layout.gpus_per_node.value)
    gpus = gpus if group.gpus_per_node is None else group.gpus_per_node
    if span > 1 and len(names) % span:
        draft.problems.append(
            f"{path}.name: {group.profile} spans {span} racks; expected a multiple, got {len(names)}"
        )
        draft.names_lost = True
        return
    share, rest = divmod(domain_nodes, compute) if group.nodes is None else (group.nodes, 0)
    if len(draft.node_supernode) + len(names) * (share + (rest > 0)) > MAX_GPUS:
        draft.refuse(f"{path}: more than {MAX_GPUS} nodes with these; expected fewer for one daemon")
        return
    _check_spares(draft, group, path, share)
    for i, name in enumerate(names):
        within = i % span
        # The last racks of a supernode that spans several may hold its switches only.
        nodes = share + (within < rest) if within < compute or span == 1 else 0
        full = f"{prefix}/{name}"
        draft.racks.append(full)
        draft.rack_hall.append(hall)
        draft.rack_group.append(group)
        draft.rack_nodes.append(nodes)
        draft.rack_gpus_per_node.append(gpus)
        if span > 1:
            if within == 0:
                draft.supernodes.append(f"{full}+{span - 1}")
            draft.node_supernode += [len(draft.supernodes) - 1] * nodes
            continue
        size = max(1, domain_nodes if profile is not None else 1)
        for first in range(0, nodes, size):
            draft.supernodes.append(full if nodes <= size else f"{full}/domain{first // size}")
            draft.node_supernode += [len(draft.supernodes) - 1] * min(size, nodes - first)


def _check_share(draft: Draft, group: RackGroup, path: str) -> None:
    """Note a hall of a fleet that has nodes here, or shares that are no range."""
    least_w, most_w = group.guaranteed_w, group.max_w
    if least_w is None and most_w is None:
        return
    if least_w is None or most_w is None or not 0 < least_w <= most_w <= MAX_HALL_W:
        draft.problems.append(
            f"{path}: expected 0 < guaranteed_w <= max_w <= {MAX_HALL_W:g} for a hall of a fleet, got "
            f"guaranteed_w {least_w} and max_w {most_w}"
        )
    if group.profile is not None or group.nodes or group.spare or group.spare_nodes:
        draft.problems.append(
            f"{path}: a hall of a fleet has its profile, nodes and spares in its own file; expected none here"
        )


def _check_spares(draft: Draft, group: RackGroup, path: str, nodes: int) -> None:
    """Note more spare nodes than the `nodes` of the rack that has the fewest; racks of switches have none."""
    if group.spare_nodes and group.spare:
        draft.problems.append(
            f"{path}.spare_nodes: all nodes of a spare rack are spare; expected either spare or spare_nodes"
        )
    elif not 0 <= group.spare_nodes <= nodes:
        draft.problems.append(
            f"{path}.spare_nodes: expected 0 to {nodes}, the nodes of a rack, got {group.spare_nodes}"
        )


def shares(members: list[str], n: int) -> list[list[str]]:
    """Return `members` in n contiguous blocks, as equal as possible."""
    cuts = [round(i * len(members) / n) for i in range(n + 1)]
    return [members[cuts[i] : cuts[i + 1]] for i in range(n)]


def _expand_cdus(draft: Draft, group: CduGroup, path: str, prefix: str, hall: int) -> None:
    names = _names(draft, f"{path}.name", group.name)
    served = [n for p in group.serves for n in _names(draft, f"{path}.serves", p)]
    for name, share in zip(names, shares(served, max(1, len(names))), strict=False):
        draft.cdus.append(f"{prefix}/{name}")
        draft.cdu_hall.append(hall)
        draft.cdu_loop.append(group.loop)
        draft.cdu_serves.append((path, [f"{prefix}/{s}" for s in share]))


def _expand_leaves(draft: Draft, group: LeafGroup, path: str, prefix: str) -> None:
    names = _names(draft, f"{path}.name", group.name)
    served = [n for p in group.serves for n in _names(draft, f"{path}.serves", p)]
    if len(served) < len(names):
        draft.unknown(
            f"{path}.serves: {len(served)} racks for {len(names)} leaves; expected at least one for each"
        )
    for name, share in zip(names, shares(served, max(1, len(names))), strict=False):
        draft.leaves.append(f"{prefix}/{name}")
        draft.leaf_serves.append((path, [f"{prefix}/{s}" for s in share]))


def _expand_switches(draft: Draft, group: SwitchGroup, path: str, prefix: str) -> None:
    names = _names(draft, f"{path}.name", group.name)
    served = [f"{prefix}/{n}" for p in group.serves for n in _names(draft, f"{path}.serves", p)]
    for name in names:
        draft.switches.append(f"{prefix}/{name}")
        draft.switch_ways.append(len(names))
        draft.switch_serves.append((path, served, group.planes))


def _expand_feeders(draft: Draft, group: FeederGroup, path: str, prefix: str) -> None:
    names = _names(draft, f"{path}.name", group.name)
    served = [n for p in group.serves for n in _names(draft, f"{path}.serves", p)]
    for key, value in (("budget_w", group.budget_w), ("guaranteed_w", group.guaranteed_w)):
        if value is not None and not 0 < value < math.inf:
            draft.problems.append(f"{path}.{key}: expected a number > 0, got {value}")
    if group.external and group.guaranteed_w is None:
        draft.problems.append(
            f"{path}.guaranteed_w: missing; an external budget needs the share that applies without it"
        )
    if group.guaranteed_w is not None and group.budget_w is not None and group.guaranteed_w > group.budget_w:
        draft.problems.append(f"{path}.guaranteed_w: expected at most budget_w, got {group.guaranteed_w}")
    for name, share in zip(names, shares(served, max(1, len(names))), strict=False):
        draft.feeders.append(f"{prefix}/{name}")
        draft.feeder_group.append(group)
        draft.feeder_serves.append((path, share))


def _check_keys(draft: Draft, file: SiteFile) -> None:
    for key, value in file.periods_s.items():
        table, _, name = key.partition(".")
        if (name and find_signal(key) is None) or table not in TABLES:
            draft.problems.append(
                f"$.periods_s.{key}: expected a table or a signal of the catalogue (gpu, gpu.power_w)"
            )
        if not 0 < value < math.inf:
            draft.problems.append(f"$.periods_s.{key}: expected seconds > 0, got {value}")
    if not 0 < file.false_alarms_per_rack_hour <= 1:
        draft.problems.append(
            "$.false_alarms_per_rack_hour: expected a number > 0 and <= 1, such as 0.0005 for 1 in 2,000, "
            f"got {file.false_alarms_per_rack_hour}"
        )
    for key, value in file.history_s.items():
        signal = find_signal(key)
        if signal is None or signal.kind == "counter":
            draft.problems.append(
                f"$.history_s.{key}: expected a gauge or state of the catalogue (rack.power_w)"
            )
        if not 0 < value <= 7 * 86_400:
            draft.problems.append(f"$.history_s.{key}: expected seconds up to a week, got {value}")
    for name, model in file.models.items():
        for key in model.signals:
            if find_quantity(key) is None:
                draft.problems.append(
                    f"$.models.{name}.signals: {short(key)} is not a gauge of the catalogue, or a sum of "
                    "twin/contracts/quantities.py"
                )
        if any(not 0 < h <= 7 * 86_400 for h in model.horizons_s):
            draft.problems.append(
                f"$.models.{name}.horizons_s: expected seconds up to a week, got {model.horizons_s}"
            )
    if not 1 <= file.max_jobs <= MAX_JOBS:
        draft.problems.append(f"$.max_jobs: expected 1 to {MAX_JOBS}, got {file.max_jobs}")
    gpus = sum(n * g for n, g in zip(draft.rack_nodes, draft.rack_gpus_per_node, strict=True))
    if gpus > MAX_GPUS:
        draft.problems.append(f"$.halls: {gpus} GPUs; expected at most {MAX_GPUS} for one daemon")
        draft.too_large = True
    nodes = dict(zip(draft.racks, draft.rack_nodes, strict=True))
    links = sum(per_node * sum(nodes.get(r, 0) for r in racks) for _, per_node, racks in draft.plane_rows)
    if links > MAX_LINKS:
        draft.problems.append(f"$.halls: {links} links; expected at most {MAX_LINKS} for one daemon")
        draft.too_large = True
