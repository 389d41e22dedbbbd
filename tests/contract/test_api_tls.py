"""The interface over TLS, with certificates of clients and without, and with clients that dawdle."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CI
from tests.support.in_process_daemon import serving
from twin.api import Client, service
from twin.catalogue import ConfigError, ConnectorError
from twin.cli.main import main
from twin.config import Api, Tls


@pytest.fixture
def pems(tmp_path: Path, server: object) -> Path:
    """A folder with server.pem and client.pem, each with its key, signed by themselves."""
    openssl = server("openssl")  # type: ignore[operator]
    for name, more in (("server", ("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")), ("client", ())):
        subprocess.run(
            [str(openssl), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
             "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}", *more],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
    return tmp_path


async def ask(client: Client) -> str:
    return str((await asyncio.to_thread(client.get, "/whoami"))["role"])


def test_the_server_is_known_by_its_certificate_and_speaks_no_plain_text(pems: Path) -> None:
    async def run() -> None:
        tls = Tls(cert_file="server.pem", key_file="server.key")
        async with serving(pems, Api(port=0, tls=tls)) as pod:
            assert pod.url.startswith("https://")
            token = pod.secrets["viewer"]
            assert await ask(Client(pod.url, token, ca_file=str(pems / "server.pem"))) == "viewer"
            for wrong in (None, str(pems / "client.pem")):
                with pytest.raises(ConnectorError, match="--ca-file"):
                    await ask(Client(pod.url, token, ca_file=wrong))
            with pytest.raises(ConnectorError, match="no daemon answers"):
                await ask(Client(pod.url.replace("https", "http"), token))

    asyncio.run(run())


def test_with_a_ca_only_clients_with_a_certificate_get_in(pems: Path) -> None:
    async def run() -> None:
        tls = Tls(cert_file="server.pem", key_file="server.key", ca_file="client.pem")
        async with serving(pems, Api(port=0, tls=tls)) as pod:
            ca, token = str(pems / "server.pem"), pod.secrets["viewer"]
            with pytest.raises(ConnectorError):
                await ask(Client(pod.url, token, ca_file=ca))
            mine = Client(pod.url, token, ca_file=ca, cert_file=str(pems / "client.pem"),
                          key_file=str(pems / "client.key"))  # fmt: skip
            assert await ask(mine) == "viewer"

    asyncio.run(run())


def test_files_that_do_not_fit_are_told_without_a_line_of_them(pems: Path) -> None:
    async def run() -> None:
        for cert, key in (
            ("server.pem", "client.key"),
            ("server.pem", "gone.key"),
            ("server.key", "server.key"),
        ):
            with pytest.raises(ConfigError, match=r"\$.api.tls: ") as caught:
                async with serving(pems, Api(port=0, tls=Tls(cert_file=cert, key_file=key))):
                    pass
            assert "BEGIN" not in str(caught.value)
            (pems / "tokens.yaml").unlink()

    asyncio.run(run())


def test_a_client_that_never_ends_its_request_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "IDLE_S", 0.3)

    async def run() -> None:
        async with serving(tmp_path) as pod:
            host, port = pod.url.removeprefix("http://").split(":")
            for text in (b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: "):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(text)
                async with asyncio.timeout(10):
                    await reader.read()
                writer.close()
                await writer.wait_closed()

    asyncio.run(run())


def test_headers_have_a_bound(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as pod:
            host, port = pod.url.removeprefix("http://").split(":")
            big = b"x" * 100_000
            for text in (b"GET /" + big, b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: " + big,
                         b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 5000):  # fmt: skip
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(text + b"\r\n\r\n")
                async with asyncio.timeout(10):
                    said = await reader.read()
                assert b" 400 " in said.split(b"\r\n")[0], said[:200]
                assert b"xxxx" not in said
                assert b"aiohttp" not in said
                writer.close()

    asyncio.run(run())


@pytest.mark.skipif(not sys.platform.startswith("linux") and not CI, reason="reads /proc")
def test_no_token_is_in_the_list_of_processes(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as pod:
            path = tmp_path / "admin.token"
            path.write_text(pod.secrets["admin"])
            path.chmod(0o600)
            words = [
                sys.executable,
                "-m",
                "twin.cli.main",
                "control",
                "decisions",
                "--url",
                pod.url,
                "--token-file",
                str(path),
            ]
            child = await asyncio.create_subprocess_exec(
                *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            seen = b""
            while child.returncode is None:
                seen += b"".join(p.read_bytes() for p in Path("/proc").glob(f"{child.pid}/cmdline"))
                await asyncio.sleep(0.01)
            out, err = await child.communicate()
            assert child.returncode == 0, err
            assert str(path).encode() in seen
            assert pod.secrets["admin"].encode() not in seen + out + err

    asyncio.run(run())


def test_there_is_no_option_that_takes_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--token", "rt_x"])
    capsys.readouterr()
    assert main(["status", "--token-file", "rt_secret"]) == 1
    said = capsys.readouterr()
    assert "expected the name of a file" in said.err
    assert "secret" not in said.out + said.err
