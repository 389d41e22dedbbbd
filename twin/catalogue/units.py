"""The unit of every quantity, read off the suffix of its name, and conversions into them.

Imports nothing of ours. Inside the core a quantity has exactly one unit; other units are converted in
`connectors/` with `to_core`. Fractions are per unit (0..1), never percent.
"""

from __future__ import annotations

# Suffix of a name -> unit. Longest suffix wins, so that `_per_s` is not read as `_s`.
SUFFIX_UNIT: dict[str, str] = {
    "_w": "W",
    "_va": "VA",
    "_j": "J",
    "_mj": "mJ",
    "_c": "degC",
    "_k": "K",
    "_lpm": "l/min",
    "_ml": "ml",
    "_pa": "Pa",
    "_hz": "Hz",
    "_mhz": "MHz",
    "_v": "V",
    "_a": "A",
    "_pu": "1",
    "_s": "s",
    "_ns": "ns",
    "_per_s": "1/s",
    "_bytes": "byte",
    "_bytes_per_s": "byte/s",
    "_count": "count",
    "_state": "state",
    "_bits": "bits",
    "_code": "code",
    "_usd_per_kwh": "USD/kWh",
    "_g_per_kwh": "g/kWh",
}

# A qualifier may follow the unit: `temp_c_max`.
QUALIFIERS = ("_max", "_min", "_mean")

# Spelling on the wire -> (core unit, factor, offset): core = wire * factor + offset.
_WIRE: dict[str, tuple[str, float, float]] = {
    "W": ("W", 1.0, 0.0),
    "mW": ("W", 1e-3, 0.0),
    "kW": ("W", 1e3, 0.0),
    "MW": ("W", 1e6, 0.0),
    "VA": ("VA", 1.0, 0.0),
    "kVA": ("VA", 1e3, 0.0),
    "MVA": ("VA", 1e6, 0.0),
    "C": ("degC", 1.0, 0.0),
    "degC": ("degC", 1.0, 0.0),
    "°C": ("degC", 1.0, 0.0),
    "F": ("degC", 5 / 9, -160 / 9),
    "degF": ("degC", 5 / 9, -160 / 9),
    "K": ("K", 1.0, 0.0),
    "LPM": ("l/min", 1.0, 0.0),
    "l/min": ("l/min", 1.0, 0.0),
    "GPM": ("l/min", 3.785411784, 0.0),  # US liquid gallon, NIST SP 811
    "m3/h": ("l/min", 1000 / 60, 0.0),
    "ml": ("ml", 1.0, 0.0),
    "l": ("ml", 1e3, 0.0),
    "m3": ("ml", 1e6, 0.0),
    "gal": ("ml", 3785.411784, 0.0),  # US liquid gallon, NIST SP 811
    "Pa": ("Pa", 1.0, 0.0),
    "kPa": ("Pa", 1e3, 0.0),
    "bar": ("Pa", 1e5, 0.0),
    "psi": ("Pa", 6894.757293168, 0.0),  # NIST SP 811
    "inH2O": ("Pa", 249.08891, 0.0),  # conventional inch of water, NIST SP 811
    "Hz": ("Hz", 1.0, 0.0),
    "MHz": ("Hz", 1e6, 0.0),
    "V": ("V", 1.0, 0.0),
    "A": ("A", 1.0, 0.0),
    "mA": ("A", 1e-3, 0.0),
    "%": ("1", 0.01, 0.0),
    "%RH": ("1", 0.01, 0.0),
    "1": ("1", 1.0, 0.0),
    "s": ("s", 1.0, 0.0),
    "RPM": ("Hz", 1 / 60, 0.0),
    "J": ("J", 1.0, 0.0),
    "mJ": ("mJ", 1.0, 0.0),
    "ns": ("ns", 1.0, 0.0),
    "count": ("count", 1.0, 0.0),
}


def unit_of(name: str) -> str | None:
    """The unit that a name declares by its suffix, or None if it declares none."""
    for qualifier in QUALIFIERS:
        if name.endswith(qualifier):
            name = name[: -len(qualifier)]
            break
    best = max((s for s in SUFFIX_UNIT if name.endswith(s)), key=len, default=None)
    return None if best is None else SUFFIX_UNIT[best]


def from_dbm(power_dbm: float) -> float:
    """Watts of a power in dBm; no light, given as -inf, is 0."""
    return float(10.0 ** ((min(power_dbm, 300.0) - 30.0) / 10.0))


def to_core(wire_unit: str, core_unit: str) -> tuple[float, float] | None:
    """(factor, offset) that turn a wire value into the core unit, or None if they do not measure the same."""
    known = _WIRE.get(wire_unit)
    if known is None or known[0] != core_unit:
        return None
    return known[1], known[2]
