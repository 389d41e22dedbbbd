"""Site mirror: the state of a site as the stream reports it, event by event. Without input or output.

The web application keeps the same in `live.ts`; what counts as silent is the same there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LATE_S = 3.0  # without an update, or a tick, all that is shown is old
UPDATE_S = 1.5  # updates come each second
MOST_LINES = 200  # decisions that are kept
NOISE = ("daemon", "upkeep", "leader", "narrowed", "account")  # records of which nobody on duty asks


class MirrorChange(NamedTuple):
    """A topic that changed, and of racks their rows; `stale` if the racks of the site must be read anew."""

    topic: str
    rows: list[int] | None = None
    stale: bool = False


class SiteMirror:
    """All that is shown of a site but its details."""

    def __init__(self) -> None:
        self.layout: dict[str, Any] = {}
        self.columns: dict[str, list[Any]] = {}
        self.state: dict[str, Any] = {}
        self.state_s = 0.0
        self.alarms: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}
        self.alarms_total = 0
        self.lines: list[dict[str, Any]] = []
        self.missed = False

    def set_layout(self, tree: dict[str, Any]) -> None:
        """The answer of `GET /racks`."""
        self.layout, self.columns = tree, {k: list(v) for k, v in tree["columns"].items()}

    def take(self, kind: str, tree: dict[str, Any], now_s: float) -> MirrorChange:
        """Take an event of the stream."""
        if kind == "state":
            self.state = tree if tree.get("whole") else {**self.state, **tree}
            self.state_s = now_s
        elif kind == "racks":
            return self._take_racks(tree)
        elif kind == "alarms":
            self.alarms, self.counts, self.alarms_total = tree["alarms"], tree["counts"], tree["total"]
        elif kind == "decisions":
            self.add_lines(list(reversed(tree["decisions"])))
        elif kind == "missed":
            self.missed = True
            return MirrorChange("decisions")
        return MirrorChange(kind)

    def add_lines(self, newest_first: list[dict[str, Any]]) -> None:
        """Decisions that came, the newest first."""
        wanted = [line for line in newest_first if line["kind"] not in NOISE]
        self.lines = [*wanted, *self.lines][:MOST_LINES]

    def _take_racks(self, tree: dict[str, Any]) -> MirrorChange:
        if self.layout.get("site_hash") != tree["site_hash"]:
            return MirrorChange("racks", stale=True)
        rows: set[int] = set()
        for name, part in tree["columns"].items():
            if "all" in part:
                old, self.columns[name] = self.columns.get(name, []), list(part["all"])
                if len(old) != len(part["all"]):
                    return MirrorChange("racks")
                rows.update(i for i, (a, b) in enumerate(zip(old, part["all"], strict=True)) if a != b)
            else:
                for i, value in zip(part["at"], part["to"], strict=True):
                    self.columns[name][i] = value
                rows.update(part["at"])
        return MirrorChange("racks", sorted(rows))

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the last tick; None before the first state."""
        return self.state["ticks"]["age_s"] + now_s - self.state_s if self.state else None

    def silence(self, now_s: float, received_s: float) -> str:
        """Return the reason for old or missing data, or "". `received_s`: last message of the stream."""
        age_s = self.age_s(now_s)
        if age_s is None:
            return ""
        silent_s = now_s - received_s
        late_s = max(LATE_S, 3 * self.state["ticks"]["every_s"])
        if silent_s > LATE_S or (age_s > late_s and silent_s > UPDATE_S):
            return f"No update from the daemon for {silent_s:.0f} s: the values shown are old"
        return (
            f"The daemon has not ticked for {age_s:.0f} s: the values shown are old" if age_s > late_s else ""
        )

    def budget_w(self) -> tuple[float | None, bool]:
        """The power that the site may draw, and whether one side carries it alone."""
        sides = self.state.get("supply", [])
        alone = [s["budget_w"] for s in sides if s["side"] and s["budget_w"] is not None]
        if len(alone) == 2:
            return min(alone), True
        return (sides[0]["budget_w"] if sides else None), False

    def sum_of(self, name: str) -> float:
        """The sum of a column of racks, over those that are known."""
        return float(sum(v for v in self.columns.get(name, []) if v is not None))

    def power_w(self) -> float | None:
        """The power of all racks that are read; None where none is."""
        known = [v for v in self.columns.get("power_w", []) if v is not None]
        return float(sum(known)) if known else None

    def least_margin(self) -> tuple[str, float] | None:
        """The rack that is nearest below its guard, and by how many K."""
        margins = self.columns.get("margin_k", [])
        known = [(v, i) for i, v in enumerate(margins) if v is not None]
        if not known:
            return None
        margin_k, row = min(known)
        return self.layout["names"][row], margin_k
