"""Sections of a report on the site: power, cooling, demand and balances.

Each is empty where the site reported nothing of the kind.
"""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from twin.catalogue import TABLES, Unit, clean, number, percent, quantity, short, unit_for
from twin.report.collector import Collector
from twin.report.figures import doubt, power_series
from twin.report.page import figure, heading, joined, marked, pair, paragraph, section, table
from twin.report.plots import Gallery
from twin.report.svg import Line, PlotLayout, plot, whiskers


def power(collector: Collector, gallery: Gallery) -> Markup:
    """Electric power of the site, in all and part by part."""
    series = power_series(collector)
    lead = Markup("")
    if series is not None and np.isfinite(series.mean).any():
        peak = float(np.nanmax(series.high))
        unit = unit_for("W", peak)
        line = Line("", series.mean * unit.factor, 1, series.low * unit.factor, series.high * unit.factor)
        budget = collector.budget_w()
        known = budget[np.isfinite(budget)]
        near = 0 < len(known) <= 2 and float(known.min()) < 1.5 * peak
        levels = [(float(known.min()) * unit.factor, "budget of one feed")] if near else []
        sentence = f"Sum over {series.n_reporting:,} {series.whose}. A shade is the range between points."
        layout = PlotLayout(height=270, levels=levels)
        lead = gallery.lead("IT power of the site", sentence, [line], unit.name, layout)
    tables = [
        gallery.entities([("rack.power_w", "")], "Power per rack", "What each rack draws."),
        gallery.entities([("feeder.power_w", "")], "Feeding meters", "What UPSs, busways and taps measure."),
    ]
    small = [
        gallery.entities(
            [("node.power_w", "")],
            "Power per node",
            "What each server draws.",
            detail=_few(collector, "node"),
        ),
        gallery.entities(
            [("gpu.power_w", "")], "Power per GPU", "What each GPU draws.", detail=_few(collector, "gpu")
        ),
        gallery.entities(
            [("gpu.util_pu", "")],
            "GPU utilisation",
            "Share of time in which a GPU was busy.",
            detail=_few(collector, "gpu"),
        ),
    ]
    return section(
        "power",
        "Power",
        "Electric power at the racks and at the meters that feed them.",
        lead,
        *_flow_together([*tables, *small]),
    )


def _few(collector: Collector, kind: str) -> bool:
    return collector.sizes().get(kind, 0) <= 24


def _flow_together(parts: list[Markup]) -> list[Markup]:
    """Single figures in pairs, full-width ones as they are, in order."""
    out: list[Markup] = []
    waiting: list[Markup] = []
    for part in parts:
        if part.startswith("<figure>"):
            waiting.append(part)
        elif part.startswith('<div class="two">') and part.endswith("</figure></div>") and "many" not in part:
            waiting.append(Markup(part.removeprefix('<div class="two">').removesuffix("</div>")))
        elif part:
            out += [pair(waiting), part]
            waiting = []
    return [p for p in [*out, pair(waiting)] if p]


# Signals (with their distinguishing labels), title, sentence; single nodes and GPUs are drawn if few.
COOLING: tuple[tuple[tuple[tuple[str, str], ...], str, str], ...] = (
    ((("gpu.temp_c", ""),), "GPU temperature", "Hotter than the limit means that the chip slows down."),
    ((("gpu.hbm_temp_c", ""),), "GPU memory temperature", "The memory stacks beside the chip."),
    ((("gpu.thermal_margin_k", ""),), "Margin reported by the GPUs", "Kelvins to the slowdown."),
    ((("rack.supply_temp_c", "supply"), ("rack.return_temp_c", "return")), "Coolant of the racks",
     "Coolant goes in cold (supply) and comes back warm (return)."),
    ((("rack.flow_lpm", ""),), "Coolant flow per rack", "Less flow at the same power: a hotter return."),
    ((("cdu.supply_temp_c", "supply"), ("cdu.return_temp_c", "return")), "Cooling units",
     "The units that pass the racks' heat on to the building's water."),
    ((("cdu.flow_lpm", ""),), "Flow of the cooling units", "Coolant that each unit pumps."),
    ((("loop.supply_temp_c", "supply"), ("loop.return_temp_c", "return")), "Facility water",
     "The building's loop."),
    ((("hall.cold_aisle_temp_c", "cold aisle"), ("hall.hot_aisle_temp_c", "hot aisle")), "Air of the halls",
     "Air enters the racks from the cold aisle and leaves into the hot one."),
    ((("rack.inlet_temp_c", ""),), "Air at the rack inlets", "What the fans take in."),
    ((("node.inlet_temp_c", ""),), "Air at the server inlets", "What the fans take in."),
    ((("node.outlet_temp_c", ""),), "Air at the server outlets", "What the fans blow out."),
    ((("node.water_inlet_temp_c", ""),), "Water at the server inlets", "Coolant as it arrives."),
    ((("node.cpu_temp_c", ""),), "CPU temperature", "The hottest of each server."),
)  # fmt: skip


def cooling(collector: Collector, gallery: Gallery) -> Markup:
    """Temperatures and flows, from the chips to the halls."""
    parts = [
        gallery.overlay(
            "Thermal margin of the hottest GPU",
            "Kelvins left to the limit, supposing that a GPU which fell silent heats up as fast as it can. "
            "Below zero means that the twin cannot rule out a GPU over its limit.",
            [("margin", 0, "")],
            "K",
        )
    ]
    for keys, title, sentence in COOLING:
        kind = keys[0][0].partition(".")[0]
        detail = kind not in ("node", "gpu") or _few(collector, kind)
        parts.append(gallery.entities(keys, title, sentence, detail=detail))
    return section(
        "cooling",
        "Cooling",
        "Nearly all electric power becomes heat, and coolant and air must carry it away at the same rate.",
        *_flow_together(parts),
    )


def demand(gallery: Gallery) -> Markup:
    """Site-wide gauges: load, prices, weather."""
    names = {
        "gpu_running_count": ("GPUs running jobs", ""),
        "gpu_pending_count": ("GPUs asked for by waiting jobs", ""),
        "gpu_idle_count": ("Idle GPUs", ""),
        "job_running_count": ("Running jobs", ""),
        "job_pending_count": ("Waiting jobs", ""),
        "requests_per_s": ("Requests", "Inference requests per second."),
        "outdoor_temp_c": ("Outdoor temperature", ""),
        "outdoor_wet_bulb_c": ("Outdoor wet-bulb temperature", "What evaporation can cool to."),
        "grid_price_usd_per_kwh": ("Price of electricity", ""),
        "grid_carbon_g_per_kwh": ("Carbon intensity of the grid", "CO₂ per unit of electricity."),
    }
    figures: list[Markup] = []
    for signal in TABLES["site"].gauges:
        title, sentence = names.get(signal.name, (signal.name, ""))
        figures.append(gallery.overlay(title, sentence, [(signal.key, 0, "")], signal.unit))
    return section(
        "demand",
        "Demand and surroundings",
        "What the site was asked to do, and under which conditions.",
        pair(figures),
    )


def balances(collector: Collector, gallery: Gallery) -> Markup:
    """Expected beside measured: the power tree and the heat of the racks."""
    intro = Markup(
        "<b>Measured</b> is what a sensor says. <b>Expected</b> is what the twin works out for "
        "the same quantity from "
        "other sensors and from physics: the return temperature of a rack from its power, flow "
        "and supply; a meter from "
        "what it feeds. The twin learns how noisy their difference (the residual) normally is; "
        "one that leaves this "
        "noise and stays out means a faulty sensor, a wrong connection or a real fault."
    )
    return section(
        "balances",
        "Balances and residuals",
        intro,
        pair([_example(gallery), _capture(collector)]),
        _heat(collector, gallery),
        _tree(collector, gallery),
    )


def _example(gallery: Gallery) -> Markup:
    """The rack that strayed the most."""
    difference, measured = gallery.tracks.get("heat.difference"), gallery.tracks.get("heat.measured")
    expected = gallery.tracks.get("heat.expected")
    if difference is None or measured is None or expected is None or not difference.count.any():
        return Markup("")
    # Its greatest mean over a point, after the first tenth in which the twin still learns.
    late = np.abs(difference.mean()[:, gallery.points // 10 : gallery.points])
    row = int(np.argmax(np.nan_to_num(late, nan=-1.0).max(axis=1, initial=-1.0)))
    cut, name = slice(0, gallery.points), short(difference.labels[row], 30)
    lines = [
        Line("measured", measured.mean()[row, cut], 1),
        Line("expected", expected.mean()[row, cut], 2, dashed=True),
    ]
    return figure(
        f"Return temperature of {name}, measured and expected",
        "The rack whose two curves parted the most.",
        plot(
            lines, gallery.axis, "°C", "measured and expected return temperature", PlotLayout(least_span=2.0)
        ),
    )


def _capture(collector: Collector) -> Markup:
    rows = [r for r in collector.heat_rows() if np.isfinite(r.half_width_pu)]
    if not rows:
        return Markup("")
    drawn = whiskers(
        [(short(r.rack), r.capture_pu * 100, r.half_width_pu * 100) for r in rows], "%", "liquid capture"
    )
    return figure(
        "Heat taken by the liquid, per rack",
        "Share of the electric power that the coolant carries, as learned by the end of the run, with the "
        "interval that would hold it with 90 % probability if load and flow were steady; a fault shifts it."
        + doubt(max(r.capture_pu for r in rows)),
        drawn,
    )


def _heat(collector: Collector, gallery: Gallery) -> Markup:
    track = gallery.tracks.get("heat.difference")
    if track is None or not track.count.any():
        return Markup("")
    sigma = {r.rack: 2 * r.sigma_k for r in collector.heat_rows()}
    bands = [sigma.get(label, float("nan")) for label in track.labels]
    text = (
        "Measured minus expected return temperature. The grey stripe is twice the learned noise "
        "(2 σ): a healthy rack "
        "stays mostly inside."
    )
    return gallery.panels("Heat residual per rack", text, [("heat.difference", 1)], "K", bands)


def _tree(collector: Collector, gallery: Gallery) -> Markup:
    balances, residual, kept = collector.balances()
    lead = Markup("")
    whole = gallery.tracks.get("tree")
    if whole is not None and whole.count.any():
        lead = gallery.lead(
            "Power unaccounted for",
            "What the outermost meters measure more (or less) than the racks behind them, as a "
            "share of the racks' power.",
            [gallery.line(whole, 0, Unit("%", 100.0), "")],
            "%",
            PlotLayout(height=190, least_span=2.0),
        )
    track = gallery.tracks.get("balance")
    if residual is None or track is None:
        return lead
    least, mean, greatest = track.overall()
    rows = []
    for place, i in enumerate(kept.tolist()):
        if i >= len(balances) or place >= len(mean) or not np.isfinite(mean[place]):
            continue
        noise = residual.sigma[i] / residual.expected[i] if residual.expected[i] > 0 else float("nan")
        rows.append(
            [
                joined(
                    [clean(balances[i].name), *([marked("(guessed wiring)", "soft")] * balances[i].inferred)],
                    " ",
                ),
                quantity(float(residual.measured[i]), "W"),
                quantity(float(residual.expected[i]), "W"),
                percent(float(mean[place])),
                f"{percent(float(least[place]))} to {percent(float(greatest[place]))}",
                percent(float(noise), 2),
            ]
        )
    if not rows:
        return lead
    more = len(balances) - len(rows)
    left_out = f"{number(more, 9)} further sums have no complete set of readings, or no room here."
    note = paragraph(left_out if more else "", "soft")
    return (
        lead
        + heading("Sums of the power tree")
        + table(
            [
                "meters",
                "measured, at the end",
                "behind them, at the end",
                "difference, mean",
                "from … to",
                "noise (1 σ)",
            ],
            rows,
            (1, 2, 3, 4, 5),
        )
        + note
    )
