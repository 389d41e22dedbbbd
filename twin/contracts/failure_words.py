"""Failure classes: their names, the ones that count as failures, and the job ends that indicate one."""

from __future__ import annotations

import numpy as np

from twin.catalogue import Bool
from twin.contracts.health_records import FailureLog

FAILURE_CLASSES = ("off_bus", "memory", "link", "thermal", "power", "software", "silent", "taken_out",
                   "other", "restarted")  # fmt: skip
# Rows of these classes are kept, as a node was not to be used, but are no failures of a node
NO_FAILURES = ("software", "taken_out", "restarted")
# A node that was silent and is well again by itself within this has restarted: it cost its jobs their work
# since the last checkpoint, and nobody repairs anything. source: estimate
RESTARTED_S = 1800.0
NODE_ENDS = ("node_fail", "boot_fail")  # of jobs whose node failed, in the words of Slurm


def is_failure(log: FailureLog) -> Bool:
    """Rows that are failures of a node [k]: all but those of the classes in `NO_FAILURES`."""
    none = [log.classes.index(c) for c in NO_FAILURES if c in log.classes]
    return ~np.isin(log.kind, none)
