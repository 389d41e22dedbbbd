"""Section `fleet` of the configuration: the NATS servers that connect halls with their hub."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from connectors.nats import hall_problem
from twin.catalogue import clean
from twin.config.section import Problems, Strict


class FleetLink(Strict, msgspec.Struct, frozen=True):
    """A fleet over its NATS servers. With `hall` this daemon is that hall of it: it reports its state to the
    hub, and what it is granted applies to `feeder`, an external feeder of its site file. Without, it is the
    hub.
    """

    # of NATS; in a hall its leaf node
    servers: list[str] = msgspec.field(default_factory=lambda: ["nats://127.0.0.1:4222"])
    hall: str | None = None  # our name in the site file of the hub; without it this daemon is the hub
    feeder: str | None = None  # of our site file: external, and above all that the hall draws
    every_s: float = 2.0  # between two summaries
    credentials_file: str | None = None  # of NATS, with a JWT and its key (.creds)
    nkey_file: str | None = None  # seed of an NKey
    username: str | None = None  # account at the server
    password_file: str | None = None  # with `username`
    ca_file: str | None = None  # certificate authorities of the servers; with it the link is TLS
    cert_file: str | None = None  # our certificate
    key_file: str | None = None  # its key


class FleetSettings(FleetLink, frozen=True):
    """The fleet that this daemon belongs to: as one of its halls with `hall`, as its hub without; `above`
    makes the hub a hall of the hub above.
    """

    pages: dict[str, str] = {}  # at the hub: hall and the address of its own page, http:// or https://
    above: FleetLink | None = None  # at a hub: the fleet in which all its halls together are one hall

    @property
    def upward(self) -> FleetLink | None:
        """The link on which this daemon is a hall; None: it is none."""
        return self if self.hall is not None else self.above


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
    _check_link(fleet, "fleet", out)
    if fleet.above is not None:
        _check_link(fleet.above, "fleet.above", out)
        if fleet.hall is not None:
            out.append("$.fleet.above: expected at a hub, and not in a hall")
        elif fleet.above.hall is None:
            out.append("$.fleet.above: expected `hall` and `feeder`: there this hub is a hall")
    if fleet.pages and fleet.hall is not None:
        out.append("$.fleet.pages: expected at the hub, and not in a hall")
    out += [
        f"$.fleet.pages.{clean(hall, 80)}: expected http://HOST or https://HOST without a password, got "
        f"{clean(url.rpartition('@')[2], 80)!r}"
        for hall, url in fleet.pages.items()
        if not _is_page(url)
    ]
    return out


def _check_link(fleet: FleetLink, path: str, out: Problems) -> None:
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
                f"$.{path}.servers[{i}]: expected nats://HOST:PORT or tls://HOST:PORT without a password, "
                f"got {server.rpartition('@')[2][:80]!r}"
            )
    if not fleet.servers:
        out.append(f"$.{path}.servers: expected at least one URL, such as nats://127.0.0.1:4222")
    if fleet.hall is not None and (why := hall_problem(fleet.hall)):
        out.append(f"$.{path}.hall: {why}")
    if (fleet.hall is None) != (fleet.feeder is None):
        out.append(f"$.{path}: expected `hall` and `feeder` in a hall, and neither at the hub")
    out.within(f"{path}.every_s", fleet.every_s, 0.2, 60)
    if fleet.password_file is not None and fleet.username is None:
        out.append(f"$.{path}.username: missing; expected the user whose password `password_file` holds")
    if (fleet.cert_file is None) != (fleet.key_file is None):
        out.append(f"$.{path}: expected cert_file and key_file, or neither")
