"""Columns: state per entity that survives snapshots, replaced devices and changed sites.

A class or a policy declares what it keeps; dump, restore, forget and remap follow from the declaration:

* a *column* has one value (or a small block) per entity of a table;
* *keyed* columns are a dict of columns, each of the table that its key begins with (`gpu.ecc_sbe_count`);
* a *scalar* belongs to no entity;
* a *ring* has the last few columns of a table with their instants (of a policy);
* *rows* are sparse columns: one row per entity that has any (`SparseState`, with `cell`);
* *records* are a dict of dataclasses, some of them of one entity each;
* *entries* are a dict of plain values whose keys name an entity;
* a *part* is an object, or a dict of objects (of any depth), that declares its own.

A stateful class of the core derives from `EntityState` and declares attributes:

    class Rates(EntityState):
        gap: F32 = column("gpu", "f4")
        usual_w: F64 = column("gpu", "f8", fill=np.nan, lead=(2,))   # [2, n]
        looked_ns: int = scalar(0)
        noise: Noise = part()                                         # assigned in __init__

        def __init__(self, site: Site) -> None:
            super().__init__(site.sizes)
            self.noise = Noise(site.sizes)

A policy is a pure function and declares its memory, a dict of arrays, with `Columns`:

    memory = Columns(
        gpu={"cap_w": "f8", "peak_w": ColumnSpec("f8", fill=np.nan)},
        scalars={"looked_ns": "i8"},                # arrays of shape (): int(memory["looked_ns"])
        rings={"power_w": RingSpec("gpu", slots=12)},   # [12, n] and "power_w_ns" [12]: see `pushed`
    )

`propose` gives back a value for every declared name; the engine checks shapes and types (`checked`), writes
them to snapshots and restores them (`restored`), sets the row of a replaced entity to the fill (`forget`),
and moves rows when the site changes (`moved`). A name that a snapshot lacks begins as in a new run, and a
name that is no longer declared is dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, get_origin, get_type_hints

import numpy as np

from twin.catalogue import I32, I64, Bool, ContractError

Sizes = Mapping[str, int]  # entities by table, and other lengths that a declaration names
OldOfNew = Mapping[str, I32]  # by table: per new entity the old index, -1 for a new one
OWN = "*"  # the table that an instance was made for


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One value per entity: an array [*lead, n, *trail]; lengths are numbers or names among the sizes.

    A text as `fill` names an attribute of the owner: an array of the same shape with what each begins with.
    `of_place`: the value belongs to the place, and stays when its device is replaced. `was`: the name in
    earlier snapshots, from which a scalar takes the `merge` of a column.
    """

    dtype: str
    fill: Any = 0
    lead: tuple[int | str, ...] = ()
    trail: tuple[int | str, ...] = ()
    table: str = ""
    of_place: bool = False
    was: str = ""
    merge: Literal["max", "sum"] = "max"

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of the column."""
        return tuple([x if isinstance(x, int) else sizes[x] for x in (*self.lead, self.table, *self.trail)])

    def fresh(self, sizes: Sizes, owner: object = None) -> np.ndarray:
        """Return the initial column."""
        shape = self.shape(sizes)
        fill = getattr(owner, self.fill) if isinstance(self.fill, str) else self.fill
        if not isinstance(fill, np.ndarray) and fill == 0:
            return np.zeros(shape, self.dtype)  # takes no memory until it is written to
        return np.full(shape, fill, self.dtype)

    def clear(self, array: np.ndarray, entity: int, owner: object = None) -> None:
        """Set an entity to the fill, in place."""
        if self.of_place:
            return
        at = (slice(None),) * len(self.lead) + (entity,)
        array[at] = getattr(owner, self.fill)[at] if isinstance(self.fill, str) else self.fill

    def move(self, old: np.ndarray, new: np.ndarray, old_of_new: I32) -> None:
        """Copy the kept entities of another site's column into an initial one."""
        before: tuple[Any, ...] = (slice(None),) * len(self.lead)
        kept = np.flatnonzero(old_of_new >= 0)
        new[(*before, kept)] = old[(*before, old_of_new[kept])]


@dataclass(frozen=True, slots=True)
class KeyedSpec:
    """A dict of columns. `keys`, with their tables, exist from the start; without any, keys come and go."""

    dtype: str
    fill: Any
    keys: Mapping[str, ColumnSpec]
    lead: tuple[int | str, ...] = ()

    def of(self, key: str) -> ColumnSpec:
        return self.keys.get(key) or ColumnSpec(self.dtype, self.fill, self.lead, table=key.partition(".")[0])


@dataclass(frozen=True, slots=True)
class ScalarSpec:
    """One value that belongs to no entity: plain data, such as a number, a text, a dict or list of them."""

    default: Any

    def fresh(self) -> Any:
        """Return the initial value."""
        return copy.deepcopy(self.default)

    def read(self, value: Any) -> Any:
        """Return a value of a snapshot, in the type of the default."""
        kind = type(self.default)
        if isinstance(self.default, bool | int | float | str):
            return kind(value)
        return copy.deepcopy(value)


@dataclass(frozen=True, slots=True)
class EntriesSpec:
    """A dict of plain values by entity: keys are indices in `table`, or (table, index, ...) without one."""

    table: str

    def dump(self, entries: Mapping[Any, Any]) -> list[list[Any]]:
        """Return rows [*key, value]."""
        return [[*((key,) if self.table else key), value] for key, value in entries.items()]

    def read(self, rows: Any) -> dict[Any, Any]:
        """Return the entries of such rows."""
        return {row[0] if self.table else tuple(row[:-1]): row[-1] for row in rows}

    def moved(self, entries: Mapping[Any, Any], old_of_new: OldOfNew, table: str) -> dict[Any, Any]:
        """Return the entries of kept entities on another site; `table` is the one of plain keys."""
        out, places = {}, dict[str, I32]()
        for key, value in entries.items():
            of, index = (table, key) if self.table else key[:2]
            if of not in places:
                places[of] = _inverse(old_of_new[of]) if of in old_of_new else np.zeros(0, np.int32)
            place = int(places[of][index]) if index < len(places[of]) else -1
            if place >= 0:
                out[place if self.table else (of, place, *key[2:])] = value
        return out


def _inverse(old_of_new: I32) -> I32:
    """The new index of each old one, as far as any stays; -1 for those that left."""
    out = np.full(int(old_of_new.max(initial=-1)) + 1, -1, np.int32)
    kept = np.flatnonzero(old_of_new >= 0)
    out[old_of_new[kept]] = kept
    return out


@dataclass(frozen=True, slots=True)
class RingSpec:
    """The last `slots` columns of a table, [slots, n], and their instants [slots], 0 where none is yet."""

    table: str
    slots: int
    dtype: str = "f4"
    fill: Any = np.nan


@dataclass(frozen=True, slots=True)
class RecordsSpec:
    """A dict of dataclasses by their attribute `key`, in order; some name their entity: `table`, `entity`."""

    kind: type[Any]
    key: str
    of_place: bool = False
    was: str = ""

    def dump(self, records: Mapping[Any, Any]) -> list[list[Any]]:
        """Return rows of plain values, in the order of the fields."""
        names = [field.name for field in fields(self.kind)]
        return [[getattr(record, name) for name in names] for record in records.values()]

    def read(self, rows: Sequence[Sequence[Any]]) -> dict[Any, Any]:
        """Return the records of such rows; a field that an earlier version lacks takes its default."""
        kinds = [get_origin(hint) or hint for hint in get_type_hints(self.kind).values()]
        records = [self.kind(*(k(v) for k, v in zip(kinds, row, strict=False))) for row in rows]
        return {getattr(record, self.key): record for record in records}

    def drop(self, records: dict[Any, Any], table: str, entity: int) -> None:
        for key, record in list(records.items()):
            if (getattr(record, "table", ""), getattr(record, "entity", -1)) == (table, entity):
                del records[key]

    def moved(self, records: Mapping[Any, Any], old_of_new: OldOfNew) -> dict[Any, Any]:
        """Return copies for another site, without those of entities that it lacks."""
        out: dict[Any, Any] = {}
        for record in records.values():
            source = old_of_new.get(getattr(record, "table", ""))
            at = [-1] if source is None else np.flatnonzero(source == record.entity).tolist()
            if at:
                new = copy.copy(record) if source is None else replace(record, entity=at[0])
                out[getattr(new, self.key)] = new
        return out


@dataclass(frozen=True, slots=True)
class PartSpec:
    """An attribute that is an `EntityState`, or a dict of them; `make` makes one for a new key."""

    make: str = ""
    was: str = ""


Spec = ColumnSpec | KeyedSpec | ScalarSpec | EntriesSpec | RecordsSpec | PartSpec


def column(
    table: str,
    dtype: str,
    fill: Any = 0,
    *,
    lead: tuple[int | str, ...] = (),
    trail: tuple[int | str, ...] = (),
    of_place: bool = False,
) -> Any:
    """Declare a column of `table` (or `OWN`) in an `EntityState` class."""
    return ColumnSpec(dtype, fill, lead, trail, table, of_place)


def keyed(
    dtype: str = "f8",
    fill: Any = 0,
    keys: Mapping[str, str | ColumnSpec] | tuple[str, ...] = (),
    *,
    lead: tuple[int | str, ...] = (),
) -> Any:
    """Declare a dict of columns in an `EntityState` class; `keys` without tables begin with their table."""
    known = keys if isinstance(keys, Mapping) else {key: key.partition(".")[0] for key in keys}
    specs = {k: ColumnSpec(dtype, fill, lead, table=t) if isinstance(t, str) else t for k, t in known.items()}
    return KeyedSpec(dtype, fill, specs, lead)


def scalar(default: Any) -> Any:
    """Declare a value that belongs to no entity in an `EntityState` class."""
    return ScalarSpec(default)


def records(kind: type[Any], key: str = "key", *, of_place: bool = False, was: str = "") -> Any:
    """Declare a dict of dataclasses by `key` in an `EntityState` class; `was`: the name in earlier snapshots.

    `of_place`: a record stays when the device of its entity is replaced.
    """
    return RecordsSpec(kind, key, of_place, was)


def entries(table: str = "") -> Any:
    """Declare a dict of plain values by entity of `table` (or `OWN`), or by (table, entity, ...)."""
    return EntriesSpec(table)


def part(make: str = "", *, was: str = "") -> Any:
    """Declare a part in an `EntityState` class. `make`: a method that makes the part for a new key."""
    return PartSpec(make, was)


def cell(dtype: str, fill: Any = 0, *, lead: tuple[int | str, ...] = ()) -> Any:
    """Declare a sparse column of a `SparseState` class."""
    return ColumnSpec(dtype, fill, lead)


class EntityState:
    """Arrays, scalars and parts as declared. Override `derive` for what follows from them."""

    declared: ClassVar[dict[str, Spec]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        own = {k: v for k, v in vars(cls).items() if isinstance(v, Spec)}
        cls.declared = cls.declared | own
        for name in own:
            delattr(cls, name)

    def __init__(self, sizes: Sizes, table: str = "") -> None:
        """`table`: the one that OWN stands for."""
        self.sizes: Sizes = {**sizes, OWN: sizes[table]} if table else sizes
        self.table = table
        for name, spec in self.declared.items():
            if isinstance(spec, ColumnSpec):
                setattr(self, name, spec.fresh(self.sizes, self))
            elif isinstance(spec, KeyedSpec):
                setattr(self, name, {key: of.fresh(self.sizes) for key, of in spec.keys.items()})
            elif isinstance(spec, ScalarSpec):
                setattr(self, name, spec.fresh())
            elif isinstance(spec, EntriesSpec | RecordsSpec):
                setattr(self, name, {})

    def derive(self) -> None:
        """Recompute derived state after a restore, a move or the loss of an entity."""

    def _of(self, spec: ColumnSpec | EntriesSpec) -> str:
        return self.table if spec.table == OWN else spec.table

    def _parts(self) -> list[EntityState]:
        return [
            part
            for name, spec in self.declared.items()
            if isinstance(spec, PartSpec)
            for part in _leaves(getattr(self, name))
        ]

    def dump(self) -> dict[str, Any]:
        """Return the whole state, for a snapshot or a checksum."""
        out: dict[str, Any] = {}
        for name, spec in self.declared.items():
            value = getattr(self, name)
            if isinstance(spec, PartSpec):
                value = _dumped(value)
            elif isinstance(spec, KeyedSpec):
                value = dict(value)
            elif isinstance(spec, EntriesSpec | RecordsSpec):
                value = spec.dump(value)
            out[name.removeprefix("_")] = value
        return out

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore the state from `dump`; missing arrays, and those of another shape, are initial."""
        if not isinstance(data, Mapping):
            return  # of a version that wrote it otherwise
        for name, spec in self.declared.items():
            key = name.removeprefix("_")
            if key not in data and isinstance(spec, RecordsSpec | PartSpec):
                key = spec.was
            if key not in data:
                continue
            if isinstance(spec, ColumnSpec):
                # In place: a column may be a view of wider arrays
                if np.shape(data[key]) == getattr(self, name).shape:
                    getattr(self, name)[...] = data[key]
            elif isinstance(spec, ScalarSpec | EntriesSpec | RecordsSpec):
                setattr(self, name, spec.read(data[key]))
            elif isinstance(spec, PartSpec):
                self._restore_part(getattr(self, name), spec, data[key])
            elif isinstance(data[key], Mapping):
                self._restore_keyed(getattr(self, name), spec, data[key])
        self.derive()

    def _restore_part(self, value: Any, spec: PartSpec, data: Any) -> None:
        if isinstance(value, EntityState):
            value.restore(data)
        elif isinstance(data, Mapping):
            for key in value.keys() - data.keys():
                for leaf in _leaves(value[key]):
                    if isinstance(leaf, SparseState):
                        leaf.empty()  # `dump` leaves out what is blank
            for key, data_of_part in data.items():
                if key not in value and spec.make:
                    value[key] = getattr(self, spec.make)(key)
                if key in value:
                    self._restore_part(value[key], spec, data_of_part)

    def _restore_keyed(
        self, columns: dict[str, np.ndarray], spec: KeyedSpec, data: Mapping[str, Any]
    ) -> None:
        for key, array in data.items():
            of = spec.of(key)
            if (key in spec.keys or not spec.keys) and of.table in self.sizes:
                fresh = of.fresh(self.sizes)
                if np.shape(array) == fresh.shape:
                    columns[key] = np.array(array, fresh.dtype)

    def forget(self, table: str, entity: int) -> None:
        """Clear the slot of a new device."""
        for name, spec in self.declared.items():
            if isinstance(spec, ColumnSpec) and self._of(spec) == table:
                spec.clear(getattr(self, name), entity, self)
            elif isinstance(spec, KeyedSpec):
                for key, array in getattr(self, name).items():
                    if spec.of(key).table == table:
                        spec.of(key).clear(array, entity)
            elif isinstance(spec, RecordsSpec) and not spec.of_place:
                spec.drop(getattr(self, name), table, entity)
            elif isinstance(spec, EntriesSpec) and self._of(spec) in ("", table):
                gone = entity if spec.table else (table, entity)
                kept = {k: v for k, v in getattr(self, name).items() if (k if spec.table else k[:2]) != gone}
                setattr(self, name, kept)
        for some in self._parts():
            some.forget(table, entity)
        self.derive()

    def adopt(self, old: Self, old_of_new: OldOfNew) -> None:
        """Take over the state of the same object on another site; arrays without a table there are
        initial."""
        for name, spec in self.declared.items():
            if isinstance(spec, ScalarSpec):
                setattr(self, name, copy.deepcopy(getattr(old, name)))
            elif isinstance(spec, RecordsSpec):
                setattr(self, name, spec.moved(getattr(old, name), old_of_new))
            elif isinstance(spec, EntriesSpec):
                setattr(self, name, spec.moved(getattr(old, name), old_of_new, self._of(spec)))
            elif isinstance(spec, ColumnSpec) and self._of(spec) in old_of_new:
                spec.move(getattr(old, name), getattr(self, name), old_of_new[self._of(spec)])
            elif isinstance(spec, KeyedSpec):
                for key, array in getattr(old, name).items():
                    of = spec.of(key)
                    if of.table in old_of_new:
                        mine = getattr(self, name)[key] = of.fresh(self.sizes)
                        of.move(array, mine, old_of_new[of.table])
            elif isinstance(spec, PartSpec):
                self._adopt_part(getattr(self, name), spec, getattr(old, name), old_of_new)
        self.derive()

    def _adopt_part(self, value: Any, spec: PartSpec, old: Any, old_of_new: OldOfNew) -> None:
        if isinstance(value, EntityState):
            value.adopt(old, old_of_new)
            return
        for key, theirs in old.items():
            if key not in value and spec.make:
                value[key] = getattr(self, spec.make)(key)
            if key in value:
                self._adopt_part(value[key], spec, theirs, old_of_new)


def _leaves(value: Any) -> list[EntityState]:
    """The parts of an attribute: itself, or those of a dict of any depth."""
    return [value] if isinstance(value, EntityState) else [p for v in value.values() for p in _leaves(v)]


def _dumped(value: Any) -> dict[str, Any]:
    if isinstance(value, EntityState):
        return value.dump()
    return {k: _dumped(v) for k, v in value.items() if not (isinstance(v, SparseState) and v.blank)}


class RareState(EntityState):
    """Columns of OWN that few entities have other than zeros: a snapshot holds those entities alone."""

    def dump(self) -> dict[str, Any]:
        """Return the whole state, for a snapshot or a checksum."""
        out = super().dump()
        names = [k for k, spec in self.declared.items() if isinstance(spec, ColumnSpec)]
        some = np.zeros(self.sizes[OWN], np.bool_)
        for name in names:
            some |= getattr(self, name).any(axis=tuple(range(getattr(self, name).ndim - 1)))
        index = np.flatnonzero(some).astype(np.int32)
        rows = {k.removeprefix("_"): np.ascontiguousarray(getattr(self, k)[..., index]) for k in names}
        return out | rows | {"index": index}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        whole = dict(data)
        for name, spec in self.declared.items():
            if isinstance(spec, ColumnSpec) and name.removeprefix("_") in data:
                column = spec.fresh(self.sizes)
                column[..., data["index"]] = data[name.removeprefix("_")]
                whole[name.removeprefix("_")] = column
        super().restore(whole)


class PackedState(EntityState):
    """Columns of `OWN` in which the rows of several tables lie one after another, to be worked on at once.

    `pieces`: (name, table, rows) of each; `cells[name]` is its part of a column.
    """

    def __init__(self, pieces: Sequence[tuple[str, str, int]]) -> None:
        ends = np.cumsum([0, *(n for _, _, n in pieces)]).tolist()
        self.tables = {name: table for name, table, _ in pieces}
        self.cells = {p[0]: slice(a, b) for p, (a, b) in zip(pieces, pairwise(ends), strict=True)}
        super().__init__({"cell": ends[-1]}, "cell")

    def dump(self) -> dict[str, Any]:
        """Return the whole state, with the layout."""
        return super().dump() | {"rows": [[name, at.stop - at.start] for name, at in self.cells.items()]}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave; nothing of another layout."""
        rows = [(name, at.stop - at.start) for name, at in self.cells.items()]
        if [tuple(row) for row in data["rows"]] == rows:
            super().restore(data)

    def forget(self, table: str, entity: int) -> None:
        """Reset the slot of a new device in each piece."""
        for name, of in self.tables.items():
            if of == table:
                super().forget("cell", self.cells[name].start + entity)

    def adopt(self, old: Self, old_of_new: OldOfNew) -> None:
        """Take over the rows of entities that the new site still has, piece by piece."""
        source = np.full(self.sizes["cell"], -1, np.int32)
        for name, table in self.tables.items():
            if name in old.cells and table in old_of_new:
                of = old_of_new[table]
                source[self.cells[name]] = np.where(of >= 0, old.cells[name].start + of, -1)
        super().adopt(old, {"cell": source})


class SparseState(EntityState):
    """Sparse columns: one row per entity that has any, ascending by `index` [k]; each cell is [*lead, k]."""

    cells: ClassVar[dict[str, ColumnSpec]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        own = {k: v for k, v in vars(cls).items() if isinstance(v, ColumnSpec) and not v.table}
        cls.cells = cls.cells | own
        for name in own:
            delattr(cls, name)
        super().__init_subclass__(**more)

    def __init__(self, sizes: Sizes, table: str) -> None:
        super().__init__(sizes, table)
        self.index: I32 = np.zeros(0, np.int32)
        for name, spec in self.cells.items():
            setattr(self, name, self._empty(spec, 0))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def blank(self) -> bool:
        """Return True if there is nothing to dump."""
        plain = all(isinstance(spec, EntriesSpec) for spec in self.declared.values())
        return plain and not len(self.index) and not any(getattr(self, name) for name in self.declared)

    def empty(self) -> None:
        """Drop all rows and entries."""
        self.keep(np.zeros(len(self.index), np.bool_))
        for name, spec in self.declared.items():
            if isinstance(spec, EntriesSpec):
                setattr(self, name, {})

    def _empty(self, spec: ColumnSpec, k: int) -> np.ndarray:
        lead = [x if isinstance(x, int) else self.sizes[x] for x in spec.lead]
        return np.full((*lead, k), spec.fill, spec.dtype)

    def insert(self, index: I32, **values: Any) -> None:
        """Add rows of entities (unique, ascending) that have none; cells not given begin with their fill."""
        at = np.searchsorted(self.index, index)
        for name, spec in self.cells.items():
            new = self._empty(spec, len(index))
            if name in values:
                new[...] = values[name]
            setattr(self, name, np.insert(getattr(self, name), at, new, axis=-1))
        self.index = np.insert(self.index, at, index).astype(np.int32)

    def keep(self, mask: Bool) -> None:
        """Drop all other rows."""
        if not mask.all():
            self.index = self.index[mask]
            for name in self.cells:
                setattr(self, name, getattr(self, name)[..., mask])

    def find(self, index: I32) -> tuple[I64, Bool]:
        """Return (place of each of these entities among the rows, mask of those with a row) [k]."""
        at = np.searchsorted(self.index, index)
        if not len(self.index):
            return at, np.zeros(len(index), np.bool_)
        at = np.minimum(at, len(self.index) - 1)
        return at, np.asarray(self.index[at] == index, np.bool_)

    def dump(self) -> dict[str, Any]:
        """Return the whole state, for a snapshot or a checksum."""
        return super().dump() | {"index": self.index} | {name: getattr(self, name) for name in self.cells}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        if isinstance(data, Mapping) and "index" in data:
            self.index = np.array(data["index"], np.int32)
            for name, spec in self.cells.items():
                value = self._empty(spec, len(self.index))
                if name in data and np.shape(data[name]) == value.shape:
                    value[...] = data[name]
                setattr(self, name, value)
        super().restore(data)

    def forget(self, table: str, entity: int) -> None:
        """Drop the row of a replaced device."""
        if table == self.table:
            self.keep(self.index != entity)
        super().forget(table, entity)

    def adopt(self, old: Self, old_of_new: OldOfNew) -> None:
        """Take over the rows of entities that the new site still has."""
        source = old_of_new.get(self.table)
        if source is not None:
            at, there = old.find(source)
            there &= source >= 0
            at = at[there]
            self.index = np.flatnonzero(there).astype(np.int32)
            for name in self.cells:
                setattr(self, name, getattr(old, name)[..., at])
        super().adopt(old, old_of_new)


def fresh_ring(ring: RingSpec, sizes: Sizes) -> tuple[np.ndarray, I64]:
    """(values [slots, n], instants [slots]) of an empty ring."""
    values = np.full((ring.slots, sizes[ring.table]), ring.fill, ring.dtype)
    return values, np.zeros(ring.slots, np.int64)


def in_order(values: np.ndarray, t_ns: np.ndarray) -> tuple[I64, np.ndarray]:
    """Return (instants [k], values [k, n]) of the filled slots of a ring, oldest first."""
    order = np.argsort(t_ns, kind="stable")[int(np.count_nonzero(t_ns == 0)) :]
    return t_ns[order], values[order]


def pushed(
    memory: Mapping[str, np.ndarray], name: str, values: np.ndarray, now_ns: int
) -> dict[str, np.ndarray]:
    """Return the two entries of a ring of a policy's memory with one more column, for `memory |
    pushed(...)`."""
    ring, t_ns = np.array(memory[name]), np.array(memory[f"{name}_ns"])
    at = int(np.argmin(t_ns))
    ring[at], t_ns[at] = values, now_ns
    return {name: ring, f"{name}_ns": t_ns}


class Columns:
    """The declaration of a policy's memory: columns by table, scalars and rings; names are unique."""

    def __init__(
        self,
        *,
        scalars: Mapping[str, str | ColumnSpec] | None = None,
        rings: Mapping[str, RingSpec] | None = None,
        **tables: Mapping[str, str | ColumnSpec],
    ) -> None:
        self.scalars = {k: ColumnSpec(v) if isinstance(v, str) else v for k, v in (scalars or {}).items()}
        self.rings = dict(rings or {})
        self.columns: dict[str, ColumnSpec] = {}
        self._laid: tuple[Sizes, list[tuple[str, tuple[int, ...], np.dtype[Any]]]] | None = None
        names: list[str] = [*self.scalars, *self.rings, *(f"{name}_ns" for name in self.rings)]
        for table, columns in tables.items():
            names += columns
            for name, given in columns.items():
                spec = ColumnSpec(given) if isinstance(given, str) else given
                self.columns[name] = replace(spec, table=table)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ContractError(f"memory: {', '.join(twice)} declared more than once")

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the tables with columns."""
        some = (*(c.table for c in self.columns.values()), *(r.table for r in self.rings.values()))
        return tuple(dict.fromkeys(some))

    def fresh(self, sizes: Sizes) -> dict[str, np.ndarray]:
        """Return the initial memory."""
        out = {name: spec.fresh(sizes) for name, spec in self.columns.items()}
        out |= {name: np.array(spec.fill, spec.dtype) for name, spec in self.scalars.items()}
        for name, ring in self.rings.items():
            out[name], out[f"{name}_ns"] = fresh_ring(ring, sizes)
        return out

    def checked(
        self, memory: Mapping[str, Any], sizes: Sizes, kept: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Return own arrays with the values that a policy returned. Raises ContractError for undeclared
        ones.

        Taken as they are, and not copied: read-only views of the arrays `kept` that it was given, and arrays
        that it made read-only itself.
        """
        kept, out = kept or {}, dict[str, np.ndarray]()
        if self._laid is None or self._laid[0] != sizes:
            self._laid = dict(sizes), list(self._layout(sizes))
        for name, shape, dtype in self._laid[1]:
            given = memory.get(name)
            if name in self.scalars and isinstance(given, bool | int | float | np.generic):
                given = np.array(given)
                if np.can_cast(given.dtype, dtype, "same_kind"):
                    given = given.astype(dtype)
            if not isinstance(given, np.ndarray) or (given.shape, given.dtype) != (shape, dtype):
                raise ContractError(f"memory column {name}: expected {dtype} {shape}")
            mine = kept.get(name)
            if mine is not None and given.base is mine and given.strides == mine.strides:
                out[name] = mine
            else:
                sealed = given.flags.owndata and not given.flags.writeable
                out[name] = given if sealed else np.array(given)
        return out

    def _layout(self, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        """Return (name, shape, type) of all arrays of the memory."""
        for name, spec in self.columns.items():
            yield name, spec.shape(sizes), np.dtype(spec.dtype)
        for name, spec in self.scalars.items():
            yield name, (), np.dtype(spec.dtype)
        for name, ring in self.rings.items():
            yield name, (ring.slots, sizes[ring.table]), np.dtype(ring.dtype)
            yield f"{name}_ns", (ring.slots,), np.dtype(np.int64)

    def restored(self, data: Mapping[str, Any], sizes: Sizes) -> dict[str, np.ndarray]:
        """Return the memory of a snapshot; missing arrays, and those of another shape, are initial."""
        out = self.fresh(sizes)
        for name, expected in out.items():
            spec = self.columns.get(name) or self.scalars.get(name)
            value: Any = data.get(name) if spec is None or name in data else data.get(spec.was)
            if spec is not None and name in self.scalars and np.ndim(value) == 1 and np.size(value):
                value = np.max(value) if spec.merge == "max" else np.sum(value)
            if value is not None and np.shape(value) == expected.shape:
                out[name] = np.array(value, expected.dtype)
        return out

    def forget(self, memory: dict[str, np.ndarray], table: str, entity: int) -> None:
        """Reset the row of a new device.

        An array that the policy made read-only is copied first: it may be that of a site, or of two columns.
        """
        some: dict[str, ColumnSpec | RingSpec] = {**self.columns, **self.rings}
        for name, spec in some.items():
            if spec.table != table:
                continue
            if not memory[name].flags.writeable:
                memory[name] = memory[name].copy()
            if isinstance(spec, RingSpec):
                memory[name][:, entity] = spec.fill
            else:
                spec.clear(memory[name], entity)

    def moved(
        self, memory: Mapping[str, np.ndarray], old_of_new: OldOfNew, sizes: Sizes
    ) -> dict[str, np.ndarray]:
        """Return the memory on a changed site; new entities have initial values."""
        out = self.fresh(sizes)
        for name, spec in self.columns.items():
            spec.move(memory[name], out[name], old_of_new[spec.table])
        for name in self.scalars:
            out[name] = np.array(memory[name])
        for name, ring in self.rings.items():
            ColumnSpec(ring.dtype, lead=(ring.slots,)).move(memory[name], out[name], old_of_new[ring.table])
            out[f"{name}_ns"] = np.array(memory[f"{name}_ns"])
        return out
