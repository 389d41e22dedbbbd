"""Imports run one way, as import-linter reads it; the same rules are checked file by file in test_tree."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.tidy import rules, tree

PACKAGES = ("twin", *(package.replace(".", "/") for line in rules.LAYERS for package in line))


# Product modules that still import modules of a policy in place of its explanation. The list only shrinks.
REMAINDER = {
    "twin/backtest/checkpoint_formulas.py",
    "twin/backtest/checkpoint_page.py",
    "twin/backtest/checkpoint_replay.py",
    "twin/backtest/power_curves.py",
    "twin/report/replacement_history.py",
    "twin/report/replacement_journal.py",
}


def imports_of_policies(root: Path) -> set[str]:
    """Modules outside policies that import more of them than the registry."""
    found = set()
    for path in tree.code(root):
        if not path.startswith(("twin/", "connectors/", "models/")):
            continue
        for node in ast.walk(ast.parse((root / path).read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.startswith("policies.") for name in names):
                found.add(path)
    return found


def test_the_product_knows_policies_by_their_registry_alone(tmp_path: Path) -> None:
    assert imports_of_policies(tree.ROOT) <= REMAINDER
    (tmp_path / "twin").mkdir()
    for name, line in (
        ("a", "import policies"),
        ("b", "from policies.cap import X"),
        ("c", "import policies.cap"),
    ):
        (tmp_path / "twin" / f"{name}.py").write_text(line + "\n")
    assert imports_of_policies(tmp_path) == {"twin/b.py", "twin/c.py"}


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
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").write_text("")
    for module in ("twin/catalogue/units.py", "twin/cli/main.py", "policies/cap.py"):
        (tmp_path / module).write_text("")
    return tmp_path


def test_an_empty_tree_passes(small_tree: Path) -> None:
    answer = lint(small_tree)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("twin/engine/brand_new.py", "import twin.cli.main"),
        ("twin/engine/brand_new.py", "import policies.cap"),
        ("twin/site/deep.py", "def f():\n    import connectors"),
        ("twin/health/brand_new.py", "import twin.alerts"),
        ("twin/telemetry/brand_new.py", "import time"),
        ("twin/control/brand_new.py", "from logging import getLogger"),
        ("twin/physics/brand_new.py", "import twin.catalogue.units"),
        ("twin/physics/brand_new.py", "import random"),
        ("policies/brand_new.py", "import models"),
        ("policies/brand_new.py", "import asyncio"),
        ("models/brand_new.py", "import socket"),
        ("models/brand_new.py", "from twin import cli"),
        ("connectors/brand_new.py", "import policies.cap"),
        ("twin/api/brand_new.py", "import twin.daemon"),
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
        ("twin/daemon/brand_new.py", "import asyncio, time, policies.cap, twin.catalogue.units"),
        ("connectors/brand_new.py", "import asyncio, twin.catalogue.units"),
        ("policies/brand_new.py", "import policies.cap, twin.catalogue.units, twin.physics"),
    ],
)
def test_a_right_import_passes(small_tree: Path, module: str, line: str) -> None:
    (small_tree / module).write_text(line + "\n")
    answer = lint(small_tree)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_package_has_its_layer_and_both_lists_of_layers_agree() -> None:
    settings = tomllib.loads((tree.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in settings["contracts"] if c["id"] == "layers")
    assert layers == [" | ".join(line) for line in rules.LAYERS]
    packages = {p.split("/")[1] for p in tree.code() if p.startswith("twin/") and p.count("/") > 1}
    assert packages == {name.removeprefix("twin.") for line in rules.LAYERS for name in line if "." in name}
