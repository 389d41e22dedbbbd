"""A file is replaced as a whole or stays as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twin.run import atomic_write


def test_a_file_is_replaced_with_its_mode_and_nothing_is_left_beside(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, "one")
    atomic_write(path, b"two", mode=0o600, sync=False)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, "one")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, "two")
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_that_lies_in_wait_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / f".a.json.{os.getpid()}").symlink_to(target)
    atomic_write(tmp_path / "a.json", "new")
    assert target.read_text() == "precious"
