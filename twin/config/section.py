"""Section: the base of every part of the daemon's configuration, and its errors beyond the types."""

from __future__ import annotations

import msgspec


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A section: a key that it does not know is refused."""


class Problems(list[str]):
    """Errors of a configuration, each with its place in the file."""

    def within(self, path: str, value: float, low: float, high: float) -> None:
        """Note a number outside its bounds."""
        if not low <= value <= high:
            self.append(f"$.{path}: expected a number from {low:g} to {high:g}, got {value:g}")

    def http(self, path: str, url: str) -> None:
        """Note a URL that is not HTTP."""
        if not url.startswith(("http://", "https://")):
            self.append(f"$.{path}: expected a URL with http:// or https://, got {url[:80]!r}")
