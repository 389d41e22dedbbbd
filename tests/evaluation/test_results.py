"""Results page: each suite has its marks; a run replaces what stands between them and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation import results
from tests.evaluation.__main__ import main
from tests.evaluation.results import PAGE, SUITES, Suite, block, placed
from twin.catalogue import ConfigError


def test_the_page_has_the_marks_of_every_suite() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for suite in SUITES:
        changed = placed(page, suite.name, "new figures")
        assert changed.count("new figures") == 1
        assert placed(changed, suite.name, "x").count("new figures") == 0


def test_a_section_without_marks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no marks `<!-- run health -->`"):
        placed("# Results", "health", "figures")


def test_a_block_says_when_where_and_how() -> None:
    text = block(Suite("x", ("-m", "tests.evaluation", "x", "{recordings}/a")), "figures  \n", 61.0)
    assert "cores of" in text
    assert "1 min 1 s" in text
    assert "    python -m tests.evaluation x RECORDINGS/a" in text
    assert text.endswith("```text\nfigures\n```")
    assert block(Suite("x", ()), "| a |\n| --- |\n", 1.0).endswith("\n\n| a |\n| --- |")


def test_suites_without_their_recordings_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- run hello -->\nold\n<!-- end hello -->\nb\n")
    hello = Suite("hello", ("-c", "print('new')"))
    monkeypatch.setattr(results, "SUITES", (hello, Suite("far", ("-c", "raise SystemExit(3)"), ("moon",))))
    words = ["results", "--recordings", str(tmp_path), "--page", str(page)]
    assert main(words) == 0
    assert "far: left out: no moon" in " ".join(capsys.readouterr().err.split())
    text = page.read_text()
    assert text.startswith("a\n<!-- run hello -->\n\nRun on ")
    assert text.endswith("```text\nnew\n```\n\n<!-- end hello -->\nb\n")
    (tmp_path / "moon").mkdir()
    assert main([*words, "far"]) == 1
    assert main([*words, "mars"]) == 1
    assert "expected some of hello, far" in " ".join(capsys.readouterr().err.split())
