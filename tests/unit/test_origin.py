"""The source that a topic names."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from connectors.mqtt.origin import MAX_ORIGIN, origin_of


@pytest.mark.parametrize(
    ("topic", "origin"),
    [
        ("IT/v1/PUB/Frame/lab/h/r1/node3", "agent lab/h/r1/node3"),
        ("IT/v1/PUB/Agent/lab/h/r1/node3", "agent lab/h/r1/node3"),
        ("IT/v1/PUB/Event/lab/h/r1/node3", "agent lab/h/r1/node3"),
        ("IT/v1/PUB/Event/jobs/slurm", "jobs slurm"),
        ("IT/v1/PUB/Event/outlooks/grid", "outlooks grid"),
        ("IT/v1/PUB/Job/train-7/report", "job reports"),
        ("IT/v1/racktwin/Result/gpu.power_cap_w/lab/h/r1", "answers of agents"),
        ("IT/v1/racktwin/Daemon/one", "topic IT/v1"),
        ("BMS/v1/PUB/Value/Rack/RackPower/gw-1/r1/power", "BMS gateway gw-1"),
        ("BMS/v1/PUB/Value/Rack/RackPower/flat", "BMS gateway PUB"),
        ("BMS/v1/MEPAI/Value/Rack/RackPower/gw-1/r1", "BMS gateway MEPAI"),
        ("spBv1.0/plant/DDATA/edge1/pump", "Sparkplug node plant/edge1"),
        ("telegraf/node7/cpu", "topic telegraf/node7"),
        ("telegraf", "topic telegraf"),
        ("", "topic "),
    ],
)
def test_a_topic_names_its_publisher(topic: str, origin: str) -> None:
    assert origin_of(topic) == origin


@given(st.text(max_size=2000))
def test_any_topic_has_a_short_origin(topic: str) -> None:
    assert 0 < len(origin_of(topic)) <= MAX_ORIGIN
    assert 0 < len(origin_of(f"IT/v1/PUB/{topic}")) <= MAX_ORIGIN
    assert 0 < len(origin_of(f"BMS/v1/{topic}")) <= MAX_ORIGIN
