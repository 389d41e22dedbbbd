"""Goodput of synchronous jobs: the share of time spent on training, and the cause of lost time.

All members of a synchronous job go at the pace of the slowest. The slow one computes while the others wait
in a collective, where their tensor cores rest. So it is busier than its peers, and its clock is often lower.
Each job is looked at every ten seconds, in turn; a member is named when it stands out for minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from twin.catalogue import F32, F64, I32, I64, NS, Bool, signal_of
from twin.contracts import Finding
from twin.goodput.segments import Segments
from twin.goodput.slow_links import JobPace, LinkRecords, SlowLink, slow_link, usual_signs
from twin.physics import performance_pu
from twin.site import Site
from twin.telemetry import EntityState, JobSlots, OldOfNew, State, column, entries, part, scalar

EVERY_S = 10.0  # between looks at a job
LONGEST_S = 60.0  # that one look may account for: what was longer ago is not known
TURNS = 10  # of the jobs, so that they are not all looked at in one tick
ACTIVE_PU = 0.1  # of a job's usual activity, from which on it trains; a save leaves 0.05. source: estimate
IDLE_PU = 0.02  # of all time: below, no usual activity is known
USUAL_FADES_S = 6 * 3600.0
REPORTING_PU = 0.5  # of a job's GPUs that must report, or the time is not judged
LEAST_TENSOR_PU = 0.05  # in a dip of a collective all wait: tensor cores say nothing
LEAST_GPUS = 4  # of a job, below which no member stands out from its peers
SMOOTH_S = 120.0
NOTED_S = 600.0  # between notes of what links count; source: estimate
PERSIST_S = 300.0  # that a member stands out before it is named
LEAST_SLOWDOWN = 1.05  # worth a word; source: estimate
COMPUTE_SHARE_PU = 0.8  # of the time of a kernel that waits for the clock; source: estimate
# Kernels of like members differ by 1 %; chance of a look to err, for all members. source: estimate
SIGMA_LEAST, CHANCE = 0.01, 1e-6
# Of what a low clock would cost so much must show as busyness, or nobody waits for it
BUSY_BY_CLOCK = 0.5
LEAVES_PU = 0.7  # of the threshold, below which a member no longer stands out
WARNING_SLOWDOWN = 1.10  # below, it is information
SM, UTIL, TENSOR = "gpu.sm_active_pu", "gpu.util_pu", "gpu.tensor_active_pu"
CLOCK, BITS = "gpu.sm_clock_hz", "gpu.clock_event_bits"
# source: NVML, nvmlClocksEventReasons
REASONS = ((0x4, "its power limit"), (0x8, "a hardware slowdown"), (0x20, "heat (software)"),
           (0x40, "heat (hardware)"), (0x80, "a power brake"), (0x2, "a clock setting"))  # fmt: skip
SHOWN = 8  # GPUs of a finding
# Columns of a slot that begin at zero with its job
AFRESH = ("looked_ns", "usual_pu", "trained_s", "still_s", "lost_s", "saved_ns", "kept_s", "restarts",
          "cost_gpu_h")  # fmt: skip
REMEDY = (
    "Find out why it is slow: heat, power limit, locked clock, or its share of the work. If it stays slow, "
    "exclude its node at the next save and restart the job without it."
)
LINK_REMEDY = (
    "Check both ends of the link, its cable or optics. If it stays slow, exclude its node at the next "
    "save and restart the job without it."
)


@dataclass(frozen=True)
class HeldBack:
    """The member that a job waits for: `entity` of `table`, its GPUs, the slowdown, and its evidence. `ends`:
    a link by both ends; its `table` is link, or gpu for an NVLink of this GPU.
    """

    table: str
    entity: str
    gpus: tuple[int, ...]
    slowdown: float
    since_ns: int
    cost_gpu_h: float
    evidence: tuple[str, ...]
    ends: str = ""


class _Turn(NamedTuple):
    """Jobs that are looked at in this tick, their GPUs by job, and what these read; NaN: nothing."""

    slots: I64  # [n]
    gpus: I32  # [k]
    parts: Segments  # of the GPUs, by job
    dt_s: F64  # [n] since the last look
    readings: tuple[F32, F32]  # tensor activity, clock [k]
    links: LinkRecords

    @property
    def of(self) -> I32:
        """Place among the slots [k]."""
        return self.parts.of

    @property
    def tensor(self) -> F32:
        """Tensor activity [k]."""
        return self.readings[0]

    @property
    def clock(self) -> F32:
        """Clocks, Hz [k]."""
        return self.readings[1]


class GoodputState(EntityState):
    """Columns over jobs: seconds that trained, stood still or were lost. Over GPUs: how each differs."""

    generation: I32 = column("job", "i4", -1)
    started_ns: I64 = column("job", "i8")
    looked_ns: I64 = column("job", "i8")
    usual_pu: F32 = column("job", "f4")  # activity of the median member while it trains
    trained_s: F64 = column("job", "f8")
    still_s: F64 = column("job", "f8")  # saves, restarts, waiting for data
    lost_s: F64 = column("job", "f8")  # trained, and lost with a restart
    saved_ns: I64 = column("job", "i8")  # when the save began that was last reported
    kept_s: F64 = column("job", "f8")  # of what trained, held by that save
    restarts: I32 = column("job", "i4")
    slowdown: F32 = column("job", "f4", 1.0)
    cost_gpu_h: F64 = column("job", "f8")
    busy: F32 = column("gpu", "f4")  # logarithm of its activity over its peers', smoothed
    slow: F32 = column("gpu", "f4")  # logarithm of what its clock costs against its peers', smoothed
    seen: F32 = column("gpu", "f4", trail=(2,))  # how much of the smoothing span each of them has seen
    since_ns: I64 = column("gpu", "i8")  # since when it stands out; 0 = it does not
    evaluated_ns: int = scalar(0)
    pace: JobPace = part()
    # The link that a job waits for: table, entity, node, both ends, evidence, as in `SlowLink`
    slow_links: dict[int, list[Any]] = entries("job")
    # Counts of a job's links while it is not slow: when they were noted last, what then, what before;
    # each [table, entity, counter, count]
    signs: dict[int, list[Any]] = entries("job")

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self.pace, self.slow_links, self.signs = JobPace(site.sizes), {}, {}

    def update(self, state: State, jobs: JobSlots, links: LinkRecords) -> None:
        """Look at the jobs whose turn it is. Raises nothing for bad or missing data."""
        now_ns = state.now_ns
        gone = self.generation != np.where(jobs.alive & jobs.synchronous, jobs.generation, -1)
        if gone.any():
            self.evaluated_ns = now_ns
            self._clear(np.flatnonzero(gone), jobs)
        phase = (np.arange(len(self.looked_ns)) % TURNS) * round(EVERY_S / TURNS * NS)
        every = round(EVERY_S * NS)
        due = jobs.alive & jobs.synchronous & ((now_ns + phase) // every != (self.looked_ns + phase) // every)
        slots = np.flatnonzero(due)
        if not len(slots):
            return
        turn = self._turn(slots, jobs, state, links)
        self.evaluated_ns = now_ns
        self._restarted(turn.slots, jobs)
        if not len(turn.gpus):
            return
        self._forget_silent(turn)
        training, middle = self._account(turn, state, jobs)
        if training.any():
            self._compare(turn, training, middle, state)

    def _turn(self, slots: I64, jobs: JobSlots, state: State, links: LinkRecords) -> _Turn:
        now_ns = state.now_ns
        place = np.full(len(self.looked_ns) + 1, -1, np.int32)
        place[slots] = np.arange(len(slots), dtype=np.int32)
        at = place[jobs.job_of_node]
        nodes = np.flatnonzero(at >= 0)
        nodes = nodes[np.argsort(at[nodes], kind="stable")]
        first, last = self.site.gpu_start_of_node[nodes], self.site.gpu_start_of_node[nodes + 1]
        many = (last - first).astype(np.int64)
        offset = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
        gpus = (np.repeat(first, many) + offset).astype(np.int32)
        of = np.repeat(place[jobs.job_of_node[nodes]], many).astype(np.int32)
        before = np.where(self.looked_ns[slots] > 0, self.looked_ns[slots], now_ns)
        self.looked_ns[slots] = now_ns
        tensor, clock = (self._read(state, key, gpus) for key in (TENSOR, CLOCK))
        parts = Segments.made(of, len(slots))
        return _Turn(slots, gpus, parts, (now_ns - before) / NS, (tensor, clock), links)

    def _clear(self, slots: I64, jobs: JobSlots) -> None:
        """Start again for slots that have another job or none, and for the GPUs of that job."""
        for name in AFRESH:
            getattr(self, name)[slots] = 0
        self.slowdown[slots] = 1.0
        self._forget_paces(slots)
        live = jobs.alive & jobs.synchronous
        self.generation[slots] = np.where(live, jobs.generation, -1)[slots]
        self.started_ns[slots] = np.where(live, jobs.started_ns, 0)[slots]
        fresh = np.zeros(len(live) + 1, np.bool_)
        fresh[slots] = True
        nodes = fresh[jobs.job_of_node] & (jobs.job_of_node >= 0)
        self._forget_gpus(nodes[self.site.node_of_gpu])

    def _forget_silent(self, turn: _Turn) -> None:
        """Forget how members differ that no longer report: it is not known any more."""
        for which, readings in enumerate(turn.readings):
            silent = ~np.isfinite(readings)
            if silent.any():
                self.seen[turn.gpus[silent], which] = 0.0
        seen = self.seen[turn.gpus]
        self.since_ns[turn.gpus[~((seen[:, 0] > 0.0) | (seen[:, 1] > 0.0))]] = 0

    def _forget_paces(self, slots: I64) -> None:
        self.pace.clear(slots)
        for slot in slots.tolist():
            self.slow_links.pop(slot, None)
            self.signs.pop(slot, None)

    def _forget_gpus(self, which: Bool) -> None:
        self.busy[which] = self.slow[which] = 0.0
        self.seen[which] = 0.0
        self.since_ns[which] = 0

    def _restarted(self, slots: I64, jobs: JobSlots) -> None:
        """A job that started again in its slot has lost what it trained since its last save; how much that
        is, is not known of one that reports no saves.
        """
        again = slots[jobs.started_ns[slots] != self.started_ns[slots]]
        if not len(again):
            return
        lost_s = np.where(self.saved_ns[again] > 0, self.trained_s[again] - self.kept_s[again], 0.0)
        self.trained_s[again] -= lost_s
        self.lost_s[again] += lost_s
        self.restarts[again] += 1
        self.started_ns[again] = jobs.started_ns[again]
        self._forget_paces(again)
        placed = np.isin(jobs.job_of_node, again)
        self._forget_gpus(placed[self.site.node_of_gpu])

    def _account(self, turn: _Turn, state: State, jobs: JobSlots) -> tuple[Bool, F64]:
        """Add the time since the last look to what trained or stood still; (whether each job trains, its
        median activity) [n].
        """
        activity = self._read(state, SM, turn.gpus)
        if not np.isfinite(activity).any():
            activity = self._read(state, UTIL, turn.gpus)
        reporting = turn.parts.counts(np.isfinite(activity)) >= REPORTING_PU * turn.parts.size
        middle = np.nan_to_num(turn.parts.medians(activity))
        kept = np.exp(-turn.dt_s / USUAL_FADES_S)
        usual = np.where(
            reporting, np.maximum(self.usual_pu[turn.slots] * kept, middle), self.usual_pu[turn.slots]
        )
        self.usual_pu[turn.slots] = usual
        trains = reporting & (usual >= IDLE_PU) & (middle >= ACTIVE_PU * usual)
        known_s = np.where(reporting, np.minimum(turn.dt_s, LONGEST_S), 0.0)
        self.trained_s[turn.slots] += np.where(trains, known_s, 0.0)
        self.still_s[turn.slots] += np.where(trains, 0.0, known_s)
        self._saved(turn.slots, jobs, state.now_ns)
        return np.asarray(trains, np.bool_), middle

    def _saved(self, slots: I64, jobs: JobSlots, now_ns: int) -> None:
        """Keep what a job trained before its newest save began."""
        new = slots[(jobs.saved_ns[slots] > 0) & (jobs.saved_ns[slots] != self.saved_ns[slots])]
        if not len(new):
            return
        block_s = np.where(jobs.checkpoint_block_s[new] > 0.0, jobs.checkpoint_block_s[new],
                           jobs.checkpoint_save_s[new])  # fmt: skip
        since_s = np.maximum((now_ns - jobs.saved_ns[new]) / NS - block_s, 0.0)
        kept_s = np.maximum(self.trained_s[new] - since_s, 0.0)
        self.kept_s[new] = np.maximum(self.kept_s[new], kept_s)
        self.saved_ns[new] = jobs.saved_ns[new]

    def _compare(self, turn: _Turn, training: Bool, activity: F64, state: State) -> None:
        """Compare each member with its peers, and each job with itself; find what stands out for long."""
        now_ns = state.now_ns
        dt_s = np.minimum(turn.dt_s, LONGEST_S)[turn.of]
        middle = turn.parts.medians(turn.tensor)
        compute = training & (middle >= LEAST_TENSOR_PU)
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.where(compute, np.log(middle / activity), np.nan)
        self.pace.observe(turn.slots, level, np.minimum(turn.dt_s, LONGEST_S), now_ns)
        with np.errstate(divide="ignore", invalid="ignore"):
            busy = np.log(np.maximum(turn.tensor, 1e-3) / middle[turn.of])
            low = turn.clock / turn.parts.medians(turn.clock)[turn.of]
            slow = -np.log(performance_pu(np.maximum(low, 1e-2), COMPUTE_SHARE_PU))
        self._smooth(self.busy, 0, turn.gpus, np.where(compute[turn.of], busy, np.nan), dt_s)
        self._smooth(self.slow, 1, turn.gpus, np.where(training[turn.of], slow, np.nan), dt_s)
        size = turn.parts.size
        # P(|Z| > z) < exp(-z^2 / 2) for each of all members; the spread of few is known badly
        z = np.sqrt(2.0 * np.log(np.maximum(size, 1) / CHANCE)) * (1.0 + 2.0 / np.sqrt(np.maximum(size, 1)))
        z[size < LEAST_GPUS] = np.inf
        knows = self.seen[turn.gpus] > 0.5
        by_busy, by_clock = (
            self._stands_out(kept[turn.gpus], known, turn, z) for kept, known in
            ((self.busy, knows[:, 0]), (self.slow, knows[:, 1]))
        )  # fmt: skip
        waited_for = self.busy[turn.gpus] >= BUSY_BY_CLOCK * self.slow[turn.gpus]
        out = by_busy | (by_clock & (waited_for | ~knows[:, 0]))
        was = self.since_ns[turn.gpus]
        look = np.where(knows[:, 0], compute[turn.of], training[turn.of])  # a save or a dip decides nothing
        since = np.where(out, np.where(was > 0, was, now_ns), 0)
        self.since_ns[turn.gpus] = np.where(look, since, was)
        size_of = self._sizes(turn, state)
        self.slowdown[turn.slots] = slowdown = np.exp(size_of)
        spent_s = np.where(training, np.minimum(turn.dt_s, LONGEST_S), 0.0)
        self.cost_gpu_h[turn.slots] += (1.0 - 1.0 / slowdown) * size * spent_s / 3600.0

    def _smooth(self, kept: F32, which: int, gpus: I32, value: np.ndarray, dt_s: F64) -> None:
        known = np.isfinite(value)
        at, share = gpus[known], -np.expm1(-dt_s[known] / SMOOTH_S)
        seen = self.seen[at, which] + share * (1.0 - self.seen[at, which])
        kept[at] += (value[known] - kept[at]) * np.where(seen > 0.0, share / np.maximum(seen, 1e-9), 0.0)
        self.seen[at, which] = seen

    def _stands_out(self, value: F32, known: Bool, turn: _Turn, z: F64) -> Bool:
        sigma = 1.4826 * turn.parts.medians(np.where(known, np.abs(value), np.nan))
        limit = np.maximum(np.log(LEAST_SLOWDOWN), z * np.maximum(np.nan_to_num(sigma), SIGMA_LEAST))
        leaves = np.where(self.since_ns[turn.gpus] > 0, LEAVES_PU, 1.0)
        return np.asarray(known & (value > leaves * limit[turn.of]), np.bool_)

    def _sizes(self, turn: _Turn, state: State) -> F64:
        """Logarithm of the slowdown of each job [n]: by the slowest member that stands out for long enough,
        else by a link that stands out while all members compute less.
        """
        lasting = self._lasting(turn.gpus, state.now_ns)
        out = np.zeros(len(turn.slots))
        np.maximum.at(out, turn.of[lasting], self._size(turn.gpus[lasting]))
        standing = np.bincount(turn.of, self.since_ns[turn.gpus] > 0, len(out)) > 0
        for k, slot in enumerate(turn.slots.tolist()):
            found = None
            if not standing[k] and not self.pace.fell_ns[slot]:
                self._note_signs(turn, k, state)
            elif out[k] > 0.0 or self.pace.lasts(slot, state.now_ns, PERSIST_S):
                found = self._link(turn, k, state)
            if found is None:
                self.slow_links.pop(slot, None)
                continue
            self.slow_links[slot] = list(found)
            if out[k] == 0.0:
                out[k] = self.pace.fall(slot)
        return out

    def _members(self, turn: _Turn, k: int) -> tuple[I32, I32]:
        """Nodes and GPUs of a job."""
        gpus = turn.gpus[turn.of == k]
        return np.unique(self.site.node_of_gpu[gpus]), gpus

    def _note_signs(self, turn: _Turn, k: int, state: State) -> None:
        """Note every ten minutes what speaks against links of a job that is not slow."""
        slot, now_ns = int(turn.slots[k]), state.now_ns
        at_ns, last, _ = self.signs.get(slot, [0, [], []])
        if now_ns - at_ns >= round(NOTED_S * NS):
            signs = usual_signs(self.site, state, turn.links.rates, self._members(turn, k))
            self.signs[slot] = [now_ns, [[*key, count] for key, count in signs.items()], last]

    def _link(self, turn: _Turn, k: int, state: State) -> SlowLink | None:
        """The link that a job waits for, if one is."""
        members = self._members(turn, k)
        # By the time a fall shows, the last counts may be those of a link that is slow already
        noted = self.signs.get(int(turn.slots[k]), [0, [], []])[2]
        before = {(of[0], of[1], of[2]): float(of[3]) for of in noted}
        found = slow_link(self.site, state, turn.links, members, before)
        named = members[1][self._lasting(members[1], state.now_ns)]
        if found is not None and len(named) and not self._by_link(named, found):
            return None
        return found

    def _by_link(self, named: I32, found: SlowLink) -> bool:
        """Return True if a link explains that these members stand out: it is theirs, their clocks do not."""
        worst = int(named[np.argmax(self._size(named))])
        by_clock = self.seen[worst, 1] > 0.5 and self.slow[worst] > BUSY_BY_CLOCK * self.busy[worst]
        return bool((self.site.node_of_gpu[named] == found.node).all() and not by_clock)

    def _lasting(self, gpus: I32, now_ns: int) -> Bool:
        since = self.since_ns[gpus]
        return np.asarray((since > 0) & (now_ns - since >= round(PERSIST_S * NS)), np.bool_)

    def _size(self, gpus: I32) -> F64:
        """Logarithm of the slowdown by each of these, from what is known best."""
        sizes = np.where(self.seen[gpus, 0] > 0.5, self.busy[gpus], self.slow[gpus])
        return np.maximum(sizes.astype(np.float64), 0.0)

    @staticmethod
    def _read(state: State, key: str, gpus: I32) -> F32:
        """Good and timely readings of these GPUs [k]; NaN elsewhere."""
        signal = signal_of(key)
        table = state.tables["gpu"]
        value = table.value[signal.row, gpus]
        return np.where(table.current(signal, state.now_ns, gpus), value, np.float32(np.nan))

    def goodput_pu(self, slot: int) -> float | None:
        """Share of the watched time that trained and was kept; None where nothing was watched, or where it is
        not known what a restart cost.
        """
        if self.restarts[slot] and not self.saved_ns[slot]:
            return None
        watched_s = float(self.trained_s[slot] + self.still_s[slot] + self.lost_s[slot])
        return float(self.trained_s[slot]) / watched_s if watched_s > 0.0 else None

    def held_back(self, slot: int, state: State, jobs: JobSlots) -> HeldBack | None:
        """The smallest entity that holds a job back; None if there is none."""
        if not (jobs.alive[slot] and self.slowdown[slot] > 1.0):
            return None
        nodes = jobs.nodes[slot]
        start = self.site.gpu_start_of_node
        gpus = np.concatenate([np.arange(start[i], start[i + 1]) for i in nodes.tolist()]).astype(np.int32)
        named = gpus[self._lasting(gpus, state.now_ns)]
        link = SlowLink(*self.slow_links[slot]) if slot in self.slow_links else None
        slowdown, cost_gpu_h = float(self.slowdown[slot]), float(self.cost_gpu_h[slot])
        if not len(named) and link is None:
            return None
        said: tuple[str, ...] = ()
        if len(named):
            table, entity = self._place(named, gpus)
            since_ns = int(self.since_ns[named].min())
            said = self._evidence(named, len(gpus), since_ns, state)
        else:
            since_ns = int(self.pace.fell_ns[slot])
            minutes = (state.now_ns - since_ns) / NS / 60.0
            said = (f"tensor cores of all {len(gpus)} GPUs idle more than usual, for {minutes:.0f} min, "
                    "and none stands out: all wait equally",)  # fmt: skip
        if link is None:
            return HeldBack(table, entity, tuple(named.tolist()), slowdown, since_ns, cost_gpu_h, said)
        evidence = (f"{link.ends}: {link.evidence}", *said)
        entity = self.site.name(link.table, link.entity)
        return HeldBack(link.table, entity, tuple(named.tolist()), slowdown, since_ns, cost_gpu_h, evidence,
                        link.ends)  # fmt: skip

    def _place(self, named: I32, gpus: I32) -> tuple[str, str]:
        """The GPU; or the node, or the rack, most of whose members of the job are slow."""
        worst = int(named[np.argmax(self._size(named))])
        for table, of in (("node", self.site.node_of_gpu), ("rack", self.site.rack_of_gpu)):
            where = np.unique(of[named])
            if len(named) > 1 and len(where) == 1 and 2 * len(named) > np.count_nonzero(of[gpus] == where[0]):
                return table, self.site.name(table, int(where[0]))
        return "gpu", self.site.name("gpu", worst)

    def _evidence(self, named: I32, size: int, since_ns: int, state: State) -> tuple[str, ...]:
        worst = named[np.argmax(self._size(named))][None]
        name = self.site.name("gpu", int(worst[0]))
        minutes = (state.now_ns - since_ns) / NS / 60.0
        said = []
        if self.seen[worst[0], 0] > 0.5:
            more = 100.0 * float(np.expm1(self.busy[worst[0]]))
            said.append(f"tensor cores of {name} are {more:.0f} % busier than the median of {size} GPUs, for "
                        f"{minutes:.0f} min: the others wait for it")  # fmt: skip
        if self.seen[worst[0], 1] > 0.5 and self.slow[worst[0]] > 0.5 * np.log(LEAST_SLOWDOWN):
            clock_hz = float(self._read(state, CLOCK, worst)[0])
            now = f" ({clock_hz / 1e6:.0f} MHz)" if np.isfinite(clock_hz) else ""
            cost = 100.0 * float(np.expm1(self.slow[worst[0]]))
            said.append(f"its clock{now} is below theirs, which makes kernels {cost:.0f} % longer")
        bits = float(self._read(state, BITS, worst)[0])
        reasons = [words for bit, words in REASONS if np.isfinite(bits) and int(bits) & bit]
        if reasons:
            said.append(f"its clock is lowered by {', '.join(reasons)}")
        if len(named) > 1:
            names = ", ".join(self.site.name("gpu", int(i)) for i in named[:SHOWN])
            said.append(f"{len(named)} GPUs are slow: {names}{', ...' if len(named) > SHOWN else ''}")
        return tuple(said)

    def findings(self, state: State, jobs: JobSlots) -> list[Finding]:
        """One finding for each job that is held back."""
        found = []
        for slot in np.flatnonzero((self.slowdown > 1.0) & jobs.alive).tolist():
            held = self.held_back(slot, state, jobs)
            if held is None:
                continue
            job = jobs.shown(slot)
            severity = "warning" if held.slowdown >= WARNING_SLOWDOWN else "info"
            slower = f"the job is {100.0 * (held.slowdown - 1.0):.0f} % slower"
            cost = f"{slower}, which has cost {held.cost_gpu_h:.1f} GPU-hours"
            found.append(
                Finding(f"job_straggler/{jobs.names[slot]}", severity,
                        f"{held.ends or held.entity} holds {job} back", (held.entity, job),
                        (cost, *held.evidence), 0.95, LINK_REMEDY if held.ends else REMEDY,
                        max(len(held.gpus), 1))
            )  # fmt: skip
        return found

    def adopt(self, old: Self, old_of_new: OldOfNew) -> None:
        """Take over what is known of jobs; links have other places on another site, or left it."""
        super().adopt(old, old_of_new)
        new_of = {
            table: {was: now for now, was in enumerate(old_of_new[table].tolist()) if was >= 0}
            for table in ("link", "gpu", "node")
        }
        self.slow_links = {
            slot: [table, new_of[table][entity], new_of["node"][node], *said]
            for slot, (table, entity, node, *said) in self.slow_links.items()
            if entity in new_of[table] and node in new_of["node"]
        }
        self.signs = {
            slot: [
                at_ns,
                *([[t, new_of[t][i], *of] for t, i, *of in rows if i in new_of[t]] for rows in noted),
            ]
            for slot, (at_ns, *noted) in self.signs.items()
        }

    def remapped(self, site: Site, old_of_new: OldOfNew) -> GoodputState:
        """Return the state for a changed site."""
        out = GoodputState(site)
        out.adopt(self, old_of_new)
        return out
