"""The bench of the plant measures what it says, on a site small enough for a test."""

from __future__ import annotations

import pytest

from tests.evaluation.bench.plant import MODES, SIZES, Size, measured
from tests.support.builders import site_of


@pytest.mark.evaluation
@pytest.mark.parametrize("mode", MODES)
def test_a_case_gives_its_figures(mode: str) -> None:
    found = measured(Size(2, 4, 4, 1), mode, steps=2)
    assert found["x_real_time"] == pytest.approx(1e6 / found["step_us"])
    assert found["mean_x_real_time"] <= found["x_real_time"]
    assert found["balance_error"] < 1e-6
    assert found["peak_rss_bytes"] > 1e7


@pytest.mark.evaluation
@pytest.mark.parametrize(("name", "gpus", "nodes", "cdus"), [
    ("n576", 576, 144, 2), ("n10k", 10_008, 2_502, 35), ("n9472_nodes", 9_472, 9_472, 25),
    ("n37888", 37_888, 9_472, 25),
])  # fmt: skip
def test_sites_are_as_large_as_their_names_say(name: str, gpus: int, nodes: int, cdus: int) -> None:
    sizes = site_of(SIZES[name].tree()).sizes
    assert (sizes["gpu"], sizes["node"], sizes["cdu"]) == (gpus, nodes, cdus)
