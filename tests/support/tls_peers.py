"""A server that speaks TLS under one of several certificates and notes what it was told.

with TlsServer(papers["expired"]) as server: ...; server.heard() == b""
"""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.patience import PATIENCE_S

ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
)


class Papers(NamedTuple):
    """A certificate with its key, and the authority that a client is told to trust."""

    cert: Path
    key: Path
    trusted: Path


def issue_papers(folder: Path) -> dict[str, Papers]:
    """Sound papers for 127.0.0.1, and such as no client may accept."""
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    ours, stranger = _Authority(folder, "ours"), _Authority(folder, "stranger")
    return {
        "sound": ours.issue("sound", here),
        "expired": ours.issue("expired", here, ends_d=-1.0),
        "other-host": ours.issue("other-host", x509.DNSName("broker.example.net")),
        "wrong-authority": stranger.issue("wrong", here)._replace(trusted=ours.file),
    }


class _Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = self._builder(self.name, self.key, 365.0).add_extension(usage, critical=True)
        cert = builder.add_extension(x509.BasicConstraints(True, 0), critical=True).sign(
            self.key, hashes.SHA256()
        )
        self.identifier = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
        self.file = folder / f"ca-{name}.pem"
        self.file.write_bytes(cert.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, ends_d: float
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(self.name, subject, key.public_key(), x509.random_serial_number())
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        valid = builder.not_valid_before(now - timedelta(days=9)).not_valid_after(
            now + timedelta(days=ends_d)
        )
        return valid.add_extension(identifier, critical=False)

    def issue(self, name: str, host: x509.GeneralName, ends_d: float = 2.0) -> Papers:
        """A server's papers."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        mine = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self.identifier)
        builder = self._builder(subject, key, ends_d).add_extension(mine, critical=False)
        cert = builder.add_extension(x509.SubjectAlternativeName([host]), critical=False)
        papers = Papers(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.file)
        papers.cert.write_bytes(cert.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        papers.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return papers


class TlsServer:
    """Accepts one connection after the other; answers HTTP with an empty object, MQTT with nothing."""

    def __init__(self, papers: Papers) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(papers.cert, papers.key)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._heard: queue.Queue[bytes] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> TlsServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(PATIENCE_S)

    def heard(self) -> bytes:
        """Return the first bytes of the next client; none if it refused our certificate."""
        return self._heard.get(timeout=PATIENCE_S)

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listening.accept()
            except OSError:
                return
            plain.settimeout(PATIENCE_S)
            said = b""
            with (
                contextlib.suppress(OSError),
                plain,
                self._context.wrap_socket(plain, server_side=True) as peer,
            ):
                said = peer.recv(65_536)
                if b"HTTP/1." in said:
                    peer.sendall(ANSWER)
            self._heard.put(said)
