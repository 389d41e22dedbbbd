"""Grid wiring: files of load targets, outlooks and the DSX Flex link, made for one site.

It holds the sources, the decoder of DSX Flex, its publisher, and the faults of each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from connectors.dsx import FlexDecoder, FlexTrust, KeySet, Signer
from connectors.outlooks import OutlookSource
from twin.catalogue import ConfigError
from twin.config import SITE, Flex, Loaded, feeder_of, warn_exposed
from twin.contracts import Inlet, LoadTarget, Source
from twin.engine import Engine
from twin.site import Site
from twin.wiring.external_files import is_uncheckable
from twin.wiring.flex import Feeds, FlexIdentity, FlexPublisher
from twin.wiring.outlooks import make_outlooks, outlook_faults
from twin.wiring.target_files import OutlookFileSource, TargetsSource, WatchedFile, plain_bytes, read_targets

log = logging.getLogger(__name__)
T = TypeVar("T")
CHECK_KEYS_S = 5.0
Wrong = dict[str, tuple[str, str, str]]  # identity of an alarm -> severity, title, text


@dataclass
class GridInterface:
    """The parts of sections `power` and `outlooks`, to be started; `decoder` takes messages on grid/v1/."""

    sources: list[Source] = field(default_factory=list)
    decoder: FlexDecoder | None = None
    publisher: FlexPublisher | None = None
    files: dict[str, WatchedFile] = field(default_factory=dict)  # by what they are, in words
    services: list[OutlookSource] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Counts of what was taken and reported, of fixed names."""
        out = {} if self.decoder is None else {"dsx-flex-in": self.decoder.counts}
        return out if self.publisher is None else out | {"dsx-flex-out": self.publisher.counts}

    def wrong(self) -> Wrong:
        """Alarms: a file that is not taken, a service without values, an agent that cannot report."""
        out: Wrong = {
            f"outside/{what}": ("warning", f"The {what} is not taken", file.fault)
            for what, file in self.files.items()
            if file.fault
        }
        out |= {
            f"outside/{service.name}": ("warning", f"No {service.name} comes", fault)
            for service in self.services
            if (fault := service.fault)
        }
        if self.publisher is not None and self.publisher.fault:
            out["outside/dsx-flex"] = (
                "warning",
                "DSX Flex does not receive our power state",
                self.publisher.fault,
            )
        return out


def make_grid_interface(
    loaded: Loaded, site: Site, engine: Callable[[], Engine], may_act: Callable[[], bool]
) -> GridInterface:
    """All that the configuration asks for. Raises ConfigError; starts nothing."""
    power, out = loaded.config.power, GridInterface(services=make_outlooks(loaded))
    out.sources += out.services
    if power is None:
        return out

    def targets() -> tuple[LoadTarget, ...]:
        now = engine()
        return now.intake.load_targets.current(now.site)

    if power.targets_file is not None:
        source = TargetsSource(loaded.file(power.targets_file), site, targets, power.look_s)
        out.sources.append(source)
        out.files["file of load targets"] = source.file
    for quantity, name in power.outlooks_files.items():
        outlook = OutlookFileSource(quantity, loaded.file(name), power.look_s)
        out.sources.append(outlook)
        out.files[f"file of {quantity}"] = outlook.file
    if power.flex is not None:
        out.decoder = _flex_decoder(loaded, power.flex, site, engine, targets)
        keys = KeysSource(loaded, power.flex, out.decoder)
        out.sources.append(keys)
        out.files["key file of DSX Flex"] = keys.file
        if power.flex.publish:
            out.publisher = _flex_publisher(loaded, power.flex, out.decoder, engine, may_act)
    return out


def _flex_decoder(
    loaded: Loaded,
    flex: Flex,
    site: Site,
    engine: Callable[[], Engine],
    targets: Callable[[], tuple[LoadTarget, ...]],
) -> FlexDecoder:
    feeders: dict[str, str] = {}
    for tag, name in flex.feeds.items():
        full = feeder_of(name, site)
        if full is None:
            raise ConfigError(f"{loaded.path}: $.power.flex.feeds.{tag}: no feeder {name[:100]!r}")
        feeders[tag] = full

    def event_ids() -> list[str]:
        return [known.partition(":")[2] for known in engine().intake.seen if known.startswith("LoadTarget")]

    trust = FlexTrust(isvs=flex.isvs, unsigned=flex.unsigned, copies=flex.copies)
    return FlexDecoder(feeders, load_keys(loaded, flex), targets, event_ids, trust)


def _flex_publisher(
    loaded: Loaded,
    flex: Flex,
    decoder: FlexDecoder,
    engine: Callable[[], Engine],
    may_act: Callable[[], bool],
) -> FlexPublisher:
    identity = FlexIdentity(
        identifier=flex.identifier,
        signer=load_signer(loaded, flex),
        heartbeat_s=flex.heartbeat_s,
        last_resort=flex.last_resort,
    )
    feeds = Feeds(decoder.feeds, engine)
    return FlexPublisher(
        identity, feeds, may_act, lambda correlation: decoder.traces.get(correlation, ("", ""))
    )


class KeysSource:
    """Reads a key file again when it changed, and reports faults inside messages that were taken."""

    name = "dsx-flex"

    def __init__(self, loaded: Loaded, flex: Flex, decoder: FlexDecoder) -> None:
        self._loaded, self._flex, self._decoder = loaded, flex, decoder
        self.file = WatchedFile(loaded.file(flex.keys_file) if flex.keys_file else loaded.path)

    async def run(self, inlet: Inlet) -> None:
        """Check again and again until cancelled."""
        while True:
            await self.check(inlet)
            await asyncio.sleep(CHECK_KEYS_S)

    async def check(self, inlet: Inlet) -> None:
        """Report faults, and read the key file if it changed."""
        faults, self._decoder.faults = self._decoder.faults, []
        for fault in faults:
            inlet.reject("inside a message", fault)
        if self._flex.keys_file is None or not await asyncio.to_thread(self.file.changed):
            return
        try:
            self._decoder.keys = await asyncio.to_thread(load_keys, self._loaded, self._flex)
        except ConfigError as error:
            self.file.taken("; ".join(error.problems))
            inlet.reject(self.name, self.file.fault)
        else:
            self.file.taken()


def load_keys(loaded: Loaded, flex: Flex) -> KeySet | None:
    """The keys of those who may set targets. Raises ConfigError."""
    keys = _read(loaded, flex.keys_file, KeySet)
    if keys is not None and "" in keys.speakers and keys.number > 1:
        log.warning("%s: a key without `isv` signs for every ISV; expected one in each", flex.keys_file)
    return keys


def load_signer(loaded: Loaded, flex: Flex) -> Signer | None:
    """Our own key. Raises ConfigError; never quotes what it read."""
    signer = _read(loaded, flex.sign_key_file, Signer)
    if signer is not None and flex.sign_key_file is not None:
        warn_exposed(loaded.file(flex.sign_key_file))
    return signer


def _read(loaded: Loaded, name: str | None, make: Callable[[bytes, str], T]) -> T | None:
    if name is None:
        return None
    path = loaded.file(name)
    return make(plain_bytes(path, 2**20), str(path))


def power_faults(loaded: Loaded, site: Site) -> list[str]:
    """Feeders that this site does not have, and files of `power` and `outlooks` that are wrong."""
    power, out = loaded.config.power, outlook_faults(loaded)
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
            continue  # reported already, as all such files are
        try:
            load(loaded, power.flex)
        except ConfigError as error:
            out += [f"{loaded.path}: $.power.flex: {problem}" for problem in error.problems]
    return out
