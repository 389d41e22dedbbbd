"""The bill of materials names all that the lock files name, once, and is the same each time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def text() -> str:
    script = ROOT / "deploy" / "setup" / "sbom.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    return done.stdout


def test_every_locked_package_is_in_it_once(text: str) -> None:
    bill: dict[str, Any] = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    known = [part["purl"] for part in bill["components"]]
    assert len(known) == len(set(known))
    for file, scope in (("requirements.lock", "required"), ("requirements-dev.lock", None)):
        for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", (ROOT / file).read_text(), re.M):
            (part,) = [p for p in bill["components"] if p["purl"] == f"pkg:pypi/{name}@{version}"]
            assert scope in (None, part["scope"])
            assert part["properties"], "any file of it has a hash"
    page = [part for part in bill["components"] if part["purl"].startswith("pkg:npm/")]
    assert {part["name"] for part in page if part["scope"] == "required"} >= {
        "preact",
        "uplot",
        "@dagrejs/dagre",
    }


def test_it_is_the_same_each_time(text: str) -> None:
    script = ROOT / "deploy" / "setup" / "sbom.py"
    again = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert again.stdout == text
