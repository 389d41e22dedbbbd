"""Alarm titles: the text of a rule without its figures, so that a finding keeps its title while these change.

The figures are in its evidence.
"""

from __future__ import annotations

from twin.contracts import Evidence
from twin.health.verdict_specs import SPECS

_NOTE = ": {note}"
# Rules whose figures or notes move; what ends with a note is cut before it. A code, or what a GPU asks for,
# stays in the title.
_SAID = {
    "xid_repeated": "the same XID came again and again within 24 h",
    "code_repeated": "the same code came again and again within 24 h",
    "sxid_repeated": "the same SXID came again and again within 24 h",
    "not_cured": "its faults stay although its node was restarted",
    "row_remap_growth": "rows of its memory were remapped",
    "ecc_dbe": "double-bit errors of its memory",
    "ecc_sbe": "many single-bit errors of its memory",
    "ecc_sbe_daily": "many single-bit errors of its memory",
    "nvlink_errors": "many errors of its NVLinks",
    "nvlink_replays": "many replays on its NVLinks",
    "nvlink_recoveries": "recoveries of its NVLinks",
    "pcie_replays": "many replays on its PCIe link",
    "thermal_margin": "it is near its limit of heat",
    "temp_residual": "it is hotter than its power and coolant account for",
    "clock_residual": "its clock is lower than its power and cap account for",
    "thermal_slowdown": "its hardware slows it, its neighbours run free",
    "telemetry_gap": "it was silent at times within the last hour",
    "wear": "a learned parameter of it nears its limit",
    "cpu_temp": "its CPU is near its limit of heat",
    "inlet_temp": "its air comes in warm",
    "reboots": "it restarted again and again",
    "ports_down": "more ports are down than always were",
    "errors": "many errors",
    "discards": "packets discarded: congestion",
    "link_flaps": "it went down and up again",
    "link_errors": "many errors",
    "link_symbols": "many symbol errors",
    "link_recoveries": "many recoveries",
    "link_discards": "packets discarded: congestion",
    "psu_lost": "it gives far less than the other one",
    "psu_empty": "it gives far less than the other one: its feed may be dark, or it rests",
}
TITLES: dict[str, str] = {
    rule.id: rule.words.removesuffix(_NOTE)
    for spec in SPECS.values()
    for rule in spec.rules
    if rule.words.endswith(_NOTE)
} | _SAID


def heading(evidence: Evidence) -> str:
    """Return the text of evidence without the figures that change."""
    return TITLES.get(evidence.rule, evidence.text)
