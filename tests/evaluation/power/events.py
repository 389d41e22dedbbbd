"""Grid events: a demand response, and a week of prices and carbon, as figures and as tables.

The runs themselves are in `power_response` and `power_carbon`.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tests.evaluation.power.carbon import TITLES, carbon
from tests.evaluation.power.response import response
from twin.backtest import print_table
from twin.catalogue import clean

__all__ = ["carbon", "response", "say_carbon", "say_response"]


def say_response(told: dict[str, Any], out: Console) -> None:
    """Arms side by side, then the goals."""
    head = (
        f"simulated: site {told['site']}, {len(told['seeds'])} seeds; {100 * told['less_pu']:.0f} % less "
        f"than in the minute before, at once, for {told['hold_h']:g} h; back at {told['ramp_w_per_s']:g} W/s"
    )
    _line(head, out, style="bold")
    rows: list[tuple[str, str, Any]] = [
        ("seconds until it is below for good, worst", "below_s_worst", _number),
        ("seeds on which it was not within two minutes", "missed", _number),
        ("seconds above later on, worst", "late_s_worst", _number),
        ("  by how much, worst", "worst_over_pu_worst", _share),
        ("of what was allowed it drew", "used_pu", _share),
        ("work lost meanwhile, high priority", "lost_high_pu", _share),
        ("  on the worst seed", "lost_high_pu_worst", _share),
        ("work lost meanwhile, the others", "lost_low_pu", _share),
        ("ahead of the ramp on the way back, worst", "ahead_of_ramp_pu_worst", _share),
        ("steepest minute on the way back, W/s, worst", "steepest_w_per_s_worst", _number),
        ("seconds until all is back", "back_s", _number),
        ("breakers that opened", "trips", _number),
    ]
    _table(["", *(arm["arm"] for arm in told["arms"])], rows, told["arms"], out)
    for goal in told["goals"]:
        met = "met" if goal["met"] else "MISSED"
        _line(f"{met}: {goal['goal']}: {goal['value']:,.4g}, goal {goal['bound']}", out)


def say_carbon(told: dict[str, Any], out: Console) -> None:
    """Each zone: arms side by side, savings counted from budgets alone."""
    for part in told["zones"]:
        head = (
            f"simulated: site {told['site']} on the grid of {part['zone']}, {len(told['seeds'])} runs of "
            f"{told['hours']} h; usual work gives up {100 * told['shave_pu']:.0f} % of its range while it is "
            f"as dear or as dirty as in {100 * told['above_pu']:.0f} % of the hours of the month before"
        )
        _line(head, out, style="bold")
        rows: list[tuple[str, str, Any]] = [
            ("energy, MWh", "energy_mwh", _number),
            ("tonnes of CO2", "tonnes", _number),
            ("USD", "usd", _number),
            ("saved: MWh", "mwh_saved", _figure),
            ("saved: tonnes", "tonnes_saved", _figure),
            ("saved: USD", "usd_saved", _figure),
            ("work delayed, GPU-h", "delayed_gpu_h", _number),
            ("  of what is of high priority", "delayed_high_pu", _share),
            ("  of the others", "delayed_low_pu", _share),
            ("left once that is made up for: MWh", "net_mwh_saved", _figure),
            ("left once that is made up for: tonnes", "net_tonnes_saved", _figure),
            ("left once that is made up for: USD", "net_usd_saved", _figure),
            ("weeks in which tonnes are left", "weeks_that_save_tonnes", _number),
            ("weeks in which USD are left", "weeks_that_save_usd", _number),
        ]
        _table(["", *(TITLES[arm["arm"]] for arm in part["arms"])], rows, part["arms"], out)
    _line("Savings and delays are counted from budgets alone, in the same week.", out)


def _table(heads: list[str], rows: list[tuple[str, str, Any]], arms: list[Any], out: Console) -> None:
    print_table(out, heads, [[title, *(_or_none(say, arm[key]) for arm in arms)] for title, key, say in rows])


def _line(text: str, out: Console, style: str | None = None) -> None:
    out.print(clean(text, 400), style=style, markup=False, soft_wrap=True, highlight=False)


def _or_none(say: Any, value: float | None) -> str:
    return "never" if value is None else str(say(value))


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _figure(value: float) -> str:
    return f"{value:,.2f}"


def _share(value: float) -> str:
    return f"{100 * value:.2f} %"
