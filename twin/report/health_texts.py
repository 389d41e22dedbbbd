"""Health in words: chances, spans, confidence of a verdict, missing data and changes of a verdict.

Shared by `racktwin device health`, the interface and the control room, so that all say the same. Imports
the words of health only.
"""

from __future__ import annotations

import math

from twin.contracts import ATTRIBUTIONS, LEVELS

HORIZONS_S = (3600.0, 86_400.0, 604_800.0, 2_592_000.0)
LEVEL_WORDS = {
    "healthy": "is healthy",
    "unknown": "is unknown: too few readings arrive to call it healthy",
    "watch": "works, but needs watching",
    "degraded": "is degraded: it works, but not normally",
    "failed": "has failed",
}
LOWERED_WORDS = dict(
    zip(
        ATTRIBUTIONS,
        (
            "its clock is not limited",
            "the GPU itself: its cooling is normal",
            "the facility's cooling, not the GPU: a reset or a swap does not help",
            "a power limit, not the GPU: a cap of racktwin, of the site or of the supply",
            "unknown: the needed signals do not report",
        ),
        strict=True,
    )
)
HELD_DOWN = {
    "own": "by themselves",
    "facility": "by the facility's cooling: no fault of theirs",
    "power": "by a power limit: no fault of theirs",
    "unknown": "for an unknown reason",
}
SIGNAL_WORDS = {
    "excluded": "times that people or the scheduler avoided it",
    "xids": "XIDs that indicate a hardware fault",
    "tickets": "maintenance windows opened for it",
    "out_of_service": "times out of service",
    "multi_node_failures": "failures of jobs on several nodes",
    "single_node_failures": "failures of jobs on it alone",
    "single_node_failure_pu": "share of its own jobs that failed",
}
CLASS_WORDS = {
    "off_bus": "GPU off the bus",
    "memory": "memory",
    "link": "links",
    "thermal": "heat",
    "power": "power",
    "software": "software",
    "silent": "silence",
    "taken_out": "taken out of service",
    "other": "other causes",
    "restarted": "restarts, over within half an hour",
}


_AGENT = "racktwin-agent on the node, or DCGM's exporter"
# Sources of a missing signal: by signal, else by table.
SOURCES = {
    "gpu.xid_code": "DCGM's exporter; racktwin-agent reports an XID when one comes",
    "node.agent_state": "racktwin-agent on the node",
    **dict.fromkeys(
        (
            f"node.dpu{side}_{name}"
            for side in (1, 2)
            for name in ("temp_c", "health_state", "offload_state", "port_error_count")
        ),
        "the DPU's exporters or its BMC, by `scrapes` or `redfish`",
    ),
    "node.reboot_count": "racktwin-agent on the node",
    "node.service_level_state": "the scheduler, by a `slurm` source",
    "gpu": _AGENT,
    "node": "the node's BMC by IPMI",
    "switch": "the network's telemetry, by Telegraf and a mapping",
    "link": "the network's telemetry, by Telegraf and a mapping",
    "cdu": "the building's BMS",
    "loop": "the building's BMS",
    "feeder": "the building's BMS",
    "storage": "the storage's exporter, by `scrapes`",
}

# End of a verdict once its action is done; the evidence itself goes as soon as its cause has gone.
_ENDS = {
    "none": "",
    "watch": "It clears by itself once the evidence above has been quiet for a while.",
    "restart_app": "It clears when the application runs again without the error.",
    "check_facility": "It clears by itself once power and cooling are normal; a reset does not help.",
    "reset_gpu": "It clears when the GPU was reset or its node restarted, and the error does not come again.",
    "reboot_node": "It clears when the node was restarted and the error does not come again.",
    "run_diagnostics": "It clears when the node comes back from diagnostics and the error does not come "
    "again.",
    "drain": "It clears when the node was repaired and is back in service.",
    "contact_support": "It clears when the part was replaced, or the node is back in service after a repair.",
    "replace": "It clears when another part is in this place: by a new serial number, or by its readings.",
}
# Parts whose readings alone show that they are well again
_ENDS_OF = {
    "dpu": "It clears when the DPU reports that it is well, and its ports have had no errors for a while.",
    "psu": "It clears when the supply gives its share of the power again.",
    "pump": "It clears when the pump runs, and flow and pressure are what its speed promises.",
    "link": "It clears when the link is up and its errors have been quiet for a while.",
}


def chance(value_pu: float | None) -> str:
    """Return a probability for people; a dash for none. Never a flat 0 or 100 %, which is never certain."""
    if value_pu is None or not math.isfinite(value_pu):
        return "-"
    percent = 100.0 * value_pu
    if percent < 0.01:
        return "< 0.01 %"
    if percent > 99.0:
        return "> 99 %"
    digits = 2 if percent < 0.1 else 1 if percent < 10 else 0
    return f"{percent:.{digits}f} %"


def times(value_pu: float | None, usual_pu: float | None) -> str:
    """Compare a chance with the average of the fleet; empty where either is unknown or zero."""
    if not value_pu or not usual_pu or not (math.isfinite(value_pu) and math.isfinite(usual_pu)):
        return ""
    ratio = value_pu / usual_pu
    if ratio >= 1.5:
        return f"{ratio:.{0 if ratio >= 10 else 1}f} x the average"
    if ratio <= 1 / 1.5:
        return "below average"
    return "about average"


def comes_from(key: str) -> str:
    """Return the source of a signal such as `gpu.temp_c`: what to connect to get it."""
    return SOURCES.get(key) or SOURCES[key.partition(".")[0]]


def source(text: str) -> str:
    """Write the source of a rule."""
    return "" if not text else "rule: estimate of racktwin" if text == "estimate" else f"rule: {text}"


def count(value: float | None) -> str:
    """An expected number of failures; two digits below ten."""
    if value is None or not math.isfinite(value):
        return "-"
    return "< 0.01" if value < 0.01 else f"{value:.{0 if value >= 10 else 1 if value >= 1 else 2}f}"


def sure(value_pu: float | None) -> str:
    """Write the confidence of a verdict that the part itself is to blame."""
    if value_pu is None or not math.isfinite(value_pu):
        return ""
    word = next(w for least, w in ((0.9, "sure"), (0.7, "fairly sure"), (0.5, "more likely than not"),
                                   (-1.0, "only a suspicion")) if value_pu >= least)  # fmt: skip
    return f"{word} ({100 * min(value_pu, 0.99):.0f} %)"


def changes(level: str, action: str, missing: bool, part: str = "") -> str:
    """Write what would change a verdict, in a sentence or two; `part`: the kind of part."""
    if level == "unknown":
        return (
            "It gets a verdict once the missing signals report. Until then it counts as neither "
            "healthy nor faulty."
        )
    if level == "healthy":
        more = " The missing signals could hide a fault." if missing else ""
        return (
            "An error that it reports, errors that grow, heat or a lowered clock of its own, or silence."
            + more
        )
    of_part = _ENDS_OF.get(part) if level in ("degraded", "failed") else None
    return of_part or _ENDS.get(action) or _ENDS["watch"]


def worst(levels: dict[str, int]) -> str:
    """The worst level present; `healthy` if there is none."""
    return next((level for level in reversed(LEVELS) if levels.get(level)), LEVELS[0])


def counted(levels: dict[str, int]) -> str:
    """Counts per level, the gravest first."""
    parts = [f"{levels[level]} {level}" for level in reversed(LEVELS) if levels.get(level)]
    return ", ".join(parts) or "none"
