"""A daemon keeps signed heads of its journal at a real Mosquitto and in a real etcd, either of them away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.builders import two_racks
from tests.support.etcd_cluster import EtcdCluster
from tests.support.mosquitto import mosquitto
from twin.anchor import HeadVerifier, JournalProof, make_keys, prove
from twin.cli.main import main
from twin.config import load_config
from twin.daemon import Daemon, SdNotify, fetch_heads, journal_anchor
from twin.run import OPEN, journal_lines, line_head

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0
PLACES = ("mqtt", "etcd")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


def test_heads_are_kept_outside_and_a_tick_waits_for_neither(
    server: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_anchor, "EVERY_S", 0.2)
    monkeypatch.setattr(journal_anchor, "ALARM_AFTER", 2)
    private, public = make_keys()
    (tmp_path / "journal.key").write_text(private)
    (tmp_path / "journal.key").chmod(0o600)
    (tmp_path / "journal.key.pub").write_text(public)
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(two_racks()))
    with (
        mosquitto(server, tmp_path / "broker") as broker,
        EtcdCluster(server("etcd", "etcd-server"), tmp_path, 1) as cluster,
    ):
        tree = {
            "site": "site.yaml", "broker": {"host": "127.0.0.1", "port": broker.port}, "api": None,
            "tick_s": 0.2, "quotas": {"journal_reserve_mb": 1}, "history": {"embedded": False},
            "leader": {"endpoints": cluster.urls, "name": "one"},
            "journal": {"sign_key_file": "journal.key", "anchor": ["mqtt", "etcd"]},
        }  # fmt: skip
        (tmp_path / "racktwin.yaml").write_text(yaml.safe_dump(tree))
        loaded = load_config(tmp_path / "racktwin.yaml")
        folder = tmp_path / "state" / "run"

        async def proven() -> JournalProof:
            outside = {name: await fetch_heads(loaded, "lab", name) for name in PLACES}
            return prove(folder, HeadVerifier.of_pem(public, "key"), outside)

        async def scene() -> None:
            daemon = Daemon(loaded, SdNotify())
            alarms = daemon.alarms.alarms
            task = asyncio.create_task(daemon.run())
            anchor = daemon.services.anchor
            await until(lambda: all(anchor.outside.get(n, 0) > 1 for n in PLACES))
            assert (await proven()).is_ok
            broker.stop()
            tick = daemon.tick_no
            await until(lambda: "anchor/mqtt" in alarms and daemon.tick_no > tick + 3)
            assert "anchor/etcd" not in alarms
            broker.start()
            await until(lambda: "anchor/mqtt" not in alarms)
            daemon.stop()
            await task
            proof = await proven()
            assert proof.is_ok, proof.faults
            # The last line is the end of the run, and a head beside it was signed behind that.
            assert proof.lines == proof.end
            lines = list(journal_lines(folder / OPEN))
            assert line_head(lines[-1]).kind == "end"

        asyncio.run(scene())
        verify = ["journal", "verify", str(folder), "--key", str(tmp_path / "journal.key.pub")]
        verify += ["--anchor", "mqtt", "--anchor", "etcd", "--config", str(tmp_path / "racktwin.yaml")]
        assert main(verify) == 0
        # Who has the host, and the key too, cuts the day's end: both anchors tell.
        lines = (folder / OPEN).read_bytes().splitlines(keepends=True)
        (folder / OPEN).write_bytes(b"".join(lines[:2]))
        heads = (folder / "anchors.jsonl").read_bytes().splitlines(keepends=True)
        kept = [head for head in heads if json.loads(head)["lines"] <= 2]
        (folder / "anchors.jsonl").write_bytes(b"".join(kept))
        assert main(verify) == 1

        async def again() -> None:
            """The next daemon says so, and leaves what is outside as it is: it is evidence."""
            outside = {name: await fetch_heads(loaded, "lab", name) for name in PLACES}
            daemon = Daemon(loaded, SdNotify())
            task = asyncio.create_task(daemon.run())
            await until(lambda: all(f"anchor/changed/{n}" in daemon.alarms.alarms for n in PLACES))
            daemon.stop()
            await task
            assert outside == {name: await fetch_heads(loaded, "lab", name) for name in PLACES}

        asyncio.run(again())
        assert main(verify) == 1


def test_heads_go_where_a_reload_moves_the_broker(
    server: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`journal verify` asks at the present topic: heads at that of before would accuse the daemon."""
    monkeypatch.setattr(journal_anchor, "EVERY_S", 0.2)
    private, public = make_keys()
    (tmp_path / "journal.key").write_text(private)
    (tmp_path / "journal.key").chmod(0o600)
    (tmp_path / "journal.key.pub").write_text(public)
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(two_racks()))
    with mosquitto(server, tmp_path / "one") as one, mosquitto(server, tmp_path / "two") as two:

        def configure(port: int, client_id: str) -> None:
            tree = {
                "site": "site.yaml", "broker": {"host": "127.0.0.1", "port": port, "client_id": client_id},
                "api": None, "tick_s": 0.2, "quotas": {"journal_reserve_mb": 1},
                "history": {"embedded": False},
                "journal": {"sign_key_file": "journal.key", "anchor": ["mqtt"]},
            }  # fmt: skip
            (tmp_path / "racktwin.yaml").write_text(yaml.safe_dump(tree))

        async def scene() -> None:
            configure(one.port, "before")
            daemon = Daemon(load_config(tmp_path / "racktwin.yaml"), SdNotify())
            task = asyncio.create_task(daemon.run())
            outside = daemon.services.anchor.outside
            await until(lambda: outside.get("mqtt", 0) > 1)
            configure(two.port, "after")
            assert await daemon.reload("ada") == []
            lines = daemon.opened.recorder.safe[0]
            await until(lambda: outside["mqtt"] > lines)
            daemon.stop()
            await task

        asyncio.run(scene())
        verify = ["journal", "verify", str(tmp_path / "state" / "run")]
        verify += ["--key", str(tmp_path / "journal.key.pub"), "--anchor", "mqtt"]
        verify += ["--config", str(tmp_path / "racktwin.yaml")]
        assert main(verify) == 0, capsys.readouterr()
