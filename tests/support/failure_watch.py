"""Failures of nodes, looked at every ten seconds by hand.

watch = Watch()
watch.look.put(...)
watch.run(120.0)
watch.rows()
"""

from __future__ import annotations

from tests.support.builders import START_NS, eight_nodes, site_of, two_racks
from tests.support.health_contexts import Look
from twin.catalogue import NS
from twin.contracts import FAILURE_CLASSES
from twin.health.failures import Failures

SITE = site_of(two_racks())
SMALL = site_of(eight_nodes())


class Watch:
    """Failures, looked at every ten seconds."""

    def __init__(self, site=SITE) -> None:
        self.look, self.failures = Look(site), Failures(site)
        self.look.put("node.power_on_state", 1.0)
        self.look.put("node.service_level_state", 0.0)
        self.step()

    def step(self) -> None:
        self.failures.update(self.look, self.look, self.look)

    def run(self, seconds: float, every_s: float = 10.0) -> None:
        for _ in range(round(seconds / every_s)):
            self.look.pass_s(every_s)
            self.step()

    def rows(self) -> list[tuple[int, float, float | None, str]]:
        """(node, start s, end s, class) since the begin."""
        log = self.failures.log()
        return [
            (int(n), (a - START_NS) / NS, None if b == 0 else (b - START_NS) / NS, FAILURE_CLASSES[k])
            for n, a, b, k in zip(log.node.tolist(), log.start_ns.tolist(), log.end_ns.tolist(),
                                  log.kind.tolist(), strict=True)
        ]  # fmt: skip
