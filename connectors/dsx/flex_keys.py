"""Signatures of DSX Flex: verifies the signer of a payload (JWS compact, ES256 or RS256), and signs.

A key set is a JWKS; a key of it may name the one speaker that it stands for (`"isv": "acme-energy"`). Only
public-key algorithms are taken, so that whoever can verify cannot sign.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from twin.catalogue import BadMessage, ConfigError

if TYPE_CHECKING:
    from joserfc.jwk import ECKey, RSAKey
    from joserfc.jws import JWSRegistry

ALGORITHMS = ("ES256", "RS256")  # source: dsx-flex.yaml 1.7.0, "Data Field Security"
MAX_KEYS, MAX_KEY_TEXT = 100, 262_144
MAX_SIGNED = 1_400_000  # characters of a JWS: a payload of 1 MB in base64, and its ends
LEAST_RSA_BITS = 2048  # source: RFC 7518, 3.3
_FORM = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")


class Signed(NamedTuple):
    """Content of a valid signature: the payload, the key, and the mark of this signature."""

    payload: bytes
    kid: str
    mark: bytes


class KeySet:
    """The public keys of the accepted senders. `text` is a JWKS. Raises ConfigError."""

    def __init__(self, text: bytes, file: str) -> None:
        self._keys: dict[str, tuple[ECKey | RSAKey, str]] = {}
        for n, entry in enumerate(_entries(text, file)):
            kid, isv = entry.get("kid", ""), entry.get("isv", "")
            if not isinstance(kid, str) or not isinstance(isv, str) or len(kid) > 200 or len(isv) > 200:
                raise ConfigError(f"{file}: key {n}: kid and isv: expected texts of at most 200 characters")
            if kid in self._keys:
                raise ConfigError(f"{file}: key {n}: kid {kid!r} is there twice; expected one key for each")
            self._keys[kid] = _key(entry, f"{file}: key {n}"), isv
        self._registry = _registry()

    @property
    def number(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    @property
    def speakers(self) -> frozenset[str]:
        """Return the ISVs of the keys; "" for a key that may sign for any ISV."""
        return frozenset(isv for _, isv in self._keys.values())

    def verify(self, text: str, isv: str) -> Signed:
        """Return the payload that a sender signed. Raises BadMessage for anything else."""
        from joserfc import jws
        from joserfc.errors import JoseError

        if len(text) > MAX_SIGNED:
            raise BadMessage(f"data of {len(text)} characters; expected at most {MAX_SIGNED}")
        if not _FORM.fullmatch(text):
            raise BadMessage("data: expected a JWS in compact form: header.payload.signature, base64url")
        try:
            token = jws.extract_compact(text.encode(), registry=self._registry)
            header = token.headers()
            alg, kid = header.get("alg"), header.get("kid", "")
            if alg not in ALGORITHMS:
                raise BadMessage(
                    f"data: signed with {str(alg)[:40]!r}; expected one of {', '.join(ALGORITHMS)}"
                )
            if "crit" in header or "b64" in header:
                raise BadMessage("data: its header asks for extensions (crit, b64); expected none")
            key = self._find(kid, isv)
            good = jws.validate_compact(token, key, registry=self._registry)
        except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise BadMessage(f"data: invalid signature: {type(error).__name__} {str(error)[:120]}") from None
        if not good:
            raise BadMessage(f"data: the signature does not hold under key {str(kid)[:80]!r} of {isv[:80]}")
        return Signed(bytes(token.payload), str(kid), _mark(text, str(alg)))

    def _find(self, kid: Any, isv: str) -> ECKey | RSAKey:
        if not isinstance(kid, str):
            raise BadMessage("data: the kid in its header is not text")
        if not kid and len(self._keys) == 1:
            key = next(iter(self._keys.values()))
        elif kid in self._keys:
            key = self._keys[kid]
        else:
            raise BadMessage(f"data: signed with key {kid[:80]!r}, which is not in the key file")
        if key[1] not in ("", isv):
            raise BadMessage(f"data: key {kid[:80]!r} is that of {key[1][:80]}, not of {isv[:80]}")
        return key[0]


class Signer:
    """The daemon's private key: a JWK, or PEM. Raises ConfigError, which never quotes the content."""

    def __init__(self, text: bytes, file: str, kid: str = "") -> None:
        from joserfc import jwk
        from joserfc.errors import JoseError

        entry: Any = None
        try:
            if text.lstrip()[:1] == b"{":
                entry = msgspec.json.decode(text)
                key = _key(entry, file, private=True)
            else:
                try:
                    key = _checked(jwk.RSAKey.import_key(text), file)
                except (JoseError, ValueError, TypeError):
                    key = _checked(jwk.ECKey.import_key(text), file)
        except (JoseError, ValueError, TypeError, msgspec.DecodeError):
            raise ConfigError(f"{file}: expected a private key, EC P-256 or RSA, as PEM or JWK") from None
        if not key.is_private:
            raise ConfigError(f"{file}: holds a public key; expected the private one, to sign with")
        named = entry.get("kid") if isinstance(entry, dict) else None
        self.kid = kid or (named if isinstance(named, str) else "") or key.thumbprint()
        self._key, self._registry = key, _registry()
        self.alg = "ES256" if key.key_type == "EC" else "RS256"

    def sign(self, payload: bytes) -> str:
        """Return a JWS in compact form."""
        from joserfc import jws

        header = {"alg": self.alg, "kid": self.kid}
        return jws.serialize_compact(header, payload, self._key, registry=self._registry)


def _mark(text: str, alg: str) -> bytes:
    """The same for copies of one signing. Of ECDSA the first half alone: for the other half there are always
    two that hold, and anybody can turn one into the other."""
    signed, _, signature = text.rpartition(".")
    raw = base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4)) if alg == "ES256" else b""
    return hashlib.blake2b(signed.encode() + raw[:32], digest_size=16).digest()


def _registry() -> JWSRegistry:
    from joserfc import jws

    registry = jws.JWSRegistry(algorithms=list(ALGORITHMS))
    registry.max_payload_length = MAX_SIGNED
    return registry


def _entries(text: bytes, file: str) -> list[dict[str, Any]]:
    if len(text) > MAX_KEY_TEXT:
        raise ConfigError(f"{file}: {len(text)} bytes; expected at most {MAX_KEY_TEXT}")
    try:
        tree = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f'{file}: is not JSON; expected a key set: {{"keys": [...]}} (RFC 7517)') from None
    keys = tree.get("keys") if isinstance(tree, dict) else None
    if (
        not isinstance(keys, list)
        or not 0 < len(keys) <= MAX_KEYS
        or not all(isinstance(k, dict) for k in keys)
    ):
        raise ConfigError(f'{file}: expected a key set of 1 to {MAX_KEYS} keys: {{"keys": [...]}} (RFC 7517)')
    return keys


def _key(entry: dict[str, Any], where: str, private: bool = False) -> ECKey | RSAKey:
    from joserfc import jwk
    from joserfc.errors import JoseError

    kind = entry.get("kty")
    if kind not in ("EC", "RSA"):
        raise ConfigError(f"{where}: kty {str(kind)[:20]!r}; expected EC (P-256) or RSA")
    if not private and "d" in entry:
        raise ConfigError(
            f"{where}: is a private key; expected the public key, since a reader of this file could sign"
        )
    own = {k: v for k, v in entry.items() if k not in ("isv", "use", "key_ops")}
    if entry.get("use", "sig") != "sig" or entry.get("alg", ALGORITHMS[0]) not in ALGORITHMS:
        raise ConfigError(f"{where}: is not meant for signatures with {' or '.join(ALGORITHMS)}")
    try:
        return _checked(jwk.import_key(own), where)
    except (JoseError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where}: is not a key: {type(error).__name__}") from None


def _checked(key: Any, where: str) -> ECKey | RSAKey:
    if key.key_type == "EC" and key.curve_name != "P-256":
        raise ConfigError(f"{where}: curve {key.curve_name}; expected P-256, as ES256 wants")
    if key.key_type == "RSA" and key.raw_value.key_size < LEAST_RSA_BITS:
        raise ConfigError(f"{where}: {key.raw_value.key_size} bits; expected {LEAST_RSA_BITS} at least")
    found: ECKey | RSAKey = key
    return found
