"""The packages that the page is built from, installed once into `build/page-packages` by Node's npm.

A test that wants them is skipped by name where there is no Node or no registry, and fails with CI=true.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CI

ROOT = Path(__file__).parents[2]
WEB = ROOT / "twin" / "web"
NAMED = ("package.json", "package-lock.json", ".npmrc")


def page_packages(server: Callable[..., Path]) -> Path:
    """A folder with the sources of the page and `node_modules`. Skips the test, or fails it in CI."""
    npm = server("npm")
    lock = hashlib.blake2b((WEB / "package-lock.json").read_bytes(), digest_size=8).hexdigest()
    folder = ROOT / "build" / "page-packages"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock_file:  # tests run beside each other
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        done = folder / "installed"
        if not done.exists() or done.read_text() != lock:
            for name in NAMED:
                shutil.copyfile(WEB / name, folder / name)
            command = [str(npm), "ci", "--no-audit", "--no-fund", "--loglevel", "error"]
            answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if answer.returncode:
                message = f"npm ci: {answer.stderr[-300:]}"
                if CI:
                    pytest.fail(message, pytrace=False)
                pytest.skip(f"the packages of the page cannot be installed here ({message})")
            done.write_text(lock)
    return folder
