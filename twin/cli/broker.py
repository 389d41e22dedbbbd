"""A user of a broker, for commands that are no daemon: options to settings, and advice where it fails."""

from __future__ import annotations

import argparse
import dataclasses
import os

from connectors.mqtt import LinkSettings
from twin.catalogue import ConfigError


def as_user(settings: LinkSettings, args: argparse.Namespace) -> LinkSettings:
    """The settings of a link with the certificate and user of the call. Raises ConfigError."""
    if (args.cert_file is None) != (args.key_file is None) or (args.password_file and not args.username):
        raise ConfigError(
            "expected --cert-file together with --key-file, and --password-file together with --username"
        )
    paths = (args.ca_file, args.cert_file, args.key_file, args.password_file)
    for path in paths:
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"{path}: cannot be read")
    ca, cert, key = (None if path is None else str(path) for path in paths[:3])
    if ca is not None or cert is not None:
        settings = dataclasses.replace(
            settings,
            tls=True,
            ca_file=ca or settings.ca_file,
            cert_file=cert or settings.cert_file,
            key_file=key or settings.key_file,
        )
    if args.username is not None:
        secret = args.password_file.read_text(encoding="utf-8").strip() if args.password_file else None
        settings = dataclasses.replace(settings, username=args.username, password=secret)
    return settings


def advised(fault: str, tls: bool) -> str:
    """Return the reason of a failed connection, with the options to change if only one end uses TLS."""
    low = fault.lower()
    if "certificate required" in low or "handshake failure" in low:
        return f"{fault}: give --cert-file and --key-file of a user who only reads (and --ca-file)"
    if not any(
        sign in low for sign in ("reset by peer", "closed the connection", "eof occurred", "wrong_version")
    ):
        return fault
    if tls:
        return (
            f"{fault}; does this port speak TLS? Without TLS (mostly port 1883) leave --ca-file and "
            "--cert-file out, or `tls` in a configuration"
        )
    return (
        f"{fault}; is it a port with TLS (mostly 8883)? Then give --ca-file, with --cert-file and --key-file "
        "where it wants a client certificate"
    )
