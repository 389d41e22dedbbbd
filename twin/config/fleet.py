"""Section `fleet` of the configuration: the NATS servers over which halls and their hub speak."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from connectors.nats import hall_problem
from twin.catalogue import clean
from twin.config.section import Problems, Strict


class FleetSettings(Strict, msgspec.Struct, frozen=True):
    """The fleet that this daemon belongs to. With `hall` it is that hall: it tells the hub its state, and
    what it is granted applies to `feeder`, an external feeder of its site file. Without, it is the hub.
    """

    # of NATS; in a hall its leaf node
    servers: list[str] = msgspec.field(default_factory=lambda: ["nats://127.0.0.1:4222"])
    hall: str | None = None  # our name in the site file of the hub; without it this daemon is the hub
    feeder: str | None = None  # of our site file: external, and above all that the hall draws
    every_s: float = 2.0  # between two summaries
    pages: dict[str, str] = {}  # at the hub: hall and the address of its own page, http:// or https://
    credentials_file: str | None = None  # of NATS, with a JWT and its key (.creds)
    nkey_file: str | None = None  # seed of an NKey
    username: str | None = None  # account at the server
    password_file: str | None = None  # with `username`
    ca_file: str | None = None  # certificate authorities of the servers; with it the link is TLS
    cert_file: str | None = None  # our certificate
    key_file: str | None = None  # its key


def _is_page(url: str) -> bool:
    """True for an address that may become a link: of no script, and without what a browser drops."""
    try:
        parts = urlsplit(url)
        sound = (
            parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        return False
    return bool(sound) and url.isascii() and url.isprintable() and not {"@", " ", "\\"} & set(url)


def fleet_problems(fleet: FleetSettings | None) -> list[str]:
    """Errors of the section beyond the types."""
    out = Problems()
    if fleet is None:
        return out
    for i, server in enumerate(fleet.servers):
        try:
            parts = urlsplit(server)
            sound = (
                parts.scheme in ("nats", "tls") and parts.hostname and (parts.port is None or parts.port > 0)
            )
        except ValueError:
            sound = False
        if not sound or "@" in server:
            out.append(
                f"$.fleet.servers[{i}]: expected nats://HOST:PORT or tls://HOST:PORT without a password, got "
                f"{server.rpartition('@')[2][:80]!r}"
            )
    if not fleet.servers:
        out.append("$.fleet.servers: expected at least one URL, such as nats://127.0.0.1:4222")
    if fleet.hall is not None and (why := hall_problem(fleet.hall)):
        out.append(f"$.fleet.hall: {why}")
    if (fleet.hall is None) != (fleet.feeder is None):
        out.append("$.fleet: expected `hall` and `feeder` in a hall, and neither at the hub")
    if fleet.pages and fleet.hall is not None:
        out.append("$.fleet.pages: expected at the hub, and not in a hall")
    out += [
        f"$.fleet.pages.{clean(hall, 80)}: expected http://HOST or https://HOST without a password, got "
        f"{clean(url.rpartition('@')[2], 80)!r}"
        for hall, url in fleet.pages.items()
        if not _is_page(url)
    ]
    out.within("fleet.every_s", fleet.every_s, 0.2, 60)
    if fleet.password_file is not None and fleet.username is None:
        out.append("$.fleet.username: missing; expected the user whose password `password_file` holds")
    if (fleet.cert_file is None) != (fleet.key_file is None):
        out.append("$.fleet: expected cert_file and key_file, or neither")
    return out
