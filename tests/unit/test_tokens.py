"""Tokens: made once, kept as hashes, in a file that others cannot change. May import the shell."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twin.api import tokens
from twin.api.tokens import PREFIX, Tokens, add_token, hash_of, read_secret, read_tokens, revoke_token
from twin.catalogue import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.yaml"


def test_a_token_is_known_by_its_text_and_kept_as_a_hash(file: Path) -> None:
    secret = add_token(file, "ann", "operator")
    assert secret.startswith(PREFIX)
    assert len(secret) == len(PREFIX) + 43  # 256 bits
    assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    held = Tokens(file)
    token, why = held.who(secret)
    assert token is not None
    assert (token.name, token.role, why) == ("ann", "operator", "")
    for wrong in (
        "",
        PREFIX,
        secret[:-1],
        secret + "x",
        secret.upper(),
        hash_of(secret),
        "\udc80",
        "x" * 10_000,
    ):
        assert held.who(wrong) == (None, "no such token")


def test_roles_include_the_smaller_ones(file: Path) -> None:
    for role in tokens.ROLES:
        add_token(file, f"a-{role}", role)
    may = {t.role: [r for r in tokens.ROLES if t.may(r)] for t in read_tokens(file)}
    assert may == {"job": ["job"], "viewer": ["job", "viewer"], "operator": ["job", "viewer", "operator"],
                   "admin": ["job", "viewer", "operator", "admin"]}  # fmt: skip


def test_it_expires(file: Path) -> None:
    secret = add_token(file, "ann", "viewer", expires_days=1)
    held = Tokens(file)
    now_s = file.stat().st_mtime
    assert held.who(secret, now_s + 86_000)[0] is not None
    assert held.who(secret, now_s + 86_500) == (None, "the token has expired")


def test_a_revoked_one_is_gone_at_the_next_reload(file: Path) -> None:
    ann, bob = add_token(file, "ann", "admin"), add_token(file, "bob", "viewer")
    held = Tokens(file)
    revoke_token(file, "ann")
    assert held.who(ann)[0] is not None
    held.reload()
    assert held.who(ann)[0] is None
    assert held.who(bob)[0] is not None
    with pytest.raises(ConfigError, match="no token is named ann"):
        revoke_token(file, "ann")


def test_a_bad_file_is_refused_and_what_was_in_force_stays(file: Path) -> None:
    secret = add_token(file, "ann", "admin")
    held = Tokens(file)
    file.write_text("tokens: [{name: eve}]")
    with pytest.raises(ConfigError, match=r"missing required field `role`"):
        held.reload()
    assert held.who(secret)[0] is not None


ABC = "sha256:" + "ab" * 32
ONE = f"- {{name: a, role: viewer, hash: '{ABC}', created: x}}\n"


@pytest.mark.parametrize(
    "text, why",
    [
        ("tokens: 3", "Expected `array`"),
        (f"tokens: [{{name: 'a b', role: viewer, hash: '{ABC}', created: x}}]", r"\[0\].name: expected"),
        ("tokens: [{name: a, role: viewer, hash: secret, created: x}]", r"\[0\].hash: expected sha256:"),
        (f"tokens: [{{name: a, role: root, hash: '{ABC}', created: x}}]", "Invalid enum value"),
        (f"tokens: [{{name: a, role: admin, hash: '{ABC}', created: x, expires: soon}}]", "an instant"),
        ("tokens:\n" + ONE * 2, "two tokens are named"),
        ("key: 1", "unknown field"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_said_without_quoting_a_hash(file: Path, text: str, why: str) -> None:
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=why) as caught:
        Tokens(file)
    assert "abab" not in str(caught.value)


def test_a_date_need_not_be_quoted(file: Path) -> None:
    file.write_text(
        f"tokens:\n- {{name: a, role: viewer, hash: '{ABC}', created: 2026-01-01, expires: 2027-01-31}}"
    )
    file.chmod(0o600)
    assert Tokens(file).held[0].expires == "2027-01-31"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_change_is_refused(file: Path, mode: int) -> None:
    add_token(file, "ann", "admin")
    file.chmod(mode)
    with pytest.raises(ConfigError, match="lets others write it"):
        Tokens(file)
    with pytest.raises(ConfigError, match="lets others write it"):
        add_token(file, "bob", "viewer")


def test_a_file_that_others_can_read_is_warned_of(file: Path) -> None:
    add_token(file, "ann", "admin")
    assert Tokens(file).warnings == []
    file.chmod(0o644)
    assert len(Tokens(file).warnings) == 1


def test_a_file_that_is_not_there_says_how_to_make_it(file: Path) -> None:
    with pytest.raises(ConfigError, match="racktwin token add"):
        Tokens(file)


def test_without_a_file_there_is_one_administrator_whose_token_lies_in_the_state(tmp_path: Path) -> None:
    state = tmp_path / "state"
    held = Tokens.local(state)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700, "what it records is for those who have a token"
    secret = read_secret(state / "admin.token")
    assert stat.S_IMODE((state / "admin.token").stat().st_mode) == 0o600
    token = held.who(secret)[0]
    assert token is not None
    assert (token.name, token.role) == ("local-admin", "admin")
    add_token(state / "tokens.yaml", "ann", "viewer")
    Tokens.local(state)
    assert read_secret(state / "admin.token") == secret  # as long as it is valid, it stays
    revoke_token(state / "tokens.yaml", "local-admin")
    Tokens.local(state)
    assert read_secret(state / "admin.token") != secret
    assert {t.name for t in read_tokens(state / "tokens.yaml")} == {"ann", "local-admin"}
    secret = read_secret(state / "admin.token")
    (state / "admin.token").chmod(0o644)  # everybody may know it by now
    assert Tokens.local(state).who(secret)[0] is None
    assert read_secret(state / "admin.token") != secret


@pytest.mark.parametrize(
    "spoil, why",
    [
        (lambda p: p.chmod(0o644), "shows the token to everybody"),
        (lambda p: p.write_text("hunter2\n"), "holds no token"),
        (lambda p: p.write_bytes(b"rt_\xff"), "holds no token"),
        (lambda p: p.write_text("rt_a b"), "holds no token"),
        (lambda p: p.unlink(), "cannot be read"),
    ],
)
def test_a_secret_file_is_checked_and_never_quoted(
    tmp_path: Path, spoil: Callable[[Path], Any], why: str
) -> None:
    path = tmp_path / "t"
    tokens.write_private(path, "rt_abcdef\n")
    assert read_secret(path) == "rt_abcdef"
    spoil(path)
    with pytest.raises(ConfigError, match=why) as caught:
        read_secret(path)
    assert "hunter2" not in str(caught.value)
    assert "abcdef" not in str(caught.value)


def test_names_and_times_are_checked(file: Path) -> None:
    for name in ("", "a b", "x" * 65, "-a", "a\n"):
        with pytest.raises(ConfigError, match="not a valid token name"):
            add_token(file, name, "viewer")
    with pytest.raises(ConfigError, match="expected days"):
        add_token(file, "a", "viewer", expires_days=-1)
    add_token(file, "a", "viewer")
    with pytest.raises(ConfigError, match="has a token named a"):
        add_token(file, "a", "viewer")


def test_their_number_has_a_bound(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENS", 2)
    for name in "ab":
        add_token(file, name, "viewer")
    with pytest.raises(ConfigError, match="holds 2 tokens already"):
        add_token(file, "c", "viewer")


def test_a_write_that_fails_leaves_the_file_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_token(file, "ann", "admin")
    before = file.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        add_token(file, "bob", "viewer")
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == ["tokens.yaml"]


def test_a_tokens_file_behind_a_link_stays_behind_it(tmp_path: Path) -> None:
    real, link = tmp_path / "shared" / "tokens.yaml", tmp_path / "tokens.yaml"
    real.parent.mkdir()
    add_token(real, "ann", "viewer")
    link.symlink_to("shared/tokens.yaml")
    add_token(link, "bob", "viewer")
    revoke_token(link, "ann")
    assert link.is_symlink()
    assert [t.name for t in read_tokens(real)] == ["bob"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("change", ["add", "revoke"])
def test_root_leaves_the_tokens_of_the_daemons_user_readable_for_it(file: Path, change: str) -> None:
    os.chown(file.parent, 4711, 4712)
    add_token(file, "ann", "viewer")
    assert (file.stat().st_uid, file.stat().st_gid) == (4711, 4712), "a new file is its folder's"
    os.chmod(file, 0o640)
    add_token(file, "bob", "viewer") if change == "add" else revoke_token(file, "ann")
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (4711, 4712, 0o640)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_new_file_in_a_folder_of_root_is_readable_for_the_group_of_the_folder(file: Path) -> None:
    os.chown(file.parent, 0, 4712)
    add_token(file, "ann", "viewer")
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (0, 4712, 0o640)
