"""Jobs and a real daemon: reports go in and advice comes out, over a real Mosquitto, HTTP and a folder."""

from __future__ import annotations

import importlib
import json
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest

from connectors.jobs import Advice, decode_advice
from tests.support.builders import two_racks
from tests.support.daemon_process import ROOT, RunningDaemon
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.patience import PATIENCE_S
from twin.api.tokens import add_token
from twin.catalogue import NS

pytestmark = pytest.mark.slow
Server = Callable[..., Path]
INTERVAL, SINCE = "job.checkpoint_interval_s", "job.checkpoint_since_s"
SITE = two_racks(policies={"operator": {"authority": "act"}})
AT = "/v1/jobs/{}/checkpoint"


@pytest.fixture
def broker(server: Server, tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(server, tmp_path) as running_broker:
        yield running_broker


class Job:
    """A client that is not ours, on the topics of one job."""

    def __init__(self, port: int, level: str) -> None:
        self.level, self.number = level, 0
        self.heard: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self.client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        self.client.on_message = lambda client, data, message: self.heard.put(message)
        self.client.connect("127.0.0.1", port)
        self.client.subscribe(f"IT/v1/racktwin/Job/{level}", 1)
        self.client.loop_start()

    def body(self, **more: Any) -> dict[str, Any]:
        self.number += 1
        return {"v": 1, "id": f"{self.level}-{self.number}", "t_ns": time.time_ns(), **more}

    def report(self, **more: Any) -> None:
        self.client.publish(f"IT/v1/PUB/Job/{self.level}", json.dumps(self.body(**more)), 1).wait_for_publish(
            20
        )

    def advice(self, fits: Callable[[Advice], bool], within_s: float = PATIENCE_S) -> Advice:
        """The first that fits; fails where none comes."""
        end = time.monotonic() + within_s
        while True:
            message = self.heard.get(timeout=max(0.01, end - time.monotonic()))
            assert not message.retain
            found = decode_advice(message.payload)
            if fits(found):
                return found


@contextmanager
def job(port: int, level: str) -> Iterator[Job]:
    one = Job(port, level)
    try:
        yield one
    finally:
        one.client.disconnect()
        one.client.loop_stop()


def begin(daemon: RunningDaemon) -> None:
    """Start it; wait until it hears what schedulers publish."""
    daemon.start()
    daemon.until(lambda: daemon.get("/api/v1/messages")["messages"]["link"]["connected"], "the subscriptions")


def announce(port: int, *events: dict[str, Any]) -> None:
    """As a scheduler does."""
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", port)
    client.loop_start()
    for event in events:
        client.publish("IT/v1/PUB/Event/jobs/test", json.dumps(event), 1).wait_for_publish(20)
    client.disconnect()
    client.loop_stop()


def started(name: str, node: int) -> dict[str, Any]:
    return {"type": "JobStarted", "id": f"start-{name}", "job": name, "nodes": [f"lab/h/r1/node{node}"],
            "kind": "training", "tenant": "ann"}  # fmt: skip


def slot_of(daemon: RunningDaemon, node: int, name: str) -> str:
    """The entity of a job that holds a node."""

    def there() -> bool:
        found = daemon.get(f"/api/v1/entities/node/lab/h/r1/node{node}")["job"]
        return bool(found and found["job"] == name)

    daemon.until(there, what=f"job {name} on its node")
    for slot in range(8):
        found = daemon.get(f"/api/v1/entities/job/lab/job{slot}")["job"]
        if found and found["job"] == name:
            return f"lab/job{slot}"
    raise AssertionError(name)


def ask_for(daemon: RunningDaemon, name: str, control: str, value: float) -> None:
    daemon.post("/api/v1/requests", {"control": control, "names": [name], "lo": value, "hi": value,
                                     "want": value, "reason": "a drain", "for_s": 600})  # fmt: skip


def told(daemon: RunningDaemon, level: str) -> dict[str, Any]:
    found: dict[str, Any] = daemon.get(AT.format(level))["told"]
    return found


def states(daemon: RunningDaemon, name: str) -> dict[str, str]:
    """Of a job's leases, by control."""
    return {r["control"]: r["state"] for r in daemon.get(f"/api/v1/entities/job/{name}")["leases"]}


@pytest.mark.long
def test_reports_go_in_and_advice_comes_out_by_every_wire(broker: Mosquitto, tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    with RunningDaemon(
        tmp_path / "d", broker.port, SITE, jobs={"folder": str(folder), "look_s": 0.2}
    ) as daemon:
        begin(daemon)
        with job(broker.port, "ns%2Fa") as a, job(broker.port, "b") as b:
            announce(broker.port, started("ns/a", 0), started("b", 1))
            first, second = slot_of(daemon, 0, "ns/a"), slot_of(daemon, 1, "b")

            a.report(began_ns=time.time_ns() - 5 * NS, save_s=30.0, block_s=4.0, interval_s=600.0)
            daemon.until(lambda: told(daemon, "ns%2Fa")["save_s"] == 30.0, what="the report over MQTT")
            with (folder / "b.reports.jsonl").open("w") as file:
                file.write(json.dumps(b.body(save_s=40.0)) + "\n" + json.dumps(b.body(restart_s=70.0))[:30])
            daemon.until(lambda: told(daemon, "b")["save_s"] == 40.0, what="the report by a file")
            assert told(daemon, "b")["restart_s"] is None, "half a line is no report"
            status, answer = daemon.ask("POST", AT.format("b"), b.body(flush_s=50.0))
            assert (status, answer["taken"], answer["advice"]["interval_s"]) == (200, True, None)
            daemon.until(lambda: told(daemon, "b")["flush_s"] == 50.0, what="the report over HTTP")

            ask_for(daemon, first, INTERVAL, 905.0)
            heard = a.advice(lambda advice: True)
            assert (heard.job, heard.interval_s, heard.save_since_ns) == ("ns/a", 905.0, None)
            assert heard.expires_ns > time.time_ns()
            since_s = float(int(time.time()))
            ask_for(daemon, first, SINCE, since_s)
            heard = a.advice(lambda advice: advice.save_since_ns is not None)
            assert (heard.interval_s, heard.save_since_ns) == (905.0, round(since_s * NS))
            assert "a drain" in heard.reason
            written = decode_advice((folder / "ns%2Fa.json").read_bytes())
            daemon.until(
                lambda: (
                    (folder / "ns%2Fa.json").exists()
                    and decode_advice((folder / "ns%2Fa.json").read_bytes()) == heard
                ),
                what=f"the same by a file, not {written}",
            )
            asked = decode_advice(json.dumps(daemon.get(AT.format("ns%2Fa"))).encode())
            assert (asked.interval_s, asked.save_since_ns, asked.expires_ns, asked.reason) == (
                905.0, heard.save_since_ns, heard.expires_ns, heard.reason)  # fmt: skip
            assert b.heard.empty(), "advice reaches its job alone"
            assert not (folder / "b.json").exists()

            ask_for(daemon, second, INTERVAL, 300.0)
            assert b.advice(lambda advice: True).interval_s == 300.0

            a.report(began_ns=time.time_ns(), interval_s=905.0)
            both = {INTERVAL: "done", SINCE: "done"}
            daemon.until(lambda: states(daemon, first) == both, what="the answers")
        counts = daemon.get("/api/v1/messages")["messages"]["jobs"]
        assert counts["mqtt-reports"] == {"reports": 2, "refused": 0, "early": 0}
        assert counts["job-reports"]["reports"] == 1
        assert counts["jobs"]["advice"] >= 3
        assert counts["job-advice"]["advice"] >= 3
        metrics = daemon.get("/metrics")
        assert 'racktwin_messages_total{what="jobs.mqtt-reports.reports"} 2.0' in metrics
        assert 'racktwin_counted_total{what="checkpoint_reports"} 1.0' in metrics
        alarms = [x["id"] for x in daemon.get("/api/v1/alarms")["alarms"]]
        assert not [x for x in alarms if "job" in x], alarms
        assert daemon.stop() == 0


@pytest.mark.long
def test_an_alarm_names_the_job_that_floods_with_reports(broker: Mosquitto, tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "d", broker.port, SITE) as daemon:
        begin(daemon)
        with job(broker.port, "liar") as one:
            announce(broker.port, started("liar", 0), started("b", 1))
            slot_of(daemon, 0, "liar")
            for _ in range(3000):
                one.client.publish("IT/v1/PUB/Job/liar", json.dumps(one.body(interval_s=60.0)), 0)

            def alarm() -> dict[str, Any] | None:
                every = daemon.get("/api/v1/alarms")["alarms"]
                return next((a for a in every if a["id"] == "flood/job-reports"), None)

            found = daemon.until(alarm, what="the alarm")
            assert "job reports: " in str(found["evidence"])
            assert "from job liar" in str(found["evidence"])
        with job(broker.port, "b") as other:
            other.report(save_s=30.0)
            daemon.until(lambda: told(daemon, "b")["save_s"] == 30.0, what="the report of another")
        assert daemon.stop() == 0


@pytest.mark.long
def test_a_restart_reads_on_and_a_job_that_ended_hears_nothing(broker: Mosquitto, tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    with RunningDaemon(
        tmp_path / "d", broker.port, SITE, jobs={"folder": str(folder), "look_s": 0.2}
    ) as daemon:
        begin(daemon)
        with job(broker.port, "c") as c:
            announce(broker.port, started("c", 2))
            name = slot_of(daemon, 2, "c")
            ask_for(daemon, name, INTERVAL, 450.0)
            first = c.advice(lambda advice: True)
            daemon.kill()
            with (folder / "c.reports.jsonl").open("w") as file:
                file.write(json.dumps(c.body(save_s=12.0)) + "\n")
            c.report(block_s=3.0)
            c.client.publish("IT/v1/PUB/Job/c", b"{", 1).wait_for_publish(20)
            begin(daemon)
            again = c.advice(lambda advice: advice.issued_ns > first.issued_ns)
            assert (again.interval_s, again.epoch > first.epoch) == (450.0, True), (
                "commanded anew in its term"
            )
            daemon.until(lambda: told(daemon, "c")["save_s"] == 12.0, what="what was written meanwhile")
            daemon.until(lambda: told(daemon, "c")["block_s"] == 3.0, what="what the broker kept meanwhile")
            assert daemon.get("/api/v1/messages")["messages"]["bad"] == 1
            announce(broker.port, {"type": "JobEnded", "id": "end-c", "job": "c"})
            daemon.until(lambda: daemon.ask("GET", AT.format("c"))[0] == 404, what="its end")
            while not c.heard.empty():
                c.heard.get()
            ask_for(daemon, name, INTERVAL, 460.0)
            time.sleep(2.5)
            assert c.heard.empty()
        assert daemon.stop() == 0


@pytest.mark.long
def test_a_job_speaks_for_itself_by_its_token(broker: Mosquitto, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    add = {
        n: add_token(tokens, n, r) for n, r in (("job.d", "job"), ("tenant.ann", "job"), ("root", "admin"))
    }  # type: ignore[arg-type]
    with RunningDaemon(tmp_path / "d", broker.port, SITE) as daemon:
        daemon.config["api"]["tokens_file"] = str(tokens)
        daemon.write_config()
        (tmp_path / "d" / "state").mkdir(parents=True)
        (tmp_path / "d" / "state" / "admin.token").write_text(add["root"])
        begin(daemon)
        announce(broker.port, started("d", 0), started("e", 1))
        slot_of(daemon, 0, "d")
        slot_of(daemon, 1, "e")
        got = {(n, j): daemon.ask("GET", AT.format(j), token=add[n])[0] for n in add for j in ("d", "e")}
        assert got == {("job.d", "d"): 200, ("job.d", "e"): 403, ("tenant.ann", "d"): 200,
                       ("tenant.ann", "e"): 200, ("root", "d"): 200, ("root", "e"): 200}  # fmt: skip
        assert daemon.ask("GET", "/api/v1/state", token=add["job.d"])[0] == 403
        assert daemon.stop() == 0


@pytest.mark.long
def test_the_client_for_jobs_and_the_daemon_understand_each_other(
    broker: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that jobs copy, by each of its sources."""
    monkeypatch.syspath_prepend(str(ROOT / "deploy" / "client"))
    checkpoint = importlib.import_module("racktwin_client.advisor")
    folder = tmp_path / "jobs"
    folder.mkdir()
    with RunningDaemon(
        tmp_path / "d", broker.port, SITE, jobs={"folder": str(folder), "look_s": 0.2}
    ) as daemon:
        begin(daemon)
        monkeypatch.setenv("RACKTWIN_TOKEN", daemon.token())
        sources = (f"file://{folder}", f"http://127.0.0.1:{daemon.port}", f"mqtt://127.0.0.1:{broker.port}")
        for node, source in enumerate(sources):
            name = f"train/{node}"
            announce(broker.port, started(name, node))
            place = slot_of(daemon, node, name)
            advisor = checkpoint.Advisor(name, source, 600.0, poll_s=0.2, least_interval_s=0.1)
            try:
                converse(daemon, advisor, f"train%2F{node}", place, 300.0 + node)
            finally:
                advisor.close()
        assert daemon.stop() == 0


def converse(daemon: RunningDaemon, advisor: Any, level: str, place: str, advised_s: float) -> None:
    daemon.until(lambda: not advisor.problem, what=f"{level}: a connection")
    with advisor.saving():
        time.sleep(0.05)
    daemon.until(lambda: told(daemon, level)["interval_s"] == 600.0, what=f"{level}: a report")
    daemon.until(lambda: told(daemon, level)["block_s"], what=f"{level}: what a save cost")
    assert abs(told(daemon, level)["saved_ns"] - time.time_ns()) < 60 * NS
    ask_for(daemon, place, INTERVAL, advised_s)
    daemon.until(lambda: advisor.interval_s == advised_s, what=f"{level}: advice")
    daemon.until(lambda: states(daemon, place) == {INTERVAL: "done"}, what=f"{level}: read back")
    assert not advisor.due()
    ask_for(daemon, place, SINCE, float(int(time.time())))
    daemon.until(advisor.due, what=f"{level}: the wish for a save now")
    with advisor.saving():
        pass
    daemon.until(lambda: states(daemon, place)[SINCE] == "done", what=f"{level}: its answer")
    assert not advisor.due(), "once for each wish"
