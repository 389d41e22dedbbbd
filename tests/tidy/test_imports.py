"""Imports run one way, as import-linter reads it; the same rules are checked file by file in test_tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
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


def imports_of_policies(sources: Iterable[rules.Source]) -> set[str]:
    """Modules outside policies that import more of them than the registry."""
    return {
        source.path
        for source in sources
        if source.path.startswith(("twin/", "connectors/", "models/"))
        and any(name.startswith("policies.") for name in (n for _, n in rules.imports(source.nodes)))
    }


def test_the_product_knows_policies_by_their_registry_alone() -> None:
    named = [p for p in tree.code() if "policies." in (tree.text(p) or "")]
    assert imports_of_policies(rules.sources(named)) <= REMAINDER
    lines = {"a": "import policies", "b": "from policies.cap import X", "c": "import policies.cap"}
    small = [rules.Source(f"twin/{name}.py", line + "\n") for name, line in lines.items()]
    assert imports_of_policies(small) == {"twin/b.py", "twin/c.py"}


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


WRONG = [
    ("twin/engine/upward.py", "import twin.cli.main"),
    ("twin/engine/policy.py", "import policies.cap"),
    ("twin/site/deep.py", "def f():\n    import connectors"),
    ("twin/health/beside.py", "import twin.alerts"),
    ("twin/telemetry/clock.py", "import time"),
    ("twin/control/log.py", "from logging import getLogger"),
    ("twin/physics/upward.py", "import twin.catalogue.units"),
    ("twin/physics/chance.py", "import random"),
    ("policies/beside.py", "import models"),
    ("policies/loop.py", "import asyncio"),
    ("models/network.py", "import socket"),
    ("models/upward.py", "from twin import cli"),
    ("connectors/beside.py", "import policies.cap"),
    ("twin/api/upward.py", "import twin.daemon"),
]
RIGHT = [
    ("twin/daemon/brand_new.py", "import asyncio, time, policies.cap, twin.catalogue.units"),
    ("connectors/brand_new.py", "import asyncio, twin.catalogue.units"),
    ("policies/brand_new.py", "import policies.cap, twin.catalogue.units, twin.physics"),
]


def test_right_imports_pass(small_tree: Path) -> None:
    for module, line in RIGHT:
        (small_tree / module).write_text(line + "\n")
    answer = lint(small_tree)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_each_wrong_import_is_refused(small_tree: Path) -> None:
    for module, line in WRONG:
        (small_tree / module).write_text(line + "\n")
    answer = lint(small_tree)
    assert answer.returncode != 0
    refused = set(re.findall(r"^-? +([\w.]+) -> ", answer.stdout, re.MULTILINE))
    assert refused == {m.removesuffix(".py").replace("/", ".") for m, _ in WRONG}, answer.stdout


def test_every_package_has_its_layer_and_both_lists_of_layers_agree() -> None:
    settings = tomllib.loads((tree.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in settings["contracts"] if c["id"] == "layers")
    assert layers == [" | ".join(line) for line in rules.LAYERS]
    packages = {p.split("/")[1] for p in tree.code() if p.startswith("twin/") and p.count("/") > 1}
    assert packages == {name.removeprefix("twin.") for line in rules.LAYERS for name in line if "." in name}
