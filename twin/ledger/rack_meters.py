"""Rack meters: the ratio of a rack's meter to the meters of its nodes, compared with other racks of its kind.

The errors of the meters of a rack's nodes average out, that of its one meter does not. What a rack takes
beside its nodes differs little between racks of one profile: where the meters of several say so, each is
drawn towards their mean by as much as its own class allows (a mean of normal means, of which the spread
is estimated).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I64, Bool
from twin.site import Site
from twin.telemetry import EntityState, column

# 1 sigma of a power meter's gain: class 0.5, whose limits are taken as a 90 % interval; source: IEC 62053-22
GAIN_PU = 0.003
MEMORY_S = 86_400.0  # of the sums that are compared; source: estimate
LEAST_S = 600.0  # of both meters, before they are compared; source: estimate
LEAST_RACKS = 4  # of one profile, whose spread is significant; source: estimate
SPREAD_PU, LEAST_SPREAD_PU = (
    0.02,
    0.001,
)  # of racks beside their nodes: where unknown, and at least; estimates


class RackGain(NamedTuple):
    """Factor on each rack's metered energy [n], on that of its nodes for a rack without a meter [n], and
    1 sigma of either over the energy: of its own, and in common with the other racks [n].
    """

    meter: F64
    nodes: F64
    own_pu: F64
    common_pu: F64


class RackMeters(EntityState):
    """Sums of simultaneous readings of racks' meters and their nodes' meters, of about the last day."""

    meter_j: F64 = column("rack", "f8")
    nodes_j: F64 = column("rack", "f8")
    both_s: F64 = column("rack", "f8")

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        kinds = {name: i for i, name in enumerate(dict.fromkeys(site.profile_of_rack))}
        self._kind: I64 = np.array([kinds[name] for name in site.profile_of_rack], np.int64)

    def learn(self, meter_j: F64, nodes_j: F64, seconds: F64) -> None:
        """Add a look: energies of both, and the seconds in which both were read [n]; 0 for none."""
        longest_s = float(seconds.max(initial=0.0))
        if longest_s <= 0.0:
            return
        both = (seconds > 0.0) & (nodes_j > 0.0) & (meter_j > 0.0)
        keep = float(np.exp(-longest_s / MEMORY_S))
        for column_, new in ((self.meter_j, meter_j), (self.nodes_j, nodes_j), (self.both_s, seconds)):
            column_ *= keep
            column_ += np.where(both, new, 0.0)

    @property
    def compared(self) -> Bool:
        """Return the racks whose meter is compared with their nodes' [n_rack]."""
        return self.both_s >= LEAST_S

    def gain(self, off_pu: F64, sigma_pu: F64) -> RackGain:
        """The factors by what is known now. `off_pu`: by how much meters are known to read too little, but
        for `sigma_pu` [n].
        """
        n = len(self.meter_j)
        known = self.both_s >= LEAST_S
        metered = np.divide(self.meter_j, self.nodes_j, out=np.ones(n), where=known)
        ratio = metered * (1.0 + off_pu)
        meter, nodes = 1.0 + off_pu, np.where(known, ratio, 1.0)
        own, common = sigma_pu.copy(), np.zeros(n)
        for kind in np.unique(self._kind[known]).tolist():
            of = np.flatnonzero(self._kind == kind)
            some = of[known[of]]
            mean, sigma2 = float(ratio[some].mean()), sigma_pu[some] ** 2
            spread2 = SPREAD_PU**2  # of what racks take beside their nodes, and of the nodes' own meters
            if len(some) >= LEAST_RACKS:
                spread2 = max(
                    float(ratio[some].var(ddof=1)) / mean**2 - float(sigma2.mean()), LEAST_SPREAD_PU**2
                )
            weight = spread2 / (spread2 + sigma2)
            drawn = mean + weight * (ratio[some] - mean)
            meter[some], nodes[some] = drawn / metered[some], drawn
            nodes[of[~known[of]]] = mean
            own[some] = sigma_pu[some] * np.sqrt(weight)
            common[some] = (1.0 - weight) * np.sqrt((spread2 + sigma2) / len(some))
        return RackGain(meter, nodes, own, common)
