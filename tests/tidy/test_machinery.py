"""The machinery of conftest.py does what it says: tried on a small suite, each time in its own process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest
from tests.tidy import tree

SUITE = {
    "tidy/test_z.py": "def test_last(): pass\n",
    "sim/test_s.py": (
        "import pytest\n@pytest.mark.storm\ndef test_storm(): pass\n"
        "@pytest.mark.long\ndef test_long(): pass\n"
    ),
    "golden/test_g.py": (
        "def test_replay(recording):\n    assert recording('grid-hourly').is_dir()\n"
        "def test_again(recording):\n    assert recording('grid-hourly/eu').exists()\n"
    ),
    "contract/test_c.py": "def test_broker(server):\n    server('no-such-broker', 'its-package')\n",
    "unit/test_u.py": "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\ndef test_first(): pass\n",
}
# Its tests tell of each time that they are set up
SHARED = """
import pytest
@pytest.fixture(scope="module")
def shared():
    with open("set_up.txt", "a") as file:
        file.write("once\\n")
{mark}
@pytest.mark.parametrize("case", range(6))
def test_case(shared, case): pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A copy of conftest.py and of the settings of pytest, with a few tests."""
    shutil.copy(tree.ROOT / "pyproject.toml", tmp_path)
    for path, text in SUITE.items():
        (tmp_path / "tests" / path).parent.mkdir(parents=True)
        (tmp_path / "tests" / path).write_text(text)
    shutil.copy(tree.ROOT / "tests" / "conftest.py", tmp_path / "tests")
    return tmp_path


def run(suite: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("CI", "RACKTWIN_TRACES", "PYTEST_ADDOPTS")
    }
    environment |= {"XDG_CACHE_HOME": str(suite / "cache"), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_what_is_missing_is_skipped_and_listed_by_name_by_whichever_worker_missed_it(suite: Path) -> None:
    answer = run(suite, "-n", "2", "--maxschedchunk", "1")
    assert answer.returncode == 0, answer.stdout
    assert (
        "recording grid-hourly: 2 tests skipped; remedy: `racktwin trace fetch grid-hourly`" in answer.stdout
    )
    assert "server no-such-broker: 1 test skipped; remedy: `apt-get install its-package`" in answer.stdout
    assert "3 passed, 3 skipped" in answer.stdout


def test_what_is_missing_fails_in_ci_and_files_with_slow_tests_run_among_the_others(suite: Path) -> None:
    answer = run(suite, "-v", CI="true")
    assert answer.returncode == 1
    assert "3 failed, 3 passed, 2 deselected" in answer.stdout, "long tests and storms run when asked for"
    assert "recording grid-hourly: 2 tests failed" in answer.stdout
    assert re.findall(r"^tests/\S+::(\w+) (?:PASSED|FAILED)", answer.stdout, re.MULTILINE) == [
        "test_broker", "test_slow", "test_first", "test_replay", "test_again", "test_last",
    ]  # fmt: skip


def test_a_slow_file_of_the_last_folder_is_not_left_over_at_the_end(suite: Path) -> None:
    text = "import pytest\n@pytest.mark.slow\ndef test_it_waits(): pass\n"
    (suite / "tests" / "tidy" / "test_y.py").write_text(text)
    answer = run(suite, "-v", CI="true")
    names = re.findall(r"^tests/\S+::(\w+) (?:PASSED|FAILED)", answer.stdout, re.MULTILINE)
    assert names.index("test_it_waits") < names.index("test_last") == len(names) - 1, names


def test_long_tests_run_by_their_own_target(suite: Path) -> None:
    answer = run(suite, "-m", "long", CI="true")
    assert "1 passed, 7 deselected" in answer.stdout, answer.stdout


@pytest.mark.long
def test_what_the_tests_of_a_file_share_is_set_up_once_however_many_run_at_once(suite: Path) -> None:
    for name, mark in (("a", "@pytest.mark.slow"), ("b", "")):
        (suite / "tests" / "unit" / f"test_{name}.py").write_text(SHARED.format(mark=mark))
    (spread,) = re.findall(r"^SPREAD := (.+)", (tree.ROOT / "Makefile").read_text(), re.MULTILINE)
    for jobs in ("0", "3"):
        answer = run(suite, "-n", jobs, *spread.split())
        assert "15 passed" in answer.stdout, answer.stdout
        assert (suite / "set_up.txt").read_text() == "once\n" * 2, jobs
        (suite / "set_up.txt").unlink()


def test_recordings_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RACKTWIN_TRACES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert conftest.traces_folder() == Path("/var/cache/racktwin/traces")
    monkeypatch.setenv("RACKTWIN_TRACES", "/srv/traces")
    assert conftest.traces_folder() == Path("/srv/traces")
