"""Access to a Kubernetes API server: from a kubeconfig file, or as a pod by its service account.

Tokens, token files and client certificates; programs that a kubeconfig would have us run are refused, and so
is a server that nobody vouches for. Reads files, opens no connection.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from twin.catalogue import ConfigError

# source: kubernetes.io/docs/tasks/run-application/access-api-from-pod
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST, PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
MAX_FILE = 2**20  # bytes of a kubeconfig, a token or a certificate
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Features of a kubeconfig that racktwin does not support, with advice.
_REFUSED = {
    "exec": "a program to run; expected token, tokenFile or a client certificate (a service account's token: "
    "`kubectl create token racktwin`)",
    "auth-provider": "an external auth provider; expected token, tokenFile or a client certificate",
    "username": "a password, which Kubernetes no longer accepts; expected token, tokenFile or a certificate",
    "as": "impersonation; expected a user of its own (deploy/kubernetes/rbac.yaml)",
}


@dataclass(frozen=True)
class Access:
    """Address of the server and our credentials. `token_from` is the file to renew the token from."""

    server: str
    token: str | None = field(default=None, repr=False)
    token_from: Path | None = None
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    tls_name: str | None = None


def load_access(kubeconfig: Path | None, context: str | None = None) -> Access:
    """Read the access from its files, with their present token. Raises ConfigError; never quotes a secret."""
    return in_cluster() if kubeconfig is None else from_kubeconfig(kubeconfig, context)


def in_cluster(folder: Path = SERVICE_ACCOUNT) -> Access:
    """Return the access of a pod. Raises ConfigError outside a pod."""
    host, port = os.environ.get(HOST, ""), os.environ.get(PORT, "443")
    if not host:
        raise ConfigError(
            f"$.kubernetes.kubeconfig: none is named and {HOST} is not set, so this is no pod; expected a "
            "kubeconfig file"
        )
    shown = f"[{host}]" if ":" in host else host
    token = _text(folder / "token")
    trust = _trust(folder / "ca.crt", None)
    return Access(_checked(f"https://{shown}:{port}", str(folder), True), token, folder / "token", trust)


def from_kubeconfig(path: Path, context: str | None = None) -> Access:
    """Return the access of a context of a kubeconfig (its current one). Raises ConfigError."""
    try:
        tree = yaml.load(_text(path), Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        why = str(getattr(error, "problem", "") or "cannot be read")
        raise ConfigError(f"{path}: expected YAML: {why[:200]}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a kubeconfig, a mapping with clusters, users and contexts")
    chosen = context or _word(tree.get("current-context"))
    if not chosen:
        raise ConfigError(f"{path}: has no current-context; expected one, or $.kubernetes.context")
    pair = _named(tree, path, "contexts", "context", chosen)
    cluster = _named(tree, path, "clusters", "cluster", _word(pair.get("cluster")))
    user = _named(tree, path, "users", "user", _word(pair.get("user")))
    refused = [k for k in _REFUSED if user.get(k)]
    if refused:
        raise ConfigError(
            [f"{path}: users.{_word(pair.get('user'))}.{k}: asks for {_REFUSED[k]}" for k in refused]
        )
    if cluster.get("insecure-skip-tls-verify"):
        raise ConfigError(
            f"{path}: insecure-skip-tls-verify: would send the token to an unverified server; expected "
            "certificate-authority"
        )
    if cluster.get("proxy-url"):
        raise ConfigError(f"{path}: proxy-url: proxies are not used; expected a server that is reachable")
    return _access(path, cluster, user)


def _access(path: Path, cluster: dict[str, Any], user: dict[str, Any]) -> Access:
    token_file = _beside(path, user.get("tokenFile"))
    token = _text(token_file) if token_file is not None else _word(user.get("token")) or None
    server = _checked(_word(cluster.get("server")), str(path), token is not None)
    tls = None
    if server.startswith("https:"):
        tls = _trust(
            _beside(path, cluster.get("certificate-authority")),
            _decoded(path, "certificate-authority-data", cluster),
        )
        _identify(tls, path, user)
    name = _word(cluster.get("tls-server-name")) or None
    return Access(server, token, token_file if token_file is not None else path, tls, name)


def _checked(server: str, where: str, secret: bool) -> str:
    """Return a server's URL. Raises ConfigError; a token needs TLS, or a server on this host."""
    try:
        url = urlsplit(server)
        fits = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        fits = False
    if not fits or url.username or url.query or url.fragment:
        raise ConfigError(f"{where}: server: expected a URL such as https://10.0.0.1:6443")
    if url.scheme == "http" and secret and url.hostname not in LOOPBACK:
        raise ConfigError(
            f"{where}: server: the token would be sent over http to {url.hostname}; expected https"
        )
    return server.rstrip("/")


def _named(tree: dict[str, Any], path: Path, many: str, one: str, name: str) -> dict[str, Any]:
    items = tree.get(many)
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("name") == name and isinstance(item.get(one), dict):
            found: dict[str, Any] = item[one]
            return found
    raise ConfigError(f"{path}: {many}: has no {name!r}; expected one with a mapping `{one}`")


def _word(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


def _beside(path: Path, name: object) -> Path | None:
    """Return the path of a file that a kubeconfig names, relative to the kubeconfig."""
    return path.parent / Path(_word(name)) if _word(name) else None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE + 1)
        if len(raw) > MAX_FILE:
            raise ConfigError(f"{path}: expected at most {MAX_FILE} bytes")
        text = raw.decode("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected UTF-8") from None
    if not text:
        raise ConfigError(f"{path}: is empty")
    return text


def _decoded(path: Path, key: str, part: dict[str, Any]) -> bytes | None:
    text = _word(part.get(key))
    if not text:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(f"{path}: {key}: expected base64") from None


def _trust(file: Path | None, data: bytes | None) -> ssl.SSLContext:
    """Return the trusted authorities: the cluster's own one, or those of this host. Raises ConfigError."""
    try:
        if data is not None:
            return ssl.create_default_context(cadata=data.decode("ascii"))
        return ssl.create_default_context(cafile=None if file is None else str(file))
    except (OSError, ValueError) as error:
        where = "certificate-authority-data" if data is not None else str(file)
        raise ConfigError(f"{where}: expected certificates in PEM: {str(error)[:200]}") from None


def _identify(tls: ssl.SSLContext, path: Path, user: dict[str, Any]) -> None:
    """Load the client certificate, if there is one. `ssl` reads only files, so data is written to files
    for it."""
    parts: dict[str, Path | bytes | None] = {}
    for kind in ("client-certificate", "client-key"):
        parts[kind] = _beside(path, user.get(kind)) or _decoded(path, f"{kind}-data", user)
    cert, key = parts["client-certificate"], parts["client-key"]
    if cert is None:
        return
    if key is None:
        raise ConfigError(f"{path}: has client-certificate and no client-key; expected both")
    with contextlib.ExitStack() as stack:

        def shown(part: Path | bytes) -> str:
            if isinstance(part, Path):
                return str(part)
            file = stack.enter_context(tempfile.NamedTemporaryFile())  # mode 0600, gone at once
            file.write(part)
            file.flush()
            return file.name

        try:
            tls.load_cert_chain(shown(cert), shown(key))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: client-certificate, client-key: expected a certificate and its key in PEM: "
                f"{str(error)[:200]}"
            ) from None
