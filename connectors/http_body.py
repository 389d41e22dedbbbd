"""The body of an answer over HTTP, read no further than a limit."""

from __future__ import annotations

import aiohttp


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
