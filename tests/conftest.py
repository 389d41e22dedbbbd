"""Fixtures and hooks of every test: recordings, servers, the order of the folders, settings of hypothesis.

A recording is a folder (`racktwin trace list`); a server is a program that a test starts, such as a broker.
A test whose recording or server is absent is skipped by name on a user's machine, and fails with CI=true, so
that nothing goes untested unnoticed. The end of a run lists what was missing.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest

FOLDERS = ("unit", "property", "contract", "physics", "golden", "sim", "scale", "tidy")
CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
# (what is missing, how to get it) -> the tests that wanted it
MISSING = pytest.StashKey[dict[tuple[str, str], set[str]]]()

# Threads of a library that wait for each other on a core that another test has take thirty times as long.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# The time of drawing examples depends on the other load of the machine, so no check judges it.
UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", derandomize=True, print_blob=True, **UNTIMED)
hypothesis.settings.register_profile("user", **UNTIMED)
hypothesis.settings.load_profile("ci" if CI else "user")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each of several workers begin with another part of a folder.

    A file of tests is then compiled once, by the worker that comes to it first.
    """
    report = yield
    work = getattr(collector.config, "workerinput", None)
    if work is not None and isinstance(collector, pytest.Directory) and report.passed:
        begin = len(report.result) * int(work["workerid"].removeprefix("gw")) // work["workercount"]
        report.result = report.result[begin:] + report.result[:begin]
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file together, and spread slow files over four fifths of the run.

    What the tests of a file share is then set up once. A test with a server or a daemon mostly waits: beside
    what computes, a core is seldom idle. No slow file is left over at the end.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slow = {path: sum(item.get_closest_marker("slow") is not None for item in files[path]) for path in files}
    order = sorted(files, key=lambda path: (_place(path), str(path)))
    place = {}
    for share, part in (
        (0.8, sorted((path for path in order if slow[path]), key=lambda path: -slow[path])),
        (1.0, [path for path in order if not slow[path]]),
    ):
        for k, path in enumerate(part):
            place[path] = share * (k + 0.5) / len(part)
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was collected: most of all objects, and none of it garbage."""
    gc.collect()
    gc.freeze()


def _place(path: Path) -> int:
    """Folder by folder."""
    here = Path(__file__).parent
    inside = path.relative_to(here).parts if path.is_relative_to(here) else ()
    folder = inside[0] if inside else ""
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def traces_folder() -> Path:
    """Return the folder of the recordings: RACKTWIN_TRACES, else a folder in the user's cache."""
    if chosen := os.environ.get("RACKTWIN_TRACES"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "racktwin" / "traces"


@pytest.fixture
def recording(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """`recording("grid-hourly")` is that recording's folder; absent: skips the test, or fails it in CI."""

    def find(name: str) -> Path:
        path = traces_folder() / name
        if not path.exists():
            whole = name.split("/", maxsplit=1)[0]
            remedy = f"`racktwin trace fetch {whole}`"
            _absent(request, f"recording {whole}", remedy, f"expected {path}")
        return path

    return find


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Callable[..., Path]:
    """`server("mosquitto")` is the path of that program; skips the test, or fails it in CI, if absent."""

    def find(name: str, package: str | None = None) -> Path:
        sbin = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"))
        path = shutil.which(name, path=sbin)
        if path is None:
            _absent(
                request, f"server {name}", f"`apt-get install {package or name}`", "expected it on the PATH"
            )
        return Path(path)

    return find


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers of histories try again, and look for what waits, after a moment."""
    for name, pause_s in (("RETRY_S", 0.01), ("MAX_RETRY_S", 0.1), ("LOOK_S", 0.01)):
        monkeypatch.setattr(f"connectors.send_lane.{name}", pause_s)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if CI and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config), "failures-at-once")


class _FailuresAtOnce:
    """Prints each failure when it happens, so that a run that is cut short still says why."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.when} of {report.nodeid} failed after {report.duration:.0f} s")
            terminal.write_line(report.longreprtext)


def _absent(request: pytest.FixtureRequest, what: str, remedy: str, expected: str) -> NoReturn:
    request.config.stash.setdefault(MISSING, {}).setdefault((what, remedy), set()).add(request.node.nodeid)
    message = f"{what} is not here: run {remedy} ({expected})"
    if CI:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of several hands over what was missing."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        missing = session.config.stash.get(MISSING, {})
        output["missing"] = [[*key, sorted(tests)] for key, tests in missing.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the recordings and servers that a worker missed, when the worker ends."""
    missing = node.config.stash.setdefault(MISSING, {})
    for what, remedy, tests in getattr(node, "workeroutput", {}).get("missing", ()):
        missing.setdefault((what, remedy), set()).update(tests)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    missing = config.stash.get(MISSING, {})
    if not missing:
        return
    terminalreporter.section("not here, so not tested")
    for (what, remedy), tests in sorted(missing.items()):
        verb = "failed" if CI else "skipped"
        terminalreporter.line(f"{what}: {len(tests)} test{'s' * (len(tests) > 1)} {verb}; remedy: {remedy}")
