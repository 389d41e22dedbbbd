"""Faults of whole devices: stopped pumps, blocked filters, the weather, odd sensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from twin.catalogue import F32, F64, I64, NS, TABLES, Bool
from twin.contracts import Residual
from twin.diagnosis.alarm_budget import surprise
from twin.diagnosis.cause import Cause
from twin.diagnosis.cusum import WILD_SIGMAS
from twin.diagnosis.deviations import SLICE, Tracks
from twin.diagnosis.device_reports import NEVER_NS, good, reported
from twin.diagnosis.sensor_checks import LEAP_MEAN, Meters, SensorChecks
from twin.diagnosis.signature import GPU_POWER, LOOP_USUAL, NODE_POWER, PSU1, PSU2, RACK_POWER
from twin.diagnosis.topology import Topology
from twin.diagnosis.verdict import amount
from twin.site import CDU_FILTER_DROP_PA, Site
from twin.telemetry import GOOD, EntityState, State, column, keyed, scalar

RUNNING_PU, STOPPED_PU = 0.2, 0.05  # of a pump's speed
RAN_S = 30.0  # a pump that ran so long and stands now has stopped
MOST_EACH = 50  # sensors of a signal that are reported each; the others are counted
MOST_BESIDE = 3  # sensors of one signal in a rack that fail at once by chance
SOURCE_SHARE = 0.6  # of a table's entities silent at once: their source is gone, not each of them
WEATHER_K, WET_BULB_K = 3.0, 1.0  # above what was usual: a heat wave; source: estimate
WEATHER_USUAL_S = 3600.0  # a day's swing of 6 K is at most 1.6 K off what it was in the last hour
# A step between two readings, once a minute, that no weather makes; source: estimate
STEP_K, WEATHER_FORGET_S = 1.2, 12 * 3600.0
# Readings: a spike is over after so many; so many spikes among about ten are no chance; what stays so long is
# no spike; source: estimate
MOST_SPIKE, WEATHER_KEPT, WEATHER_SPIKES, LASTING_WEATHER = 2, 0.9, 0.8, 3
STARVED_PU, BLOCKED_DROPS = 0.3, 2.5  # of the nominal flow; of a clean filter's drop
HEAT_BITS, HEAT_BIT_LEAST, SLOWED_S = 0x68, 8.0, 60.0  # clock events: hardware, software and hardware thermal
_BITS_ROW = TABLES["gpu"].by_name["clock_event_bits"].row
BUSY_PU = 0.35  # of its rated power; source: estimate
LOOP_MEMORY, LOOP_KNOWN, LOOP_FLOOR_K = 1800.0, 300, 0.3  # ticks; ticks; least sigma
LEAST_AIM_K = 0.1  # of a set point: less is no move, as the dead band of its control
AIM_SHARE = 0.3  # of the move of a set point: doubt in where its loop's supply is meanwhile; source: estimate
GAP_MEMORY = 200.0  # readings over which the gap between memory and chip is learned
# A node's comparison that sees a jump of so many watts of a GPU must jump too; source: estimate
SEEN_W, LEAST_WILD = 200.0, 1.5
CONFIRMED_WILD = 2.0  # far readings of a comparison that confirm a jump; source: estimate
ALIKE_JUMPS = 0.5  # another meter that jumps so often beside this one sees the same; source: estimate
FEEDER_POWER, GPU_MEMORY = "feeder.power_w", "gpu.hbm_temp_c"
# Powers that are the sum of others: where those stand still, as at their caps, it may as well. They have
# moved by so much; source: estimate, the noise of a meter
SUMS, MOVED_PU = {NODE_POWER: "gpu", PSU1: "gpu", PSU2: "gpu", RACK_POWER: "node"}, 1e-3
LEAST_SUM_W = 1.0  # parts that all read 0 have not moved
POWERED = ("gpu.sm_clock_hz", "gpu.power_w", "node.power_w", "rack.power_w", FEEDER_POWER,
           "feeder.current_a", "feeder.apparent_power_va")  # fmt: skip


class DeviceFaults(EntityState):
    """Pumps that ran, the usual weather, and the usual excess of GPU memory over chip temperature."""

    ran_s: F64 = column("cdu", "f8", trail=(2,))
    stopped_ns: I64 = column("cdu", "i8", trail=(2,))
    # The weather: outdoor dry and wet bulb, usual and last; for how long it was watched; readings since the
    # last step; spikes among about the last ten readings
    usual_c: F64 = scalar(np.full(2, np.nan))
    weather_c: F64 = scalar(np.full(2, np.nan))
    weather_s: float = scalar(0.0)
    warmer_k: float = 0.0
    weather_ns: int = scalar(0)
    weather_kept: int = scalar(0)
    weather_spikes: float = scalar(0.0)
    weather_step_k: float = scalar(0.0)
    # Of each GPU: mean memory activity squared, and its product with the gap
    gap_xx: F32 = column("gpu", "f4")
    gap_xy: F32 = column("gpu", "f4")
    gap_mean: F32 = column("gpu", "f4")
    gap_var: F32 = column("gpu", "f4", 1.0)
    gap_z: F32 = column("gpu", "f4")
    gap_count: int = scalar(0)
    slowed_ns: I64 = column("gpu", "i8")
    # Sum of its parts when a power was found to stand still; 0: they have moved since; NaN: it does not stand
    stood_w: dict[str, F64] = keyed("f8", np.nan)
    loop_c: F64 = column("loop", "f8", np.nan)
    loop_aim_c: F64 = column("loop", "f8", np.nan)
    loop_var: F64 = column("loop", "f8")
    loop_count: I64 = column("loop", "i8")

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology.sizes)
        self.topology = topology

    def pumps(
        self, state: State, in_maintenance: dict[str, Bool], dt_s: float, unfed_from_ns: int = NEVER_NS
    ) -> list[Cause]:
        """Find pumps that ran and have stopped, although their CDU was not stopped and has voltage."""
        if not reported(state, "cdu.pump1_speed_pu"):
            return []
        speed = np.stack([good(state, "cdu.pump1_speed_pu"), good(state, "cdu.pump2_speed_pu")], axis=1)
        stands = speed < STOPPED_PU
        self.ran_s = np.where(speed > RUNNING_PU, np.minimum(self.ran_s + dt_s, 2 * RAN_S), self.ran_s)
        stopped = stands & (self.ran_s >= RAN_S)
        if (mask := in_maintenance.get("cdu")) is not None:
            stopped[mask] = False
        self.stopped_ns[stopped & (self.stopped_ns == 0)] = state.now_ns
        self.stopped_ns[~stopped] = 0
        stopped &= self.stopped_ns < unfed_from_ns
        if not stopped.any():
            return []
        out = []
        flow = good(state, "cdu.flow_lpm")
        for cdu in np.flatnonzero(stopped.any(axis=1)).tolist():
            parts = tuple((np.flatnonzero(stopped[cdu]) + 1).tolist())
            other = speed[cdu][~stopped[cdu]]
            evidence = [f"pump {parts[0]} stands still"]
            if len(other) and np.isfinite(other[0]):
                evidence.append(f"the other one runs at {100 * other[0]:.0f} %")
            if np.isfinite(flow[cdu]):
                evidence.append(f"flow {flow[cdu]:.0f} l/min")
            racks = len(self.topology.below("cdu", cdu, "rack"))
            count = max(1, racks)
            if stopped[cdu].all():
                # Two stopped pumps are graver than one: the fault is journaled again
                evidence[0] = "both pumps stopped, no flow"
                count += len(self.topology.below("cdu", cdu, "gpu"))
            out.append(
                Cause("pump_trip", "cdu", cdu, "", 0.99, tuple(evidence), count, 0.0, 30.0, parts=parts)
            )
        return out

    def filters(self, state: State, in_maintenance: dict[str, Bool]) -> list[Cause]:
        """Find filters with all of the pressure across them and hardly any flow; no other comparison shows
        this."""
        if not reported(state, "cdu.filter_diff_pressure_pa"):
            return []
        nominal = self.topology.site.design.cdu_flow_lpm
        ratio = good(state, "cdu.flow_lpm") / nominal
        drop = good(state, "cdu.filter_diff_pressure_pa")
        with np.errstate(invalid="ignore"):
            blocked = (ratio < STARVED_PU) & (drop > BLOCKED_DROPS * CDU_FILTER_DROP_PA)
        if (mask := in_maintenance.get("cdu")) is not None:
            blocked &= ~mask
        out = []
        for cdu in np.flatnonzero(blocked).tolist():
            text = (
                f"{drop[cdu] / 1e3:.0f} kPa across the filter",
                f"flow {ratio[cdu] * nominal[cdu]:.0f} of {nominal[cdu]:.0f} l/min",
            )
            racks = len(self.topology.below("cdu", cdu, "rack"))
            out.append(Cause("filter_blocked", "cdu", cdu, "", 0.99, text, max(1, racks), 2.0, 60.0))
        return out

    def slowed(self, state: State) -> Bool | None:
        """Return the GPUs that heat slows, or slowed within the last minute [n_gpu]; None for none."""
        if not reported(state, "gpu.clock_event_bits"):
            return None
        bits = state.tables["gpu"].value[_BITS_ROW]
        if bits.max(initial=0.0) >= HEAT_BIT_LEAST:
            hot = (np.nan_to_num(bits).astype(np.int64) & HEAT_BITS) != 0
            self.slowed_ns[hot] = state.now_ns
        if not self.slowed_ns.any():
            return None
        recent: Bool = (self.slowed_ns > 0) & (state.now_ns - self.slowed_ns < SLOWED_S * NS)
        if not recent.any():
            self.slowed_ns[:] = 0
            return None
        return recent

    def sensors(
        self,
        watch: SensorChecks,
        tracks: Tracks,
        dark: dict[str, Bool],
        still: dict[str, Bool],
        node_power: Residual | None,
        disturbed: Callable[[str, int, str, int], Bool | None] = lambda *_: None,
    ) -> list[Cause]:
        """Single sensors that stand still or jump; `dark` [n]: devices reported as a whole or without data;
        `still` [n]: devices whose readings may stand still; `disturbed`: rows of a comparison that a
        fault beside a device stirs, and that so confirm nothing."""
        out: list[Cause] = []
        for key in [k for k in self.stood_w if not watch.stands(k)]:
            del self.stood_w[key]
        for table, meters in watch.meters.items():
            if not meters.anything:
                continue
            hidden = dark.get(table)
            for k, name in enumerate(meters.names):
                key = f"{table}.{name}"
                for kind, flags in (("frozen", meters.frozen[k]), ("spiking", meters.jumping[k])):
                    if not flags.any():
                        continue
                    odd = flags.copy() if hidden is None else flags & ~hidden
                    if kind == "frozen" and table in still:
                        odd &= ~still[table]
                    surely = False
                    if kind == "frozen" and key in SUMS:
                        odd &= self._left_behind(key, flags, watch)
                        surely = key in self.stood_w and bool((self.stood_w[key][odd] == 0.0).all())
                    many = np.count_nonzero(odd)
                    if many == 0 or (many > 2 and many > SOURCE_SHARE * len(odd) and not surely):
                        continue
                    if many > MOST_BESIDE and table in ("gpu", "node"):
                        out += self._crowds(kind, table, name, odd)
                    first, rest = len(out), np.flatnonzero(odd).tolist()
                    for entity in rest[:MOST_EACH]:
                        if kind == "frozen":
                            if key == "gpu.temp_c" and not self._busy(meters, entity):
                                continue
                        elif not _agrees(key, entity, tracks, disturbed) or self._moved_with_it(
                            meters, k, entity, watch, tracks, node_power
                        ):
                            continue
                        text = self._words(kind, key, meters, k, entity)
                        out.append(Cause(f"sensor_{kind}", table, entity, name, 0.97, (text,), 1, 3.0, 30.0))
                    if kind == "frozen" and len(out) > first:
                        out[first].more = len(rest[MOST_EACH:])
        return out

    def _moved_with_it(
        self,
        meters: Meters,
        k: int,
        entity: int,
        watch: SensorChecks,
        tracks: Tracks,
        node_power: Residual | None,
    ) -> bool:
        """Return True if other readings jumped with this one: the meter is right."""
        key = f"{meters.table}.{meters.names[k]}"
        if key == FEEDER_POWER:
            return _shared_by_feeds(self.topology.site, entity, meters.jumps[k])
        if key == RACK_POWER:
            return self._with_nodes(watch, entity, float(meters.jumps[k, entity]))
        if key == GPU_POWER:
            return not _with_node(entity, self.topology, tracks, node_power)
        return key == GPU_MEMORY and self._with_others(meters, k, entity)

    def _left_behind(self, key: str, stands: Bool, watch: SensorChecks) -> Bool:
        """Return the powers [n] of which the parts have moved since it was found to stand still, or do not
        report."""
        table, child = key.partition(".")[0], SUMS[key]
        if child not in watch.meters:
            return stands
        parts_w, at = watch.meters[child].last_of("power_w"), self.topology.above(child, table)
        known: Bool = np.bincount(at[np.isfinite(parts_w)], minlength=len(stands)) > 0
        sum_w = np.maximum(np.bincount(at, np.nan_to_num(parts_w), len(stands)), LEAST_SUM_W)
        if key not in self.stood_w:
            self.stood_w[key] = np.full(len(stands), np.nan)
        stood_w = self.stood_w[key]
        np.copyto(stood_w, np.where(stands, sum_w, np.nan), where=np.isnan(stood_w) | ~stands)
        stood_w[np.abs(sum_w - stood_w) > MOVED_PU * stood_w] = 0.0
        moved: Bool = (stood_w == 0.0) | ~known
        return moved

    def _crowds(self, kind: str, table: str, name: str, odd: Bool) -> list[Cause]:
        """Report racks in which more sensors misbehave than fail by chance, and clear them.

        Sensors that jump together follow their work; sensors that stand still together are one fault of the
        rack's source.
        """
        rack_of = self.topology.above(table, "rack")
        many = np.bincount(rack_of[odd], minlength=self.topology.sizes["rack"])
        out = []
        for rack in np.flatnonzero(many > MOST_BESIDE).tolist():
            odd[rack_of == rack] = False
            if kind == "frozen":
                text = (
                    f"{name} of {many[rack]} {table} stands still at once: their source repeats old readings"
                )
                out.append(
                    Cause("sensor_frozen", "rack", rack, "", 0.97, (text,), int(many[rack]), 3.0, 30.0)
                )
        return out

    def _with_others(self, meters: Meters, k: int, gpu: int) -> bool:
        """Return True if a GPU's gauge leaps no more often than chance has it where others of its rack leap,
        but for one that may be odd as well: the work makes them. No comparison covers this gauge.
        """
        rack_of = self.topology.site.rack_of_gpu
        beside = np.minimum(meters.jumps[k][rack_of == rack_of[gpu]], 1.0)
        mean = (float(beside.sum()) - 2.0) / max(len(beside) - 1, 1)
        bound = meters.logs.spiking
        return not surprise(float(meters.jumps[k, gpu]), max(mean, LEAP_MEAN)) >= bound

    def _with_nodes(self, watch: SensorChecks, rack: int, jumps: float) -> bool:
        """Return True if the power of a node of a rack jumps as often as the rack's: its work does. The two
        are not read at one instant, so that their comparison jumps as well.
        """
        if (meters := watch.meters.get("node")) is None:
            return False
        of_nodes = meters.jumps[meters.index("power_w"), self.topology.below("rack", rack, "node")]
        return bool(of_nodes.max(initial=0.0) >= ALIKE_JUMPS * jumps)

    def _busy(self, meters: Meters, gpu: int) -> bool:
        """Return True if a GPU draws so much power that its temperature cannot stand still."""
        rated_w = self.topology.site.design.gpu_max_w[self.topology.site.rack_of_gpu[gpu]]
        return bool(meters.last[meters.index("power_w"), gpu] > BUSY_PU * rated_w)

    @staticmethod
    def _words(kind: str, key: str, meters: Any, k: int, entity: int) -> str:
        value = amount(key, float(meters.last[k, entity]))
        if kind == "frozen":
            return f"{value} for {int(meters.run[k, entity])} readings, which is new for this sensor"
        return f"jumps far beyond its noise and back, now {value}"

    def weather(self, state: State, in_maintenance: dict[str, Bool]) -> list[Cause]:
        """Distinguish a heat wave, which warms both bulbs, from a faulty thermometer, which warms or jumps
        alone."""
        column = state.tables["site"]
        if not reported(state, "site.outdoor_temp_c") or "site" in in_maintenance:
            return []
        now_c = np.array([good(state, "site.outdoor_temp_c")[0], good(state, "site.outdoor_wet_bulb_c")[0]])
        received_ns = int(column.t_ns.max())
        usual = np.where(np.isnan(self.usual_c), now_c, self.usual_c)
        over = now_c - usual
        off = bool(np.abs(over[0]) > WEATHER_K)
        if received_ns > self.weather_ns:
            step_s = (received_ns - self.weather_ns) / 1e9 if self.weather_ns else 60.0
            self.weather_ns, self.weather_s = received_ns, self.weather_s + step_s
            share = max(step_s / WEATHER_USUAL_S, step_s / self.weather_s) * (0.1 if off else 1.0)
            usual = usual + np.where(np.isfinite(over), min(share, 1.0) * over, 0.0)
            self._stepped(now_c)
        self.usual_c, self.warmer_k = usual, float(np.nan_to_num(over[0]))
        if self.weather_s < 600.0:
            return []
        text = f"outdoors {now_c[0]:.1f} °C, usual {usual[0]:.1f} °C"
        wet = f"wet bulb {now_c[1]:.1f} °C, usual {usual[1]:.1f} °C"
        at = ("site", 0, "outdoor_temp_c", 0.9)
        if self.weather_spikes > WEATHER_SPIKES:
            text = f"it jumps by some kelvin for a reading and back, now {now_c[0]:.1f} °C"
            return [Cause("sensor_spiking", *at, (text, wet), 1, 0.0, 900.0)]
        if abs(self.weather_step_k) > STEP_K and self.weather_kept >= LASTING_WEATHER:
            text = f"it jumped by {self.weather_step_k:+.1f} K between two readings, to {now_c[0]:.1f} °C"
            return [Cause("sensor_biased", *at, (text, "the wet bulb did not", wet), 1, 0.0, 300.0)]
        if over[0] > WEATHER_K and (np.isnan(over[1]) or over[1] > max(WET_BULB_K, 0.2 * over[0])):
            return [Cause("heat_wave", "site", 0, "", 0.9, (text, wet), 1, 60.0, 300.0)]
        return []

    def _stepped(self, now_c: F64) -> None:
        """Return the steps of the thermometer without a step of the wet bulb: lasting ones, and those that
        return."""
        step_k = np.nan_to_num(now_c - self.weather_c)
        self.weather_c = now_c
        self.weather_spikes *= WEATHER_KEPT
        self.weather_kept += 1
        self.weather_step_k *= 1.0 - 60.0 / WEATHER_FORGET_S
        if abs(step_k[0]) > STEP_K and abs(step_k[1]) < 0.5 * abs(step_k[0]):
            if abs(self.weather_step_k) > STEP_K and self.weather_kept <= MOST_SPIKE:
                self.weather_spikes += 1.0
            self.weather_step_k += float(step_k[0])
            self.weather_kept = 0

    def loops(self, state: State, tracks: Tracks, steps_k: F64, aim_c: F64) -> Residual:
        """Return each loop's supply, and its value over the last half hour unless that is suspect
        [n_loop].

        `steps_k`: 1 sigma for the resolution of its readings; `aim_c`: the coldest set point of its CDUs,
        which it follows as far as it can [n_loop].
        """
        n = self.topology.sizes["loop"]
        supply = good(state, "loop.supply_temp_c") if n else np.zeros(0)
        expected = self.loop_c.copy()
        aim_k = np.nan_to_num(aim_c - self.loop_aim_c)
        moved_k = np.sign(aim_k) * np.maximum(np.abs(aim_k) - LEAST_AIM_K, 0.0)
        off = supply - expected
        off -= np.clip(np.nan_to_num(off), np.minimum(moved_k, 0.0), np.maximum(moved_k, 0.0))
        on = tracks.on(LOOP_USUAL)
        calm = np.isfinite(supply) if on is None else np.isfinite(supply) & (on == 0)
        self.loop_count += np.isfinite(supply)
        share = np.maximum(1.0 / np.maximum(self.loop_count, 1), 1.0 / LOOP_MEMORY)
        known = np.isfinite(expected)
        follow = np.where(calm, share, 0.0)
        self.loop_c = np.where(known, expected + follow * np.nan_to_num(supply - expected), supply)
        self.loop_aim_c = np.where(np.isnan(self.loop_aim_c), aim_c, self.loop_aim_c + follow * aim_k)
        self.loop_var += np.where(calm & known, share * (off * off - self.loop_var), 0.0)
        sigma = np.hypot(np.maximum(np.sqrt(self.loop_var), LOOP_FLOOR_K), steps_k)
        sigma += AIM_SHARE * np.abs(moved_k)
        sigma[self.loop_count < LOOP_KNOWN] = np.nan
        return Residual(LOOP_USUAL, supply - off, supply, sigma, np.full(n, np.nan))

    def gaps(self, state: State, tracks: Tracks) -> F32:
        """Return the sigmas between each GPU's memory and its usual distance to its chip [n_gpu]; a part
        per tick."""
        n = self.topology.sizes["gpu"]
        if n == 0 or not reported(state, "gpu.hbm_temp_c"):
            return self.gap_z
        parts = -(-n // SLICE)
        at = state.tick % parts
        part = slice(at * n // parts, (at + 1) * n // parts)
        hbm, chip, dram = (_part(state, name, part) for name in ("hbm_temp_c", "temp_c", "dram_active_pu"))
        xx, xy = self.gap_xx[part], self.gap_xy[part]
        mean, var = self.gap_mean[part], self.gap_var[part]
        gap, busy = hbm - chip, np.nan_to_num(dram)
        off = np.nan_to_num(gap - busy * xy / np.maximum(xx, np.float32(1e-4)))
        calm: Bool = np.isfinite(gap)
        if (on := tracks.on("gpu.temp_c")) is not None:
            calm = calm & (on[part] == 0)
        self.gap_count += 1
        share = np.float32(max(parts / self.gap_count, 1.0 / GAP_MEMORY)) * calm
        xx += share * (busy * busy - xx)
        xy += share * (busy * np.nan_to_num(gap) - xy)
        mean += np.float32(0.1) * (off - mean)
        var += share * (off * off - var)
        # The mean over about twenty readings has a quarter of the noise of one
        self.gap_z[part] = mean / (np.float32(0.25) * np.sqrt(np.maximum(var, np.float32(0.02))))
        return self.gap_z


def _part(state: State, name: str, part: slice) -> F32:
    """Return the good values of a part of the GPUs, NaN elsewhere."""
    row = TABLES["gpu"].by_name[name].row
    column = state.tables["gpu"]
    value: F32 = column.value[row, part]
    if column.bad_count[row]:
        value = np.where(column.quality[row, part] == GOOD, value, np.float32(np.nan))
    return value


def _agrees(
    key: str, entity: int, tracks: Tracks, disturbed: Callable[[str, int, str, int], Bool | None]
) -> bool:
    """A jump of power may be the work's: its own comparisons must have jumped as well, if there are any, and
    not for a fault that disturbs them."""
    own = tracks.judging(key)
    if key == NODE_POWER:  # a node's supplies jump with it, but not with its meter alone
        own = {name: t for name in (PSU1, PSU2) if (t := tracks.tracks.get(name)) is not None} or own
    own = {name: t for name, t in own.items() if entity < len(t.wild)}
    if not own:
        return key not in POWERED
    for name, track in own.items():
        if float(track.wild[entity]) >= CONFIRMED_WILD:
            rows = disturbed(name, len(track.wild), key.partition(".")[0], entity)
            if rows is None or not rows[entity]:
                return True
    return False


def _shared_by_feeds(site: Site, feeder: int, jumps: F32) -> bool:
    """Return True if another meter of the same racks jumps as often: the load does, and the meters report it
    some seconds apart."""
    feeders, racks = site.served_racks()
    beside = np.unique(feeders[np.isin(racks, racks[feeders == feeder])])
    return bool((jumps[beside[beside != feeder]] >= ALIKE_JUMPS * jumps[feeder]).any())


def _with_node(gpu: int, topology: Topology, tracks: Tracks, known: Residual | None) -> bool:
    """Return True unless the node's meter jumped with its GPU's: their comparison jumped, then."""
    node, track = int(topology.site.node_of_gpu[gpu]), tracks.tracks.get(NODE_POWER)
    if known is None or track is None or not WILD_SIGMAS * known.sigma[node] < SEEN_W:
        return True  # it would not show
    return float(track.wild[node]) >= LEAST_WILD
