"""The tree keeps the house rules."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tidy import rules, tree


@pytest.mark.long
def test_code_keeps_the_house_rules() -> None:
    found = [f"{path}: expected UTF-8" for path in tree.code() if tree.text(path) is None]
    found += [problem for source in rules.sources(tree.code()) for problem in rules.problems(source)]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.long
def test_no_docstring_of_a_test_asks_a_question() -> None:
    # One file at a time: the trees of all would fill the memory
    each = (source for path in tree.suite() for source in rules.sources([path]))
    found = [problem for source in each for problem in rules.questions(source)]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_no_file_names_a_registry_or_leaves_work_undone() -> None:
    found: list[str] = []
    for path in tree.files():
        text = tree.text(path)
        if text is not None:
            found += rules.registry_hosts(path, text)
            if path.endswith((".py", ".sh", ".yaml", ".yml", ".toml", "Makefile", ".ci/run")):
                found += rules.unfinished_text(path, text)
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_the_listing_sees_code_and_this_file() -> None:
    assert {"twin/catalogue/units.py", "twin/catalogue/signals.py"} <= set(tree.code())
    assert "tests/tidy/test_tree.py" in tree.files()
    assert {"tests/tidy/test_tree.py", "tests/evaluation/__main__.py"} <= set(tree.suite())


def test_the_listing_takes_new_files_but_no_ignored_ones(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "new.py").write_text('"""New."""\n')
    (tmp_path / "twin" / "made.py").write_text('"""Made."""\n')
    (tmp_path / ".gitignore").write_text("made.py\n")
    assert tree.code(tmp_path) == ["twin/new.py"]


def test_the_listing_works_without_git(tmp_path: Path) -> None:
    for folder in ("twin", ".venv", "twin/__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("")
    assert tree.files(tmp_path) == ["twin/a.py"]
