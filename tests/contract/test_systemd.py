"""The unit and the installation under a real systemd, booted in a container.

Where this machine allows no container, the tests are skipped and say why; what needs no container is tested
everywhere.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.systemd_container import VENV, Container, NotHere

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "racktwin.service"
AGENT = ROOT / "deploy" / "agent" / "racktwin-agent.service"
DAEMON = """
import sys
from twin.cli.main import main
sys.exit(main())
"""
# Quick enough for a test; ticks are a second long.
IMPATIENT = """
[Service]
WatchdogSec=4
TimeoutAbortSec=1
RestartSec=0.2
"""
CONFIG = """
site: site.yaml
broker: embedded
simulated: true
history: {quota_mb: 50}
"""


@pytest.mark.parametrize(("unit", "tenths"), [(UNIT, 15), (AGENT, 30)], ids=["daemon", "agent"])
def test_a_unit_is_hardened(server: Callable[..., Path], unit: Path, tenths: int) -> None:
    """At most so much exposure, of 100, by systemd's own count."""
    analyse = server("systemd-analyze", "systemd")
    answer = subprocess.run(
        [analyse, "security", "--offline=true", f"--threshold={tenths}", "--no-pager", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr
    assert "Overall exposure level" in answer.stdout


@pytest.mark.parametrize("shipped", [UNIT, AGENT], ids=["daemon", "agent"])
def test_a_unit_says_only_what_systemd_understands(
    server: Callable[..., Path], tmp_path: Path, shipped: Path
) -> None:
    """`verify` names unknown settings on stderr and ends with 0 all the same."""
    analyse = server("systemd-analyze", "systemd")
    unit = tmp_path / shipped.name
    unit.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", shipped.read_text()))
    answer = subprocess.run([analyse, "verify", str(unit)], capture_output=True, text=True, check=False)
    complaints = [line for line in answer.stderr.splitlines() if shipped.name in line]
    assert (answer.returncode, complaints) == (0, [])


@pytest.fixture
def container(server: Callable[..., Path], tmp_path: Path) -> Iterator[Container]:
    server("systemd-nspawn", "systemd-container")
    made = Container(tmp_path)
    made.script(f"{VENV}/bin/racktwin", DAEMON)
    drop_in = made.files / "etc/systemd/system/racktwin.service.d"
    drop_in.mkdir(parents=True)
    (drop_in / "test.conf").write_text(IMPATIENT)
    try:
        booted = made.__enter__()
    except NotHere as error:
        pytest.skip(f"no systemd in a container: {error}")
    try:
        yield booted
    finally:
        made.__exit__()


def eventually(
    condition: Callable[[], object], what: str, container: Container, deadline_s: float = 30.0
) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(
                f"not within {deadline_s:g} s: {what}\n{container.journal('racktwin')[-6000:]}"
            )
        time.sleep(0.1)


def start(container: Container, verb: str = "start") -> int:
    """Start the service, which returns when it says that it is ready; its process."""
    answer = container.run("systemctl", verb, "racktwin", check=False)
    assert answer.returncode == 0, answer.stderr + container.journal("racktwin")[-6000:]
    return int(container.show("racktwin", "MainPID")["MainPID"])


def last_tick(container: Container) -> int:
    """The tick after which the daemon stopped, by its log."""
    found: list[str] = re.findall(r"stopped after tick (\d+)", container.journal("racktwin"))
    assert found, container.journal("racktwin")[-6000:]
    return int(found[-1])


@pytest.mark.long
def test_the_life_of_the_service(container: Container) -> None:
    install = "/opt/racktwin-source/deploy/install.sh"
    said = container.run(install, "--venv", VENV).stdout
    assert "wrote /usr/local/lib/systemd/system/racktwin.service" in said
    assert "nothing to change" in container.run(install, "--venv", VENV).stdout
    # The installed files start unchanged.
    start(container)
    container.run("systemctl", "stop", "racktwin")
    assert (
        container.run("stat", "-c", "%U:%G %a", "/etc/racktwin/site.yaml").stdout.strip()
        == "root:racktwin 640"
    )
    container.run("sh", "-c", f"cat >/etc/racktwin/racktwin.yaml <<'END'\n{CONFIG}END")
    container.run("sed", "-i", "s/^site: .*/site: lab/", "/etc/racktwin/site.yaml")

    # Ready: `start` of a Type=notify service returns only then.
    first = start(container)
    state = container.show("racktwin", "ActiveState", "User", "StatusText", "NRestarts")
    assert (state["ActiveState"], state["User"], state["NRestarts"]) == ("active", "racktwin", "0")
    owner = container.run("stat", "-c", "%U", f"/proc/{first}").stdout.strip()
    assert owner == "racktwin"
    listing = container.run("stat", "-c", "%U %a", "/var/lib/racktwin").stdout.strip()
    assert listing == "racktwin 750"

    # Reload: the same process, and it says that it did; a faulty file changes nothing.
    container.run("systemctl", "reload", "racktwin")
    eventually(lambda: "configuration reloaded" in container.journal("racktwin"), "reload", container)
    container.run("sh", "-c", "echo 'sight: x' >>/etc/racktwin/racktwin.yaml")
    container.run("systemctl", "reload", "racktwin")
    eventually(lambda: "the old one stays" in container.journal("racktwin"), "refusal", container)
    assert container.show("racktwin", "MainPID")["MainPID"] == str(first)
    container.run("sed", "-i", "/sight/d", "/etc/racktwin/racktwin.yaml")

    # Watchdog: a process that no longer ticks is ended and started again.
    container.run("kill", "-STOP", str(first))
    eventually(
        lambda: container.show("racktwin", "NRestarts", "ActiveState")
        == {"NRestarts": "1", "ActiveState": "active"},
        "a restart by the watchdog", container,
    )  # fmt: skip
    assert "Watchdog timeout" in container.journal("racktwin")
    second = int(container.show("racktwin", "MainPID")["MainPID"])
    assert second != first

    # Stop: clean, so before TimeoutStopSec.
    container.run("systemctl", "stop", "racktwin")
    state = container.show("racktwin", "ActiveState", "Result")
    wanted = {"ActiveState": "inactive", "Result": "success"}
    assert state == wanted, container.journal("racktwin")[-6000:]
    stopped_at = last_tick(container)

    # Again: it goes on where it was. With a broker of one's own, the lock that keeps a second daemon from
    # acting is where that one looks for it.
    container.run(
        "sed", "-i", "s/^broker:.*/broker: {host: localhost, port: 1}/", "/etc/racktwin/racktwin.yaml"
    )
    start(container)
    locks = container.run("sh", "-c", "stat -c '%U %a' /run/lock/racktwin-lab-*.lock").stdout.split()
    assert locks == ["racktwin", "640"]
    container.run("systemctl", "stop", "racktwin")
    assert last_tick(container) > stopped_at

    # A faulty configuration is not tried over and over.
    container.run("sh", "-c", "echo 'sight: x' >>/etc/racktwin/racktwin.yaml")
    container.run("systemctl", "start", "racktwin", check=False)
    assert container.show("racktwin", "ActiveState", "ExecMainStatus", "NRestarts") == {
        "ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0"}  # fmt: skip

    container.run(install, "--uninstall")
    assert container.run("ls", "/var/lib/racktwin").stdout.split()
    assert not container.run("systemctl", "cat", "racktwin", check=False).stdout.count("ExecStart=/opt")
