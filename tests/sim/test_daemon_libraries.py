"""What a running daemon has mapped into its memory: no library of statistics, which belong into workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.daemon_process import running
from tests.support.mosquitto import mosquitto

pytestmark = pytest.mark.slow
# Each of them comes with compiled parts.
LIBRARIES = re.compile(r"/site-packages/(sklearn|scikit_learn|scipy|statsmodels|pandas|torch)[./]")


def mapped(process: int | str) -> set[str]:
    return set(LIBRARIES.findall(Path(f"/proc/{process}/maps").read_text()))


def test_a_daemon_that_ticks_has_loaded_no_statistics(server: Callable[..., Path], tmp_path: Path) -> None:
    with mosquitto(server, tmp_path) as broker, running(tmp_path / "twin", broker.port) as daemon:
        assert daemon.process is not None
        assert mapped(daemon.process.pid) == set()
        assert "numpy" in Path(f"/proc/{daemon.process.pid}/maps").read_text()
    import scipy.optimize  # noqa: F401

    assert "scipy" in mapped("self"), "what this test looks for would be seen"
