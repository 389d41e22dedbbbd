"""Assets: the files of the web application, as the wheel holds them, each with its headers.

`twin/web` has their sources; `make page` builds them. The page itself is open to all: it holds nothing of the
site and asks for a token first.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib import resources

from aiohttp import web

from twin.api.answers import Refused

# Nothing from elsewhere, nothing inline; `data:` is the empty icon.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
KINDS = {"index.html": "text/html", "app.js": "text/javascript", "app.css": "text/css"}


@cache
def asset(name: str) -> tuple[bytes, bytes, str]:
    """Return (content, compressed content, tag) of a file."""
    body = (resources.files("twin") / "web" / "assets" / name).read_bytes()
    return body, gzip.compress(body, 9, mtime=0), f'"{hashlib.sha256(body).hexdigest()[:24]}"'


def _served(request: web.Request, name: str) -> web.Response:
    body, packed, tag = asset(name)
    # The browser keeps it and asks each time whether it is still the same.
    headers = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if name.endswith(".html"):
        headers["Content-Security-Policy"] = POLICY
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=headers)
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        body, headers["Content-Encoding"] = packed, "gzip"
    return web.Response(body=body, content_type=KINDS[name], charset="utf-8", headers=headers)


async def index(request: web.Request) -> web.Response:
    """Serve the web application, which asks for a token first."""
    return _served(request, "index.html")


async def part(request: web.Request) -> web.Response:
    """Serve a script or style of the web application."""
    name = request.match_info["file"]
    if name not in KINDS or name.endswith(".html"):
        raise Refused(404, "not a file of the page; expected app.js or app.css")
    return _served(request, name)
