"""History sent out through influxdb-client reaches a real VictoriaMetrics, whatever happens to the server."""

from __future__ import annotations

import http.server
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.influx import InfluxSettings, InfluxWriter
from tests.support.builders import Twin, two_racks
from tests.support.patience import PATIENCE_S
from tests.support.victoriametrics import Victoria, free_port
from twin.catalogue import NS, ConfigError
from twin.config import History
from twin.config.schema import Influx
from twin.run import HistoryService, Layout
from twin.run.history_sample import TableSample

pytestmark = pytest.mark.usefixtures("impatient")
SECRET = "s3cr3t-t0ken"


@pytest.fixture
def victoria(server: Callable[..., Path], tmp_path: Path) -> Iterator[Victoria]:
    vm = Victoria(server("victoria-metrics"), tmp_path)
    vm.start()
    yield vm
    vm.kill()


@pytest.fixture(scope="module")
def layout() -> Layout:
    return Layout(Twin(two_racks()).site)


def wait_for(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    ends = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(0.02)


def writer_to(url: str, **more: Any) -> InfluxWriter:
    out = InfluxWriter(url, "org", "bucket", SECRET, InfluxSettings(**more))
    out.start()
    return out


def offer(writer: InfluxWriter, layout: Layout, t_ns: int, power_w: float) -> None:
    """Power of both racks, the second one 0.5 W more, and the energy of the feeders."""
    value = np.array([[power_w, power_w + 0.5]], np.float32)
    none = np.zeros((0, 2), np.int64)
    total = np.array([[round(power_w), -1]], np.int64)
    tables = (
        TableSample("rack", ("power_w",), value, (), none),
        TableSample("feeder", (), np.zeros((0, 2), np.float32), ("energy_mj",), total),
    )
    writer.offer(t_ns, layout, tables)


def start_ns() -> int:
    return time.time_ns() // NS * NS - 600 * NS


def racks(vm: Victoria) -> dict[str, dict[int, float]]:
    return {dict(labels)["rack"]: points for labels, points in vm.series("rack_power_w").items()}


def expected(first_ns: int, count: int, more: float = 0.0) -> dict[int, float]:
    return {first_ns // 10**6 + 1000 * i: i + more for i in range(count)}


@pytest.mark.slow
def test_what_is_written_is_read_back(victoria: Victoria, layout: Layout) -> None:
    writer, t_ns = writer_to(victoria.url), start_ns()
    for i in range(50):
        offer(writer, layout, t_ns + i * NS, i)
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    assert racks(victoria) == {"r1": expected(t_ns, 50), "r2": expected(t_ns, 50, 0.5)}
    (labels,) = [dict(x) for x in victoria.series("rack_power_w") if dict(x)["rack"] == "r1"]
    assert labels == {"site": "lab", "hall": "h", "rack": "r1"}
    energy = victoria.series("feeder_energy_mj")
    assert [dict(x)["feeder"] for x in energy] == ["a"], "the other one had no reading"
    assert writer.stats()["written_points"] == 150
    assert writer.stats()["error"] == ""
    assert writer.close()


@pytest.mark.slow
def test_a_server_that_was_away_gets_everything_later_in_order(victoria: Victoria, layout: Layout) -> None:
    writer, t_ns = writer_to(victoria.url), start_ns()
    for i in range(10):
        offer(writer, layout, t_ns + i * NS, i)
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    victoria.stop()
    for i in range(10, 40):
        offer(writer, layout, t_ns + i * NS, i)
    wait_for(lambda: int(writer.stats()["write_errors"]) >= 3)
    assert "127.0.0.1" in str(writer.stats()["error"])
    assert int(writer.stats()["queue_points"]) >= 30 * 4
    victoria.start()
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    assert racks(victoria) == {"r1": expected(t_ns, 40), "r2": expected(t_ns, 40, 0.5)}
    assert writer.stats()["error"] == ""
    assert writer.stats()["dropped_points"] == 0
    assert writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", [0, 5])
def test_what_a_killed_server_lost_is_sent_again(victoria: Victoria, layout: Layout, meanwhile: int) -> None:
    """`meanwhile` 0: the writer does not even notice that the server was away."""
    writer, t_ns = writer_to(victoria.url), start_ns()
    for i in range(30):
        offer(writer, layout, t_ns + i * NS, i)
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    victoria.kill()
    for i in range(30, 30 + meanwhile):
        offer(writer, layout, t_ns + i * NS, i)
    if meanwhile:
        wait_for(lambda: int(writer.stats()["write_errors"]) > 0)
    time.sleep(1.1)  # servers say in whole seconds when they began
    victoria.start()
    assert len(racks(victoria).get("r1", {})) < 30, "the kill lost nothing: the test shows nothing"
    offer(writer, layout, t_ns + (30 + meanwhile) * NS, 30 + meanwhile)
    wait_for(lambda: int(writer.stats()["resent_points"]) > 0 and writer.stats()["queue_points"] == 0)
    # A server that is busy shows late what it took
    wait_for(lambda: racks(victoria).get("r1") == expected(t_ns, 31 + meanwhile))
    assert writer.close()


@pytest.mark.slow
def test_a_lost_connection_alone_repeats_nothing(victoria: Victoria, layout: Layout) -> None:
    writer, t_ns = writer_to(victoria.url, timeout_s=0.5), start_ns()
    offer(writer, layout, t_ns, 1)
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    victoria.freeze()
    offer(writer, layout, t_ns + NS, 2)
    wait_for(lambda: int(writer.stats()["write_errors"]) > 1)
    victoria.thaw()
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    assert writer.stats()["resent_points"] == 0
    assert writer.close()


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers every write with the status that the test wants, and repeats what it was sent."""

    status = 500

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = f"no: {self.headers['Authorization']}".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def answering() -> Iterator[str]:
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_a_server_that_fails_is_tried_again_within_bounds(
    answering: str, layout: Layout, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    Answers.status = 500
    writer, t_ns = writer_to(answering, buffer_points=100), start_ns()
    for i in range(200):
        offer(writer, layout, t_ns + i * NS, i)
    wait_for(lambda: int(writer.stats()["write_errors"]) >= 3)
    stats = writer.stats()
    assert int(stats["queue_points"]) <= 100
    assert stats["dropped_points"] == 800 - int(stats["queue_points"])
    assert "500" in str(stats["error"])
    Answers.status = 204
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    assert writer.stats()["error"] == ""
    assert writer.close()
    assert SECRET not in f"{stats}{caplog.text}{capfd.readouterr()}"


def test_what_a_server_refuses_for_good_is_counted_and_passed_over(answering: str, layout: Layout) -> None:
    Answers.status = 400
    writer = writer_to(answering)
    offer(writer, layout, start_ns(), 1)
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    stats = writer.stats()
    assert stats["refused_points"] == 3
    assert stats["written_points"] == 0
    assert "400" in str(stats["refusal"])
    assert SECRET not in str(stats)
    assert writer.close()


@pytest.mark.slow
def test_a_hanging_server_stalls_nobody(layout: Layout) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        writer = writer_to(f"http://127.0.0.1:{hanging.getsockname()[1]}", timeout_s=60.0)
        for i in range(1000):
            offer(writer, layout, start_ns() + i * NS, i)
        assert not writer.close()
        assert writer._thread.is_alive, "it waits for the server, and nobody waits for it"
        assert writer.stats()["write_errors"] == 0
    writer._thread.close(10)  # its socket is closed with the server: nothing is left behind


def test_a_server_that_closes_each_connection_is_not_sent_everything_again(
    answering: str, layout: Layout
) -> None:
    Answers.status = 204  # HTTP/1.0: a connection for each batch, and it does not say when it began
    writer = writer_to(answering)
    for i in range(20):
        offer(writer, layout, start_ns() + i * NS, i)
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    assert writer.stats()["resent_points"] == 0
    assert writer.close()


def test_nobody_listens(layout: Layout) -> None:
    writer = writer_to(f"http://127.0.0.1:{free_port()}")
    offer(writer, layout, start_ns(), 1)
    wait_for(lambda: int(writer.stats()["write_errors"]) >= 2)
    assert writer.stats()["queue_points"] == 4
    assert not writer.close()


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("http://127.0.0.1:1", f"{SECRET}\nx"),
        ("http://127.0.0.1:1", f"{SECRET}é"),
        ("ftp://127.0.0.1", SECRET),
        ("127.0.0.1:8428", SECRET),
    ],
)
def test_what_cannot_work_is_refused_without_quoting_it(url: str, token: str) -> None:
    with pytest.raises(ConfigError, match="expected") as refused:
        InfluxWriter(url, "org", "bucket", token)
    assert SECRET not in str(refused.value)


@pytest.mark.slow
def test_the_service_sends_what_it_samples(victoria: Victoria, tmp_path: Path) -> None:
    pod = Twin(two_racks())
    pod.now_ns = start_ns()
    settings = History(every_s=1.0, influx=Influx(url=victoria.url))
    service = HistoryService(settings, tmp_path / "history", pod.site, SECRET)
    first = pod.now_ns + NS
    for i in range(20):
        service.offer(pod.engine, pod.tick({"rack.power_w": float(i), "gpu.temp_c": 60.0}))
    wait_for(lambda: service.stats()["influx"]["queue_points"] == 0 and service.stats()["samples"] == 20)
    assert racks(victoria)["r1"] == expected(first, 20)
    assert len(victoria.series("gpu_temp_c")) == pod.site.sizes["gpu"]
    assert service.alarms() == []
    service.close()


def test_a_page_of_metrics_without_end_holds_up_no_writing(layout: Layout) -> None:
    """The page says when the server began; one that drips on, or never ends, says nothing of use."""
    ends = threading.Event()

    class Dripping(Answers):
        status = 204

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            while not ends.wait(0.05):
                self.wfile.write(b"# " + b"x" * 100 + b"\n")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dripping)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        writer = writer_to(f"http://127.0.0.1:{server.server_address[1]}", timeout_s=0.5)
        offer(writer, layout, start_ns(), 1.0)
        wait_for(lambda: writer.stats()["error"] != "")
        assert "no complete page of metrics within 0.5 s" in str(writer.stats()["error"])
    finally:
        ends.set()
        writer.close(0.5)
        server.shutdown()
        server.server_close()
