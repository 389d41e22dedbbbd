"""The client in processes of their own: full disks, forks, signals, ranks and what is shipped."""

from __future__ import annotations

import ast
import json
import pickle
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from racktwin_client.advisor import Advisor

from tests.support.checkpoint_advice import CLIENT, advice, built_wheel, made, put, reports, run, wait

__all__ = ["made"]
FULL = """
import resource, sys, time
import racktwin_client.advisor as client
terms = dict(own_interval_s=0.001, poll_s=0.02, least_interval_s=0.001, rank=0)
advisor = client.Advisor("j", "file://" + sys.argv[1], **terms)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
made = 0
while made < 20 or not advisor.problem:
    if advisor.due():
        made += 1
        with advisor.saving():
            pass
        time.sleep(0.01)
assert "not written whole" in advisor.problem or "large" in advisor.problem, advisor.problem
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
while advisor.problem:
    time.sleep(0.01)
advisor.close()
"""


def test_a_disk_that_is_full_and_then_is_not(tmp_path: Path) -> None:
    answer = run(FULL, str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    whole, torn = 0, 0
    for line in (tmp_path / "j.reports.jsonl").read_text().splitlines():
        try:
            whole += json.loads(line)["v"]
        except ValueError:
            torn += 1
    assert whole >= 20
    assert torn <= 1 + answer.stderr.count("whole")  # a torn line ends where the next begins


def test_what_waits_is_sent_at_the_end_even_without_close(tmp_path: Path) -> None:
    script = (
        "import sys, racktwin_client.advisor as c\n"
        "a = c.Advisor('j', 'file://' + sys.argv[1], own_interval_s=9, rank=0)\n"
        "with a.saving(): pass\n"
    )
    assert run(script, str(tmp_path)).returncode == 0
    assert any(r["began_ns"] for r in reports(tmp_path))


FORK = """
import os, sys, time, racktwin_client.advisor as c
a = c.Advisor("j", "file://" + sys.argv[1], own_interval_s=0.05, most_interval_s=9.0, poll_s=0.02, rank=0)
while a.interval_s != 5.0:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    assert a.interval_s == 0.05
    time.sleep(0.06)
    assert a.due(1)
    with a.saving(): pass
    a.close()
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0
assert a.interval_s == 5.0 and not a.due(1)
a.close()
"""


def test_a_forked_process_keeps_the_own_interval_and_asks_nobody(tmp_path: Path) -> None:
    put(tmp_path, advice(interval_s=5.0))
    # Python 3.12 and later warn of a fork beside threads, which is what happens here.
    answer = run(FORK.replace("import os", "import warnings; warnings.simplefilter('ignore')\nimport os", 1),
                 str(tmp_path))  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert not any(r["began_ns"] for r in reports(tmp_path))


def test_a_copy_keeps_the_own_interval(tmp_path: Path, made: Callable[..., Advisor]) -> None:
    put(tmp_path, advice(interval_s=5.0))
    advisor = made()
    wait(lambda: advisor.interval_s == 5.0)
    copy: Advisor = pickle.loads(pickle.dumps(advisor))
    assert copy.interval_s == 1000.0
    assert not copy.due(1)
    copy.close()


def test_a_signal_may_save_in_the_midst_of_it(made: Callable[..., Advisor]) -> None:
    advisor, heard = made(), []

    def preempted(*_: object) -> None:
        heard.append(advisor.due(1))
        with advisor.saving():
            pass

    before = signal.signal(signal.SIGALRM, preempted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        until = time.monotonic() + 0.3
        while time.monotonic() < until or len(heard) < 10:
            advisor.due(1)
            with advisor.saving():
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert advisor.problem == ""


def test_only_rank_0_decides_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_PROCID", "0")
    before = threading.active_count()
    other = Advisor("j", f"file://{tmp_path}", own_interval_s=0.0001)
    assert threading.active_count() == before
    time.sleep(0.01)
    assert not other.due(1)
    assert other.due(1, broadcast=lambda mine: True)
    monkeypatch.delenv("RANK")
    first = Advisor("j", "", own_interval_s=0.0001)
    time.sleep(0.01)
    assert first.due(1, broadcast=lambda mine: mine)
    with pytest.raises(RuntimeError, match="ranks"):
        first.due(1, broadcast=_lost)


def _lost(mine: bool) -> bool:
    raise RuntimeError("the other ranks are gone")


def test_no_thread_no_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    advisor = Advisor("j", f"file://{tmp_path}", own_interval_s=0.0001, rank=0)
    time.sleep(0.01)
    assert advisor.due()
    advisor.close()


def test_the_client_is_of_the_standard_library_for_python_3_9() -> None:
    adapters = {"mqtt", "torch_ranks", "lightning", "transformers"}  # and what these need
    for path in sorted((CLIENT / "racktwin_client").glob("*.py")):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        used = {x.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for x in n.names}
        used |= {str(n.module).split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        if path.stem not in adapters:
            assert used - {"racktwin_client"} <= sys.stdlib_module_names, path


def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    (wheel,) = built_wheel(tmp_path)
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in n]
    package = CLIENT / "racktwin_client"
    assert sorted(names) == sorted(f"racktwin_client/{p.name}" for p in package.iterdir() if p.is_file())
    metadata = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "Name: racktwin-client\n" in text
    assert [line for line in text.splitlines() if line.startswith("Requires-Dist")] == [
        "Requires-Dist: paho-mqtt<3,>=1.6; extra == 'mqtt'"
    ]
