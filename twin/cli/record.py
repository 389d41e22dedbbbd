"""`racktwin trace record`: live MQTT into capture files that `racktwin trace replay` reads.

What the broker retains (metadata) is written first, then everything in the order of its arrival. Files are
cut by size, never overwritten, and flushed each second, so that a kill costs a second and half a line.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from connectors.files import encode_row
from connectors.mqtt import LinkSettings, MqttLink, matcher
from twin.catalogue import ConfigError, ConnectorError, StorageError
from twin.cli.arguments import BROKER_USER, present
from twin.cli.broker import advised, as_user
from twin.cli.grammar import CONFIG, Verb
from twin.config import Broker, find_config, load_config
from twin.report import print_line
from twin.telemetry import Message
from twin.wiring import link_settings

TOPICS = ("BMS/v1/#", "IT/v1/#")
SETTLE_S = 2.0  # after connecting, in which retained messages are looked for
HELD_MESSAGES, HELD_BYTES = 200_000, 64 * 2**20
FLUSH_S, RETRY_S = 1.0, 2.0
MAX_KINDS = 100


class CaptureFiles:
    """A capture in one or more files: OUT, then OUT-0001 and so on. Refuses to overwrite any."""

    def __init__(self, path: Path, segment_bytes: int, max_bytes: int) -> None:
        self.path, self.segment_bytes, self.max_bytes = path, segment_bytes, max_bytes
        self.files: list[Path] = []
        self.messages = self.retained = self.bytes = 0
        self.kinds: dict[str, int] = {}
        self.full = False
        self._start_ns = time.time_ns()
        self._settled = False
        self._held: list[tuple[Message, bool]] = []
        self._held_bytes = self._in_segment = 0
        self._out: BinaryIO | None = self._open()

    def put(self, message: Message, retained: bool) -> None:
        """Take a message; what comes before `settle` is held, so that retained messages can go first."""
        if self._settled:
            self._write(message, retained)
            return
        self._held.append((message, retained))
        self._held_bytes += len(message.payload) + len(message.topic) + 200
        if len(self._held) >= HELD_MESSAGES or self._held_bytes >= HELD_BYTES:
            self.settle()

    def settle(self) -> None:
        """Write what was held: retained messages first, as if they had been there from the start."""
        if self._settled:
            return
        self._settled = True
        for message, retained in self._held:
            if retained:
                self._write(message._replace(t_ns=min(message.t_ns, self._held[0][0].t_ns)), retained)
        for message, retained in self._held:
            if not retained:
                self._write(message, retained)
        self._held.clear()

    def flush(self) -> None:
        """Hand what is written to the system."""
        if self._out is not None:
            self._out.flush()

    def close(self) -> None:
        """Write what is held, and make it last."""
        self.settle()
        out, self._out = self._out, None
        if out is not None:
            out.flush()
            os.fsync(out.fileno())
            out.close()

    def _write(self, message: Message, retained: bool) -> None:
        if self.full or self._out is None:
            return
        line = encode_row(message, self._start_ns)
        if self.bytes + len(line) > self.max_bytes:
            self.full = True
            return
        if self._in_segment and self._in_segment + len(line) > self.segment_bytes:
            self._out.close()
            self._out = None
            self._out = self._open()
        self._out.write(line)
        self.messages += 1
        self.retained += retained
        self.bytes += len(line)
        self._in_segment += len(line)
        kind = "/".join(message.topic.split("/", 5)[:5])
        kind = kind if kind in self.kinds or len(self.kinds) < MAX_KINDS else "others"
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def _open(self) -> BinaryIO:
        number = len(self.files)
        path = self.path if not number else self.path.with_name(f"{self.path.stem}-{number:04d}.jsonl")
        try:
            out = path.open("xb")
        except FileExistsError:
            raise StorageError(
                f"{path}: exists; expected a new file, since a recording is never overwritten"
            ) from None
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from None
        self.files.append(path)
        self._in_segment = 0
        return out


def run_record(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Record until the time is up, the size is reached, or Ctrl-C; then say what was recorded."""
    settings, topics = settings_of(args)
    if args.out.suffix != ".jsonl":
        raise ConfigError(
            f"{args.out}: expected a name that ends in .jsonl, by which `trace replay` recognises a capture"
        )
    if not (args.segment_mb > 0 and args.max_mb > 0):
        raise ConfigError("--segment-mb and --max-mb: expected numbers > 0")
    files = CaptureFiles(args.out, int(args.segment_mb * 2**20), int(args.max_mb * 2**20))
    lost: dict[str, int] = {}
    begun = time.monotonic()
    link = MqttLink(settings, tuple((topic, 1) for topic in topics))
    try:
        why = asyncio.run(listen(link, files, lost, args.for_s, err))
    except BaseException:
        files.close()
        if not files.messages:
            for path in files.files:
                path.unlink(missing_ok=True)
        raise
    files.close()
    summary = {
        "files": [str(p) for p in files.files],
        "messages": files.messages,
        "retained": files.retained,
        "bytes": files.bytes,
        "seconds": round(time.monotonic() - begun, 3),
        "connections": link.counts.connections,
        "lost": sum(lost.values()),
        "lost_why": lost,
        "ended": why,
        "topics": dict(sorted(files.kinds.items())),
    }
    return present(args, summary, _show, out)


def _show(summary: dict[str, Any], out: Console) -> None:
    for key, value in summary.items():
        if key != "lost_why" or value:
            shown = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else value
            shown = ", ".join(shown) if isinstance(shown, list) else shown
            print_line(out, f"{key}: {shown}")


def settings_of(args: argparse.Namespace) -> tuple[LinkSettings, tuple[str, ...]]:
    """Return the broker and the topics to record. The recorder has its own client id. Raises ConfigError."""
    topics = list(args.topic or TOPICS)
    if args.broker is None:
        loaded = load_config(find_config(args.config))
        broker = loaded.config.broker
        embedded = loaded.config.embedded_port
        if not isinstance(broker, Broker) and not embedded:
            raise ConfigError(
                f"{loaded.path}: $.broker: the daemon chooses the port of its embedded broker; expected "
                "`embedded_port` there, or --broker 127.0.0.1:PORT instead of --config"
            )
        settings = link_settings(loaded, embedded or None)
        if isinstance(broker, Broker) and not args.topic:
            topics += broker.topics
    else:
        settings = LinkSettings(*args.broker)
    for topic in topics:
        matcher(topic)
    if args.broker is None and settings.cert_file is not None and args.cert_file is None:
        raise ConfigError(
            f"{loaded.path}: its certificate is the daemon's, whose place at the broker a recorder would "
            "take; expected --cert-file and --key-file of a user who only reads"
        )
    settings = as_user(settings, args)
    return (
        dataclasses.replace(
            settings, client_id=f"{settings.client_id}-record-{os.getpid()}", persistent=False
        ),
        tuple(dict.fromkeys(topics)),
    )


async def listen(
    link: MqttLink, files: CaptureFiles, lost: dict[str, int], seconds: float | None, err: Console
) -> str:
    """Record until the end, and return its reason. Later connections are retried.

    Raises ConnectorError if the first connection fails.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def count_lost(_: str, why: str, count: int) -> None:
        lost[why] = lost.get(why, 0) + count

    async def hold() -> None:
        while True:
            try:
                await link.run(lambda message: files.put(message, link.retained), count_lost)
            except ConnectorError as error:
                if not link.counts.connections:
                    raise ConnectorError(advised(str(error), link.settings.tls)) from None
                print_line(err, f"{error}; trying again")
            await asyncio.sleep(RETRY_S)

    holding = asyncio.ensure_future(hold())
    begun = settle_at = time.monotonic()
    try:
        while not stop.is_set() and not files.full and not holding.done():
            now = time.monotonic()
            if not link.counts.connections:
                begun = settle_at = now
            if now - settle_at >= SETTLE_S:
                files.settle()
            if seconds is not None and now - begun >= seconds:
                return "the time is up"
            files.flush()
            rest = FLUSH_S if seconds is None else min(FLUSH_S, max(0.01, begun + seconds - now))
            waiting = asyncio.ensure_future(stop.wait())
            await asyncio.wait((waiting, holding), timeout=rest, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        if holding.done():
            holding.result()
        return "the size is reached" if files.full else "interrupted"
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


VERBS = {
    "trace record": Verb(
        run_record,
        f"""
        {CONFIG}
        --broker HOST[:PORT]  broker of the site, instead of that of the configuration
        {BROKER_USER}
        -o --out FILE!  new file, *.jsonl
        --topic FILTER*  topic filter, instead of the BMS and IT trees; repeatable
        --for DURATION  stop after this time; default: at Ctrl-C
        ~--seconds SECONDS>for_s
        --segment-mb NUMBER=512  size at which a new file begins, in MB
        --max-mb NUMBER=10000  total size at which the recording ends, in MB
        """,
        (
            "--broker mqtt.example.org --out capture.jsonl --for 10min",
            "--config racktwin.yaml --out capture.jsonl --topic 'telegraf/#'",
        ),
    )
}
