"""NKey: a NATS identity, an Ed25519 key whose seed is in a file; a `.creds` file also has a JWT.

The client library wants a further package for these, which we do without: the key signs what the server asks.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from twin.catalogue import ConnectorError

MAX_FILE_BYTES = 64 * 1024
_SEED_BITS, _USER_BITS = 18 << 3, 20 << 3  # letters S and U in base32. source: NATS ADR-14
_RAW_BYTES = 36  # of a seed: prefix of two bytes, key of 32, checksum of two
_SEED = re.compile(rb"^\s*(SU[A-Z2-7]{56})\s*$", re.MULTILINE)
_TOKEN = re.compile(rb"^\s*(eyJ[A-Za-z0-9_\-]+\.[A-Za-z0-9_\-]+\.[A-Za-z0-9_\-]+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class NKey:
    """The key of a user; `token` is the JWT of a credentials file, "" for a seed alone."""

    key: Ed25519PrivateKey
    token: bytes = b""

    @property
    def public(self) -> str:
        """Return the public name of this key: U and 55 letters."""
        raw = bytes([_USER_BITS]) + self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return _text(raw)

    def sign(self, nonce: str) -> bytes:
        """Return the signature of a nonce of the server."""
        return base64.b64encode(self.key.sign(nonce.encode()))


def read_nkey(path: str, with_token: bool) -> NKey:
    """Return the identity in a file. Raises ConnectorError, which never quotes the file."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConnectorError(f"{path}: cannot be read: {error.strerror}") from None
    seed, token = _SEED.search(text), _TOKEN.search(text)
    if seed is None or (with_token and token is None):
        raise ConnectorError(
            f"{path}: expected the {'credentials' if with_token else 'seed'} of a user, as `nsc` or `nk` "
            f"write them: {'a JWT and ' if with_token else ''}a line of 58 letters that begins with SU"
        )
    raw = base64.b32decode(seed[1] + b"=" * (-len(seed[1]) % 8))
    if len(raw) != _RAW_BYTES or binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little") != raw[-2:]:
        raise ConnectorError(f"{path}: the checksum of the seed is wrong; copy the seed again")
    key = Ed25519PrivateKey.from_private_bytes(raw[2:-2])
    return NKey(key, token[1] if with_token and token is not None else b"")


def seed_of(key: Ed25519PrivateKey) -> str:
    """Return the seed of a user's key from the text of a file."""
    first, second = _SEED_BITS | _USER_BITS >> 5, (_USER_BITS & 31) << 3
    return _text(bytes([first, second]) + key.private_bytes_raw())


def _text(raw: bytes) -> str:
    return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode().rstrip("=")
