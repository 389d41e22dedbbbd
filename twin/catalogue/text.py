"""Text of numbers, units, times and names for display, with text from outside made safe.

Core units go in (W, per unit, Pa), display units come out (kW, %, kPa). Pure.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from twin.catalogue.instants import NS, START_NS

if TYPE_CHECKING:
    from twin.catalogue.arrays import I64

MAX_NAME = 100
# A clock that says a year before this was made up for the run.
REAL_SINCE_NS = 946_684_800 * NS  # 2000-01-01

# Meaning of each unit on the page, for the footnote.
GLOSSARY = {
    "W": "watt, power. 1 kW = 1,000 W (a kettle takes about 2 kW); 1 MW = 1,000 kW.",
    "kWh": "kilowatt hour, energy: 1 kW for one hour.",
    "°C": "degree Celsius, a temperature.",
    "K": "kelvin, a difference of temperatures: 1 K is as large a step as 1 °C.",
    "l/min": "litres per minute, the flow of coolant through a rack or a cooling unit.",
    "%": "per cent: of the power that a rack draws, of the readings, or of the load, as each heading says.",
    "1/s": "per second.",
    "USD/kWh": "US dollar per kilowatt hour, a price of energy.",
    "g/kWh": "grams of CO₂ per kilowatt hour of electricity.",
    "σ": "sigma, the noise of a comparison as learned in this run; 95 % of a healthy site lies within 2 σ.",
}


def did_you_mean(word: str, known: Iterable[str], least_ratio: float = 0.6) -> str:
    """`; did you mean X?`, or nothing where no name is like it; case does not count."""
    names = {name.lower(): name for name in known}
    near = [names[n] for n in get_close_matches(word[:80].lower(), names, 3, least_ratio)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


_UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ms|s|min|m|h|d|w)(?![a-z]) ?")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+")


class Unit(NamedTuple):
    """Display unit of a core unit: shown = core * factor."""

    name: str
    factor: float


def unit_for(core: str, greatest: float) -> Unit:
    """The unit for values up to `greatest` in a core unit."""
    size = abs(greatest) if math.isfinite(greatest) else 0.0
    if core == "W":
        return Unit("MW", 1e-6) if size >= 2e6 else Unit("kW", 1e-3) if size >= 2e3 else Unit("W", 1.0)
    plain = {"degC": Unit("°C", 1.0), "1": Unit("%", 100.0), "Pa": Unit("kPa", 1e-3), "count": Unit("", 1.0)}
    return plain.get(core, Unit(core, 1.0))


def number(value: float | None, digits: int = 3) -> str:
    """About `digits` significant digits, thousands apart, never an exponent; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    after = 0 if size >= 10 ** (digits - 1) or size == 0 else digits - 1 - math.floor(math.log10(size))
    text = f"{value:,.{min(max(after, 0), 6)}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text.replace("-", "−")


def quantity(value: float | None, core: str, digits: int = 3) -> str:
    """A core value with its unit, such as "1.32 MW"; a dash for none."""
    if value is None:
        return "–"
    unit = unit_for(core, value)
    shown = number(value * unit.factor, digits)
    return shown if shown == "–" or not unit.name else f"{shown} {unit.name}"


def percent(share: float, digits: int = 3) -> str:
    """A share of 1 as per cent; what is almost all is not rounded up to all."""
    if 0.999 <= share < 1.0:
        return "> 99.9 %" if share > 0.9995 else "99.9 %"
    return "–" if not math.isfinite(share) else f"{number(share * 100, digits)} %"


def duration(seconds: float | None) -> str:
    """Two leading units: "2 d 4 h", "1.5 s"; a dash for none."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return "–"
    if seconds < 60:
        return f"{number(seconds)} s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next(i for i, (n, _) in enumerate(parts) if n)
    return " ".join(f"{n} {unit}" for n, unit in parts[first : first + 2] if n)


def seconds_of(text: str) -> float | None:
    """Seconds of a duration as people write it: "15 s", "2h", "1d12h", "1.5 min"; None for anything else.

    A bare number is none, but for 0: who leaves the unit out may have meant minutes.
    """
    text = text.strip().lower()
    if not _DURATION.fullmatch(text):
        return 0.0 if text == "0" else None
    return sum(float(n) * _UNITS_S[unit] for n, unit in _DURATION_PART.findall(text))


def clean(text: object, limit: int = MAX_NAME) -> str:
    """Text of unknown origin: one line, not too long, no control, bidirectional or surrogate characters."""
    raw = str(text)[: limit * 4]
    out = "".join(
        c if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else "\ufffd" for c in raw
    )
    return out if len(out) <= limit else out[: limit - 1] + "…"


def safe(text: object, limit: int = MAX_NAME) -> str:
    """`clean`, and escaped for HTML, attributes included."""
    return html.escape(clean(text, limit), quote=True)


def is_stated(sentence: str, title: str) -> bool:
    """Return True if a title ends with this sentence, whatever the case of their letters."""
    sentence, title = sentence.lower(), title.lower()
    return title == sentence or title.endswith((f": {sentence}", f" {sentence}"))


def short(path: str, limit: int = 20) -> str:
    """The end of an entity's path, which distinguishes it from its neighbours."""
    last = clean(path).rsplit("/", 1)[-1]
    return last if len(last) <= limit else "…" + last[1 - limit :]


def is_synthetic(first_ns: int) -> bool:
    """True if a start is no real date: none at all, or the one given to recordings that know only offsets."""
    return first_ns < REAL_SINCE_NS or abs(first_ns - START_NS) <= 60 * NS


def utc(t_ns: int, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A UTC date and time; something printable even for an absurd instant."""
    try:
        return datetime.fromtimestamp(t_ns // NS, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return f"{t_ns / NS:.0f} s"


class TimeAxis:
    """Instants of a run as places between 0 and 1 and as labels."""

    _STEPS = (
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
        1800,
        3600,
        7200,
        10800,
        21600,
        43200,
        86400,
        172800,
        604800,
        1209600,
        2592000,
        7776000,
        31536000,
    )

    def __init__(self, times_ns: I64, first_ns: int, last_ns: int) -> None:
        self.times_ns, self.first_ns = times_ns, first_ns
        self.last_ns = max(last_ns, first_ns + NS // 10)
        self.synthetic = is_synthetic(first_ns)
        self.span_s = (self.last_ns - first_ns) / NS

    def place(self, t_ns: int) -> float:
        """0 at the start of the run, 1 at its end."""
        return (t_ns - self.first_ns) / (self.last_ns - self.first_ns)

    def label(self, t_ns: int) -> str:
        """The instant for a read-out or a table."""
        if not self.synthetic:
            return utc(t_ns)
        seconds = max(0, t_ns - self.first_ns) / NS
        whole = int(seconds)
        days = f"{whole // 86400} d " if whole >= 86400 else ""
        return f"+{days}{whole // 3600 % 24}:{whole // 60 % 60:02d}:{whole % 60:02d}"

    def caption(self) -> str:
        """Label of the axis."""
        if self.synthetic:
            return f"{self._offset()[1]} since the start"
        first, last = utc(self.first_ns, "%Y-%m-%d"), utc(self.last_ns, "%Y-%m-%d")
        return f"UTC, {first}" if first == last else f"UTC, {first} to {last}"

    def _offset(self) -> tuple[float, str]:
        for seconds, name in ((86400.0 * 2, "days"), (7200.0, "hours"), (300.0, "minutes")):
            if self.span_s >= seconds:
                return {"days": 86400.0, "hours": 3600.0, "minutes": 60.0}[name], name
        return 1.0, "seconds"

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """(place, label) of round instants, at most about `most`."""
        step = next((s for s in self._STEPS if self.span_s / s <= most), self._STEPS[-1])
        if self.synthetic:
            per, _ = self._offset()
            count = int(self.span_s // step)
            return [(i * step / self.span_s, number(i * step / per)) for i in range(min(count, 60) + 1)]
        begin = -(-self.first_ns // (step * NS)) * step
        form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%d %b" if step < 31536000 else "%Y"
        several = utc(self.first_ns, "%j") != utc(self.last_ns, "%j")
        out = []
        for i in range(60):
            at = (begin + i * step) * NS
            if at > self.last_ns:
                break
            midnight = form == "%H:%M" and several and (begin + i * step) % 86400 == 0
            out.append((self.place(at), utc(at, "%d %b" if midnight else form)))
        return out
