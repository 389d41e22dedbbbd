"""The authority of each policy over restarts and edits: nothing raises it above a person's decision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twin.daemon.authority import AuthorityBook, on_standby, stricter

CONFIGURED = {"guard": "act", "cap": "advise"}


def test_what_people_decided_outlives_the_process(tmp_path: Path) -> None:
    book = AuthorityBook(tmp_path, CONFIGURED)
    assert book.levels == CONFIGURED
    book.set({"guard": "advise", "cap": "act"})
    assert AuthorityBook(tmp_path, CONFIGURED).levels == {"guard": "advise", "cap": "act"}


@pytest.mark.parametrize(
    "edited, wanted",
    [
        ({"guard": "off", "cap": "advise"}, {"guard": "off", "cap": "act"}),  # the file disarms
        ({"guard": "approve", "cap": "advise"}, {"guard": "advise", "cap": "act"}),  # the person is stricter
        ({"guard": "act", "cap": "off"}, {"guard": "advise", "cap": "off"}),
        ({"guard": "act", "cap": "advise", "new": "act"}, {"guard": "advise", "cap": "act", "new": "act"}),
        ({"guard": "act"}, {"guard": "advise"}),
    ],
)
def test_an_edited_file_and_a_person_the_stricter_holds(
    tmp_path: Path, edited: dict[str, str], wanted: dict[str, str]
) -> None:
    AuthorityBook(tmp_path, CONFIGURED).set({"guard": "advise", "cap": "act"})
    assert AuthorityBook(tmp_path, edited).levels == wanted


@pytest.mark.parametrize("content", ["", "[]", "{", '{"guard": 5}', '{"guard": {"level": "act"}}', "\xff"])
def test_a_file_that_cannot_be_read_disarms(tmp_path: Path, content: str) -> None:
    (tmp_path / "authority.json").write_text(content, encoding="latin-1")
    assert AuthorityBook(tmp_path, CONFIGURED).levels == {"guard": "advise", "cap": "advise"}


@pytest.mark.parametrize(
    ("level", "configured", "then"), [("root", "act", "advise"), ("off", "Act", "off"), ("", "", "advise")]
)
def test_a_level_that_does_not_exist_lets_a_policy_do_less(
    tmp_path: Path, level: str, configured: str, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows what was meant: a later version may know more levels, and people may have set one."""
    book = {"guard": {"level": level, "configured": configured}}
    (tmp_path / "authority.json").write_text(json.dumps(book), encoding="utf-8")
    assert AuthorityBook(tmp_path, CONFIGURED).levels == CONFIGURED | {"guard": then}
    assert "authority.json: a level of guard is none of off, advise" in caplog.text


def test_a_reload_changes_what_was_edited_and_nothing_else(tmp_path: Path) -> None:
    book = AuthorityBook(tmp_path, CONFIGURED)
    book.set({"guard": "off", "cap": "advise"})
    book.reconfigure({"guard": "act", "cap": "act"})
    assert book.levels == {"guard": "off", "cap": "act"}


def test_order() -> None:
    assert stricter("act", "off") == "off"
    assert [on_standby(v) for v in ("off", "advise", "approve", "act")] == [
        "off",
        "advise",
        "advise",
        "advise",
    ]
