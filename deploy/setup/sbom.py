"""Bill of materials: every package of the lock files, Python's and the page's, as CycloneDX 1.5 in JSON.

python deploy/setup/sbom.py >build/sbom.json

Needs neither the network nor anything that is not in Python. The same locks give the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The lock of a package says whether it is at a site, or only where racktwin is built and tested
LOCKS = {
    "requirements.lock": "required",
    "requirements-torch.txt": "optional",
    "requirements-dev.lock": "excluded",
}
PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def python_packages() -> Iterator[dict[str, Any]]:
    """Packages of the lock files, each once. Raises ValueError for one without a hash."""
    seen: set[str] = set()
    for file, scope in LOCKS.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        for block in re.split(r"\n(?=\S)", text):
            found = PINNED.match(block)
            if found is None:
                continue
            name, version = re.sub(r"[-_.]+", "-", found[1]).lower(), found[2]
            hashes = HASH.findall(block)
            if not hashes and file.endswith(".lock"):
                raise ValueError(f"{file}: {name}=={version} has no hash; expected one by `make lock`")
            if name not in seen:
                seen.add(name)
                yield component(f"pkg:pypi/{name}@{version}", name, version, scope, sorted(hashes))


def page_packages() -> Iterator[dict[str, Any]]:
    """Packages that the page is built of; those that only build it are no part of it."""
    tree = json.loads((ROOT / "twin/web/package-lock.json").read_text(encoding="utf-8"))
    for path, package in sorted(tree["packages"].items()):
        name = path.rpartition("node_modules/")[2]
        if name:
            scope, purl = "excluded" if package.get("dev") else "required", name.replace("@", "%40")
            reference = f"pkg:npm/{purl}@{package['version']}"
            yield component(reference, name, package["version"], scope, [package.get("integrity", "")])


def component(purl: str, name: str, version: str, scope: str, hashes: list[str]) -> dict[str, Any]:
    """A component; `hashes` are those of its files, of which any may be installed."""
    kept = [{"name": "lock:hash", "value": value} for value in hashes if value]
    head = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return head | {"scope": scope, "properties": kept}


def bill() -> dict[str, Any]:
    """The bill of this tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parts = sorted([*python_packages(), *page_packages()], key=lambda part: part["purl"])
    content = json.dumps(parts, sort_keys=True)
    own = {"type": "application", "name": project["name"], "version": project["version"]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": own},
        "components": parts,
    }


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=1)
    print()
