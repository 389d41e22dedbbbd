"""Parts of a site: a site that is larger than one daemon, split into site files and the file of their hub.

A part holds whole CDUs, supernodes and feeders, so that its balances of heat and power close. Whatever is
larger than a part couples the parts: a feeder goes up to the hub, where `hall_budgets` shares it out; a loop
goes up to the hub, which mirrors its sensors and believes its leak detector. Names do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from twin.catalogue import F64, ConfigError, counted
from twin.site.draft import shares
from twin.site.file import FeederGroup, Hall, expand, ranges, within
from twin.site.profile import Profile
from twin.site.safety import budgets_w, lapse_power_w
from twin.site.site import Site

GRANT = "grant"  # the feeder of a part that its grants apply to
# Of the whole site: a part would take all demand for its own
OF_HUB = ("queues", "tenants", "priorities", "services")
AS_EACH_PART = ("periods_s", "history_s")  # of the hub as well: it receives meters and keeps their past
OF_HALL, ABOVE_HALLS = ("racks", "cdus", "feeders", "switches"), ("feeders", "loops")
Tree = dict[str, Any]


@dataclass(frozen=True)
class SplitSite:
    """Site files as trees: `parts`, by name, and their `hub`; `notes` say what couples the parts."""

    parts: dict[str, Tree]
    hub: Tree
    notes: list[str]


def split_site(site: Site, profiles: dict[str, Profile], count: int) -> SplitSite:
    """A site in so many parts of about as many GPUs each. Raises ConfigError where what couples its racks
    does not allow it.
    """
    plan = _Plan(site, count)
    names = [f"part-{i + 1}" for i in range(count)]
    _check_names(site, names)
    share_w = _shares_w(site, profiles, plan)
    parts = {name: _part(plan, at, float(share_w[at])) for at, name in enumerate(names)}
    return SplitSite(parts, _hub(plan, names, share_w, _most_w(plan, share_w)), _notes(plan))


class _Plan:
    """The part of each rack, and the equipment shared by several parts."""

    def __init__(self, site: Site, count: int) -> None:
        self.site, self.count = site, count
        n = site.sizes["rack"]
        nodes = np.diff(site.node_start_of_rack)
        gpus = np.diff(site.gpu_start_of_node[site.node_start_of_rack])
        self.weight = np.maximum(np.maximum(gpus, nodes), 1).astype(np.float64)
        self.below = [site.racks_below(f) for f in range(site.sizes["feeder"])]
        if n < 2:
            raise ConfigError([f"{site.file.site} has {counted('rack', n)}; a split needs at least 2"])
        if not 2 <= count <= n:
            raise ConfigError([f"--parts: expected 2 to {n}, the racks of the site, got {count}"])
        self._owner = list(range(n))
        self._couple()
        self.shared = self._shared_feeders()
        self.part_of_rack = self._packed()
        self.part_of_feeder = self._homes()
        self.cut_loops = self._cut(site.loop_of_cdu, self._part_of_cdu(), site.sizes["loop"])

    def root(self, rack: int) -> int:
        """Return the first of the racks coupled to this one."""
        while self._owner[rack] != rack:
            self._owner[rack] = self._owner[self._owner[rack]]
            rack = self._owner[rack]
        return rack

    def _join(self, racks: Iterable[int]) -> None:
        roots = sorted({self.root(int(r)) for r in racks})
        for root in roots[1:]:
            self._owner[root] = roots[0]

    def _couple(self) -> None:
        """Keep together the racks of a CDU, and those of a supernode."""
        site = self.site
        for cdu in range(site.sizes["cdu"]):
            self._join(np.flatnonzero(site.cdu_of_rack == cdu))
        rack = site.rack_of_node
        apart = np.flatnonzero((np.diff(rack) != 0) & (np.diff(site.supernode_of_node) == 0))
        for at in apart.tolist():
            self._join((rack[at], rack[at + 1]))
        for path in site.names["supernode"]:  # racks of its switches have no nodes
            name, _, more = path.rpartition("+")
            is_rack = site.entity("rack", path) is not None  # whose name ends so
            first = site.entity("rack", name) if more.isdigit() and not is_rack else None
            if first is not None:
                self._join(range(first, first + int(more) + 1))

    def _shared_feeders(self) -> list[int]:
        """Feeders above several parts, ascending. All others keep their racks together, and so does one that
        would carry only some of the racks that stay together.
        """
        most = self.weight.sum() / self.count
        shared = {f for f, racks in enumerate(self.below) if self.weight[racks].sum() > most + 0.5}
        waiting = [f for f in range(len(self.below)) if f not in shared]
        while waiting:
            for feeder in waiting:
                self._join(self.below[feeder])
            roots = np.array([self.root(r) for r in range(len(self._owner))], np.int64)
            waiting = [f for f in sorted(shared) if _is_torn(roots, self.below[f])]
            shared -= set(waiting)
        return sorted(shared)

    def _packed(self) -> np.ndarray:
        """Return the part of each rack [n_rack]: below the same shared feeders, in the order of the site."""
        n = len(self._owner)
        roots = [self.root(r) for r in range(n)]
        above: list[list[int]] = [[] for _ in range(n)]
        for feeder in self.shared:
            for rack in self.below[feeder].tolist():
                above[rack].append(feeder)
        classes: dict[tuple[int, ...], list[int]] = {}
        for root in sorted(set(roots)):
            classes.setdefault(tuple(above[root]), []).append(root)
        weight = np.zeros(n)
        np.add.at(weight, roots, self.weight)
        wanted = self._parts_of_classes(classes, weight)
        part_of_root, first = {}, 0
        for (_, members), parts in zip(classes.items(), wanted, strict=True):
            for root, part in zip(members, _dealt(weight[members], parts), strict=True):
                part_of_root[root] = first + part
            first += parts
        return np.array([part_of_root[root] for root in roots], np.int64)

    def _homes(self) -> list[int]:
        """Return the part of each feeder; -1 for those of the hub. A feeder without racks goes with its
        parent."""
        out = []
        for at in range(len(self.below)):
            while at >= 0 and not len(self.below[at]):
                at = int(self.site.parent_of_feeder[at])
            at_hub = at < 0 or at in self.shared
            out.append(-1 if at_hub else int(self.part_of_rack[self.below[at][0]]))
        return out

    def _parts_of_classes(self, classes: dict[tuple[int, ...], list[int]], weight: F64) -> list[int]:
        """Return the number of parts of each class of racks: at least one, by its GPUs."""
        sums = np.array([weight[members].sum() for members in classes.values()])
        room = [len(members) for members in classes.values()]
        parts = [1] * len(room)
        if len(room) > self.count:
            raise ConfigError(
                [f"--parts: expected at least {len(room)}: so many groups of racks have shared feeders of "
                 f"their own ({self._named(next(iter(classes)))}, ...), got {self.count}"]
            )  # fmt: skip
        while sum(parts) < self.count:
            load = [s / p if p < r else -1.0 for s, p, r in zip(sums, parts, room, strict=True)]
            at = int(np.argmax(load))
            if load[at] < 0:
                raise ConfigError(
                    [f"--parts: expected at most {sum(parts)}: racks with a CDU, a supernode or a smaller "
                     f"feeder in common stay together, got {self.count}"]
                )  # fmt: skip
            parts[at] += 1
        return parts

    def _named(self, feeders: Sequence[int]) -> str:
        return self.site.name("feeder", feeders[0]) if feeders else "racks without a shared feeder"

    def _part_of_cdu(self) -> np.ndarray:
        part = np.full(self.site.sizes["cdu"], -1, np.int64)
        cooled = self.site.cdu_of_rack >= 0
        part[self.site.cdu_of_rack[cooled]] = self.part_of_rack[cooled]
        return part

    @staticmethod
    def _cut(group: np.ndarray, part: np.ndarray, n: int) -> set[int]:
        """Return the groups whose members are not in one part."""
        return {g for g in range(n) if len(set(part[(group == g) & (part >= 0)].tolist())) != 1}

    def sums(self, rack_w: F64) -> F64:
        """Return the sum over the racks of each part [n_part]."""
        out = np.zeros(self.count)
        np.add.at(out, self.part_of_rack, rack_w)
        return out

    def parts_below(self, feeder: int) -> list[int]:
        """Return the parts that a shared feeder carries, ascending."""
        return sorted(set(self.part_of_rack[self.below[feeder]].tolist()))


def _is_torn(roots: np.ndarray, racks: np.ndarray) -> bool:
    """Return True if some coupled racks are not all in `racks`."""
    inside = np.zeros(len(roots), np.bool_)
    inside[racks] = True
    return bool(np.intersect1d(roots[inside], roots[~inside]).size)


def _dealt(weight: F64, parts: int) -> list[int]:
    """The part of each member: runs in their order, each with one member at least and about equal sums."""
    out, part, done, total = [], 0, 0.0, float(weight.sum())
    for i, w in enumerate(weight.tolist()):
        full = done + w / 2 > total * (part + 1) / parts
        needed = len(weight) - i <= parts - 1 - part
        if i and part < parts - 1 and (full or needed):
            part += 1
        out.append(part)
        done += w
    return out


def _check_names(site: Site, names: list[str]) -> None:
    taken = {path.rpartition("/")[2] for table in ("rack", "feeder", "hall") for path in site.names[table]}
    grants = {f"{GRANT}-{path.rpartition('/')[2]}" for path in site.names["hall"]}
    clash = sorted(taken & {GRANT, *grants, *names})
    if clash:
        raise ConfigError(
            [f"the site has a {clash[0]!r} already; expected none, as a part is to be called so"]
        )


def _shares_w(site: Site, profiles: dict[str, Profile], plan: _Plan) -> F64:
    """The guaranteed share of each part: its load after all leases lapse, and of what shared feeders have
    beyond that the same multiple for all parts below one.
    """
    lapsed_w = np.ceil(plan.sums(lapse_power_w(site, profiles)))
    if (unknown := ~(np.isfinite(lapsed_w) & (lapsed_w > 0))).any():
        part = int(np.flatnonzero(unknown)[0])
        rack = site.name("rack", int(np.flatnonzero(plan.part_of_rack == part)[0]))
        raise ConfigError(
            [f"the load of part {part + 1} ({rack}, ...) after a lapse is unknown or none; expected a "
             "profile with safe caps for each rack, and nodes in some: see `racktwin site check`"]
        )  # fmt: skip
    most = np.full(plan.count, np.inf)
    budget_w = budgets_w(site)
    for feeder in plan.shared:
        parts = plan.parts_below(feeder)
        if np.isfinite(budget_w[feeder]):
            most[parts] = np.minimum(most[parts], budget_w[feeder] / lapsed_w[parts].sum())
    if (most < 1).any():
        raise ConfigError(
            ["a shared feeder does not carry its parts after all leases lapse; see `racktwin site check`"]
        )
    full_w = np.maximum(plan.sums(site.design.rack_max_w), lapsed_w)
    out: F64 = np.maximum(np.floor(np.minimum(lapsed_w * most, full_w)), lapsed_w)
    return out


def _most_w(plan: _Plan, share_w: F64) -> F64:
    """The most that each part can draw, within the budgets of the shared feeders above it."""
    site, full_w = plan.site, plan.sums(plan.site.design.rack_max_w)
    for feeder in plan.shared:
        if np.isfinite(site.budget_w[feeder]):
            parts = plan.parts_below(feeder)
            full_w[parts] = np.minimum(full_w[parts], site.budget_w[feeder])
    return np.maximum(np.floor(full_w), share_w)


def _part(plan: _Plan, part: int, share_w: float) -> Tree:
    """Return the site file of one part."""
    site = plan.site
    racks = np.flatnonzero(plan.part_of_rack == part)
    tree = _plain(site.file, without=("halls", "loops", "feeders", *OF_HUB))
    inside = {site.name("rack", r) for r in racks.tolist()}
    cut = {site.names["loop"][i].rpartition("/")[2] for i in plan.cut_loops}
    feeders = _feeders(plan, part)
    planes = _planes(plan, inside)
    halls = []
    for hall, name in _halls(site):
        prefix = f"{site.file.site}/{name}"
        if made := _hall_of_part(hall, prefix, inside, feeders.get(prefix, []), cut, planes):
            halls.append(made)
    tree["halls"] = halls
    if top := feeders.pop("", []):
        tree["feeders"] = top
    loops = {cdu["loop"] for hall in halls for cdu in hall.get("cdus", []) if "loop" in cdu}
    kept = [
        _plain(group) | {"name": n} for group in site.file.loops for n in expand(group.name) if n in loops
    ]
    tree |= {"loops": kept} if kept else {}
    tree["elsewhere"] = _elsewhere(site, tree)
    _add_grant(plan, tree, racks, share_w)
    return tree


def _halls(site: Site) -> list[tuple[Hall, str]]:
    return [(hall, name) for hall in site.file.halls for name in expand(hall.name)]


def _plain(struct: msgspec.Struct, without: tuple[str, ...] = ()) -> Tree:
    tree: Tree = msgspec.to_builtins(struct)
    return {key: value for key, value in tree.items() if key not in without}


def _hall_of_part(
    hall: Hall, prefix: str, inside: set[str], feeders: list[Tree], cut: set[str], known: set[str]
) -> Tree | None:
    """The entry of a hall with the racks `inside` it and what serves them; None where the part has nothing in
    it. `known`: the planes of the part.
    """
    own = {n for group in hall.racks for n in expand(group.name) if f"{prefix}/{n}" in inside}
    racks = [_plain(group) | {"name": run} for group in hall.racks for run in within(group.name, own)]
    if not racks:
        return {"name": _local(prefix), "feeders": feeders} if feeders else None
    made: Tree = {"name": prefix.rpartition("/")[2], "racks": racks}
    cdus = []
    for cdu in hall.cdus:
        for name, served in _served(cdu.name, cdu.serves):
            if runs := ranges(n for n in served if n in own):
                loop = {} if cdu.loop is None or cdu.loop in cut else {"loop": cdu.loop}
                cdus.append({"name": name, "serves": runs} | loop)
    leaves = [
        {"name": name, "serves": runs}
        for leaf in hall.leaves
        for name, served in _served(leaf.name, leaf.serves)
        if (runs := ranges(n for n in served if n in own))
    ]
    planes = []
    for plane in hall.planes:
        names = [n for pattern in plane.racks for n in expand(pattern)]
        if not names or any(n in own for n in names):
            planes.append(_plain(plane) | ({"racks": ranges(n for n in names if n in own)} if names else {}))
    rows = {"cdus": cdus, "feeders": feeders, "planes": planes, "leaves": leaves,
            "switches": _switches(hall, own, known)}  # fmt: skip
    return made | {key: value for key, value in rows.items() if value}


def _planes(plan: _Plan, inside: set[str]) -> set[str]:
    """Return the planes of the racks `inside`."""
    return {
        plane.name
        for hall, name in _halls(plan.site)
        for plane in hall.planes
        for pattern in plane.racks or [group.name for group in hall.racks]
        if any(f"{plan.site.file.site}/{name}/{n}" in inside for n in expand(pattern))
    }


def _switches(hall: Hall, own: set[str], planes: set[str]) -> list[Tree]:
    """Return the switches of the part's racks, those above them, and those without known racks."""
    served = [
        (switch, {n for pattern in switch.serves for n in expand(pattern)})
        for switch in hall.switches
        if not switch.planes or planes & {*switch.planes}
    ]
    kept = own | {n for switch, below in served if not below for n in expand(switch.name)}
    while more := {n for switch, below in served if kept & below for n in expand(switch.name)} - kept:
        kept |= more
    rows = []
    for switch, below in served:
        if not below or kept & below:
            row = _plain(switch) | {"serves": ranges(kept & below)}
            rows.append(
                row | ({"planes": [n for n in switch.planes if n in planes]} if switch.planes else {})
            )
    return rows


def _served(name: str, serves: list[str]) -> list[tuple[str, list[str]]]:
    """Return each of several providers with its block of the served names."""
    givers, served = expand(name), [n for pattern in serves for n in expand(pattern)]
    return list(zip(givers, shares(served, len(givers)), strict=True))


def _groups(site: Site) -> list[FeederGroup]:
    """Return the entry of each feeder, in the order of the table."""
    found: dict[str, FeederGroup] = {}
    for hall, name in _halls(site):
        for group in hall.feeders:
            found |= {f"{site.file.site}/{name}/{n}": group for n in expand(group.name)}
    for group in site.file.feeders:
        found |= {f"{site.file.site}/{n}": group for n in expand(group.name)}
    return [found[path] for path in site.names["feeder"]]


def _feeders(plan: _Plan, part: int) -> dict[str, list[Tree]]:
    """Return the feeders of a part, by hall; under "" those above halls."""
    site, groups = plan.site, _groups(plan.site)
    children, direct = site.below_feeder()
    out: dict[str, list[Tree]] = {}
    for feeder in (f for f, at in enumerate(plan.part_of_feeder) if at == part):
        home, _, name = site.names["feeder"][feeder].rpartition("/")
        served = [_local(site.name("feeder", c)) for c in children.of_row(feeder).tolist()]
        served += [_local(site.name("rack", r)) for r in direct.of_row(feeder).tolist()]
        row = _plain(groups[feeder]) | {"name": name, "serves": ranges(served)}
        out.setdefault("" if home == site.file.site else home, []).append(row)
    return out


def _local(path: str) -> str:
    return path.rpartition("/")[2]


def _elsewhere(site: Site, tree: Tree) -> list[str]:
    """Halls, racks, CDUs, feeders, loops and switches that the tree does not hold, as patterns. Also those of
    halls that it does not hold: a local name that is ambiguous in the whole site is so in a part.
    """
    halls = {hall["name"]: hall for hall in tree["halls"]}
    here = {*halls, *_names_of(tree, *ABOVE_HALLS)}
    out = [*site.file.elsewhere, *(name for _, name in _halls(site) if name not in here)]
    out += ranges(
        {n for key in ABOVE_HALLS for row in getattr(site.file, key) for n in expand(row.name)} - here
    )
    for hall, name in _halls(site):
        names = {n for key in OF_HALL for row in getattr(hall, key) for n in expand(row.name)}
        out += [f"{name}/{run}" for run in ranges(names - _names_of(halls.get(name, {}), *OF_HALL))]
    return out


def _names_of(tree: Tree, *keys: str) -> set[str]:
    return {n for key in keys for row in tree.get(key, []) for n in expand(row["name"])}


def _add_grant(plan: _Plan, tree: Tree, racks: np.ndarray, share_w: float) -> None:
    """Put the feeder that the grants of the hub apply to above all that feeds these racks.

    A rack that a shared feeder feeds directly is below it directly, for its share of that side.
    """
    site, part = plan.site, int(plan.part_of_rack[racks[0]])
    under: dict[str, list[str]] = {}
    for feeder, at in enumerate(plan.part_of_feeder):
        above = int(site.parent_of_feeder[feeder])
        if at == part and (above < 0 or plan.part_of_feeder[above] != part):
            home, _, name = site.names["feeder"][feeder].rpartition("/")
            under.setdefault(home, []).append(name)
    for rack in racks.tolist():
        feeders = site.feeders_of_rack.of_row(rack).tolist()
        if not feeders or any(f in plan.shared for f in feeders):
            home, _, name = site.names["rack"][rack].rpartition("/")
            under.setdefault(home, []).append(name)
    terms: Tree = {"name": GRANT, "external": True, "guaranteed_w": share_w, "reports": False}
    served = ranges(under.get(site.file.site, []))
    only = len(tree["halls"]) == 1 and not served
    for hall in tree["halls"]:
        below = ranges(under.get(f"{site.file.site}/{hall['name']}", []))
        row: Tree = terms if only else {"name": f"{GRANT}-{hall['name']}", "reports": False}
        if below:
            hall.setdefault("feeders", []).append(row | {"serves": below})
            served.append(str(row["name"]))
    if not only:
        tree.setdefault("feeders", []).append(terms | {"serves": served})


def _hub(plan: _Plan, names: list[str], share_w: F64, most_w: F64) -> Tree:
    """Return the site file of the hub: parts as halls, the shared feeders above them, and the divided
    loops."""
    site, groups = plan.site, _groups(plan.site)
    children, _ = site.below_feeder()
    halls: dict[str, Tree] = {}
    for part, name in enumerate(names):
        first = int(np.flatnonzero(plan.part_of_rack == part)[0])
        hall = _local(site.names["hall"][int(site.hall_of_rack[first])])
        row = {"name": name, "guaranteed_w": float(share_w[part]), "max_w": float(most_w[part])}
        halls.setdefault(hall, {"name": hall, "racks": []})["racks"].append(row)
    top: list[Tree] = []
    for feeder in (f for f, at in enumerate(plan.part_of_feeder) if at < 0):
        home, _, name = site.names["feeder"][feeder].rpartition("/")
        lower = [c for c in children.of_row(feeder).tolist() if plan.part_of_feeder[c] < 0]
        covered = {p for c in lower for p in plan.parts_below(c)}
        served = [_local(site.name("feeder", c)) for c in lower]
        served += [names[p] for p in plan.parts_below(feeder) if p not in covered]
        hall = _local(home)
        rows = (
            top
            if home == site.file.site
            else halls.setdefault(hall, {"name": hall}).setdefault("feeders", [])
        )
        rows.append(_plain(groups[feeder]) | {"name": name, "serves": served})
    cut = {_local(site.names["loop"][i]) for i in plan.cut_loops}
    for room, name in _halls(site):
        made = _without_racks(room, cut)
        if made or not room.racks:
            halls[name] = halls.get(name, {"name": name}) | made
    tree: Tree = {"site": site.file.site, "halls": list(halls.values())}
    tree |= {"feeders": top} if top else {}
    loops = [_plain(g) | {"name": n} for g in site.file.loops for n in expand(g.name) if n in cut]
    tree |= {"loops": loops} if loops else {}
    whole = _plain(site.file)
    tree |= {key: whole[key] for key in (*OF_HUB, *AS_EACH_PART) if key in whole}
    tree["elsewhere"] = _elsewhere(site, tree)
    tree["policies"] = {"hall_budgets": {"authority": "advise"}}
    return tree


def _without_racks(hall: Hall, cut: set[str]) -> Tree:
    """Whatever of a hall is of no part: CDUs that serve no rack; of a hall without racks its switches too."""
    cdus = [
        {"name": name} | ({"loop": cdu.loop} if cdu.loop in cut else {})
        for cdu in hall.cdus
        for name, served in _served(cdu.name, cdu.serves)
        if not served
    ]
    switches = [] if hall.racks else [_plain(s) | {"planes": []} for s in hall.switches]
    return {key: rows for key, rows in (("cdus", cdus), ("switches", switches)) if rows}


def _notes(plan: _Plan) -> list[str]:
    """Return the couplings between the parts, and the cost of each."""
    site, out = plan.site, []
    if shared := [site.name("feeder", f) for f in plan.shared]:
        out.append(
            f"shared feeders ({len(shared)}): {_list(shared)}; the hub shares out their budgets, and a part "
            "without a grant has its guaranteed share. A GPU of high priority takes no power from one of low "
            "priority in another part, unless hub.yaml gives the parts priorities"
        )
    else:
        out.append("no feeder is shared, so the hub is not needed for power")
    if loops := [site.names["loop"][i] for i in sorted(plan.cut_loops)]:
        out.append(
            f"loops that are not of one part: {_list(loops)}; the hub mirrors their sensors. No part "
            "balances them or saves on them. A leak at a rack is isolated by its part; that a loop's "
            "detector is wet too is a second alarm, of the hub. To have their heat shared out as a feeder's "
            "power, give each in hub.yaml the parts that it `serves`, its `heat_w` and its `machines`"
        )
    out.append(
        "a job on nodes of several parts is one job to each of them: a cap in one slows all of it, and its "
        "stragglers are looked for within each part"
    )
    out.append(
        "blast radius and limits of policies hold for each part by itself: lower them where they matter"
    )
    if any(getattr(site.file, key) for key in OF_HUB):
        out.append(
            "queues, tenants, priorities and services went to hub.yaml: their demand is of the whole site"
        )
    return out


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
