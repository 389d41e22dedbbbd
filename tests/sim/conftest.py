"""Fixtures that files of tests/sim share: a real Slurm of two nodes, and the port of a broker."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mosquitto import mosquitto
from tests.support.slurm_cluster import Cluster, Find


@pytest.fixture
def slurm(server: Find) -> Iterator[Cluster]:
    """A Slurm of two nodes, `gpu1` and `gpu2`."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        Cluster(Path(folder), server, nodes=2) as cluster,
    ):
        yield cluster


@pytest.fixture
def broker_port(server: Find, tmp_path: Path) -> Iterator[int]:
    """The port of a broker."""
    with mosquitto(server, tmp_path) as broker:
        yield broker.port
