"""What checkpoint proposes, from what it remembers, with the figures that were weighed in words.

The words are of the moment of the decision, so that a proposal in force says the same until it changes. May
import contracts, checkpoint_ahead and checkpoint_costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.checkpoint_ahead import WHY
from policies.checkpoint_costs import SOURCES
from twin.contracts import Memory, Proposal, View
from twin.frame import I32

FOR_EVER_S = 1e10
MOST_NAME = 40  # characters of a job's name in a sentence
MOST_TOLD = 200  # jobs with a sentence of their own, of each control; the rest share one


def proposals(view: View, interval: str, since: str, local: str, kept: Memory) -> list[Proposal]:
    """One for each job of the first MOST_TOLD, one for the others, of each control."""
    high, names = view.envelope(interval).high, view.jobs.names
    often = np.flatnonzero(kept["interval_s"] > 0).astype(np.int32)
    out = [
        _interval(interval, often[k : k + 1], high, names, kept) for k in range(min(len(often), MOST_TOLD))
    ]
    if len(often) > MOST_TOLD:
        out.append(_interval(interval, often[MOST_TOLD:], high, names, kept))
    now = np.flatnonzero(kept["since_s"] > 0).astype(np.int32)
    out += [_since(since, now[k : k + 1], names, kept) for k in range(min(len(now), MOST_TOLD))]
    if len(now) > MOST_TOLD:
        out.append(_since(since, now[MOST_TOLD:], names, kept))
    tiered = np.flatnonzero(kept["local_s"] > 0).astype(np.int32)
    cuts = [tiered[k : k + 1] for k in range(min(len(tiered), MOST_TOLD))]
    if len(tiered) > MOST_TOLD:
        cuts.append(tiered[MOST_TOLD:])
    high = view.envelope(local).high
    return out + [_to_memory(local, index, high, names, kept) for index in cuts]


def _interval(control: str, index: I32, high: np.ndarray, names: list[str], kept: Memory) -> Proposal:
    want = kept["interval_s"][index]
    lo = np.minimum(kept["least_s"][index], want)
    if len(index) > 1:
        why = f"best for the failure rates of their own nodes, for {len(index)} more jobs"
    else:
        why = _named(names[index[0]])
        why += _why_often({name: column[index[0]] for name, column in kept.items()})
    return Proposal(control, index, lo, np.maximum(high[index], want), want, why)


def _to_memory(control: str, index: I32, high: np.ndarray, names: list[str], kept: Memory) -> Proposal:
    want = kept["local_s"][index]
    if len(index) > 1:
        why = f"best between two durable saves, for {len(index)} more jobs"
    else:
        often_s, durable_s = (float(kept[name][index[0]]) for name in ("local_s", "interval_s"))
        why = f"{_named(names[index[0]])}save to memory every {span(often_s)}: "
        why += f"what a lost process costs, between durable saves every {span(durable_s)}"
    return Proposal(control, index, np.minimum(1.0, want), np.maximum(high[index], want), want, why)


def _why_often(job: dict[str, Any]) -> str:
    was, gain = float(job["was_s"]), 100.0 * float(job["gain_pu"])
    n = int(job["nodes"])
    text = f"save every {span(job['interval_s'])}"
    text += f" instead of {span(was)}: " if was > 0 else ": "
    text += f"{n} node{'' if n == 1 else 's'} and the job fail every {span(job['mttf_s'])}, "
    text += f"a save stops it for {span(job['block_s'])} ({SOURCES[int(job['source'])]}); "
    text += f"trains {100.0 * float(job['ettr_pu']):.1f} % of its time"
    text += f", {gain:.1f} points more" if was > 0 and gain > 0.05 else ""
    if was > 0 and gain <= 0.0:
        text += ", as storage drains no more"
    return text + (f"; to memory every {span(job['local_s'])}" if job["local_s"] > 0 else "")


def _since(control: str, index: I32, names: list[str], kept: Memory) -> Proposal:
    want = kept["since_s"][index]
    if len(index) > 1:
        why = f"save now: {len(index)} more jobs whose expected loss exceeds a save's cost"
    else:
        at = index[0]
        chance, lost_s, cost_s = (float(kept[name][at]) for name in ("chance_pu", "lost_s", "cost_s"))
        n = int(kept["nodes"][at])
        why = _named(names[at])
        why += f"save now: {WHY.get(int(kept['why'][at]), 'it is in danger')}; "
        why += f"{100.0 * chance:.0f} % x {span(lost_s)} of work not saved > {span(cost_s)} for a save, "
        why += f"of {n} node{'' if n == 1 else 's'}"
    return Proposal(control, index, want.copy(), np.full(len(index), FOR_EVER_S), want.copy(), why)


def _named(job: str) -> str:
    """Whom it is about: people know jobs, not their slots."""
    return f"job {job if len(job) <= MOST_NAME else job[:MOST_NAME] + '...'}: "


def span(seconds: float | np.generic) -> str:
    """A time in words."""
    s = float(seconds)
    if s < 100.0:
        return f"{s:.3g} s"
    if s < 2 * 3600.0:
        return f"{s / 60.0:.3g} min"
    return f"{s / 3600.0:.3g} h" if s < 2 * 86_400.0 else f"{s / 86_400.0:.3g} days"
