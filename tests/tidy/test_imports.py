"""Imports run one way, as import-linter reads it; the same rules are checked file by file in test_tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy import tree

PACKAGES = ("twin", "twin/app", "twin/physics", "policies", "models", "connectors")


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own: import-linter changes the path and the logging of the one it runs in."""
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", command], cwd=root, capture_output=True, text=True, check=False
    )


def test_imports_run_one_way() -> None:
    answer = lint(tree.ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A tree of empty packages under the project's own configuration."""
    shutil.copy(tree.ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    for module in ("twin/units.py", "twin/app/cli.py", "policies/cap.py"):
        (tmp_path / module).write_text("")
    return tmp_path


def test_an_empty_tree_passes(small_tree: Path) -> None:
    answer = lint(small_tree)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("twin/brand_new.py", "import twin.app.cli"),
        ("twin/brand_new.py", "import policies.cap"),
        ("twin/deep.py", "def f():\n    import connectors"),
        ("twin/brand_new.py", "import time"),
        ("twin/brand_new.py", "from logging import getLogger"),
        ("twin/physics/brand_new.py", "import twin.units"),
        ("twin/physics/brand_new.py", "import random"),
        ("policies/brand_new.py", "import models"),
        ("policies/brand_new.py", "import asyncio"),
        ("models/brand_new.py", "import socket"),
        ("models/brand_new.py", "from twin.app import cli"),
        ("connectors/brand_new.py", "import policies.cap"),
    ],
)
def test_a_wrong_import_is_refused(small_tree: Path, module: str, line: str) -> None:
    (small_tree / module).write_text(line + "\n")
    answer = lint(small_tree)
    assert answer.returncode != 0
    assert "BROKEN" in answer.stdout, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("twin/app/brand_new.py", "import asyncio, time, policies.cap, twin.units"),
        ("connectors/brand_new.py", "import asyncio, twin.units"),
        ("policies/brand_new.py", "import policies.cap, twin.units, twin.physics"),
    ],
)
def test_a_right_import_passes(small_tree: Path, module: str, line: str) -> None:
    (small_tree / module).write_text(line + "\n")
    answer = lint(small_tree)
    assert answer.returncode == 0, answer.stdout + answer.stderr
