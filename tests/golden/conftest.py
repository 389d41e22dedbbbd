"""One recording of the story for all golden tests, and the CLI in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.golden_story import Kept, record
from twin.engine import Engine
from twin.run import Outcome

ROOT = Path(__file__).parents[2]
# Libraries of statistics belong into workers: a replay must not even need to have them.
BLOCKED = ("sklearn", "statsmodels", "pandas", "scipy", "matplotlib")
BLOCKER = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(name + " is blocked here")
sys.meta_path.insert(0, Blocker())
from twin.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Run:
    """The story as recorded: its folder, what was decided, how it ended."""

    folder: Path
    engine: Engine
    outcome: Outcome
    kept: Kept


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("golden") / "run"
    kept = Kept(checksums=True)
    engine, outcome = record(folder, kept=kept)
    return Run(folder, engine, outcome, kept)


@pytest.fixture
def blocked_cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`blocked_cli("1", "trace", "replay", ...)` runs it under that hash seed, without these libraries."""

    def call(seed: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", BLOCKER, *map(str, args)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call
