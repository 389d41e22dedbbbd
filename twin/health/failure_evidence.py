"""What makes a node unusable now, and of what class that is.

May import verdicts, the fault book, the catalogue of codes, levels and the moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.frame import I32, I64, U8, Bool
from twin.health.catalogue import find
from twin.health.failure_words import CLASSES
from twin.health.fault_book import FaultBook
from twin.health.levels import DEGRADED, FAILED, action
from twin.health.now import Now
from twin.health.records import Evidence
from twin.health.verdicts import Verdicts
from twin.signals import find_signal

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


def causes_of(now: Now, verdicts: Verdicts, book: FaultBook, down: Bool) -> Causes:
    """What speaks against each node at this moment; `down` are known to be [n_node].

    A GPU that is only not heard, without a code, may have lost no more than its telemetry: its node is
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
    now: Now, verdicts: Verdicts, book: FaultBook, lost: I64, failed: Bool, silent: Bool, down: Bool
) -> None:
    """Move nodes from `failed` to `silent` of which all that failed are GPUs that are not heard."""
    of = now.site.node_of_gpu
    unheard = [e for kind, table, e, _ in now.diagnosis.book.told if (kind, table) == ("gpu_off_bus", "gpu")]
    dark = np.isin(lost, unheard) & (book.open_action("gpu")[lost] < _GRAVE)
    nodes = np.setdiff1d(of[lost[dark]], of[lost[~dark]])
    for node in nodes[~down[nodes]][:MAX_ASKED].tolist():
        said = verdicts.evidence("node", node)
        if not any(e.level == FAILED and not e.rule.startswith("gpu:") for e in said):
            failed[node], silent[node] = False, True


def class_of_node(nodes: I32, now: Now, verdicts: Verdicts, book: FaultBook, causes: Causes) -> U8:
    """Class of the failure of each node [m], a place in CLASSES.

    What a device says of itself goes before what the diagnosis found, that before the rule of the verdict,
    and that before the bare fact that it is off or silent.
    """
    codes, actions = book.open_code("gpu"), book.open_action("gpu")
    plain = np.where(causes.off, _POWER, np.where(causes.silent, _SILENT, _OTHER)).astype(np.uint8)
    for node, name in causes.told.items():
        plain[node] = CLASSES.index(name)
    out: U8 = plain[nodes]
    for k, node in enumerate(nodes[:MAX_ASKED].tolist()):
        mine = slice(*now.site.gpu_start_of_node[node : node + 2].tolist())
        name = _of_codes(codes[mine], actions[mine])
        if node not in causes.told and name in ("", "software"):
            name = _of_rules(node, mine, verdicts) or name
        if name and not (name == "software" and node in causes.told):
            out[k] = CLASSES.index(name)
    return out


def _of_codes(codes: I32, actions: U8) -> str:
    """The class of the code that asks for the most."""
    for k in np.argsort(-actions.astype(np.int32), kind="stable").tolist():
        if codes[k] and (name := CLASS_OF_CODES.get(find(int(codes[k]), "gpu").kind)):
            return name
    return ""


def _of_rules(node: int, gpus: slice, verdicts: Verdicts) -> str:
    gravest: list[Evidence] = [e for e in verdicts.evidence("node", node) if e.level == FAILED]
    for gpu in np.flatnonzero(verdicts.health("gpu").level[gpus] == FAILED).tolist():
        gravest += [e for e in verdicts.evidence("gpu", gpus.start + gpu) if e.level == FAILED]
    for evidence in gravest:
        for part, name in CLASS_OF_RULE:
            if part in evidence.rule:
                return name
    return ""


def _told(now: Now) -> tuple[dict[int, str], list[int]]:
    """What the diagnosis holds against nodes and their GPUs: (node -> class, nodes that are silent)."""
    classes: dict[int, str] = {}
    silent: list[int] = []
    for kind, table, entity, _ in now.diagnosis.book.told:
        if kind == "node_silent":
            silent.append(entity)
        elif kind in CLASS_OF_KIND and table in ("gpu", "node"):
            node = int(now.site.node_of_gpu[entity]) if table == "gpu" else entity
            classes.setdefault(node, CLASS_OF_KIND[kind])
    return classes, silent


_GRAVE = action("reset_gpu")
_POWER, _SILENT, _OTHER = (CLASSES.index(c) for c in ("power", "silent", "other"))
