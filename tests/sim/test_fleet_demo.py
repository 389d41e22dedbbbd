"""`make fleet-demo`: the story comes true, the page of the hub tells it, and all processes end."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "deploy" / "fleet" / "demo.py"
MOST_S = 240.0  # on a machine with much else to do; alone it takes about 45 s

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_a_lost_feeder_makes_both_halls_give_way_by_priority(
    server: Callable[..., Path], tmp_path: Path
) -> None:
    server("nats-server")
    command = [sys.executable, str(DEMO), "--once", "--out", str(tmp_path / "demo")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"the page of the hub, with its token: http://127.0.0.1:\d+/#token=rt_", ran.stdout)
    cut = re.search(
        r"hall-a \(priority 2\) gave up ([\d.]+) kW and hall-b \(priority 0\) ([\d.]+) kW", ran.stdout
    )
    assert cut is not None, ran.stdout
    assert float(cut[2]) >= float(cut[1]) > 0
    for name in ("both feeds:", "feeder-b is lost:", "feeder-b is back:"):
        assert name in ran.stdout
