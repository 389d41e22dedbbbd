"""The load of the benchmark: a site of GB200 racks whose signals are all new and noisy each second.

Rack agents are played by columnar messages, the building by whole blocks; the GPUs obey the caps that the
engine commands and acknowledge them. Seeded, so that two machines carry the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import yaml

from connectors.agents import FRAME, encode_frame
from twin.catalogue import F32, F64, I64, NS, TABLES
from twin.config import spec_of
from twin.contracts import Decision
from twin.physics import COOLANTS, heat_rate_w_per_k
from twin.site import Site, SiteSpec
from twin.telemetry import Block, CommandAcked, Event, Message, OperatorRequest

GPUS_PER_RACK, RACKS_PER_GROUP = 72, 8
CAP = "gpu.power_cap_w"
START_NS = 1_767_225_600 * NS
FIELDS = 8  # distinct fields of noise; drawn by row and tick and shifted, so that no two ticks are alike
HOT_SHARE, HOT_FROM_C, HOT_BY_K = 0.01, 82.5, 4.0  # the guard is at 82 degC, the limit at 87
HOT_TICKS = (20, 40)
ASKED_SHARE = 0.002  # GPUs under a standing request of an operator
MAX_CAP_W, ASKED_W = 1200.0, 1000.0
OVERHEAD_W = 24_000.0  # of a rack, beside its GPUs
LIQUID_SHARE = 0.9
COUNTERS = ("energy_mj", "throttle_power_ns")
# Readings of a GPU under load: (mean, spread from one GPU to another, noise from one second to the next), in
# the signal's unit. Means are those of a busy training job; the noise is an estimate for averages over 1 s.
GAUGES: dict[str, tuple[float, float, float]] = {
    "power_w": (880.0, 15.0, 5.0), "temp_c": (52.0, 2.0, 0.5), "hbm_temp_c": (60.0, 2.0, 0.5),
    "thermal_margin_k": (35.0, 2.0, 0.5), "util_pu": (0.95, 0.01, 0.015), "mem_used_pu": (0.8, 0.02, 0.0005),
    "sm_clock_hz": (1.965e9, 0.0, 0.0), "mem_clock_hz": (3.996e9, 0.0, 0.0),
    "power_limit_w": (MAX_CAP_W, 0.0, 0.0), "sm_active_pu": (0.85, 0.02, 0.01),
    "tensor_active_pu": (0.45, 0.02, 0.01), "dram_active_pu": (0.4, 0.02, 0.01),
    "nvlink_tx_bytes_per_s": (3e11, 5e9, 3e9), "nvlink_rx_bytes_per_s": (3e11, 5e9, 3e9),
    "pcie_tx_bytes_per_s": (2e9, 1e8, 5e7), "pcie_rx_bytes_per_s": (2e9, 1e8, 5e7),
    "clock_event_bits": (0.0, 0.0, 0.0), "xid_code": (0.0, 0.0, 0.0),
}  # fmt: skip
# Signals that stand still but for rare steps: (share of GPUs that are off at any second, by how much).
STEPS: dict[str, tuple[float, float]] = {"sm_clock_hz": (0.02, -15e6), "clock_event_bits": (0.02, 4.0)}
RACK = ("power_w", "supply_temp_c", "return_temp_c", "flow_lpm", "diff_pressure_pa", "valve_pu", "leak_state")
FEEDER = ("power_w", "voltage_v", "energised_state", "breaker_state")
CDU = ("supply_temp_c", "return_temp_c", "flow_lpm", "supply_pressure_pa", "return_pressure_pa", "leak_state")
ASSUMPTIONS = (
    "18 gauges and 2 counters per GPU, each new every tick; noise (1 sigma): power 5 W, temperatures and "
    "margin 0.5 K, utilisation 1.5 %, activities 1 %, memory 0.05 %, NVLink 1 % and PCIe 2.5 % of its rate; "
    f"clocks and event bits step on 2 % of the GPUs, XID 0. {FIELDS} fields of noise, shifted per row and "
    "tick; fresh counters. 1 % of the GPUs is above the thermal guard, warming, for 20-40 s each; caps are "
    "obeyed, echoed and acknowledged one by one; 0.2 % is under an operator's standing request. 7 signals "
    "per rack, 4 per feeder, 6 per CDU too."
)


def site_tree(racks: int, period_s: float = 1.0) -> dict[str, Any]:
    """The site file of the load: liquid-cooled racks on feeds A and B, both metered, both policies armed."""
    groups = -(-racks // RACKS_PER_GROUP)
    names = f"r[0001-{racks:04d}]"
    tree: dict[str, Any] = yaml.safe_load(f"""
site: bench
halls:
  - name: hall1
    racks: [{{name: "{names}", profile: gb200-nvl72}}]
    cdus: [{{name: "cdu[001-{groups:03d}]", serves: ["{names}"]}}]
    feeders:
      - {{name: ups-a, side: A, serves: ["pdu-a[001-{groups:03d}]"]}}
      - {{name: ups-b, side: B, serves: ["pdu-b[001-{groups:03d}]"]}}
      - {{name: "pdu-a[001-{groups:03d}]", side: A, serves: ["{names}"]}}
      - {{name: "pdu-b[001-{groups:03d}]", side: B, serves: ["{names}"]}}
history_s: {{rack.power_w: 3600, feeder.power_w: 3600}}
periods_s: {{gpu: {period_s}, rack: 1.0, feeder: 1.0, cdu: 1.0}}
policies: {{thermal_guard: {{authority: act}}, operator: {{authority: act}}}}
""")
    return tree


def spec_for(racks: int, period_s: float = 1.0) -> SiteSpec:
    """The same with its profile."""
    return spec_of(site_tree(racks, period_s), None, "bench")


class Arrivals(NamedTuple):
    """Input of the daemon within one second."""

    messages: list[Message]
    blocks: list[Block]  # of the building, decoded elsewhere
    events: list[Event]  # acknowledgements and requests


class Load:
    """The simulated devices. Arrays are [n_gpu] unless said; `share` of the racks speaks in each tick."""

    def __init__(self, site: Site, share: float = 1.0, seed: int = 1) -> None:
        self.site, self.every = site, max(1, round(1 / share))
        self.rng = np.random.default_rng(seed)
        self.n, self.racks = site.sizes["gpu"], site.sizes["rack"]
        spec = TABLES["gpu"].by_name
        self.quantum = np.array([[spec[s].quantum] for s in GAUGES], np.float32)
        self.high = np.array([[spec[s].high] for s in GAUGES], np.float32)
        spread = [self.rng.normal(mean, over, self.n) for mean, over, _ in GAUGES.values()]
        self.base = np.array(spread, np.float32)  # [n_gauge, n]
        self.noise = self._fields()  # [FIELDS, n_gauge, n] int16, in quanta
        self.value = np.empty_like(self.base)
        self.counts = np.zeros((len(COUNTERS), self.n), np.int64)
        self.cap_w = np.full(self.n, MAX_CAP_W)
        self.order, self.next_hot = self.rng.permutation(self.n), 0
        self.hot_since = np.zeros(self.n, np.int64)
        self.hot_until = np.zeros(self.n, np.int64)
        self.topics = [FRAME + site.name("rack", r) for r in range(self.racks)]
        self.slices = [site.gpus_of_rack(r) for r in range(self.racks)]
        self.acks: list[Event] = [self._request()]
        self.below = [site.racks_below(f) for f in range(site.sizes["feeder"])]

    def _fields(self) -> np.ndarray:
        out = np.zeros((FIELDS, len(GAUGES), self.n), np.int16)
        for k, (name, (_, _, sigma)) in enumerate(GAUGES.items()):
            share, step = STEPS.get(name, (0.0, 0.0))
            quantum = float(self.quantum[k, 0])
            for field in out:
                if step:
                    field[k] = np.where(self.rng.random(self.n) < share, round(step / quantum), 0)
                elif sigma:
                    field[k] = np.rint(self.rng.normal(0.0, sigma / quantum, self.n))
        return out

    def _request(self) -> OperatorRequest:
        some = self.order[-max(1, round(ASKED_SHARE * self.n)) :]  # the last to become hot
        names = tuple(self.site.name("gpu", int(i)) for i in some)
        return OperatorRequest(id="bench-1", author="bench", control=CAP, names=names, lo=200.0, hi=ASKED_W,
                               reason="standing request of the benchmark")  # fmt: skip

    @property
    def own_bytes(self) -> int:
        """Memory of the load itself, messages of a tick included."""
        kept = (self.base, self.noise, self.value, self.counts, self.cap_w, self.order, self.hot_since)
        return sum(a.nbytes for a in kept) + 2 * (self.value.nbytes + self.counts.nbytes)

    def arrive(self, tick: int, now_ns: int) -> Arrivals:
        """Everything of the second before `now_ns`; each rack's agent sampled at an instant of its own."""
        self._sense(tick)
        late_ns = 10_000_000 + self.rng.integers(0, 800_000_000, self.racks)
        speaking = range(tick % self.every, self.racks, self.every)
        messages = []
        for r in speaking:
            at, t_ns = self.slices[r], now_ns - int(late_ns[r])
            columns: dict[str, np.ndarray] = {name: self.value[k, at] for k, name in enumerate(GAUGES)}
            columns |= {name: self.counts[k, at] for k, name in enumerate(COUNTERS)}
            messages.append(Message(t_ns, self.topics[r], encode_frame(t_ns, columns)))
        events, self.acks = self.acks, []
        return Arrivals(messages, self._building(now_ns - NS // 5), events)

    def _sense(self, tick: int) -> None:
        row = {name: k for k, name in enumerate(GAUGES)}
        for k, shift in enumerate(self.rng.integers(1, max(2, self.n), len(GAUGES)).tolist()):
            field = self.noise[(5 * tick + 3 * k) % FIELDS, k]
            self.value[k, shift:], self.value[k, :shift] = field[: self.n - shift], field[self.n - shift :]
        self.value *= self.quantum
        self.value += self.base
        np.clip(self.value, None, self.high, out=self.value)
        # Some are too hot, and each of those warms further, until its blockage is gone.
        missing = max(1, round(HOT_SHARE * self.n)) - int((self.hot_until > tick).sum())
        if missing > 0:
            at = self.order[(self.next_hot + np.arange(missing)) % self.n]
            self.next_hot += missing
            stay = self.rng.integers(*HOT_TICKS, missing)
            # The first ones did not begin all at once.
            self.hot_since[at] = tick - (self.rng.integers(0, HOT_TICKS[0], missing) if tick == 0 else 0)
            self.hot_until[at] = self.hot_since[at] + stay
        hot = np.flatnonzero(self.hot_until > tick)
        warmed = (tick - self.hot_since[hot]) / (self.hot_until[hot] - self.hot_since[hot])
        noise_k = self.value[row["temp_c"], hot] - self.base[row["temp_c"], hot]
        self.value[row["temp_c"], hot] = HOT_FROM_C + HOT_BY_K * warmed + noise_k
        power = self.value[row["power_w"]]
        np.minimum(power, self.cap_w, out=power, casting="same_kind")
        self.value[row["power_limit_w"]] = self.cap_w
        self.counts[0] += (power * 1000.0).astype(np.int64) + self.rng.integers(-400, 400, self.n)
        capped = np.flatnonzero(self.cap_w < MAX_CAP_W)
        self.counts[1, capped] += self.rng.integers(2 * 10**8, 3 * 10**8, len(capped))

    def _building(self, t_ns: int) -> list[Block]:
        rng, n = self.rng, self.racks
        power_w = self.site.sum_by_rack("gpu", self.value[0]) + OVERHEAD_W
        supply_c, flow_lpm = 32.0 + rng.normal(0, 0.05, n), 115.0 + rng.normal(0, 0.5, n)
        rate = heat_rate_w_per_k(COOLANTS[self.site.file.coolant], flow_lpm, supply_c + 5.0)
        return_c = supply_c + LIQUID_SHARE * power_w / rate + rng.normal(0, 0.03, n)
        zero = np.zeros(n)
        rack = (power_w * rng.normal(1, 0.001, n), supply_c, return_c, flow_lpm,
                1e5 + rng.normal(0, 300, n), 0.5 + rng.normal(0, 0.002, n), zero)  # fmt: skip
        drawn_w = np.array([0.5 * power_w[below].sum() for below in self.below])
        m = len(drawn_w)
        feeder = (drawn_w * rng.normal(1, 0.001, m), 415.0 + rng.normal(0, 0.3, m), np.zeros(m), np.zeros(m))
        c = self.site.sizes["cdu"]
        cdu = (32.0 + rng.normal(0, 0.05, c), 44.0 + rng.normal(0, 0.1, c), 920.0 + rng.normal(0, 4, c),
               3e5 + rng.normal(0, 500, c), 1e5 + rng.normal(0, 500, c), np.zeros(c))  # fmt: skip
        parts = (("rack", RACK, rack), ("feeder", FEEDER, feeder), ("cdu", CDU, cdu))
        return [_block(table, names, columns, t_ns) for table, names, columns in parts]

    def obey(self, decision: Decision) -> None:
        """Set the caps; say so with the next arrivals."""
        for batch in decision.commands:
            if batch.control != CAP:
                continue
            self.cap_w[batch.index] = batch.value
            if batch.renewal or batch.final:
                continue
            for k, entity in enumerate(batch.index.tolist()):
                self.acks.append(CommandAcked(
                    control=CAP, name=self.site.name("gpu", entity), generation=int(batch.generation[k]),
                    command=f"{batch.epoch}-{batch.command[k]}", state="done"))  # fmt: skip


def _block(table: str, signals: tuple[str, ...], columns: tuple[F64, ...], t_ns: int) -> Block:
    values: F32 = np.array(columns, np.float32)
    none: I64 = np.empty((0, values.shape[1]), np.int64)
    return Block(table, 0, signals, values, (), none, t_ns)
