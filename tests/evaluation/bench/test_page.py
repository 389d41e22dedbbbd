"""The page's part of the benchmark runs small and yields its keys."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.bench import page


@pytest.mark.evaluation
def test_a_quick_run_yields_all_keys(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert evaluate(["bench", "--quick", "--only", "page", "--out", str(out)]) == 0
    found = msgspec.json.decode(out.read_bytes(), type=dict[str, float | int | str])
    browsed = "page.quick.first_contentful_paint_s" in found
    wanted = {f"page.quick.{key}" for _, key, _ in page.ROWS[: None if browsed else 10]}
    assert wanted <= found.keys()
    assert (found["page.quick.viewers"], found["page.quick.viewers_refused"]) == (8, 0)
    assert not any(key.startswith("goal.page") for key in found), "a small site judges no goal"
