"""Section: the base of every part of the daemon's configuration, and its errors beyond the types."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

_HOST = re.compile(r"[A-Za-z0-9_.:\-]+")
_BRACKETS = re.compile(r"\w+[\[{]|[{}]")  # not those of an IPv6 address
HOST_LIST = re.compile(r"\[[0-9,\-]+\]")


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A section: a key that it does not know is refused."""


class Problems(list[str]):
    """Errors of a configuration, each with its place in the file."""

    def within(self, path: str, value: float, low: float, high: float) -> None:
        """Note a number outside its bounds."""
        if not low <= value <= high:
            self.append(f"$.{path}: expected a number from {low:g} to {high:g}, got {value:g}")

    def http(self, path: str, url: str) -> None:
        """Note a URL that is not HTTP, or has no host or no possible port; it may hold host lists."""
        if not url.startswith(("http://", "https://")):
            self.append(f"$.{path}: expected a URL with http:// or https://, got {url[:80]!r}")
            return
        if _BRACKETS.search(HOST_LIST.sub("0", url).partition("//")[2].partition("/")[0]):
            self.append(f"$.{path}: expected a host list such as node[01-18], got {url[:80]!r}")
            return
        try:
            parts = urlsplit(HOST_LIST.sub("0", url))
            found = parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            found = False
        if not found:
            self.append(f"$.{path}: expected a host and a port from 1 to 65535, got {url[:80]!r}")
        elif not _HOST.fullmatch(parts.hostname or ""):
            self.append(f"$.{path}: expected a host such as node1 or node[01-18], got {url[:80]!r}")
