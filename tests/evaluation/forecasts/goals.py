"""Goals of the forecasts: each is met or missed, at which series, and by how much.

Judges scores as plain data and prints them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twin.backtest import ratio_words
from twin.catalogue import clean, duration, number

HALF = 0.5  # of the one-step changes are zero: from there on the last value is nearly the best
OVERALL, EACH = (0.88, 0.92), (0.80, 0.97)  # of the 90 % band, over all and in each series
ENOUGH_TARGETS = 500  # that do not overlap: fewer only tell an interval
MOST_NAMED = 12
Told = Mapping[str, Any]


def mase_met(mase: float, unchanged_share: float) -> bool:
    """Below 1; where more than half of the one-step changes are zero, up to 1."""
    return mase <= 1.0 if unchanged_share > HALF else mase < 1.0


def goals(told: Sequence[Told]) -> list[dict[str, Any]]:
    """Each goal with its cases: {goal, met (None: nothing to judge), cases, of_cases, missed, value}.

    `told`: scores of data sets, each with `name`, `horizons` and `overall`.
    """
    out = [_mase(told), _mase_horizons(told), _pinball(told), _coverage(told), _coverage_each(told)]
    if any("rival" in data for data in told):
        out.append(_rival([data for data in told if "rival" in data]))
    return out


def _judged(goal: str, cases: Sequence[Told], value: str = "") -> dict[str, Any]:
    missed = [case for case in cases if not case["met"]]
    return {"goal": goal, "met": None if not cases else not missed, "of_cases": len(cases),
            "missed": missed, "cases": list(cases), "value": value}  # fmt: skip


def wholes(data: Told) -> Iterator[tuple[str, Told, float]]:
    """(name, scores over all horizons, share of one-step changes that are zero) of a data set."""
    first = data["horizons"][0]
    yield data["name"], data["overall"], first["unchanged_share"]
    for name, whole in data.get("overall_of", {}).items():
        yield f"{data['name']}: {name}", whole, first["series"][name]["unchanged_share"]


def _mase(told: Sequence[Told]) -> dict[str, Any]:
    cases = [
        {"where": name, "value": whole["mase"], "low": whole["mase_low"], "high": whole["mase_high"],
         "bound": "<= 1.00" if still > HALF else "< 1", "met": mase_met(whole["mase"], still),
         "sure": bool(whole["mase_high"] < 1.0)}
        for data in told for name, whole, still in wholes(data) if math.isfinite(whole["mase"])
    ]  # fmt: skip
    return _judged(
        "MASE < 1 on each data set, all horizons alike (<= 1.00 where most changes are zero)", cases
    )


def _units(data: Told) -> Iterator[tuple[str, Told]]:
    """(where, scores) of each horizon: of what is taken together, and of each series."""
    for h in data["horizons"]:
        at = f"{data['name']}, {duration(h['horizon_s'])}"
        if len(h["series"]) > 1:
            yield at, h
        for name, unit in h["series"].items():
            yield (at if len(h["series"]) == 1 else f"{at}, {clean(name)}"), unit


def _mase_horizons(told: Sequence[Told]) -> dict[str, Any]:
    cases = []
    for data in told:
        for h in data["horizons"]:
            at = f"{data['name']}, {duration(h['horizon_s'])}"
            apart = [(f"{at}, {clean(n)}", h["series"][n]) for n in data.get("overall_of", {})]
            cases += [
                {"where": where, "value": unit["mase"], "low": unit["mase_low"], "high": unit["mase_high"],
                 "met": mase_met(unit["mase"], unit["unchanged_share"]),
                 "sure": bool(unit["mase_high"] < 1.0)}
                for where, unit in [(at, h), *apart] if math.isfinite(unit["mase"])
            ]  # fmt: skip
    return _judged("the same at each horizon", cases)


def _pinball(told: Sequence[Told]) -> dict[str, Any]:
    cases = []
    for data in told:
        for where, unit in _units(data):
            rival = unit["pinball_persistence"]
            if math.isfinite(unit["pinball"]) and (rival > 0 or unit["pinball"] > 0):
                value = unit["pinball"] / rival if rival > 0 else math.inf
                cases.append({"where": where, "value": value, "met": value < 1.0})
    return _judged("pinball loss below the last value with its past errors, everywhere", cases)


def coverage_by_targets(told: Sequence[Told]) -> tuple[float, int]:
    """(share inside the 90 % band, targets that do not overlap) over all series and horizons."""
    units = [
        (unit["independent_targets"], unit["coverage90"])
        for data in told for h in data["horizons"] for unit in h["series"].values()
        if math.isfinite(unit["coverage90"])
    ]  # fmt: skip
    count = sum(n for n, _ in units)
    return (sum(n * share for n, share in units) / count if count else math.nan), count


def _coverage(told: Sequence[Told]) -> dict[str, Any]:
    value, count = coverage_by_targets(told)
    low, high = OVERALL
    cases = [{"where": "all", "value": value, "met": low <= value <= high}] if count else []
    goal = f"90 % band holds {100 * low:.0f} to {100 * high:.0f} % over all targets that do not overlap"
    return _judged(goal, cases, f"{100 * value:.2f} % of {count:,}" if count else "")


def _coverage_each(told: Sequence[Told]) -> dict[str, Any]:
    low, high = EACH
    cases = []
    for data in told:
        for h in data["horizons"]:
            for name, unit in h["series"].items():
                if unit["independent_targets"] >= ENOUGH_TARGETS and math.isfinite(unit["coverage90"]):
                    where = f"{data['name']}, {duration(h['horizon_s'])}, {clean(name)}"
                    cases.append({"where": where, "value": unit["coverage90"],
                                  "met": low <= unit["coverage90"] <= high})  # fmt: skip
    goal = f"and {100 * low:.0f} to {100 * high:.0f} % in each series with at least {ENOUGH_TARGETS} of them"
    return _judged(goal, cases)


def _rival(told: Sequence[Told]) -> dict[str, Any]:
    cases = []
    for data in told:
        rival = data["rival"]
        named = [(data["name"], rival["overall"])]
        named += [(f"{data['name']}: {name}", whole) for name, whole in rival["overall_of"].items()]
        cases += [
            {"where": where, "value": whole["ratio"], "low": whole["low"], "high": whole["high"],
             "met": whole["ratio"] < 1.0, "sure": bool(whole["high"] < 1.0)}
            for where, whole in named if math.isfinite(whole["ratio"])
        ]  # fmt: skip
    name = clean(told[0]["rival"]["name"])
    return _judged(f"error below that of {name} on each data set, all horizons alike", cases)


def summary(judged: Sequence[Told]) -> list[str]:
    """A line per goal, and what missed it."""
    lines = []
    for one in judged:
        met = one["of_cases"] - len(one["missed"])
        how = "nothing to judge" if one["met"] is None else "met" if one["met"] else "MISSED"
        count = f" (met in {met} of {one['of_cases']})" if one["of_cases"] > 1 else ""
        value = f": {one['value']}" if one["value"] else ""
        lines.append(f"- {how}{count}: {one['goal']}{value}")
        unsure = [case for case in one["cases"] if case["met"] and case.get("sure") is False]
        if unsure and one["of_cases"] > 1:
            lines.append(f"  - of those met, {len(unsure)} with an interval that reaches 1")
        worst = sorted(one["missed"], key=lambda case: -_apart(case["value"]))
        lines += [f"  - missed: {clean(case['where'], 120)}: {_value(case)}" for case in worst[:MOST_NAMED]]
        if len(worst) > MOST_NAMED:
            lines.append(f"  - and {len(worst) - MOST_NAMED} more")
    return lines


def _apart(value: float) -> float:
    return math.inf if not math.isfinite(value) else abs(value - 1.0)


def _value(case: Told) -> str:
    if "low" not in case or not math.isfinite(case["low"]):
        return ratio_words(case["value"]) if math.isfinite(case["value"]) else number(case["value"])
    return f"{ratio_words(case['value'])} ({ratio_words(case['low'])} to {ratio_words(case['high'])})"
