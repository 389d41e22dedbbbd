"""Losses of flow lived through by a plant at full load, with the thermal guard at `act` or with less.

Each has a circuit of its own. Equal runs give equal outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies import REGISTRY
from tests.support.flow_losses import AFTER_S, WARM_S, FlowLoss
from twin.catalogue import NS, Bool
from twin.contracts import Decision
from twin.engine import Engine
from twin.plant import Plant, Sensors
from twin.run import Report
from twin.simulation import Simulation
from twin.telemetry import Frame

CAP, POWER = "gpu.power_cap_w", "node.power_state"
FULL_PU = (1.0, 0.9, 0.7)  # activity of SMs, tensor cores, memory
LEVEL_PU = (0.85, 1.0)  # of it, drawn for the whole site
# That the arm of caps alone may go on, to see whether a GPU would have been lost; less where the flow is back
CAPPED_S = 1800
NAME = "thermal_guard"


@dataclass(frozen=True)
class LossOutcome:
    """GPUs that heat shut down; the hottest that had power, over its shutdown; nodes ordered off, and of
    these the ones that would have lost none with caps alone; seconds from the cause to the first cap."""

    kind: str
    profile: str
    seed: int
    gpus: int
    shut_down: int
    shut_down_capped: int
    over_k: float
    ordered: int
    needless: int
    first_cap_s: float


class LossWatch:
    """Observer of a run since its losses: orders and GPUs that heat shut down [n]; of each circuit, the first
    cap and the hottest GPU that had power, over its shutdown."""

    def __init__(self, plant: Plant) -> None:
        n = plant.site.sizes
        self.plant = plant
        self.begun_ns = plant.now_ns + WARM_S * NS
        self.burnt: Bool = np.zeros(n["gpu"], np.bool_)
        self.ordered: Bool = np.zeros(n["node"], np.bool_)
        self.circuits = n["cdu"]
        self.over_k, self.first_cap_s = np.full(n["cdu"], -np.inf), np.full(n["cdu"], np.nan)

    def observe(self, engine: Engine, frame: Frame, decision: Decision) -> None:
        """Called after each tick."""
        if frame.now_ns <= self.begun_ns:
            return
        t, p = self.plant.truth, self.plant.parameters
        over_k = np.where(t.gpu_alive, t.gpu_temp_c - p.gpu_shutdown_c, -np.inf)
        self.over_k = np.maximum(self.over_k, over_k.reshape(self.circuits, -1).max(axis=1))
        self.burnt |= self.plant.compute.burnt
        for batch in decision.commands:
            if batch.control == POWER:
                self.ordered[batch.index[batch.value > 0]] = True
            elif batch.control == CAP:
                of = np.unique(batch.index * self.circuits // len(self.burnt))
                begun = of[np.isnan(self.first_cap_s[of])]
                self.first_cap_s[begun] = (frame.now_ns - self.begun_ns) / NS

    @property
    def burnt_nodes(self) -> Bool:
        """Nodes that lost a GPU [n_node]."""
        out = np.zeros(len(self.ordered), np.bool_)
        out[self.plant.site.node_of_gpu[self.burnt]] = True
        return out


def live_through(losses: tuple[FlowLoss, ...], report: Report) -> list[LossOutcome]:
    """With all of the guard, and with its caps alone: losses that one plant has side by side."""
    whole = run_losses(losses, {}, None, report)
    capped = whole
    if whole.ordered.any() or whole.burnt.any():
        capped = run_losses(losses, {POWER: {"max": 0}}, whole.ordered, report)

    def of(column: Bool) -> Bool:
        return column.reshape(len(losses), -1)

    needless = of(whole.ordered & ~capped.burnt_nodes)
    return [
        LossOutcome(
            kind=loss.kind,
            profile=loss.profile,
            seed=loss.seed,
            gpus=of(whole.burnt).shape[1],
            shut_down=int(of(whole.burnt)[k].sum()),
            shut_down_capped=int(of(capped.burnt)[k].sum()),
            over_k=round(float(whole.over_k[k]), 2),
            ordered=int(of(whole.ordered)[k].sum()),
            needless=int(needless[k].sum()),
            first_cap_s=round(float(whole.first_cap_s[k]), 2),
        )
        for k, loss in enumerate(losses)
    ]


def run_losses(
    losses: tuple[FlowLoss, ...],
    controls: dict[str, dict[str, float]],
    until_burnt: Bool | None,
    report: Report,
) -> LossWatch:
    """A run to its end; or, where nodes are named, until each of them has lost a GPU."""
    first = losses[0]
    site = first.site(controls, len(losses))
    plant = Plant(site, seed=first.seed)
    plant.power.backup = first.backup()
    t = plant.truth
    for k, loss in enumerate(losses):
        level = np.random.default_rng((loss.seed, 0xF111)).uniform(*LEVEL_PU)
        for column, part in zip((t.gpu_sm_pu, t.gpu_tensor_pu, t.gpu_dram_pu), FULL_PU, strict=True):
            column.reshape(len(losses), -1)[k] = part * level
    plant.settle()
    engine = Engine(site, [REGISTRY[NAME]()], [], {NAME: "act"})
    simulation = Simulation(engine, plant, Sensors(site, first.seed))
    watch = LossWatch(plant)
    simulation.observers = (watch,)
    disturbance, flow_lpm = plant.disturbance, plant.parameters.rack_flow_lpm
    short = until_burnt is None or first.kind.startswith("utility")
    seconds = WARM_S + (AFTER_S if short else CAPPED_S)
    for second in range(seconds):
        if second >= WARM_S:
            disturbance.sensors.clear()
            for k, loss in enumerate(losses):
                loss.apply(disturbance, flow_lpm, float(second - WARM_S), k)
        simulation.step()
        if second % 60 == 0:
            report((second + 1) / seconds, first.kind)
            if (
                until_burnt is not None
                and second >= WARM_S + AFTER_S
                and watch.burnt_nodes[until_burnt].all()
            ):
                break
    return watch
