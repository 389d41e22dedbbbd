"""A rival beside our own blend: another forecaster on the same origins, judged at the same targets.

The rival has our bands, rounding and calibration around it, so that only its forecasts differ. Says what both
cost in processor time. Part of the shell.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import Any

from models.backtest import REFITS, Result, Terms
from models.comparison import beside, overall, to_rival, winner
from models.forecasters import FORECASTERS
from models.scores import Cells
from twin.app.backtest_goals import amount, ratio_words
from twin.app.report_text import clean, duration, number
from twin.errors import ConfigError

# Forecasters whose fits take long: fitted at fewer cuts, once for all horizons.
SLOW_REFITS = {"lstm": 4}
NEEDS = {"lstm": ("torch", "PyTorch", "racktwin[torch]")}


def check_installed(names: Sequence[str], option: str) -> None:
    """ConfigError if a forecaster needs a library that is not here, before anything is read or fitted."""
    for name in names:
        if name in NEEDS and importlib.util.find_spec(NEEDS[name][0]) is None:
            _, called, extra = NEEDS[name]
            raise ConfigError(
                f"{option} {name}: needs {called}, which is not installed: pip install '{extra}', "
                "or choose another forecaster"
            )


def rival_of(name: str | None) -> str | None:
    """The name, if it is known and can run. ConfigError if not."""
    if name is None:
        return None
    if name not in FORECASTERS:
        raise ConfigError(f"--rival {name}: expected one of {', '.join(FORECASTERS)}")
    check_installed([name], "--rival")
    return name


def terms_of(start: float, rival: str | None = None, checks_fits: bool = True) -> Terms:
    """How a backtest is run; `rival`: of this one instead of our blend."""
    slow = rival in SLOW_REFITS
    return Terms(
        start,
        SLOW_REFITS[rival] if rival is not None and slow else REFITS,
        checks_fits=checks_fits,
        as_one=slow,
        clock=time.perf_counter,
        cpu=time.process_time,
    )


def beside_rival(
    name: str,
    ours: tuple[Result, Sequence[Cells]],
    rival: tuple[Result, Sequence[Cells]],
    pooled: Sequence[int],
) -> dict[str, Any]:
    """What the two did, as plain data: per horizon, over all of them, and what it cost."""
    panel = ours[0].panel
    alone = [j for j in range(panel.n) if j not in pooled]
    horizons = []
    for held, other in zip(ours[1], rival[1], strict=True):
        told = {"horizon_steps": held.horizon, "horizon_s": held.horizon * panel.step_s}
        more = {panel.names[j]: beside(held, other, [j]) for j in alone}
        horizons.append(told | beside(held, other, pooled) | {"series": more})

    def whole(columns: Sequence[int]) -> dict[str, Any]:
        told = overall([to_rival(a, b, columns) for a, b in zip(ours[1], rival[1], strict=True)])
        found: dict[str, Any] = dict(told)
        return found | winner(found["ratio"], 1.0, found["low"], found["high"])

    return {
        "name": name,
        "horizons": horizons,
        "overall": whole(pooled),
        "overall_of": {panel.names[j]: whole([j]) for j in alone},
        "budget": {
            "ours_fits": len(ours[0].cuts), "ours_fits_cpu_s": round(ours[0].fits_cpu_s, 3),
            "rival_fits": len(rival[0].cuts), "rival_fits_cpu_s": round(rival[0].fits_cpu_s, 3),
        },
        "budget_words": budget_words(name, ours[0], rival[0]),
    }  # fmt: skip


def budget_words(name: str, ours: Result, rival: Result) -> str:
    """A sentence on what both cost."""
    said = (
        f"processor time of all fits: our blend {number(ours.fits_cpu_s)} s ({len(ours.cuts)} fits), "
        f"{name} {number(rival.fits_cpu_s)} s ({len(rival.cuts)} fits"
    )
    if name in SLOW_REFITS:
        from models.forecaster import Grid
        from models.lstm import Lstm

        tries = Lstm(Grid(1.0, (1,))).budget_fits
        said += f"; the first, and each one on twice its rows, tries {tries} settings; one network serves all"
        said += " horizons"
    few = f"; {name} found too few rows to learn from, and says the last value"
    return said + ")" + (few if name in rival.silent else "")


def who(told: Mapping[str, Any], name: str) -> str:
    """Who errs less, in words."""
    if told["better"] == "none":
        return "even"
    return ("ours" if told["better"] == "ours" else clean(name)) + ("" if told["sure"] else ", not sure")


def rival_lines(told: Mapping[str, Any]) -> list[str]:
    """One data set's comparison, in lines for the terminal."""
    name = clean(told["name"])

    def line(ahead: str, part: Mapping[str, Any]) -> str:
        return f"beside {name}, {ahead}: error {ratio_span(part)} of its error; better: {who(part, name)}"

    lines = [line(f"{duration(h['horizon_s'])} ahead", h) for h in told["horizons"]]
    return [*lines, line("all horizons", told["overall"]), told["budget_words"]]


def ratio_span(part: Mapping[str, Any]) -> str:
    """A ratio with its interval."""
    return f"{ratio_words(part['ratio'])} ({ratio_words(part['low'])} to {ratio_words(part['high'])})"


def rival_markdown(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of our blend beside the rival, for all data sets that have one."""
    name = clean(told[0]["rival"]["name"])
    lines = [
        f"| Data set | Ahead | MAE | MAE of {name} | Ratio (90 % interval) | Better |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]

    def line(title: str, ahead: str, part: Mapping[str, Any]) -> str:
        maes = [amount(part[k]) if k in part else "" for k in ("mae", "mae_rival")]
        return "| " + " | ".join((clean(title), ahead, *maes, ratio_span(part), who(part, name))) + " |"

    for data in told:
        rival, called = data["rival"], data["name"]
        for h in rival["horizons"]:
            ahead = duration(h["horizon_s"])
            lines.append(line(called, ahead, h))
            lines += [line(f"{called}: {n}", ahead, part) for n, part in h["series"].items()]
        lines.append(line(called, "all", rival["overall"]))
        lines += [line(f"{called}: {n}", "all", part) for n, part in rival["overall_of"].items()]
    lines += [""] + [f"- {clean(data['name'])}: {data['rival']['budget_words']}" for data in told]
    return lines
