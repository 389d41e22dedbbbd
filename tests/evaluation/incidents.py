"""Open incidents: the findings of a run, and which of those that begin go on with an incident."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twin.contracts import GRAVITY, Finding, goes_on, trouble_of


@dataclass(slots=True)
class _Incident:
    finding: Finding
    gravest: str
    seen_ns: int


class OpenIncidents:
    """Looks on at findings by id, as the book of alarms does."""

    def __init__(self) -> None:
        self._incidents: dict[str, _Incident] = {}  # by trouble
        self._active: set[str] = set()

    def look(self, active: Mapping[str, Finding], now_ns: int) -> list[tuple[Finding, bool]]:
        """Return the findings that begin, by id, and whether each goes on with an incident."""
        begun: list[tuple[Finding, bool]] = []
        for identity in sorted(active.keys() - self._active):
            finding, known = active[identity], self._incidents.get(trouble_of(identity))
            again = known is not None and goes_on(
                finding, known.finding.entities, known.gravest, known.seen_ns, now_ns
            )
            if not again:
                self._incidents.pop(trouble_of(identity), None)
            begun.append((finding, again))
        for identity, finding in active.items():
            known = self._incidents.get(trouble_of(identity))
            graver = known is None or GRAVITY[finding.severity] > GRAVITY[known.gravest]
            gravest = finding.severity if known is None or graver else known.gravest
            self._incidents[trouble_of(identity)] = _Incident(finding, gravest, now_ns)
        self._active = set(active)
        return begun

    def begin(self) -> None:
        """Forget all incidents: a detector that looks for itself begins anew."""
        self._incidents, self._active = {}, set()
