"""The wheel holds the four packages with their data, and nothing else; the locks cover what is declared."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.tidy import tree

PACKAGES = {"twin", "policies", "connectors", "models"}


@pytest.mark.long
def test_the_wheel_holds_the_four_packages_and_their_data(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not here: run `make test`, which installs it")
    clone = tmp_path / "clone"
    for path in tree.files():
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree.ROOT / path, clone / path)
    (clone / "twin" / "profiles").mkdir(parents=True, exist_ok=True)
    (clone / "twin" / "profiles" / "made-up.yaml").write_text("schema: 1\n")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    answer = subprocess.run(build, cwd=clone, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (wheel,) = (tmp_path / "dist").glob("racktwin-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    compiled = "twin/kernels/_native.abi3.so" in names
    assert compiled == ("-cp311-abi3-" in wheel.name) != wheel.name.endswith("-py3-none-any.whl"), wheel.name
    tops = {n.split("/", maxsplit=1)[0] for n in names}
    present = {p.split("/", maxsplit=1)[0] for p in tree.code()} & PACKAGES
    assert {t for t in tops if not t.endswith(".dist-info")} == present
    assert "twin/profiles/made-up.yaml" in names
    for asset in ("twin/web/assets/app.js", "connectors/exporters/dcgm.yaml", "twin/config/schema.py"):
        assert asset in names
    assert [n for n in names if n.startswith("twin/web/") and "/assets/" not in n] == [], (
        "sources do not ship"
    )
    check_outside(wheel, tmp_path / "elsewhere")
    assert [n for n in names if "evaluation" in n or "lstm" in n] == [], "evaluation does not ship"
    assert {n for n in names if n.endswith(".py")} >= {p for p in tree.code() if not p.startswith("deploy/")}


def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    script = tmp_path / "hatch_build.py"
    shutil.copyfile(tree.ROOT / "hatch_build.py", script)
    (tmp_path / "twin" / "kernels").mkdir(parents=True)
    shutil.copyfile(tree.ROOT / "twin/kernels/native.c", tmp_path / "twin/kernels/native.c")
    stale = tmp_path / "twin" / "kernels" / "_native.abi3.so"
    stale.write_bytes(b"of another source")
    answer = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": str(tmp_path)},
    )
    assert (answer.returncode, answer.stderr.strip()) == (1, "no C compiler (cc, gcc, clang, or $CC)")
    assert not stale.exists()


OUTSIDE = """
import sys
from pathlib import Path
import twin
from twin.cli.main import main
from twin.simulation import subprocesses
assert Path(twin.__file__).parent.parent == Path(sys.argv[1]), twin.__file__
assert (subprocesses.AGENT / "racktwin_agent" / "__init__.py").is_file(), subprocesses.AGENT
subprocesses.need_agent()
assert main(["init", "site", "--yes", "--broker", "none", "--no-slurm", "--profile", "gb200-nvl72"]) == 0
assert main(["daemon", "check", "--config", "site/racktwin.yaml"]) == 0
"""


def check_outside(wheel: Path, folder: Path) -> None:
    """The wheel works without a checkout around it: guided start, profiles, schema, the demo's agents."""
    zipfile.ZipFile(wheel).extractall(folder)
    paths = [str(folder), *(p for p in sys.path if p.endswith("site-packages"))]
    program = f"import sys; sys.path[1:1] = {paths!r}\n{OUTSIDE}"
    answer = subprocess.run(
        [sys.executable, "-S", "-P", "-c", program, str(folder)],
        cwd=folder, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr


def locked(name: str) -> dict[str, str]:
    """Package -> version of a lock file; every one with its hashes."""
    text = (tree.ROOT / name).read_text()
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    blocks = re.split(r"^(?=[a-z0-9-]+==)", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pins)
    assert all("--hash=sha256:" in block for block in blocks)
    return pins


def wanted(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9-]", r, maxsplit=1)[0].lower() for r in requirements}


def test_the_locks_cover_what_is_declared() -> None:
    project = tomllib.loads((tree.ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    run, dev = locked("requirements.lock"), locked("requirements-dev.lock")
    assert wanted(project["project"]["dependencies"] + groups["build"]) <= run.keys()
    assert wanted(groups["dev"] + groups["docs"]) <= dev.keys()
    assert run.items() <= dev.items(), "the two locks differ: run `make lock`"
    optional = [r for extra in project["project"]["optional-dependencies"].values() for r in extra]
    assert not wanted(optional) & run.keys(), "an extra is installed by default"


def test_an_extra_has_one_exact_version_that_is_tested() -> None:
    """That of the lock of the tests, or of a file of its own for what is too large for each run."""
    from packaging.requirements import Requirement

    project = tomllib.loads((tree.ROOT / "pyproject.toml").read_text())["project"]
    for extra, declared in project["optional-dependencies"].items():
        if wanted(declared) <= locked("requirements-dev.lock").keys():
            continue
        lines = (tree.ROOT / f"requirements-{extra}.txt").read_text().splitlines()
        pins = {Requirement(line).name: line for line in lines if line and not line.startswith("#")}
        assert pins.keys() == {Requirement(r).name for r in declared}
        for requirement in map(Requirement, declared):
            name, _, version = pins[requirement.name].partition("==")
            assert (name, requirement.specifier.contains(version)) == (requirement.name, True)


def test_the_version_is_told_once_and_the_same() -> None:
    import tomllib

    from tests.tidy.tree import ROOT
    from twin import VERSION

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
