"""BMC sections of the configuration: power limits by Redfish and by IPMI DCMI."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from connectors.slurm import expand_names
from twin.catalogue import ConfigError
from twin.config.section import Problems, Strict

LOOPBACK = ("127.0.0.1", "localhost")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:[0-9]{1,5})?", re.ASCII)
_USER = re.compile(r"[!-~]{1,64}", re.ASCII)
MAX_BMCS = 100_000  # of all sections
DPUS = ("dpu1", "dpu2")  # of a node


class _Strict(Strict, msgspec.Struct, frozen=True):
    pass


class Redfish(_Strict, frozen=True):
    """Power limits and power by Redfish. `bmcs` maps hosts (host lists too, with a port) to nodes.

    `command` names what is commanded: gpus, node; the rest is read only. `gpu_ids`: Ids of processors in the
    order of a node's GPUs, where their natural order is another. `node_control`: Id of the node's Control.
    With `power` systems are stopped and nodes switched off; `system`: Id of the node's system. The BMC of a
    DPU is one of NODE#dpu1 or NODE#dpu2, in a section that only reads.
    """

    # hosts (HOST:PORT too) and their nodes: {"bmc[01-18]": "lab/hall1/r1/node[0-17]"}; of DPUs: NODE#dpu1
    bmcs: dict[str, str]
    user: str  # account at the BMCs
    password_file: str  # file with its password
    ca_file: str | None = None  # certificate authorities to trust; default: those of the host
    verify: bool = True  # false trusts anybody: the password may be taken on the network
    scheme: Literal["https", "http"] = "https"  # http on loopback only
    # what is commanded; without it limits and power are only read
    command: list[Literal["gpus", "node"]] = []
    power: bool = False  # whether systems are stopped and nodes switched off: node.power_state
    system: str = ""  # Id of the node's system, where a service has several that can be reset
    gpu_ids: list[str] = []  # processors in the order of the node's GPUs, where that is another
    dpu_ids: list[str] = []  # network adapters that are the node's DPUs, where their names do not say so
    node_control: str = ""  # Id of the node's Control, where a chassis has several
    period_s: float = 15.0  # between two reads of a BMC
    timeout_s: float = 5.0  # of a request
    at_once: int = 32  # BMCs that are asked at the same time


class Dcmi(_Strict, frozen=True):
    """Power limits and power of nodes by IPMI DCMI, through `ipmitool`. `bmcs` as for Redfish.

    With `command`, limits are set: `correction_ms` is how soon a BMC must keep one, `exception` what it does
    if it cannot (nothing, or an entry in its log; it is never asked to switch the node off). With `power`
    systems are stopped and nodes switched off by `chassis power`. `cipher`: of lanplus, where the BMC does
    not report which it takes.
    """

    bmcs: dict[str, str]  # hosts and their nodes: {"bmc[19-36].mgmt": "lab/hall1/r2/node[0-17]"}
    user: str  # account at the BMCs
    password_file: str  # file with its password
    command: bool = False  # whether limits are set
    power: bool = False  # whether systems are stopped and nodes switched off: node.power_state
    correction_ms: int = 1000  # how soon a BMC must keep a limit
    exception: Literal["none", "log"] = "log"  # what it does if it cannot: never a power-off
    cipher: int | None = None  # of lanplus, where the BMC does not report it
    program: str = "ipmitool"  # where ipmitool is
    period_s: float = 60.0  # between two reads of a BMC
    timeout_s: float = 10.0  # of one read
    at_once: int = 16  # BMCs that are asked at the same time


def actuator_problems(redfish: Sequence[Redfish], dcmi: Sequence[Dcmi]) -> list[str]:
    """Errors of these sections beyond their types."""
    out = Problems()
    for i, part in enumerate(redfish):
        where = f"redfish[{i}]"
        out += _common(part, where, 1.0)
        if part.scheme == "http" and any(host.partition(":")[0] not in LOOPBACK for host in hosts_of(part)):
            out.append(f"$.{where}.scheme: http shows the password to the network; expected https")
        if not part.verify and part.ca_file is not None:
            out.append(f"$.{where}.verify: false and a ca_file; expected one of the two")
        if len(set(part.gpu_ids)) != len(part.gpu_ids) or len(part.gpu_ids) > 64:
            out.append(f"$.{where}.gpu_ids: expected at most 64 Ids, each once")
        if len(set(part.dpu_ids)) != len(part.dpu_ids) or len(part.dpu_ids) > len(DPUS):
            out.append(f"$.{where}.dpu_ids: expected at most {len(DPUS)} Ids, each once")
        dpu = next((host for host, name in hosts_of(part).items() if dpu_of(name)[1]), None)
        if dpu is not None and (part.command or part.power):
            out.append(
                f"$.{where}.bmcs.{dpu[:60]}: the BMC of a DPU in a section with `command` or `power`; "
                "expected one of its own that only reads"
            )
    for i, dcmi_part in enumerate(dcmi):
        where = f"dcmi[{i}]"
        out += _common(dcmi_part, where, 5.0)
        out.within(f"{where}.correction_ms", dcmi_part.correction_ms, 1, 600_000)
        if dcmi_part.cipher is not None:
            out.within(f"{where}.cipher", dcmi_part.cipher, 1, 17)
    total = sum(len(hosts_of(part)) for _, part, _ in sections(redfish, dcmi))
    if total > MAX_BMCS:
        out.append(f"$.redfish, $.dcmi: {total} BMCs; expected at most {MAX_BMCS}")
    return out + _writers(redfish, dcmi)


def sections(redfish: Sequence[Redfish], dcmi: Sequence[Dcmi]) -> list[tuple[str, Redfish | Dcmi, set[str]]]:
    """(place in the file, section, caps that it commands: gpus, node) of all sections."""
    out: list[tuple[str, Redfish | Dcmi, set[str]]] = []
    out += [(f"redfish[{i}]", part, set(part.command)) for i, part in enumerate(redfish)]
    out += [(f"dcmi[{i}]", part, {"node"} if part.command else set()) for i, part in enumerate(dcmi)]
    return out


def dpu_of(name: str) -> tuple[str, int]:
    """(node, number of its DPU) of whom a BMC is: NODE#dpu2; 0 for the node itself."""
    node, _, dpu = name.partition("#")
    return (node, 1 + DPUS.index(dpu)) if dpu in DPUS else (name, 0)


def hosts_of(part: Redfish | Dcmi) -> dict[str, str]:
    """Host (and port) -> node, as far as the lists can be read."""
    try:
        return expand_names(part.bmcs, "")
    except ConfigError:
        return {}


def _common(part: Redfish | Dcmi, where: str, least_s: float) -> list[str]:
    out = Problems()
    try:
        for host in expand_names(part.bmcs, f"$.{where}.bmcs"):
            if not _HOST.fullmatch(host):
                out.append(f"$.{where}.bmcs.{host[:60]}: expected a host's name or address, or HOST:PORT")
    except ConfigError as error:
        out += error.problems
    if not part.bmcs:
        out.append(f"$.{where}.bmcs: expected hosts and their nodes: {{bmc[01-18]: lab/h/r1/node[0-17]}}")
    if not _USER.fullmatch(part.user) or part.user.startswith("-"):
        out.append(f"$.{where}.user: expected a name of up to 64 printable characters")
    out.within(f"{where}.period_s", part.period_s, least_s, 3600)
    out.within(f"{where}.timeout_s", part.timeout_s, 0.5, 60)
    out.within(f"{where}.at_once", part.at_once, 1, 256)
    return out


def _writers(redfish: Sequence[Redfish], dcmi: Sequence[Dcmi]) -> list[str]:
    """A control has one writer: two sections that command the same cap or power of a node are refused."""
    out: list[str] = []
    writer: dict[tuple[str, str], str] = {}
    for where, part, what in sections(redfish, dcmi):
        seen: set[str] = set()
        for host, node in hosts_of(part).items():
            if node in seen:
                out.append(f"$.{where}.bmcs.{host[:60]}: {node[:80]} has a BMC already; expected one")
            seen.add(node)
            mine = [("command", f"{cap} cap") for cap in sorted(what)]
            for key, control in mine + [("power", "power")] * part.power:
                other = writer.setdefault((node, control), where)
                if other != where:
                    out.append(
                        f"$.{where}.{key}: {other} commands the {control} of {node[:80]} already; expected "
                        "one writer"
                    )
    return out[:20]


def actuator_notes(redfish: Sequence[Redfish], dcmi: Sequence[Dcmi]) -> list[str]:
    """Notes on these sections for the operator, before a daemon acts by them."""
    out: list[str] = []
    acting = [where for where, _, what in sections(redfish, dcmi) if what]
    for where in acting:
        out.append(
            f"{where}: a BMC cannot enforce `safe`: if the daemon dies it keeps its last cap, which may be "
            "above the safe one; the sum of lapse values does not hold for these nodes"
        )
    for i, part in enumerate(redfish):
        if not part.verify:
            out.append(f"redfish[{i}].verify is false: who is on the network may take the password")
    return out
