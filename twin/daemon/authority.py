"""Authority book: the authority of each policy, as configured and as changed by operators.

The engine holds the authority in force, which is at most `advise` on standby. The book holds the authority
that applies when this daemon leads, and survives a restart.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from twin.catalogue import StorageError, clean
from twin.run import LEVELS, atomic_write

log = logging.getLogger(__name__)


def stricter(a: str, b: str) -> str:
    """Return the lower of two levels of authority."""
    return min(a, b, key=LEVELS.index)


def on_standby(level: str) -> str:
    """Authority of a policy while another daemon leads."""
    return stricter(level, "advise")


class AuthorityBook:
    """Levels per policy in `authority.json`, with what the configuration said when they were set.

    `decided_ns` is when people last set a policy's, here or at a leader whose place we took.
    """

    def __init__(self, folder: Path, configured: dict[str, str]) -> None:
        self.path, self.configured = folder / "authority.json", dict(configured)
        self.levels = dict(configured)
        self.decided_ns: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        for policy, (level, then, decided_ns) in self._read().items():
            if policy not in configured:
                continue
            self.decided_ns[policy] = decided_ns
            if then == configured[policy]:
                self.levels[policy] = level  # as people left it
            else:  # the file was edited since: neither the edit nor the person is overruled upwards
                self.levels[policy] = stricter(level, configured[policy])

    def _read(self) -> dict[str, tuple[str, str, int]]:
        try:
            tree = json.loads(self.path.read_text(encoding="utf-8"))
            entries = {
                p: (str(e["level"]), str(e["configured"]), int(e.get("decided_ns", 0)))
                for p, e in tree.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.error(
                "%s: cannot be read (%s); every policy is taken back to advise at most", self.path, error
            )
            return {p: (on_standby(level), level, 0) for p, level in self.configured.items()}
        unknown = [p for p, e in entries.items() if e[0] not in LEVELS or e[1] not in LEVELS]
        for policy in unknown:  # as a later version may have written
            level, present = entries[policy][0], self.configured.get(policy, "advise")
            entries[policy] = on_standby(level if level in LEVELS else present), present, 0
        if unknown:
            log.error(
                "%s: a level of %s is none of %s; taken back to advise at most",
                self.path,
                clean(", ".join(unknown), 200),
                ", ".join(LEVELS),
            )
        return entries

    def after(self, policy: str, level: str, decided_ns: int) -> str:
        """Authority of a policy after a leader that allowed it `level`, set by operators at `decided_ns`.

        The later decision of people holds, but none lets a policy do more than this daemon's own
        configuration, or than the leader before allowed.
        """
        if decided_ns > self.decided_ns.get(policy, 0):
            self.decided_ns[policy] = decided_ns
            return stricter(self.configured[policy], level)
        return stricter(self.levels[policy], level)

    def set(self, levels: dict[str, str]) -> None:
        """Keep the levels that operators decided. Raises StorageError if they cannot be kept."""
        if levels == self.levels and self.decided_ns == self._kept and self.path.exists():
            return
        self.levels, self._kept = dict(levels), dict(self.decided_ns)
        tree = {
            p: {"level": v, "configured": self.configured.get(p, v), "decided_ns": self.decided_ns.get(p, 0)}
            for p, v in levels.items()
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, json.dumps(tree, indent=1, sort_keys=True))
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error}") from error

    def reconfigure(self, configured: dict[str, str]) -> None:
        """Apply a new configuration: levels that changed in it take effect, higher or lower; the others stay.

        Raises StorageError where it cannot be kept; then nothing has changed.
        """
        was, levels = (self.configured, self.levels), dict(self.levels)
        for policy, level in configured.items():
            if self.configured.get(policy) != level:
                levels[policy] = level
        self.configured = dict(configured)
        try:
            self.set({p: v for p, v in levels.items() if p in configured})
        except StorageError:
            self.configured, self.levels = was
            raise
