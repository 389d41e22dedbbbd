"""The built page in the wheel is what its sources give, and names nobody outside."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.page_packages import WEB, page_packages


@pytest.mark.long
def test_the_sources_give_the_same_bytes_again(server: Callable[..., Path], tmp_path: Path) -> None:
    node, packages = server("node", "nodejs"), page_packages(server)
    shutil.copytree(WEB, tmp_path / "web", ignore=shutil.ignore_patterns("node_modules", "assets"))
    (tmp_path / "web" / "node_modules").symlink_to(packages / "node_modules")
    for command in (["node_modules/.bin/tsc", "--noEmit"], ["build.mjs"]):
        answer = subprocess.run(
            [str(node), *command], cwd=tmp_path / "web", capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
    built = {p.name: p.read_bytes() for p in (tmp_path / "web" / "assets").iterdir()}
    kept = {p.name: p.read_bytes() for p in (WEB / "assets").iterdir()}
    assert built.keys() == kept.keys()
    assert [n for n in kept if built[n] != kept[n]] == [], "run `make page` and commit twin/web/assets"


def test_the_built_page_asks_nobody_outside() -> None:
    for path in (WEB / "assets").iterdir():
        text = path.read_text()
        found = set(re.findall(r"https?://[\w.-]+", text)) - {"http://www.w3.org"}  # the name of SVG's space
        assert not {f for f in found if not re.search(rf"[/*].*{re.escape(f)}", text)}, path.name
        assert "sourceMappingURL" not in text
        assert not re.search(r"@import|url\((?!data:)", text) or path.suffix == ".js", path.name


def test_the_lock_pins_every_package_by_its_hash() -> None:
    text = (WEB / "package-lock.json").read_text()
    assert '"resolved"' not in text
    blocks = text.split('"node_modules/')[1:]
    assert len(blocks) > 5
    assert all('"integrity"' in block for block in blocks)
