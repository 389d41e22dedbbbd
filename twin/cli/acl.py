"""`racktwin site acl`: the access list of a Mosquitto broker, made from a site file.

Each identity may do what it is there for and nothing else: only the daemon publishes requests and contingency
caps, an agent speaks of its own node. Mosquitto's own patterns (`%u`) do not fit, since a node's path holds
slashes and the common name of a certificate ends at 64 characters.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from twin.catalogue import ConfigError, StorageError
from twin.cli.arguments import SITE
from twin.cli.grammar import Verb
from twin.config import load_site
from twin.report import print_line
from twin.run import atomic_write
from twin.site import Site

MAX_NAME = 64  # of a common name (RFC 5280, ub-common-name)
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
_LEVEL = re.compile(r"[^+#/\s\0]+")


class Identity(NamedTuple):
    """A user of the broker: `what` it is, and its lines of the access list."""

    user: str
    what: str
    lines: tuple[str, ...]


def agent_user(path: str) -> str:
    """The user of the agent of a node or rack: its path with dots, or a digest where that is too long."""
    name = "agent." + path.replace("/", ".")
    if len(name) <= MAX_NAME and _PLAIN.fullmatch(name):
        return name
    tail = "".join(c for c in path.rpartition("/")[2] if _PLAIN.fullmatch(c))[:32]
    return f"agent.{tail}.{hashlib.blake2b(path.encode(), digest_size=8).hexdigest()}"


def identities(
    site: Site,
    integration: str = "racktwin",
    aggregators: bool = False,
    viewers: Sequence[str] = ("viewer",),
    sparkplug: Sequence[str] = (),
) -> list[Identity]:
    """Everyone who may connect. Raises ConfigError for names that collide or cannot be levels of a topic."""
    if not _LEVEL.fullmatch(integration):
        raise ConfigError(
            f"--integration {integration!r}: expected one topic level, without + # / and spaces"
        )
    own = f"IT/v1/{integration}"
    daemon = (
        "topic read #",
        *(
            f"topic write {own}/{what}/#"
            for what in ("Request", "Contingency", "Job", "Daemon", "Journal", "Canary")
        ),
        f"topic write BMS/v1/{integration}/#",
        "topic write grid/v1/dsx-flex-agent/#",  # power states and breaches
        "topic write spBv1.0/+/NCMD/#",  # asks Sparkplug nodes to announce themselves
    )
    bms = ("topic write BMS/v1/PUB/#", f"topic read BMS/v1/{integration}/#")
    found = [
        Identity("racktwin", "the daemon", daemon),
        Identity("racktwin-standby", "a second daemon in standby", daemon),
        Identity("bms", "the building management system, or its gateway", bms),
        Identity(
            "grid",
            "the gateway of the grid operator, who sets load targets",
            ("topic read grid/v1/#", "topic write grid/v1/isv/#", "topic write grid/v1/infra/#"),
        ),
        Identity("jobs", "whoever announces jobs", ("topic write IT/v1/PUB/Event/jobs/#",)),
        Identity(
            "checkpoints",
            "whoever speaks for all jobs, which report their checkpoints and receive advice",
            ("topic write IT/v1/PUB/Job/+", f"topic read {own}/Job/+"),
        ),
        Identity(
            "outlooks",
            "whoever publishes weather, prices and plans",
            ("topic write IT/v1/PUB/Event/outlooks/#",),
        ),
        Identity("telegraf", "Telegraf, with line protocol", ("topic write telegraf/#",)),
        *(_sparkplug(place) for place in sparkplug),
        *(
            Identity(v, f"{v}: only looks, as `racktwin trace record` does", ("topic read #",))
            for v in viewers
        ),
    ]
    racks = [site.name("rack", i) for i in range(site.sizes["rack"])]
    for node in range(site.sizes["node"]):
        found.append(_agent(site.name("node", node), racks[int(site.rack_of_node[node])], "node", own))
    if aggregators:
        found += [_agent(rack, rack, "rack", own) for rack in racks]
    problems = [
        f"{site.name('node', node)}: its path cannot be a topic; expected no + or # in it"
        for node in range(site.sizes["node"])
        if set("+#\0\r\n") & set(site.name("node", node))
    ]
    problems += [
        f"user {i.user!r}: expected letters, digits, . _ -" for i in found if not _PLAIN.fullmatch(i.user)
    ]
    met: dict[str, str] = {}
    for user, what, _ in found:
        if met.setdefault(user, what) != what:
            problems.append(f"{what} and {met[user]} would both be called {user!r}; rename one")
    if problems:
        raise ConfigError(problems)
    return found


def _sparkplug(place: str) -> Identity:
    """An edge node, which speaks of itself and its devices and receives its orders."""
    group, slash, node = place.partition("/")
    if not slash or not _LEVEL.fullmatch(group) or not _LEVEL.fullmatch(node):
        raise ConfigError(f"--sparkplug {place!r}: expected GROUP/NODE, each without + # / and spaces")
    own = f"spBv1.0/{group}"
    return Identity(
        f"sparkplug.{group}.{node}",
        f"Sparkplug edge node {place}",
        (
            *(f"topic write {own}/N{what}/{node}" for what in ("BIRTH", "DATA", "DEATH")),
            *(f"topic write {own}/D{what}/{node}/+" for what in ("BIRTH", "DATA", "DEATH")),
            f"topic read {own}/NCMD/{node}",
            f"topic read {own}/DCMD/{node}/+",
            "topic read spBv1.0/STATE/#",
        ),
    )


def _agent(path: str, rack: str, kind: str, own: str) -> Identity:
    return Identity(
        agent_user(path),
        f"agent of {kind} {path}",
        (
            *(f"topic write IT/v1/PUB/{what}/{path}" for what in ("Frame", "Event", "Agent")),
            f"topic write {own}/Result/+/{path}",
            f"topic read {own}/Request/+/{rack}",
            f"topic read {own}/Contingency/{rack}",
            f"topic read {own}/Daemon/#",
        ),
    )


def acl_text(found: list[Identity], site_file: str, integration: str = "racktwin") -> str:
    """The access list. What it does not allow is denied, and clients without a name may do nothing.

    Jobs come and go: each user may speak for the job that bears its name, whoever it is.
    """
    parts = [f"# Made by `racktwin site acl --site {site_file}`; make it anew when the site changes."]
    for user, what, lines in found:
        parts.append("\n".join((f"# {what}", f"user {user}", *lines)))
    own = ("pattern write IT/v1/PUB/Job/%u", f"pattern read IT/v1/{integration}/Job/%u")
    parts.append(
        "\n".join(("# a job that has an identity of its own, named as its level of the topic", *own))
    )
    return "\n\n".join(parts) + "\n"


def users_text(found: list[Identity]) -> str:
    """User names and what they are, a line each: the certificates to issue."""
    return "".join(f"{user}\t{what}\n" for user, what, _ in found)


def run_acl(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Write the files whole, or not at all: a broker may read them at any moment."""
    _, site = load_site(args.site)
    found = identities(
        site, args.integration, args.aggregators, args.viewer or ("viewer",), args.sparkplug or ()
    )
    text = acl_text(found, args.site.name, args.integration)
    if args.users is not None:
        _replace(args.users, users_text(found))
    if args.out is None:
        out.file.write(text)
        err.print(f"{len(found)} identities", markup=False)
        return 0
    _replace(args.out, text)
    print_line(out, f"{args.out}: {len(found)} identities")
    return 0


def _replace(path: Path, text: str) -> None:
    try:
        # Mosquitto reads it as a user of its own; it holds no secret.
        atomic_write(path, text, mode=0o644, sync=False)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from None


VERBS = {
    "site acl": Verb(
        run_acl,
        f"""
        {SITE}
        -o --out FILE  access list to write; default: standard output
        ~--output FILE>out
        --users FILE  also write the user names, one per certificate, to this file
        --integration NAME=racktwin  name of racktwin in request topics
        --viewer NAME*  read-only user; repeatable; default: viewer
        --sparkplug GROUP/NODE*  add a user for this Sparkplug edge node; repeatable
        --aggregators  add a user for an aggregating agent of each rack
        """,
        ("--site site.yaml --out racktwin.acl --users users.txt",),
        answers=False,
    )
}
