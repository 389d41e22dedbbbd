"""Features: what is known of each node that may tell of a failure to come, as numbers.

May import the fault book, rates, verdicts, lemons, records and the moment.
"""

from __future__ import annotations

import numpy as np

from twin.health.fault_book import FaultBook
from twin.health.lemons import Lemons
from twin.health.now import Now
from twin.health.rates import Rates
from twin.health.records import FailureLog, NodeFeatures
from twin.health.verdicts import Verdicts

NAMES = ("level",)


def node_features(
    now: Now, book: FaultBook, rates: Rates, verdicts: Verdicts, lemons: Lemons, failures: FailureLog
) -> NodeFeatures:
    """Features of all nodes at this moment."""
    return NodeFeatures(NAMES, verdicts.health("node").level[:, None].astype(np.float32))
