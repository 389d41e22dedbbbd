"""Section `power` of the configuration: how outside demands come in, and who is told what is drawn.

DSX Flex over the broker, a file of load targets, files of prices and carbon. A part of the daemon's
configuration; `twin.app.config` has the whole. Part of the shell.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec

from twin.app.config_schedulers import Strict
from twin.quantities import find_quantity

if TYPE_CHECKING:
    from twin.app.config import Loaded
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

    identifier: str
    feeds: dict[str, str]
    keys_file: str | None = None
    isvs: list[str] = []
    unsigned: Literal["refuse", "accept"] = "refuse"
    copies: Literal["refuse", "accept"] = "refuse"
    publish: bool = True
    heartbeat_s: float = 60.0
    sign_key_file: str | None = None
    last_resort: list[LastResort] = []


class Power(Strict, msgspec.Struct, frozen=True):
    """Outside demands. `targets_file` (YAML or CSV) and `outlooks_files` (quantity of the site: CSV of time
    and value) are read again when they change, looked at each `look_s`.
    """

    flex: Flex | None = None
    targets_file: str | None = None
    outlooks_files: dict[str, str] = {}
    look_s: float = 5.0


def power_problems(power: Power | None) -> list[str]:
    """What the types of this section do not say."""
    out: list[str] = []

    def within(path: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            out.append(f"$.power.{path}: expected a number from {low:g} to {high:g}, got {value:g}")

    if power is None:
        return out
    within("look_s", power.look_s, 0.1, 600)
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
        within("flex.heartbeat_s", power.flex.heartbeat_s, 1, 3600)
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


def power_faults(loaded: Loaded, site: Site) -> list[str]:
    """Feeders that this site does not have, and files that are wrong."""
    from twin.app.outside import load_keys, load_signer
    from twin.app.outside_files import is_uncheckable
    from twin.app.target_files import read_targets
    from twin.errors import ConfigError

    power, out = loaded.config.power, list[str]()
    if power is None:
        return out
    if power.targets_file is not None:
        try:
            read_targets(loaded.file(power.targets_file), site)
        except ConfigError as error:
            out += [f"{loaded.path}: $.power.targets_file: {problem}" for problem in error.problems]
    for quantity, name in power.outlooks_files.items():
        if not loaded.file(name).is_file():
            out.append(f"{loaded.path}: $.power.outlooks_files.{quantity}: {loaded.file(name)}: is not there")
    if power.flex is None:
        return out
    for tag, feeder in power.flex.feeds.items():
        if feeder_of(feeder, site) is None:
            out.append(
                f"{loaded.path}: $.power.flex.feeds.{tag}: no feeder {feeder[:100]!r}; expected one of the "
                f"site file, or `{SITE}`"
            )
    for key_file, load in ((power.flex.keys_file, load_keys), (power.flex.sign_key_file, load_signer)):
        if is_uncheckable(key_file):
            continue  # told already, as all such files are
        try:
            load(loaded, power.flex)
        except ConfigError as error:
            out += [f"{loaded.path}: $.power.flex: {problem}" for problem in error.problems]
    return out


def feeder_of(name: str, site: Site) -> str | None:
    """The full name of a feed's feeder; "" for the site as a whole; None if there is none."""
    found = site.entity("feeder", name)
    if found is not None:
        return site.name("feeder", found)
    return "" if name == SITE else None


def power_notes(power: Power | None) -> list[str]:
    """What people should know of this section before a daemon acts by it."""
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
