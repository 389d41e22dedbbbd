"""Calibration over the interface: learned parameters with their bands, nominal values and drift.

Of one entity all; of the site how many entities are learned, and the largest drifts first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric

from twin.api.answers import MAX_ROWS, Refused, answer, known_query, listed, live_of, number_of
from twin.api.comparisons import COMPARED, compared
from twin.api.runtime import Runtime
from twin.api.scopes import masks_of
from twin.catalogue import NS, Bool, clean, did_you_mean
from twin.contracts import Z90
from twin.estimation import (
    LEARNED,
    LEARNING,
    NOTHING_LEARNED,
    PARAMETER_KINDS,
    STATES,
    Calibration,
    calibrations,
)

WEEK_S, DAY_S = 7 * 86_400.0, 86_400.0
LEAST_RATE_S = 1.5 * DAY_S  # of a drift before it has a rate: what moves within a day swings with the load
DIGITS = 5  # significant ones


async def calibration(request: web.Request) -> web.Response:
    """Return how many entities are learned, per kind and parameter, and the drifts, largest first."""
    known_query(request, "prefix", "offset", "limit", "parameter")
    live, names = live_of(request), listed(request, "parameter")
    for name in names:
        if name not in PARAMETER_KINDS:
            raise Refused(400, f"parameter: {clean(name, 60)} is none; expected such as gpu.resistance"
                          + did_you_mean(name, PARAMETER_KINDS))  # fmt: skip
    offset = number_of(request, "offset", 0, 0, 2**31)
    limit = number_of(request, "limit", 20, 1, MAX_ROWS)
    prefix = request.query.get("prefix", "")
    kinds, parameters = [], []
    drifts: list[tuple[float, Calibration, int]] = []
    masks = masks_of(live, COMPARED, prefix)
    for table in COMPARED:
        found = calibrations(live.engine.estimator, table)
        if not found:
            continue
        inside = masks[table]
        if not inside.any():
            continue
        drifted = [one.drifted & inside for one in found]
        kinds.append(_counts(table, found, drifted, inside))
        for one, mask in zip(found, drifted, strict=True):
            parameters.append(_parameter(one, mask, inside))
            if not names or one.kind.name in names:
                drifts += _drifts(one, mask)
    drifts.sort(key=lambda d: (-d[0], d[1].kind.name, d[2]))
    page = drifts[offset : offset + limit]
    return answer({
        "tick": live.engine.state.tick, "now_ns": live.engine.state.now_ns, "prefix": prefix or None,
        "kinds": kinds, "parameters": parameters,
        "total": len(drifts), "next_offset": offset + limit if offset + limit < len(drifts) else None,
        "drifts": [{"name": live.engine.site.name(one.kind.table, row), **shown_row(live, one, row)}
                   for _, one, row in page],
    })  # fmt: skip


async def calibration_of(request: web.Request) -> web.Response:
    """Return the learned parameters of an entity: value with band, nominal value, and drift."""
    live = live_of(request)
    table, row = compared(live, request.match_info["name"], "learned parameters")
    return answer({
        "tick": live.engine.state.tick, "now_ns": live.engine.state.now_ns, "table": table,
        "name": live.engine.site.name(table, row),
        "parameters": [shown_row(live, one, row) for one in calibrations(live.engine.estimator, table)],
        "wear": live.engine.health.wear.evidence(table, row),
    })  # fmt: skip


def _counts(
    table: str, found: list[Calibration], drifted: list[Bool], inside: Bool | slice = slice(None)
) -> dict[str, Any]:
    """Entities by state: learned where all that is read and may drift is, unknown where nothing was read."""
    states = np.stack([one.state for one in found if one.kind.healthy])[:, inside]
    unknown = (states == NOTHING_LEARNED).all(axis=0)
    learned = ~unknown & (states != LEARNING).all(axis=0)
    n, n_learned, n_unknown = states.shape[1], int(learned.sum()), int(unknown.sum())
    return {"table": table, "of": n, "learned": n_learned, "learning": n - n_learned - n_unknown,
            "unknown": n_unknown, "drifted": int(np.logical_or.reduce(drifted).sum())}  # fmt: skip


def _parameter(one: Calibration, drifted: Bool, inside: Bool) -> dict[str, Any]:
    """Counts of one parameter, and where nine of ten entities that are learned are."""
    state = one.state[inside]
    values = one.value[inside & (one.state == LEARNED)]
    values = values[np.isfinite(values)]
    low, mid, high = np.quantile(values, (0.05, 0.5, 0.95)) if len(values) else (np.nan,) * 3
    return {
        "parameter": one.kind.name, "text": one.kind.text, "unit": one.kind.unit,
        **{name: int(np.count_nonzero(state == k)) for k, name in enumerate(STATES)},
        "drifted": int(np.count_nonzero(drifted)),
        "low": _digits(low), "median": _digits(mid), "high": _digits(high),
    }  # fmt: skip


def _drifts(one: Calibration, drifted: Bool) -> list[tuple[float, Calibration, int]]:
    """The drifts beyond their band, each with its size over the band: so parameters compare."""
    at = np.flatnonzero(drifted)
    size = np.abs(one.own_drift[at]) / one.drift_band[at]
    return [(float(s), one, i) for s, i in zip(size.tolist(), at.tolist(), strict=True)]


def shown_row(live: Runtime, one: Calibration, row: int) -> dict[str, Any]:
    """One parameter of one entity. `band` and `drift_band` are halves of 90 % bands."""
    kind, drift = one.kind, float(one.drift[row])
    nominal = float(np.broadcast_to(one.nominal, one.value.shape)[row])
    reference, since_ns = float(one.reference[row]), int(one.since_ns[row])
    per_week, over_s = _rate(live, one, row)
    return {
        "parameter": kind.name, "text": kind.text, "unit": kind.unit, "state": STATES[int(one.state[row])],
        "value": _digits(one.value[row]), "band": _digits(Z90 * one.sigma[row]),
        "nominal": _digits(nominal), "nominal_from": kind.nominal if np.isfinite(nominal) else None,
        "readings": None if one.readings is None else int(one.readings[row]),
        "taught_s": None if one.taught_s is None else round(float(one.taught_s[row]), 0),
        "reference": _digits(reference), "since_ns": since_ns or None,
        "drift": _digits(drift), "drift_band": _digits(one.drift_band[row]),
        "drift_pu": None if kind.absolute or not reference else _digits(drift / abs(reference)),
        "drifted": bool(one.drifted[row]), "means": one.meaning(row) or None,
        "per_week": _digits(per_week), "rate_over_s": None if over_s is None else round(over_s, 0),
    }  # fmt: skip


def _rate(live: Runtime, one: Calibration, row: int) -> tuple[float, float | None]:
    """(Change in a week, the time that it rests on): of the trend that health keeps of what wears, else the
    mean since the reference."""
    trend = live.engine.health.wear.rate(one.kind.name, row)
    if trend is not None:
        return trend[0] * WEEK_S, trend[1]
    since_ns = int(one.since_ns[row])
    age_s = (live.engine.state.now_ns - since_ns) / NS
    if not since_ns or age_s < LEAST_RATE_S:
        return float("nan"), None
    return float(one.drift[row]) * WEEK_S / age_s, age_s


def _digits(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None


def calibration_series(live: Runtime) -> Iterator[Metric]:
    """Counts for Prometheus: entities by state, and drifts by parameter."""
    entities = GaugeMetricFamily("racktwin_calibration_entities", "entities whose parameters are learned, "
                                 "learning or unknown", labels=["table", "state"])  # fmt: skip
    drifted = GaugeMetricFamily("racktwin_calibration_drifted", "entities whose parameter has drifted "
                                "beyond its band", labels=["parameter"])  # fmt: skip
    for table in COMPARED:
        found = calibrations(live.engine.estimator, table)
        if not found:
            continue
        masks = [one.drifted for one in found]
        counts = _counts(table, found, masks)
        for state in STATES:
            entities.add_metric([table, state], counts[state])
        for one, mask in zip(found, masks, strict=True):
            drifted.add_metric([one.kind.name], int(np.count_nonzero(mask)))
    yield entities
    yield drifted
