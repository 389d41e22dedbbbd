"""`racktwin init`: from nothing to files that the daemon starts with, whatever is there to be found."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.daemon_process import RunningDaemon
from tests.support.forked_children import ForkedChildren
from tests.support.mosquitto import Mosquitto, free_port, mosquitto
from tests.support.thread_server import http_thread
from tests.unit.test_discovery import cdu, loop_point, meter, rack
from twin.cli import init
from twin.cli.main import main
from twin.config import load_config, load_site, packaged_profiles, reference_yaml
from twin.telemetry import Message
from twin.wiring import (
    FoundExporter,
    SiteDraft,
    as_host_lists,
    local_exporters,
    natural,
    place_hosts,
    read_page,
    survey,
    tree_of_frames,
    with_one_name,
)

BARE = ("--broker", "none", "--no-slurm", "--no-kubernetes", "--yes")
PATH = os.environ["PATH"]
PAGE = """# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-0",modelName="{model}",Hostname="{host}"}} 43
DCGM_FI_DEV_GPU_TEMP{{gpu="1",UUID="GPU-1",modelName="{model}",Hostname="{host}"}} 44
"""


@pytest.fixture(autouse=True)
def _quiet_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which nothing runs, whatever runs here."""
    monkeypatch.setattr(survey, "LOCAL", ())
    monkeypatch.setattr(init, "BROKER", "127.0.0.1:1")
    monkeypatch.setattr(init, "API_PORT", free_port())
    monkeypatch.setattr(init.socket, "gethostname", lambda: "mgmt.example.net")
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("HOME", "/nowhere")


@pytest.fixture
def exporter() -> Iterator[str]:
    """dcgm-exporters of many hosts on one port: 127.0.0.7 is nvl-7, and 127.0.0.99 another kind of page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = self.connection.getsockname()[0].rpartition(".")[2]
            page = PAGE.format(host=f"nvl-{number}", model="NVIDIA GB200")
            page = "other_metric 1\n" if number == "99" else page
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with http_thread(Handler, "0.0.0.0") as port:
        yield f":{port}"


def made(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(site file, configuration), which the daemon's check takes."""
    assert main(["daemon", "check", "--config", str(folder / "racktwin.yaml")]) == 0
    site, config = (yaml.safe_load((folder / name).read_text()) for name in ("site.yaml", "racktwin.yaml"))
    return site, config


def test_from_nothing_it_makes_the_least_that_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    assert main(["init", str(folder), *BARE]) == 0
    said = capsys.readouterr().out
    site, config = made(folder)
    assert {k: v for k, v in config.items() if k != "api"} == {"site": "site.yaml", "broker": "embedded"}
    assert [r["name"] for h in site["halls"] for r in h["racks"]] == ["r1"]
    assert all(len((folder / n).read_text().splitlines()) <= 12 for n in ("site.yaml", "racktwin.yaml"))
    assert f"racktwin daemon run --config {folder / 'racktwin.yaml'}" in said
    token = (folder / "state" / "admin.token").read_text().strip()
    assert f"/#token={token}" in said
    assert "no profile" in said
    assert "No racks found: r1 is a placeholder" in said
    assert token not in (folder / "racktwin.yaml").read_text()


def test_it_overwrites_nothing_unless_it_is_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("site.yaml", "racktwin.yaml", "reference.yaml"):
        (tmp_path / name).write_text("mine\n")
        assert main(["init", str(tmp_path), *BARE]) == 1
        assert f"{name}: exists" in capsys.readouterr().err.replace("\n", "")
        assert [p.name for p in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()
    (tmp_path / "site.yaml").write_text("mine\n")
    assert main(["init", str(tmp_path), *BARE, "--force"]) == 0
    made(tmp_path)


def test_a_file_that_cannot_be_written_leaves_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = init.atomic_write

    def refuse(path: Path, *rest: Any) -> None:
        if path.name == "racktwin.yaml":
            raise OSError(28, "No space left on device", str(path))
        write(path, *rest)

    monkeypatch.setattr(init, "atomic_write", refuse)
    assert main(["init", str(tmp_path), *BARE]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["reference.yaml", "site.yaml"]
    load_site(tmp_path / "site.yaml")
    monkeypatch.setattr(init, "atomic_write", write)
    assert main(["init", str(tmp_path), *BARE, "--force"]) == 0
    made(tmp_path)


def test_exporters_tell_hosts_gpus_and_the_type_of_racks(
    tmp_path: Path, exporter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["init", str(tmp_path), *BARE, "--name", "pod7", "--exporter", f"127.0.0.[1-12]{exporter}"]) == 0
    )
    said = capsys.readouterr().out
    site, config = made(tmp_path)
    assert site == {"site": "pod7", "halls": [
        {"name": "hall1", "racks": [{"name": "r1", "profile": "gb200-nvl72"}]}]}  # fmt: skip
    assert config["scrapes"] == [
        {
            "url": f"http://127.0.0.[1-12]{exporter}/metrics",
            "map": "dcgm",
            "place": "pod7/hall1/r1/node[0-11]",
        }
    ]
    assert "gb200-nvl72, as an exporter reports GPUs NVIDIA GB200" in said
    assert "12 hosts, nvl-1 to nvl-12" in said


def test_exporters_that_fail_are_named_and_without_any_nothing_is_written(
    tmp_path: Path, exporter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    assert main(["init", str(tmp_path / "a"), *BARE, "--exporter", gone]) == 1
    assert "none of 1 exporters can be used" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "a"), *BARE, "--exporter", f"127.0.0.99{exporter}"]) == 1
    assert "no mapping of the package" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "a").exists()
    assert (
        main(
            [
                "init",
                str(tmp_path / "b"),
                *BARE,
                "--exporter",
                gone,
                "--exporter",
                f"http://127.0.0.1{exporter}",
            ]
        )
        == 0
    )
    assert f"{gone}/metrics: does not answer" in capsys.readouterr().out
    assert len(made(tmp_path / "b")[1]["scrapes"]) == 1


def test_slurm_tells_nodes_and_their_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    lines = "\n".join(f"gpu{n:03d}|gpu:h100:8(S:0-1)" for n in range(1, 5))
    for name in ("sinfo", "squeue", "scontrol"):
        (programs / name).write_text(f"#!{sys.executable}\nprint('''{lines}''')\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    assert main(["init", str(tmp_path / "s"), "--broker", "none", "--yes"]) == 0
    site, config = made(tmp_path / "s")
    assert site["halls"][0]["racks"] == [{"name": "r1", "nodes": 4, "gpus_per_node": 8}]
    assert config["jobs"] == {"slurm": {"node_names": {"gpu[001-004]": "mgmt/hall1/r1/node[0-3]"}}}
    assert main(["init", str(tmp_path / "k"), *BARE[:2], "--no-slurm", "--yes"]) == 0
    assert "jobs" not in made(tmp_path / "k")[1]
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["init", str(tmp_path / "t"), *BARE[:2], "--slurm", "--yes"]) == 1


def test_a_person_is_asked_and_may_answer_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporter: str
) -> None:
    asked: list[str] = []
    answers: dict[str, str | list[str]] = {
        "MQTT": "",
        "Prometheus": f"127.0.0.1{exporter}, 127.0.0.2{exporter}/metrics",
        "Name": ["pod 7", "pod7"],
        "Type": "hgx-h100",
    }

    def answer(_: Any, question: str, **__: Any) -> str:
        asked.append(question)
        given = answers[question.split()[0]]
        return given if isinstance(given, str) else given.pop(0)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("rich.console.Console.input", answer)
    assert main(["init", str(tmp_path)]) == 0
    site, config = made(tmp_path)
    assert len(asked) == 5
    assert site["halls"][0]["racks"] == [{"name": "r[1-2]", "profile": "hgx-h100"}]
    assert {s["place"] for s in config["scrapes"]} == {"pod7/hall1/r1/node0", "pod7/hall1/r2/node0"}


def test_the_broker_tells_the_site(
    tmp_path: Path,
    server: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", PATH)
    described = [
        rack("r1"),
        rack("r2"),
        loop_point("fw1", "cdu1"),
        cdu("cdu1", "r1", "r2"),
        meter("m1", "r1"),
    ]
    points = [m._replace(topic="/".join([*m.topic.split("/")[:6], "acme/titan/point"])) for m in described]
    points = [m._replace(topic=f"{m.topic}{i}") for i, m in enumerate(points)]
    lines = Message(0, "telegraf/host1/cpu", b"cpu usage=1")
    with mosquitto(server, tmp_path / "broker") as broker:
        publish(server, broker, [*points, lines])
        address = f"127.0.0.1:{broker.port}"
        assert main(["init", str(tmp_path / "s"), "--broker", address, "--for", "0.3s", *BARE[2:]]) == 0
    said = capsys.readouterr().out
    site, config = made(tmp_path / "s")
    assert [r["name"] for r in site["halls"][0]["racks"]] == ["r1", "r2"]
    assert config["broker"] == {"host": "127.0.0.1", "port": broker.port, "topics": ["telegraf/#"]}
    assert "5 on BMS/v1" in said
    assert (site["site"], site["loops"]) == ("titan", [{"name": "fw1", "cooling": "tower"}])
    assert site["halls"][0]["cdus"] == [{"name": "cdu1", "serves": ["r1", "r2"], "loop": "fw1"}]
    assert "power_cap cannot guard feeders without a budget (m1)" in said
    assert "`budget_w: 160000` for 160 kW" in said
    assert main(["init", str(tmp_path / "n"), "--broker", address, *BARE[2:]]) == 1
    assert not (tmp_path / "n").exists()


def test_it_writes_the_port_the_state_and_the_name_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, state = free_port(), tmp_path / "var"
    more = ("--port", str(port), "--state", str(state), "--name", "pod7")
    assert main(["init", str(tmp_path / "n"), *BARE, *more]) == 0
    said = capsys.readouterr().out
    site, config = made(tmp_path / "n")
    assert (site["site"], config["api"], config["state"]) == ("pod7", {"port": port}, str(state))
    assert f"the token is in {state / 'admin.token'}" in said
    assert "the site is called" not in said, "it was not guessed"


def test_a_port_that_was_given_and_is_in_use_is_written_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["init", str(tmp_path), *BARE, "--port", str(port)]) == 0
    assert f"port {port} is in use" in capsys.readouterr().out
    assert made(tmp_path)[1]["api"] == {"port": port}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--name", "pod 7"), "--name 'pod 7': expected letters, digits"),
        (("--profile", "gb200"), "did you mean gb200-nvl72?"),
    ],
)
def test_wrong_words_are_refused_before_it_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    assert main(["init", str(tmp_path / "n"), "--broker", gone, *words]) != 0
    assert expected in capsys.readouterr().err.replace("\n", " ")


def test_with_force_port_and_state_stay(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as daemon:
        port = str(daemon.getsockname()[1])
        assert main(["init", str(tmp_path), *BARE, "--port", port, "--state", str(tmp_path / "var")]) == 0
        before = made(tmp_path)[1]
        assert main(["init", str(tmp_path), *BARE, "--force"]) == 0
        assert made(tmp_path)[1] == before
    (tmp_path / "racktwin.yaml").write_text("broker: [")
    assert main(["init", str(tmp_path), *BARE, "--force"]) == 0
    assert "state" not in made(tmp_path)[1]


def test_the_service_keeps_its_own_state_and_has_one_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "SERVICE", tmp_path.resolve())
    for words, expected in (
        ((), "/var/lib/racktwin"),
        (("--state", str(tmp_path / "var")), str(tmp_path / "var")),
        ((), str(tmp_path / "var")),
    ):
        assert main(["init", str(tmp_path), *BARE, "--force", *words]) == 0
        assert made(tmp_path)[1]["state"] == expected


@pytest.mark.long
def test_its_link_works_once_the_daemon_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = str(tmp_path / "racktwin.yaml")
    with RunningDaemon(tmp_path, "embedded") as daemon, socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(init, "API_PORT", taken.getsockname()[1])
        daemon.config_path.unlink()
        assert main(["init", str(tmp_path), *BARE, "--force"]) == 0
        link = re.search(r"then: (http://127.0.0.1:(\d+)/#token=(\S+))", capsys.readouterr().out)
        assert link is not None
        daemon.port = int(link[2])
        assert daemon.port != init.API_PORT, "the next free one"
        daemon.start()
        assert daemon.token() == link[3]
        page = f"the page is http://127.0.0.1:{link[2]}/; `racktwin token link --config {config}`"
        daemon.until(lambda: page in daemon.words(), what=page)
        assert main(["token", "link", "--config", config]) == 0
        assert capsys.readouterr().out.strip() == link[1]


def test_a_link_without_a_token_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path), *BARE]) == 0
    (tmp_path / "state" / "admin.token").unlink()
    assert main(["token", "link", "--config", str(tmp_path / "racktwin.yaml")]) != 0
    said = capsys.readouterr().err.replace("\n", " ")
    assert "admin.token: the token cannot be read" in said
    assert "the daemon makes it when it starts" in said


def publish(server: Callable[..., Path], broker: Mosquitto, messages: list[Message]) -> None:
    """Retained."""
    tool = str(server("mosquitto_pub", "mosquitto-clients"))
    for message in messages:
        subprocess.run(
            [tool, "-h", "127.0.0.1", "-p", str(broker.port), "-r", "-t", message.topic, "-s"],
            input=message.payload, check=True, timeout=30)  # fmt: skip


def test_agents_tell_the_site() -> None:
    def frame(path: str, payload: bytes = b'{"t_ns": 1, "gpu": {"temp_c": [40, 41]}}') -> Message:
        return Message(0, f"IT/v1/PUB/Frame/{path}", payload)

    draft = tree_of_frames([frame("pod/h1/r10/node3"), frame("pod/h1/r2/node0", b"x"), frame("pod/h2/r1")])
    assert draft is not None
    assert draft.site == {"site": "pod", "halls": [
        {"name": "h1", "racks": [{"name": "r2", "nodes": 1, "gpus_per_node": 0},
                                 {"name": "r10", "nodes": 4, "gpus_per_node": 2}]},
        {"name": "h2", "racks": [{"name": "r1"}]}]}  # fmt: skip
    assert tree_of_frames([]) is None


@pytest.mark.parametrize("profile", packaged_profiles())
def test_hosts_get_places_in_racks_of_every_type(profile: str) -> None:
    draft = SiteDraft({"site": "s", "halls": [{"name": "h", "racks": []}]})
    place_hosts(draft, {f"n{i}": 4 for i in range(1, 200)}, profile)
    assert sorted(draft.places, key=natural) == [f"n{i}" for i in range(1, 200)]
    assert len(set(draft.places.values())) == 199


def test_hosts_beyond_the_racks_are_told() -> None:
    draft = SiteDraft(
        {"site": "s", "halls": [{"name": "h", "racks": [{"name": "a", "nodes": 2, "gpus_per_node": 4}]}]}
    )
    place_hosts(draft, {"x1": 4, "x2": 4, "x3": 4}, None)
    assert draft.places == {"x1": "s/h/a/node0", "x2": "s/h/a/node1"}
    assert "1 hosts have no node (x3)" in draft.guesses[-1]


def test_numbers_that_run_on_side_by_side_become_host_lists() -> None:
    pairs = {"n08": "r/node0", "n09": "r/node1", "n10": "r/node2", "m": "r/node3", "k7": "q/node0"}
    assert as_host_lists(pairs) == {"m": "r/node3", "n[08-10]": "r/node[0-2]", "k7": "q/node0"}


def test_a_page_without_a_host_is_of_the_host_of_its_address() -> None:
    found = read_page("http://n7:9100/metrics", b'node_network_up{device="eth0"} 1\n')
    assert (found.host, found.map, found.gpus) == ("n7", "node", 0)


def test_the_configuration_names_files_from_wherever_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "deep/er", *BARE]) == 0
    loaded = load_config(tmp_path / "deep" / "er" / "racktwin.yaml")
    assert loaded.file(loaded.config.site) == tmp_path / "deep" / "er" / "site.yaml"


def test_a_host_with_several_exporters_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dcgm = FoundExporter("http://10.0.0.1:9400/metrics", "dcgm", "gb-01.example.net", 4)
    node = FoundExporter("http://10.0.0.1:9100/metrics", "node", "10.0.0.1")
    other = FoundExporter("http://n7:9100/metrics", "node", "n7")
    named = with_one_name([node, dcgm, other], {"gb-01": 4})
    assert [one.host for one in named] == ["gb-01", "gb-01", "n7"]
    assert [one.host for one in with_one_name([node, dcgm], ())] == ["gb-01.example.net"] * 2


def test_a_host_without_accelerators_is_no_node(monkeypatch: pytest.MonkeyPatch, exporter: str) -> None:
    monkeypatch.setattr(survey, "LOCAL", (f"http://127.0.0.99{exporter}/metrics",))
    assert local_exporters() == []
    monkeypatch.setattr(survey, "LOCAL", (f"http://127.0.0.3{exporter}/metrics",))
    assert [one.host for one in local_exporters()] == ["nvl-3"]
    monkeypatch.setattr(survey, "_scrape", lambda url, _: FoundExporter(url, "node", "127.0.0.1"))
    assert local_exporters() == []


@pytest.mark.long
def test_killed_at_any_step_it_leaves_whole_files(tmp_path: Path) -> None:
    """The first kills leave a file of before, later ones what calls before them wrote."""
    with ForkedChildren("tests.support.broken_starts:init") as children:

        def play(how: str, chosen: int) -> list[str]:
            children.start(str(tmp_path), how, str(chosen))
            return list(iter(children.line, "ended"))

        (tmp_path / "site.yaml").write_text(yaml.safe_dump({"site": "mine", "halls": []}))
        for chosen in range(100):
            if "code 0" in play("kill", chosen):
                break
            load_site(tmp_path / "site.yaml")
            if (tmp_path / "racktwin.yaml").exists():
                load_config(tmp_path / "racktwin.yaml")
                assert (tmp_path / "reference.yaml").read_text() == reference_yaml()
        assert 10 < chosen < 99, "it ends by itself when no step is left"
