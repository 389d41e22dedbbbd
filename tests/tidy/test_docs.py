"""The documentation: pages build without a broken link, name files that exist and commands that parse."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy import tree

PAGES = sorted(p for p in tree.files() if p.endswith(".md") and not p.startswith("tests/"))
TOPS = "twin|policies|models|connectors|deploy|tests|docs"


def commands(text: str) -> list[str]:
    """The lines of indented blocks, or words in backticks, that call racktwin, without their comments."""
    lines = re.findall(r"^ {4,}(racktwin .+)$", text, re.M) + re.findall(r"`(racktwin [^`]+)`", text)
    return [part.strip() for line in lines for part in re.sub(r" +#.*", "", line).split(";")]


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", re.sub(r"(?s)```.*?```|`[^`]*`", "", text))


def paths(text: str) -> list[str]:
    """Words in backticks that begin with a folder of the tree, placeholders left out."""
    found = re.findall(rf"`((?:{TOPS})/[^`\s]*)`", text)
    return [p for p in found if not re.search(r"NAME|\*|\.\.\.|\{", p)]


def test_links_and_paths_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        text, here = (tree.ROOT / page).read_text(), (tree.ROOT / page).parent
        wrong += [f"{page}: {link}" for link in links(text) if not (here / link).exists()]
        if page.startswith("docs/") or page == "README.md":
            wrong += [f"{page}: {path}" for path in paths(text) if not (tree.ROOT / path).exists()]
    assert wrong == []


def test_keys_and_settings_that_pages_name_are_in_the_tree() -> None:
    code = "\n".join(
        (tree.ROOT / path).read_text()
        for path in tree.files()
        if path.endswith((".py", ".yaml", ".sh", ".conf", ".toml"))
        and not path.startswith(("tests/evaluation", "tests/tidy"))
    )
    known = set(re.findall(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+", code))
    strange = []
    for page in (p for p in PAGES if p.startswith("docs/") or p == "README.md"):
        for words in re.findall(r"`([^`\n]+)`", (tree.ROOT / page).read_text()):
            # Names of metrics are put together; tests of the interfaces look at them
            names = re.findall(
                r"(?<![a-zA-Z0-9_.])[a-z][a-z0-9]*(?:_[a-z0-9]+)+", re.sub(r"\S*/\S*", "", words)
            )
            strange += [f"{page}: {n}" for n in names if n not in known and not n.startswith("racktwin_")]
    assert strange == []


def test_the_pages_are_as_short_as_they_promise() -> None:
    assert len((tree.ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((tree.ROOT / "docs/glossary.md").read_text().splitlines()) <= 60


def test_the_reference_is_that_of_the_schemas() -> None:
    from twin.config import reference_markdown

    assert (tree.ROOT / "docs/reference.md").read_text() == reference_markdown(), "run `make docs`"


def test_the_words_are_those_of_the_code() -> None:
    """The page is made anew with what people read; no alarm is titled by a key of the code or a bare unit."""
    from tests.support.word_list import words_markdown

    text = words_markdown()
    assert (tree.ROOT / "docs/words.md").read_text() == text, "run `make docs`"
    alarms = text.partition("## Health")[0] + text.partition("## Health")[2].partition("## Events")[0]
    titles = [line.split("|")[-3 if "## " not in line else 0] for line in alarms.splitlines() if "|" in line]
    assert len(titles) > 100
    assert [t for t in titles if re.search(r"degC|(?<!{)\b[a-z]+_[a-z_]+\b(?![^{]*})", t)] == []


def test_commands_of_the_pages_parse(capsys: pytest.CaptureFixture[str]) -> None:
    from twin.cli.main import parse

    refused = []
    for page in (p for p in PAGES if p not in ("CHANGELOG.md", "twin/DECISIONS.md")):  # they tell the past
        for command in commands((tree.ROOT / page).read_text()):
            words = shlex.split(command.replace("...", "x").replace(" | ", "|"))[1:]
            try:
                parse(words)
            except SystemExit:
                # In a sentence a command may stand without its arguments; an unknown word is refused
                why = capsys.readouterr().err
                if (
                    "required" not in why
                    and "'x': expected one of" not in why
                    and "a verb is missing" not in why
                ):
                    refused.append(f"{page}: {command}: {why.strip().splitlines()[-1]}")
            assert "is now" not in capsys.readouterr().err, f"{page}: {command}: a name of before"
    assert refused == []


@pytest.mark.long
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not here: run `make test`, which installs it")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    answer = subprocess.run(build, cwd=tree.ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "site" / "index.html").exists()
