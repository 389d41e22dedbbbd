"""Redfish service of one node: finds, reads and sets its power limits and its power switch.

GPUs by their `EnvironmentMetrics.PowerLimitWatts` or a Control that names them; the node by the one power
Control, or power limit, of its chassis, and switched by the one system that can be reset. Paths are found by
walking from the service root, once, and again where one is gone; what cannot be distinguished is not guessed.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from connectors.bmc.limits import GPU_CAP, NODE_CAP, BmcReading, Cap, Changed, Key
from connectors.bmc.power import LEVELS, OFF, ON, STOP
from connectors.bmc.redfish_client import JSON, Gone, HttpAnswer, RedfishClient, is_path, link
from connectors.bmc.redfish_dpus import SIDES, DpuSpot, bodies_of, dpu_values, dpus_of, spot_of, spot_of_card
from twin.catalogue import ActuationError, ConnectorError

Answer = TypeVar("Answer")
MAX_GETS = 600  # of one walk
MAX_WALK_BYTES = 8 * 2**20  # of one walk, or look; in memory they are some twenty times as much
MAX_MEMBERS, MAX_PAGES = 256, 8  # of a collection
MAX_W = 1e6
WALK_S = 60.0  # what was not found is looked for again after this long. source: estimate
# Contexts of controls that cap a part, not the node. source: DSP8010 PhysicalContext
PARTS = ("GPU", "CPU", "Accelerator", "Memory", "ASIC", "FPGA", "GPUSubsystem", "CPUSubsystem",
         "AcceleratorSubsystem", "MemorySubsystem", "NetworkingDevice", "StorageDevice", "PowerSupply", "Fan",
         "Pump", "Rack", "Room")  # fmt: skip
RESETS = {ON: "On", STOP: "GracefulShutdown", OFF: "ForceOff"}  # source: DSP0268, Resource.ResetType
STATES = {"On": ON, "PoweringOn": ON, "PoweringOff": STOP, "Off": OFF}  # source: DSP0268, Resource.PowerState
RESET = "#ComputerSystem.Reset"


class Spot(NamedTuple):
    """Location of a cap: a `Control`, or `PowerLimitWatts` of `EnvironmentMetrics`."""

    path: str
    kind: Literal["control", "metrics"]


@dataclass
class Map:
    """Result of a walk. `gpus` in the order of the node's GPUs; `why` says what is not there, by control, and
    under `dpus` why no DPU is read. `again`: DPUs could not be read, and are looked for again.
    """

    gpus: list[Spot] = field(default_factory=list)
    gpu_power: list[str] = field(default_factory=list)
    node: Spot | None = None
    node_power: str = ""
    dpus: list[DpuSpot] = field(default_factory=list)
    again: bool = False
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RedfishCaps:
    """The caps of a service: those that we `command` (gpus, node) and the highest of each in the site.

    `gpu_ids` are Ids of processors in the order of the GPUs (else their natural order); `node_control` is the
    Id or path of the node's Control, for a chassis with several, and `system` that of its system. With
    `power` the power of the system is commanded too. `dpu_ids` are Ids of the network adapters that are the
    node's DPUs, in their order; those whose numbers are `own_bmc` are read by BMCs of their own, not here.
    """

    command: Sequence[str] = ()
    most_w: Mapping[Key, float] = field(default_factory=dict)
    gpu_ids: Sequence[str] = ()
    dpu_ids: Sequence[str] = ()
    own_bmc: Collection[int] = ()
    node_control: str = ""
    system: str = ""
    power: bool = False


class RedfishBmc:
    """One node's service. `gpus` are the indices of the node's GPUs in the site."""

    def __init__(
        self, name: str, node: int, client: RedfishClient, gpus: Sequence[int], caps: RedfishCaps
    ) -> None:
        self.name, self.node, self._client, self._gpus = name, node, client, tuple(gpus)
        self._ids, self._node_control, self._most_w = caps, caps.node_control, caps.most_w
        self.keys = (
            *(Key(GPU_CAP, gpu) for gpu in self._gpus if "gpus" in caps.command),
            *((Key(NODE_CAP, node),) if "node" in caps.command else ()),
        )
        self.switch, self._power = RedfishSwitch(name, client, caps.system), caps.power
        self._map: Map | None = None
        self._walked_s = 0.0
        self._found_off: set[Key] = set()  # caps that were off before we set them

    async def read(self) -> BmcReading:
        """Return all readings of the node's service. Raises ConnectorError."""
        parts = await self._mapped()
        caps: list[Cap] = []
        power: list[tuple[str, int, float]] = []
        bodies: dict[str, HttpAnswer] = {}
        try:
            for number, gpu in enumerate(self._gpus if parts.gpus else ()):
                caps.append(await self._read(Key(GPU_CAP, gpu), parts.gpus[number], bodies))
                if path := parts.gpu_power[number]:
                    power += _power("gpu", gpu, await self._get(path, bodies))
            if parts.node is not None:
                caps.append(await self._read(Key(NODE_CAP, self.node), parts.node, bodies))
            if parts.node_power:
                power += _power("node", self.node, await self._get(parts.node_power, bodies))
        except Gone:
            self._map = None
            raise
        wanted = {"dpus", *(key.control for key in self.keys)}
        faults = [why for control, why in parts.why.items() if control in wanted]
        try:
            level = await self.switch.level()
        except ActuationError as error:
            level = None
            faults += [str(error)] if self._power else []
        dpus = await self._dpus(parts, bodies, faults)
        return BmcReading(tuple(caps), tuple(power), tuple(faults), level, tuple(dpus))

    async def _dpus(
        self, parts: Map, bodies: dict[str, HttpAnswer], faults: list[str]
    ) -> list[tuple[str, float]]:
        """Return the readings of DPUs. An unreadable DPU is a fault, and does not affect the reading of
        caps."""

        async def get(path: str) -> JSON:
            return (await self._get(path, bodies)).body

        out: list[tuple[str, float]] = []
        for side, dpu in enumerate(parts.dpus, 1):
            if side in self._ids.own_bmc:
                continue
            try:
                out += dpu_values(side, dpu, await bodies_of(dpu, get))
            except (ConnectorError, ActuationError) as error:
                parts.again |= isinstance(error, Gone)
                faults.append(f"DPU {side}: {error}")
        return out

    async def cap(self, key: Key) -> Cap:
        """Read one cap again. Raises ConnectorError, or ActuationError if there is none."""
        parts = await self._mapped()
        spot = parts.node
        if key.control == GPU_CAP:
            spot = parts.gpus[self._gpus.index(key.entity)] if parts.gpus else None
        if spot is None:
            why = parts.why.get(key.control, "has no power limit for it")
            raise ActuationError(f"{self.name}: {why}")
        try:
            return await self._read(key, spot, {})
        except Gone:
            self._map = None
            raise

    async def put(self, cap: Cap, value_w: float, final: bool) -> None:
        """Set a cap, in whole watts and never above the requested value; see `Bmc.put`."""
        parts, number = self._map, self._gpus.index(cap.key.entity) if cap.key.control == GPU_CAP else 0
        spots = () if parts is None else parts.gpus if cap.key.control == GPU_CAP else (parts.node,)
        spot = spots[number] if number < len(spots) else None
        if spot is None:  # not looked for now: whether we still lead was asked just before
            raise Changed(f"{self.name}: the cached resources are gone; they are read again")
        change: JSON = {"SetPoint": max(math.floor(value_w + 1e-6), math.ceil(cap.low_w))}
        if cap.free:
            self._found_off.add(cap.key)
            change["ControlMode"] = "Automatic"
        elif final and cap.key in self._found_off and value_w >= cap.high_w:
            self._found_off.discard(cap.key)
            change["ControlMode"] = "Disabled"
        await self._client.patch(
            spot.path, change if spot.kind == "control" else {"PowerLimitWatts": change}, cap.tag
        )

    async def close(self) -> None:
        """Sign out."""
        await self._client.close()

    async def _get(self, path: str, bodies: dict[str, HttpAnswer]) -> HttpAnswer:
        if path not in bodies:
            bodies[path] = await self._client.get(path)
            if sum(answer.size for answer in bodies.values()) > MAX_WALK_BYTES:
                raise ConnectorError(f"{self.name}: a visit of more than {MAX_WALK_BYTES} bytes in all")
        return bodies[path]

    async def _read(self, key: Key, spot: Spot, bodies: dict[str, HttpAnswer]) -> Cap:
        answer = await self._get(spot.path, bodies)
        limit = answer.body if spot.kind == "control" else answer.body.get("PowerLimitWatts")
        if not isinstance(limit, dict):
            raise ConnectorError(f"{self.name}{spot.path}: has no power limit now")
        low, high, value = (_number(limit.get(k)) for k in ("AllowableMin", "AllowableMax", "SetPoint"))
        low_w, high_w = low or 0.0, high or self._most_w.get(key, MAX_W)
        if low_w > high_w:
            raise ConnectorError(
                f"{self.name}{spot.path}: allows {low_w:g} to {high_w:g} W, which is not a range"
            )
        if "SetPoint" not in limit:
            raise ConnectorError(f"{self.name}{spot.path}: has no SetPoint")
        if limit["SetPoint"] is not None and value is None:
            raise ConnectorError(f"{self.name}{spot.path}: SetPoint is not a number of watts")
        free = value is None or limit.get("ControlMode") == "Disabled"
        return Cap(key, high_w if free or value is None else value, low_w, high_w, free, answer.tag)

    async def _mapped(self) -> Map:
        lacks = self._map is not None and (
            self._map.again or any(key.control in self._map.why for key in self.keys)
        )
        if self._map is None or (lacks and time.monotonic() - self._walked_s >= WALK_S):
            self._walked_s = time.monotonic()
            walk = Walk(self._client, self.name)
            self._map = await walk.map(len(self._gpus), self._ids, self._node_control)
        return self._map


class RedfishDpu:
    """The service of a DPU's own BMC, read only. `side`: its number in the node, 1 or 2."""

    keys: tuple[Key, ...] = ()

    def __init__(self, name: str, node: int, side: int, client: RedfishClient) -> None:
        self.name, self.node, self._side, self._client = name, node, side, client
        self._spot: DpuSpot | None = None

    async def read(self) -> BmcReading:
        """Return all readings of the DPU. Raises ConnectorError."""
        try:
            if self._spot is None:
                self._spot = await Walk(self._client, self.name).card()
            bodies = await bodies_of(self._spot, self._get)
        except Gone:
            self._spot = None
            raise
        found = dpu_values(self._side, self._spot, bodies)
        faults = () if found else ("describes no DPU; expected the address of a DPU's BMC",)
        return BmcReading((), faults=faults, dpus=tuple(found))

    async def _get(self, path: str) -> JSON:
        return (await self._client.get(path)).body

    async def cap(self, key: Key) -> Cap:
        """Raise ActuationError: a DPU has no cap."""
        raise ActuationError(f"{self.name}: a DPU's BMC has no {key.control}")

    async def put(self, cap: Cap, value_w: float, final: bool) -> None:
        """Raise ActuationError: a DPU has no cap."""
        raise ActuationError(f"{self.name}: a DPU's BMC has no {cap.key.control}")

    async def close(self) -> None:
        """Sign out."""
        await self._client.close()


class RedfishSwitch:
    """Switch of one service's system. `system` is its Id or path, if several can be reset."""

    def __init__(self, name: str, client: RedfishClient, system: str = "") -> None:
        self.name, self._client, self._system = name, client, system
        self._path = self._target = ""
        self._offers: tuple[str, ...] = ()
        self._why, self._walked_s = "", 0.0

    async def level(self) -> int:
        """Return the present level. Raises ConnectorError, or ActuationError if no source reports it."""
        state = str((await self._read()).get("PowerState"))[:40]
        if state not in STATES:
            raise ActuationError(f"{self.name}: PowerState {state!r}; expected {', '.join(STATES)}")
        return STATES[state]

    async def put(self, level: int) -> None:
        """Reset to a level. Raises ConnectorError, or ActuationError if the reset is missing or refused."""
        if RESETS[level] not in self._offers:
            self._path = ""  # not looked for yet, or it offers what its state allows
            await self._read()
        if RESETS[level] not in self._offers:
            offers = ", ".join(self._offers)[:120] or "nothing"
            raise ActuationError(
                f"{self.name}: offers no {RESETS[level]} for {LEVELS[level]}; it offers {offers}"
            )
        await self._asking(self._client.post(self._target, {"ResetType": RESETS[level]}))

    async def _read(self) -> JSON:
        if self._path:
            return (await self._asking(self._client.get(self._path))).body
        if self._why and time.monotonic() - self._walked_s < WALK_S:
            raise ActuationError(self._why)
        self._walked_s, self._why = time.monotonic(), ""
        walk = Walk(self._client, self.name)
        try:
            body, self._target, self._offers = await walk.system(self._system)
        except ActuationError as error:
            self._why = str(error)
            raise
        self._path = str(body["@odata.id"])
        return body

    async def _asking(self, answer: Awaitable[Answer]) -> Answer:
        """Await the answer; a missing resource is searched for again at the next try."""
        try:
            return await answer
        except Gone:
            self._path, self._offers = "", ()
            raise


class Walk:
    """One walk from the service root, with a bounded number of requests."""

    def __init__(self, client: RedfishClient, name: str) -> None:
        self._client, self._name, self._left = client, name, MAX_GETS
        self._bytes = 0
        self._networks: list[str | None] = []  # collections of network adapters, by chassis

    async def map(self, gpus: int, ids: RedfishCaps, node_control: str) -> Map:
        """Return the places of the caps of a node with this number of GPUs. Raises ConnectorError."""
        root, out = await self._client.root(), Map()
        systems = [await self._get(p) for p in await self._members(link(root, "Systems"))]
        controls, metrics, inside = await self._chassis(link(root, "Chassis"), systems)
        paths = [p for s in systems for p in await self._members(link(s, "Processors"))]
        processors = [await self._get(path) for path in dict.fromkeys(paths)]
        processors = [p for p in processors if p.get("ProcessorType") in ("GPU", "Accelerator")]
        await self._gpus(out, _ordered(processors, ids.gpu_ids), gpus, controls)
        self._node(out, node_control, [c for c in controls if c[0] in inside], metrics)
        try:
            await self._dpus(out, ids.dpu_ids)
        except (ConnectorError, ActuationError) as error:  # caps are commanded without them
            out.dpus, out.again, out.why["dpus"] = [], True, f"DPUs: {error}"
        return out

    async def card(self) -> DpuSpot:
        """Return the paths of a DPU at its own BMC. Raises ConnectorError."""
        root = await self._client.root()
        systems = await self._members(link(root, "Systems"))
        return await spot_of_card(
            systems, await self._members(link(root, "Chassis")), self._get, self._members
        )

    async def _dpus(self, out: Map, ids: Sequence[str]) -> None:
        paths = [at for network in self._networks for at in await self._members(network)]
        adapters = [await self._get(at) for at in dict.fromkeys(paths)]
        found = dpus_of(_ordered(adapters, ()), ids)
        if ids and len(found) < len(ids):
            out.why["dpus"] = f"lists {len(found)} of the {len(ids)} network adapters in redfish.dpu_ids"
        elif len(found) > SIDES:
            out.why["dpus"] = (
                f"lists {len(found)} DPUs; expected at most {SIDES}, or their Ids in redfish.dpu_ids"
            )
        else:
            out.dpus = [await spot_of(body, self._get, self._members) for body in found]

    async def system(self, chosen: str) -> tuple[JSON, str, tuple[str, ...]]:
        """Return (system, target of its reset, offered types). Raises ConnectorError, ActuationError."""
        found = []
        for path in await self._members(link(await self._client.root(), "Systems")):
            body = await self._get(path)
            actions = body.get("Actions")
            reset = actions.get(RESET) if isinstance(actions, dict) else None
            if (
                isinstance(reset, dict)
                and is_path(reset.get("target"))
                and chosen in ("", path, body.get("Id"))
            ):
                found.append((body, reset))
        if len(found) != 1:
            names = ", ".join(str(body["@odata.id"]) for body, _ in found[:4])
            raise ActuationError(
                f"{self._name}: {len(found)} systems match the node ({names}); expected its Id in "
                "redfish.system"
                if found
                else f"{self._name}: has no system {chosen or 'that can be reset'}"
            )
        ((body, reset),) = found
        offers = reset.get("ResetType@Redfish.AllowableValues")
        if offers is None and is_path(at := reset.get("@Redfish.ActionInfo")):
            parameters = (await self._get(str(at))).get("Parameters")
            own = [p for p in parameters if isinstance(p, dict)] if isinstance(parameters, list) else []
            offers = next((p.get("AllowableValues") for p in own if p.get("Name") == "ResetType"), None)
        listed = offers if isinstance(offers, list) else []
        return body, str(reset["target"]), tuple(x[:40] for x in listed if isinstance(x, str))

    async def _chassis(
        self, path: str | None, systems: list[JSON]
    ) -> tuple[list[tuple[str, str, JSON]], list[tuple[str, str, JSON]], set[str]]:
        """Return ((chassis, path, power Control), (chassis, path, EnvironmentMetrics), the systems'
        chassis)."""
        controls: list[tuple[str, str, JSON]] = []
        metrics: list[tuple[str, str, JSON]] = []
        paths = await self._members(path)
        named = {p for s in systems for p in _links(s, "Chassis")} & set(paths)
        inside = named or set(paths)
        for chassis in paths:
            body = await self._get(chassis)
            self._networks.append(link(body, "NetworkAdapters"))
            for at in await self._members(link(body, "Controls")):
                control = await self._get(at)
                if control.get("ControlType") == "Power":
                    controls.append((chassis, at, control))
            if chassis in inside and (at_metrics := link(body, "EnvironmentMetrics")):
                metrics.append((chassis, at_metrics, await self._get(at_metrics)))
        return controls, metrics, inside

    async def _gpus(
        self, out: Map, found: list[JSON], wanted: int, controls: list[tuple[str, str, JSON]]
    ) -> None:
        if not wanted:
            return
        if len(found) != wanted:
            out.why[GPU_CAP] = (
                f"lists {len(found)} GPUs, the site's node has {wanted}; expected as many, or their Ids in "
                "redfish.gpu_ids"
            )
            return
        spots, powers = list[Spot](), list[str]()
        for body in found:
            at = link(body, "EnvironmentMetrics")
            environment = await self._get(at) if at else {}
            own = [path for _, path, c in controls if body.get("@odata.id") in _related(c)]
            if at and isinstance(environment.get("PowerLimitWatts"), dict):
                spots.append(Spot(at, "metrics"))
            elif len(own) == 1:
                spots.append(Spot(own[0], "control"))
            powers.append(at if at and "PowerWatts" in environment else "")
        if len(spots) == wanted:
            out.gpus, out.gpu_power = spots, powers
        else:
            out.why[GPU_CAP] = f"shows a power limit for {len(spots)} of {wanted} GPUs"

    def _node(
        self,
        out: Map,
        chosen: str,
        controls: list[tuple[str, str, JSON]],
        metrics: list[tuple[str, str, JSON]],
    ) -> None:
        whole = [(ch, path) for ch, path, c in controls if _of_node(c)]
        if chosen:
            whole = [(ch, path) for ch, path, c in controls if chosen in (path, c.get("Id"))]
        spots = [(ch, Spot(path, "control")) for ch, path in whole]
        if not spots and not chosen:
            spots = [
                (ch, Spot(path, "metrics"))
                for ch, path, m in metrics
                if isinstance(m.get("PowerLimitWatts"), dict)
            ]
        if len(spots) == 1:
            out.node = spots[0][1]
        elif spots:
            names = ", ".join(spot.path for _, spot in spots[:4])
            out.why[NODE_CAP] = (
                f"{len(spots)} power limits match the node ({names}); expected its Id in redfish.node_control"
            )
        else:
            out.why[NODE_CAP] = f"has no power limit {chosen or 'of the node'}".rstrip()
        powers = [(ch, path) for ch, path, m in metrics if "PowerWatts" in m]
        mine = [path for ch, path in powers if spots and ch == spots[0][0]] if len(powers) > 1 else []
        if len(powers) == 1 or len(mine) == 1:
            out.node_power = mine[0] if mine else powers[0][1]

    async def _get(self, path: str) -> JSON:
        self._left -= 1
        if self._left < 0:
            raise ConnectorError(f"{self._name}: more than {MAX_GETS} resources; expected fewer on one node")
        answer = await self._client.get(path)
        self._bytes += answer.size
        if self._bytes > MAX_WALK_BYTES:
            raise ConnectorError(
                f"{self._name}: more than {MAX_WALK_BYTES} bytes in total; expected less from one node"
            )
        answer.body.setdefault("@odata.id", path)
        return answer.body

    async def _members(self, path: str | None) -> list[str]:
        """Return the paths of a collection's members; none for a missing one."""
        out: dict[str, None] = {}
        for _ in range(MAX_PAGES):
            if path is None:
                break
            try:
                body = await self._get(path)
            except Gone:
                break
            members = body.get("Members")
            for member in members if isinstance(members, list) else ():
                at = member.get("@odata.id") if isinstance(member, dict) else None
                if is_path(at) and len(out) < MAX_MEMBERS:
                    out[str(at)] = None
            more = body.get("Members@odata.nextLink")
            path = more if is_path(more) else None
        return list(out)


def _ordered(processors: list[JSON], ids: Sequence[str]) -> list[JSON]:
    """Return GPUs in the order of the Ids, or in their natural order (GPU_2 before GPU_10)."""
    if ids:
        by_id = {str(body.get("Id"))[:200]: body for body in processors}
        return [by_id[i] for i in ids if i in by_id]
    return sorted(processors, key=lambda body: _natural(str(body.get("@odata.id"))))


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", name)
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts]


def _links(body: JSON, name: str) -> list[str]:
    links = body.get("Links")
    members = links.get(name) if isinstance(links, dict) else None
    paths = [x.get("@odata.id") for x in members if isinstance(x, dict)] if isinstance(members, list) else []
    return [str(p) for p in paths if is_path(p)]


def _related(control: JSON) -> list[str]:
    items = control.get("RelatedItem")
    return [str(x.get("@odata.id")) for x in items if isinstance(x, dict)] if isinstance(items, list) else []


def _of_node(control: JSON) -> bool:
    """Return True if a power Control caps the node as a whole, by its context and its related items."""
    if control.get("PhysicalContext") in PARTS:
        return False
    return not any("/Processors/" in at or "/Memory/" in at for at in _related(control))


def _power(table: str, entity: int, answer: HttpAnswer) -> list[tuple[str, int, float]]:
    found = answer.body.get("PowerWatts")
    watts = _number(found.get("Reading")) if isinstance(found, dict) else None
    return [] if watts is None else [(table, entity, watts)]


def _number(value: Any) -> float | None:
    """Return a number of watts; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value <= MAX_W else None
