"""Instants: int64 nanoseconds since 1970, UTC. Imports nothing, so that a command starts without NumPy."""

from __future__ import annotations

NS = 1_000_000_000  # nanoseconds per second
START_NS = (
    1_767_225_600_000_000_000  # 2026-01-01T00:00:00Z: the nominal start of what brings no time of its own
)
