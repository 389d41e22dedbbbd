"""The wheel racktwin-client in an environment of its own, and a job that no scheduler knows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import two_racks
from tests.support.checkpoint_advice import CLIENT, built_wheel
from tests.support.daemon_process import RunningDaemon
from tests.support.mosquitto import Mosquitto, mosquitto
from twin.api.tokens import add_token

pytestmark = pytest.mark.slow
SITE = two_racks(policies={"operator": {"authority": "act"}})
INTERVAL = "job.checkpoint_interval_s"


REFUSED = """
import sys, racktwin_client
a = racktwin_client.Advisor("my-run", sys.argv[1], 600.0, nodes=["lab/h/r1/node0"])
print(a.first_answer())
a.close()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("client")
    (wheel,) = built_wheel(folder)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    there = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        there,
    ]
    subprocess.run([*install, str(wheel)], check=True)
    return python


def bare(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "SLURM_PROCID")}
    return kept | more


@pytest.mark.long
def test_the_environment_has_the_standard_library_alone(python: Path) -> None:
    script = (
        "import sys, racktwin_client as c; import importlib.metadata as m;"
        "print(sorted(d.name for d in m.distributions()), c.__file__, 'numpy' in sys.modules)"
    )
    said = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.startswith("['racktwin-client'] ")
    assert str(CLIENT) not in said


@pytest.fixture
def broker(server: Callable[..., Path], tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(server, tmp_path) as running_broker:
        yield running_broker


def started(tmp_path: Path, broker: int) -> tuple[RunningDaemon, dict[str, str]]:
    """A daemon with tokens, not yet started; the tokens."""
    tokens = tmp_path / "tokens.yaml"
    secrets = {"root": add_token(tokens, "root", "admin")}
    secrets |= {name: add_token(tokens, name, "job") for name in ("job.my-run", "tenant.ann", "job.other")}
    daemon = RunningDaemon(tmp_path / "d", broker, SITE)
    daemon.config["api"]["tokens_file"] = str(tokens)
    daemon.write_config()
    (tmp_path / "d" / "state").mkdir(parents=True)
    (tmp_path / "d" / "state" / "admin.token").write_text(secrets["root"])
    return daemon, secrets


# Left to the reader of the page: the twin's address, batches until an interval was heard, quick looks.
PRELUDE = """
import racktwin_client.advisor, sys, time
racktwin_client.advisor.Advisor.__init__.__kwdefaults__.update(poll_s=0.2, least_interval_s=0.1)

def until_advised():
    while advisor.interval_s == 1800.0:
        time.sleep(0.05)
        yield None
    for _ in range(2):
        yield None

batches, train, save_checkpoint = until_advised(), print, lambda step: time.sleep(0.01)
"""


def page_lines() -> str:
    """The first block of code of the page that starts a user off."""
    text = (CLIENT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"(?:^ {4}.*\n|^\n)+", text[text.index("    from racktwin_client") :], re.M)
    assert block is not None
    code = textwrap.dedent(block[0]).strip()
    assert len([line for line in code.splitlines() if line]) <= 10, "ten lines"
    return code


@pytest.mark.long
def test_ten_lines_from_import_to_the_first_interval(python: Path, broker: Mosquitto, tmp_path: Path) -> None:
    daemon, secrets = started(tmp_path, broker.port)
    with daemon:
        daemon.start()
        source = f"http://127.0.0.1:{daemon.port}"

        def node() -> Any:
            return daemon.get("/api/v1/entities/node/lab/h/r1/node1")["job"]

        other = subprocess.run(
            [python, "-c", REFUSED, source], env=bare(RACKTWIN_TOKEN=secrets["job.other"]),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "the token job.other speaks for one job" in other.stdout
        assert "ask the operator for a token" in other.stdout
        assert node() is None
        code = PRELUDE + page_lines().replace("https://twin.example:8077", source)
        env = bare(RACKTWIN_TOKEN=secrets["job.my-run"], RACKTWIN_NODES="lab/h/r1/node[0-1]")
        with subprocess.Popen([python, "-u", "-c", code], env=env, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            try:
                assert job.stdout.readline() == "the twin answered\n"
                assert daemon.until(node, what="its nodes")["job"] == "my-run"
                asked = {"control": INTERVAL, "names": ["job:my-run"], "lo": 7.0, "hi": 7.0, "want": 7.0}
                daemon.post("/api/v1/requests", asked | {"reason": "a test", "for_s": 600})
                job.stdout.read()
                assert job.wait() == 0
            finally:
                job.kill()
        daemon.until(lambda: not node(), what="its end, for it registered itself")
        ended = daemon.get("/api/v1/decisions?kind=event&limit=50")["decisions"]
        assert any("my-run" in str(line) and "client ended" in str(line) for line in ended), ended
        assert daemon.stop() == 0
