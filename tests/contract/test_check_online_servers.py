"""`daemon check --online` of BMCs, schedulers, history stores and etcd: well, absent, refusing, wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.support import dcmi_bmcs, redfish_service
from tests.support.etcd_cluster import EtcdCluster, make_certs, secure
from tests.support.kubernetes_apiserver import Cluster as Kubernetes
from tests.support.mosquitto import free_port
from tests.support.online_checks import check
from tests.support.slurm_cluster import Cluster as Slurm
from tests.support.thread_server import http_thread, in_thread
from tests.support.victoriametrics import Victoria
from twin.daemon import online_check

Find = Callable[..., Path]
Read = pytest.CaptureFixture[str]
NODE = "lab/h/r1/node0"
INFLUX = {"code": "not found", "message": 'bucket "racktwin" not found'}
# An InfluxDB 2 in the words of its HTTP API (source: docs.influxdata.com, /api/v2/write), and others.
ANSWERS: dict[str, tuple[int, str, str]] = {
    "/influx": (400, "application/json", '{"code":"invalid","message":"writing requires points"}'),
    "/stranger": (401, "application/json", '{"code":"unauthorized","message":"unauthorized access"}'),
    "/bucketless": (404, "application/json", json.dumps(INFLUX)),
    "/login": (302, "text/html", "<html>"),
    "/page": (200, "text/html", "<html><body>welcome</body></html>"),
}


class Other(BaseHTTPRequestHandler):
    """Answers as the first level of the path says; else with a page of HTML."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, kind, text = ANSWERS.get("/" + self.path.split("/")[1], ANSWERS["/page"])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    with http_thread(Other) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def password(folder: Path, text: str) -> str:
    (folder / "pw").write_text(text + "\n")
    (folder / "pw").chmod(0o600)
    return "pw"


def bmc(folder: Path, host: str, secret: str, **more: Any) -> list[dict[str, Any]]:
    return [{"bmcs": {host: NODE}, "user": "racktwin", "password_file": password(folder, secret), **more}]


def redfish(folder: Path, host: str, secret: str = redfish_service.PASSWORD, **more: Any) -> dict[str, Any]:
    return {"redfish": bmc(folder, host, secret, **{"scheme": "http", "timeout_s": 0.5, **more})}


def test_a_redfish_service_says_what_it_brings_and_why_not(
    tmp_path: Path, capsys: Read, other: str, server: Find
) -> None:
    with redfish_service.serving() as services:
        host, faults = services[0].host, services[0].faults
        code, text = check(tmp_path, capsys, **redfish(tmp_path, host))
        assert code == 0
        assert f"ok    BMC {host}: " in text
        assert "reports" in text
        assert "4 GPU" in text
        assert services[0].patches() == 0
        assert services[0].tokens == {}, "its session is given back"
        code, text = check(tmp_path, capsys, **redfish(tmp_path, host, "wrong"))
        assert code == 1
        assert "refuses a new session to user racktwin; expected its password in password_file" in text
        assert services[0].refused == 1, "one try, lest the account be locked"
        faults.garbage = 10**6
        code, text = check(tmp_path, capsys, **redfish(tmp_path, host))
        assert code == 1
        assert f"http://{host}/redfish/v1/: expected JSON" in text
        faults.garbage, faults.slow_s = 0, 2.0
        code, text = check(tmp_path, capsys, **redfish(tmp_path, host))
        assert code == 1
        assert "/redfish/v1/: no complete answer within 0.5 s" in text
        code, text = check(tmp_path, capsys, **redfish(tmp_path, host, scheme="https"))
        assert code == 1
        assert "the server does not speak TLS; expected http://, or another port" in text
    wrong = {f"127.0.0.1:{free_port()}": "the connection was refused; check that the server runs",
             other: "expected JSON", "nowhere.invalid": "no such host"}  # fmt: skip
    for host, said in wrong.items():
        scheme = "https" if host == "nowhere.invalid" else "http"
        code, text = check(tmp_path, capsys, **redfish(tmp_path, host, scheme=scheme))
        assert code == 1
        assert f"FAIL  BMC {host}: " in text
        assert said in text
        assert "docs/bmc.md" in text
        assert "publisher" not in text


def test_a_certificate_that_nobody_vouches_for_is_named(tmp_path: Path, capsys: Read, server: Find) -> None:
    import ssl

    certs = make_certs(server("openssl"), tmp_path / "certs")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certs / "cert.pem", certs / "key.pem")
    with redfish_service.serving(tls=tls) as services:
        host = services[0].host
        code, text = check(tmp_path, capsys, **redfish(tmp_path, host, scheme="https"))
        assert code == 1
        assert "its certificate is not trusted: unable to get local issuer certificate" in text
        assert "`ca_file`" in text
        trusted = redfish(tmp_path, host, scheme="https", ca_file="certs/ca.pem", timeout_s=5)
        assert check(tmp_path, capsys, **trusted)[0] == 0


def dcmi(folder: Path, host: str, secret: str = dcmi_bmcs.PASSWORD, **more: Any) -> dict[str, Any]:
    return {"dcmi": bmc(folder, host, secret, **more)}


def test_a_bmc_by_ipmitool(tmp_path: Path, capsys: Read, server: Find) -> None:
    program = str(server("ipmitool"))
    with dcmi_bmcs.Bmcs(1) as bmcs:
        host = bmcs.host(0)
        code, text = check(tmp_path, capsys, **dcmi(tmp_path, host, program=program))
        assert code == 0
        assert f"ok    BMC {host}: 4 readings" in text
        assert bmcs.get(0)["sets"] == bmcs.get(0)["activations"] == 0
        code, text = check(tmp_path, capsys, **dcmi(tmp_path, host, "wrong", program=program))
        assert code == 1
        assert "Unable to establish IPMI v2 / RMCP+ session; check address, port, user and password" in text
        bmcs.set(0, code=0xC1)
        code, text = check(tmp_path, capsys, **dcmi(tmp_path, host, program=program))
        assert code == 1
        assert f"FAIL  BMC {host}: {host}: dcmi power get_limit: " in text
        assert "Invalid command" in text
    nowhere = dcmi(tmp_path, "127.0.0.1:1", program=str(tmp_path / "ipmitool"))
    code, text = check(tmp_path, capsys, **nowhere)
    assert code == 1
    assert "No such file or directory; install ipmitool, or set its path in `program`" in text


def test_a_bmc_that_is_silent(
    tmp_path: Path, capsys: Read, server: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online_check, "ANSWER_S", 4.0)
    silent = dcmi(tmp_path, f"127.0.0.1:{free_port()}", program=str(server("ipmitool")), timeout_s=1)
    code, text = check(tmp_path, capsys, **silent)
    assert code == 1
    assert "dcmi power get_limit: no answer within 1 s; check address, port, user and password" in text


@pytest.mark.slow
def test_a_slurm_and_one_whose_controller_is_away(tmp_path: Path, capsys: Read, server: Find) -> None:
    (tmp_path / "slurm").mkdir()
    with Slurm(tmp_path / "slurm", server, nodes=2) as slurm:
        names = {"gpu1": NODE}
        section = {"jobs": {"slurm": {"conf": str(slurm.conf), "node_names": names, "timeout_s": 5}}}
        code, text = check(tmp_path, capsys, **section)
        assert code == 0
        assert "ok    slurm: " in text
        assert "'gpu2' of Slurm is not a node of the site" in text
        slurm.stop("slurmctld")
        code, text = check(tmp_path, capsys, **section)
        assert code == 1
        assert "check that slurmctld runs" in text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "expected Slurm's client commands on this host"),
        ("echo hello", "scontrol show config: has no ClusterName"),
        ("exec sleep 9", "scontrol: no answer within 0.5 s"),
        ("echo 'scontrol: error: Munge encode failed: Failed to access /run/munge: Protocol authentication "
         "error' >&2; exit 1", "check that munged runs on this host"),
        ("echo 'fatal: Could not establish a configuration source' >&2; exit 1", "`jobs.slurm.conf`"),
    ],
)  # fmt: skip
def test_a_slurm_that_does_not_answer_as_it_should(
    tmp_path: Path, capsys: Read, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    if script is not None:
        (bin_ / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (bin_ / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:/bin" if script else str(bin_))
    code, text = check(tmp_path, capsys, jobs={"slurm": {"timeout_s": 0.5}})
    assert code == 1
    assert "FAIL  slurm: scontrol" in text
    assert said in text


def kubernetes(folder: Path, host: str, token: str = "first") -> dict[str, Any]:
    (folder / "kubeconfig").write_text(
        "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n"
        f"users: [{{name: u, user: {{token: {token}}}}}]\n"
        f"clusters: [{{name: k, cluster: {{server: 'http://{host}'}}}}]\n"
    )
    section = {"kubeconfig": "kubeconfig", "cluster": "lab", "node_names": {"n0": NODE}, "timeout_s": 1}
    return {"kubernetes": section}


def test_a_kubernetes_api_server(tmp_path: Path, capsys: Read, other: str) -> None:
    with in_thread(Kubernetes().serving()) as cluster:
        host = f"127.0.0.1:{cluster.port}"
        cluster.tokens = {"first"}
        cluster.put_node("n0")
        cluster.put_node("n9")
        cluster.put_pod("train-0", node="n0")
        code, text = check(tmp_path, capsys, **kubernetes(tmp_path, host))
        assert code == 0
        assert "ok    kubernetes: " in text
        assert "'n9' of Kubernetes is not a node of the site" in text
        code, text = check(tmp_path, capsys, **kubernetes(tmp_path, host, "second"))
        assert code == 1
        assert "answers 401 Unauthorized" in text
        assert "kubeconfig was refused; expected a valid token: renew it where it was read from" in text
        cluster.failing = [("nodes", 403)] * 9
        code, text = check(tmp_path, capsys, **kubernetes(tmp_path, host))
        assert code == 1
        assert "deploy/kubernetes/rbac.yaml" in text
    wrong = {f"127.0.0.1:{free_port()}": "the connection was refused", other: "expected a list"}
    for host, said in wrong.items():
        code, text = check(tmp_path, capsys, **kubernetes(tmp_path, host))
        assert code == 1
        assert "FAIL  kubernetes: " in text
        assert said in text
        assert "publisher" not in text


def influx(url: str, **more: Any) -> dict[str, Any]:
    return {"history": {"influx": {"url": url, **more}}}


def test_a_history_store_is_asked_by_an_empty_write(
    tmp_path: Path, capsys: Read, other: str, server: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    victoria = Victoria(server("victoria-metrics"), tmp_path)
    victoria.start()
    try:
        code, text = check(tmp_path, capsys, **influx(victoria.url))
        assert code == 0
        assert "ok    history.influx: " in text
        code, text = check(tmp_path, capsys, **influx(f"{victoria.url}/nope"))
        assert code == 1
        assert "is it that server?" in text
        monkeypatch.setattr(online_check, "ANSWER_S", 0.5)
        victoria.freeze()
        code, text = check(tmp_path, capsys, **influx(victoria.url))
        assert code == 1
        assert "no complete answer within 0.5 s" in text
    finally:
        victoria.kill()
    code, text = check(tmp_path, capsys, **influx(f"http://{other}/influx"))
    assert code == 0, text
    wrong = {"stranger": "`history.influx.token_file`", "bucketless": "expected the bucket 'racktwin'",
             "login": "answers 302; expected 200 or 204", "": "is a page of HTML"}  # fmt: skip
    for path, said in wrong.items():
        code, text = check(tmp_path, capsys, **influx(f"http://{other}/{path}"))
        assert code == 1, text
        assert f"FAIL  history.influx: http://{other}" in text
        assert said in text


def test_receivers_of_alarms(tmp_path: Path, capsys: Read, other: str) -> None:
    notify = [{"kind": "webhook", "url": f"http://{other}/hook"},
              {"kind": "alertmanager", "url": f"http://{other}/stranger"}]  # fmt: skip
    code, text = check(tmp_path, capsys, notify=notify)
    assert code == 1
    assert "ok    notify[0]: not asked: any request would be an alarm" in text
    assert "answers 401; expected its token in `notify[1].token_file`" in text


def etcd(url: str, **more: Any) -> dict[str, Any]:
    return {"leader": {"kind": "etcd", "endpoints": [url], **more}}


def test_an_etcd_and_its_users(tmp_path: Path, capsys: Read, other: str, server: Find) -> None:
    with EtcdCluster(server("etcd", "etcd-server"), tmp_path) as cluster:
        url = cluster.urls[0]
        code, text = check(tmp_path, capsys, **etcd(url))
        assert code == 0
        assert f"ok    leader.etcd: {url}: nobody leads yet" in text
        secure(cluster.members[0])
        code, text = check(tmp_path, capsys, **etcd(url))
        assert code == 1
        assert "user name is empty; expected `leader.username` and `leader.password_file`" in text
        user = {"username": "twin", "password_file": password(tmp_path, "wrong")}
        code, text = check(tmp_path, capsys, **etcd(url, **user))
        assert code == 1
        assert f"FAIL  leader.etcd: {url}: " in text
        assert "expected the user and the password of `leader.username` and `password_file`" in text
        password(tmp_path, "open sesame")
        assert check(tmp_path, capsys, **etcd(url, **user))[0] == 0
        cluster.members[0].pause()
        code, text = check(tmp_path, capsys, **etcd(url))
        assert code == 1
        assert "no complete answer within 1.5 s" in text
        cluster.members[0].go_on()
    code, text = check(tmp_path, capsys, **etcd(f"http://{other}"))
    assert code == 1
    assert "expected the JSON gateway of etcd, got HTTP 200" in text
