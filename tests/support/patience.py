"""Patience: how long a test waits for a condition. Only a test that fails waits so long.

A machine that is ten times slower than usual must not fail a test: tests wait for what should come about,
and say nothing of how long it takes.
"""

from __future__ import annotations

PATIENCE_S = 240.0
