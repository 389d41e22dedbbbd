"""Signed head: the hash of a journal's last line, signed with Ed25519. The hash chain makes it cover all
lines before it.

The private key signs a head; the public key verifies it.
"""

from __future__ import annotations

import base64
import hashlib

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from twin.catalogue import ConfigError, StorageError

DOMAIN = b"racktwin journal head 1\n"  # so that a signature says nothing about anything else
MAX_BYTES = 4096
_encode = msgspec.json.Encoder(order="deterministic").encode


class SignedHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head of a journal of so many `lines` at an instant. `run` is the hash of its first line.

    `outside`: anchor -> lines of the last head that it had acknowledged by then. An anchor that holds an
    older one was put back.
    """

    run: str
    lines: int
    head: str
    now_ns: int
    key: str = ""
    outside: dict[str, int] = {}
    signature: str = ""

    @property
    def content(self) -> bytes:
        """The bytes that are signed."""
        return DOMAIN + _encode(msgspec.structs.replace(self, signature=""))

    @property
    def line(self) -> bytes:
        """It as a line of JSON, without a newline."""
        return _encode(self)


def parse_head(data: bytes) -> SignedHead:
    """The signed head of some bytes. Raises StorageError; the signature is not looked at."""
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes; expected at most {MAX_BYTES}")
        found = msgspec.json.decode(data, type=SignedHead)
        if not (0 < found.lines < 2**62 and 0 <= found.now_ns < 2**62):
            raise ValueError(f"{found.lines} lines at {found.now_ns} ns")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StorageError(f"not a signed head: {error}") from error
    return found


class HeadVerifier:
    """Checks signatures with a public key. `name` identifies the key."""

    def __init__(self, public: Ed25519PublicKey) -> None:
        self._public = public
        raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.name = hashlib.blake2b(raw, digest_size=8).hexdigest()

    @classmethod
    def of_pem(cls, text: str, where: str) -> HeadVerifier:
        """The verifier of a public key in PEM. Raises ConfigError, which names `where`."""
        try:
            public = serialization.load_pem_public_key(text.encode())
        except ValueError:
            public = None
        if not isinstance(public, Ed25519PublicKey):
            raise ConfigError(f"{where}: expected an Ed25519 public key in PEM: `racktwin journal key`")
        return cls(public)

    def fits(self, head: SignedHead) -> bool:
        """True if this key signed the head as it is."""
        return self.confirms(head.signature, head.content)

    def confirms(self, signature: str, content: bytes) -> bool:
        """True if this key signed these bytes."""
        try:
            self._public.verify(base64.b64decode(signature, validate=True), content)
        except (InvalidSignature, ValueError):
            return False
        return True


class HeadSigner:
    """Signs heads with a private key. `verifier` checks them."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private, self.verifier = private, HeadVerifier(private.public_key())

    @classmethod
    def of_pem(cls, text: str, where: str) -> HeadSigner:
        """The signer of a private key in PEM, without a password. Raises ConfigError; quotes nothing."""
        try:
            private = serialization.load_pem_private_key(text.encode(), None)
        except (ValueError, TypeError):
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError(
                f"{where}: expected an Ed25519 private key in PEM, without a password: `racktwin journal key`"
            )
        return cls(private)

    def sign(self, head: SignedHead) -> SignedHead:
        """The head with the key's name and signature."""
        named = msgspec.structs.replace(head, key=self.verifier.name, signature="")
        return msgspec.structs.replace(named, signature=self.signature(named.content))

    def signature(self, content: bytes) -> str:
        """The signature of bytes that begin with a domain of their own."""
        return base64.b64encode(self._private.sign(content)).decode("ascii")


def make_keys() -> tuple[str, str]:
    """A new (private key, public key), each in PEM."""
    private = Ed25519PrivateKey.generate()
    secret = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return secret.decode("ascii"), public.decode("ascii")
