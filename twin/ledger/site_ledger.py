"""Site ledger: integrates power in each tick, and books energy and GPU time every few seconds, by the hour.

Powers of racks, nodes, feeders and loops are added up in each tick; all else waits for a look. A look that
spans several hours, after a pause, shares its energy by time and its time exactly.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, I32, I64, NS, TABLES, Bool
from twin.contracts import View
from twin.ledger.energy_split import LateRoots, Metered, RootGroups, RootMeters, Split, split
from twin.ledger.feeder_balance import FeederBalance
from twin.ledger.gpu_time import CHECKPOINT, RESTART, JobTime, ReportedSpans, ThrottleTime
from twin.ledger.hour_account import HOUR_NS, AddedEnergy, HourAccount, Key
from twin.ledger.hour_record import HourRecord, encode_hour
from twin.ledger.metered_energy import EnergyCounters, PowerIntegral
from twin.ledger.node_gaps import NodeGaps
from twin.ledger.rack_meters import GAIN_PU, RackMeters
from twin.ledger.row_sums import exact_sums, row_sums
from twin.ledger.water_meters import WaterMeters
from twin.site import Site
from twin.telemetry import CheckpointTold, EntityState, JobSlots, OldOfNew, State, column, part, scalar

LOOK_S = 10.0  # between looks; source: estimate
KEPT_HOURS = 4  # that are over, for whoever writes them down
POWERED = ("rack", "node", "feeder", "loop")
_NODE_CPU, _GPU_POWER = TABLES["node"].by_name["cpu_power_w"], TABLES["gpu"].by_name["power_w"]
_NODE_ON = TABLES["node"].by_name["power_on_state"]
_GPU_ENERGY = TABLES["gpu"].by_name["energy_mj"]

_NO_GAPS = np.zeros((0, 2), np.int64)


class SiteLedger(EntityState):
    """The current hour, and the last complete ones (`closed`, as JSON)."""

    powers: dict[str, PowerIntegral] = part()
    feeders: EnergyCounters = part()
    racks: RackMeters = part()
    balance: FeederBalance = part()
    gaps_filled: NodeGaps = part()
    late: LateRoots = part()
    throttle: ThrottleTime = part()
    water: WaterMeters = part()
    job_time: JobTime = part()
    hour: HourAccount = part()
    slot: I32 = column("node", "i4", -1, of_place=True)  # of the job that held the node at the last look
    generation: I32 = column("node", "i4", -1, of_place=True)
    gpu_mj: I64 = column("gpu", "i8", -1)  # energy counter at the last look
    booked_ns: int = scalar(0)  # until when all is booked; 0: nothing is yet
    # Queue, tenant, account and name of the job that a slot holds, or held last, by the slot as text
    holders: dict[str, list[str]] = scalar({})
    closed: list[bytes] = scalar([])
    # All energy, and that of GPUs and CPUs, since all counters of GPUs reported, and when that was
    waits_j: F64 = scalar(np.zeros(2))
    waits_ns: int = scalar(0)
    gaps: I64 = scalar(_NO_GAPS)  # since the last look, in which nobody listened [g, 2]

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self.powers = {table: PowerIntegral(site.sizes, table) for table in POWERED}
        self.feeders = EnergyCounters(site.sizes, "feeder", TABLES["feeder"].by_name["energy_mj"])
        self.racks, self.throttle = RackMeters(site), ThrottleTime(site)
        self.gaps_filled, self.late = NodeGaps(site.sizes), LateRoots(site.sizes)
        self.water = WaterMeters(site)
        self.job_time, self.hour = JobTime(site.sizes), HourAccount(site.sizes)
        self._groups = RootGroups(site)
        self.balance = FeederBalance(self._groups)
        self._hall = site.hall_of_rack[site.rack_of_node]
        self._gpus = np.diff(site.gpu_start_of_node).astype(np.int64)
        self._signals = {table: TABLES[table].by_name["power_w"] for table in POWERED}
        # Rows of the hour by hall and slot, -1: not looked up yet; rebuilt each hour
        self._places: I64 = np.full((site.sizes["hall"], site.sizes["job"] + 2), -1, np.int64)
        self._places_ns = 0

    def remapped(self, site: Site, old_of_new: OldOfNew) -> SiteLedger:
        """Return the ledger for a changed site; the hour's entries of removed racks and halls are dropped."""
        out = SiteLedger(site)
        out.adopt(self, old_of_new)
        return out

    def running(self) -> HourRecord | None:
        """Return the current hour as booked so far; None before the first look."""
        return self.hour.record(self._place_names()) if self.hour.begin_ns else None

    def receive(self, event: CheckpointTold, jobs: JobSlots) -> None:
        """Take a job's report of a save or a restart."""
        slot = jobs.slot_of.get(event.job)
        if slot is not None:
            tier = int(event.tier == "memory")
            at_ns = event.began_ns or event.at_ns or self.booked_ns
            save_s = event.block_s or (0.0 if tier else event.save_s)
            spans = ReportedSpans(tier, at_ns, event.at_ns or self.booked_ns, save_s, event.restart_s)
            self.job_time.receive(slot, int(jobs.generation[slot]), spans)

    def update(self, state: State, view: View, dt_s: float, paused: bool = False) -> None:
        """Take a tick and book what is due. `paused`: there was no observation since the previous tick."""
        now_ns = state.now_ns
        if paused:
            gap = np.array([[now_ns - round(dt_s * NS), now_ns]], np.int64)
            self.gaps = np.concatenate([self.gaps, gap])
        for table, integral in self.powers.items():
            column_ = state.tables[table]
            if not column_.n:
                continue
            power_w = view.believed(f"{table}.power_w").astype(np.float64)
            if not column_.all_current(self._signals[table], now_ns):
                power_w[~column_.current(self._signals[table], now_ns)] = np.nan
            power_w[column_.late(self._signals[table], now_ns)] = np.nan
            integral.add(power_w, dt_s, paused)
        if not self.booked_ns:
            self._begin(state, view, now_ns - round(dt_s * NS))
        turned = now_ns // HOUR_NS != self.booked_ns // HOUR_NS
        if turned or now_ns - self.booked_ns >= round(LOOK_S * NS):
            self._book(state, view)

    def _begin(self, state: State, view: View, begin_ns: int) -> None:
        self.booked_ns = begin_ns
        self.hour.begin(begin_ns // HOUR_NS * HOUR_NS)
        self.throttle.observe(state, view, 0)
        self._gpu_j(state, begin_ns, 0.0)

    def _book(self, state: State, view: View) -> None:
        """Book the time since the last look."""
        now_ns, begin_ns = state.now_ns, self.booked_ns
        span_s = (now_ns - begin_ns) / NS
        seen = self.throttle.observe(state, view, now_ns - begin_ns)
        off = self._off(state)
        gpu_j, counted, unread = self._gpu_j(state, begin_ns, span_s)
        found, loops, refused = self._split(state, span_s, gpu_j, counted)
        unread &= ~off
        compute_j = np.nan if unread.any() else float(gpu_j.sum()) + self._cpu_j(state, span_s, off)
        sides = self._sides(state, found, loops, compute_j)
        gpu_j = np.where(unread, np.nan, gpu_j)
        prices = self._prices(view)
        self._note_holders(view.jobs)
        nodes, slots, start_ns, end_ns = self._job_spans(view.jobs, begin_ns, now_ns)
        hour_ns = begin_ns // HOUR_NS * HOUR_NS
        if len(self.closed) > KEPT_HOURS:  # those before were offered to the writer with their own tick
            self.closed = self.closed[-KEPT_HOURS:]
        while True:
            last = hour_ns + HOUR_NS >= now_ns
            from_ns, to_ns = max(hour_ns, begin_ns), min(hour_ns + HOUR_NS, now_ns)
            share = (to_ns - from_ns) / (now_ns - begin_ns)
            inside = np.maximum(np.minimum(end_ns, to_ns) - np.maximum(start_ns, from_ns), 0)
            rows = self._rows(nodes, slots, inside)
            unseen = self._unseen(start_ns, end_ns, from_ns, to_ns)
            self._add(found, loops, share, (rows, nodes, inside / (now_ns - begin_ns)), gpu_j, prices)
            self.hour.watched_ns += to_ns - from_ns - _overlap(self.gaps, from_ns, to_ns)
            if unseen is not None:
                self.hour.add_time(rows, nodes, unseen, slots != -1, self.throttle.unseen())
                inside = inside - unseen
            self.hour.add_time(rows, nodes, inside, slots != -1, seen)
            for name, over, under, known_ns in sides:
                self.hour.add_figure(name, over * share, under * share, known_ns * share)
            if last:
                current = np.zeros(len(self.slot), np.int64)
                current[nodes] = rows  # of segments in order of time: the last one stays
                self.hour.slow(current, seen)
                self._settle_jobs(view.jobs, current)
                self.hour.unmetered_s += span_s * int(np.count_nonzero(found.unmetered))
                self.hour.refused += refused
            if to_ns == hour_ns + HOUR_NS:
                self._close(hour_ns + HOUR_NS)
            hour_ns += HOUR_NS
            if last:
                break
        self.booked_ns, self.gaps = now_ns, _NO_GAPS.copy()

    def _close(self, next_ns: int) -> None:
        """Close the hour: store its record, begin the next."""
        if self.hour.watched_ns or len(self.closed) < KEPT_HOURS:  # an outage pushes out nothing watched
            self.closed = [*self.closed, encode_hour(self.hour.record(self._place_names()))]
        self.hour.begin(next_ns)

    def _place_names(self) -> dict[str, list[str]]:
        sizes = self.site.sizes
        return {t: [self.site.name(t, i) for i in range(sizes[t])] for t in ("rack", "hall")}

    def _split(self, state: State, span_s: float, gpu_j: F64, counted: Bool) -> tuple[Split, Metered, int]:
        """Return the split among racks and nodes, the loops, and the refused counters."""
        read = {}
        for table, integral in self.powers.items():
            energy_j, var_j2, known_s = integral.take()
            read[table] = Metered(energy_j, var_j2, known_s >= 0.5 * span_s), integral, known_s
        feeder, integral, known_s = read["feeder"]
        energy_j, var_j2, refused = self.feeders.settle(
            state.tables["feeder"], feeder.energy_j, feeder.var_j2, integral.power_w, feeder.known
        )
        feeder = Metered(energy_j, var_j2, feeder.known | self.feeders.counted)
        rack, node = read["rack"][0], read["node"][0]
        site, of_node = self.site, self.site.rack_of_node
        node_j, node_var, unfilled = self.gaps_filled.settle(
            node.energy_j, node.var_j2, node.known, gpu_j, counted, span_s
        )
        # Compared are racks of which all was read without a gap
        gaps = row_sums(of_node, ~node.known | (node_var != 0.0), site.sizes["rack"])
        both = rack.known & (rack.var_j2 == 0.0) & (gaps == 0)
        node = Metered(node_j, node_var, node.known | (counted & ~unfilled))
        self.racks.learn(
            rack.energy_j, row_sums(of_node, node_j, site.sizes["rack"]), np.where(both, span_s, 0.0)
        )
        # A rack's own gap is filled by its nodes, where these were read or are filled themselves
        dark = row_sums(of_node, unfilled | ~node.known, site.sizes["rack"])
        rack = rack._replace(known=rack.known & ~((rack.var_j2 != 0.0) & (dark == 0) & self.racks.compared))
        whole = read["rack"][0].known & (read["rack"][0].var_j2 == 0.0)
        counted_roots = self.feeders.counted & self.feeders.fresh
        self.balance.observe(read["rack"][0].energy_j, whole, feeder.energy_j, counted_roots, span_s)
        gain = self.racks.gain(*self.balance.gains())
        meters = RootMeters(feeder, self.feeders.counted, self.feeders.fresh, self.late)
        return (
            split(self._groups, meters, rack, node, gain),
            read["loop"][0],
            refused,
        )

    def _sides(
        self, state: State, found: Split, loops: Metered, compute_j: float
    ) -> list[tuple[str, float, float, float]]:
        """Return both sides of each known ratio of a look, with its time: (name, over, under, ns).

        `compute_j`: of GPUs and CPUs; NaN where some are not known.
        """
        begin_ns, now_ns = self.booked_ns, state.now_ns
        it_j = float(found.rack.energy_j.sum())
        site_j = it_j + float(found.losses.energy_j.sum() + loops.energy_j.sum())
        sides = []
        if len(loops.known) and loops.known.all():
            sides.append(("pue", site_j, it_j, float(now_ns - begin_ns)))
        else:
            compute_j = np.nan
        sides += self._compute_sides(state, site_j, compute_j)
        water_l, waited_j, known_ns = self.water.settle(state.tables["loop"], it_j, begin_ns, now_ns)
        if known_ns:
            sides.append(("wue", water_l, waited_j, float(known_ns)))
        return sides

    def _compute_sides(
        self, state: State, site_j: float, compute_j: float
    ) -> list[tuple[str, float, float, float]]:
        """Both sides of the TUE, once every counter of a GPU reported since the last result.

        One that was silent covers all that time at once: where some of it is not known, none of it is.
        """
        self.waits_ns = self.waits_ns or self.booked_ns
        self.waits_j = self.waits_j + np.array([site_j, compute_j])
        gpus = state.tables["gpu"]
        late = (gpus.raw[_GPU_ENERGY.row] >= 0) & (gpus.received_ns(_GPU_ENERGY) <= self.waits_ns)
        if late.any() and (late & ~self._off(state)[self.site.node_of_gpu]).any():
            return []
        over, under = self.waits_j.tolist()
        known_ns, self.waits_j, self.waits_ns = state.now_ns - self.waits_ns, np.zeros(2), state.now_ns
        return [("tue", over, under, float(known_ns))] if np.isfinite(under) else []

    @staticmethod
    def _off(state: State) -> Bool:
        """Return the nodes that read off: their GPUs and CPUs draw nothing measurable [n_node]."""
        nodes = state.tables["node"]
        off = nodes.value[_NODE_ON.row] == 0.0
        return np.asarray(off & nodes.current(_NODE_ON, state.now_ns), np.bool_)

    def _gpu_j(self, state: State, begin_ns: int, span_s: float) -> tuple[F64, Bool, Bool]:
        """Energy of each node's GPUs since the last look [n_node], by counters, else by their power now; the
        nodes of which all counters were read since, and those of with a GPU whose energy is not reported.
        """
        table, site, n_node = state.tables["gpu"], self.site, self.site.sizes["node"]
        total, counts = table.total[_GPU_ENERGY.row], table.raw[_GPU_ENERGY.row] >= 0
        known = counts & (self.gpu_mj >= 0) & (total >= self.gpu_mj)
        energy_j = np.where(known, (total - self.gpu_mj) * 1e-3, 0.0)
        np.copyto(self.gpu_mj, total, where=counts)
        read = known
        if not known.all() and table.ever_good(_GPU_POWER.row):
            other = ~known & table.current(_GPU_POWER, state.now_ns)
            self.gpu_mj[other & ~counts] = -1  # its counter goes on: what it grows by then is in the power
            energy_j += np.where(other, table.value[_GPU_POWER.row] * span_s, 0.0)
            read = known | other
        unread = np.zeros(n_node, np.bool_)
        if not read.all():  # energy of GPUs that nobody read is no zero
            unread[site.node_of_gpu[~read]] = True
        uncounted = ~known | (table.received_ns(_GPU_ENERGY) <= begin_ns)
        counted = self._gpus > 0
        if uncounted.any():
            counted = counted & (row_sums(site.node_of_gpu, uncounted, n_node) == 0)
        return row_sums(site.node_of_gpu, energy_j, n_node), counted, unread

    @staticmethod
    def _cpu_j(state: State, span_s: float, off: Bool) -> float:
        """Return the energy of the CPUs by their present power; NaN for a node that is not `off` without
        readings."""
        table = state.tables["node"]
        current = table.current(_NODE_CPU, state.now_ns)
        if not (current | off).all():
            return np.nan
        return float(table.value[_NODE_CPU.row, current].sum(dtype=np.float64)) * span_s

    def _prices(self, view: View) -> tuple[float, float]:
        """Return (price, carbon intensity) per kWh now; NaN if unknown."""
        out = []
        for key in ("site.grid_price_usd_per_kwh", "site.grid_carbon_g_per_kwh"):
            good = view.quality(key)[:1] == 0
            out.append(float(view.value(key)[0]) if good.all() and len(good) else np.nan)
        return out[0], out[1]

    def _job_spans(self, jobs: JobSlots, begin_ns: int, now_ns: int) -> tuple[I64, I64, I64, I64]:
        """Return the spans in which jobs held nodes since the last look: (node, slot, begin, end) [k], in
        order of time.

        Slot -1: no job; -2: a job that found no slot, or no job is reported. A job that began and ended
        between two looks is not seen.
        """
        slot = jobs.job_of_node.copy()
        generation = np.where(slot >= 0, jobs.generation[slot], -1)
        every = np.arange(len(slot), dtype=np.int64)
        moved = np.flatnonzero((slot != self.slot) | (generation != self.generation))
        start_ns = np.full(len(slot), begin_ns, np.int64)
        spans: list[tuple[I64, I64, I64, I64]] = []
        if len(moved):
            old, new = self.slot[moved], slot[moved]
            same = (old >= 0) & (jobs.generation[old] == self.generation[moved])
            gone_ns = np.where(
                same & jobs.alive[old], jobs.started_ns[old], np.where(same, jobs.freed_ns[old], begin_ns)
            )
            came_ns = np.where(new >= 0, jobs.started_ns[new], gone_ns)
            gone_ns = np.where(old >= 0, gone_ns, came_ns)
            gone_ns = np.clip(gone_ns, begin_ns, now_ns)
            came_ns = np.clip(np.maximum(came_ns, gone_ns), begin_ns, now_ns)
            start_ns[moved] = came_ns
            # A slot that was given to another job since does not show whose it was
            old = np.where(same | (old < 0), old, -1)
            none = np.full(len(moved), -1, np.int64)
            begins = np.full(len(moved), begin_ns, np.int64)
            spans = [(moved, old.astype(np.int64), begins, gone_ns), (moved, none, gone_ns, came_ns)]
            self.slot[:], self.generation[:] = slot, generation
        held = slot.astype(np.int64)
        if not jobs.known:
            held[held < 0] = -2
        for nodes in jobs.unslotted.values():
            held[nodes[held[nodes] == -1]] = -2
        spans.append((every, held, start_ns, np.full(len(slot), now_ns, np.int64)))
        node, of, begin, end = (np.concatenate(x) for x in zip(*spans, strict=True))
        return node, of, begin, end

    def _unseen(self, start_ns: I64, end_ns: I64, from_ns: int, to_ns: int) -> I64 | None:
        """Return the unobserved time of each span [k] within an hour; None for none."""
        out = None
        for begin_ns, over_ns in self.gaps.tolist():
            begin_ns, over_ns = max(begin_ns, from_ns), min(over_ns, to_ns)
            if begin_ns < over_ns:
                part_ns = np.maximum(np.minimum(end_ns, over_ns) - np.maximum(start_ns, begin_ns), 0)
                out = part_ns if out is None else out + part_ns
        return out

    def _rows(self, nodes: I64, slots: I64, inside: I64) -> I64:
        """Return the row of each span [k]; creates new ones for spans of this hour."""
        if self._places_ns != self.hour.begin_ns:
            self._places[:], self._places_ns = -1, self.hour.begin_ns
        halls = self._hall[nodes]
        rows = self._places[halls, slots + 2]
        # A job that has a node now gets a row, be it for 0 ns: it may have left by the next look
        holding = np.arange(len(nodes)) >= len(nodes) - len(self.slot)
        new = (rows < 0) & ((inside > 0) | holding)
        if new.any():
            pairs = np.unique(np.stack([halls[new], slots[new] + 2]), axis=1)
            for hall, at in pairs.T.tolist():
                self._places[hall, at] = self.hour.row(self._key(hall, at - 2))
            rows = self._places[halls, slots + 2]
        return np.maximum(rows, 0)

    def _note_holders(self, jobs: JobSlots) -> None:
        """Note the present holder of each slot.

        A job that starts again in its slot may have another queue. So its row follows from what a snapshot
        holds, and not from when it was looked up.
        """
        for slot in np.flatnonzero(jobs.alive).tolist():
            now = [jobs.queues[slot], jobs.tenants[slot], jobs.accounts[slot], jobs.names[slot]]
            if self.holders.get(str(slot)) != now:
                self.holders[str(slot)] = now
                self._places[:, slot + 2] = -1

    def _key(self, hall: int, slot: int) -> Key:
        name = self.site.name("hall", hall)
        if slot < 0:
            return name, "idle" if slot == -1 else "unplaced", "", "", "", ""
        queue, tenant, account, job = self.holders.get(str(slot), ["", "", "", ""])
        return name, "job", queue, tenant, account, job

    def _settle_jobs(self, jobs: JobSlots, current: I64) -> None:
        """Subtract reported saves and restarts from the time of their jobs' rows."""
        owed = self.job_time.owed_ns
        for slot in np.flatnonzero(owed.any(axis=1)).tolist():
            if not jobs.alive[slot] or jobs.generation[slot] != self.job_time.generation[slot]:
                owed[slot] = 0
                continue
            nodes = jobs.nodes[slot]
            rows, at = np.unique(current[nodes], return_inverse=True)
            gpus = exact_sums(at, self._gpus[nodes], len(rows))
            for k, of in ((0, CHECKPOINT), (1, RESTART)):
                left = 0
                for row, many in zip(rows.tolist(), gpus.tolist(), strict=True):
                    wanted = int(owed[slot, k]) * many
                    missing = wanted - self.hour.take_out(row, of, wanted)
                    left = max(left, -(-missing // max(many, 1)))
                owed[slot, k] = left

    def _add(
        self,
        found: Split,
        loops: Metered,
        share: float,
        spans: tuple[I64, I64, F64],
        gpu_j: F64,
        prices: tuple[float, float],
    ) -> None:
        """Book a share of a look's energies in the rows of the hour."""
        hour, site = self.hour, self.site
        rows, nodes, parts = spans
        n_hall, hall_of_rack = site.sizes["hall"], site.hall_of_rack
        names = [site.name("hall", i) for i in range(n_hall)]
        rest_j = found.rack.energy_j - row_sums(
            site.rack_of_node, found.node.energy_j, len(found.rack.energy_j)
        )
        cooling = self._cooling(loops, row_sums(hall_of_rack, found.rack.energy_j, n_hall))
        loss_j = row_sums(found.hall, found.losses.energy_j, n_hall)
        none = np.zeros(n_hall)
        every = [(rows, found.node.energy_j[nodes] * parts, found.node.sigma2[nodes] * parts**2,
                  found.node.var_j2[nodes] * parts, gpu_j[nodes] * parts)]  # fmt: skip
        for part_, energy_j, sigma2, var in (
            ("rest", row_sums(hall_of_rack, rest_j, n_hall),
             row_sums(hall_of_rack, found.rack.sigma2, n_hall), none),
            ("cooling", *cooling),
            ("losses", loss_j, row_sums(found.hall, found.losses.sigma2, n_hall), none),
        ):  # fmt: skip
            places = np.array([hour.row((name, part_, "", "", "", "")) for name in names], np.int64)
            every.append((places, energy_j * share, sigma2 * share**2, var * share, none))
        at, *added = (np.concatenate(x) for x in zip(*every, strict=True))
        hour.add_energy(at, AddedEnergy(*added), prices)
        hour.rack += np.array([found.rack.energy_j, np.sqrt(found.rack.sigma2), found.rack.var_j2]) * share
        rack_j = row_sums(hall_of_rack, found.rack.energy_j, n_hall)
        sigma2 = row_sums(found.hall, found.losses.sigma2, n_hall) + cooling[1]
        var = row_sums(found.hall, found.losses.var_j2, n_hall) + cooling[2]
        hall_j = rack_j + loss_j + cooling[0]
        hour.hall += np.array([hall_j, np.sqrt(sigma2), var]) * share
        hour.site = hour.site + np.array([hall_j.sum(), np.sqrt(sigma2.sum()), var.sum()]) * share

    def _cooling(self, loops: Metered, rack_j: F64) -> tuple[F64, F64, F64]:
        """(energy, variance of gains, of gaps) of the loops by hall: shared by the heat of the halls that
        each cools.
        """
        site = self.site
        n_hall, n_loop = site.sizes["hall"], site.sizes["loop"]
        out = np.zeros((3, n_hall))
        of = site.loop_of_cdu
        for loop in range(n_loop):
            halls = np.unique(site.hall_of_cdu[of == loop])
            halls = halls if len(halls) else np.arange(n_hall)
            heat = rack_j[halls]
            part_ = heat / heat.sum() if heat.sum() > 0.0 else np.full(len(halls), 1.0 / len(halls))
            energy_j = loops.energy_j[loop] * part_
            out[:, halls] += np.array([energy_j, (GAIN_PU * energy_j) ** 2, loops.var_j2[loop] * part_])
        return out[0], out[1], out[2]


def _overlap(gaps: I64, from_ns: int, to_ns: int) -> int:
    """Return the time of a span inside gaps [g, 2]."""
    return int(np.maximum(np.minimum(gaps[:, 1], to_ns) - np.maximum(gaps[:, 0], from_ns), 0).sum())
