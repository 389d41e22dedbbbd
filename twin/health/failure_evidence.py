"""Failure evidence: the reasons that make a node unusable now, and their class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.catalogue import I32, I64, NS, U8, Bool, find_signal
from twin.contracts import DEGRADED, FAILED, HEALTHY, action
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.health.failure_words import CLASSES
from twin.health.fault_codes import find
from twin.health.verdicts import MAX_TOLD, Verdicts
from twin.site import Site

# What the catalogue's kinds of code mean; what is not here is `other`
CLASS_OF_CODES = {"bus": "off_bus", "memory": "memory", "nvlink": "link", "fabric": "link", "pcie": "link",
                  "thermal": "thermal", "power": "power", "app": "software"}  # fmt: skip
# Faults of the diagnosis that tell the class of a failure at a node or its GPU
CLASS_OF_KIND = {
    "gpu_off_bus": "off_bus",
    "ecc_growth": "memory",
    "nvlink_flaps": "link",
    "plate_degraded": "thermal",
    "tray_blocked": "thermal",
    "leak": "thermal",
    "psu_lost": "power",
}
# Parts of the names of rules, in this order
CLASS_OF_RULE = (
    ("bus", "off_bus"), ("remap", "memory"), ("ecc", "memory"), ("memory", "memory"), ("nvlink", "link"),
    ("link", "link"), ("pcie", "link"), ("margin", "thermal"), ("therm", "thermal"), ("temp", "thermal"),
    ("leak", "thermal"), ("psu", "power"), ("power", "power"), ("silent", "silent"), ("gap", "silent"),
)  # fmt: skip
OUT_FROM = 3.0  # service level from which nobody can use a node: drained, replace
SAID_NS = 600 * NS  # before a failure begins that its cause may have been reported; source: estimate
MAX_ASKED = 200  # nodes whose evidence is read in one look; the rest are told by the cause alone


@dataclass(slots=True)
class Causes:
    """Why nodes are not to be used now [n_node]; `work`: where people work, None: nowhere."""

    failed: Bool  # by verdict, themselves or one of their GPUs
    off: Bool
    silent: Bool
    out: Bool  # drained, or to be replaced, as told lately
    still_out: Bool  # the same as last told, however long ago
    grave: Bool  # failed, and a device itself reported it
    suspect: Bool  # a verdict of degraded or worse speaks against them
    work: Bool | None
    told: dict[int, str]  # node -> class by the diagnosis


def causes_of(now: HealthContext, verdicts: Verdicts, book: FaultBook, down: Bool) -> Causes:
    """Return the reasons against each node at this moment; `down` are known to be [n_node].

    A GPU that only does not report, without a code, may have lost no more than its telemetry: its node is
    silent, not failed.
    """
    site, n = now.site, now.n("node")
    node_level, gpu_level = verdicts.health("node").level, verdicts.health("gpu").level
    suspect, failed = node_level >= DEGRADED, node_level == FAILED
    worse = np.flatnonzero(gpu_level >= DEGRADED)
    suspect[site.node_of_gpu[worse]] = True
    lost = worse[gpu_level[worse] == FAILED]
    grave = failed & (book.open_action("node") >= _GRAVE) if failed.any() else np.zeros(n, np.bool_)
    if lost.size:
        failed[site.node_of_gpu[lost]] = True
        grave[site.node_of_gpu[lost[book.open_action("gpu")[lost] >= _GRAVE]]] = True
    silent: Bool = np.zeros(n, np.bool_)
    told, quiet = _told(now)
    silent[quiet] = True
    if lost.size:
        _only_silent(now, verdicts, book, lost, failed, silent, down)
    off = now.good("node.power_on_state") == 0.0
    level = now.good("node.service_level_state")
    signal = find_signal("node.service_level_state")
    assert signal is not None
    with np.errstate(invalid="ignore"):
        still_out = now.state.tables["node"].value[signal.row] >= OUT_FROM
        out = level >= OUT_FROM
    return Causes(failed, off, silent, out, still_out, grave, suspect, now.under_work("node"), told)


def _only_silent(
    now: HealthContext, verdicts: Verdicts, book: FaultBook, lost: I64, failed: Bool, silent: Bool, down: Bool
) -> None:
    """Move nodes from `failed` to `silent` of which all that failed are GPUs that are not heard."""
    of = now.site.node_of_gpu
    unheard = [
        e for kind, table, e, _ in now.diagnosis.book.reported if (kind, table) == ("gpu_off_bus", "gpu")
    ]
    if not unheard:
        return
    dark = np.isin(lost, unheard) & (book.open_action("gpu")[lost] < _GRAVE)
    nodes = np.setdiff1d(of[lost[dark]], of[lost[~dark]])
    nodes = nodes[~down[nodes]][:MAX_ASKED]
    own = verdicts.rules_of("node", nodes, FAILED)
    for node in nodes.tolist():
        if node not in own:
            failed[node], silent[node] = False, True


def class_of_node(nodes: I32, now: HealthContext, verdicts: Verdicts, book: FaultBook, causes: Causes) -> U8:
    """Class of the failure of each node [m], a place in CLASSES.

    What a device says of itself goes before what the diagnosis found, that before the rule of the verdict,
    and that before the bare fact that it is off or silent.
    """
    codes, actions = book.open_code("gpu"), book.open_action("gpu")
    plain = np.where(causes.off, _POWER, np.where(causes.silent, _SILENT, _OTHER)).astype(np.uint8)
    for node, name in causes.told.items():
        plain[node] = CLASSES.index(name)
    out: U8 = plain[nodes]
    asked = nodes[:MAX_ASKED].tolist()
    start = now.site.gpu_start_of_node
    gpus = {node: range(int(start[node]), int(start[node + 1])) for node in asked}
    names = [_of_codes(codes[g.start : g.stop], actions[g.start : g.stop]) for g in gpus.values()]
    vague = {node: gpus[node] for node, name in zip(asked, names, strict=True)
             if node not in causes.told and name in ("", "software")}  # fmt: skip
    by_rules = _of_rules(vague, verdicts) if vague else {}
    for k, (node, code_name) in enumerate(zip(asked, names, strict=True)):
        name = by_rules.get(node, "") or code_name
        if name and not (name == "software" and node in causes.told):
            out[k] = CLASSES.index(name)
    return out


def said_so(nodes: I32, since_ns: I64, site: Site, book: FaultBook) -> Bool:
    """Of these nodes [m], of which a GPU itself reported, about then or since, that it left the bus."""
    last_ns = np.zeros(site.sizes["node"], np.int64)
    for kind in (k for k, name in CLASS_OF_CODES.items() if name == "off_bus"):
        of_gpu = book.last_ns("gpu", kind)
        told = np.flatnonzero(of_gpu)
        np.maximum.at(last_ns, site.node_of_gpu[told], of_gpu[told])
    said: Bool = (last_ns[nodes] > 0) & (last_ns[nodes] >= since_ns - SAID_NS)
    return said


def _of_codes(codes: I32, actions: U8) -> str:
    """The class of the code that asks for the most."""
    for k in np.argsort(-actions.astype(np.int32), kind="stable").tolist():
        if codes[k] and (name := CLASS_OF_CODES.get(find(int(codes[k]), "gpu").kind)):
            return name
    return ""


def _of_rules(nodes: dict[int, range], verdicts: Verdicts) -> dict[int, str]:
    """The class by the rules that speak against each node and its GPUs most gravely, where one tells."""
    level = verdicts.health("gpu").level
    failed = {node: [g for g in gpus if level[g] == FAILED] for node, gpus in nodes.items()}
    every = np.array(sorted(g for some in failed.values() for g in some), np.int32)
    of_gpu = verdicts.rules_of("gpu", every, HEALTHY)
    of_node = verdicts.rules_of("node", np.array(sorted(nodes), np.int32), FAILED)
    out = {}
    for node, gpus in nodes.items():
        own = [(-sure, rule) for _, sure, rule in of_node.get(node, [])]
        told = [g for g in gpus if level[g] != HEALTHY][:MAX_TOLD]
        theirs: list[tuple[float, str]] = []
        for gpu in failed[node]:
            said = of_gpu.get(gpu, [])
            if said and gpu in told:
                _, sure, rule = min(said, key=lambda s: (-s[0], -s[1]))
                own.append((-sure, f"gpu:{rule}"))
            theirs += sorted((-sure, rule) for at, sure, rule in said if at == FAILED)
        for _, rule in (*sorted(own), *theirs):
            if name := next((name for part, name in CLASS_OF_RULE if part in rule), ""):
                out[node] = name
                break
    return out


def _told(now: HealthContext) -> tuple[dict[int, str], list[int]]:
    """Return the faults that the diagnosis reports of nodes and their GPUs: (node -> class, nodes that are
    silent).
    """
    classes: dict[int, str] = {}
    silent: list[int] = []
    for kind, table, entity, _ in now.diagnosis.book.reported:
        if kind == "node_silent":
            silent.append(entity)
        elif kind in CLASS_OF_KIND and table in ("gpu", "node"):
            node = int(now.site.node_of_gpu[entity]) if table == "gpu" else entity
            classes.setdefault(node, CLASS_OF_KIND[kind])
    return classes, silent


_GRAVE = action("reset_gpu")
_POWER, _SILENT, _OTHER = (CLASSES.index(c) for c in ("power", "silent", "other"))
