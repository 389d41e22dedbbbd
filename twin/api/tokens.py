"""Tokens: names and roles of the users of the daemon, as hashes in a file that only its owner may change.

A token is 256 random bits, so a fast hash is enough: it cannot be guessed, and a request costs microseconds.
The file holds no secret. Anybody who can write it can become an administrator, so nobody else may write it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from twin.catalogue import ConfigError
from twin.run import atomic_write

Role = Literal["job", "viewer", "operator", "admin"]
# Each role includes the rights of those before it; a job may only report on itself, see `api_checkpoint`.
ROLES: tuple[Role, ...] = ("job", "viewer", "operator", "admin")
PREFIX = "rt_"
MAX_TOKENS = 1000
MAX_PRESENTED = 200  # characters of a header that are looked at
LOCAL_NAME = "local-admin"
LOCAL_FILES = ("tokens.yaml", "admin.token")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HALL = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of the file. `name` is the author of what is done with it. With `halls` it sees and acts on
    these halls of a fleet alone.
    """

    name: str
    role: Role
    hash: str
    created: str
    expires: str | None = None
    halls: tuple[str, ...] = ()

    def may(self, role: Role) -> bool:
        """Return True if this token's role is at least `role`."""
        return ROLES.index(self.role) >= ROLES.index(role)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[Token] = []


def fresh_secret() -> str:
    """A new token's text; it is shown once and kept nowhere."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(secret: str) -> str:
    """Return the stored form of a token's text."""
    return "sha256:" + hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class Tokens:
    """The tokens in force, as last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: tuple[Token, ...] = ()
        self.warnings: list[str] = []
        self._ends: dict[str, float] = {}  # name -> instant at which it expires
        self.reload()

    @classmethod
    def local(cls, state: Path) -> Tokens:
        """Tokens of a daemon without a tokens file: an administrator's; its text lies in the state folder."""
        state.mkdir(0o700, parents=True, exist_ok=True)
        path, secret_file = (state / name for name in LOCAL_FILES)
        try:
            secret = read_secret(secret_file)  # one that everybody could read is a secret no more
        except ConfigError:
            secret = ""
        known = {t.hash for t in read_tokens(path)} if path.exists() else set()
        if not secret or hash_of(secret) not in known:
            secret = add_token(path, LOCAL_NAME, "admin", replace=True)
            write_private(secret_file, secret + "\n")
        return cls(path)

    def reload(self) -> None:
        """Read the file again. Raises ConfigError, and then the old tokens stay in force."""
        warnings = check_mode(self.path)
        entries = read_tokens(self.path)
        self._ends = {t.name: _instant(t.expires, self.path) for t in entries if t.expires is not None}
        self.held, self.warnings = tuple(entries), warnings

    def who(self, presented: str, now_s: float | None = None) -> tuple[Token | None, str]:
        """(the token with this text, ""), or (None, why not). Takes as long for each wrong one."""
        digest = hash_of(presented[:MAX_PRESENTED])
        found: Token | None = None
        for token in self.held:
            if hmac.compare_digest(token.hash, digest):
                found = token
        if found is None:
            return None, "no such token"
        if self._has_expired(found, time.time() if now_s is None else now_s):
            return None, "the token has expired"
        return found, ""

    def in_force(self, token: Token) -> bool:
        """Return True while a token that was admitted has neither been revoked or changed nor has expired."""
        return token in self.held and not self._has_expired(token, time.time())

    def _has_expired(self, token: Token, now_s: float) -> bool:
        return self._ends.get(token.name, float("inf")) <= now_s


def read_tokens(path: Path) -> list[Token]:
    """The lines of a tokens file. Raises ConfigError, which never quotes a hash."""
    from twin.config import read_yaml  # the client needs this module, and not all that wiring brings

    tree = read_yaml(path)
    try:
        # An unquoted instant in YAML is no text but a date.
        entries = msgspec.convert(msgspec.to_builtins(tree if tree is not None else {}), _File).tokens
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; expected `tokens` as `racktwin token add` writes them") from None
    problems = []
    for i, token in enumerate(entries):
        at = f"{path}: $.tokens[{i}]"
        if not _NAME.fullmatch(token.name):
            problems.append(f"{at}.name: expected letters, digits and . _ @ -, at most 64")
        problems += [f"{at}.halls: {why}" for why in _hall_problems(token.role, token.halls)]
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", token.hash):
            problems.append(f"{at}.hash: expected sha256: and 64 hexadecimal digits")
        if token.expires is not None:
            _instant(token.expires, path)
    names = [t.name for t in entries]
    problems += [f"{path}: two tokens are named {n}" for n in sorted(set(names)) if names.count(n) > 1]
    if len(entries) > MAX_TOKENS:
        problems.append(f"{path}: {len(entries)} tokens; expected at most {MAX_TOKENS}")
    if problems:
        raise ConfigError(problems)
    return entries


def _hall_problems(role: Role, halls: tuple[str, ...]) -> list[str]:
    if halls and role not in ("viewer", "operator"):
        return [f"a token of the role {role} is not limited to halls; expected viewer or operator"]
    wrong = [hall for hall in halls if not _HALL.fullmatch(hall)]
    return [f"{hall[:80]!r}: expected the name of a hall: letters, digits, - and _" for hall in wrong]


def check_mode(path: Path) -> list[str]:
    """Warnings about who may read the file. Raises ConfigError where others may change it."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; make it by `racktwin token add`"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        raise ConfigError(f"{path}: mode {mode:o} lets others write it; expected 0600 (chmod 600)")
    # Root changes the file of a daemon that runs as another user
    folders = {path.parent.stat().st_uid} if os.geteuid() == 0 else set()
    if found.st_uid not in {0, os.geteuid()} | folders:
        raise ConfigError(f"{path}: belongs to user {found.st_uid}; expected root or user {os.geteuid()}")
    return (
        [f"{path}: mode {mode:o} lets everybody read who may do what; expected 0600"] if mode & 0o004 else []
    )


def add_token(
    path: Path,
    name: str,
    role: Role,
    expires_days: float | None = None,
    replace: bool = False,
    halls: tuple[str, ...] = (),
) -> str:
    """Write a new token's hash into the file, which is made if it is not there; the token's text."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!r} is not a valid token name; expected letters, digits and . _ @ -, at most 64"
        )
    if problems := _hall_problems(role, halls):
        raise ConfigError([f"halls: {why}" for why in problems])
    if expires_days is not None and not 0 < expires_days <= 36_500:
        raise ConfigError(f"expected days from 0 to 36500 until it expires, got {expires_days:g}")
    secret, now = fresh_secret(), time.time()
    expires = None if expires_days is None else _text(now + expires_days * 86_400)
    with _changing(path) as entries:
        if any(t.name == name for t in entries):
            if not replace:
                raise ConfigError(
                    f"{path}: has a token named {name}; revoke it first, or choose another name"
                )
            entries[:] = [t for t in entries if t.name != name]
        if len(entries) >= MAX_TOKENS:
            raise ConfigError(f"{path}: holds {MAX_TOKENS} tokens already; revoke some")
        entries.append(Token(name, role, hash_of(secret), _text(now), expires, halls))
    return secret


def revoke_token(path: Path, name: str) -> None:
    """Take a token out of the file. Raises ConfigError if it is not in it."""
    with _changing(path) as entries:
        left = [t for t in entries if t.name != name]
        if len(left) == len(entries):
            raise ConfigError(f"{path}: no token is named {name[:80]}; `racktwin token list` shows them")
        entries[:] = left


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only its owner can read, whole or not at all."""
    atomic_write(path, text, mode=0o600)


def read_secret(path: Path) -> str:
    """A token's text from its file. Raises ConfigError; a file that everybody can read is refused."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o007:
            raise ConfigError(
                f"{path}: mode {mode:o} shows the token to everybody; expected 0600 (chmod 600)"
            )
        text = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"{path}: the token cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: holds no token; expected {PREFIX}...") from None
    if not text.startswith(PREFIX) or len(text) > MAX_PRESENTED or not text.isprintable() or " " in text:
        raise ConfigError(f"{path}: holds no token; expected one line, {PREFIX}...")
    return text


@contextmanager
def _changing(path: Path) -> Iterator[list[Token]]:
    """The file's lines, to be changed; written back whole. Two at a time would lose a revocation."""
    import yaml

    path = path.resolve()  # a link to it stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists():
            check_mode(path)
        entries = read_tokens(path) if path.exists() else []
        yield entries
        tree = {"tokens": [msgspec.to_builtins(t) for t in entries]}
        _write_back(path, yaml.safe_dump(tree, sort_keys=False))
    finally:
        os.close(folder)


def _write_back(path: Path, text: str) -> None:
    """Replace a tokens file. Root may do so, and the daemon's user reads it: it stays with its owner, and a
    new one belongs to whom its folder belongs."""
    if path.exists():
        owner = path.stat()
        mode = owner.st_mode & 0o640
    else:
        owner = path.parent.stat()
        mode = 0o640 if owner.st_uid == 0 != owner.st_gid else 0o600
    atomic_write(path, text, mode, owner=owner)


def _text(instant_s: float) -> str:
    return datetime.fromtimestamp(instant_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _instant(text: str, path: Path) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{path}: expires: expected an instant such as 2027-01-31T00:00:00Z") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
