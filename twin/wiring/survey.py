"""Survey: what exporters, Slurm and this host report of a site that nobody has described yet, and its draft.

A draft is a tree of the site file and one of the configuration, with every guess in words.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from connectors.agents import FRAME, gpus_in
from connectors.prometheus import MAX_PAGE
from connectors.series_map import load_map
from twin.catalogue import ConnectorError
from twin.config import Scrape, spec_of, targets_of
from twin.site import build_site, parse_profile
from twin.telemetry import Message

MAPS = ("dcgm", "node", "ascend", "neuron", "storage")
ACCELERATORS = ("dcgm", "ascend", "neuron")
# Ports on which exporters listen by default: dcgm-exporter, node_exporter
LOCAL = ("http://127.0.0.1:9400/metrics", "http://127.0.0.1:9100/metrics")
ASK_S, LOCAL_S = 5.0, 0.5
MAX_LINES = 5_000
# Words in the model that dcgm-exporter reports, and the profile that has such GPUs
MODELS = {"GB300": "gb300-nvl72", "GB200": "gb200-nvl72", "H100": "hgx-h100", "H200": "hgx-h100"}


@dataclass(frozen=True)
class FoundExporter:
    """An exporter that answered. `host` is whom its series name, else the host of its URL."""

    url: str
    map: str
    host: str
    gpus: int = 0
    model: str = ""


@dataclass
class SiteDraft:
    """Draft of a site. `places` are the hosts of exporters and Slurm and the nodes they are taken for."""

    site: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)
    guesses: list[str] = field(default_factory=list)


def natural(name: str) -> list[Any]:
    """A key to sort names by in which numbers count as numbers: n2 before n10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def ask_exporters(patterns: Sequence[str]) -> tuple[list[FoundExporter], list[str]]:
    """(exporters that answered, why the others did not). A URL may hold a host list, as in n[01-18]."""
    urls: list[str] = []
    for pattern in patterns:
        url = pattern if pattern.startswith(("http://", "https://")) else f"http://{pattern}"
        url += "" if "/" in url.partition("://")[2].rstrip("/") else "/metrics"
        urls += [target for target, _ in targets_of(Scrape(url=url, map=""), "--exporter")]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(_scrape, urls))
    return [a for a in answers if isinstance(a, FoundExporter)], [a for a in answers if isinstance(a, str)]


def local_exporters() -> list[FoundExporter]:
    """Exporters on this host at their usual ports; none where it has no accelerators: it is no node then."""
    answers = [_scrape(url, LOCAL_S) for url in LOCAL]
    found = [one for one in answers if isinstance(one, FoundExporter)]
    return found if any(one.map in ACCELERATORS for one in found) else []


def with_one_name(exporters: Sequence[FoundExporter], known: Collection[str]) -> list[FoundExporter]:
    """Exporters on this host at their usual ports; none where none reports accelerators: it is no node."""
    address = {one.url: urllib.parse.urlsplit(one.url).hostname for one in exporters}
    labels = {address[one.url]: one.host for one in exporters if one.map in ACCELERATORS}
    out = []
    for one in exporters:
        host = labels.get(address[one.url], one.host)
        short = host.partition(".")[0]
        out.append(replace(one, host=short if short in known else host))
    return out


def _scrape(url: str, timeout_s: float = ASK_S) -> FoundExporter | str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            page: bytes = answer.read(MAX_PAGE)
        return read_page(url, page)
    except (OSError, ValueError, urllib.error.URLError) as error:
        why = getattr(error, "reason", None) or error
        return f"{url}: does not answer: {why}; expected the page of a Prometheus exporter"
    except ConnectorError as error:
        return str(error)


def read_page(url: str, page: bytes) -> FoundExporter:
    """The exporter whose page it is. Raises ConnectorError if no packaged mapping knows its series."""
    lines = [line for line in page.decode(errors="replace").splitlines() if line[:1] not in ("", "#")]
    names = {re.split(r"[{ \t]", line, maxsplit=1)[0] for line in lines}
    known = {m: {s for rule in load_map(m)[0].rules for s in rule.signals} for m in MAPS}
    best = max(MAPS, key=lambda m: len(known[m] & names))
    if not known[best] & names:
        raise ConnectorError(
            f"{url}: no mapping of the package ({', '.join(MAPS)}) knows any of its {len(names)} series; "
            "write a mapping file of your own and name it in `scrapes`"
        )
    own = [line for line in lines if re.split(r"[{ \t]", line, maxsplit=1)[0] in known[best]]
    hosts, gpus, models = set[str](), set[str](), set[str]()
    try:
        for family in text_string_to_metric_families("\n".join(islice(own, MAX_LINES)) + "\n"):
            for sample in family.samples:
                hosts.add(sample.labels.get("Hostname") or sample.labels.get("hostname") or "")
                gpus.add(sample.labels.get("gpu", ""))
                models.add(sample.labels.get("modelName", ""))
    except ValueError as error:
        raise ConnectorError(f"{url}: a line cannot be read: {error}") from None
    host = min(hosts - {""}, default="") if best == "dcgm" else ""
    host = host or urllib.parse.urlsplit(url).hostname or url
    model = min(models - {""}, default="")
    return FoundExporter(url, best, host, len(gpus - {""}) if best == "dcgm" else 0, model)


def slurm_hosts() -> dict[str, int] | None:
    """Slurm's nodes and the GPUs of each, by `sinfo`; None where Slurm is not here or does not answer."""
    if any(shutil.which(program) is None for program in ("sinfo", "squeue", "scontrol")):
        return None
    command = ["sinfo", "-h", "-N", "-o", "%N|%G"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    hosts: dict[str, int] = {}
    for line in answer.splitlines():
        host, _, resources = line.strip().partition("|")
        if host:
            gpus = re.findall(r"gpu(?::[A-Za-z0-9_.-]+)?:(\d+)", resources)
            hosts[host] = max(hosts.get(host, 0), sum(map(int, gpus)))
    return hosts


def kubernetes_access() -> dict[str, Any] | None:
    """The section `kubernetes` for the cluster that this host or pod can reach; None where it can none."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return {}
    named = os.environ.get("KUBECONFIG", "").split(":")[0]
    path = Path(named) if named else Path("~/.kube/config").expanduser()
    return {"kubeconfig": str(path.resolve())} if path.is_file() else None


def tree_of_frames(messages: Iterable[Message]) -> SiteDraft | None:
    """The site whose agents speak on the IT tree; None without."""
    paths: dict[str, int] = {}
    for message in messages:
        if message.topic.startswith(FRAME):
            path = message.topic[len(FRAME) :]
            paths[path] = max(paths.get(path, 0), gpus_in(message.payload))
    return tree_of_paths(paths)


def tree_of_paths(paths: Mapping[str, int]) -> SiteDraft | None:
    """The site of agents by their paths: halls, racks and nodes, with the GPUs of each; None without."""
    racks: dict[tuple[str, str], set[str]] = {}
    sites: dict[str, int] = {}
    gpus: dict[tuple[str, str], int] = {}
    for path, count in paths.items():
        parts = path.split("/")
        if len(parts) not in (3, 4):
            continue
        sites[parts[0]] = sites.get(parts[0], 0) + 1
        rack = (parts[1], parts[2])
        racks.setdefault(rack, set()).update(parts[3:])
        if len(parts) == 4:
            gpus[rack] = max(gpus.get(rack, 0), count)
    if not racks:
        return None
    halls: dict[str, list[dict[str, Any]]] = {}
    for rack, nodes in sorted(racks.items(), key=lambda pair: (natural(pair[0][0]), natural(pair[0][1]))):
        numbers = [int(n[4:]) for n in nodes if re.fullmatch(r"node\d{1,6}", n)]
        layout = {"nodes": max(numbers) + 1, "gpus_per_node": gpus.get(rack, 0)} if numbers else {}
        halls.setdefault(rack[0], []).append({"name": rack[1], **layout})
    site = max(sites, key=lambda s: sites[s])
    tree = {"site": site, "halls": [{"name": h, "racks": r} for h, r in halls.items()]}
    guess = f"the site {site} with {len(racks)} racks is read off the topics of its node agents"
    return SiteDraft(tree, {}, [guess])


def place_hosts(draft: SiteDraft, hosts: dict[str, int], profile: str | None) -> None:
    """Give the racks of a draft their profile and their nodes, and take each host for one node, in order.

    Raises ConfigError for an unknown profile.
    """
    tree, ordered = draft.site, sorted(hosts, key=natural)
    groups = [group for hall in tree["halls"] for group in hall["racks"]]
    gpus = max(hosts.values(), default=0)
    if not groups:
        count = _racks_for(len(ordered), profile)
        groups = tree["halls"][0]["racks"] = [{"name": "r1" if count == 1 else f"r[1-{count}]"}]
        draft.guesses.append(
            f"No racks found: {groups[0]['name']} is a placeholder for {len(ordered)} "
            f"host{'' if len(ordered) == 1 else 's'}; edit site.yaml"
        )
    for group in (g for g in groups if not g.get("profile")):
        if profile:
            group["profile"] = profile
            group.pop("nodes", None)
            group.pop("gpus_per_node", None)
        elif ordered and not group.get("nodes"):
            group |= {"nodes": math.ceil(len(ordered) / len(groups)), "gpus_per_node": gpus}
            draft.guesses.append(f"rack {group['name']} has {group['nodes']} nodes of {gpus} GPUs")
    nodes = _nodes(tree)
    draft.places = dict(zip(ordered, nodes, strict=False))
    if draft.places:
        first, last = ordered[0], ordered[len(draft.places) - 1]
        draft.guesses.append(
            f"{len(draft.places)} hosts, {first} to {last} in the order of their numbers, are taken for "
            f"{draft.places[first]} to {draft.places[last]}"
        )
    if left := ordered[len(nodes) :]:
        draft.guesses.append(
            f"{len(left)} hosts have no node ({', '.join(left[:5])}{' ...' if left[5:] else ''}): the racks "
            f"have {len(nodes)}; add racks, or correct `nodes`"
        )


def _racks_for(hosts: int, profile: str | None) -> int:
    """Racks that so many hosts of this type fill; whole supernodes, one at least."""
    if profile is None:
        return 1
    tree = {"site": "s", "halls": [{"name": "h", "racks": [{"name": "r", "profile": profile}]}]}
    found = parse_profile(spec_of(tree, None, "--profile").profiles[profile], profile)
    return max(1, math.ceil(hosts / found.nodes)) * int(found.layout.racks.value)


def _nodes(tree: dict[str, Any]) -> list[str]:
    site = build_site(spec_of(tree, None, "the draft of the site"))
    return [site.name("node", node) for node in range(site.sizes["node"])]


def scrapes_of(exporters: Sequence[FoundExporter], places: dict[str, str]) -> list[dict[str, Any]]:
    """The section `scrapes`; exporters whose hosts and places are numbered side by side are one entry."""
    alike: dict[tuple[str, str, str], dict[str, str]] = {}
    out: list[dict[str, Any]] = []
    for one in sorted(exporters, key=lambda e: (e.map, natural(e.url))):
        scheme, _, rest = one.url.partition("://")
        host = re.match(r"[^/:]*", rest)
        if one.host not in places or host is None:
            out.append({"url": one.url, "map": one.map})
            continue
        alike.setdefault((one.map, scheme, rest[host.end() :]), {})[host[0]] = places[one.host]
    for (kind, scheme, behind), pairs in alike.items():
        for hosts, place in as_host_lists(pairs).items():
            out.append({"url": f"{scheme}://{hosts}{behind}", "map": kind, "place": place})
    return out


def as_host_lists(pairs: dict[str, str]) -> dict[str, str]:
    """The same pairs; those whose numbers run on side by side as host lists: n[01-18]: r1/node[0-17]."""
    out: dict[str, str] = {}
    runs: list[list[tuple[re.Match[str], re.Match[str]]]] = []
    for left, right in pairs.items():
        a, b = _NUMBERED.fullmatch(left), _NUMBERED.fullmatch(right)
        if a is None or b is None:
            out[left] = right
        elif runs and all(_follows(before, one) for before, one in zip(runs[-1][-1], (a, b), strict=True)):
            runs[-1].append((a, b))
        else:
            runs.append([(a, b)])
    for run in runs:
        (a, b), (c, d) = run[0], run[-1]
        if a is c:
            out[a[0]] = b[0]
        else:
            out[f"{a[1]}[{a[2]}-{c[2]}]{a[3]}"] = f"{b[1]}[{b[2]}-{d[2]}]{b[3]}"
    return out


_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")


def _follows(before: re.Match[str], one: re.Match[str]) -> bool:
    """True for n09 after n08, and n10 after n9; not for n010 after n09."""
    same = before[1] == one[1] and before[3] == one[3] and int(one[2]) == int(before[2]) + 1
    return same and one[2] == f"{int(one[2]):0{len(before[2])}d}"


def profile_of(exporters: Sequence[FoundExporter]) -> tuple[str, str] | None:
    """(profile, model) that the GPUs of these exporters suggest."""
    for exporter in exporters:
        for word, profile in MODELS.items():
            if word in exporter.model.upper():
                return profile, exporter.model
    return None
