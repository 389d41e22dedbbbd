"""Slow links: the link that all members of a synchronous job wait for.

A slow link stretches the collectives that it is a part of. All members wait in them alike: their tensor cores
rest while their SMs stay active, so that no member stands out and the whole job computes less than it did.
The link is named by what its counters or its bandwidth say that those of the job's other links do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from twin.catalogue import F32, F64, I32, I64, NS, Bool, signal_of
from twin.site import Site, port_far_end
from twin.telemetry import EntityState, State, column

SMOOTH_S, USUAL_S = 120.0, 3600.0  # of the level of now, of the usual one; source: estimate
KEPT_S = 6 * 3600.0  # of the usual level while that of now is lower: another phase of work becomes usual
LEARNED_S = 600.0  # of a job, before its level can fall
LEAST_FALL = 0.05  # logarithm of the slowdown that is worth a word; source: estimate
SPREADS = 3.0  # mean moves of the level about the usual one, that a fall exceeds; source: estimate
# Growth in about ten minutes that speaks against a link; source: estimates, as the rules of health have them
COUNTS = {
    "link": (("error_count", 100.0, "errors"), ("symbol_error_count", 100.0, "symbol errors"),
             ("recovery_count", 2.0, "recoveries"), ("flap_count", 0.9, "flaps"),
             ("discard_count", 1000.0, "discarded packets")),
    "gpu": (("nvlink_error_count", 60.0, "errors"), ("nvlink_replay_count", 60.0, "replays"),
            ("nvlink_recovery_count", 2.0, "recoveries")),
}  # fmt: skip
NEAR_PU = 0.25  # of that, from which on a count is noted when a job begins to compute less
UNUSUAL = 2.0  # counts over those noted then; a link that counts as ever is only noisy; source: estimate
NARROW_PU = 0.7  # of the bandwidth that like links of the job have; source: estimate
LEAST_PEERS = 4  # links of one plane, below which none is narrow beside the others
CLEAR = 5.0  # evidence over that against any other link of the job; source: estimate


Signs = dict[tuple[str, int, str], float]


class LinkRates(Protocol):
    """Growth of error counters, as the health of parts keeps it."""

    def above(self, key: str, least: float, recent: bool = True) -> I32:
        """Entities that grew by so much in about ten minutes."""
        ...

    def counted(self, key: str, recent: bool = True) -> F32:
        """Growth in about ten minutes [n]."""
        ...


class LinkNames(Protocol):
    """NVLinks that counted something: rows of a GPU, the one that recovered last first, and their names."""

    index: I32

    def of_gpu(self, gpu: int) -> I64:
        """Places of the rows of a GPU's links."""
        ...

    def name(self, index: int) -> str:
        """A link by both ends."""
        ...


class LinkRecords(NamedTuple):
    """Records of links as the health of parts keeps them."""

    rates: LinkRates
    nvlinks: LinkNames


class SlowLink(NamedTuple):
    """The link that stands out in a job: `entity` of `table` (link, or gpu for one of its NVLinks), its node,
    the link by both ends, and the signs against it.
    """

    table: str
    entity: int
    node: int
    ends: str
    evidence: str


class JobPace(EntityState):
    """Share of its activity in which a job computes, as a logarithm: now and usually [n_job]."""

    level: F64 = column("job", "f8")
    usual: F64 = column("job", "f8")
    spread: F64 = column("job", "f8")  # mean move about the usual level
    heard_s: F64 = column("job", "f8")
    fell_ns: I64 = column("job", "i8")  # since when it computes less; 0: it does not

    def clear(self, slots: I64) -> None:
        """Start again for these jobs."""
        for name in self.declared:
            getattr(self, name)[slots] = 0

    def observe(self, slots: I64, level: F64, dt_s: F64, now_ns: int) -> None:
        """Take in the level of jobs [k]; NaN where it is not known, and nothing changes."""
        known = np.isfinite(level) & (dt_s > 0.0)
        slots, level, dt_s = slots[known], level[known], dt_s[known]
        heard_s = self.heard_s[slots] + dt_s
        share = np.maximum(-np.expm1(-dt_s / SMOOTH_S), dt_s / np.maximum(heard_s, 1e-9))
        now = self.level[slots] + share * (level - self.level[slots])
        off = self.usual[slots] - now
        fallen = self.fell(off, self.spread[slots]) & (heard_s >= LEARNED_S)
        usual_s = np.where(fallen, KEPT_S, np.minimum(heard_s, USUAL_S))
        self.usual[slots] -= np.minimum(dt_s / usual_s, 1.0) * off
        # A move that is far beyond those before is the begin of a fall, or its end
        usual_off = np.minimum(np.abs(off), 2.0 * np.maximum(self.spread[slots], LEAST_FALL / SPREADS))
        share = np.where(fallen, 0.0, np.minimum(dt_s / usual_s, 1.0))
        self.spread[slots] += share * (usual_off - self.spread[slots])
        self.level[slots], self.heard_s[slots] = now, heard_s
        since = np.where(self.fell_ns[slots] > 0, self.fell_ns[slots], now_ns)
        self.fell_ns[slots] = np.where(fallen, since, 0)

    @staticmethod
    def fell(fall: F64, spread: F64) -> Bool:
        """Return True for a level that is lower than the usual one by more than it moves anyway [k]."""
        return np.asarray(fall > np.maximum(LEAST_FALL, SPREADS * spread), np.bool_)

    def fall(self, slot: int) -> float:
        """Logarithm of the slowdown of a job."""
        return max(float(self.usual[slot] - self.level[slot]), 0.0)

    def lasts(self, slot: int, now_ns: int, least_s: float) -> bool:
        """Return True if a job has computed less for so long."""
        since_ns = int(self.fell_ns[slot])
        return since_ns > 0 and now_ns - since_ns >= round(least_s * NS)


def counted_signs(site: Site, rates: LinkRates, nodes: I32, part: float = 1.0) -> Signs:
    """Signs against links of these nodes, or near signs: counts by table, entity and counter. `part` of a
    full sign is enough.
    """
    of_job = np.zeros(site.sizes["node"], np.bool_)
    of_job[nodes] = True
    out: Signs = {}
    for table, counts in COUNTS.items():
        node_of = site.node_of_link if table == "link" else site.node_of_gpu
        for name, least, _ in counts:
            grown = rates.above(f"{table}.{name}", part * least)
            grown = grown[of_job[node_of[grown]]]
            if len(grown):
                count = rates.counted(f"{table}.{name}")[grown]
                out |= {(table, i, name): c for i, c in zip(grown.tolist(), count.tolist(), strict=True)}
    return out


def usual_signs(site: Site, state: State, rates: LinkRates, members: tuple[I32, I32]) -> Signs:
    """Signs of links of a job that is not slow: links that count errors, or carry less than their peers."""
    narrow = {key: float(score) for key, score, _ in _unlike_peers(site, state, members)}
    return counted_signs(site, rates, members[0], NEAR_PU) | narrow


def slow_link(
    site: Site, state: State, records: LinkRecords, members: tuple[I32, I32], before: Signs
) -> SlowLink | None:
    """The one link of a job that stands out; None where none does, or several do alike.

    `members`: nodes and GPUs of the job; `before`: signs of its links when it began to compute less.
    """
    scores: dict[tuple[str, int], float] = {}
    words: dict[tuple[str, int], list[str]] = {}
    for key, score, text in _evidence(site, state, records.rates, members, before):
        scores[key] = max(scores.get(key, 0.0), score)
        words.setdefault(key, []).append(text)
    order = sorted(scores, key=lambda key: (-scores[key], key))
    if not order or (len(order) > 1 and scores[order[0]] < CLEAR * scores[order[1]]):
        return None
    table, entity = order[0]
    said = f"{', '.join(words[order[0]])}, and no other link of the job shows this"
    if table == "link":
        far = port_far_end(site, entity)
        ends = f"{site.name('link', entity)}{f' to {far}' if far else ' (far end not known)'}"
        return SlowLink(table, entity, int(site.node_of_link[entity]), ends, said)
    rows = records.nvlinks.of_gpu(entity)
    ends = (
        records.nvlinks.name(int(records.nvlinks.index[rows[0]]))
        if len(rows)
        else f"an NVLink of {site.name('gpu', entity)} (which one is not known)"
    )
    return SlowLink(table, entity, int(site.node_of_gpu[entity]), ends, said)


def _evidence(
    site: Site, state: State, rates: LinkRates, members: tuple[I32, I32], before: Signs
) -> Iterator[tuple[tuple[str, int], float, str]]:
    """(link, how much speaks against it, in words) of the links of a job."""
    signs = counted_signs(site, rates, members[0])
    for table, counts in COUNTS.items():
        for name, least, what in counts:
            for key, count in signs.items():
                # One that counts as ever is noisy, and is not why the job is slower now
                if (key[0], key[2]) == (table, name) and count > UNUSUAL * before.get(key, 0.0):
                    yield key[:2], count / least, f"{count:.0f} {what} in about ten minutes"
    for key, score, text in _unlike_peers(site, state, members):
        if score > UNUSUAL * before.get(key, 0.0):
            yield key[:2], score, text


def _unlike_peers(
    site: Site, state: State, members: tuple[I32, I32]
) -> Iterator[tuple[tuple[str, int, str], float, str]]:
    """(link and signal, how much speaks against it, in words) of links that carry less than like ones."""
    nodes, gpus = members
    of_job = np.zeros(site.sizes["node"], np.bool_)
    of_job[nodes] = True
    links = np.flatnonzero(of_job[site.node_of_link]).astype(np.int32)
    for plane in np.unique(site.plane_of_link[links]).tolist():
        yield from _narrow(state, "link", "rx_bytes_per_s", links[site.plane_of_link[links] == plane])
    yield from _narrow(state, "gpu", "nvlink_tx_bytes_per_s", gpus)


def _narrow(
    state: State, table: str, name: str, links: I32
) -> Iterator[tuple[tuple[str, int, str], float, str]]:
    """Links that carry less than like ones of the job do."""
    signal = signal_of(f"{table}.{name}")
    column_ = state.tables[table]
    links = links[column_.current(signal, state.now_ns, links)]
    rate = column_.value[signal.row, links].astype(np.float64)
    if len(links) < LEAST_PEERS or not (middle := float(np.median(rate))) > 0.0:
        return
    for i in np.flatnonzero(rate < NARROW_PU * middle).tolist():
        share = 100.0 * rate[i] / middle
        yield (
            (table, int(links[i]), name),
            NARROW_PU / max(rate[i] / middle, 0.05),
            (f"it carries {share:.0f} % of the traffic of its peers"),
        )
