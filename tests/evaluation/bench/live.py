"""The live part of the benchmark: broker, publishers, agents and the real daemon, each a process of its own.

What receiving costs (`bench_wire`), how late the daemon's ticks are while much arrives, how long it takes
from a reading to the cap that answers it (`bench_react`), and the history.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console

from tests.evaluation.bench import plan, wire as bench_wire
from tests.evaluation.bench.broker_process import a_broker
from tests.evaluation.bench.history import bench_history
from tests.evaluation.bench.load import GPUS_PER_RACK
from tests.evaluation.bench.wire import FORMS, PLACES, SIGNALS, SMALL, Publisher, make_round, wire_site
from tests.evaluation.harness import PERCENTILES, percentiles, short, table
from twin.api import Client
from twin.catalogue import ConnectorError
from twin.simulation import HOST, end_child, free_port, need_agent, reached, start_child, start_daemon, tail

Figures = dict[str, float | int | str]
STREAM_RATE = 16  # rounds of 64 racks a second: what 74 thousand GPUs say at 1 Hz
NOT_MEASURED = "not measured: no Redfish sink yet"
NOTE = (
    "Broker, publishers, agents and daemon share this machine; a rate of one core is per second of the "
    "receiver's own processor time. 64 speakers, each once a tick; the publisher waits for what it sent. "
    "Latencies: published at random instants; agents store their leases on the disk, 18 of a rack one after "
    "another in one process; read back as seen by an observer at the broker, by one monotonic clock."
)
# (key, whether more is better, bound): from the reading to the read-back, at a tick of 1 s
GOALS: tuple[tuple[str, bool, float], ...] = (
    ("live.ordinary_latency_s_p99", False, 2.5),
    ("live.urgent_latency_s_p99", False, 1.0),
)
# (title, suffix of `wire.gpus8.json.` and so on, factor)
WIRE_ROWS: tuple[tuple[str, str, float], ...] = (
    ("payload, bytes", "payload_bytes", 1.0),
    ("received, decoded, staged: messages/s of one core", "messages_per_core_s", 1.0),
    ("  values, M/s of one core", "values_per_core_s", 1e-6),
    ("  processor time, us a message", "cpu_us_per_message", 1.0),
    ("  messages/s by the wall clock", "messages_per_s", 1.0),
    ("  / aiomqtt's iterator, which decodes nothing", "staged_per_aiomqtt", 1.0),
    ("only received: messages/s of one core", "receive_only_messages_per_core_s", 1.0),
    ("  / aiomqtt's iterator", "receive_only_per_aiomqtt", 1.0),
    ("aiomqtt's iterator: messages/s of one core", "aiomqtt_messages_per_core_s", 1.0),
)
LIVE_ROWS: tuple[tuple[str, str, float], ...] = (
    ("hot GPU to its lowered cap read back, ms", "live.ordinary_latency_s", 1e3),
    ("  of these until the request, ms", "live.ordinary_request_s", 1e3),
    ("loss of flow to the last of 72 caps read back, ms", "live.urgent_latency_s", 1e3),
    ("  of these until the request, ms", "live.urgent_request_s", 1e3),
)
DAEMON_ROWS: tuple[tuple[str, str, float], ...] = (
    ("messages/s that arrive", "messages_per_s", 1.0),
    ("lateness of ticks p99, ms", "late_s_p99", 1e3),
    ("a tick takes p50, ms", "took_s_p50", 1e3),
    ("  p99, ms", "took_s_p99", 1e3),
    ("ticks skipped", "skipped", 1.0),
    ("messages dropped", "dropped", 1.0),
    ("share of a core", "cpu_pu", 1.0),
    ("memory (RSS), MB", "rss_bytes", 1e-6),
)


def measure_live(quick: bool, scratch: Path, say: Callable[[str], None]) -> Figures:
    """All of it; a few samples where `quick`. Raises TwinError where a process fails or a message is lost."""
    need_agent()
    out: Figures = {}
    with tempfile.TemporaryDirectory(prefix="bench-live-", dir=scratch) as name:
        folder = Path(name)
        with a_broker(folder) as (what, port):
            say(f"live: {what}: receiving frames of {SMALL} and of {GPUS_PER_RACK} GPUs")
            out |= {"live.broker": what, **_receive(folder, port, quick)}
            say("live: the daemon while much arrives")
            out |= _stream(folder, port, 2.0 if quick else 20.0)
        # A broker of its own: nothing that is retained there concerns the other site.
        with a_broker(folder) as (_, port):
            say("live: from a reading to the cap that answers it")
            out |= _react(folder, port, quick)
    say("live: history")
    history = bench_history(130, 1000, 70) if quick else bench_history()
    return out | {"live.redfish_latency_s": NOT_MEASURED} | history


def _receive(folder: Path, port: int, quick: bool) -> Figures:
    task = bench_wire.WireLoad(port, 1.5, 2, str(folder))
    if quick:
        task = bench_wire.WireLoad(port, 0.2, 1, str(folder), 0.1)
    command = [sys.executable, "-m", "tests.evaluation.bench.wire", msgspec.json.encode(task).decode()]
    log = folder / "receiver.log"
    child = start_child(command, log, stdout=subprocess.PIPE)
    try:
        found, _ = child.communicate()
    finally:
        end_child(child)
    if child.returncode:
        raise ConnectorError(f"the receiver of the benchmark ended with {child.returncode}: {tail(log)}")
    return msgspec.json.decode(found, type=dict[str, float | int | str])


def _stream(folder: Path, port: int, seconds: float) -> Figures:
    """The real daemon with 4608 GPUs that speak 16 times a second, and its history each second."""
    path, _ = make_round(folder, wire_site(), GPUS_PER_RACK, "msgpack")
    with _daemon(folder / "stream", port, bench_wire.TREE) as daemon:
        publisher = Publisher(port, path, STREAM_RATE)
        try:
            daemon.until_received(PLACES)
            daemon.mark()
            time.sleep(seconds)
            return daemon.figures("live.stream", GPUS_PER_RACK * PLACES)
        finally:
            publisher.close()


def _react(folder: Path, port: int, quick: bool) -> Figures:
    state = str(folder / "agents")
    task = plan.ReactionLoad(port, 120, 40, state)
    if quick:
        task = plan.ReactionLoad(port, 6, 4, state, 0.2, 0.3, 1.0)
    out: Figures = {}
    command = [sys.executable, "-m", "tests.evaluation.bench.react", msgspec.json.encode(task).decode()]
    log = folder / "agents.log"
    with _daemon(folder / "react", port, plan.site_tree(task.racks)) as daemon:
        child = start_child(command, log, stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            daemon.until_received(1)
            daemon.mark()
            for line in child.stdout:
                got = msgspec.json.decode(line, type=plan.Outcome)
                if got.unanswered or not got.latency_s:
                    raise ConnectorError(
                        f"{got.unanswered} readings beyond their guard had no answer ({got.kind}); the "
                        f"daemon's log ends with: {tail(daemon.log)}"
                    )
                out |= percentiles(f"live.{got.kind}_latency_s", got.latency_s)
                out |= percentiles(f"live.{got.kind}_request_s", got.request_s)
                out[f"live.{got.kind}_samples"] = len(got.latency_s)
                if got.kind == "urgent":  # while all of it still speaks
                    out |= daemon.figures("live.act", task.racks * GPUS_PER_RACK)
            if child.wait() or "live.urgent_samples" not in out:
                raise ConnectorError(f"the benchmark's agents ended with {child.returncode}: {tail(log)}")
        finally:
            end_child(child)
    return out


class _Daemon:
    """A running one, as seen from outside."""

    def __init__(self, client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
        self.client, self.process, self.log = client, process, log
        self._from: tuple[float, int, float] = (0.0, 0, 0.0)

    def _link(self) -> dict[str, Any]:
        link: dict[str, Any] = self.client.get("/messages")["messages"]["link"]
        return link

    def until_received(self, count: int) -> None:
        """Waits for its link. Raises ConnectorError if nothing comes."""
        end = time.monotonic() + 30.0
        while self._link()["received"] < count:
            if time.monotonic() > end:
                raise ConnectorError(f"the daemon received nothing within 30 s: {tail(self.log)}")
            time.sleep(0.1)

    def mark(self) -> None:
        """Rates are counted from here."""
        self._from = time.monotonic(), self._link()["received"], self._cpu_s()

    def figures(self, key: str, gpus: int) -> Figures:
        """Return the cost of the daemon's loop, and its delay since the watch began."""
        begun_s, received, cpu_s = self._from
        ticks, link = self.client.get("/summary")["ticks"], self._link()
        took_s = time.monotonic() - begun_s
        out: Figures = {"gpus": gpus, "ticks": ticks["count"], "dropped": link["dropped"]}
        out |= {k: ticks[k] for k in ("late_s_p99", "took_s_p50", "took_s_p99", "skipped", "urgent")}
        out["messages_per_s"] = (link["received"] - received) / took_s
        out["cpu_pu"] = (self._cpu_s() - cpu_s) / took_s
        out["rss_bytes"] = self._rss_bytes()
        return {f"{key}.{name}": value for name, value in out.items()}

    def _cpu_s(self) -> float:
        text = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii", errors="replace")
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _rss_bytes(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0


@contextlib.contextmanager
def _daemon(folder: Path, port: int, site: dict[str, Any]) -> Iterator[_Daemon]:
    folder.mkdir()
    config, log = folder / "racktwin.yaml", folder / "daemon.log"
    (folder / "site.yaml").write_text(yaml.safe_dump(site), encoding="utf-8")
    settings = {
        "site": "site.yaml",
        "broker": {"host": HOST, "port": port, "client_id": f"bench-{folder.name}"},
        "api": {"port": free_port()},
        "simulated": True,
        "history": {"every_s": 1.0},
        "quotas": {"journal_reserve_mb": 1},
    }
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    process = start_daemon(config, log)
    try:
        yield _Daemon(reached(config, process, log), process, log)
    finally:
        end_child(process)


def show_live(found: Figures, out: Console) -> None:
    """The tables of this part."""
    if "live.broker" not in found:
        return
    cases = [(gpus, form) for gpus in (SMALL, GPUS_PER_RACK) for form in FORMS]
    title = f"{found['live.broker']}: frames of {SIGNALS} signals, from the socket to the Inbox"
    rows = [
        (row, *(short(found.get(f"wire.gpus{g}.{f}.{suffix}"), factor) for g, f in cases))
        for row, suffix, factor in WIRE_ROWS
    ]
    out.print(table(title, ["", *(f"{gpus} GPUs, {form}" for gpus, form in cases)], rows))
    rows = [
        (
            row,
            *(short(found.get(f"{key}_{end}"), factor) for end in PERCENTILES),
            short(found.get(f"{key.rsplit('_', 2)[0]}_samples")),
        )
        for row, key, factor in LIVE_ROWS
    ]
    rows.append(("by Redfish (no sink for it yet)", "not measured", "", "", ""))
    out.print(table("Over MQTT, through agents, at a tick of 1 s", ("", *PERCENTILES, "samples"), rows))
    rows = [
        (row, *(short(found.get(f"live.{case}.{suffix}"), factor) for case in ("stream", "act")))
        for row, suffix, factor in (("GPUs", "gpus", 1.0), *DAEMON_ROWS)
    ]
    out.print(table("The daemon meanwhile, with history each second", ("", "many messages", "acting"), rows))
    _show_history(found, out)
    out.print(NOTE, markup=False, highlight=False)


def _show_history(found: Figures, out: Console) -> None:
    labels = list(dict.fromkeys(key.split(".")[1] for key in found if key.startswith("history.")))
    figures = (
        ("embedded store, M points/s", "store_points_per_s", 1e-6),
        ("  bytes a point", "store_bytes_per_point", 1.0),
        ("  / plain rows in SQLite", "store_per_plain_rows", 1.0),
        ("sample on the loop p50, ms", "sample_ms_p50", 1.0),
        ("a day of a rack, by 5 min, ms", "query_rack_day_5min_ms", 1.0),
        ("line protocol, M points/s", "influx_text_points_per_s", 1e-6),
        ("  / influxdb-client's Point", "influx_text_per_client_point", 1.0),
    )
    rows = [
        (row, *(short(found.get(f"history.{label}.{suffix}"), factor) for label in labels))
        for row, suffix, factor in figures
    ]
    out.print(table("History", ["", *(f"{label[1:]} GPUs" for label in labels)], rows))
