"""Builds a Site from its spec: expands ranges, shares what groups serve, finds every fault of the file at once.

Pure: files are read by the shell. May import the site's schema, profiles and the catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from twin.envelope import envelopes_of, limits_of
from twin.errors import ConfigError
from twin.profile import Profile, parse_profile
from twin.signals import TABLES, find_signal
from twin.site import Relation, Site, SiteSpec
from twin.sitefile import CduGroup, FeederGroup, Hall, RackGroup, SiteFile, convert, expand

MAX_GPUS = 4_000_000
_SIDES = {"none": 0, "A": 1, "B": 2}


@dataclass
class _Draft:
    """What the expansion collects before it becomes arrays."""

    problems: list[str] = field(default_factory=list)
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
    cdu_serves: list[tuple[str, list[str]]] = field(default_factory=list)
    feeders: list[str] = field(default_factory=list)
    feeder_group: list[FeederGroup] = field(default_factory=list)
    feeder_serves: list[tuple[str, list[str]]] = field(default_factory=list)
    planes: list[str] = field(default_factory=list)
    plane_rows: list[tuple[int, int, list[str] | None]] = field(default_factory=list)  # plane, links, racks


def build(spec: SiteSpec, file_name: str = "site") -> Site:
    """The site that a spec describes. Raises ConfigError with every fault found."""
    file = convert(SiteFile, spec.file, file_name)
    profiles = {name: parse_profile(tree, f"profile {name}") for name, tree in sorted(spec.profiles.items())}
    draft = _Draft()
    if file.schema != 1:
        draft.problems.append(f"$.schema: expected 1, got {file.schema}")
    _names(draft, "$.site", file.site)
    for i, hall in enumerate(file.halls):
        _expand_hall(draft, file, hall, f"$.halls[{i}]", profiles)
    for i, group in enumerate(file.feeders):
        _expand_feeders(draft, group, f"$.feeders[{i}]", file.site)
    loops = [f"{file.site}/{n}" for i, g in enumerate(file.loops) for n in _names(draft, f"$.loops[{i}].name", g.name)]
    _check_keys(draft, file)
    for table, names in (("rack", draft.racks), ("cdu", draft.cdus), ("feeder", draft.feeders), ("hall", draft.halls),
                         ("loop", loops)):  # fmt: skip
        seen: set[str] = set()
        for name in names:
            if name in seen:
                draft.problems.append(f"$: the {table} {name} is described twice; expected unique names")
            seen.add(name)
    if draft.problems:
        raise ConfigError([f"{file_name}: {p}" for p in dict.fromkeys(draft.problems)])
    site = _assemble(draft, file, spec, loops, profiles, file_name)
    return site


def _names(draft: _Draft, path: str, pattern: str) -> list[str]:
    try:
        return expand(pattern)
    except ValueError as error:
        draft.problems.append(f"{path}: {error}")
        return []


def _expand_hall(draft: _Draft, file: SiteFile, hall: Hall, path: str, profiles: dict[str, Profile]) -> None:
    for hall_name in _names(draft, f"{path}.name", hall.name):
        index, prefix = len(draft.halls), f"{file.site}/{hall_name}"
        draft.halls.append(prefix)
        for i, group in enumerate(hall.racks):
            _expand_racks(draft, group, f"{path}.racks[{i}]", prefix, index, profiles)
        for i, cdu in enumerate(hall.cdus):
            _expand_cdus(draft, cdu, f"{path}.cdus[{i}]", prefix, index)
        for i, feeder in enumerate(hall.feeders):
            _expand_feeders(draft, feeder, f"{path}.feeders[{i}]", prefix)
        for i, plane in enumerate(hall.planes):
            if plane.name not in draft.planes:
                draft.planes.append(plane.name)
            if plane.links_per_node < 1:
                draft.problems.append(f"{path}.planes[{i}].links_per_node: expected at least 1")
            names = [f"{prefix}/{n}" for p in plane.racks for n in _names(draft, f"{path}.planes[{i}].racks", p)]
            draft.plane_rows.append((draft.planes.index(plane.name), plane.links_per_node,
                                     names or [r for r in draft.racks if r.startswith(prefix + "/")]))  # fmt: skip


def _expand_racks(
    draft: _Draft, group: RackGroup, path: str, prefix: str, hall: int, profiles: dict[str, Profile]
) -> None:
    profile = profiles.get(group.profile) if group.profile else None
    if group.profile and profile is None:
        draft.problems.append(
            f"{path}.profile: no profile named {group.profile!r}; expected one of {', '.join(profiles) or 'none'}"
        )
    for key, value in (("nodes", group.nodes), ("gpus_per_node", group.gpus_per_node)):
        if value is not None and not 0 <= value <= 10_000:
            draft.problems.append(f"{path}.{key}: expected 0 to 10000, got {value}")
            return
    names = _names(draft, f"{path}.name", group.name)
    span, compute, domain_nodes, gpus = 1, 1, group.nodes or 0, 0
    if profile is not None:
        layout = profile.layout
        span, compute = int(layout.racks.value), int(layout.compute_racks.value)
        domain_nodes, gpus = int(layout.nodes.value), int(layout.gpus_per_node.value)
    gpus = gpus if group.gpus_per_node is None else group.gpus_per_node
    if span > 1 and len(names) % span:
        draft.problems.append(f"{path}.name: {group.profile} spans {span} racks; expected a multiple, got {len(names)}")
        return
    for i, name in enumerate(names):
        within = i % span
        if group.nodes is not None:
            nodes = group.nodes
        else:
            share, rest = divmod(domain_nodes, compute)
            nodes = (share + (1 if within < rest else 0)) if within < compute else 0
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


def _shares(members: list[str], n: int) -> list[list[str]]:
    """`members` in n contiguous blocks, as equal as they can be."""
    cuts = [round(i * len(members) / n) for i in range(n + 1)]
    return [members[cuts[i] : cuts[i + 1]] for i in range(n)]


def _expand_cdus(draft: _Draft, group: CduGroup, path: str, prefix: str, hall: int) -> None:
    names = _names(draft, f"{path}.name", group.name)
    served = [n for p in group.serves for n in _names(draft, f"{path}.serves", p)]
    for name, share in zip(names, _shares(served, max(1, len(names))), strict=False):
        draft.cdus.append(f"{prefix}/{name}")
        draft.cdu_hall.append(hall)
        draft.cdu_loop.append(group.loop)
        draft.cdu_serves.append((path, [f"{prefix}/{s}" for s in share]))


def _expand_feeders(draft: _Draft, group: FeederGroup, path: str, prefix: str) -> None:
    names = _names(draft, f"{path}.name", group.name)
    served = [n for p in group.serves for n in _names(draft, f"{path}.serves", p)]
    for key, value in (("budget_w", group.budget_w), ("guaranteed_w", group.guaranteed_w)):
        if value is not None and not value > 0:
            draft.problems.append(f"{path}.{key}: expected a number > 0, got {value}")
    if group.external and group.guaranteed_w is None:
        draft.problems.append(f"{path}.guaranteed_w: missing; an external budget needs the share that applies without it")
    if group.guaranteed_w is not None and group.budget_w is not None and group.guaranteed_w > group.budget_w:
        draft.problems.append(f"{path}.guaranteed_w: expected at most budget_w, got {group.guaranteed_w}")
    for name, share in zip(names, _shares(served, max(1, len(names))), strict=False):
        draft.feeders.append(f"{prefix}/{name}")
        draft.feeder_group.append(group)
        draft.feeder_serves.append((path, share))


def _check_keys(draft: _Draft, file: SiteFile) -> None:
    for key, value in file.periods_s.items():
        table, _, name = key.partition(".")
        if (name and find_signal(key) is None) or table not in TABLES:
            draft.problems.append(f"$.periods_s.{key}: expected a table or a signal of the catalogue (gpu, gpu.power_w)")
        if not value > 0:
            draft.problems.append(f"$.periods_s.{key}: expected seconds > 0, got {value}")
    for key, value in file.history_s.items():
        signal = find_signal(key)
        if signal is None or signal.kind == "counter":
            draft.problems.append(f"$.history_s.{key}: expected a gauge or state of the catalogue (rack.power_w)")
        if not 0 < value <= 7 * 86_400:
            draft.problems.append(f"$.history_s.{key}: expected seconds up to a week, got {value}")
    for name, model in file.models.items():
        for key in model.signals:
            signal = find_signal(key)
            if signal is None or signal.kind == "counter":
                draft.problems.append(f"$.models.{name}.signals: {key!r} is not a gauge of the catalogue")
        if any(not 0 < h <= 7 * 86_400 for h in model.horizons_s):
            draft.problems.append(f"$.models.{name}.horizons_s: expected seconds up to a week, got {model.horizons_s}")
    if not 1 <= file.max_jobs <= 1_000_000:
        draft.problems.append(f"$.max_jobs: expected 1 to 1000000, got {file.max_jobs}")
    gpus = sum(n * g for n, g in zip(draft.rack_nodes, draft.rack_gpus_per_node, strict=True))
    if gpus > MAX_GPUS:
        draft.problems.append(f"$.halls: {gpus} GPUs; expected at most {MAX_GPUS} for one daemon")


def _power_tree(draft: _Draft, rack_of: dict[str, int]) -> tuple[np.ndarray, Relation]:
    by_name: dict[str, list[int]] = {}
    for i, full in enumerate(draft.feeders):
        parts = full.split("/")
        for k in range(1, len(parts)):
            by_name.setdefault("/".join(parts[k:]), []).append(i)
    racks: dict[str, list[int]] = {}
    for full, i in rack_of.items():
        parts = full.split("/")
        for k in range(1, len(parts)):
            racks.setdefault("/".join(parts[k:]), []).append(i)
    parent = np.full(len(draft.feeders), -1, np.int32)
    of_rack: list[list[int]] = [[] for _ in rack_of]
    for i, (path, served) in enumerate(draft.feeder_serves):
        home = draft.feeders[i].rpartition("/")[0]
        for name in served:
            child = _nearest(by_name.get(name, []), draft.feeders, home)
            rack = _nearest(racks.get(name, []), draft.racks, home)
            if child is None and rack is None:
                draft.problems.append(f"{path}.serves: {name!r} is neither a feeder nor a rack of this file, or is not unique")
            elif child is not None and rack is not None:
                draft.problems.append(f"{path}.serves: {name!r} names both a feeder and a rack; expected distinct names")
            elif child is not None and parent[child] not in (-1, i):
                draft.problems.append(f"{path}.serves: {name!r} is already served by {draft.feeders[parent[child]]}")
            elif child is not None:
                parent[child] = i
            elif rack is not None:
                of_rack[rack].append(i)
    for i in range(len(parent)):
        at, steps = i, 0
        while at >= 0 and steps <= len(parent):
            at, steps = int(parent[at]), steps + 1
        if at >= 0:
            draft.problems.append(f"{draft.feeder_serves[i][0]}.serves: {draft.feeders[i]} is part of a loop; expected a tree")
            break
    return parent, Relation.of(of_rack)


def _nearest(found: list[int], names: list[str], home: str) -> int | None:
    """The one match, or the one in the same hall where several halls use the same local names."""
    if len(found) > 1:
        found = [i for i in found if names[i].startswith(home + "/")]
    return found[0] if len(found) == 1 else None


def _cooling(draft: _Draft, rack_of: dict[str, int], loops: list[str]) -> tuple[np.ndarray, np.ndarray]:
    cdu_of_rack = np.full(len(draft.racks), -1, np.int32)
    for i, (path, served) in enumerate(draft.cdu_serves):
        for name in served:
            rack = rack_of.get(name)
            if rack is None:
                draft.problems.append(f"{path}.serves: {name!r} is not a rack of this hall")
            elif cdu_of_rack[rack] not in (-1, i):
                draft.problems.append(f"{path}.serves: {name!r} is already served by {draft.cdus[cdu_of_rack[rack]]}")
            else:
                cdu_of_rack[rack] = i
    index = {n.rpartition("/")[2]: i for i, n in enumerate(loops)}
    for i, loop in enumerate(draft.cdu_loop):
        if loop is not None and loop not in index:
            draft.problems.append(f"{draft.cdu_serves[i][0]}.loop: {loop!r} is not a loop of this file")
    loop_of_cdu = np.array([index.get(x, -1) if x else -1 for x in draft.cdu_loop], np.int32)
    return cdu_of_rack, loop_of_cdu


def _links(draft: _Draft, rack_of: dict[str, int], node_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    node: list[np.ndarray] = []
    plane: list[np.ndarray] = []
    for p, links, names in draft.plane_rows:
        for name in names or []:
            if name not in rack_of:
                draft.problems.append(f"$.halls.planes.racks: {name!r} is not a rack of this hall")
                continue
            rack = rack_of[name]
            nodes = np.arange(node_start[rack], node_start[rack + 1], dtype=np.int32)
            node.append(np.repeat(nodes, links))
            plane.append(np.full(len(nodes) * links, p, np.int32))
    if not node:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    all_nodes, all_planes = np.concatenate(node), np.concatenate(plane)
    order = np.lexsort((all_planes, all_nodes))
    return all_nodes[order], all_planes[order]


def _assemble(
    draft: _Draft, file: SiteFile, spec: SiteSpec, loops: list[str], profiles: dict[str, Profile], file_name: str
) -> Site:
    nodes = np.array(draft.rack_nodes, np.int32)
    node_start = np.concatenate([[0], np.cumsum(nodes)]).astype(np.int32)
    rack_of_node = np.repeat(np.arange(len(nodes), dtype=np.int32), nodes)
    gpus = np.array(draft.rack_gpus_per_node, np.int32)[rack_of_node]
    gpu_start = np.concatenate([[0], np.cumsum(gpus)]).astype(np.int32)
    rack_of = {n: i for i, n in enumerate(draft.racks)}
    parent, of_rack = _power_tree(draft, rack_of)
    cdu_of_rack, loop_of_cdu = _cooling(draft, rack_of, loops)
    node_of_link, plane_of_link = _links(draft, rack_of, node_start)
    sizes = {"site": 1, "hall": len(draft.halls), "supernode": len(draft.supernodes), "rack": len(draft.racks),
             "node": int(node_start[-1]), "gpu": int(gpu_start[-1]), "cdu": len(draft.cdus), "loop": len(loops),
             "feeder": len(draft.feeders), "link": len(node_of_link), "job": file.max_jobs}  # fmt: skip
    rack_profile = [g.profile for g in draft.rack_group]
    node_of_gpu = np.repeat(np.arange(sizes["node"], dtype=np.int32), gpus)
    rack_of_entity = {"rack": np.arange(len(nodes), dtype=np.int32), "node": rack_of_node,
                      "gpu": rack_of_node[node_of_gpu]}  # fmt: skip
    envelopes, problems = envelopes_of(file.controls, profiles, rack_profile, rack_of_entity, sizes)
    draft.problems += problems
    if draft.problems:
        raise ConfigError([f"{file_name}: {p}" for p in dict.fromkeys(draft.problems)])
    groups = draft.feeder_group
    nan = float("nan")
    return Site(
        file=file, spec_hash=spec.digest(),
        names={"site": [file.site], "hall": draft.halls, "supernode": draft.supernodes, "rack": draft.racks,
               "cdu": draft.cdus, "loop": loops, "feeder": draft.feeders},
        sizes=sizes, hall_of_rack=np.array(draft.rack_hall, np.int32),
        supernode_of_node=np.array(draft.node_supernode, np.int32), rack_of_node=rack_of_node,
        node_start_of_rack=node_start, node_of_gpu=node_of_gpu, gpu_start_of_node=gpu_start,
        cdu_of_rack=cdu_of_rack, loop_of_cdu=loop_of_cdu, hall_of_cdu=np.array(draft.cdu_hall, np.int32),
        parent_of_feeder=parent, feeders_of_rack=of_rack,
        priority_of_rack=np.array([g.priority for g in draft.rack_group], np.int32),
        spare_rack=np.array([g.spare for g in draft.rack_group], np.bool_),
        side_of_feeder=np.array([_SIDES[g.side] for g in groups], np.int32),
        inferred_feeder=np.array([g.inferred for g in groups], np.bool_),
        budget_w=np.array([nan if g.budget_w is None else g.budget_w for g in groups], np.float64),
        external_budget=np.array([g.external for g in groups], np.bool_),
        guaranteed_w=np.array([nan if g.guaranteed_w is None else g.guaranteed_w for g in groups], np.float64),
        node_of_link=node_of_link, plane_of_link=plane_of_link, planes=draft.planes, profile_of_rack=rack_profile,
        envelopes=envelopes, limits=limits_of(profiles, rack_profile, rack_of_entity, sizes),
    )  # fmt: skip
