"""Texts of checkpointing: proposals as sentences, with the figures that were weighed.

The words are of the moment of the decision, so that a proposal in force says the same until it changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.checkpointing.costs import SOURCES
from policies.checkpointing.early_save import THREAT_TEXTS
from twin.catalogue import I32
from twin.contracts import Memory, Proposal, View

INTERVAL, SINCE = "job.checkpoint_interval_s", "job.checkpoint_since_s"
LOCAL = "job.checkpoint_local_interval_s"
NO_LIMIT_S = 1e10
MOST_NAME = 40  # characters of a job's name in a sentence
MOST_SENTENCES = 200  # jobs with a sentence of their own, of each control; the rest share one


def proposals(view: View, kept: Memory) -> list[Proposal]:
    """Return the proposals for intervals, saves now, and saves to memory: one per job, and one for the
    rest."""
    names = view.jobs.names
    high, local_high = view.envelope(INTERVAL).high, view.envelope(LOCAL).high
    return [
        *(_interval(index, high, names, kept) for index in _parts(kept["interval_s"])),
        *(_save_request(index, names, kept) for index in _parts(kept["save_since_s"])),
        *(_to_memory(index, local_high, names, kept) for index in _parts(kept["local_s"])),
    ]


def _parts(column: np.ndarray) -> list[I32]:
    """Split jobs with a value: the first MOST_SENTENCES each alone, the rest together."""
    at = np.flatnonzero(column > 0).astype(np.int32)
    parts = [at[k : k + 1] for k in range(min(len(at), MOST_SENTENCES))]
    return [*parts, at[MOST_SENTENCES:]] if len(at) > MOST_SENTENCES else parts


def _interval(index: I32, high: np.ndarray, names: list[str], kept: Memory) -> Proposal:
    want = np.where(kept["round_s"][index] > 0, kept["round_s"][index], kept["interval_s"][index])
    lo = np.minimum(kept["least_s"][index], want)
    if len(index) > 1:
        why = f"best for the failure rates of their own nodes, for {len(index)} more jobs"
    else:
        why = _job_prefix(names[index[0]])
        why += _interval_text({name: column[index[0]] for name, column in kept.items()})
    return Proposal(INTERVAL, index, lo, np.maximum(high[index], want), want, why)


def _to_memory(index: I32, high: np.ndarray, names: list[str], kept: Memory) -> Proposal:
    want = kept["local_s"][index]
    if len(index) > 1:
        why = f"best between two durable saves, for {len(index)} more jobs"
    else:
        often_s, durable_s = (float(kept[name][index[0]]) for name in ("local_s", "interval_s"))
        why = f"{_job_prefix(names[index[0]])}save to memory every {span(often_s)}: "
        why += f"best for the loss of a process, between durable saves every {span(durable_s)}"
    return Proposal(LOCAL, index, np.minimum(1.0, want), np.maximum(high[index], want), want, why)


def _interval_text(job: dict[str, Any]) -> str:
    was, gain = float(job["previous_s"]), 100.0 * float(job["gain_pu"])
    n = int(job["nodes"])
    shift_s = float(job["round_s"]) - float(job["interval_s"]) if job["round_s"] > 0 else 0.0
    if not job["planned_ns"] or not job["nodes"]:
        text = f"save every {span(job['interval_s'])}, as it does"
        return text + _shift_text(shift_s)
    text = f"save every {span(job['interval_s'])}"
    text += f" instead of {span(was)}: " if was > 0 else ": "
    text += f"{n} node{'' if n == 1 else 's'} and the job fail every {span(job['mttf_s'])}, "
    text += f"a save stops it for {span(job['block_s'])} ({SOURCES[int(job['source'])]}); "
    text += f"trains {100.0 * float(job['ettr_pu']):.1f} % of its time"
    text += f", {gain:.1f} points more" if was > 0 and gain > 0.05 else ""
    if was > 0 and gain <= 0.0:
        text += ", limited by the storage bandwidth"
    text += f"; to memory every {span(job['local_s'])}" if job["local_s"] > 0 else ""
    return text + _shift_text(shift_s)


def _shift_text(shift_s: float) -> str:
    if not shift_s:
        return ""
    side = "later" if shift_s > 0 else "earlier"
    return f"; this time {span(abs(shift_s))} {side}, so that saves do not overlap"


def _save_request(index: I32, names: list[str], kept: Memory) -> Proposal:
    want = kept["save_since_s"][index]
    if len(index) > 1:
        why = f"save now: {len(index)} more jobs whose expected loss exceeds a save's cost"
    else:
        at = index[0]
        chance, lost_s, cost_s = (float(kept[name][at]) for name in ("chance_pu", "lost_s", "cost_s"))
        n = int(kept["nodes"][at])
        why = _job_prefix(names[at])
        why += f"save now: {THREAT_TEXTS.get(int(kept['threat'][at]), 'the job is at risk')}; "
        why += (
            f"saving costs {span(cost_s)}; not saving risks {100.0 * chance:.0f} % of {span(lost_s)} of work "
        )
        why += f"on {n} node{'' if n == 1 else 's'}"
    return Proposal(SINCE, index, want.copy(), np.full(len(index), NO_LIMIT_S), want.copy(), why)


def _job_prefix(job: str) -> str:
    """Return the name of the job as a prefix. People know job names, not slots."""
    return f"job {job if len(job) <= MOST_NAME else job[:MOST_NAME] + '...'}: "


def span(seconds: float | np.generic) -> str:
    """Return a time in words."""
    s = float(seconds)
    if s < 100.0:
        return f"{s:.3g} s"
    if s < 2 * 3600.0:
        return f"{s / 60.0:.3g} min"
    return f"{s / 3600.0:.3g} h" if s < 2 * 86_400.0 else f"{s / 86_400.0:.3g} days"
