"""The part of the benchmark that asks what it costs to share out power.

A made-up site of 100,000 devices under budgets that overlap, and both policies on the site of 100,000 GPUs
that is delivered: quiet, where nobody is overloaded, and binding, where all want more than there is and a
feed is lost. Beside the allocation a linear program, HiGHS, that fills a small part of the same site by
steps. In a process of its own with one thread; figures come under `power.n100k.`, quick ones of a small site
under `power.quick.`, so that no goal is judged by them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from policies.power_capping import (
    Budgets,
    Devices,
    PowerCap,
    PowerGuard,
    allocate,
    carried_by,
    pairs_of,
    sums_w,
)
from tests.evaluation.harness import (
    Figures,
    answer_parent,
    ask_child,
    cell,
    part_of,
    percentiles,
    table,
    timed_ms,
)
from twin.catalogue import F64, NS
from twin.config import read_yaml, spec_of
from twin.contracts import Memory, Policy
from twin.engine import Engine
from twin.site import build_site
from twin.telemetry import Block, Inbox

SITE = "deploy/sites/atlas-100k.yaml"
START_NS = 1_767_261_600 * NS
OTHER_W, LOSS_PU = 15_000.0, 0.05  # of a rack, beside its GPUs and on the way to them. source: estimate
QUIET_W, BINDING_W, MOST_W = 300.0, 1200.0, 1200.0  # of a GPU in the mean, and at most
# (key, whether more is better, bound), from the requirements of the project
GOALS: tuple[tuple[str, bool, float], ...] = (("power.n100k.allocate_ms_p50", False, 20.0),)
ROWS = (
    ("allocate", "allocate_ms"),
    ("  the same in processor time", "allocate_cpu_ms"),
    ("power_cap, quiet", "cap_quiet_ms"),
    ("power_cap, binding", "cap_binding_ms"),
    ("power_guard, quiet", "guard_quiet_ms"),
    ("power_guard, feed lost", "guard_binding_ms"),
    ("part of the site: allocate", "part_ms"),
    ("  the linear program, as fair", "program_ms"),
)


class PowerLoad(msgspec.Struct, frozen=True):
    """Size of a power benchmark: devices, groups, rounds, the site; devices of the part that has a rival."""

    devices: int
    groups: int
    rounds: int
    site: str
    part: int


def made_up(devices: int, groups: int, seed: int = 0) -> tuple[Devices, Budgets]:
    """Devices in racks under budgets of racks, two trees of three levels, and CDUs. source: estimate"""
    rng = np.random.default_rng(seed)
    group = np.sort(rng.integers(0, groups, devices)).astype(np.int32)
    room_w, floor_w = rng.uniform(0.0, 1000.0, devices), np.full(devices, 200.0)
    weight, priority = rng.uniform(0.5, 2.0, devices), rng.integers(0, 3, devices).astype(np.int32)
    full_w, least_w = np.bincount(group, room_w, groups), np.bincount(group, floor_w, groups)
    rows: list[tuple[np.ndarray, float, tuple[float, float]]] = []
    every = np.arange(groups, dtype=np.int32)
    rows += [(every[g : g + 1], 1.0, (0.5, 1.2)) for g in range(groups)]
    for _side in range(2):
        rows += [(every[k : k + 14], 0.5, (0.5, 1.1)) for k in range(0, groups, 14)]
        rows += [(every[k : k + 140], 0.5, (0.5, 1.0)) for k in range(0, groups, 140)]
        rows.append((every, 0.5, (0.6, 0.9)))
    rows += [(every[k : k + 10], 1.0, (0.5, 1.2)) for k in range(0, groups, 10)]
    limit_w = [
        share * (least_w[of].sum() + rng.uniform(*span) * full_w[of].sum()) for of, share, span in rows
    ]
    start = np.concatenate([[0], np.cumsum([len(of) for of, _, _ in rows])]).astype(np.int32)
    share = np.repeat([share for _, share, _ in rows], np.diff(start))
    budgets = Budgets(start, np.concatenate([of for of, _, _ in rows]), share, np.array(limit_w))
    return Devices(group, priority, floor_w, room_w, weight), budgets


def by_programs(devices: Devices, budgets: Budgets) -> F64:
    """The rival: raise the common level by a linear program, fix whoever can get no more, and again."""
    from scipy.optimize import linprog  # a rival is no part of the tick

    share = np.zeros((len(budgets.limit_w), len(devices.group)))
    by_group = np.zeros((len(budgets.limit_w), int(budgets.group.max()) + 1))
    by_group[budgets.row, budgets.group] = budgets.share
    share = by_group[:, devices.group]
    power_w = devices.floor_w.copy()
    for priority in np.unique(devices.priority)[::-1]:
        free = (devices.priority == priority) & (devices.room_w > 0)
        left_w, extra_w, level = np.maximum(budgets.limit_w - share @ power_w, 0.0), np.zeros(len(free)), 0.0
        while free.any():
            rest_w = np.maximum(left_w - share[:, ~free] @ extra_w[~free], 0.0)
            rise = share[:, free] @ devices.weight[free]
            full = devices.room_w / devices.weight
            most = float(full[free].min())
            found = linprog([-1.0], A_ub=rise[:, None], b_ub=rest_w, bounds=[(min(level, most), most)])
            level = float(found.x[0]) if found.success else level
            tight = rest_w - rise * level <= 1e-7 * np.maximum(budgets.limit_w, 1.0)
            stuck = free & ((full <= level * (1 + 1e-12)) | (share[tight] > 0).any(axis=0))
            extra_w[stuck] = np.minimum(devices.weight[stuck] * level, devices.room_w[stuck])
            if not stuck.any():
                break
            free &= ~stuck
        power_w += extra_w
    return power_w


def _policies(task: PowerLoad) -> tuple[dict[str, F64], int]:
    """(times of both policies on the site, quiet and binding; its number of GPUs)."""
    policies: tuple[Policy, ...] = (PowerCap(), PowerGuard())
    site = build_site(spec_of(read_yaml(Path(task.site)), None, task.site), task.site)
    out: dict[str, F64] = {}
    for name, mean_w in (("quiet", QUIET_W), ("binding", BINDING_W)):
        engine, inbox = Engine(site, policies, []), Inbox(site.sizes)
        gpu_w = np.minimum(np.random.default_rng(1).uniform(0.8, 1.2, site.sizes["gpu"]) * mean_w, MOST_W)
        rack_w = (1.0 + LOSS_PU) * site.sum_by_rack("gpu", gpu_w) + OTHER_W
        dead = (site.side_of_feeder == 1) & (name == "binding")
        view = engine.view(1.0)
        carried = carried_by(view, pairs_of(site, dead, False))
        feeder_w = sums_w(carried, rack_w)[carried.feeder(0) :][: len(dead)]
        for tick in range(3):
            now_ns = START_NS + tick * NS
            heard: dict[str, F64] = {"gpu.power_w": gpu_w, "rack.power_w": rack_w, "feeder.power_w": feeder_w,
                                     "gpu.power_limit_w": np.full(len(gpu_w), MOST_W),
                                     "feeder.energised_state": dead.astype(np.float64)}  # fmt: skip
            for key, values in heard.items():
                table, _, signal = key.partition(".")
                none = np.empty((0, len(values)), np.int64)
                rows = values.astype(np.float32).reshape(1, -1)
                inbox.put_block(Block(table, 0, (signal,), rows, (), none, now_ns), now_ns)
            frame = inbox.take(tick, now_ns, 1.0)
            before = {p.name: engine.memory[p.name] for p in policies}
            engine.tick(frame)
        for policy, short_name in zip(policies, ("cap", "guard"), strict=True):
            memory = before[policy.name]
            if short_name == "guard":  # it has to cut, and not only to hold
                memory = {k: np.zeros_like(v) for k, v in memory.items()}
            out[f"{short_name}_{name}_ms"] = _asked(policy, engine, memory, task.rounds)
    return out, site.sizes["gpu"]


def _asked(policy: Policy, engine: Engine, memory: Memory, rounds: int) -> F64:
    return timed_ms(lambda: policy.propose(engine.view(1.0), memory), rounds)[0]


def measured(task: PowerLoad) -> dict[str, float | int]:
    """Figures of a task: times in ms, and how far the linear program is from the allocation."""
    devices, budgets = made_up(task.devices, task.groups)
    times: dict[str, F64] = {}
    times["allocate_ms"], times["allocate_cpu_ms"] = timed_ms(
        lambda: allocate(devices, budgets, task.groups), task.rounds
    )
    found, gpus = _policies(task)
    times |= found
    few = max(2, task.part // 10)
    part = made_up(task.part, few)
    times["part_ms"], _ = timed_ms(lambda: allocate(*part, few), task.rounds)
    times["program_ms"], _ = timed_ms(lambda: by_programs(*part), max(1, task.rounds // 20))
    ours, theirs = allocate(*part, few).power_w, by_programs(*part)
    out: dict[str, float | int] = {
        "devices": task.devices, "gpus": gpus, "part_devices": task.part,
        "program_differs_pu": float(np.max(np.abs(ours - theirs) / np.maximum(ours, 1.0))),
    }  # fmt: skip
    for name, t in times.items():
        out |= percentiles(name, t)
    return out


def measure_power(quick: bool, _: Path, say: Callable[[str], None]) -> Figures:
    """Figures of the allocation and both policies, from a process of its own. Raises CalledProcessError."""
    root = Path(__file__).resolve().parents[3]
    task = PowerLoad(100_000, 1400, 60, str(root / SITE), 400)
    if quick:
        task = PowerLoad(500, 20, 3, str(root / "deploy/sites/lab.yaml"), 40)
    say(f"power: {task.devices:,} devices are given their shares {task.rounds} times")
    prefix = f"power.{'quick' if quick else 'n100k'}."
    return ask_child("tests.evaluation.bench.power", task, prefix)


def show(found: Figures, out: Console) -> None:
    """The table of this part."""
    mine = part_of(found, ("power.n100k.", "power.quick."), "devices")
    if not mine:
        return
    title = f"Power shared among {mine['devices']:,} made-up devices, and policies on {mine['gpus']:,} GPUs"
    rows = [(row, cell(mine, key)) for row, key in ROWS]
    out.print(table(f"{title}; times as p50 / p99 / max", ("", "ms"), rows))
    differs = (
        f"On {mine['part_devices']:,} devices the two differ by {mine['program_differs_pu']:.1g} at most."
    )
    out.print(differs, markup=False, soft_wrap=True)


if __name__ == "__main__":
    answer_parent(PowerLoad, measured)
