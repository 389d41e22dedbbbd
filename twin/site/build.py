"""Builds a Site from its spec: names become indices, and all faults of the file come in one report.

Pure: files are read by the shell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from twin.catalogue import ConfigError
from twin.site.design import CduLayout, RackLayout, design_of
from twin.site.draft import MAX_JOBS, Draft, draft_of
from twin.site.envelope import envelopes_of, limits_of
from twin.site.file import SiteFile, first_problems, salvage, short
from twin.site.profile import Profile, parse_profile
from twin.site.safety import HALL_BUDGET
from twin.site.site import Envelope, Limit, Relation, Site, SiteSpec

_SIDES = {"none": 0, "A": 1, "B": 2}
_UPWARD = {"bottom": 1, "top": -1, "unknown": 0}


def build_site(spec: SiteSpec, file_name: str = "site") -> Site:
    """The site that a spec describes. Raises ConfigError with every fault found."""
    file, faults = salvage(SiteFile, spec.file)
    problems = [f"{file_name}: {p}" for p in faults.problems]
    profiles: dict[str, Profile] = {}
    for name, tree in sorted(spec.profiles.items()):
        try:
            profiles[name] = parse_profile(tree, f"profile {name}")
        except ConfigError as error:
            problems += error.problems
    if file is None:
        raise ConfigError(first_problems(problems, file_name))
    draft = draft_of(file, profiles, faults.names_lost)
    site = None if draft.too_large else _assemble(draft, file, spec, profiles, sound=not problems)
    problems += [f"{file_name}: {p}" for p in draft.problems]
    if problems or site is None:
        raise ConfigError(first_problems(problems, file_name))
    return site


def _power_tree(draft: Draft) -> tuple[np.ndarray, Relation]:
    feeders, racks = _Names(draft.feeders), _Names(draft.racks)
    parent = np.full(len(draft.feeders), -1, np.int32)
    of_rack: list[list[int]] = [[] for _ in draft.racks]
    for i, (path, served) in enumerate(draft.feeder_serves):
        home = draft.feeders[i].rpartition("/")[0]
        for name in served:
            child, rack = feeders.nearest(name, home), racks.nearest(name, home)
            if child is None and rack is None:
                draft.unknown(
                    f"{path}.serves: {name!r} is neither a feeder nor a rack of this file, or is not unique"
                )
            elif child is not None and rack is not None:
                draft.problems.append(
                    f"{path}.serves: {name!r} names both a feeder and a rack; expected distinct names"
                )
            elif child is not None and parent[child] not in (-1, i):
                draft.problems.append(
                    f"{path}.serves: {name!r} is already served by {draft.feeders[parent[child]]}"
                )
            elif child is not None:
                parent[child] = i
            elif rack is not None:
                of_rack[rack].append(i)
    looped = _first_in_a_loop(parent.tolist())
    if looped is not None:
        path = draft.feeder_serves[looped][0]
        draft.problems.append(f"{path}.serves: {draft.feeders[looped]} is part of a loop; expected a tree")
    return parent, Relation.of(of_rack)


def _first_in_a_loop(parent: list[int]) -> int | None:
    """The first feeder from which the way up never ends; every feeder is passed once."""
    passed_by = [-1] * len(parent)  # whose way up passed here
    for i in range(len(parent)):
        at = i
        while at >= 0 and passed_by[at] < 0:
            passed_by[at] = i
            at = parent[at]
        if at >= 0 and passed_by[at] == i:
            return i
    return None


class _Names:
    """Entities by their local names; -1 marks a name that several have."""

    def __init__(self, paths: list[str]) -> None:
        self.local: dict[str, int] = {}
        self.full: dict[str, int] = {}
        for i, path in enumerate(paths):
            name = path.rpartition("/")[2]
            self.local[name] = -1 if name in self.local else i
            self.full[path] = -1 if path in self.full else i

    def nearest(self, name: str, home: str) -> int | None:
        """The one match, or the one in the same hall where several halls use the same local names."""
        found = self.local.get(name)
        if found is not None and found < 0 and "/" in home:
            found = self.full.get(f"{home}/{name}")
        return None if found is None or found < 0 else found


def _giver_of_rack(
    draft: Draft, rack_of: dict[str, int], givers: list[str], serves: list[tuple[str, list[str]]]
) -> np.ndarray:
    """Return the CDU or leaf that serves each rack [n_rack]; -1 = none. A rack that two serve is noted."""
    of_rack = np.full(len(draft.racks), -1, np.int32)
    for i, (path, served) in enumerate(serves):
        for name in served:
            rack = rack_of.get(name)
            if rack is None:
                draft.unknown(f"{path}.serves: {name!r} is not a rack of this hall")
            elif of_rack[rack] not in (-1, i):
                draft.problems.append(f"{path}.serves: {name!r} is already served by {givers[of_rack[rack]]}")
            else:
                of_rack[rack] = i
    return of_rack


def _cooling(draft: Draft, rack_of: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    cdu_of_rack = _giver_of_rack(draft, rack_of, draft.cdus, draft.cdu_serves)
    index = {n.rpartition("/")[2]: i for i, n in enumerate(draft.loops)}
    for i, loop in enumerate(draft.cdu_loop):
        if loop is not None and loop not in index:
            draft.unknown(f"{draft.cdu_serves[i][0]}.loop: {short(loop)} is not a loop of this file")
    loop_of_cdu = np.array([index.get(x, -1) if x else -1 for x in draft.cdu_loop], np.int32)
    return cdu_of_rack, loop_of_cdu


def _cdu_layout(draft: Draft, loop_of_cdu: np.ndarray, supply: Envelope) -> CduLayout:
    groups = draft.loop_group
    heat_w, flow_lpm = (_watts([getattr(g, key) for g in groups]) for key in ("heat_w", "flow_lpm"))
    return CduLayout(loop_of_cdu, supply.safe, heat_w, flow_lpm)


def _loops(draft: Draft) -> dict[str, Any]:
    """The halls of a fleet that each loop serves, its part of their heat, and its machines."""
    racks, out = _Names(draft.racks), list[list[int]]()
    for path, served in draft.loop_serves:
        out.append([])
        for name in served:
            rack = racks.nearest(name, "")
            if rack is None:
                draft.unknown(f"{path}.serves: {name!r} is not a hall of this file, or is not unique")
            elif draft.rack_group[rack].guaranteed_w is None:
                draft.problems.append(
                    f"{path}.serves: {name!r} is no hall of a fleet; expected racks with guaranteed_w: "
                    "others hang on a loop by the `loop` of their CDU"
                )
            else:
                out[-1].append(rack)
    return {
        "halls_of_loop": Relation.of(out),
        "heat_pu_of_loop": np.array([g.heat_pu for g in draft.loop_group], np.float64),
        "machines_of_loop": _watts([g.machines for g in draft.loop_group]),
    }


def _links(draft: Draft, rack_of: dict[str, int], node_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    node: list[np.ndarray] = []
    plane: list[np.ndarray] = []
    for p, links, names in draft.plane_rows:
        for name in names:
            if name not in rack_of:
                draft.unknown(f"$.halls.planes.racks: {name!r} is not a rack of this hall")
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


def _switches(draft: Draft, rack_of: dict[str, int]) -> dict[str, Any]:
    """Racks, switches and planes below each switch, and how many switches share them."""
    switch_of = {name: i for i, name in enumerate(draft.switches)}
    racks: list[list[int]] = []
    below: list[list[int]] = []
    planes: list[list[int]] = []
    for i, (path, served, named) in enumerate(draft.switch_serves):
        for name in served:
            if name not in rack_of and name not in switch_of:
                draft.unknown(f"{path}.serves: {name!r} is neither a rack nor a switch of this hall")
            elif switch_of.get(name) == i:
                draft.problems.append(f"{path}.serves: {name!r} serves itself; expected another switch")
        racks.append([rack_of[n] for n in served if n in rack_of])
        below.append([switch_of[n] for n in served if n in switch_of and n not in rack_of])
        for name in named:
            if name not in draft.planes:
                draft.unknown(f"{path}.planes: {name!r} is not a plane of this file")
        planes.append([draft.planes[n] for n in named if n in draft.planes])
    return {
        "racks_of_switch": Relation.of(racks),
        "switches_of_switch": Relation.of(below),
        "planes_of_switch": Relation.of(planes),
        "ways_of_switch": np.array(draft.switch_ways, np.int32),
    }


def _sizes(draft: Draft, file: SiteFile, nodes: int, gpus: int, links: int) -> dict[str, int]:
    return {
        "site": 1,
        "hall": len(draft.halls),
        "supernode": len(draft.supernodes),
        "rack": len(draft.racks),
        "node": nodes,
        "gpu": gpus,
        "cdu": len(draft.cdus),
        "loop": len(draft.loops),
        "feeder": len(draft.feeders),
        "link": links,
        "switch": len(draft.switches),
        "storage": len(draft.storage),
        "queue": len(draft.queues),
        "tenant": len(draft.tenants),
        "priority": len(draft.priorities),
        "service": len(draft.services),
        "job": max(1, min(file.max_jobs, MAX_JOBS)),
    }


def _assemble(
    draft: Draft, file: SiteFile, spec: SiteSpec, profiles: dict[str, Profile], sound: bool
) -> Site | None:
    """The site; None if anything is wrong, in the draft or (`sound`) in the form of the file."""
    nodes = np.array(draft.rack_nodes, np.int32)
    node_start = np.concatenate([[0], np.cumsum(nodes)]).astype(np.int32)
    rack_of_node = np.repeat(np.arange(len(nodes), dtype=np.int32), nodes)
    gpus = np.array(draft.rack_gpus_per_node, np.int32)[rack_of_node]
    gpu_start = np.concatenate([[0], np.cumsum(gpus)]).astype(np.int32)
    rack_of = {n: i for i, n in enumerate(draft.racks)}
    parent, of_rack = _power_tree(draft)
    cdu_of_rack, loop_of_cdu = _cooling(draft, rack_of)
    leaf_of_rack = _giver_of_rack(draft, rack_of, draft.leaves, draft.leaf_serves)
    of_switches, loops = _switches(draft, rack_of), _loops(draft)
    node_of_link, plane_of_link = _links(draft, rack_of, node_start)
    sizes = _sizes(draft, file, int(node_start[-1]), int(gpu_start[-1]), len(node_of_link))
    rack_profile = [g.profile if g.profile in profiles else None for g in draft.rack_group]
    node_of_gpu = np.repeat(np.arange(sizes["node"], dtype=np.int32), gpus)
    racks = np.arange(len(nodes), dtype=np.int32)
    rack_of_entity = {"rack": racks, "node": rack_of_node, "gpu": rack_of_node[node_of_gpu]}
    envelopes, wrong = envelopes_of(file.controls, profiles, rack_profile, rack_of_entity, cdu_of_rack, sizes)
    envelopes[HALL_BUDGET] = _hall_budgets(draft, envelopes[HALL_BUDGET])
    draft.problems += wrong
    groups = draft.feeder_group
    if draft.problems or not sound:
        return None
    site = Site(
        file=file,
        spec_hash=spec.digest(),
        names={"site": [file.site], "supernode": draft.supernodes, **draft.named()},
        sizes=sizes,
        hall_of_rack=np.array(draft.rack_hall, np.int32),
        supernode_of_node=np.array(draft.node_supernode, np.int32),
        rack_of_node=rack_of_node,
        node_start_of_rack=node_start,
        node_of_gpu=node_of_gpu,
        gpu_start_of_node=gpu_start,
        cdu_of_rack=cdu_of_rack,
        leaf_of_rack=leaf_of_rack,
        loop_of_cdu=loop_of_cdu,
        hall_of_cdu=np.array(draft.cdu_hall, np.int32),
        **loops,
        parent_of_feeder=parent,
        feeders_of_rack=of_rack,
        priority_of_rack=np.array([g.priority for g in draft.rack_group], np.int32),
        upward_of_rack=np.array([_UPWARD[g.nodes_from] for g in draft.rack_group], np.int32),
        spare_rack=np.array([g.spare for g in draft.rack_group], np.bool_),
        spare_node=_spare_nodes(draft, node_start, rack_of_node),
        side_of_feeder=np.array([_SIDES[g.side] for g in groups], np.int32),
        inferred_feeder=np.array([g.inferred for g in groups], np.bool_),
        metered_rack=np.array([g.reports for g in draft.rack_group], np.bool_),
        metered_feeder=np.array([g.reports for g in groups], np.bool_),
        budget_w=_watts([g.budget_w for g in groups]),
        elsewhere=frozenset(draft.elsewhere),
        external_budget=np.array([g.external for g in groups], np.bool_),
        guaranteed_w=_watts([g.guaranteed_w for g in groups]),
        **of_switches,
        node_of_link=node_of_link,
        plane_of_link=plane_of_link,
        planes=list(draft.planes),
        profile_of_rack=rack_profile,
        envelopes=envelopes,
        limits=_limits(draft, profiles, rack_profile, rack_of_entity, sizes),
        design=design_of(
            profiles,
            RackLayout(rack_profile, nodes, np.array(draft.rack_gpus_per_node, np.int32), cdu_of_rack),
            _cdu_layout(draft, loop_of_cdu, envelopes["cdu.supply_temp_target_c"]),
        ),
    )
    site.freeze()
    return site


def _limits(
    draft: Draft,
    profiles: dict[str, Profile],
    rack_profile: list[str | None],
    rack_of_entity: dict[str, np.ndarray],
    sizes: dict[str, int],
) -> dict[str, Limit]:
    """Limits of the signals of racks with nodes: of racks of switches a profile says nothing."""
    nodes = draft.rack_nodes
    of_nodes = [p if n else None for p, n in zip(rack_profile, nodes, strict=True)]
    usual = [0 if name is None else profiles[name].nodes_per_rack for name in rack_profile]
    filled_pu = np.array([n / u if u else 1.0 for n, u in zip(nodes, usual, strict=True)], np.float64)
    return limits_of(profiles, of_nodes, rack_of_entity, sizes, filled_pu)


def _hall_budgets(draft: Draft, bounds: Envelope) -> Envelope:
    """Return the maximum budgets of a fleet's halls [n_rack]: never below their guarantees."""
    guaranteed_w = _watts([g.guaranteed_w for g in draft.rack_group])
    most_w = _watts([g.max_w for g in draft.rack_group])
    return replace(bounds, low=guaranteed_w, high=most_w, safe=guaranteed_w)


def _watts(limits: Sequence[float | None]) -> np.ndarray:
    """NaN: not stated."""
    return np.array([float("nan") if x is None else x for x in limits], np.float64)


def _spare_nodes(draft: Draft, node_start: np.ndarray, rack_of_node: np.ndarray) -> np.ndarray:
    """Nodes that are kept free: all of a spare rack, the last so many of another [n_node] bool."""
    nodes = np.array(draft.rack_nodes, np.int64)
    kept = [n if g.spare else g.spare_nodes for g, n in zip(draft.rack_group, nodes.tolist(), strict=True)]
    first = node_start[1:] - np.array(kept, np.int64)
    spare: np.ndarray = np.arange(len(rack_of_node)) >= first[rack_of_node]
    return spare
