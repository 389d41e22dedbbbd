"""The command `init`: from nothing to a site file and a configuration that the daemon starts with.

It looks for a broker, exporters, Slurm and Kubernetes, asks where a person is there to answer, listens, and
writes the least that is needed. What it guessed it says; it overwrites nothing without `--force`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from connectors.dsx import Discovery, discover, site_name
from connectors.files import BadRow, read_capture
from connectors.mqtt import MqttLink
from twin.catalogue import ConfigError, ConnectorError, StorageError, clean, did_you_mean
from twin.cli.arguments import BROKER_USER, is_name
from twin.cli.grammar import Verb, host_port
from twin.cli.record import CaptureFiles, listen, settings_of
from twin.config import Api, Loaded, load_config, packaged_profiles, reference_yaml, unguarded
from twin.daemon import load_checked
from twin.run import atomic_write
from twin.telemetry import Message
from twin.wiring import (
    FoundExporter,
    SiteDraft,
    as_host_lists,
    ask_exporters,
    kubernetes_access,
    local_exporters,
    place_hosts,
    profile_of,
    scrapes_of,
    slurm_hosts,
    tree_of_frames,
    with_one_name,
)

SITE, CONFIG, REFERENCE = "site.yaml", "racktwin.yaml", "reference.yaml"
SERVICE = Path("/etc/racktwin")  # where the systemd unit looks; its state is the unit's
STATE = Path("/var/lib/racktwin")
BROKER, API_PORT = "127.0.0.1:1883", Api().port
OTHER_TREES = ("telegraf/#", "spBv1.0/#")  # listened to beside the DSX and IT trees
CAPTURE_BYTES = 2**28
NONE = "none"
NAME_FORM = "expected letters, digits and _ . : + - as the name of a site"


@dataclass
class Surroundings:
    """Broker, exporters and schedulers of a site, stated or found. `other_topics`: beyond the trees."""

    broker: str
    exporters: list[FoundExporter] = field(default_factory=list)
    slurm: dict[str, int] | None = None
    kubernetes: dict[str, Any] | None = None
    profile: str | None = None
    messages: int = 0
    other_topics: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)


def run_init(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Look, ask, listen, write; then say what to do next."""
    folder: Path = args.folder
    paths = [folder / name for name in (SITE, CONFIG, REFERENCE)]
    if (there := [str(p) for p in paths if p.exists()]) and not args.force:
        raise StorageError(f"{', '.join(there)}: exists; expected a new folder, or --force to overwrite")
    _refuse_words(args)
    ask = _asker(out) if sys.stdin.isatty() and not args.yes else None
    found = _look(args, ask, out)
    with tempfile.TemporaryDirectory(prefix="racktwin-init-") as scratch:
        messages = _listen(args, found, Path(scratch) / "heard.jsonl", out, err)
        draft = _draft(args.name, messages, found, ask)
        files = _texts(draft, found, args)
        for name, text in files.items():
            (Path(scratch) / name).write_text(text, encoding="utf-8")
        loaded = load_config(Path(scratch) / CONFIG)
        _, site, _ = load_checked(Loaded(loaded.config, Path(scratch) / CONFIG))
        found.guesses += unguarded(site)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():  # the configuration last: with it, all is there
        atomic_write(folder / name, text)
    _say(folder, found.guesses + draft.guesses, load_config(folder / CONFIG), out)
    return 0


def _refuse_words(args: argparse.Namespace) -> None:
    """Refuse wrong words before anything is asked or listened to. Raises ConfigError."""
    if args.name is not None and not is_name(args.name):
        raise ConfigError(f"--name {clean(args.name, 60)!r}: {NAME_FORM}")
    known = packaged_profiles()
    if args.profile is not None and args.profile not in known:
        near = did_you_mean(args.profile, known)
        raise ConfigError(
            f"--profile {clean(args.profile, 60)!r}: unknown; expected one of {', '.join(known)}{near}"
        )


Ask = Callable[[str, str], str]


def _asker(out: Console) -> Ask:
    def ask(question: str, default: str) -> str:
        try:
            return out.input(f"{question} \\[{default}] ", emoji=False).strip() or default
        except EOFError:  # Ctrl-D is as Ctrl-C: nothing has been written yet
            raise KeyboardInterrupt from None

    return ask


def _look(args: argparse.Namespace, ask: Ask | None, out: Console) -> Surroundings:
    """Broker, exporters, Slurm and Kubernetes, by flags, else found on this host and confirmed."""
    broker = args.broker or (BROKER if _listens(BROKER) else NONE)
    if ask and not args.broker:
        broker = ask("MQTT broker: HOST, HOST:PORT or none?", broker)
    found = Surroundings(broker)
    if not args.broker and broker == BROKER:
        found.guesses.append(f"a broker listens at {BROKER}: it is taken for the site's")
    given = list(args.exporter or ())
    if not given:
        found.exporters = local_exporters()
        if ask:
            local = ", ".join(e.url for e in found.exporters) or NONE
            answer = ask("Prometheus exporters, as in http://n[01-18]:9400, several with commas?", local)
            given = [part.strip() for part in answer.split(",")] if answer not in (local, NONE) else []
            found.exporters = [] if answer == NONE else found.exporters
    if given:
        found.exporters, faults = ask_exporters(given)
        for fault in faults:
            out.print(f"warning: {clean(fault, 500)}", markup=False, soft_wrap=True)
        if not found.exporters:
            raise ConnectorError(f"none of {len(faults)} exporters can be used; the first: {faults[0]}")
        if faults:
            found.guesses.append(f"{len(faults)} exporters do not answer and are left out; see above")
    if not args.no_slurm:
        found.slurm = slurm_hosts()
        if args.slurm and found.slurm is None:
            raise ConnectorError("--slurm: expected sinfo, squeue and scontrol on this host, and an answer")
        what = f"Slurm answers with {len(found.slurm or {})} nodes"
        if found.slurm is not None and not args.slurm and not _agreed(ask, what, found):
            found.slurm = None
    if not args.no_kubernetes:
        found.kubernetes = kubernetes_access()
        if args.kubernetes and found.kubernetes is None:
            raise ConnectorError("--kubernetes: expected KUBECONFIG, ~/.kube/config, or a pod of the cluster")
        if found.kubernetes is not None and not args.kubernetes:
            # Whoever keeps one on a workstation has not said that its cluster is this site's
            yes = (
                ask is not None and ask("There is access to a Kubernetes cluster. Use it?", "no")[:1] in "yY"
            )
            found.kubernetes = found.kubernetes if yes else None
    found.profile = args.profile
    return found


def _agreed(ask: Ask | None, what: str, found: Surroundings) -> bool:
    if ask is not None:
        return ask(f"{what}. Use it?", "yes")[:1] in "yY"
    found.guesses.append(f"{what}: it is taken for the site's; --no-slurm leaves it out")
    return True


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 0.5):
        return True
    return False


def _listen(
    args: argparse.Namespace, found: Surroundings, path: Path, out: Console, err: Console
) -> list[Message]:
    """All that the broker has to say within the time. Raises ConnectorError if it cannot be reached."""
    if found.broker == NONE or args.for_s == 0:
        return []
    wanted = argparse.Namespace(**vars(args))
    wanted.config, wanted.broker, wanted.topic = None, _address(found.broker), None
    settings, topics = settings_of(wanted)
    out.print(f"listening to {found.broker} for {args.for_s:g} s", markup=False, soft_wrap=True)
    files = CaptureFiles(path, CAPTURE_BYTES, CAPTURE_BYTES)
    link = MqttLink(settings, tuple((topic, 1) for topic in (*topics, *OTHER_TREES)))
    try:
        asyncio.run(listen(link, files, {}, args.for_s, err))
    finally:
        files.close()
    messages = [row for row in read_capture(path) if not isinstance(row, BadRow)]
    found.messages = len(messages)
    found.other_topics = [t for t in OTHER_TREES if any(m.topic.startswith(t[:-1]) for m in messages)]
    trees = ", ".join(f"{count} on {kind}" for kind, count in sorted(_trees(messages).items()))
    found.guesses.append(f"{found.broker} sent {trees or 'nothing on the trees that racktwin knows'}")
    return messages


def _trees(messages: list[Message]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for message in messages:
        kind = "/".join(message.topic.split("/", 2)[:2])
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _draft(name: str | None, messages: list[Message], found: Surroundings, ask: Ask | None) -> SiteDraft:
    """The site: as the BMS describes it, else as agents name it, else one rack for the known hosts."""
    agents = tree_of_frames(messages)
    described = discover(messages)
    called = name or _called(agents, described, found, ask)
    described.site["site"] = called
    if described.counts.get("points"):
        tree = {k: v for k, v in described.site.items() if v or k == "site"}
        draft = SiteDraft(tree, {}, list(described.notes))
    else:
        draft = agents or SiteDraft({"site": called, "halls": [{"name": "hall1", "racks": []}]})
        draft.site["site"] = called
    hosts = dict(found.slurm or {})
    found.exporters = with_one_name(found.exporters, hosts)
    for exporter in found.exporters:
        hosts[exporter.host] = max(hosts.get(exporter.host, 0), exporter.gpus)
    suggested = profile_of(found.exporters)
    profile = found.profile or (suggested[0] if suggested else None)
    if ask and not found.profile:
        answer, known = "", (*packaged_profiles(), NONE)
        while answer not in known:
            answer = ask(f"Type of the racks ({', '.join(known)})?", profile or NONE)
        profile, suggested = (None if answer == NONE else answer), None
    elif suggested and not found.profile:
        draft.guesses.append(f"the racks are {suggested[0]}, as an exporter reports GPUs {suggested[1]}")
    place_hosts(draft, hosts, profile)
    if profile is None:
        draft.guesses.append(
            "the racks have no profile, so no limits guard them: add `profile: NAME` to each"
        )
    return draft


def _called(agents: SiteDraft | None, described: Discovery, found: Surroundings, ask: Ask | None) -> str:
    """The name of the site: that of its agents, that of the paths of its BMS, else that of this host."""
    if agents is not None:
        name, why = str(agents.site["site"]), "as its agents say"
    elif described.called:
        name, why = described.called, "as the paths of all points of the BMS say"
    else:
        host = site_name(socket.gethostname().partition(".")[0])
        name, why = ("site" if host in ("", "localhost") else host), "as this host; --name gives another"
    if ask is not None:
        question = "Name of the site?"
        while not is_name(answer := ask(question, name)):
            question = f"Name of the site? {NAME_FORM}"
        return answer
    found.guesses.append(f"the site is called {name}, {why}")
    return name


def _texts(draft: SiteDraft, found: Surroundings, args: argparse.Namespace) -> dict[str, str]:
    """The files by name, as they are to be written."""
    head = "# Made by `racktwin init`. {} All other keys have their defaults: see " + REFERENCE + ".\n"
    site = head.format("What stands where.") + "".join(f"# - {_line(g)}\n" for g in draft.guesses)
    config = head.format("Where telemetry comes from.")
    return {
        SITE: site + _dump(draft.site),
        REFERENCE: reference_yaml(),
        CONFIG: config + _dump(_configuration(draft, found, args)),
    }


class _Compact(yaml.SafeDumper):
    """YAML with one line for a rack, a feeder or a scrape."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().represent_mapping(tag, mapping, flow_style)
        parts = [part for _, value in node.value for part in (value, *_items(value))]
        node.flow_style = not any(isinstance(part, yaml.MappingNode) for part in parts)
        return node

    def serialize(self, node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):  # of the whole file: a line for each key
            node.flow_style = False
        super().serialize(node)


def _items(node: yaml.Node) -> list[yaml.Node]:
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _dump(tree: dict[str, Any]) -> str:
    return yaml.dump(
        tree, Dumper=_Compact, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=None
    )


def _line(text: str) -> str:
    """On one line: a note may quote an id with line breaks, a comment must not."""
    return " ".join(clean(text, 2000).split())


def _configuration(draft: SiteDraft, found: Surroundings, args: argparse.Namespace) -> dict[str, Any]:
    tree: dict[str, Any] = {"site": SITE, "broker": _broker(found, args)}
    if found.exporters:
        tree["scrapes"] = scrapes_of(found.exporters, draft.places)
    names = as_host_lists({h: p for h, p in draft.places.items() if h in (found.slurm or {})})
    if found.slurm is not None:
        tree["jobs"] = {"slurm": {"node_names": names} if names else {}}
    if found.kubernetes is not None:
        tree["kubernetes"] = found.kubernetes
    before = _before(args.folder / CONFIG)
    free = (p for p in range(API_PORT, API_PORT + 50) if _is_free(p))
    port = args.port or before.get("api", {}).get("port") or next(free, API_PORT)
    if port != Api().port:
        tree["api"] = {"port": port}
    if not _is_free(port):
        found.guesses.append(
            f"port {port} is in use on this host: the daemon can start once what listens there has ended, "
            "such as one that runs with the files of before"
        )
    elif port != API_PORT and not (before or args.port):
        found.guesses.append(f"port {API_PORT} is in use on this host: the page is at {port}")
    if args.state is not None:
        tree["state"] = str(args.state.resolve())
    elif "state" in before:
        tree["state"] = before["state"]
    elif args.folder.resolve() == SERVICE:
        tree["state"] = str(STATE)
    return tree


def _before(path: Path) -> dict[str, Any]:
    """Port and state of a configuration that is overwritten: its daemon may run, and keeps its records."""
    if not path.exists():
        return {}
    try:
        config = load_config(path).config
    except ConfigError:
        return {}
    kept = {"api": {"port": config.api.port}} if config.api is not None else {}
    return kept | ({"state": config.state} if config.state is not None else {})


def _address(broker: str) -> tuple[str, int]:
    try:
        return host_port(broker)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--broker {error}") from None


def _broker(found: Surroundings, args: argparse.Namespace) -> Any:
    if found.broker == NONE:
        found.guesses.append("no broker: racktwin brings up one of its own on loopback (`broker: embedded`)")
        return "embedded"
    wanted = argparse.Namespace(**vars(args))
    wanted.config, wanted.broker, wanted.topic = None, _address(found.broker), None
    settings, _ = settings_of(wanted)
    tree: dict[str, Any] = {"host": settings.host, "port": settings.port}
    if args.username is not None:
        tree["username"] = args.username
    files = {"ca_file": args.ca_file, "cert_file": args.cert_file, "key_file": args.key_file}
    if args.password_file is not None:
        tree["password_file"] = str(args.password_file.resolve())
    if tls := {key: str(path.resolve()) for key, path in files.items() if path is not None}:
        tree["tls"] = tls
    if found.other_topics:
        tree["topics"] = found.other_topics
    return tree


def _is_free(port: int) -> bool:
    """True where a daemon may listen: as it, over connections of before that have ended."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _say(folder: Path, guesses: list[str], loaded: Loaded, out: Console) -> None:
    """Print the guesses, and the next commands."""

    def say(text: str) -> None:
        out.print(clean(text, 2000), markup=False, soft_wrap=True)

    if guesses:
        say("guessed or found, please check:")
    for guess in guesses:
        say(f"- {guess}")
    say(f"wrote {folder / SITE}, {folder / CONFIG} and {folder / REFERENCE} (every key, with its meaning)")
    say(f"next: racktwin daemon check --online --config {folder / CONFIG}   (asks each endpoint once)")
    if folder.resolve() == SERVICE:
        say("      systemctl enable --now racktwin")
        say("then: racktwin token link   (as root; the daemon makes the token when it starts)")
        return
    from twin.api import login_link, open_tokens

    open_tokens(loaded)
    say(f"      racktwin daemon run --config {folder / CONFIG}")
    say(f"then: {login_link(loaded)}")
    say("      the page, as an administrator: the link holds a token, so keep it to yourself")
    say(
        f"      the token is in {loaded.token_file}; `racktwin token link --config "
        f"{folder / CONFIG}` prints the link again"
    )


VERBS = {
    "init": Verb(
        run_init,
        f"""
        [FOLDER=.]  folder for the files
        --broker BROKER  MQTT broker, HOST or HOST:PORT, or `none`; default: a broker on this host
        {BROKER_USER}
        --exporter URL*  Prometheus exporter, such as http://n[01-18]:9400; repeatable
        --slurm  read jobs and nodes from Slurm; fail if Slurm is not on this host
        --no-slurm  do not look for Slurm
        --kubernetes  read jobs and nodes from Kubernetes; fail if no cluster is configured
        --no-kubernetes  do not look for Kubernetes
        --profile NAME  profile of the racks
        --name NAME  name of the site; default: the name that agents or the BMS use, else this host's
        --port PORT  port of the page; default: the first free one from {API_PORT} on
        --state FOLDER  folder for the recordings of the daemon; default: `state` beside the files
        --for DURATION|0s=1min  time to listen to the broker; 0s: do not listen
        ~--seconds SECONDS|0>for_s
        -y --yes  accept everything that is found, without questions
        --force  overwrite existing files
        """,
        ("site/", "site/ --broker mqtt.example.org --exporter 'http://n[01-18]:9400' --yes"),
        answers=False,
    )
}
