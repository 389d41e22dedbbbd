"""NKeys of NATS: seeds as files hold them, and what is refused without a word of it."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from connectors.nats import NKey, read_nkey, seed_of
from twin.catalogue import ConnectorError

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
TOKEN = "eyJhbGciOiJlZDI1NTE5In0.eyJzdWIiOiJVQSJ9.c2ln"


def creds(seed: str) -> str:
    return (
        f"-----BEGIN NATS USER JWT-----\n{TOKEN}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def test_a_seed_is_read_as_it_was_written_and_signs(tmp_path: Path) -> None:
    file = tmp_path / "seed"
    file.write_text(f"{seed_of(KEY)}\n")
    found = read_nkey(str(file), with_token=False)
    assert seed_of(KEY).startswith("SU")
    assert len(seed_of(KEY)) == 58
    assert found.public == NKey(KEY).public
    assert (found.public[0], len(found.public)) == ("U", 56)
    KEY.public_key().verify(base64.b64decode(found.sign("nonce")), b"nonce")


def test_credentials_have_a_token_beside_the_seed(tmp_path: Path) -> None:
    file = tmp_path / "hall.creds"
    file.write_text(creds(seed_of(KEY)))
    assert read_nkey(str(file), with_token=True).token == TOKEN.encode()
    assert read_nkey(str(file), with_token=False).token == b""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected the seed"),
        (NKey(KEY).public, "expected the seed"),
        (seed_of(KEY)[:-1] + ("A" if seed_of(KEY)[-1] != "A" else "B"), "the checksum"),
        (seed_of(KEY)[:10] + "BBBB" + seed_of(KEY)[14:], "the checksum"),
    ],
    ids=["empty", "public", "end", "middle"],
)
def test_what_is_no_seed_is_refused_without_a_word_of_it(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "seed"
    file.write_text(text)
    with pytest.raises(ConnectorError, match=why) as caught:
        read_nkey(str(file), with_token=False)
    assert not text or text[:8] not in str(caught.value)


def test_a_file_that_is_not_there_or_has_no_token_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectorError, match="cannot be read"):
        read_nkey(str(tmp_path / "none"), with_token=False)
    file = tmp_path / "seed"
    file.write_text(seed_of(KEY))
    with pytest.raises(ConnectorError, match="expected the credentials"):
        read_nkey(str(file), with_token=True)
