"""Site: the installed equipment and its topology as index maps; names in, indices out; sums up the tree.

Built once from the site file and the profiles (`twin.site.build`), then read only. Entities of a rack are
contiguous: nodes of a rack, GPUs of a node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from twin import kernels
from twin.catalogue import F32, F64, I32, I64
from twin.site.design import Design
from twin.site.file import SiteFile

T = TypeVar("T")
MAX_REMEMBERED = 250_000  # names of nodes and GPUs that were asked for, so that they are parsed once
MOST_PARSED = 1000  # names asked for at once; of more all of the table are worked out together
LARGE_GPUS = 20_000  # source: estimate; a tick of 83,376 has to be done in 100 ms


class SiteSpec(msgspec.Struct, frozen=True):
    """Source of a site: the file's tree and the trees of its profiles."""

    file: dict[str, Any]
    profiles: dict[str, dict[str, Any]]

    def packed(self) -> bytes:
        """Return canonical JSON: equal specs give equal bytes."""
        return msgspec.json.encode(self, order="deterministic")

    def digest(self) -> str:
        """Return the name of this site in traces and journals."""
        return hashlib.blake2b(self.packed(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Relation:
    """Index pairs in rows: the members of row i are `member[start[i]:start[i + 1]]`, ascending."""

    start: I32  # [n_rows + 1]
    member: I32

    @classmethod
    def of(cls, lists: list[list[int]]) -> Relation:
        """Return a relation from one list of members per row."""
        start = np.zeros(len(lists) + 1, np.int32)
        start[1:] = np.cumsum([len(x) for x in lists])
        flat = [i for x in lists for i in sorted(set(x))]
        if len(flat) != int(start[-1]):
            start[1:] = np.cumsum([len(set(x)) for x in lists])
        return cls(start, np.array(flat, np.int32))

    def of_row(self, row: int) -> I32:
        """Return the members of one row."""
        return self.member[self.start[row] : self.start[row + 1]]

    @property
    def row_of_member(self) -> I32:
        """Return the row of each pair."""
        return np.repeat(np.arange(len(self.start) - 1, dtype=np.int32), np.diff(self.start))

    def sums(self, values: F32 | F64) -> F64:
        """Return the sum of the members' values per row, in float64; NaN members make the row NaN; empty
        rows are 0."""
        out = np.zeros(len(self.start) - 1, np.float64)
        if len(self.member):
            filled = np.flatnonzero(np.diff(self.start))
            out[filled] = np.add.reduceat(values[self.member].astype(np.float64), self.start[filled])
        return out


@dataclass(frozen=True, slots=True)
class Envelope:
    """Allowed range of one control, per entity [n]: NaN bounds mean "not controllable here"."""

    low: F64
    high: F64
    safe: F64
    slew_per_s: F64
    deadband: float
    blast_radius: int


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits of one signal, per entity [n]; NaN = none stated, and none stated = not evaluated."""

    guard: F64
    max: F64
    slew_per_s: F64


@dataclass(slots=True)
class Site:
    """A built site. `*_of_*` maps give -1 for "none"."""

    file: SiteFile
    spec_hash: str
    names: dict[str, list[str]]  # full paths; not for node, gpu and link, which are computed
    sizes: dict[str, int]
    hall_of_rack: I32
    supernode_of_node: I32
    rack_of_node: I32
    node_start_of_rack: I32  # [n_rack + 1]
    node_of_gpu: I32
    gpu_start_of_node: I32  # [n_node + 1]
    cdu_of_rack: I32
    leaf_of_rack: I32  # nodes on one leaf are one network hop apart; -1 = not stated
    loop_of_cdu: I32
    hall_of_cdu: I32
    halls_of_loop: Relation  # halls of a fleet that share its heat
    heat_pu_of_loop: F64  # of the power of these, that it takes
    machines_of_loop: F64  # chillers or pumps that share its heat evenly; NaN: not stated
    parent_of_feeder: I32
    feeders_of_rack: Relation  # the feeders that serve it directly
    priority_of_rack: I32
    upward_of_rack: I32  # 1: its nodes are counted from the bottom, -1: from the top, 0: not stated
    spare_rack: np.ndarray  # bool
    spare_node: np.ndarray  # bool: all of a spare rack, and the last `spare_nodes` of each other one
    side_of_feeder: I32  # 0 none, 1 A, 2 B
    inferred_feeder: np.ndarray  # bool
    metered_rack: np.ndarray  # bool: it has meters of its own
    metered_feeder: np.ndarray  # bool
    budget_w: F64
    external_budget: np.ndarray  # bool
    guaranteed_w: F64
    racks_of_switch: Relation  # a leaf's
    switches_of_switch: Relation  # a spine's
    planes_of_switch: Relation  # whose links it carries; none: all
    ways_of_switch: I32  # switches that serve the same and share the links
    node_of_link: I32
    plane_of_link: I32
    planes: list[str]
    profile_of_rack: list[str | None]
    envelopes: dict[str, Envelope]
    limits: dict[str, Limit]
    design: Design
    elsewhere: frozenset[str] = frozenset()  # full paths of what other daemons of a divided site mirror
    _local: dict[str, dict[str, int]] = field(default_factory=dict)
    _whole: dict[str, list[str]] = field(default_factory=dict, init=False)  # all paths of tables, if known
    _rack_of_gpu: I32 | None = None
    _below: tuple[Relation, Relation] | None = field(default=None, init=False)
    _served: tuple[I64, I64] | None = field(default=None, init=False)
    _derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def rack_of_gpu(self) -> I32:
        """Return the rack of each GPU [n_gpu]."""
        if self._rack_of_gpu is None:
            self._rack_of_gpu = self.rack_of_node[self.node_of_gpu]
        return self._rack_of_gpu

    def beside_gpu_w(self, gpus: I64) -> F64:
        """Return the power of the node beside each of these GPUs, W, which no cap reaches; 0 if unknown."""
        rack, node = self.rack_of_gpu[gpus], self.node_of_gpu[gpus]
        node_w = np.nan_to_num((self.design.cpu_idle_w + self.design.node_other_w)[rack])
        return np.asarray(node_w / np.maximum(np.diff(self.gpu_start_of_node)[node], 1), np.float64)

    @property
    def is_large(self) -> bool:
        """Return True if occasional work is too expensive for a single tick."""
        return self.sizes["gpu"] >= LARGE_GPUS

    def derived(self, name: str, make: Callable[[], T], of: object = None) -> T:
        """A value that follows from the site, and from `of`, alone; made when it is first asked for with this
        `of`. Not to be written to.
        """
        known = self._derived.get(name)
        if known is None or known[0] != of:
            known = self._derived[name] = of, make()
        found: T = known[1]
        return found

    def gpus_of_rack(self, rack: int) -> slice:
        """Return the run of GPUs in a rack."""
        first, last = self.node_start_of_rack[rack], self.node_start_of_rack[rack + 1]
        return slice(int(self.gpu_start_of_node[first]), int(self.gpu_start_of_node[last]))

    def nodes_below(self, node: int) -> I32:
        """Return the nodes of its rack that leaking coolant of a node may reach; all others if unknown."""
        rack = self.rack_of_node[node]
        first, last = self.node_start_of_rack[rack : rack + 2].tolist()
        upward = int(self.upward_of_rack[rack])
        others = np.arange(first if upward >= 0 else node + 1, node if upward > 0 else last, dtype=np.int32)
        out: I32 = others[others != node]
        return out

    def name(self, table: str, entity: int) -> str:
        """Return the full path of an entity."""
        if table == "node":
            rack = int(self.rack_of_node[entity])
            return f"{self.names['rack'][rack]}/node{entity - int(self.node_start_of_rack[rack])}"
        if table == "gpu":
            node = int(self.node_of_gpu[entity])
            return f"{self.name('node', node)}/gpu{entity - int(self.gpu_start_of_node[node])}"
        if table == "link":
            node, plane = int(self.node_of_link[entity]), int(self.plane_of_link[entity])
            first = int(np.searchsorted(self.node_of_link, node))
            ordinal = int((self.plane_of_link[first:entity] == plane).sum())
            return f"{self.name('node', node)}/{self.planes[plane]}{ordinal}"
        if table == "job":
            return f"{self.file.site}/job{entity}"
        return self.names[table][entity]

    def entity(self, table: str, name: str) -> int | None:
        """Return the index of the entity with this full path or unique local name; None if there is none."""
        head, _, tail = name.rpartition("/")
        if table == "job":
            slot = _number(tail, "job") if head == self.file.site else None
            return slot if slot is not None and slot < self.sizes["job"] else None
        if table in ("node", "gpu"):
            known = self._local.setdefault(table, {})
            if name in known:
                return known[name]
            parent = self.entity("rack" if table == "node" else "node", head) if head else None
            ordinal = _number(tail, table)
            if parent is None or ordinal is None:
                return None
            starts = self.node_start_of_rack if table == "node" else self.gpu_start_of_node
            index = int(starts[parent]) + ordinal
            if index >= starts[parent + 1]:
                return None
            if len(known) < MAX_REMEMBERED:
                known[name] = index
            return index
        if table == "link":
            return self._link(self.entity("node", head) if head else None, tail)
        if table not in self._local:
            self._local[table] = _local_names(self.names.get(table, []), self.elsewhere)
        found = self._local[table].get(name)
        return None if found is None or found < 0 else found

    def entities(self, table: str, names: list[str]) -> I32:
        """Return the indices of many entities [k], as `entity` finds them; -1 for none."""
        index = np.empty(len(names), np.int32)
        self.look_up(table, lambda known, paths: kernels.find_places(names, known, paths, index))
        self.parse_missing(table, index, names.__getitem__)
        return index

    def look_up(self, table: str, find: Callable[[dict[str, int], list[str]], int]) -> None:
        """Let `find` look for names among those that are known, and again among all if many are missing.

        It gets the places of known names, and all names in order or nothing, as `kernels.find_places` does,
        and returns how many it did not find.
        """
        known = self._local.setdefault(table, {}) if table in ("node", "gpu") else {}
        missing = find(known, self._whole.get(table, []))
        if (
            table not in self._whole
            and missing > MOST_PARSED
            and (0 < self.sizes[table] <= MAX_REMEMBERED - len(known))
        ):
            self._whole[table] = paths = self._paths(table)
            known.update((path, i) for i, path in enumerate(paths))
            find(known, paths)

    def parse_missing(self, table: str, index: I32, name_of: Callable[[int], str]) -> None:
        """Look up one by one the names [k] that `look_up` did not find: those with -1 in `index` [k]."""
        for k in np.flatnonzero(index < 0).tolist():
            found = self.entity(table, name_of(k))
            index[k] = -1 if found is None else found

    def _paths(self, table: str) -> list[str]:
        """Return the full paths of all nodes or GPUs."""
        if table not in ("node", "gpu"):
            return []
        above, starts = self.names["rack"], self.node_start_of_rack
        if table == "gpu":
            above, starts = self._paths("node"), self.gpu_start_of_node
        sizes = np.diff(starts).tolist()
        return [f"{path}/{table}{k}" for path, n in zip(above, sizes, strict=True) for k in range(n)]

    def is_elsewhere(self, name: str) -> bool:
        """Return True if another daemon of the divided site mirrors this entity, or one above it.

        Not so a local name that something here has as well: whom it means nobody can say.
        """
        if not self.elsewhere:
            return False
        known = self._local.get("elsewhere")
        if known is None:
            here = {suffix for paths in self.names.values() for path in paths for suffix in _suffixes(path)}
            names = {suffix for path in self.elsewhere for suffix in _suffixes(path)}
            known = self._local["elsewhere"] = dict.fromkeys(names - here, -1)
        while name and name not in known:
            name = name.rpartition("/")[0]
        return bool(name)

    def _link(self, node: int | None, tail: str) -> int | None:
        for plane, name in enumerate(self.planes):
            ordinal = _number(tail, name)
            if node is None or ordinal is None:
                continue
            first, last = np.searchsorted(self.node_of_link, [node, node + 1])
            same = np.flatnonzero(self.plane_of_link[first:last] == plane)
            return int(first + same[ordinal]) if ordinal < len(same) else None
        return None

    def freeze(self) -> None:
        """Make all arrays read only, so that no plug-in can widen its own envelope."""
        self.design.freeze()
        frozen = [*self.envelopes.values(), *self.limits.values(), self.feeders_of_rack,
                  self.halls_of_loop, self.racks_of_switch, self.switches_of_switch,
                  self.planes_of_switch, self]  # fmt: skip
        for part in frozen:
            for array in (getattr(part, f.name) for f in fields(cast(Any, part))):
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False

    def sum_by_rack(self, table: str, values: F32 | F64) -> F64:
        """Return the sum of a node or GPU quantity per rack [n_rack] float64; NaN where a member is NaN."""
        start = (
            self.node_start_of_rack if table == "node" else self.gpu_start_of_node[self.node_start_of_rack]
        )
        return _segment_sum(values, start)

    def below_feeder(self) -> tuple[Relation, Relation]:
        """Return (feeders, racks) directly below each feeder."""
        if self._below is None:
            n, served = len(self.parent_of_feeder), self.feeders_of_rack
            fed = np.flatnonzero(self.parent_of_feeder >= 0).astype(np.int32)
            self._below = (
                _grouped(self.parent_of_feeder[fed], fed, n),
                _grouped(served.member, served.row_of_member, n),
            )
        return self._below

    def served_racks(self) -> tuple[I64, I64]:
        """Return (feeder, rack) of all pairs, ascending by feeder, including indirect ones. Read only."""
        if self._served is None:
            direct, n_rack = self.feeders_of_rack, max(self.sizes["rack"], 1)
            feeder, rack = direct.member.astype(np.int64), direct.row_of_member.astype(np.int64)
            pairs = np.zeros(0, np.int64)
            while len(feeder):
                pairs = np.union1d(pairs, feeder * n_rack + rack)
                above = self.parent_of_feeder[feeder]
                feeder, rack = above[above >= 0].astype(np.int64), rack[above >= 0]
            self._served = pairs // n_rack, pairs % n_rack
            for array in self._served:
                array.flags.writeable = False
        return self._served

    def subtree(self, feeder: int) -> list[int]:
        """Return the feeders below and including this one, ascending."""
        children, _ = self.below_feeder()
        inside = [feeder]
        for at in inside:
            inside += children.of_row(at).tolist()
        return sorted(inside)

    def root_of_feeder(self) -> I32:
        """Return the root feeder of each feeder's tree [n_feeder]."""
        is_root = self.parent_of_feeder < 0
        at = np.where(is_root, np.arange(len(is_root)), self.parent_of_feeder).astype(np.int32)
        while not is_root[at].all():  # each step doubles the distance covered, so a long chain takes few
            at = at[at]
        return at

    def racks_below(self, feeder: int) -> I32:
        """Return the racks that this feeder reaches, ascending."""
        _, racks = self.below_feeder()
        found = [racks.of_row(f) for f in self.subtree(feeder)]
        return cast(I32, np.unique(np.concatenate(found)))


def _grouped(row: I32, member: I32, n: int) -> Relation:
    """Return pairs, sorted by member, as rows."""
    start = np.zeros(n + 1, np.int32)
    start[1:] = np.cumsum(np.bincount(row, minlength=n))
    return Relation(start, member[np.argsort(row, kind="stable")])


def _number(tail: str, head: str) -> int | None:
    """Return the number after `head`, as `name` writes it; None for another text."""
    digits = tail[len(head) :]
    if not tail.startswith(head) or not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        return None
    return int(digits)


def _segment_sum(values: F32 | F64, start: I32) -> F64:
    out = np.zeros(len(start) - 1, np.float64)
    filled = np.flatnonzero(np.diff(start))
    if len(filled):
        # reduceat over an empty segment would return a neighbour's value: only filled ones are asked for
        out[filled] = np.add.reduceat(values[: start[-1]].astype(np.float64, copy=False), start[filled])
    return out


def _local_names(paths: list[str], others: Iterable[str] = ()) -> dict[str, int]:
    """Return every path and each unique suffix, also among `others`; -1 marks an ambiguous suffix."""
    found = {suffix: -1 for path in others for suffix in _suffixes(path)}
    for i, path in enumerate(paths):
        for suffix in _suffixes(path):
            found[suffix] = i if found.get(suffix, i) == i else -1
    for i, path in enumerate(paths):
        found[path] = i
    return found


def _suffixes(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[k:]) for k in range(len(parts))]
