"""What a person says of a job's saves on the command line: times, shares and shapes, checked.

Times are `60`, `60s`, `10m`, `1.8h`, `2d`. Every fault is told at once. Part of the shell.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import Any, NamedTuple

from twin.app.report_text import clean
from twin.errors import ConfigError

UNIT_S = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0,
          "w": 604_800.0}  # fmt: skip
_SPAN = re.compile(r"^([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e([+-]?[0-9]{1,2}))?\s*(ms|s|sec|m|min|h|d|w|)$")
LEAST_S, MOST_S = 1e-3, 1e10  # of a time that is not zero: 300 years. source: estimate
LEAST_WEIBULL, MOST_WEIBULL = 0.2, 5.0  # beyond, no machine was seen to fail so. source: estimate
LEAD_S = 600.0  # how long before a failure it is told, unless said otherwise. source: estimate


class Asked(NamedTuple):
    """A job's terms in seconds; NaN: not given. `recall` 0: nothing is foretold; `weibull` 1: no memory."""

    mttf_s: float
    save_s: float
    restart_s: float
    flush_s: float
    recall: float
    precision: float
    lead_s: float
    weibull: float
    local_save_s: float
    local_restart_s: float
    soft_mttf_s: float
    rate_shape: float = math.inf  # of the Gamma that is believed of the rate; inf: sure

    @property
    def two_levels(self) -> bool:
        """Whether there is a tier in memory."""
        return not math.isnan(self.local_save_s)


def time_s(text: str) -> float:
    """Seconds of `60`, `60s`, `10m`, `1.8h` or `2d`; NaN for what is no time."""
    found = _SPAN.match(text.strip().lower())
    if found is None:
        return math.nan
    return float(found[1]) * 10.0 ** int(found[2] or 0) * UNIT_S.get(found[3], 1.0)


def add_terms(parser: argparse.ArgumentParser) -> None:
    """The options of `Asked`, but for the rate."""
    parser.add_argument("--save", metavar="T", help="training stands still so long for a save, such as 60s")
    parser.add_argument("--restart", metavar="T", help="from a failure until training goes on, such as 10m")
    parser.add_argument(
        "--flush", metavar="T", default="0", help="from when training goes on until a save is durable"
    )
    parser.add_argument("--recall", metavar="R", help="share of failures that are foretold, 0 to 1")
    parser.add_argument("--precision", metavar="P", help="share of alarms that a failure follows, 0 to 1")
    parser.add_argument("--lead", metavar="T", help="a failure is foretold so long before (default: 10m)")
    parser.add_argument("--weibull", metavar="K", help="shape of the times between failures (default: 1)")
    parser.add_argument("--local-save", metavar="T", help="a save in memory or on local disks takes so long")
    parser.add_argument("--local-restart", metavar="T", help="a restart from there takes so long")
    parser.add_argument("--soft-mttf", metavar="T", help="mean time between failures that leave it intact")


class Check:
    """Options to numbers; keeps what is wrong, to tell it at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def time(self, option: str, text: str | None, zero: bool = False) -> float:
        """Seconds; NaN if the option is not given or no time."""
        if text is None:
            return math.nan
        value = time_s(text)
        if (zero and value == 0.0) or LEAST_S <= value <= MOST_S:
            return value
        least = "0 s" if zero else "1 ms"
        self.problems.append(
            f"{option} {clean(text, 40) or '(nothing)'}: expected a time such as 60, 60s, 10m, 1.8h or 2d, "
            f"from {least} to 300 years"
        )
        return math.nan

    def between(self, option: str, text: str | None, low: float, high: float, default: float) -> float:
        """A number within bounds; `default` if the option is not given."""
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            self.problems.append(f"{option} {clean(text, 40)}: expected a number from {low:g} to {high:g}")
            return default
        return value

    def needed(self, option: str, text: str | None, example: str) -> str | None:
        """The text; one problem more if there is none."""
        if text is None:
            self.problems.append(f"{option} is missing: expected such as {option} {example}")
        return text

    def end(self) -> None:
        """Raise ConfigError if anything was wrong."""
        if self.problems:
            raise ConfigError(self.problems)


def asked_of(args: argparse.Namespace, check: Check, mttf_s: float) -> Asked:
    """The job's terms; problems go to `check`, which the caller ends."""
    save_s = check.time("--save", check.needed("--save", args.save, "60s"))
    restart_s = check.time("--restart", check.needed("--restart", args.restart, "600s"), zero=True)
    local = (args.local_save, args.local_restart, args.soft_mttf)
    if any(x is not None for x in local) and None in local:
        check.problems.append(
            "a local tier needs all of --local-save, --local-restart and --soft-mttf: expected the other "
            "options too"
        )
    if (args.recall is None) != (args.precision is None):
        check.problems.append("--recall and --precision belong together: expected both, or neither")
    if args.lead is not None and args.recall is None:
        check.problems.append("--lead belongs to a prediction: expected --recall and --precision too")
    found = Asked(
        mttf_s, save_s, restart_s, check.time("--flush", args.flush, zero=True),
        check.between("--recall", args.recall, 0.0, 0.999, 0.0),
        check.between("--precision", args.precision, 0.01, 1.0, 1.0),
        LEAD_S if args.lead is None else check.time("--lead", args.lead),
        check.between("--weibull", args.weibull, LEAST_WEIBULL, MOST_WEIBULL, 1.0),
        check.time("--local-save", args.local_save), check.time("--local-restart", args.local_restart, True),
        check.time("--soft-mttf", args.soft_mttf),
    )  # fmt: skip
    if found.recall > 0.0 and found.flush_s > 0.0:
        check.problems.append("--recall is for saves that are durable at once: expected no --flush with it")
    if [found.weibull != 1.0, found.recall > 0.0, found.two_levels].count(True) > 1:
        check.problems.append(
            "--weibull, --recall and --local-save are three different sums: expected one of them at a time"
        )
    return found


def plain(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
