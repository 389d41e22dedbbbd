"""Failures of nodes of a simulated fleet and their precursors: rates, shares, strengths, lead times; data.

The table was fixed before any model of failures was written and is not fitted to one. Most precursors have
no published strength: those are estimates and say so, and results are also shown at half strength. Imports
nothing of ours.
"""

from __future__ import annotations

from typing import NamedTuple


class Sign(NamedTuple):
    """One way in which a failure to come shows.

    `what` is a counter of the truth, `xid N` (a report), `gpu_silent` or `node_silent` (telemetry is missing
    for minutes), `gpu_slowed` (the hardware lowers its clock for minutes), `psu_lost` (one of two) or
    `gpu_plate_factor` (a plate conducts worse). `share_pu` of those
    failures that show at all show this sign. `size` is the median of what it grows to just before the
    failure: events per day, or what a factor exceeds 1 by. `spread` is the standard deviation of its log.
    """

    what: str
    share_pu: float
    size: float
    spread: float


class FailureClass(NamedTuple):
    """A way in which a node becomes unusable.

    `cases` of the 419 of Llama 3; `codes` are the XIDs it reports, each as likely. `shows_pu` of its failures
    have precursors, which begin `lead_s` (median; `lead_spread` of the log) before and grow with the square
    of the time. `replaced_pu` of the repairs exchange the GPU (or the node's board).
    """

    name: str
    table: str  # whose device fails: gpu, or the node
    cases: float
    codes: tuple[int, ...]
    shows_pu: float
    lead_s: float
    lead_spread: float
    replaced_pu: float
    signs: tuple[Sign, ...]
    source: str


HOUR_S, DAY_S = 3600.0, 86400.0

# Failures per node and day in service, repeated ones and lemons included.
# source: arXiv 2410.21680, 6.50 per 1000 node-days in one cluster (2.34 in the other); the upper is taken
NODE_DAY_RATE = 6.5e-3

# source: cases of Llama 3 (arXiv 2407.21783, table 5): faulty GPU 148, HBM 72, SRAM 19, network 35,
# host maintenance 32, system processor 17, NIC 7, NCCL watchdog 7, silent corruption 6, thermal interface 6,
# SSD 3, supply 3, chassis 2, IO board 2, CPU 2, memory 2, dependency 2. Left out: 54 software bugs, which
# leave a node usable. The 148 are split by estimate into off_bus 70, nvlink 50, pcie 28.
FAILURES: tuple[FailureClass, ...] = (
    FailureClass(
        "off_bus", "gpu", 70, (79,), 0.30, 3 * HOUR_S, 1.0, 0.5,
        (Sign("gpu_silent", 0.8, 100.0, 0.5), Sign("node_silent", 0.4, 60.0, 0.5),
         Sign("gpu_pcie_replays", 0.15, 500.0, 1.0)),
        "arXiv 2603.28781: hardly any numeric precursor, telemetry goes missing; share and lead: estimate",
    ),
    FailureClass(
        "memory", "gpu", 97, (48, 64, 95), 0.50, 3 * DAY_S, 1.1, 0.6,
        (Sign("gpu_row_remaps", 0.6, 2.0, 0.6), Sign("xid 94", 0.3, 1.5, 0.6),
         Sign("gpu_sbe_count", 0.5, 300.0, 1.5)),
        "USENIX ATC 2024 (Wu et al.): corrected errors and uncorrectable ones hardly correlate in HBM, their "
        "places do; remaps and contained errors lead: NVIDIA GPU memory error management; figures: estimate",
    ),
    FailureClass(
        "nvlink", "gpu", 50, (74,), 0.60, 12 * HOUR_S, 1.2, 0.4,
        (Sign("gpu_nvlink_replays", 0.7, 600.0, 1.5), Sign("gpu_nvlink_errors", 0.6, 3000.0, 1.5),
         Sign("gpu_nvlink_recoveries", 0.5, 15.0, 0.8)),
        "arXiv 2503.11901: many NVLink errors are retried with success, some are not; figures: estimate",
    ),
    FailureClass(
        "thermal", "gpu", 6, (79,), 0.80, 6 * DAY_S, 0.8, 0.5,
        (Sign("gpu_plate_factor", 1.0, 0.8, 0.4), Sign("gpu_slowed", 0.6, 8.0, 0.6)),
        "arXiv 2603.28781: weak thermal drift before some failures; figures: estimate",
    ),
    FailureClass(
        "pcie", "gpu", 30, (79,), 0.50, 1 * DAY_S, 1.1, 0.4,
        (Sign("gpu_pcie_replays", 1.0, 200.0, 1.5), Sign("gpu_silent", 0.2, 20.0, 0.5)),
        "estimate: replays rise where a connector or riser is loose",
    ),
    FailureClass(
        "firmware", "gpu", 17, (119, 120), 0.10, 0.5 * HOUR_S, 0.8, 0.1,
        (Sign("gpu_silent", 1.0, 300.0, 0.5),),
        "arXiv 2503.11901: the system processor hangs suddenly; a driver that stalls: estimate",
    ),
    FailureClass(
        "power", "node", 5, (), 0.70, 2 * DAY_S, 1.2, 0.3,
        (Sign("psu_lost", 1.0, 1.0, 0.0),),
        "estimate: one of two supplies is lost before the other",
    ),
    FailureClass(
        "host", "node", 41, (), 0.25, 3 * DAY_S, 1.0, 0.3,
        (Sign("node_reboots", 0.7, 2.0, 0.5), Sign("node_silent", 0.5, 10.0, 0.5)),
        "estimate: some hosts reboot or stall before they stay away",
    ),
    FailureClass(
        "network", "node", 49, (), 0.50, 12 * HOUR_S, 1.2, 0.2,
        (Sign("link_flap_count", 0.7, 15.0, 0.8), Sign("link_error_count", 0.7, 5000.0, 1.5)),
        "estimate: ports flap and count errors before they stay down",
    ),
)  # fmt: skip
CLASSES = tuple(c.name for c in FAILURES)
KINDS = (*CLASSES, "rack", "feed")  # the last two are common causes of several nodes

# Lemons: 1.2 to 1.7 % of the nodes had 13 % of the failed jobs; source: arXiv 2410.21680. That share of all
# failures on 1.5 % of the nodes is ten times the rate of the others.
LEMON_PU, LEMON_FACTOR = 0.015, 10.0
LEMON_OWN_PU = 0.7  # of a lemon's failures are of one and the same class and device; source: estimate

# Repair: median 20 h and mean 133 h in a public trace of GPU servers; a lognormal with both
REPAIR_S, REPAIR_SPREAD = 20.0 * HOUR_S, 1.947
# In that trace 42 % of the nodes that failed did so again within 30 days, against 12 % of all
UNCURED_PU = 0.25  # of the repairs; with lemons it gives about that
AGAIN_S, AGAIN_SPREAD = 2.0 * DAY_S, 1.2  # until an uncured node fails again; source: estimate
TRIAGE_S = (300.0, 3600.0)  # from a failure until the node is switched off; source: estimate

# Causes in common; source: estimate
RACK_DAY_RATE, FEEDER_DAY_RATE = 2e-4, 1e-4
OUTAGE_S, OUTAGE_SPREAD = 2.0 * HOUR_S, 1.0

GAP_S, GAP_SPREAD = 150.0, 0.7  # how long telemetry is missing each time; source: estimate
REBOOT_S, REBOOT_SPREAD = 480.0, 0.3  # source: estimate
PENDING_S, PENDING_SPREAD = 1.0 * DAY_S, 1.0  # a remapped row waits for the reset; source: estimate


class Benign(NamedTuple):
    """Events without consequence: `per_day` of each entity of `table`.

    `size` (median; `spread` of the log) is a count at once, minutes of silence, or what a factor exceeds 1
    by, for hours. `over` > 0: rates differ from entity to entity by this spread of the log; `per_day` stays
    the mean.
    """

    what: str
    table: str
    per_day: float
    size: float
    spread: float
    over: float
    source: str


# source: NVIDIA's catalogue lays 13, 31, 43 and 45 on applications; rates: estimate, after domain reports
# that most of all XIDs are those
BENIGN: tuple[Benign, ...] = (
    Benign("xid 13", "gpu", 0.004, 1.0, 0.0, 1.0, "estimate"),
    Benign("xid 31", "gpu", 0.010, 1.0, 0.0, 1.0, "estimate"),
    Benign("xid 43", "gpu", 0.005, 1.0, 0.0, 1.0, "estimate"),
    Benign("xid 45", "gpu", 0.010, 1.0, 0.0, 1.0, "estimate"),
    Benign("gpu_row_remaps", "gpu", 0.0008, 1.0, 0.0, 1.5, "estimate"),
    Benign("xid 94", "gpu", 0.0004, 1.0, 0.0, 1.5, "estimate"),
    Benign("gpu_sbe_count", "gpu", 0.05, 3.0, 2.0, 2.0,
           "USENIX ATC 2024 (Wu et al.): storms on few devices; figures: estimate"),
    Benign("gpu_nvlink_replays", "gpu", 0.02, 50.0, 1.5, 1.0, "estimate"),
    Benign("gpu_nvlink_errors", "gpu", 0.005, 200.0, 1.5, 1.0, "estimate"),
    Benign("gpu_nvlink_recoveries", "gpu", 0.003, 1.0, 0.5, 1.0, "estimate"),
    Benign("gpu_pcie_replays", "gpu", 0.02, 5.0, 1.5, 1.0, "estimate"),
    Benign("gpu_silent", "gpu", 0.002, 2.5, 0.7, 1.0, "estimate"),
    Benign("node_silent", "node", 0.03, 4.0, 1.0, 0.5, "estimate"),
    Benign("node_plate_factor", "node", 0.003, 0.15, 0.5, 0.0, "estimate"),
    Benign("node_reboots", "node", 0.01, 1.0, 0.0, 0.5, "estimate"),
    Benign("maintenance", "node", 1.0 / 30.0, 1.0, 0.0, 0.0, "estimate: drivers are updated each month"),
    Benign("psu_lost", "node", 0.0003, 1.0, 0.0, 0.0, "estimate: replaced in time"),
    Benign("gpu_slowed", "gpu", 0.0005, 4.0, 0.7, 0.5, "estimate"),
    Benign("link_flap_count", "link", 0.005, 1.0, 0.7, 1.0, "estimate"),
    Benign("link_error_count", "link", 0.01, 300.0, 1.5, 1.0, "estimate"),
)  # fmt: skip
EXCURSION_S = (1.0 * HOUR_S, 6.0 * HOUR_S)  # of heat; source: estimate
SPARE_S, SPARE_SPREAD = 2.0 * DAY_S, 0.7  # until a lost supply is replaced; source: estimate
CRASH_PU, CRASH_GPUS = 0.5, 8  # of a user's XIDs come from a job that crashes on so many neighbours; estimate
