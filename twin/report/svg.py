"""SVG plots: lines with their least-to-greatest band, small panels on one scale, dots with intervals.

Colours are CSS variables of the page, so that one drawing serves light, dark and print. The read-out under
the pointer takes its values from `data-p`. Every label is escaped here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from twin.catalogue import F64, TimeAxis, clean, number, safe

WIDE_CHAR = 8.4  # of the names beside lines, and so large that a phone has room
CHAR = 7.0  # width of a character of the labels, about
LABEL_GAP = 14.0


@dataclass(frozen=True)
class Line:
    """One series in shown units [points]; `low` and `high` are its extremes between the points."""

    label: str
    values: F64
    colour: int = 1  # 1..5, of the page; 0 is muted
    low: F64 | None = None
    high: F64 | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Frame2D:
    """Place of a plot in its drawing, and the span of its vertical axis."""

    left: float
    right: float
    top: float
    bottom: float
    y_low: float
    y_high: float

    def x(self, place: float) -> float:
        return self.left + place * (self.right - self.left)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return self.bottom - share * (self.bottom - self.top)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values that span low..high: the first at or below, the last at or above."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high <= low:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def span_of(lines: Sequence[Line], least_span: float = 0.0) -> tuple[float, float]:
    """Least and greatest of lines and bands; zero is included where it is not far, flat lines get room."""
    arrays = [a for line in lines for a in (line.values, line.low, line.high) if a is not None]
    known = np.concatenate([a[np.isfinite(a)] for a in arrays]) if arrays else np.zeros(0)
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    if 0 < low < 0.5 * high:
        low = 0.0
    room = max(least_span, 0.02 * max(abs(low), abs(high)), 1e-9)
    if high - low < room:
        middle = (low + high) / 2
        low, high = middle - room / 2, middle + room / 2
        if known.min() >= 0:
            low = max(low, 0.0)
    return low, high


@dataclass(frozen=True, kw_only=True)
class PlotLayout:
    """Size of a plot; `levels` are named horizontal lines, `marks` upright ones at 0..1 of the axis."""

    width: int = 520
    height: int = 230
    least_span: float = 0.0
    levels: Sequence[tuple[float, str]] = ()
    marks: Sequence[tuple[float, str]] = ()


DEFAULT_LAYOUT = PlotLayout()


def plot(
    lines: Sequence[Line],
    axis: TimeAxis,
    unit: str,
    title: str,
    layout: PlotLayout = DEFAULT_LAYOUT,
) -> Markup:
    """Lines over the run's time with names at their ends."""
    width, height, levels = layout.width, layout.height, layout.levels
    low, high = span_of(lines, layout.least_span)
    for level, _ in levels:
        low, high = min(low, level), max(high, level)
    ticks = nice_ticks(low, high)
    labelled = len(lines) > 1 or bool(lines and lines[0].label)
    margin = (
        10 + WIDE_CHAR * max((len(clean(line.label, 22)) for line in lines), default=0) if labelled else 14
    )
    left = 12 + CHAR * max(len(number(t, 6)) for t in ticks)
    frame = Frame2D(left, width - margin, 22, height - 34, ticks[0], ticks[-1])
    parts = [f'<text class="unit" x="{left:.1f}" y="12">{safe(unit or "count")}</text>', _grid(frame, ticks)]
    parts += [_time_ticks(frame, axis, max(3, int((frame.right - frame.left) / 80)), height, True)]
    for level, name in levels:
        y = frame.y(level)
        parts.append(
            f'<line class="level" x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{frame.right:.1f}" y="{y - 4:.1f}" text-anchor="end">{safe(name)}</text>'
        )
    parts += [_mark(frame, place, name) for place, name in layout.marks if 0.0 <= place <= 1.0]
    parts += [_band(frame, axis, line) for line in lines] + [_path(frame, axis, line) for line in lines]
    if labelled:
        parts.append(_end_labels(frame, lines))
    return _svg(parts, frame, lines, (unit, title), (width, height))


def _mark(frame: Frame2D, place: float, name: str) -> str:
    """An upright mark with its name, if any, above it."""
    x = frame.x(place)
    anchor = "start" if place < 0.2 else "end" if place > 0.8 else "middle"
    y = frame.top - 6
    label = f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(name)}</text>'
    return (
        f'<line class="level" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top:.1f}" y2="{frame.bottom:.1f}"/>'
        f"{label if name else ''}"
    )


def panel(
    name: str,
    lines: Sequence[Line],
    axis: TimeAxis,
    unit: str,
    span: tuple[float, float],
    band: float | None = None,
) -> Markup:
    """A small plot named inside, on a scale shared with its neighbours; `band` is a tolerance around 0."""
    width, height = 250, 122
    ticks = nice_ticks(*span, 3)
    left = 8 + CHAR * max(len(number(t, 6)) for t in ticks)
    frame = Frame2D(left, width - 8, 26, height - 24, ticks[0], ticks[-1])
    parts = [_grid(frame, ticks), _time_ticks(frame, axis, 2, height, False)]
    if band is not None and math.isfinite(band):
        top, bottom = frame.y(min(band, frame.y_high)), frame.y(max(-band, frame.y_low))
        parts.insert(
            0,
            f'<rect class="sigma" x="{frame.left:.1f}" y="{top:.1f}" '
            f'width="{frame.right - frame.left:.1f}" height="{bottom - top:.1f}"/>',
        )
    parts += [_band(frame, axis, line) for line in lines] + [_path(frame, axis, line) for line in lines]
    parts.append(f'<text class="name" x="4" y="14">{safe(name, 22)}</text>')
    for k, line in enumerate(reversed(lines)):
        known = line.values[np.isfinite(line.values)]
        text = f" {safe(unit)}" if k == 0 else ""
        if len(known):
            parts.append(
                f'<text class="end c{line.colour}" x="{width - 8 - 52 * k}" y="14" text-anchor="end">'
                f"{_to_scale(float(known[-1]), frame.y_high - frame.y_low)}{text}</text>"
            )
    return _svg(parts, frame, lines, (unit, name), (width, height))


def whiskers(rows: Sequence[tuple[str, float, float]], unit: str, title: str) -> Markup:
    """One line per (name, middle, half width): a dot with its interval, on one horizontal scale."""
    width, height = 520, 34 + 19 * len(rows)
    left = 12 + CHAR * max(len(clean(name, 22)) for name, _, _ in rows)
    lowest = min(m - h for _, m, h in rows)
    ticks = nice_ticks(max(0.0, lowest), max(m + h for _, m, h in rows))
    frame = Frame2D(left, width - 112, 6, height - 26, 0, 1)

    def x(value: float) -> float:
        return frame.x((min(max(value, ticks[0]), ticks[-1]) - ticks[0]) / (ticks[-1] - ticks[0]))

    parts = []
    for tick in ticks:
        parts.append(
            f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{frame.top}" y2="{frame.bottom}"/>'
            f'<text class="tick" x="{x(tick):.1f}" y="{height - 10}" text-anchor="middle">'
            f"{number(tick, 6)}</text>"
        )
    for i, (name, middle, half) in enumerate(rows):
        y = frame.top + 10 + 19 * i
        parts.append(
            f'<text class="label" x="{left - 8:.1f}" y="{y + 4}" text-anchor="end">{safe(name, 22)}</text>'
            f'<line class="s1" x1="{x(middle - half):.1f}" x2="{x(middle + half):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle class="f1" cx="{x(middle):.1f}" cy="{y}" r="3.5"/>'
            f'<text class="tick" x="{width - 102}" y="{y + 4}">'
            f"{number(middle, 3)} ± {number(half, 2)} {safe(unit)}</text>"
        )
    return Markup(
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{safe(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _grid(frame: Frame2D, ticks: Sequence[float]) -> str:
    out = []
    for tick in ticks:
        y = frame.y(tick)
        kind = "zero" if tick == 0 else "grid"
        out.append(
            f'<line class="{kind}" x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{frame.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">'
            f"{number(tick, 6)}</text>"
        )
    return "".join(out)


def _time_ticks(frame: Frame2D, axis: TimeAxis, most: int, height: int, caption: bool) -> str:
    out, end = [], -100.0
    for place, label in axis.ticks(most):
        x = frame.x(place)
        half = CHAR * len(label) / 2
        at = min(max(x, half), frame.right + 8 - half)
        if at - half < end + 6:
            continue
        end = at + half
        y = frame.bottom
        out.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}"/>'
            f'<text class="tick" x="{at:.1f}" y="{y + 16:.1f}" text-anchor="middle">{label}</text>'
        )
    if caption:
        out.append(
            f'<text class="tick" x="{frame.right:.1f}" y="{height - 4}" text-anchor="end">'
            f"{safe(axis.caption())}</text>"
        )
    return "".join(out)


def _runs(axis: TimeAxis, values: F64) -> list[range]:
    """Stretches of known points without a gap in value or time."""
    known = np.isfinite(values)
    step = np.diff(axis.times_ns)
    usual = float(np.median(step)) if len(step) else 0.0
    out: list[range] = []
    begin = -1
    for i, here in enumerate(known.tolist()):
        if begin >= 0 and (not here or step[i - 1] > 4 * usual):
            out.append(range(begin, i))
            begin = -1
        if here and begin < 0:
            begin = i
    return out if begin < 0 else [*out, range(begin, len(values))]


def _places(frame: Frame2D, axis: TimeAxis) -> list[float]:
    return [frame.x(axis.place(int(t))) for t in axis.times_ns]


def _path(frame: Frame2D, axis: TimeAxis, line: Line) -> str:
    x = _places(frame, axis)
    path, dots = [], []
    for run in _runs(axis, line.values):
        if len(run) == 1:
            y = frame.y(float(line.values[run[0]]))
            dots.append(f'<circle class="f{line.colour}" cx="{x[run[0]]:.1f}" cy="{y:.1f}" r="2.5"/>')
        else:
            path.append("M" + "L".join(f"{x[i]:.1f} {frame.y(float(line.values[i])):.1f}" for i in run))
    kind = f"s{line.colour}" + (" dash" if line.dashed else "")
    return (f'<path class="{kind}" d="{"".join(path)}"/>' if path else "") + "".join(dots)


def _band(frame: Frame2D, axis: TimeAxis, line: Line) -> str:
    if line.low is None or line.high is None or not (line.high - line.low > 0).any():
        return ""
    x, out = _places(frame, axis), []
    for run in _runs(axis, line.low + line.high):
        if len(run) > 1:
            upper = [f"{x[i]:.1f} {frame.y(float(line.high[i])):.1f}" for i in run]
            lower = [f"{x[i]:.1f} {frame.y(float(line.low[i])):.1f}" for i in reversed(run)]
            out.append("M" + "L".join([*upper, *lower]) + "Z")
    return f'<path class="b{line.colour}" d="{"".join(out)}"/>' if out else ""


def _end_labels(frame: Frame2D, lines: Sequence[Line]) -> str:
    """Names beside the ends of the lines, pushed apart where they would overlap."""
    ends: list[tuple[float, Line]] = []
    for line in lines:
        known = line.values[np.isfinite(line.values)]
        if len(known) and line.label:
            ends.append((frame.y(float(known[-1])), line))
    ends.sort(key=lambda end: end[0])
    places: list[float] = []
    for y, _ in ends:
        places.append(max(y, places[-1] + LABEL_GAP if places else frame.top))
    for i in reversed(range(len(places))):
        places[i] = min(places[i], frame.bottom + 4 - LABEL_GAP * (len(places) - 1 - i))
    return "".join(
        f'<text class="label c{line.colour}" x="{frame.right + 6:.1f}" y="{y + 4:.1f}">'
        f"{safe(line.label, 22)}</text>"
        for y, (_, line) in zip(places, ends, strict=True)
    )


def _svg(
    parts: Sequence[str],
    frame: Frame2D,
    lines: Sequence[Line],
    caption: tuple[str, str],
    size: tuple[int, int],
) -> Markup:
    """The drawing; `caption` is its unit and title, `size` its width and height."""
    (unit, title), (width, height) = caption, size
    series = [
        [clean(line.label, 22), line.colour, [_rounded(v) for v in line.values.tolist()]]
        for line in lines
        if np.isfinite(line.values).any()
    ]
    data = {
        "l": round(frame.left, 1),
        "r": round(frame.right, 1),
        "t": frame.top,
        "b": frame.bottom,
        "u": unit,
        "s": series,
    }
    encoded = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("&", "&amp;")
    encoded = encoded.replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;")
    return Markup(
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{safe(title)}" '
        f'data-p="{encoded}">' + "".join(parts) + "</svg>"
    )


def _to_scale(value: float, span: float) -> str:
    """A value as finely as a panel of this span lets one see it."""
    after = max(0, math.ceil(-math.log10(span / 150))) if span > 0 else 0
    text = number(round(value, min(after, 6)), 6)
    return text


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}") if abs(value) < 1e4 else round(value)
    return int(short) if short == int(short) else short
