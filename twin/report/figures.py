"""Key figures of a run for the page and the terminal, each with its meaning.

Figures that cannot be known are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from twin.catalogue import F64, duration, number, percent, quantity
from twin.report.collector import Collector

Summary = Mapping[str, Any]
POWER_SOURCES = (("rack.power_w", "racks"), ("node.power_w", "nodes"), ("gpu.power_w", "GPUs"))


class ReportFigure(NamedTuple):
    """A number, its name, and one sentence for a new reader."""

    label: str
    value: str
    meaning: str


def site_power(collector: Collector) -> tuple[str, str] | None:
    """Return (track, table of its sum): racks if they report, otherwise nodes, otherwise GPUs."""
    for key, whose in POWER_SOURCES:
        if f"sum {key}" in collector.time.tracks:
            return key, whose
    return None


class SitePower(NamedTuple):
    """The site's power in W, per point; NaN until all entities that ever report have reported."""

    key: str
    whose: str
    low: F64
    mean: F64
    high: F64
    n_reporting: int


def power_series(collector: Collector) -> SitePower | None:
    """Return the sum that `site_power` names, from its first complete point."""
    source = site_power(collector)
    if source is None:
        return None
    track, cut = collector.time.tracks[f"sum {source[0]}"], slice(0, collector.time.points)
    n_reporting = np.nan_to_num(track.low[1, cut])
    begun = np.arange(len(n_reporting)) >= int(np.argmax(n_reporting >= 0.98 * n_reporting.max()))
    low, mean, high = (
        np.where(begun, a[0, cut], np.nan).astype(np.float64) for a in (track.low, track.mean(), track.high)
    )
    return SitePower(*source, low, mean, high, int(n_reporting.max()))


def whole(value: object) -> int:
    """Return an integer of a summary, 0 for anything else."""
    return int(value) if isinstance(value, int | float) and value == value and abs(value) < 1e18 else 0


def mapping(value: object) -> dict[str, Any]:
    """Return a mapping of a summary, empty for anything else."""
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def was_simulated(summary: Summary) -> bool:
    """Return True if this run simulated a plant; a replay of such a run did not."""
    return "simulated_s" in summary


def key_figures(collector: Collector, summary: Summary) -> list[ReportFigure]:
    """Return the figures that a reader needs first, without figures that have no number."""
    out = [*_power(collector), *_cooling(collector), *_tree(collector, summary), *_deeds(collector, summary)]
    return out + _run(collector, summary)


def _power(collector: Collector) -> list[ReportFigure]:
    power = power_series(collector)
    if power is None or not np.isfinite(power.mean).any():
        return []
    greatest, mean = float(np.nanmax(power.high)), float(np.nanmean(power.mean))
    size = collector.sizes().get(power.key.partition(".")[0], power.n_reporting)
    whose = power.whose if size != 1 else power.whose.removesuffix("s")
    every = f"the {power.n_reporting:,} (of {size:,}) reporting"
    if power.n_reporting >= size:
        every = f"all {size:,}" if size != 1 else "the one"
    together = " together" if size != 1 else ""
    out = [
        ReportFigure(
            "Peak IT power",
            quantity(greatest, "W"),
            f"The highest draw of {every} {whose}{together}; on average {quantity(mean, 'W')}.",
        )
    ]
    if collector.span_s > 0:
        energy_wh = mean * collector.span_s / 3600
        shown = f"{number(energy_wh / 1e6)} MWh" if energy_wh >= 1e6 else f"{number(energy_wh / 1e3)} kWh"
        out.append(ReportFigure("Energy used", shown, f"That average over {duration(collector.span_s)}."))
    return out


def doubt(greatest: float) -> str:
    """Return a note on learned shares of heat above 100 %."""
    if greatest <= 1.0:
        return ""
    return (
        " More than 100 % is impossible: load or flow changed during learning, or a meter is wrong; do not "
        "rely on it."
    )


def _cooling(collector: Collector) -> list[ReportFigure]:
    out = []
    rows = collector.heat_rows(1_000_000)
    if rows:
        shares = np.array([r.capture_pu for r in rows])
        lowest, highest = percent(float(shares.min())), percent(float(shares.max()))
        among = f" (middle of {len(rows)} racks, {lowest} to {highest})" if len(rows) > 1 else ""
        out.append(
            ReportFigure(
                "Heat taken by liquid",
                percent(float(np.median(shares))),
                f"Share of a rack's power that its coolant carries away{among}; air takes the rest."
                + doubt(float(shares.max())),
            )
        )
    margin = collector.time.tracks.get("margin")
    if margin is not None and np.isfinite(least := float(margin.overall()[0][0])):
        out.append(
            ReportFigure(
                "Thermal margin",
                f"{number(least)} K",
                "The smallest margin of any GPU to its temperature limit, if silent sensors were heating up.",
            )
        )
    return out


def _tree(collector: Collector, summary: Summary) -> list[ReportFigure]:
    tree = collector.time.tracks.get("tree")
    mean = float(tree.overall()[1][0]) if tree is not None else float("nan")
    if not np.isfinite(mean):
        return []
    power_tree = mapping(summary.get("power_tree"))
    guessed = (
        " Part of the wiring was guessed from the data."
        if power_tree.get("inferred", power_tree.get("inferred_edges"))
        else ""
    )
    return [
        ReportFigure(
            "Power unaccounted for",
            percent(mean),
            "Mean difference between the feeding meters and the sum of the racks behind them; "
            "near zero is good." + guessed,
        )
    ]


def _deeds(collector: Collector, summary: Summary) -> list[ReportFigure]:
    commands = whole(summary.get("commands", collector.episodes.batches["command"]))
    advice = whole(summary.get("advice", collector.episodes.batches["advice"]))
    found = collector.episodes.conditions.values()
    lasting = sum(c.cleared_ns is None for c in found)
    raised = len(found) + collector.episodes.dropped["finding"]
    sent = "The simulated plant obeyed." if was_simulated(summary) else "A replay sends nothing."
    return [
        ReportFigure(
            "Commands · advice",
            f"{number(commands, 9)} · {number(advice, 9)}",
            "New values for single devices, and suggestions that were only recorded. " + sent,
        ),
        ReportFigure(
            "Findings",
            number(raised, 9),
            "Conditions for people to know; "
            f"{lasting if lasting else 'none'} of them still lasted at the end."
            if raised
            else "No condition was found.",
        ),
    ]


def _run(collector: Collector, summary: Summary) -> list[ReportFigure]:
    out = []
    messages = mapping(summary.get("messages"))
    total, bad = whole(messages.get("total")), whole(messages.get("bad"))
    if total:
        decoded = whole(messages.get("decoded"))
        others = "" if decoded >= total else "; the others are for entities that the twin does not use"
        broken = number(bad, 9) if bad else "none"
        text = f"{number(decoded, 9)} of {number(total, 9)}; {broken} malformed{others}."
        out.append(ReportFigure("Messages understood", percent(decoded / total), text))
    good, n_reporting = good_share(collector)
    if n_reporting:
        out.append(
            ReportFigure(
                "Readings good",
                percent(good),
                f"Share of the {number(n_reporting, 9)} values ever reported that were fresh and plausible, "
                "over the run.",
            )
        )
    simulated, wall_s = was_simulated(summary), summary.get("wall_s")
    if isinstance(wall_s, int | float) and wall_s > 0 and collector.span_s > 0:
        out.append(
            ReportFigure(
                "Simulated in" if simulated else "Replayed in",
                duration(float(wall_s)),
                f"{duration(collector.span_s)} of the site's time, {number(collector.span_s / wall_s, 2)} "
                f"times {'real time' if simulated else 'as fast as it happened'}.",
            )
        )
    return out


def good_share(collector: Collector) -> tuple[float, int]:
    """Return (share of good readings over the run, number of cells that ever reported)."""
    total = np.zeros(5)
    for cells in collector.quality.values():
        total += cells.total / max(1, int(cells.total.sum())) * int(cells.latest.sum())
    n_reporting = sum(int(c.latest.sum()) for c in collector.quality.values())
    return (float(total[0] / total.sum()) if total.sum() else float("nan")), n_reporting
