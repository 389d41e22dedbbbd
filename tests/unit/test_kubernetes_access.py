"""Kubeconfig files and service accounts: what is taken, and what is refused with what to do instead."""

from __future__ import annotations

import asyncio
import base64
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from connectors.kubernetes import KubernetesClient, access as kubernetes_access, load_access
from connectors.kubernetes.access import from_kubeconfig, in_cluster
from twin.catalogue import ConfigError, ConnectorError


def tree(cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:8001", **(cluster or {})}}],
        "users": [{"name": "u", "user": user or {}}],
    }


def written(folder: Path, content: Any) -> Path:
    path = folder / "config"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_tokens(tmp_path: Path) -> None:
    assert from_kubeconfig(written(tmp_path, tree(user={"token": "secret"}))).token == "secret"
    (tmp_path / "tok").write_text("fresh\n")
    path = written(tmp_path, tree(user={"tokenFile": "tok", "token": "stale"}))
    access = load_access(path)
    assert (access.token, access.token_from, access.server) == (
        "fresh",
        tmp_path / "tok",
        "http://127.0.0.1:8001",
    )
    assert "fresh" not in repr(access)
    other = tree()
    other["contexts"].append({"name": "d", "context": {"cluster": "k", "user": "u"}})
    assert from_kubeconfig(written(tmp_path, other), "d").token is None


@pytest.mark.parametrize(
    "content, why",
    [
        ("a: [", "expected YAML"),
        ("just text", "expected a kubeconfig"),
        ("\x00", "expected YAML"),
        ("   ", "is empty"),
        ({"contexts": []}, "has no current-context"),
        ({"current-context": "c"}, "contexts: has no 'c'"),
        ({**tree(), "contexts": [7, {"name": "c", "context": 7}]}, "contexts: has no 'c'"),
        ({**tree(), "clusters": None}, "clusters: has no 'k'"),
        ({**tree(), "users": [{"name": "other", "user": {}}]}, "users: has no 'u'"),
        (tree(user={"exec": {"command": "aws"}}), "asks for a program to run; expected token"),
        (tree(user={"auth-provider": {"name": "gcp"}}), "asks for an external auth provider"),
        (tree(user={"username": "u", "password": "p"}), "asks for a password"),
        (tree(user={"as": "admin"}), "asks for impersonation"),
        (tree({"insecure-skip-tls-verify": True}), "would send the token to an unverified server"),
        (tree({"proxy-url": "http://p:1"}), "proxies are not used"),
        (tree({"server": "tcp://x"}), "server: expected a URL"),
        (tree({"server": "https://x:abc"}), "server: expected a URL"),
        (tree({"server": "https://u:p@x"}), "server: expected a URL"),
        (tree({"server": 7}), "server: expected a URL"),
        (tree({"server": "http://10.0.0.1"}, {"token": "t"}), "the token would be sent over http to "
        "10.0.0.1"),
        (tree(user={"tokenFile": "absent"}), "absent: cannot be read"),
        (tree({"server": "https://x", "certificate-authority-data": "%%%"}), "expected base64"),
        (tree({"server": "https://x", "certificate-authority-data": "YWJj"}), "expected certificates in PEM"),
        (tree({"server": "https://x", "certificate-authority": "absent"}), "expected certificates in PEM"),
        (tree({"server": "https://x"}, {"client-certificate-data": "YWJj"}), "no client-key"),
        (tree({"server": "https://x"}, {"client-certificate-data": "YWJj", "client-key-data": "YWJj"}),
         "expected a certificate and its key"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(tmp_path: Path, content: Any, why: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match=why.replace("(", r"\(")) as caught:
        from_kubeconfig(path)
    assert "secret" not in str(caught.value)


def test_files_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_access, "MAX_FILE", 10)
    with pytest.raises(ConfigError, match="expected at most 10 bytes"):
        from_kubeconfig(written(tmp_path, tree()))
    with pytest.raises(ConfigError, match="cannot be read"):
        from_kubeconfig(tmp_path)


def certificate(folder: Path, openssl: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = (
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-keyout", str(key), "-out", str(cert), "-subj", "/CN=api", "-addext",
        "subjectAltName=IP:127.0.0.1,DNS:kubernetes",
    )  # fmt: skip
    subprocess.run([str(openssl), *made], check=True, capture_output=True)
    return cert, key


def test_a_pod_has_a_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[..., Path]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="so this is no pod; expected a kubeconfig file"):
        load_access(None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    with pytest.raises(ConfigError, match="token: cannot be read"):
        in_cluster(tmp_path)
    (tmp_path / "token").write_text("abc")
    with pytest.raises(ConfigError, match=r"ca\.crt: expected certificates"):
        in_cluster(tmp_path)
    cert, _ = certificate(tmp_path, server("openssl"))
    cert.rename(tmp_path / "ca.crt")
    access = in_cluster(tmp_path)
    assert (access.server, access.token) == ("https://[fd00::1]:6443", "abc")
    assert access.tls is not None
    assert access.tls.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize("inside", [True, False])
def test_certificates_in_files_and_inside_the_file(
    tmp_path: Path, inside: bool, server: Callable[..., Path]
) -> None:
    cert, key = certificate(tmp_path, server("openssl"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(cert))
    tls.load_cert_chain(cert, key)
    tls.verify_mode = ssl.CERT_REQUIRED

    def shown(kind: str, path: Path) -> dict[str, str]:
        if not inside:
            return {kind: path.name}
        return {f"{kind}-data": base64.b64encode(path.read_bytes()).decode()}

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"items": []})

    async def story() -> None:
        app = web.Application()
        app.router.add_get("/{tail:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        trust = shown("certificate-authority", cert)
        who = {**shown("client-certificate", cert), **shown("client-key", key)}
        good = from_kubeconfig(
            written(tmp_path, tree({"server": url, **trust, "tls-server-name": "kubernetes"}, who))
        )
        client = KubernetesClient(lambda: good)
        assert await client.get("/api/v1/nodes") == b'{"items": []}'
        await client.close()
        for part, user in (({}, who), (trust, {})):
            bad = from_kubeconfig(written(tmp_path, tree({"server": url, **part}, user)))
            client = KubernetesClient(lambda access=bad: access)  # type: ignore[misc]
            with pytest.raises(ConnectorError, match=r"(?i)cert|ssl|disconnected|reset"):
                await client.post("/api/v1/nodes", {})
            await client.close()
        await runner.cleanup()

    asyncio.run(story())
