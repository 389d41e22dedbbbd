"""Lists of host names as Slurm writes them: `gpu[001-004,7],login1` and `r[1-2]n[01-18]`, in order;
and which node of a site a scheduler's name means. Pure functions. Imports `twin.catalogue.errors` only.
"""

from __future__ import annotations

import itertools
import re

from twin.catalogue import ConfigError
from twin.telemetry import Names

MAX_HOSTS = 200_000
MAX_TEXT = 4 << 20  # characters
_PART = re.compile(r"(?P<plain>[^\[\],]+)|\[(?P<ranges>[0-9,\-]+)\]")
_RANGE = re.compile(r"(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?")


def expand_hosts(text: str) -> list[str]:
    """Return the names in a host list. Raises ValueError with the expectation."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"expected a host list of at most {MAX_TEXT} characters, got {len(text)}")
    hosts: list[str] = []
    at = 0
    while at < len(text):
        at, some = _word(text, at)
        if len(hosts) + len(some) > MAX_HOSTS:
            raise ValueError(f"expected at most {MAX_HOSTS} hosts in {text[:60]!r}")
        hosts += some
        if at < len(text):
            if text[at] != "," or at + 1 == len(text):
                raise ValueError(f"expected a host list such as gpu[001-004], got {text[:60]!r}")
            at += 1
    return hosts


def _word(text: str, at: int) -> tuple[int, list[str]]:
    """Return (end, names) of the part of a list that begins at `at`."""
    pieces: list[list[str]] = []
    count = 1
    while match := _PART.match(text, at):
        if match["plain"] is not None:
            pieces.append([match["plain"]])
        else:
            pieces.append(_numbers(match["ranges"], text))
        count *= len(pieces[-1])
        if count > MAX_HOSTS:
            raise ValueError(f"expected at most {MAX_HOSTS} hosts in {text[:60]!r}")
        at = match.end()
    if not pieces:
        raise ValueError(f"expected a host list such as gpu[001-004], got {text[:60]!r}")
    return at, ["".join(p) for p in itertools.product(*pieces)]


def _numbers(ranges: str, text: str) -> list[str]:
    out: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"expected ranges such as [001-004,7], got [{ranges[:60]}]")
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if last < first or len(out) + last - first >= MAX_HOSTS:
            raise ValueError(f"expected ascending ranges of at most {MAX_HOSTS} hosts in {text[:60]!r}")
        width = len(match["first"])
        out += [f"{i:0{width}d}" for i in range(first, last + 1)]
    return out


def expand_names(pairs: dict[str, str], where: str) -> dict[str, str]:
    """Return outside name -> entity, where both sides may be host lists of equal length. Raises
    ConfigError.

    `gpu[001-018]: lab/h1/r1/node[0-17]` is eighteen pairs.
    """
    out: dict[str, str] = {}
    problems: list[str] = []
    for outside, entity in pairs.items():
        try:
            left, right = expand_hosts(outside), expand_hosts(entity)
        except ValueError as error:
            problems.append(f"{where}.{outside[:60]}: {error}")
            continue
        if len(left) != len(right):
            problems.append(
                f"{where}.{outside[:60]}: {len(left)} names for {len(right)} entities; expected as many"
            )
        for name, path in zip(left, right, strict=False):
            if out.setdefault(name, path) != path:
                problems.append(f"{where}.{outside[:60]}: {name} is named twice")
    if problems:
        raise ConfigError(problems)
    return out


def find_node(site: Names, given: str) -> int | None:
    """Return the node of this name, or the only one of the rack of this name; None for neither."""
    node = site.entity("node", given)
    if node is None and site.entity("rack", given) is not None:
        single = site.entity("node", f"{given}/node0")
        node = single if site.entity("node", f"{given}/node1") is None else None
    return node
