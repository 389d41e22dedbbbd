"""The set-up of .venv in a small clone, with a Python that pretends: levels, extras, stamps, what is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extras import needs_chdb, needs_torch

ROOT = Path(__file__).parents[2]

# Answers what venv.sh asks of an interpreter; `-m venv DIR` makes a DIR/bin/python that is this one again.
PYTHON = """#!/bin/bash
case "$*" in
    *version_info*) echo 3.11 ;;
    *sys.version*) echo 3.11.7 ;;
    "-m venv "*)
        mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"
        cp "$0" "$3/bin/python"
        echo venv >>"$LOG" ;;
    *"pip install"*)
        echo "${@:4}" >>"$LOG"
        if [[ $* == *requirements-torch.txt ]]; then
            [[ -z ${HALF:-} ]] || mkdir .venv/lib/python3.11/site-packages/sympy
            [[ -z ${KILL:-} ]] || kill -9 $PPID
            [[ -z ${FAIL:-} ]] || exit 1
            mkdir -p .venv/lib/python3.11/site-packages/torch
        fi ;;
esac
"""
BASE = [
    "--require-hashes --only-binary :all: -r requirements-dev.lock",
    "--no-deps --no-build-isolation -e .",
]
TORCH = "--only-binary :all: -c .venv/.limits -r requirements-torch.txt"
LOCK = """\
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:00
    # via click
numpy==2.4.6 \\
    --hash=sha256:01 \\
    --hash=sha256:02
"""


class Clone:
    """A folder with venv.sh, what it reads, and a log of what it had installed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.python = folder / "clone", folder / "log", folder / "python3"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        self.script = self.folder / "deploy" / "setup" / "venv.sh"
        self.script.parent.mkdir(parents=True)
        shutil.copy(ROOT / "deploy" / "setup" / "venv.sh", self.script)
        for name in ("requirements.lock", "requirements-dev.lock"):
            (self.folder / name).write_text(LOCK)
        (self.folder / "pyproject.toml").write_text("")
        (self.folder / "requirements-torch.txt").write_text("torch==2.13.0\n")

    def set_up(self, *arguments: str, code: int = 0, **variables: str) -> list[str]:
        """Return the packages that this run had installed."""
        self.log.write_text("")
        environment = {**os.environ, "LOG": str(self.log), "PYTHON": str(self.python), **variables}
        answer = subprocess.run(
            [str(self.script), *arguments], env=environment, capture_output=True, text=True, check=False
        )
        self.said = answer.stderr
        assert answer.returncode == code, answer.stdout + answer.stderr
        return [line.removeprefix("-qq ") for line in self.log.read_text().splitlines()]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_second_run_does_nothing_and_an_extra_comes_on_top(clone: Clone) -> None:
    assert clone.set_up("dev", "") == ["venv", *BASE]
    assert clone.set_up("dev", "") == []
    assert clone.set_up("dev", "torch") == [TORCH]
    for arguments in (("dev", "torch"), ("dev", ""), ("run", "torch"), ("run",), ("dev", " torch,torch ")):
        assert clone.set_up(*arguments) == [], arguments


def test_a_first_run_with_an_extra_installs_all(clone: Clone) -> None:
    assert clone.set_up("dev", "torch") == ["venv", *BASE, TORCH]
    assert clone.set_up("dev", "torch") == []


def test_the_locked_versions_limit_what_an_extra_brings(clone: Clone) -> None:
    clone.set_up("dev", "torch")
    limits = (clone.folder / ".venv" / ".limits").read_text().splitlines()
    assert limits == ["colorama==0.4.6 ; sys_platform == 'win32'", "numpy==2.4.6"]


def test_only_what_changed_is_installed_anew(clone: Clone) -> None:
    clone.set_up("dev", "torch")
    (clone.folder / "requirements-torch.txt").write_text("torch==2.14.0\n")
    assert clone.set_up("dev") == []
    assert clone.set_up("dev", "torch") == [TORCH]
    (clone.folder / "pyproject.toml").write_text("[project]\n")
    assert clone.set_up("dev", "torch") == BASE
    with (clone.folder / "requirements-dev.lock").open("a") as lock:
        lock.write("rich==15.0.0 \\\n    --hash=sha256:03\n")
    assert clone.set_up("dev", "torch") == [*BASE, TORCH]


@pytest.mark.parametrize("extras", ["fit", "torch fit", "Torch", "../torch", "*"])
def test_an_unknown_extra_is_refused_before_anything_is_made(clone: Clone, extras: str) -> None:
    assert clone.set_up("dev", extras, code=1) == []
    assert "unknown extra" in clone.said
    assert "expected EXTRAS to be none or some of: torch" in clone.said
    assert not (clone.folder / ".venv").exists()


def test_an_extra_that_cannot_be_had_leaves_the_rest_sound(clone: Clone) -> None:
    clone.set_up("dev")
    assert clone.set_up("dev", "torch", code=1, FAIL="yes") == [TORCH]
    assert "without EXTRAS the tests that want it are skipped" in clone.said
    assert clone.set_up("dev") == []
    assert clone.set_up("dev", "torch") == [TORCH]


@pytest.mark.parametrize("end", [{"HALF": "yes", "FAIL": "yes"}, {"KILL": "yes"}], ids=["half", "killed"])
def test_an_extra_installed_by_half_is_not_built_upon(clone: Clone, end: dict[str, str]) -> None:
    clone.set_up("dev")
    clone.set_up("dev", "torch", code=-9 if "KILL" in end else 1, **end)
    assert clone.set_up("dev", "torch") == ["venv", *BASE, TORCH]


def test_a_test_that_wants_pytorch_is_skipped_by_name_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delenv("RACKTWIN_EXTRAS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="make test EXTRAS=torch"):
        needs_torch()
    monkeypatch.setenv("RACKTWIN_EXTRAS", "torch")
    with pytest.raises(pytest.fail.Exception, match="PyTorch is not here"):
        needs_torch()


def test_a_test_that_wants_chdb_is_skipped_by_name_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chdb", None)
    monkeypatch.delenv("RACKTWIN_EXTRAS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="make test EXTRAS=chdb"):
        needs_chdb()
    monkeypatch.setenv("RACKTWIN_EXTRAS", "torch,chdb")
    with pytest.raises(pytest.fail.Exception, match="ClickHouse in process is not here"):
        needs_chdb()


@pytest.mark.slow
def test_the_version_that_is_tested_is_the_one_that_is_here() -> None:
    torch = needs_torch()
    text = (ROOT / "requirements-torch.txt").read_text()
    (pin,) = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert f"torch=={torch.__version__.partition('+')[0]}" == pin
