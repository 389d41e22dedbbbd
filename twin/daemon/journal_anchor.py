"""Journal anchor: signs the journal's head each minute, and keeps it beside the journal and outside.

What is outside may be away: it is sent again with the next head, and no tick waits for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from pathlib import Path

from connectors.mqtt import LinkSettings, MqttLink
from twin.anchor import AnchorFile, HeadSigner, SignedHead, parse_head
from twin.catalogue import ConfigError, ConnectorError, StorageError, clean, utc
from twin.config import Broker, Loaded
from twin.daemon.alarms import AlarmBook
from twin.daemon.bootstrap import OpenedRun
from twin.daemon.etcd import keep_head, kept_heads, make_etcd
from twin.daemon.leader import daemon_name
from twin.run import OPEN, journal_begin, journal_lines, line_hash, line_head
from twin.telemetry import Message
from twin.wiring import Links, client_id_of, link_settings

log = logging.getLogger(__name__)
EVERY_S, PATIENCE_S = 60.0, 10.0
ALARM_AFTER = 5  # heads that an anchor did not take. source: estimate, longer than a broker's restart
ANSWERS = 5  # of an anchor that are no heads, and are written to the log
ANSWER_S = 5.0  # in which retained messages come; source: estimate
_WHERE = {"file": "beside the journal", "mqtt": "at the broker", "etcd": "in etcd"}
Keep = Callable[[bytes], Awaitable[None]]


def anchor_topic(loaded: Loaded, run: str = "+") -> str:
    """The topic that holds the newest signed head of a run of a daemon; of all runs by default.

    Raises ConfigError.
    """
    broker = loaded.config.broker
    if not isinstance(broker, Broker):
        raise ConfigError(
            f"{loaded.path}: $.broker: {broker}; expected a broker of yours, to keep heads there"
        )
    client_id = client_id_of(loaded, broker.client_id, daemon_name(loaded))
    return f"IT/v1/{broker.integration}/Journal/{client_id}/{run}"


class JournalAnchor:
    """Service of one run. Without a key it signs nothing. `links`: those in use, None before there are any.

    `outside`: place -> lines of the last head that it acknowledged.
    """

    def __init__(
        self,
        loaded: Loaded,
        opened: OpenedRun,
        alarms: AlarmBook,
        slow: Executor,
        links: Callable[[], Links | None],
    ) -> None:
        settings = loaded.config.journal
        pem = loaded.secret(settings.sign_key_file)
        self.signer = (
            HeadSigner.of_pem(pem, f"$.journal.sign_key_file: {settings.sign_key_file}") if pem else None
        )
        recorder = opened.recorder
        self._recorder, self._alarms, self._slow, self._links = recorder, alarms, slow, links
        self._loaded, self._site = loaded, str(opened.spec.file.get("site", ""))
        self._keeps: dict[str, Keep] = {}
        if "mqtt" in settings.anchor:
            self._keeps["mqtt"] = self._to_mqtt
        if "etcd" in settings.anchor:
            self._etcd = make_etcd(loaded)
            self._keeps["etcd"] = self._to_etcd
        self._misses = dict.fromkeys(self._keeps, 0)
        self.outside: dict[str, int] = {}
        self._file: AnchorFile | None = None
        self._run = ""
        self._last: SignedHead | None = None  # of the daemon before
        self._known, self._barred = set[str](), set[str]()  # places that may be written, or must not be
        if self.signer is not None and recorder.folder is not None:
            self._file = AnchorFile(recorder.folder)
            self._begin(recorder.folder, self._file)

    def _begin(self, folder: Path, file: AnchorFile) -> None:
        """Go on where the last daemon of this run ended."""
        try:
            heads = file.heads()
        except StorageError as error:
            log.error("%s; signed heads go on behind it", error)
            heads = []
        first = next(journal_lines(folder / OPEN), b"")
        self._run = heads[-1].run if heads and line_head(first).seq > 0 else line_hash(first)
        self._last = heads[-1] if heads else None
        if heads and heads[-1].run == self._run:
            self.outside = {n: heads[-1].outside.get(n, 0) for n in self._keeps}

    async def run(self) -> None:
        """Sign and store heads until cancelled."""
        loop = asyncio.get_running_loop()
        if self._last is not None and not await loop.run_in_executor(self._slow, self._holds, self._last):
            self._report_mismatch("file", self._last)
        while True:
            await self.once()
            await asyncio.sleep(EVERY_S)

    async def once(self) -> None:
        """Sign one head, store it beside the journal, then send it to each outside anchor."""
        head = self._sign()
        if head is None or self._file is None:
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._slow, self._file.append, head)
            self._alarms.clear("anchor/file")
        except StorageError as error:
            self._missed("file", str(error))
        for name, keep in self._keeps.items():
            try:
                async with asyncio.timeout(PATIENCE_S):
                    if name in self._barred or not await self._may_replace(name):
                        continue
                    await keep(head.line)
            except (ConnectorError, TimeoutError) as error:
                self._misses[name] += 1
                if self._misses[name] >= ALARM_AFTER:
                    self._missed(name, str(error) or f"no answer within {PATIENCE_S:g} s")
            else:
                self._misses[name], self.outside[name] = 0, head.lines
                self._alarms.clear(f"anchor/{name}")

    async def _may_replace(self, name: str) -> bool:
        """Return True if the journal continues the head at an anchor. Otherwise that head is evidence."""
        if name in self._known:
            return True
        loop, signer = asyncio.get_running_loop(), self.signer
        assert signer is not None
        for head in await fetch_heads(self._loaded, self._site, name):
            if head.run != self._run:
                continue
            ours = signer.verifier.fits(head)
            if not ours or not await loop.run_in_executor(self._slow, self._holds, head):
                self._barred.add(name)
                self._report_mismatch(name, head, ours)
                return False
        self._known.add(name)
        return True

    def _holds(self, head: SignedHead) -> bool:
        """True if the journal has the line that a head is of, or has pruned it."""
        assert self._file is not None
        folder = self._file.path.parent
        begin, _ = journal_begin(folder)
        line = next(journal_lines(folder / OPEN, head.lines - 1), b"")
        if head.lines <= begin:
            return True
        return bool(line) and line_head(line).seq == head.lines - 1 and line_hash(line) == head.head

    def _report_mismatch(self, name: str, head: SignedHead, ours: bool = True) -> None:
        at = f"the head of line {head.lines:,} {_WHERE[name]}, of {utc(head.now_ns)}"
        text = f"the line is not the one of {at}" if ours else f"{at}, is signed with another key: {head.key}"
        log.critical("the journal is not as it was signed: %s", text)
        self._alarms.condition(
            f"anchor/changed/{name}",
            "critical",
            "The journal is not as it was signed",
            (text,),
            "`racktwin journal verify RUN --key FILE` names the lines. Copy the folder of the run "
            "first; a head outside is not replaced until you delete it.",
        )

    def change_broker(self, loaded: Loaded) -> None:
        """Keep heads at the broker of this configuration from now on, under its topic."""
        self._loaded = loaded
        self._known.discard("mqtt")
        self._barred.discard("mqtt")

    def close(self) -> None:
        """Store the last head after the journal is closed, in its folder only, since all links are closed."""
        head = self._sign()
        if head is not None and self._file is not None:
            try:
                self._file.append(head)
            except StorageError as error:
                log.error("%s", error)

    def _sign(self) -> SignedHead | None:
        """Return the signed head of the journal on disk; None without a key or a line."""
        lines, head = self._recorder.safe
        if self.signer is None or lines == 0:
            return None
        outside = {name: known for name, known in self.outside.items() if known}
        return self.signer.sign(
            SignedHead(run=self._run, lines=lines, head=head, now_ns=time.time_ns(), outside=outside)
        )

    def _missed(self, name: str, why: str) -> None:
        self._alarms.condition(
            f"anchor/{name}",
            "warning",
            f"The journal's head cannot be kept {_WHERE[name]}",
            (why,),
            "The daemon continues. Until this is fixed, only the other places prove new lines.",
        )

    async def _to_mqtt(self, payload: bytes) -> None:
        links = self._links()
        if links is None:
            raise ConnectorError("no link to a broker")
        await links.source.link.publish(anchor_topic(self._loaded, self._run), payload, 1, True)

    async def _to_etcd(self, payload: bytes) -> None:
        await self._etcd.open()
        try:
            await keep_head(self._etcd, self._site, f"{daemon_name(self._loaded)}/{self._run}", payload)
        finally:
            await self._etcd.close()


async def fetch_heads(loaded: Loaded, site: str, anchor: str) -> list[SignedHead]:
    """The heads that an anchor outside holds for the daemon of a configuration, one for each run.

    What is no signed head is left out with a warning. Raises ConnectorError where the anchor cannot be asked,
    or holds nothing else.
    """
    payloads = await (_from_mqtt(loaded) if anchor == "mqtt" else _from_etcd(loaded, site))
    heads, faults = list[SignedHead](), list[str]()
    for payload in payloads:
        try:
            heads.append(parse_head(payload))
        except StorageError as error:
            faults.append(clean(str(error), 200))
    if faults and not heads:
        raise ConnectorError(f"{anchor}: {faults[0]}")
    for fault in faults[:ANSWERS]:
        log.warning("%s: %s; it is left out, and the other heads are taken", anchor, fault)
    return heads


async def _from_etcd(loaded: Loaded, site: str) -> list[bytes]:
    etcd = make_etcd(loaded)
    await etcd.open()
    try:
        return await kept_heads(etcd, site, daemon_name(loaded))
    finally:
        await etcd.close()


async def _from_mqtt(loaded: Loaded) -> list[bytes]:
    """Retained messages come with the subscription, before what we publish to ourselves behind it."""
    found: dict[str, bytes] = {}
    settings, topic, complete = _as_guest(link_settings(loaded)), anchor_topic(loaded), asyncio.Event()
    last = f"{topic.partition('/Journal/')[0]}/Canary/{settings.client_id}"
    link = MqttLink(settings, ((topic, 1), (last, 1)))

    def take(message: Message) -> None:
        if message.topic == last:
            complete.set()
        elif message.payload:
            found[message.topic] = message.payload

    async def ask() -> None:
        while not link.connected:
            await asyncio.sleep(0.02)
        await link.publish(last, b"", 1)
        await complete.wait()

    tasks = {asyncio.ensure_future(link.run(take, lambda *_: None)), asyncio.ensure_future(ask())}
    try:
        # A client that may not publish there waits for the whole time
        ended, _ = await asyncio.wait(tasks, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        # Silence of a broker that was not reached is no word that it holds nothing
        if not complete.is_set() and not found:
            raise ConnectorError(
                f"{link.where}: no signed head came from {topic} within {ANSWER_S:g} s: it is slow or "
                f"away, or denies us to publish to {last}"
            )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return list(found.values())


def _as_guest(settings: LinkSettings) -> LinkSettings:
    client_id = f"{settings.client_id}-verify-{os.getpid()}"
    return dataclasses.replace(settings, client_id=client_id, persistent=False)
