"""Figures of a report: few entities on one plot, many on small panels of one scale, very many as a spread.

A track that does not exist gives no figure: a page shows what the site reports and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from markupsafe import Markup

from twin.catalogue import I32, TimeAxis, Unit, clean, find_signal, short, unit_for
from twin.report.collector import MAX_SHOWN, Collector
from twin.report.decimation import Track
from twin.report.page import figure, joined, pair, responsive
from twin.report.svg import Line, PlotLayout, panel, plot, span_of

FEW = 5  # so many lines share a plot
# The least height of a plot in shown units: below it, a picture would show the sensor's last digit.
LEAST_SPAN = {"°C": 2.0, "K": 1.0, "l/min": 2.0, "%": 1.0, "kW": 0.5, "MW": 0.01, "W": 10.0}

_KEY = '<span class="key"><i style="background:var(--c{})"></i>{}.</span>'


class Gallery:
    """Draws figures for one collector."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        first = collector.first_ns or 0
        self.axis = TimeAxis(collector.time.times_ns(), first, max(collector.last_ns, first))
        self.tracks = collector.time.tracks
        self.points = collector.time.points

    def unit(self, track: Track, core: str) -> Unit:
        """The unit in which a track is shown."""
        greatest = np.nanmax(np.abs(track.mean()), initial=0.0, where=track.count > 0)
        return unit_for(core, float(greatest))

    def line(
        self, track: Track, row: int, unit: Unit, label: str, colour: int = 1, band: bool = True
    ) -> Line:
        """One series of a track in shown units."""
        cut = slice(0, self.points)
        low, high = track.low[row, cut].astype(np.float64), track.high[row, cut].astype(np.float64)
        return Line(
            label,
            track.mean()[row, cut] * unit.factor,
            colour,
            low * unit.factor if band else None,
            high * unit.factor if band else None,
        )

    def lead(
        self,
        title: str,
        sentence: str,
        lines: Sequence[Line],
        unit: str,
        layout: PlotLayout,
    ) -> Markup:
        """A plot as wide as the page; on a phone another one of it, so that its text stays legible."""
        least = layout.least_span or LEAST_SPAN.get(unit, 0.0)
        drawn = [
            plot(lines, self.axis, unit, title, replace(layout, width=w, least_span=least))
            for w in (1080, 520)
        ]
        return figure(title, sentence, responsive(*drawn), "lead")

    def overlay(
        self,
        title: str,
        sentence: str,
        parts: Sequence[tuple[str, int, str]],
        core: str,
    ) -> Markup:
        """One plot of (track, row, label)."""
        parts = [p for p in parts if p[0] in self.tracks and self.tracks[p[0]].count[p[1]].any()]
        if not parts:
            return Markup("")
        unit = min((self.unit(self.tracks[name], core) for name, _, _ in parts), key=lambda u: u.factor)
        lines = [
            self.line(self.tracks[name], row, unit, label, 1 + i % 5, len(parts) <= 3)
            for i, (name, row, label) in enumerate(parts)
        ]
        layout = PlotLayout(least_span=LEAST_SPAN.get(unit.name, 0.0))
        return figure(title, sentence, plot(lines, self.axis, unit.name, title, layout))

    def order(self, key: str) -> I32:
        """Return the rows of a track with readings: at most `MAX_SHOWN`, the largest by power if that is
        known."""
        track = self.tracks[key]
        reporting = np.flatnonzero(track.count.any(axis=1))
        power = self.tracks.get(key.partition(".")[0] + ".power_w")
        if power is not None and power.labels == track.labels and len(reporting) > MAX_SHOWN:
            mean = np.nan_to_num(power.overall()[1][reporting], nan=-1.0)
            reporting = np.sort(reporting[np.argsort(-mean, kind="stable")[:MAX_SHOWN]])
        return reporting[:MAX_SHOWN].astype(np.int32)

    def panels(
        self,
        title: str,
        sentence: str,
        tracks: Sequence[tuple[str, int]],
        core: str,
        bands: Sequence[float] = (),
    ) -> Markup:
        """Small plots on one scale, one per entity; `tracks` are (name, colour) drawn together in each."""
        first = self.tracks[tracks[0][0]]
        rows = self.order(tracks[0][0])
        unit = self.unit(first, core)
        drawn: list[tuple[str, list[Line], int]] = []
        for row in rows.tolist():
            lines = [self.line(self.tracks[name], row, unit, "", colour) for name, colour in tracks]
            drawn.append((short(first.labels[row], 22), lines, row))
        span = span_of([line for _, lines, _ in drawn for line in lines], LEAST_SPAN.get(unit.name, 0.0))
        inner = joined(
            panel(name, lines, self.axis, unit.name, span, band=bands[row] if len(bands) else None)
            for name, lines, row in drawn
        )
        total = max(int(first.count.any(axis=1).sum()), self.collector.reporting.get(tracks[0][0], 0))
        more = f" Shown are {len(rows)} of {total}, the largest." if total > len(rows) else ""
        return figure(
            title,
            sentence + more + " One scale for all; the number is the last value.",
            Markup('<div class="many">{}</div>').format(inner),
            "lead",
        )

    def fan(self, key: str, title: str, sentence: str, core: str) -> Markup:
        """The spread over all entities of a table: median, the middle 80 %, the extremes."""
        track = self.tracks.get("spread " + key)
        if track is None:
            return Markup("")
        unit, mean, cut = self.unit(track, core), track.mean(), slice(0, self.points)
        least = track.low[0, cut].astype(np.float64) * unit.factor
        greatest = track.high[4, cut].astype(np.float64) * unit.factor
        inner = [mean[i, cut] * unit.factor for i in (1, 2, 3)]
        lines = [
            Line("greatest", greatest, 2),
            Line("median", inner[1], 1, inner[0], inner[2]),
            Line("least", least, 3),
        ]
        n = self.collector.reporting.get(key, 0)
        text = f"{sentence} Over {n:,} of them; the shaded part holds the middle 80 %."
        layout = PlotLayout(least_span=LEAST_SPAN.get(unit.name, 0.0))
        return figure(title, text, plot(lines, self.axis, unit.name, title, layout))

    def entities(
        self, keys: Sequence[tuple[str, str]], title: str, sentence: str, *, detail: bool = True
    ) -> Markup:
        """Figures for (signal, label) of one table, in the form that their number asks for."""
        present = [(k, label) for k, label in keys if k in self.tracks or "spread " + k in self.tracks]
        if not present:
            return Markup("")
        signal = find_signal(present[0][0])
        core = signal.unit if signal is not None else ""
        own = [(k, label) for k, label in present if k in self.tracks]
        count = max((int(self.tracks[k].count.any(axis=1).sum()) for k, _ in own), default=0)
        fans = [self.fan(k, f"{title}: {label}" if label else title, sentence, core) for k, label in present]
        fans = [f for f in fans if f]
        if fans and not (detail and own):
            return pair(fans)
        if own and count * len(own) <= FEW:
            parts = [
                (k, row, " ".join(x for x in (short(self.tracks[k].labels[row], 14), label) if x))
                for k, label in own
                for row in np.flatnonzero(self.tracks[k].count.any(axis=1)).tolist()
            ]
            return self.overlay(title, sentence, parts, core)
        result = sentence
        if len(own) > 1:
            colours = [(i, clean(label)) for i, (_, label) in enumerate(own, 1)]
            result = Markup("{} ").format(sentence) + joined(
                (Markup(_KEY).format(i, label) for i, label in colours), " "
            )
        same = [o for o in own if self.tracks[o[0]].labels == self.tracks[own[0][0]].labels]
        drawn = self.panels(title, result, [(k, i) for i, (k, _) in enumerate(same, 1)], core) if own else ""
        return pair(fans) + drawn
