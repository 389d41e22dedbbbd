"""The live part of the benchmark runs small, yields its keys, and its publisher says what it should."""

from __future__ import annotations

import math
import socket
import time
from pathlib import Path

import msgspec
import pytest

from connectors.agents import ItDecoder
from connectors.mqtt.wire import Splitter
from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.bench import bench, live
from tests.evaluation.bench.plan import ReactionLoad
from tests.evaluation.bench.wire import PLACES, SIGNALS, Publisher, make_round, wire_site
from twin.catalogue import ConnectorError
from twin.telemetry import Block, Message

MAY_BE_ZERO = ("dropped", "skipped", "load_average", "stream.urgent", "late_s")


@pytest.mark.evaluation
def test_a_quick_run_yields_all_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert evaluate(["bench", "--quick", "--only", "live", "--out", str(out)]) == 0
    found = msgspec.json.decode(out.read_bytes(), type=dict[str, float | int | str])
    for key, value in found.items():
        if isinstance(value, int | float):
            assert math.isfinite(value), key
            assert value > 0 or (value == 0 and any(part in key for part in MAY_BE_ZERO)), (key, value)
    for gpus in (8, 72):
        for form in ("json", "msgpack"):
            assert {f"wire.gpus{gpus}.{form}.{suffix}" for _, suffix, _ in live.WIRE_ROWS} <= found.keys()
    for _, key, _ in live.LIVE_ROWS:
        assert {f"{key}_{end}" for end in ("p50", "p99", "max")} <= found.keys()
    for case in ("stream", "act"):
        assert {f"live.{case}.{suffix}" for _, suffix, _ in live.DAEMON_ROWS} <= found.keys()
    assert found["live.ordinary_samples"] == 6
    assert found["live.urgent_samples"] == 4
    assert found["live.act.urgent"] >= 1, "a loss of flow does not wait for the next tick"
    assert found["live.stream.dropped"] == 0
    assert found["history.n576.store_per_plain_rows"]
    assert str(found["live.redfish_latency_s"]).startswith("not measured")
    assert {f"goal.{key}" for key, _, _ in live.GOALS} <= found.keys()
    assert list(tmp_path.iterdir()) == [out], "what the daemons wrote is thrown away"
    said = capsys.readouterr().out
    assert str(found["live.broker"]) in said
    assert "not measured" in said


@pytest.mark.evaluation
@pytest.mark.parametrize(("gpus", "form"), ((8, "json"), (72, "msgpack")))
def test_a_round_is_a_fresh_frame_of_each_speaker(tmp_path: Path, gpus: int, form: str) -> None:
    site = wire_site()
    path, size = make_round(tmp_path, site, gpus, form)
    splitter, before_ns = Splitter(2**22), time.time_ns()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        publisher = Publisher(listener.getsockname()[1], path)
        try:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(20)
                assert peer.recv(1000)[:1] == b"\x10"
                peer.sendall(b"\x20\x02\x00\x00")
                publisher.start()
                publisher.hush()
                while len(splitter.parcels) < publisher.sent:
                    assert splitter.feed(peer.recv(2**20), 1) == b""
        finally:
            publisher.close()
    assert len(splitter.parcels) == publisher.sent
    assert len({p.topic for p in splitter.parcels}) == PLACES
    assert len({p.payload for p in splitter.parcels[:PLACES]}) == PLACES
    assert sum(len(p.payload) for p in splitter.parcels[:PLACES]) == pytest.approx(size * PLACES)
    decoder, last_ns = ItDecoder(site), 0
    for parcel in splitter.parcels[::PLACES]:
        (block,) = decoder.decode(Message(1, parcel.topic, parcel.payload))
        assert isinstance(block, Block)
        assert block.values.shape[1] == gpus
        assert len(block.signals) + len(block.counters) == SIGNALS
        assert before_ns <= block.t_ns <= time.time_ns()
        assert block.t_ns > last_ns
        last_ns = block.t_ns


def test_there_are_racks_enough_for_all_samples() -> None:
    task = ReactionLoad(1883, 120, 40, "")
    assert (task.hot_racks, task.racks) == (2, 22)
    assert task.racks * 72 - 40 // 2 * 72 >= task.ordinary


def test_a_goal_that_is_missed_is_said() -> None:
    found: bench.Figures = {"live.ordinary_latency_s_p99": 2.6, "live.urgent_latency_s_p99": 0.9}
    assert [met for *_, met in bench.judge(found)] == [False, True]


def test_figures_that_stand_for_nothing_show_as_nothing() -> None:
    assert live.short(None, 1.0) == "-"
    assert live.short(math.nan, 1.0) == "-"
    assert live.short(1234.5, 1.0) == "1,234"
    assert live.short(0.012345, 1e3) == "12.3"


@pytest.mark.evaluation
def test_a_receiver_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(ConnectorError, match="receiver of the benchmark ended"):
        live._receive(tmp_path, 1, True)
