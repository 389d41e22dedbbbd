"""The files that the house rules cover: what git tracks or would track, else every file of the tree."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("twin", "policies", "connectors", "models", "deploy")
_GENERATED = {".git", ".venv", "build", "dist", "__pycache__", "node_modules"}


def files(root: Path = ROOT) -> list[str]:
    """Paths from `root`, sorted: tracked files and new ones that are not ignored."""
    # A copy without .git that lies inside another repository is no part of that one.
    if (root / ".git").exists():
        listing = ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"]
        try:
            answer = subprocess.run(listing, capture_output=True, check=True, text=True)
        except (OSError, subprocess.CalledProcessError):
            return walk(root)
        return sorted({p for p in answer.stdout.split("\0") if p and (root / p).is_file()})
    return walk(root)


def walk(root: Path) -> list[str]:
    """The same without git: leaves out what tools write."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            f
            for f in folders
            if f not in _GENERATED and not f.endswith(("_cache", ".egg-info", ".hypothesis"))
        ]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names]
    return sorted(found)


def code(root: Path = ROOT) -> list[str]:
    """The Python files that ship."""
    return [p for p in files(root) if p.endswith(".py") and p.split("/", maxsplit=1)[0] in CODE]


def suite(root: Path = ROOT) -> list[str]:
    """The Python files of the tests and evaluations."""
    return [p for p in files(root) if p.startswith("tests/") and p.endswith(".py")]


def text(path: str, root: Path = ROOT) -> str | None:
    """The text of a file, or None if it is none."""
    try:
        return (root / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
