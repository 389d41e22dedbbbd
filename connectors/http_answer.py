"""Answer to a request over HTTP: its body, read no further than a limit, or why there is none, in words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

_BY_NUMBER = {
    errno.ECONNREFUSED: "the connection is refused; look whether the server runs, and at the port",
    errno.EHOSTUNREACH: "the host cannot be reached; look at the address, and for a firewall between",
    errno.ENETUNREACH: "the network cannot be reached; look at the address, and at the routes of this host",
    errno.ECONNRESET: "the connection is reset; look whether it expects https, and for a firewall between",
}


async def body_of(
    answer: aiohttp.ClientResponse, where: str, most_bytes: int, error: type[Exception]
) -> bytes:
    """All of the body that came from `where`. Raises `error` where it is more than `most_bytes`."""
    text = bytearray()
    async for part in answer.content.iter_any():
        text += part
        if len(text) > most_bytes:
            raise error(f"{where}: an answer beyond {most_bytes} bytes")
    return bytes(text)


@contextmanager
def failing_as(kind: type[Exception], where: str, timeout_s: float) -> Iterator[None]:
    """Raise what aiohttp and the network raise as `kind`, with words on what to look at."""
    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise kind(f"{where}: {why_no_answer(error, timeout_s)}") from None


def why_no_answer(error: Exception, timeout_s: float) -> str:
    """Why a request had no answer, and what to look at."""
    if isinstance(error, TimeoutError):
        return f"no whole answer within {timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        return f"its certificate is not trusted: {why[:120]}; expected a valid one of that name, by `ca_file`"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER" in str(error):
            return "it speaks no TLS; expected http:// for it, or another port"
        return f"TLS cannot be agreed on: {str(error.os_error)[:120]}; look at the certificates of both sides"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"no such host: {error.host[:80]}; look at the name, and at the DNS of this host"
    if "CERTIFICATE_REQUIRED" in str(error):
        return "it wants a certificate of ours; expected `cert_file` and `key_file`"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection is closed without an answer; look whether it expects https, or our certificate"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer breaks off before its end"
    if isinstance(error, aiohttp.InvalidURL):  # its text might have a password
        return "is no URL that can be asked"
    if isinstance(error, aiohttp.ClientResponseError):
        return "what answers speaks no HTTP; look at the port, and whether it expects https"
    number = getattr(error, "errno", None)
    if number in _BY_NUMBER:
        return _BY_NUMBER[number]
    return f"{type(error).__name__}: {str(error)[:200]}"
