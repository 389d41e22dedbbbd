"""Columns: what a class or a policy declares is dumped, restored, forgotten and moved, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from twin.catalogue import F32, F64, I32, I64, Bool, ContractError, pack, unpack
from twin.telemetry import (
    OWN,
    Columns,
    ColumnSpec,
    EntityState,
    PackedState,
    RareState,
    RingSpec,
    Sizes,
    SparseState,
    cell,
    column,
    entries,
    in_order,
    keyed,
    part,
    pushed,
    records,
    scalar,
)

N = 5
SIZES = {"gpu": N, "node": 3}
ECC = "gpu.ecc_sbe_count"


class Noise(EntityState):
    variance: F64 = column(OWN, "f8", np.nan)


class Cycles(SparseState):
    count: I32 = cell("i4", 1)
    when: I64 = cell("i8", lead=(2,))
    total: int = scalar(0)


@dataclass(slots=True)
class Report:
    id: str
    table: str
    entity: int
    rows: dict[str, I32] = field(default_factory=dict)
    words: tuple[str, ...] = ()


class Packed(PackedState):
    level: F64 = column(OWN, "f8", 0.5)


class Watch(EntityState):
    seen_ns: I64 = column("gpu", "i8")
    level: F32 = column("gpu", "f4", 0.5, lead=(2,), trail=(3,))
    down: Bool = column("node", "?")
    epoch_ns: int = scalar(0)
    counts: dict[str, int] = scalar({"late": 0})
    told_ns: dict[str, I64] = keyed("i8", -1, keys=("gpu", "node"))
    errors: dict[str, I32] = keyed("i4")
    noise: Noise = part()
    cycles: Cycles = part()
    by_code: dict[str, Noise] = part(make="_noise")
    reports: dict[str, Report] = records(Report, "id", was="told")
    places: dict[str, Report] = records(Report, "id", of_place=True)
    packed: Packed = part(was="board")

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.noise, self.cycles = Noise(sizes, "gpu"), Cycles(sizes, "gpu")
        self.by_code: dict[str, Noise] = {}
        self.packed = Packed([("power", "node", sizes["node"]), ("sums", "balance", 2),
                              ("temp", "gpu", sizes["gpu"])])  # fmt: skip
        self.any_down = False

    def _noise(self, key: str) -> Noise:
        return Noise(self.sizes, "node" if key.startswith("node") else "gpu")

    def derive(self) -> None:
        self.any_down = bool(self.down.any())


def filled(seed: int) -> Watch:
    rng, watch = np.random.default_rng(seed), Watch(SIZES)
    watch.seen_ns[:] = rng.integers(1, 100, N)
    watch.level[:] = rng.normal(size=watch.level.shape)
    watch.down[1] = True
    watch.told_ns["gpu"][:] = rng.integers(1, 100, N)
    watch.errors[ECC] = rng.integers(1, 9, N).astype(np.int32)
    watch.epoch_ns, watch.counts = 7, {"late": int(rng.integers(10))}
    watch.noise.variance[:] = rng.normal(size=N)
    index = np.flatnonzero(rng.random(N) < 0.6).astype(np.int32)
    watch.cycles.insert(index, count=rng.integers(1, 9, len(index)), when=rng.integers(1, 9, (2, len(index))))
    watch.cycles.total = 3
    watch.by_code["node.63"] = watch._noise("node.63")
    watch.by_code["node.63"].variance[:] = [1.0, 2.0, 3.0]
    for key, table, entity in (("late", "gpu", 3), ("all", "site", 0), ("early", "gpu", 1)):
        watch.reports[key] = Report(key, table, entity, {"b": index, "a": index}, ("x", "y"))
    watch.places["p"] = Report("p", "gpu", 3)
    watch.packed.level[:] = np.arange(len(watch.packed.level)) + 10.0
    watch.derive()
    return watch


def test_declared_names_begin_with_their_fill() -> None:
    watch = Watch(SIZES)
    assert watch.level.shape == (2, N, 3)
    assert (watch.level == 0.5).all()
    assert np.isnan(watch.noise.variance).all()
    assert (watch.epoch_ns, watch.counts, len(watch.cycles)) == (0, {"late": 0}, 0)
    watch.counts["late"] = 9
    assert Watch(SIZES).counts == {"late": 0}, "a default belongs to nobody"


@given(st.integers(0, 10_000))
def test_a_dump_is_plain_data_and_restores_to_the_same(seed: int) -> None:
    watch, back = filled(seed), Watch(SIZES)
    raw = pack(watch.dump())
    back.restore(unpack(raw))
    assert pack(back.dump()) == raw
    assert back.any_down
    back.seen_ns[0] += 1
    assert pack(watch.dump()) == raw, "what was restored is a copy"


@pytest.mark.parametrize("lost", ["seen_ns", "counts", "cycles", "by_code"])
def test_what_a_dump_lacks_or_has_in_another_shape_begins_as_new(lost: str) -> None:
    data = filled(1).dump()
    del data[lost]
    data["level"] = np.zeros((2, N))
    back = Watch(SIZES)
    back.restore(data)
    assert back.epoch_ns == 7
    assert (back.level == 0.5).all()
    assert pack({"x": back.dump()[lost]}) == pack({"x": Watch(SIZES).dump()[lost]})


@given(st.integers(0, 10_000), st.integers(0, N - 1))
def test_a_replaced_entity_begins_as_new_and_no_other_one_does(seed: int, entity: int) -> None:
    watch, before, new = filled(seed), filled(seed), Watch(SIZES)
    watch.forget("gpu", entity)
    others = np.arange(N) != entity
    for array, old, fresh in ((watch.seen_ns, before.seen_ns, new.seen_ns),
                              *zip(watch.level, before.level, new.level, strict=True),
                              (watch.told_ns["gpu"], before.told_ns["gpu"], new.told_ns["gpu"]),
                              (watch.errors[ECC], before.errors[ECC], np.zeros(N)),
                              (watch.noise.variance, before.noise.variance, new.noise.variance)):  # fmt: skip
        assert np.array_equal(array[others], old[others])
        assert np.array_equal(array[entity], fresh[entity], equal_nan=True)
    assert watch.cycles.index.tolist() == [i for i in before.cycles.index.tolist() if i != entity]
    assert watch.by_code["node.63"].variance.tolist() == [1.0, 2.0, 3.0]
    keys = [key for key, r in before.reports.items() if (r.table, r.entity) != ("gpu", entity)]
    assert list(watch.reports) == keys
    assert list(watch.places) == ["p"]
    level = np.arange(10.0, 20.0)
    level[3 + 2 + entity] = 0.5
    assert np.array_equal(watch.packed.level, level)
    watch.forget("node", 1)
    assert watch.packed.level[1] == 0.5
    assert np.isnan(watch.by_code["node.63"].variance[1])
    assert not watch.any_down


@given(st.integers(0, 10_000), st.permutations([0, 1, 2, 3, 4, -1]), st.integers(1, 6))
def test_a_changed_site_moves_the_rows_of_those_that_stayed(seed: int, order: list[int], n: int) -> None:
    old_of_new = {"gpu": np.array(order[:n], np.int32), "node": np.array([2, 0], np.int32)}
    old, new = filled(seed), Watch({"gpu": n, "node": 2})
    new.adopt(old, old_of_new)
    rows = dict(zip(old.cycles.index.tolist(), old.cycles.count.tolist(), strict=True))
    kept = {}
    for i, was in enumerate(order[:n]):
        assert new.told_ns["gpu"][i] == (old.told_ns["gpu"][was] if was >= 0 else -1)
        assert new.errors[ECC][i] == (old.errors[ECC][was] if was >= 0 else 0)
        assert new.seen_ns[i] == (old.seen_ns[was] if was >= 0 else 0)
        assert np.array_equal(
            new.level[:, i], old.level[:, was] if was >= 0 else np.full((2, 3), 0.5, np.float32)
        )
        if was in rows:
            kept[i] = rows[was]
    assert dict(zip(new.cycles.index.tolist(), new.cycles.count.tolist(), strict=True)) == kept
    assert new.by_code["node.63"].variance.tolist() == [3.0, 1.0]
    assert (new.epoch_ns, new.counts, new.cycles.total) == (7, old.counts, 3)
    assert not new.any_down, "the node that was down has left"
    at = {was: i for i, was in enumerate(order[:n]) if was >= 0}
    entities = {key: at.get(r.entity) if r.table == "gpu" else 0 for key, r in old.reports.items()}
    assert {key: r.entity for key, r in new.reports.items()} == {
        key: i for key, i in entities.items() if i is not None
    }
    temp = [10.0 + 5 + was if was >= 0 else 0.5 for was in order[:n]]
    assert new.packed.level.tolist() == [12.0, 10.0, 0.5, 0.5, *temp], "no balance is known to have stayed"


def test_names_and_layouts_of_earlier_snapshots() -> None:
    watch, back = filled(1), Watch(SIZES)
    data = watch.dump()
    data["told"], data["board"] = data.pop("reports"), data.pop("packed")
    # A version before wrote no words, and a dict of arrays in its order, as pairs
    data["told"] = [[*row[:3], list(row[3].items())] for row in data["told"]]
    back.restore(unpack(pack(data)))
    assert list(back.reports) == ["late", "all", "early"]
    assert list(back.reports["all"].rows) == ["b", "a"]
    assert back.reports["all"].words == ()
    assert back.packed.level.tolist() == watch.packed.level.tolist()
    other = Packed([("temp", "gpu", 3), ("power", "node", 7)])
    other.restore(watch.packed.dump())
    assert other.level.tolist() == [0.5] * 10, "as long, and laid out otherwise"


class Burst(SparseState):
    count: I32 = cell("i4", 1)
    notes: dict[int, str] = entries(OWN)


class Bursts(EntityState):
    by_kind: dict[str, Burst] = part()

    def __init__(self) -> None:
        super().__init__(SIZES)
        self.by_kind = {"ecc": Burst(SIZES, "gpu"), "pcie": Burst(SIZES, "gpu")}


def test_a_sparse_part_that_a_dump_leaves_out_is_blank_again() -> None:
    bursts = Bursts()
    bursts.by_kind["pcie"].insert(np.array([2], np.int32))
    data = unpack(pack(bursts.dump()))
    assert list(data["by_kind"]) == ["pcie"]
    bursts.by_kind["ecc"].insert(np.array([1, 3], np.int32), count=5)
    bursts.by_kind["ecc"].notes = {1: "late"}
    bursts.restore(data)
    assert pack(bursts.dump()) == pack(data)
    assert len(bursts.by_kind["ecc"]) == 0


class Asks(RareState):
    asked: I32 = column(OWN, "i4", lead=(2,))
    made: int = scalar(0)


class Log(EntityState):
    notes: dict[int, str] = entries("gpu")
    details: dict[tuple[str, int, int], str] = entries()
    asks: dict[str, dict[str, Asks]] = part()
    home: I32 = column("gpu", "i4", of_place=True)

    def __init__(self) -> None:
        super().__init__(SIZES, "gpu")
        self.asks = {"by": {"gpu": Asks(SIZES, "gpu")}, "none": {}}


def test_entries_and_rare_columns_follow_their_entities() -> None:
    log, back, moved = Log(), Log(), Log()
    log.notes, log.details = {1: "hot", 4: "slow"}, {("gpu", 4, 79): "off", ("node", 0, 1): "up"}
    asks = log.asks["by"]["gpu"]
    asks.asked[1, 4], asks.made, log.home[4] = 7, 3, 9
    data = unpack(pack(log.dump()))
    assert data["asks"]["by"]["gpu"]["index"].tolist() == [4]
    back.restore(data)
    assert pack(back.dump()) == pack(log.dump())
    moved.adopt(log, {"gpu": np.array([4, -1, 0, 2, 3], np.int32), "node": np.array([-1, 1, 2], np.int32)})
    assert (moved.notes, moved.details) == ({0: "slow"}, {("gpu", 0, 79): "off"})
    assert moved.asks["by"]["gpu"].asked[1].tolist() == [7, 0, 0, 0, 0]
    log.forget("gpu", 4)
    assert (log.notes, log.details) == ({1: "hot"}, {("node", 0, 1): "up"})
    assert (asks.asked.any(), asks.made, log.home[4]) == (False, 3, 9)


@given(st.lists(st.tuples(st.integers(0, N - 1), st.booleans()), max_size=20))
def test_rows_stay_ascending_and_unique(steps: list[tuple[int, bool]]) -> None:
    cycles, known = Cycles(SIZES, "gpu"), dict[int, int]()
    for k, (entity, add) in enumerate(steps):
        if add and entity not in known:
            cycles.insert(np.array([entity], np.int32), count=k)
            known[entity] = k
        elif not add:
            cycles.forget("gpu", entity)
            known.pop(entity, None)
    assert cycles.index.tolist() == sorted(known)
    assert cycles.count.tolist() == [known[i] for i in sorted(known)]
    at, there = cycles.find(np.arange(N, dtype=np.int32))
    assert np.flatnonzero(there).tolist() == sorted(known)
    assert cycles.index[at[there]].tolist() == sorted(known)


MEMORY = Columns(
    gpu={"cap_w": "f8", "peak_w": ColumnSpec("f4", np.nan)},
    node={"since_ns": "i8"},
    scalars={"looked_ns": "i8", "limit_w": ColumnSpec("f8", np.inf)},
    rings={"power_w": RingSpec("gpu", 3)},
)


def some_memory() -> dict[str, Any]:
    memory = MEMORY.fresh(SIZES)
    for k in range(5):
        memory |= pushed(memory, "power_w", np.arange(N, dtype=np.float32) + 10 * k, 100 + k)
    return memory | {"cap_w": np.arange(N) * 1.0, "looked_ns": np.array(4), "limit_w": np.array(2.5)}


def test_a_policys_memory_is_checked_written_and_restored() -> None:
    memory = MEMORY.checked(some_memory() | {"looked_ns": 12, "limit_w": np.float64(1.5)}, SIZES)
    assert (int(memory["looked_ns"]), float(memory["limit_w"])) == (12, 1.5)
    times, values = in_order(memory["power_w"], memory["power_w_ns"])
    assert times.tolist() == [102, 103, 104]
    assert values[:, 0].tolist() == [20.0, 30.0, 40.0]
    back = MEMORY.restored(unpack(pack(memory)), SIZES)
    assert pack(back) == pack(memory)
    assert MEMORY.restored({"cap_w": np.ones(2), "gone": 1}, SIZES)["cap_w"].tolist() == [0.0] * N


@pytest.mark.parametrize(
    "bad",
    [
        {"cap_w": np.zeros(N, np.float32)},
        {"cap_w": np.zeros(N + 1)},
        {"looked_ns": 0.5},
        {"looked_ns": np.zeros(2, np.int64)},
        {"limit_w": None},
        {"power_w": np.zeros((2, N), np.float32)},
    ],
)
def test_a_memory_other_than_declared_is_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=next(iter(bad))):
        MEMORY.checked(some_memory() | bad, SIZES)


def test_a_policys_memory_follows_replaced_devices_and_the_site() -> None:
    memory = some_memory()
    MEMORY.forget(memory, "gpu", 2)
    assert memory["cap_w"].tolist() == [0.0, 1.0, 0.0, 3.0, 4.0]
    assert np.isnan(memory["power_w"][:, 2]).all()
    moved = MEMORY.moved(memory, {"gpu": np.array([4, -1], np.int32), "node": np.array([0], np.int32)},
                         {"gpu": 2, "node": 1})  # fmt: skip
    assert moved["cap_w"].tolist() == [4.0, 0.0]
    assert int(moved["looked_ns"]) == 4
    assert np.isnan(moved["power_w"][:, 1]).all()


def test_an_array_that_a_policy_gave_away_is_not_unlocked_as_a_device_is_replaced() -> None:
    """It may be that of an envelope."""
    high_w, ring = np.full(N, 9.0), some_memory()["power_w"]
    for array in (high_w, ring):
        array.flags.writeable = False
    memory = MEMORY.checked(some_memory() | {"cap_w": high_w, "power_w": ring}, SIZES)
    assert memory["cap_w"] is high_w
    MEMORY.forget(memory, "gpu", 2)
    assert memory["cap_w"].tolist() == [9.0, 9.0, 0.0, 9.0, 9.0]
    assert np.isnan(memory["power_w"][:, 2]).all()
    assert high_w.tolist() == [9.0] * N
    assert not high_w.flags.writeable
    assert not ring.flags.writeable
    assert np.isfinite(ring[:, 2]).all()


def test_a_name_is_declared_once() -> None:
    with pytest.raises(ContractError, match="x, x_ns declared more than once"):
        Columns(gpu={"x": "f8"}, node={"x": "f8"}, scalars={"x_ns": "i8"}, rings={"x": RingSpec("gpu", 2)})


def test_memory_of_earlier_names_is_restored_and_scalars_merge_what_was_kept_per_entity() -> None:
    made = Columns(
        scalars={"ran_ns": ColumnSpec("i8", was="looked_ns"), "count": ColumnSpec("i8", merge="sum")},
        node={"option": ColumnSpec("i1", was="course"), "known": ColumnSpec("?", was="looked_ns")},
    )
    old = {
        "course": np.array([1, 2, 0], np.int8),
        "looked_ns": np.array([0, 7, 7]),
        "count": np.array([1, 0, 4]),
    }
    memory = made.restored(old, {"node": 3})
    assert memory["option"].tolist() == [1, 2, 0]
    assert memory["known"].tolist() == [False, True, True]
    assert (int(memory["ran_ns"]), int(memory["count"])) == (7, 5)
    assert made.restored(memory, {"node": 3})["option"].tolist() == [1, 2, 0], "its own names come first"


def test_what_belongs_to_the_place_stays_when_the_device_is_replaced() -> None:
    made = Columns(node={"phase": "i1", "ours": ColumnSpec("?", of_place=True)})
    memory = {"phase": np.array([5, 5], np.int8), "ours": np.ones(2, np.bool_)}
    made.forget(memory, "node", 1)
    assert memory["phase"].tolist() == [5, 0]
    assert memory["ours"].tolist() == [True, True]
