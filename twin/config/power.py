"""Section `power` of the configuration: external demands, and reports of the load to the grid.

DSX Flex over the broker, a file of load targets, files of prices and carbon.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec

from twin.catalogue import find_quantity
from twin.config.section import Problems, Strict

if TYPE_CHECKING:
    from twin.site import Site

MAX_FEEDS, MAX_TAG = 200, 100
MAX_FILES = 100
SITE = "site"  # as a feed's place: the racks of the site together
_LEVEL = re.compile(r"[^+#/\s\0]{1,200}")
_TAG = re.compile(r"[^+/\s\0]{1,100}")

LastResort = Literal["SHUTDOWN_NODES", "SHUTDOWN_RACKS", "CUT_DATA_FEEDS", "TRIP_BREAKERS"]


class Flex(Strict, msgspec.Struct, frozen=True):
    """DSX Flex: `identifier` is ours, `feeds` maps feed tags to feeders (`site`: its racks together).

    Targets count if signed with a key of `keys_file` (JWKS), from `isvs` (none named: whoever has a key).
    `publish`: power states each `heartbeat_s` and breaches, signed with `sign_key_file`. `last_resort` is
    what a critical breach that was not mended names for others to do; nothing unless you say so.
    """

    identifier: str  # our name at the grid operator, as registered
    feeds: dict[str, str]  # feed tag: feeder of the site file, or `site`: {main-a: lab/hall1/feed-a}
    # public keys (JWKS) of those who may set targets; with two, an `isv` in each
    keys_file: str | None = None
    isvs: list[str] = []  # who may; without it, whoever has a key
    # accept: whoever the broker lets write there caps the site
    unsigned: Literal["refuse", "accept"] = "refuse"
    # accept: an old command that is sent once more counts anew
    copies: Literal["refuse", "accept"] = "refuse"
    publish: bool = True  # power states and breaches, by the daemon that leads
    heartbeat_s: float = 60.0  # between two power states
    sign_key_file: str | None = None  # our private key, EC P-256 or RSA; without it nothing is signed
    last_resort: list[LastResort] = []  # what an escalated breach names for others to do


class Power(Strict, msgspec.Struct, frozen=True):
    """Outside demands. `targets_file` (YAML or CSV) and `outlooks_files` (quantity of the site: CSV of time
    and value) are read again when they change, looked at each `look_s`.
    """

    flex: Flex | None = None  # DSX Flex over the broker
    targets_file: str | None = None  # load targets, YAML or CSV, read again when it changes
    outlooks_files: dict[str, str] = {}  # time,value with a header: {site.grid_price_usd_per_kwh: price.csv}
    look_s: float = 5.0  # between looks at these files


def power_problems(power: Power | None) -> list[str]:
    """Errors of this section beyond its types."""
    out = Problems()
    if power is None:
        return out
    out.within("power.look_s", power.look_s, 0.1, 600)
    if len(power.outlooks_files) > MAX_FILES:
        out.append(f"$.power.outlooks_files: expected at most {MAX_FILES}, got {len(power.outlooks_files)}")
    for key in power.outlooks_files:
        if not key.startswith("site.") or find_quantity(key) is None:
            out.append(
                f"$.power.outlooks_files: {key[:60]!r}: expected a quantity of the site, such as "
                "site.grid_price_usd_per_kwh or site.grid_carbon_g_per_kwh"
            )
    if power.flex is not None:
        out += _flex_problems(power.flex)
        out.within("power.flex.heartbeat_s", power.flex.heartbeat_s, 1, 3600)
    return out


def _flex_problems(flex: Flex) -> list[str]:
    out = []
    for path, names in (("identifier", [flex.identifier]), ("isvs", flex.isvs)):
        out += [
            f"$.power.flex.{path}: {name[:60]!r}: expected a level of a topic, without + # / and spaces"
            for name in names
            if not _LEVEL.fullmatch(name)
        ]
    if not 0 < len(flex.feeds) <= MAX_FEEDS:
        out.append(f"$.power.flex.feeds: expected 1 to {MAX_FEEDS}: main-a: FEEDER; got {len(flex.feeds)}")
    out += [
        f"$.power.flex.feeds: tag {tag[:60]!r}: expected up to {MAX_TAG} characters without / + and spaces"
        for tag in flex.feeds
        if not _TAG.fullmatch(tag)
    ]
    if flex.keys_file is None and flex.unsigned == "refuse":
        out.append(
            "$.power.flex.keys_file: missing: no load target could be verified; expected a key set of your "
            "ISVs (JWKS), or `unsigned: accept` where the broker alone says who speaks"
        )
    return out


def feeder_of(name: str, site: Site) -> str | None:
    """The full name of a feed's feeder; "" for the site as a whole; None if there is none."""
    found = site.entity("feeder", name)
    if found is not None:
        return site.name("feeder", found)
    return "" if name == SITE else None


def power_notes(power: Power | None) -> list[str]:
    """Notes on this section for the operator, before a daemon acts by it."""
    if power is None or power.flex is None:
        return []
    flex, out = power.flex, []
    if flex.unsigned == "accept":
        out.append(
            "power.flex.unsigned: accept: whoever the broker lets write to grid/v1/isv/ sets load targets"
        )
    if flex.publish and flex.sign_key_file is None:
        out.append(
            "power.flex.sign_key_file is missing: power states and breaches are published unsigned, which "
            "DSX Flex forbids"
        )
    return out
