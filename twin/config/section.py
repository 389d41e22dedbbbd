"""Section: the base of every part of the daemon's configuration, and its errors beyond the types."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

_HOST = re.compile(r"[A-Za-z0-9_.:\-]+")
_BRACKETS = re.compile(r"\w+[\[{]|[{}]")  # not those of an IPv6 address
HOST_LIST = re.compile(r"\[[0-9,\-]+\]")
# source: limits.h of Linux, NAME_MAX, and PATH_MAX less room for the name of a file in a folder
MAX_PART_BYTES, MAX_PATH_BYTES = 255, 4096 - 256


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


class Text(NamedTuple):
    """A text of a configuration: its place, as in `$.broker.maps.a/#`, and the key that holds it, `maps`."""

    where: str
    key: str
    text: str


def texts_of(part: Any, where: str = "$", key: str = "") -> Iterator[Text]:
    """Every text below a part of a configuration."""
    if isinstance(part, str):
        yield Text(where, key, part)
    elif isinstance(part, list):
        for i, item in enumerate(part):
            yield from texts_of(item, f"{where}[{i}]", key)
    elif isinstance(part, dict):
        for name, item in part.items():
            yield Text(where, "", str(name))
            yield from texts_of(item, f"{where}.{name}", key)
    elif isinstance(part, msgspec.Struct):
        for name in part.__struct_fields__:
            yield from texts_of(getattr(part, name), f"{where}.{name}", name)


def path_under(folder: Path, name: str) -> Path:
    """The whole path that a text names, from this folder on. Raises ValueError for one that no file can have.

    Links stay as they are: a renewal of certificates and secrets may turn them elsewhere.
    """
    if "\0" in name:
        raise ValueError("holds a NUL byte")
    try:
        above, parts = folder.absolute(), Path(name).expanduser().parts
        while parts[:1] == ("..",):
            above, parts = above.resolve().parent, parts[1:]
        path = Path(above, *parts)
        whole = os.fsencode(path)
    except RuntimeError:
        raise ValueError("begins with ~ and a user that this host does not know") from None
    except UnicodeEncodeError:
        raise ValueError("cannot be written in UTF-8") from None
    longest = max(map(len, whole.split(b"/")))
    if longest > MAX_PART_BYTES or len(whole) > MAX_PATH_BYTES:
        raise ValueError(
            f"has {len(whole)} bytes, and {longest} in one name; expected at most {MAX_PATH_BYTES}, and "
            f"{MAX_PART_BYTES} in one name"
        )
    try:
        path.resolve()
    except RuntimeError:
        raise ValueError("leads into a loop of symbolic links") from None
    return path
