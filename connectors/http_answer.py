"""HTTP response: its body up to a limit, or the reason for its absence in words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

_BY_NUMBER = {
    errno.ECONNREFUSED: "the connection was refused; check that the server runs, and its port",
    errno.EHOSTUNREACH: "the host is unreachable; check the address and the firewalls on the way",
    errno.ENETUNREACH: "the network is unreachable; check the address and the routes of this host",
    errno.ECONNRESET: "the connection was reset; check the firewalls, and whether the server expects https",
}


async def body_of(
    answer: aiohttp.ClientResponse, where: str, most_bytes: int, error: type[Exception]
) -> bytes:
    """Return the whole body from `where`. Raises `error` if it is larger than `most_bytes`."""
    text = bytearray()
    async for part in answer.content.iter_any():
        text += part
        if len(text) > most_bytes:
            raise error(f"{where}: an answer of more than {most_bytes} bytes")
    return bytes(text)


@contextmanager
def failing_as(kind: type[Exception], where: str, timeout_s: float) -> Iterator[None]:
    """Raise what aiohttp and the network raise as `kind`, with words on what to look at."""
    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise kind(f"{where}: {why_no_answer(error, timeout_s)}") from None


def why_no_answer(error: Exception, timeout_s: float) -> str:
    """Return the reason why a request had no answer, and the action to take."""
    if isinstance(error, TimeoutError):
        return f"no complete answer within {timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        return f"its certificate is not trusted: {why[:120]}; expected one for this host name, by `ca_file`"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER" in str(error):
            return "the server does not speak TLS; expected http://, or another port"
        return f"the TLS handshake failed: {str(error.os_error)[:120]}; check the certificates of both sides"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"no such host: {error.host[:80]}; check the name and the DNS of this host"
    if "CERTIFICATE_REQUIRED" in str(error):
        return "the server requires a client certificate; expected `cert_file` and `key_file`"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed without an answer; check whether it needs https or a certificate"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer ended early"
    if isinstance(error, aiohttp.InvalidURL):  # its text might have a password
        return "is not a valid URL"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the server does not speak HTTP; check the port, and whether it expects https"
    number = getattr(error, "errno", None)
    if number in _BY_NUMBER:
        return _BY_NUMBER[number]
    return f"{type(error).__name__}: {str(error)[:200]}"
