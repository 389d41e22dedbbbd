"""A real etcd for tests: one member or a cluster on free loopback ports, stopped, paused, started at will."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def make_certs(openssl: Path, folder: Path) -> Path:
    """A folder with ca.pem, and cert.pem and key.pem of 127.0.0.1 for either end."""
    folder.mkdir()
    made = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem",
        "req -newkey rsa:2048 -nodes -subj /CN=twin -keyout key.pem -out key.csr",
        "x509 -req -days 2 -in key.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile ext -out cert.pem",
    )
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    for arguments in made:
        subprocess.run([str(openssl), *arguments.split()], cwd=folder, check=True, capture_output=True)
    return folder


class EtcdMember:
    """One server: it keeps its ports and its data over a restart."""

    def __init__(
        self, program: Path, folder: Path, name: str, ports: tuple[int, int], cluster: str, certs: Path | None
    ) -> None:
        self.url = f"{'https' if certs else 'http'}://127.0.0.1:{ports[0]}"
        self._peer = f"http://127.0.0.1:{ports[1]}"
        self._tls: ssl.SSLContext | None = None
        self._folder, self._name = folder, name
        self._command = [
            str(program), "--name", name, "--data-dir", str(folder / name),
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer,
            "--initial-cluster", cluster, "--logger", "zap",
            "--heartbeat-interval", "100", "--election-timeout", "1000", "--unsafe-no-fsync",
        ]  # fmt: skip
        if certs is not None:
            ca, cert, key = (str(certs / n) for n in ("ca.pem", "cert.pem", "key.pem"))
            self._command += ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca,
                              "--client-cert-auth"]  # fmt: skip
            self._tls = ssl.create_default_context(cafile=ca)
            self._tls.load_cert_chain(cert, key)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start; `wait_healthy` says when it serves."""
        with (self._folder / f"{self._name}.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def stop(self, hard: bool = False) -> None:
        """Stop, with SIGKILL if `hard`; one that is paused is stopped too."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL if hard else signal.SIGTERM)
            if not hard:
                self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(5)
            self._process = None

    def pause(self) -> None:
        """Stop its clock: SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, path: str, body: dict[str, Any], timeout_s: float = 2.0) -> dict[str, Any]:
        """A request to the gateway, by other means than the code under test."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=timeout_s, context=self._tls) as response:
            answer = json.loads(response.read())
        assert isinstance(answer, dict)
        return answer

    def wait_healthy(self, deadline_s: float = 20.0) -> None:
        """Until it answers a linearizable read."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                self.ask("/v3/kv/range", {"key": "AA=="})
                return
            except (OSError, ValueError) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                    if error.code in (400, 401):  # it serves, but wants to know who we are
                        return
                if time.monotonic() > end:
                    log = (self._folder / f"{self._name}.log").read_text(errors="replace")
                    raise AssertionError(f"etcd {self._name} does not serve: {log[-2000:]}") from error
                time.sleep(0.05)


class EtcdCluster:
    """`with EtcdCluster(server("etcd", "etcd-server"), tmp_path) as etcd: etcd.urls`

    `certs` (see `make_certs`): it speaks TLS, and only to who has a certificate.
    """

    def __init__(self, program: Path, folder: Path, size: int = 1, certs: Path | None = None) -> None:
        ports = free_ports(2 * size)
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        cluster = ",".join(f"m{i}=http://127.0.0.1:{peer}" for i, (_, peer) in enumerate(pairs))
        self.members = [
            EtcdMember(program, folder, f"m{i}", pair, cluster, certs) for i, pair in enumerate(pairs)
        ]
        self.urls = [member.url for member in self.members]

    def __enter__(self) -> EtcdCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all and wait until they serve."""
        for member in self.members:
            member.start()
        for member in self.members:
            member.wait_healthy()

    def stop(self) -> None:
        """Stop all."""
        for member in self.members:
            member.stop(hard=True)


def secure(member: Any) -> None:
    """Switch on etcd's users: root, and `twin`, who may only touch our keys."""
    reach = {"permType": "READWRITE", "key": base64.b64encode(b"/racktwin/").decode(),
             "range_end": base64.b64encode(b"/racktwin0").decode()}  # fmt: skip
    member.ask("/v3/auth/user/add", {"name": "root", "password": "r"})
    member.ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
    member.ask("/v3/auth/role/add", {"name": "twin"})
    member.ask("/v3/auth/role/grant", {"name": "twin", "perm": reach})
    member.ask("/v3/auth/user/add", {"name": "twin", "password": "open sesame"})
    member.ask("/v3/auth/user/grant", {"user": "twin", "role": "twin"})
    member.ask("/v3/auth/enable", {})
