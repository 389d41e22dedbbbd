"""The agent's file, its command, its state file and what systemd is told."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from racktwin_agent import VERSION
from racktwin_agent.__main__ import main
from racktwin_agent.agent import Agent
from racktwin_agent.clock import NS, Instant
from racktwin_agent.config import Broker, ConfigError, load_config
from racktwin_agent.devices import Sample
from racktwin_agent.inbox import Inbox
from racktwin_agent.link import MAX_WAITING, Link
from racktwin_agent.node import Node
from racktwin_agent.notify import notify
from racktwin_agent.publish import Out
from racktwin_agent.simulated import SimulatedDevices
from racktwin_agent.store import FileStore, MemoryStore
from racktwin_agent.triggers import Watch
from racktwin_agent.wire import Refused

ROOT = Path(__file__).resolve().parents[2]
SOUND = 'node = "lab/h/r1/node0"\ndevices = "simulated"\n[broker]\nhost = "localhost"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "agent.toml"
    path.write_text(text)
    return path


def test_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, SOUND))
    assert (config.node, config.integration, config.interval_s) == ("lab/h/r1/node0", "racktwin", 1.0)
    assert (config.broker.port, config.broker.client_id) == (1883, "agent.lab.h.r1.node0")
    assert config.state_dir == tmp_path / "state"
    assert (config.overheating_c, config.power) == (0.0, {})
    assert config.broker.password() is None


@pytest.mark.parametrize(
    "name", ["a\\u0000b", "a" * 300, "x/" * 2100, "~nobody-of-this-name/x", "agent.toml/x"]
)
@pytest.mark.parametrize("key", ["state_dir", "broker.password_file", "broker.tls.ca_file"])
def test_a_path_that_no_file_can_have_is_told_by_its_key(tmp_path: Path, key: str, name: str) -> None:
    table, _, last = key.rpartition(".")
    line = f'{last} = "{name}"\n'
    text = line + SOUND if not table else f"{SOUND}[{table}]\n{line}" if "tls" in table else SOUND + line
    with pytest.raises(ConfigError, match=f"{key}: .* is no path of a file"):
        load_config(written(tmp_path, text))


def test_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).write_text("x")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    config = load_config(
        written(
            tmp_path,
            'node = "lab/h/r1/node0"\ndevices = "nvml"\ngpu_bus_ids = ["0000:41:00"]\ninterval_s = 0.5\n'
            'kernel_log = "journal"\nstate_dir = "there"\n'
            '[broker]\nhost = "b"\nusername = "u"\npassword_file = "secret"\n'
            '[broker.tls]\nca_file = "ca.pem"\ncert_file = "cert.pem"\nkey_file = "credential:key.pem"\n'
            "[triggers]\nbroker_gone_s = 30\npower_brake_s = 0\noverheating_c = 80\n"
            '[[triggers.psu]]\nfile = "/x"\nmin = 5\n[[triggers.psu]]\nname = "b"\ncommand = ["x", "1"]\n',
        )
    )
    assert config.broker.password() == "hunter2"
    assert config.overheating_c == 80
    assert (config.broker.port, config.broker.key_file) == (8883, tmp_path / "key.pem")
    assert [(p.name, p.file, p.min, p.command) for p in config.psu] == [
        ("psu1", "/x", 5.0, ()),
        ("b", "", None, ("x", "1")),
    ]
    assert "hunter2" not in repr(config)


def test_the_example_is_sound_but_for_its_files(tmp_path: Path) -> None:
    text = (ROOT / "deploy/agent/agent.example.toml").read_text()
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    assert all("no such file" in p or "CREDENTIALS_DIRECTORY" in p for p in str(caught.value).splitlines())


@pytest.mark.parametrize(
    "text,fault",
    [
        ("", "node: missing; expected the node's path"),
        ("", "broker.host: missing"),
        (SOUND.replace("lab/h/r1/node0", "lab/h"), "node: expected a path of site/hall/rack/node"),
        (SOUND.replace("lab/h/r1/node0", "lab/+/r1/node0"), "node: expected a path"),
        (SOUND.replace("simulated", "cuda"), "devices: expected nvml or simulated"),
        ("interval_s = 0\n" + SOUND, "interval_s: expected a number from 0.1 to 60"),
        ("interval_s = true\n" + SOUND, "interval_s: expected a number"),
        ('integration = "a/b"\n' + SOUND, "integration: expected one level"),
        ("colour = 1\n" + SOUND, "colour: unknown key"),
        (SOUND + "colour = 1\n", "broker.colour: unknown key"),
        (SOUND + 'port = "x"\n', "broker.port: expected a number"),
        (SOUND + 'username = "x"\n', "expected username and password_file together"),
        (SOUND + '[broker.tls]\ncert_file = "c"\n', "expected ca_file alone"),
        (SOUND + '[broker.tls]\nca_file = "c"\n', "no such file"),
        (SOUND + "[[triggers.psu]]\n", "expected either file or command"),
        (SOUND + "[triggers]\npsu = 3\n", "triggers.psu: expected a list of tables"),
        ("gpu_bus_ids = [1]\n" + SOUND, "gpu_bus_ids: expected PCI addresses"),
        ("node =", "is no TOML"),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    assert fault in str(caught.value)
    assert all(line.startswith(str(tmp_path)) for line in str(caught.value).splitlines())


def test_the_command_checks_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(written(tmp_path, SOUND)), "--check"]) == 0
    assert "4 GPUs, 9 settings; the configuration is sound" in capsys.readouterr().out
    assert main(["--config", str(written(tmp_path, "x = 1"))]) == 2
    assert "x: unknown key" in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "none")]) == 2
    password = SOUND + 'username = "u"\npassword_file = "agent.toml"\n'
    (tmp_path / "empty").write_text(" \n")
    assert main(["--config", str(written(tmp_path, password.replace("agent.toml", "empty")))]) == 2
    assert "expected a password" in capsys.readouterr().err


def test_it_runs_without_racktwin_and_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; import racktwin_agent.__main__, racktwin_agent.fleet;"
        "bad = {'numpy', 'twin', 'connectors', 'msgspec', 'pynvml'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "deploy" / "agent",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_waits_is_bounded_by_count_and_by_bytes() -> None:
    inbox = Inbox(3, 100)
    assert [inbox.put("a", i, 40) for i in range(3)] == [True, True, False]
    assert inbox.get(0) == ("a", 0)
    assert inbox.put("b", 5, 40)
    assert inbox.put("b", 6)
    assert not inbox.put("b", 7)
    assert inbox.lost == 2
    assert [inbox.get(0) for _ in range(4)] == [("a", 1), ("b", 5), ("b", 6), None]
    assert inbox.put("c", 0, 100)


def test_the_wheel_holds_the_package_and_asks_for_two_libraries(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not here: run `make test`, which installs it")
    shutil.copytree(ROOT / "deploy" / "agent", tmp_path / "a", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    done = subprocess.run(build, cwd=tmp_path / "a", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("racktwin_agent-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
        (meta,) = [held.read(n).decode() for n in names if n.endswith("METADATA")]
        (entry,) = [held.read(n).decode() for n in names if n.endswith("entry_points.txt")]
    modules = {p.name for p in (ROOT / "deploy/agent/racktwin_agent").glob("*.py")}
    assert {n.rpartition("/")[2] for n in names if n.endswith(".py")} == modules
    wanted = [line for line in meta.splitlines() if line.startswith("Requires-Dist")]
    assert len(wanted) == 2
    assert "numpy" not in meta.lower().replace("no numpy", "")
    assert "racktwin-agent = racktwin_agent.__main__:main" in entry
    assert f"Version: {VERSION}\n" in meta


def test_a_state_file_is_replaced_as_a_whole_and_belongs_to_one_agent(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "s")
    assert store.load() is None
    store.save({"a": 1}, True)
    store.save({"a": 2}, False)
    assert store.load() == {"a": 2}
    with pytest.raises(OSError, match="another agent"):
        FileStore(tmp_path / "s")
    store.close()
    again = FileStore(tmp_path / "s")
    again.path.write_bytes(b"[1]")
    with pytest.raises(ValueError, match="expected an object"):
        again.load()
    assert again.put_aside().exists()
    assert again.load() is None
    again.close()


@pytest.mark.parametrize(
    "state", [{}, {"format": 2, "path": "lab/h/r1/node0"}, {"format": 1, "path": "other", "boot": "b"}]
)
def test_a_state_that_is_not_ours_is_refused(state: dict[str, object]) -> None:
    store = MemoryStore()
    store.state = state
    node = Node("lab/h/r1/node0", SimulatedDevices(1), store, Watch(), "b")
    with pytest.raises(ValueError, match="cannot be understood"):
        node.resume(Instant(NS, NS))


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "IT/v1/other/Request/gpu.power_cap_w/lab/h/r1",
        "IT/v1/racktwin/Request/gpu.power_cap_w/lab/h/r2",
        "IT/v1/racktwin/Request/gpu.power_cap_w/lab/h/r1/node0",
        "IT/v1/racktwin/Contingency/lab/h/r2",
        "IT/v1/racktwin/Result/gpu.power_cap_w/lab/h/r1",
    ],
)
def test_a_node_obeys_its_own_topics(topic: str) -> None:
    node = Node("lab/h/r1/node0", SimulatedDevices(1), MemoryStore(), Watch(), "b")
    with pytest.raises(Refused):
        node.take(topic, b"{}", Instant(NS, NS))


class BrokenDevices(SimulatedDevices):
    """Breaks the promise that `sample` never raises."""

    def sample(self, t_ns: int) -> Sample:
        raise ZeroDivisionError("a bug")


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_bug_in_a_thread_ends_the_agent_instead_of_leaving_half_of_it(tmp_path: Path) -> None:
    text = SOUND.replace("localhost", "127.0.0.1") + f"port = {closed_port()}\n"
    config = load_config(written(tmp_path, 'kernel_log = "off"\n' + text))
    with pytest.raises(ZeroDivisionError):
        Agent(config, BrokenDevices(1)).run()
    agent = Agent(config, SimulatedDevices(1))  # the folder is free again
    agent.link.is_alive = lambda: False  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="connection ended"):
        agent.run()


def test_frames_results_and_events_wait_for_the_broker_within_bounds() -> None:
    broker = Broker("127.0.0.1", closed_port(), "x")
    link = Link(broker, [], Out("w", b""), lambda topic, payload: None, lambda connected, why: None)
    for i in range(MAX_WAITING + 5):
        link.send(Out("result", b"%d" % i, 1))
        link.send(Out("frame", b"%d" % i))
    assert link.dropped == 5
    assert [o.payload for o in list(link._waiting)[:1]] == [b"5"]
    assert link._latest == {"frame": Out("frame", b"%d" % (MAX_WAITING + 4))}
    for i in range(2 * MAX_WAITING):
        link.send(Out(f"frame{i}", b""))
    assert len(link._latest) == MAX_WAITING


def test_what_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "n"))
        sock.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        notify("READY=1")
        assert sock.recv(100) == b"READY=1"
    os.unlink(tmp_path / "n")
    notify("WATCHDOG=1")  # nobody listens any more
