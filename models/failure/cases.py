"""Training cases of a hazard: the features of a node, its forecast, and the outcome.

Nodes that show anything unusual are sampled often at first and then ever more rarely, quiet ones thinly and
in turn; each case stands for so much time of so many nodes as its weight says, so that sums over cases are
sums over the fleet. The hour before each failure is kept whole beside that. Which case is taken depends on
nothing that came after it; outcomes are filled in once they have settled. Bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from twin.catalogue import F32, I32, I64, NS, Bool, ContractError

MOST = 60_000  # cases. source: estimate; bounds memory and the time of a fit
SLOT_S = 600.0  # between two looks; the unit of weights
SLOT_NS = round(SLOT_S * NS)
RAREST = 36  # slots between samples of a node that stays unusual: 6 h. source: estimate
QUIET_PER_DAY = 240  # samples of quiet nodes. source: estimate; 60,000 last most of a year
SLOTS_PER_DAY = 144
KEPT_NS = 120 * 86_400 * NS  # source: estimate; a fleet of four months ago was another
LONGEST_NS = 30 * 86_400 * NS  # horizon; what comes later is no outcome
# Until the cause and the sharers of a failure are known, and whether it was a mere restart (RESTARTED_S and
# the time that a node must be well). source: estimate
SETTLED_NS = 2700 * NS
RECENT, RECENT_SLOTS = (
    5,
    2,
)  # images of all nodes, and slots between them: they cover the hour before a failure
HOUR_NS = 3600 * NS
LARGEST = 60_000.0  # of half precision, with room. Differences below a thousandth say nothing
UNUSUAL, QUIET, BEFORE = 0, 1, 2  # how a case was taken; the last: in the hour before a failure
_KINDS: dict[str, Any] = {
    "node": np.int32,
    "t_ns": np.int64,
    "weight": np.float32,
    "how": np.uint8,
    "failed_ns": np.int64,
    "lost_ns": np.int64,
}
_OPEN = {"failed_ns": 0, "lost_ns": 0}


def half_precision(values: F32) -> Any:
    """Return features in half precision; non-finite ones are unknown."""
    with np.errstate(over="ignore", invalid="ignore"):
        held = np.clip(values, -LARGEST, LARGEST).astype(np.float16)
    held[~np.isfinite(values)] = np.nan
    return held


class CaseLog:
    """Cases of n nodes with features of these names, and so many probabilities that were said of each."""

    def __init__(self, n: int = 0, names: tuple[str, ...] = (), n_said: int = 0) -> None:
        self.n, self.names, self.n_said = n, names, n_said
        self.k = 0
        self.columns: dict[str, Any] = {name: np.zeros(0, kind) for name, kind in _KINDS.items()}
        self.columns["x"] = np.zeros((0, len(names)), np.float16)
        self.columns["said"] = np.zeros((0, n_said), np.float32)
        self.slot = -1  # the newest that was looked at
        self.settled_ns = 0  # failures up to here have been added to the cases
        self.next_slot = np.zeros(n, np.int64)  # of a node that stays unusual
        self.gap = np.ones(n, np.int64)  # slots until then
        self.signs = np.zeros(n, np.uint8)  # unusual features at the last sample
        self.recent: list[tuple[int, Any, F32, Bool]] = []  # (instant, features, said, up) of all nodes

    def rename(self, names: tuple[str, ...]) -> None:
        """Take features of these names from now on; of earlier cases a feature that is new is unknown."""
        old = [self.names.index(name) if name in self.names else -1 for name in names]
        pick = np.array(old, np.int64)

        def of(x: Any) -> Any:
            moved = np.full((len(x), len(names)), np.nan, np.float16)
            moved[:, pick >= 0] = x[:, pick[pick >= 0]]
            return moved

        self.names, self.columns["x"] = names, of(self.columns["x"])
        self.recent = [(t_ns, of(x), said, up) for t_ns, x, said, up in self.recent]

    def get(self, name: str) -> Any:
        """Return a column of all cases. Read only."""
        return self.columns[name][: self.k]

    def due(self, now_ns: int) -> bool:
        """Return True if a new slot has begun."""
        return now_ns // SLOT_NS != self.slot

    def sample(self, now_ns: int, values: F32, signs: I64, said: F32, up: Bool) -> None:
        """Take samples of this slot. values [n, n_feature], signs [n]: unusual features, said [n, n_said]."""
        self.slot = slot = now_ns // SLOT_NS
        signs = np.minimum(signs, 255)
        odd = up & (signs > 0)
        fresh = signs > self.signs
        self.gap[fresh | ~odd] = 1
        taken = np.flatnonzero(odd & (fresh | (slot >= self.next_slot)))
        self._append(now_ns, taken, values, said, self.gap[taken], UNUSUAL)
        self.next_slot[taken] = slot + self.gap[taken]
        self.gap[taken] = np.minimum(2 * self.gap[taken], RAREST)
        self.signs[taken] = signs[taken]
        self.signs[~odd] = 0
        period = max(RAREST, -(-self.n * SLOTS_PER_DAY // QUIET_PER_DAY))
        # Nodes take turns in an order of their own, so that no rack is looked at in one go.
        turn = np.arange(self.n, dtype=np.int64) * 2_654_435_761 % 2**32 % period
        quiet = np.flatnonzero((turn == slot % period) & up & ~odd)
        self._append(now_ns, quiet, values, said, np.full(len(quiet), period), QUIET)
        if not self.recent or slot - self.recent[-1][0] // SLOT_NS >= RECENT_SLOTS:
            self.recent = [
                *self.recent[-(RECENT - 1) :],
                (now_ns, half_precision(values), said.copy(), up.copy()),
            ]

    def _append(self, t_ns: int, nodes: Any, values: F32, said: F32, weight: I64, how: int) -> None:
        if len(nodes):
            rows = {"node": nodes, "t_ns": t_ns, "weight": weight, "how": how, "said": said[nodes]}
            self._add(rows | {"x": half_precision(values[nodes]), **_OPEN}, len(nodes), t_ns)

    def _add(self, rows: Mapping[str, Any], count: int, now_ns: int) -> None:
        count = min(count, MOST // 4)
        if self.k + count > MOST:
            self._thin(now_ns)
        if self.k + count > MOST:
            self._keep(np.arange(self.k) >= self.k + count - 3 * MOST // 4)
        room = len(self.columns["node"])
        if self.k + count > room:
            room = min(max(2 * room, self.k + count, 1024), MOST)
            for name, column in self.columns.items():
                grown = np.zeros((room, *column.shape[1:]), column.dtype)
                grown[: self.k] = column[: self.k]
                self.columns[name] = grown
        for name, column in self.columns.items():
            given = rows[name]
            column[self.k : self.k + count] = given[:count] if isinstance(given, np.ndarray) else given
        self.k += count

    def _thin(self, now_ns: int) -> None:
        """Make room: drop old cases, and every second case without a failure; its neighbour gets its
        weight."""
        self._keep(self.get("t_ns") >= now_ns - KEPT_NS)
        if self.k <= 3 * MOST // 4:
            return
        keep, weight = np.ones(self.k, np.bool_), self.get("weight")
        for how in (UNUSUAL, QUIET):
            well = np.flatnonzero((self.get("failed_ns") == 0) & (self.get("how") == how))
            first, second = well[0 : len(well) - len(well) % 2 : 2], well[1::2]
            weight[first] += weight[second]
            keep[second] = False
        self._keep(keep)

    def _keep(self, mask: Bool) -> None:
        count = int(mask.sum())
        if count == self.k:
            return
        for column in self.columns.values():
            column[:count] = column[: self.k][mask]
        self.k = count

    def settle(self, node: I32, start_ns: I64, failed: Bool, now_ns: int) -> None:
        """Set outcomes: from these instants on, nodes had failed, or could no longer be observed.

        Rows in order of start; those that were added before, or have not settled, are left out.
        """
        upto_ns = now_ns - SETTLED_NS
        new = np.flatnonzero((start_ns > self.settled_ns) & (start_ns <= upto_ns))
        self.settled_ns = max(self.settled_ns, upto_ns)
        for i in new[np.argsort(start_ns[new], kind="stable")].tolist():
            at_ns = int(start_ns[i])
            if failed[i]:
                self._before(int(node[i]), at_ns, now_ns)
            self._close(self.get("node") == node[i], at_ns, bool(failed[i]))

    def _before(self, node: int, at_ns: int, now_ns: int) -> None:
        """Return the images of the hour before a failure; together they weigh that hour."""
        hour = [image for image in self.recent if at_ns - HOUR_NS <= image[0] < at_ns and image[3][node]]
        for t_ns, x, said, _ in hour:
            rows = {"node": node, "t_ns": t_ns, "weight": HOUR_NS / SLOT_NS / len(hour), "how": BEFORE}
            self._add(rows | {"x": x[node][None], "said": said[node][None], **_OPEN}, 1, now_ns)

    def _close(self, which: Bool, at_ns: int, failed: bool) -> None:
        """Close the open outcome of these cases."""
        open_ = which & (self.get("failed_ns") == 0) & (self.get("lost_ns") == 0)
        open_ &= (self.get("t_ns") < at_ns) & (self.get("t_ns") >= at_ns - LONGEST_NS)
        self.get("failed_ns" if failed else "lost_ns")[open_] = at_ns

    def lose(self, nodes: Any, at_ns: int) -> None:
        """Drop the open outcomes of nodes under maintenance, or replaced."""
        self._close(np.isin(self.get("node"), nodes), at_ns, False)
        for _, _, _, up in self.recent:
            up[nodes] = False
        self.gap[nodes], self.next_slot[nodes], self.signs[nodes] = 1, 0, 0

    def remapped(self, old_of_new: I32, now_ns: int) -> CaseLog:
        """Return the cases on another site: those of removed nodes still teach, but stay open."""
        out = CaseLog(len(old_of_new), self.names, self.n_said)
        new_of_old = np.full(self.n, -1, np.int32)
        kept = np.flatnonzero(old_of_new >= 0)
        new_of_old[old_of_new[kept]] = kept
        gone = np.flatnonzero(new_of_old < 0)
        self.lose(gone, now_ns)
        out.k, out.slot, out.settled_ns = self.k, self.slot, self.settled_ns
        out.columns = {name: column[: self.k].copy() for name, column in self.columns.items()}
        node = out.columns["node"]
        node[:] = np.where(node >= 0, new_of_old[node], -1)
        for name in ("next_slot", "gap", "signs"):
            getattr(out, name)[kept] = getattr(self, name)[old_of_new[kept]]
        for t_ns, x, said, up in self.recent:
            moved = out._blank()
            for new, old in zip(moved, (x, said, up), strict=True):
                new[kept] = old[old_of_new[kept]]
            out.recent.append((t_ns, *moved))
        return out

    def _blank(self) -> tuple[Any, Any, Any]:
        x = np.full((self.n, len(self.names)), np.nan, np.float16)
        said = np.full((self.n, self.n_said), np.nan, np.float32)
        return x, said, np.zeros(self.n, np.bool_)

    def named(self) -> np.ndarray:
        """Return the features' names as bytes."""
        return np.frombuffer("\n".join(self.names).encode() or b"", np.uint8)

    def memory(self, recent: bool = True) -> dict[str, np.ndarray]:
        """Return everything, as copies; the images only if `recent`. Half precision is written as
        integers."""
        out = {name: self.get(name).copy() for name in self.columns}
        out["x"] = out["x"].view(np.uint16)
        out |= {name: getattr(self, name).copy() for name in ("next_slot", "gap", "signs")}
        images = self.recent if recent else []
        out["at"] = np.array([self.slot, self.settled_ns, len(images)], np.int64)
        out["names"] = self.named()
        for i, (t_ns, x, said, up) in enumerate(images):
            image = {"t_ns": np.array([t_ns]), "x": x.view(np.uint16), "said": said, "up": up.copy()}
            out |= {f"recent{i}.{name}": array for name, array in image.items()}
        return out

    @classmethod
    def restored(cls, memory: Mapping[str, np.ndarray]) -> CaseLog:
        """Return the cases of `memory`. Raises ContractError, KeyError or ValueError for anything else."""
        names = tuple(bytes(memory["names"]).decode().split("\n")) if len(memory["names"]) else ()
        out = cls(len(memory["gap"]), names, memory["said"].shape[1])
        out.k = len(memory["node"])
        for name, column in out.columns.items():
            held = np.array(memory[name])
            held = held.view(np.float16) if name == "x" else held
            if held.shape != (out.k, *column.shape[1:]) or held.dtype != column.dtype:
                raise ContractError(f"cases: {name}: of another kind")
            out.columns[name] = held
        for name in ("next_slot", "gap", "signs"):
            setattr(out, name, np.array(memory[name]))
        slot, settled_ns, images = memory["at"].tolist()
        out.slot, out.settled_ns = slot, settled_ns
        for i in range(min(images, RECENT)):
            x, said, up = (np.array(memory[f"recent{i}.{what}"]) for what in ("x", "said", "up"))
            out.recent.append((int(memory[f"recent{i}.t_ns"][0]), x.view(np.float16), said, up))
        return out
