"""Evaluation stands outside the product: no module that ships imports it, and the daemon loads none of it."""

from __future__ import annotations

import subprocess
import sys

from tests.tidy import rules, tree

# The daemon fits in a process of its own; these libraries, rivals and backtests are never part of it.
FOREIGN = ("torch", "sklearn", "statsmodels", "scipy", "pandas", "tests", "twin.backtest", "models.backtest")
MOST_LINES = 15_000

DAEMON = """
import pkgutil, sys
import models.failure, models.load, twin.cli.run, twin.daemon.daemon
for package in (models.load, models.failure):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        __import__(module.name)
from twin.config.engine import make_models
from twin.site.file import SiteFile
assert make_models(SiteFile("s"))
print(*sorted(sys.modules), sep="\\n")
"""


def test_no_module_that_ships_imports_a_test_or_an_evaluation() -> None:
    wrong = [
        f"{source.path}: {name}"
        for source in rules.sources(p for p in tree.code() if "tests" in (tree.text(p) or ""))
        for _, name in rules.imports(source.nodes)
        if name.split(".")[0] == "tests"
    ]
    assert wrong == []


def test_the_daemon_loads_no_rival_no_backtest_and_no_library_of_statistics() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DAEMON], cwd=tree.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "twin.daemon.daemon" in loaded
    assert "models.load.blend" in loaded
    wrong = [name for name in loaded if f"{name}.".startswith(tuple(f"{one}." for one in FOREIGN))]
    assert wrong == []
    assert [name for name in loaded if "lstm" in name or "rival" in name] == []


def test_the_evaluation_stays_small() -> None:
    found = [
        path
        for path in tree.files()
        if path.startswith("tests/evaluation/") and path.endswith(".py") and "/test_" not in path
    ]
    assert found
    assert sum((tree.text(path) or "").count("\n") for path in found) <= MOST_LINES
