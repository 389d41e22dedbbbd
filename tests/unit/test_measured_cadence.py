"""Measured cadence: what `racktwin site discover` writes of how often the messages of a recording come."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from connectors.files import read_capture
from twin.cli.main import main
from twin.cli.measured_cadence import measured_cadence
from twin.telemetry import Message

POINT = "Rack/{kind}/site/hall/{rack}/value"
RACKS = ("r1", "r2", "r3")


def recording(folder: Path, due_s: dict[str, np.ndarray]) -> Path:
    """A recording of three racks whose points are published at these instants."""
    rows: list[tuple[float, str, str]] = []
    for kind, instants in due_s.items():
        for rack in RACKS:
            topic = POINT.format(kind=kind, rack=rack)
            meta = {"objectType": "Rack", "pointType": kind, "rackLocationId": rack, "engUnit": "kW"}
            rows.append((0.0, f"BMS/v1/PUB/Metadata/{topic}", json.dumps(meta)))
            for k, at_s in enumerate(instants):
                value = f'{{"value": {90 + k % 7}, "timestamp": {{{{timestamp_ms}}}}, "quality": 1}}'
                rows.append((float(at_s), f"BMS/v1/PUB/Value/{topic}", value))
    path = folder / "capture.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("offset", "topic", "payload"))
        writer.writerows((f"{at_s}s", topic, body) for at_s, topic, body in sorted(rows))
    return path


@pytest.mark.parametrize(
    ("instants_s", "written"),
    [
        (10.0 + 200.0 * np.arange(12), {"rack.power_w": 200.0}),
        (10.0 + 20.0 * np.arange(40), None),
        (10.0 + 200.0 * np.arange(4), None),
        (np.cumsum(np.random.default_rng(1).exponential(300.0, 40)), None),
    ],
    ids=("slow and regular", "faster than the catalogue", "too few", "irregular"),
)
def test_a_slow_regular_source_gets_its_period(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    instants_s: np.ndarray,
    written: dict[str, float] | None,
) -> None:
    assert main(["site", "discover", str(recording(tmp_path, {"RackPower": instants_s}))]) == 0
    site = yaml.safe_load(capsys.readouterr().out)
    assert len(site["halls"][0]["racks"]) == len(RACKS)
    assert site.get("periods_s") == written


def test_what_comes_on_change_is_noted_and_left_to_be_learned(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    path = recording(tmp_path, {"RackPower": np.cumsum(rng.exponential(300.0, 40))})
    racks = {"site": "site", "halls": [{"name": "hall1", "racks": [{"name": name} for name in RACKS]}]}
    periods_s, notes = measured_cadence((m for m in read_capture(path) if isinstance(m, Message)), racks)
    assert periods_s == {}
    assert ["irregularly or on change" in note for note in notes] == [True]
