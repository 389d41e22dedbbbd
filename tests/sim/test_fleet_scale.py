"""Small runs of what is measured at scale: a fleet over real servers, its hub alone, an hour without it."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import million_gpus
from tests.support.fleet_day import SHARED_W, live_day

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_halls_and_hub_live_over_real_servers(
    server: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server("nats-server")
    words = "million_gpus --halls 3 --racks 2 --seconds 20 --warm-up 4 --faults"
    monkeypatch.setattr(sys, "argv", words.split())
    million_gpus.main()
    said = capsys.readouterr().out
    assert "3 halls, 432 GPUs" in said
    taken = re.search(r"grants taken (\d+)", said)
    assert taken is not None
    assert int(taken[1]) > 0, said
    age = re.search(r"at most ([0-9.]+) simulated s", said)
    assert age is not None
    assert float(age[1]) <= 5.0, said
    assert said.count(" killed\n") == len(million_gpus.FAULTS), said
    current = re.search(r"knew of all halls again within (\d+) simulated s", said)
    assert current is not None
    assert int(current[1]) <= 10, said


def test_the_cost_of_a_hub_is_told_as_a_line(tmp_path: Path) -> None:
    rows = asyncio.run(million_gpus.measure_hub([1, 2, 3], 3, tmp_path))
    assert [row[0] for row in rows] == [1, 2, 3]
    assert 'aria-label="tick of the hub' in million_gpus.write_plot(rows, tmp_path).read_text()
    assert million_gpus.fit([(1, 2.0, 3.0), (2, 3.0, 4.0), (3, 4.0, 5.0)]).startswith(
        "p50 = 1.00 ms + 1.0000 ms a hall; r2 1.000"
    )


@pytest.mark.long
def test_without_its_hub_a_fleet_trips_nothing_and_loses_little_work() -> None:
    lent, away = (live_day(with_hub, hours=1, shared_w=0.8 * SHARED_W) for with_hub in (True, False))
    assert (lent.trips, away.trips) == (0, 0)
    assert max(lent.worst_pu, away.worst_pu) <= 1.0
    assert away.lost_pu > lent.lost_pu, "or nothing was lent"
    assert 1.0 - away.work / lent.work <= 0.03
