"""A Mosquitto as we ship it: TLS with certificates made here, and the access list that our command makes.

with secured_broker(server, tmp_path, site_yaml) as secured:
    secured.settings("racktwin"); secured.files(agent_user("lab/h/r1/node0"))
"""

from __future__ import annotations

import io
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from connectors.mqtt import LinkSettings
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.patience import PATIENCE_S
from twin.cli.main import parse

SHIPPED = Path(__file__).parents[2] / "deploy/mosquitto/racktwin.conf"


def openssl(server: Callable[..., Path], *args: str) -> None:
    subprocess.run([str(server("openssl")), *args], check=True, capture_output=True, timeout=PATIENCE_S)


class Authority:
    """Issues certificates, each with its key beside it."""

    def __init__(self, server: Callable[..., Path], folder: Path, name: str = "ca") -> None:
        self.server, self.folder, self.name = server, folder, name
        self.ca = folder / f"{name}.pem"
        new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        files = ("-keyout", str(folder / f"{name}.key"), "-out", str(self.ca))
        openssl(server, *new, "-subj", f"/CN={name}", *files)

    def issue(self, user: str, more: str = "") -> tuple[str, str]:
        """(certificate, key) of a common name."""
        stem = self.folder / f"{self.name}-{user}"
        key, request, cert, extra = (f"{stem}{end}" for end in (".key", ".csr", ".pem", ".ext"))
        Path(extra).write_text(more or "extendedKeyUsage=clientAuth\n")
        new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        openssl(self.server, *new, "-subj", f"/CN={user}", "-keyout", key, "-out", request)
        signed = ("-CA", str(self.ca), "-CAkey", str(self.ca.with_suffix(".key")), "-CAcreateserial")
        openssl(
            self.server,
            "x509",
            "-req",
            "-in",
            request,
            *signed,
            "-days",
            "2",
            "-extfile",
            extra,
            "-out",
            cert,
        )
        return cert, key


class Secured:
    """A broker as we ship it, and clients by user name."""

    def __init__(self, broker: Mosquitto, authority: Authority) -> None:
        self.broker, self.authority = broker, authority
        self._issued: dict[str, tuple[str, str]] = {}

    def files(self, user: str) -> tuple[str, str, str]:
        """Files of the authority, of a user's certificate, and of its key."""
        if user not in self._issued:
            self._issued[user] = self.authority.issue(user)
        return (str(self.authority.ca), *self._issued[user])

    def settings(self, user: str, client_id: str = "") -> LinkSettings:
        _, cert, key = self.files(user)
        return LinkSettings(
            "127.0.0.1", self.broker.port, client_id or user, tls=True, ca_file=str(self.authority.ca),
            cert_file=cert, key_file=key, persistent=False,
        )  # fmt: skip


@contextmanager
def secured_broker(server: Callable[..., Path], tmp_path: Path, site_yaml: str) -> Iterator[Secured]:
    """The shipped file, with only its paths and its port changed; the list is made by the command."""
    site = tmp_path / "site.yaml"
    site.write_text(site_yaml)
    out = tmp_path / "racktwin.acl"
    args = parse(["site", "acl", "--site", str(site), "--out", str(out), "--users", str(tmp_path / "users")])
    said = Console(file=io.StringIO())
    assert args.verb.run(args, said, said) == 0
    authority = Authority(server, tmp_path)
    cert, key = authority.issue("broker", "subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    lines = SHIPPED.read_text()
    for shipped, here in (
        ("/etc/mosquitto/racktwin/ca.pem", str(authority.ca)),
        ("/etc/mosquitto/racktwin/broker.pem", cert),
        ("/etc/mosquitto/racktwin/broker.key", key),
        ("/etc/mosquitto/racktwin.acl", str(out)),
    ):
        assert shipped in lines
        lines = lines.replace(shipped, here)
    body = [
        line for line in lines.splitlines() if not re.match(r"listener|persistence |allow_anonymous", line)
    ]
    with mosquitto(server, tmp_path, tuple(body), open_to_all=False) as broker:
        yield Secured(broker, authority)
