"""Measured beside expected: the comparisons of one entity, how much of the site they judge, and the learned
parameters that they rest on.

A comparison is learned when its noise is: then it has a band, and what leaves it for long becomes a finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric

from twin.api.answers import MAX_ROWS, Refused, answer, known_query, listed, live_of, number_of
from twin.api.runtime import Runtime
from twin.api.scopes import masks_of, suggestion
from twin.catalogue import F64, NS, Bool, Signal, clean, did_you_mean, duration, find_signal
from twin.contracts import FAILED, HEALTHY, UNKNOWN, Z90, Residual, finite
from twin.diagnosis import derived_from, measured_signal
from twin.estimation import (
    LEARNED,
    LEARNING,
    NOTHING_LEARNED,
    PARAMETER_KINDS,
    STATES,
    Calibration,
    calibrations,
)

BALANCE = "balance"  # its rows are sums of feeders and racks, no entities
JUDGED = (("gpu", "GPUs"), ("node", "nodes"))  # the first that the site has
SHOWN_BALANCES = 100
COMPARED = ("gpu", "node", "rack", "cdu", "loop", "feeder")
WEEK_S, DAY_S = 7 * 86_400.0, 86_400.0
LEAST_RATE_S = 1.5 * DAY_S  # of a drift before it has a rate: what moves within a day swings with the load
DIGITS = 5  # significant ones


def _comparisons(live: Runtime, table: str) -> Iterator[tuple[Signal, Residual]]:
    """Return the comparisons of a table, each with its signal."""
    for name, residual in live.engine.estimator.residuals.items():
        of, _, rest = name.partition(".")
        signal = find_signal(f"{of}.{measured_signal(name)}")
        if of == table and rest != BALANCE and signal is not None:
            yield signal, residual


def _learned(residual: Residual) -> tuple[Bool, Bool, Bool]:
    """Return masks of entities with readings [n]: band learned, band still learning, no expected value."""
    known, read = np.isfinite(residual.expected), np.isfinite(residual.measured)
    sure = np.isfinite(residual.sigma)
    return read & known & sure, read & known & ~sure, read & ~known


def _left_s(live: Runtime, signal: Signal, name: str) -> F64:
    """Return about the remaining time to learn a comparison, s [n], by the usual period of its signal."""
    wait_s, readings = live.engine.estimator.learning_left(name)
    column = live.engine.state.tables[signal.table]
    row = column.freshness.row_of(signal)
    usual_s = column.cadence.usual_s[int(column.partition.group_of_row[row])]
    period_s = np.where(usual_s > 0.0, usual_s, column.freshness.period_s[row])
    return np.asarray(wait_s + readings * period_s, np.float64)


async def comparisons(request: web.Request) -> web.Response:
    """Return the measured and expected values of an entity, with bands, learned or not."""
    live, name = live_of(request), request.match_info["name"]
    whole = live.engine.site.entity("site", name)
    table, row = compared(live, name, "expected values") if whole is None else ("site", whole)
    return answer({
        "tick": live.engine.state.tick, "now_ns": live.engine.state.now_ns, "table": table,
        "name": live.engine.site.name(table, row),
        "comparisons": comparisons_of(live, table, row),
    })  # fmt: skip


def compared(live: Runtime, name: str, what: str) -> tuple[str, int]:
    """The table and row of an entity that the estimator knows, by its name, or by TABLE:NAME where several
    have it. Raises Refused."""
    head, _, tail = name.partition(":")
    for table in COMPARED:
        row = live.engine.site.entity(table, tail if head == table else name)
        if row is not None:
            return table, row
    why = f"no {clean(name, 120)} with {what}; expected one of {', '.join(COMPARED)}"
    raise Refused(404, why + suggestion(live, name))


def comparisons_of(live: Runtime, table: str, row: int) -> list[dict[str, Any]]:
    """Return the comparisons of an entity; `band` is half of the 90 % band, None while it is learned.

    Of the site those of its power tree: what meters read beside the sum of what they serve.
    """
    if table == "site":
        return _balances(live)
    out = []
    for signal, residual in _comparisons(live, table):
        learned, learning, _ = (bool(mask[row]) for mask in _learned(residual))
        measured, expected = float(residual.measured[row]), float(residual.expected[row])
        state = "learned" if learned else "learning"
        if not learned and not learning:
            state = "not read" if np.isnan(measured) else "inputs missing"
        digits = max(0, int(np.ceil(-np.log10(signal.quantum)))) + 1
        out.append({
            "signal": signal.name, "unit": signal.unit, "state": state,
            "measured": finite(measured, digits), "expected": finite(expected, digits),
            "residual": finite(measured - expected, digits),
            "band": finite(Z90 * float(residual.sigma[row]), digits),
            "left_s": round(float(_left_s(live, signal, residual.name)[row]), 0) if learning else None,
            "from": derived_from(residual.name),
        })  # fmt: skip
    return out


def _balances(live: Runtime) -> list[dict[str, Any]]:
    """Return the balances of the power tree, the largest deviations first."""
    residual = live.engine.estimator.residuals.get(f"feeder.{BALANCE}")
    if residual is None or not len(residual.expected):
        return []
    learned, learning, _ = _learned(residual)
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.nan_to_num(np.abs(residual.difference) / residual.sigma, nan=-1.0)
    left_s, left = live.engine.estimator.learning_left(residual.name)
    out = []
    for i in np.argsort(-off, kind="stable")[:SHOWN_BALANCES].tolist():
        measured, expected = float(residual.measured[i]), float(residual.expected[i])
        state = "learned" if learned[i] else "learning" if learning[i] else "inputs missing"
        out.append({
            "signal": "power_w", "unit": "W", "state": "not read" if np.isnan(measured) else state,
            "measured": finite(measured, 1), "expected": finite(expected, 1),
            "residual": finite(measured - expected, 1), "band": finite(Z90 * float(residual.sigma[i]), 1),
            "left_s": round(float(left_s[i] + left[i]), 0) if learning[i] else None,
            "from": f"from the loads of {live.engine.estimator.balances[i].name}",
        })  # fmt: skip
    return out


def judged_counts(live: Runtime, reported: Mapping[str, Mapping[str, int]]) -> dict[str, Any] | None:
    """Counts of what is judged of the site's GPUs (else nodes) and what is still learned, and a sentence;
    None for a site without any. `reported`: what `twin.alerts.reported_counts` gave.
    """
    site = live.engine.site
    table, words = next(((t, w) for t, w in JUDGED if site.sizes[t]), ("", ""))
    if not table:
        return None
    n, health = site.sizes[table], live.engine.health.health(table)
    unknown = int(np.count_nonzero(health.level == UNKNOWN))
    failed = int(np.count_nonzero(health.level == FAILED))
    suspected = int(np.count_nonzero(~np.isin(health.level, (HEALTHY, UNKNOWN, FAILED))))
    of_healthy = health.sure_pu[health.level == HEALTHY]
    known_pu = float(np.nanmean(of_healthy)) if np.isfinite(of_healthy).any() else None
    counts, left_s = np.zeros(3, np.int64), 0.0
    for signal, residual in _comparisons(live, table):
        masks = _learned(residual)
        counts += [int(np.count_nonzero(mask)) for mask in masks]
        if masks[1].any():
            left_s = max(left_s, float(_left_s(live, signal, residual.name)[masks[1]].max()))
    learned, learning, unlike = counts.tolist()
    cadence = reported.get(table, {}).get("learning", 0)
    out = {
        "of": n, "in_service": n - unknown - failed, "suspected": suspected, "failed": failed,
        "unknown": unknown, "known_pu": known_pu, "learned": learned, "learning": learning,
        "not_expected": unlike, "left_s": left_s if learning else None, "cadence_learning": cadence,
    }  # fmt: skip
    return {"table": table, **out, "text": _sentence(words, out)}


def _sentence(words: str, of: dict[str, Any]) -> str:
    text = f"{words}: {of['in_service']:,} in service, {of['suspected']:,} suspected"
    text += "".join(f", {of[level]:,} {level}" for level in ("failed", "unknown") if of[level])
    total = of["learned"] + of["learning"] + of["not_expected"]
    if of["known_pu"] is not None:
        text += f"; based on {100 * of['known_pu']:.0f} % of the signals that could be known"
    if not total:
        return f"{text}; no expected values yet"
    text += f"; {of['learned']:,} of {total:,} expected values learned"
    if of["learning"]:
        left = f"at least {duration(60 * math.ceil(of['left_s'] / 60))} left" if of["left_s"] else "soon done"
        text += f", {of['learning']:,} still learning ({left})"
    if of["not_expected"]:
        text += f", {of['not_expected']:,} not computed because readings are missing"
    if of["cadence_learning"]:
        text += f"; the periods at which {of['cadence_learning']:,} of them report are not learned yet"
    return text


async def calibration(request: web.Request) -> web.Response:
    """Return how many entities are learned, per kind and parameter, and the drifts, largest first."""
    known_query(request, "prefix", "offset", "limit", "parameter")
    live, names = live_of(request), listed(request, "parameter")
    for name in names:
        if name not in PARAMETER_KINDS:
            raise Refused(400, f"parameter: {clean(name, 60)} is not a parameter; expected a name such as "
                               "gpu.resistance"
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
    """Count entities by state: learned if all readings that may drift are learned, unknown without
    readings."""
    states = np.stack([one.state for one in found if one.kind.healthy])[:, inside]
    unknown = (states == NOTHING_LEARNED).all(axis=0)
    learned = ~unknown & (states != LEARNING).all(axis=0)
    n, n_learned, n_unknown = states.shape[1], int(learned.sum()), int(unknown.sum())
    return {"table": table, "of": n, "learned": n_learned, "learning": n - n_learned - n_unknown,
            "unknown": n_unknown, "drifted": int(np.logical_or.reduce(drifted).sum())}  # fmt: skip


def _parameter(one: Calibration, drifted: Bool, inside: Bool) -> dict[str, Any]:
    """Return counts of one parameter, and the range of nine of ten learned entities."""
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
    """Return the drifts beyond their band, each with its size over the band, so that parameters compare."""
    at = np.flatnonzero(drifted)
    size = np.abs(one.own_drift[at]) / one.drift_band[at]
    return [(float(s), one, i) for s, i in zip(size.tolist(), at.tolist(), strict=True)]


def shown_row(live: Runtime, one: Calibration, row: int) -> dict[str, Any]:
    """Return one parameter of one entity. `band` and `drift_band` are halves of 90 % bands."""
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
    """Return counts for Prometheus: entities by state, and drifts by parameter."""
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
