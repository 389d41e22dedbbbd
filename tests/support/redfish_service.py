"""A Redfish service of ours, as many as a test wants, with range checks, versions, and faults on demand.

async with Services(node_w=True, gpus=4) as fleet:      # fleet[0].host is 127.0.0.1:PORT
    fleet[0].faults.busy = 2                             # the next two requests are answered 503

Written after the schemas of DMTF (EnvironmentMetrics, Control, Processor, Chassis, Session), since no other
emulator has power limits. What it is asked is on record in `asked`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.thread_server import in_thread

USER, PASSWORD = "racktwin", "a-password-of-tests"
ROOT = "/redfish/v1"
JSON = dict[str, Any]


@dataclass
class Faults:
    """Faults that the service plays; numbers count down with each request (or PATCH) that they spoil."""

    busy: int = 0  # 503
    retry_after: str = ""
    hang: int = 0
    slow_s: float = 0.0
    drop: int = 0  # the connection is closed without an answer
    garbage: int = 0  # 200, and no JSON
    huge: int = 0  # a body without end
    forget: int = 0  # sessions are forgotten before the request
    stale: int = 0  # somebody changes the resource just before a PATCH
    ignore: int = 0  # a PATCH is answered 204 and nothing happens
    delay: int = 0  # a PATCH is answered 202, and holds only so many reads later
    error: int = 0  # 500
    redirect: str = ""  # GETs lead there
    round_w: float = 1.0  # what is set is rounded to a multiple of this
    sessions: bool = True
    max_sessions: int = 4
    deaf: int = 0  # a reset is answered 204 and nothing happens
    locked: int = 0  # sign-ins that are refused, whatever the password
    tags: bool = True


@dataclass
class Limit:
    """A power limit. None: not limited."""

    value: float | None
    low: float
    high: float
    power: float = 0.0
    mode: str | None = None
    version: int = 1
    pending: tuple[float, int] | None = None
    history: list[float | None] = field(default_factory=list)


@dataclass
class Adapter:
    """A network adapter; `temp_c` None: without EnvironmentMetrics. Errors are received and sent, by port."""

    name: str
    model: str = "BlueField-3 DPU"
    health: str = "OK"
    state: str = "Enabled"
    temp_c: float | None = 70.0
    errors: list[tuple[int | None, int | None]] = field(default_factory=lambda: [(0, 0), (0, 0)])


class Service:
    """One BMC: a system with GPUs, a chassis with the node's limit as a Control, or beside power metrics."""

    def __init__(self, gpus: int, node: bool, gpu_high_w: float, node_as: str) -> None:
        self.faults = Faults()
        self.gpus = [Limit(gpu_high_w, 200.0, gpu_high_w, 300.0 + i, "Automatic") for i in range(gpus)]
        self.node = Limit(6600.0, 1000.0, 6600.0, 4000.0) if node else None
        self.node_as, self.extra_controls = node_as, list[JSON]()
        self.asked: list[tuple[str, str]] = []
        self.power, self.resets = "On", list[str]()
        self.offers: list[str] | None = ["On", "ForceOff", "GracefulShutdown", "ForceRestart"]
        self.reset_info: list[str] | None = None  # what an ActionInfo lists
        self.more_systems: list[JSON] = []
        self.adapters: list[Adapter] = []  # of the network
        self.tokens: dict[str, str] = {}
        self.signed_in = self.refused = 0
        self.host = ""

    def patches(self) -> int:
        """Count the PATCH requests."""
        return sum(method == "PATCH" for method, _ in self.asked)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Any request."""
        path, faults = request.path.rstrip("/"), self.faults
        self.asked.append((request.method, path))
        if faults.forget:
            faults.forget -= 1
            self.tokens.clear()
        spoiled = await self._spoil(request)
        if spoiled is not None:
            return spoiled
        if path == ROOT:
            return web.json_response(self._root())
        if faults.sessions and path == f"{ROOT}/SessionService/Sessions" and request.method == "POST":
            return self._sign_in(await request.json())
        if not self._signed(request):
            return _error(401, "Base.NoValidSession", "no valid session")
        if request.method == "DELETE":
            self.tokens = {t: p for t, p in self.tokens.items() if p != path}
            return web.Response(status=204)
        tree = self._tree()
        if request.method == "POST" and path == f"{ROOT}/Systems/Board_0/Actions/ComputerSystem.Reset":
            return self._reset(str((await request.json()).get("ResetType")))
        if path not in tree:
            return _error(404, "Base.ResourceMissingAtURI", "no such resource")
        body, limit = tree[path]
        if request.method == "PATCH":
            return await self._patch(request, limit)
        if limit is not None and limit.pending is not None:
            value, left = limit.pending
            limit.pending = (value, left - 1) if left > 0 else None
            limit.value = value if left <= 0 else limit.value
            body = self._tree()[path][0]
        headers = {"ETag": f'"{limit.version}"'} if limit is not None and faults.tags else {}
        return web.json_response({"@odata.id": path, **body}, headers=headers)

    async def _spoil(self, request: web.Request) -> web.StreamResponse | None:
        faults = self.faults
        if faults.slow_s:
            await asyncio.sleep(faults.slow_s)
        for name in ("hang", "drop", "busy", "error", "garbage", "huge"):
            if getattr(faults, name) > 0:
                setattr(faults, name, getattr(faults, name) - 1)
                return await self._do(name, request)
        if faults.redirect and request.method == "GET":
            return web.Response(status=302, headers={"Location": faults.redirect})
        return None

    async def _do(self, name: str, request: web.Request) -> web.StreamResponse:
        if name == "hang":
            await asyncio.sleep(3600)
        if name == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if name == "busy":
            after = self.faults.retry_after
            return web.Response(status=503, headers={"Retry-After": after} if after else {})
        if name == "error":
            return _error(500, "Base.InternalError", "internal error")
        if name == "garbage":
            return web.Response(body=b'\xff[1, "', content_type="application/json")
        out = web.StreamResponse()
        await out.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(4096):
                await out.write(b" " * 65536)
        return out

    def _sign_in(self, body: JSON) -> web.Response:
        if self.faults.locked or (body.get("UserName"), body.get("Password")) != (USER, PASSWORD):
            self.faults.locked = max(0, self.faults.locked - 1)
            self.refused += 1
            return _error(401, "Base.ResourceAtUriUnauthorized", "user or password is wrong")
        if len(self.tokens) >= self.faults.max_sessions:
            return _error(503, "Base.SessionLimitExceeded", "too many sessions")
        token, self.signed_in = secrets.token_hex(16), self.signed_in + 1
        self.tokens[token] = path = f"{ROOT}/SessionService/Sessions/{self.signed_in}"
        return web.json_response({"Id": str(self.signed_in)}, status=201,
                                 headers={"X-Auth-Token": token, "Location": path})  # fmt: skip

    def _signed(self, request: web.Request) -> bool:
        if request.headers.get("X-Auth-Token") in self.tokens:
            return True
        given = request.headers.get("Authorization", "").removeprefix("Basic ")
        return given == base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    async def _patch(self, request: web.Request, limit: Limit | None) -> web.Response:
        faults = self.faults
        if limit is None:
            return _error(405, "Base.OperationNotAllowed", "read only")
        if faults.stale:
            faults.stale -= 1
            limit.version += 1
        if faults.tags and request.headers.get("If-Match") != f'"{limit.version}"':
            return _error(412, "Base.PreconditionFailed", "the resource was changed")
        body = await request.json()
        change = body.get("PowerLimitWatts", body)
        value = change.get("SetPoint")
        if not isinstance(value, int | float) or not limit.low <= value <= limit.high:
            return _error(400, "Base.PropertyValueOutOfRange", f"{value} is out of range")
        if faults.ignore:
            faults.ignore -= 1
            return web.Response(status=204)
        value = round(value / faults.round_w) * faults.round_w
        limit.history.append(value)
        limit.mode = change.get("ControlMode", limit.mode)
        limit.version += 1
        if faults.delay:
            limit.pending = value, faults.delay
            return web.Response(status=202)
        limit.value, limit.pending = value, None
        return web.Response(status=204)

    def _reset(self, kind: str) -> web.Response:
        """Stopping takes as long as a test lets it."""
        self.resets.append(kind)
        off = self.power == "Off"
        if off != (kind == "On"):
            return _error(409, "Base.ResourceInUse", f"{kind} while the power is {self.power}")
        if self.faults.deaf:
            self.faults.deaf -= 1
        else:
            self.power = {"On": "On", "GracefulShutdown": "PoweringOff", "ForceOff": "Off"}[kind]
        return web.Response(status=204)

    def _root(self) -> JSON:
        links = {"Sessions": {"@odata.id": f"{ROOT}/SessionService/Sessions"}} if self.faults.sessions else {}
        return {"@odata.id": f"{ROOT}/", "RedfishVersion": "1.20.0", "Links": links,
                "Systems": {"@odata.id": f"{ROOT}/Systems"},
                "Chassis": {"@odata.id": f"{ROOT}/Chassis"}}  # fmt: skip

    def _tree(self) -> dict[str, tuple[JSON, Limit | None]]:
        """path -> (body, the limit that it shows)."""
        system, chassis = f"{ROOT}/Systems/Board_0", f"{ROOT}/Chassis/Tray_0"
        module = f"{ROOT}/Chassis/Module_0"
        processors = [f"{system}/Processors/GPU_{i + 1}" for i in range(len(self.gpus))]
        out: dict[str, tuple[JSON, Limit | None]] = {
            f"{ROOT}/Systems": (_members([system, *(x["@odata.id"] for x in self.more_systems)]), None),
            **{x["@odata.id"]: (x, None) for x in self.more_systems},
            f"{system}/ResetActionInfo": ({"Parameters": [
                {"Name": "ResetType", "AllowableValues": self.reset_info}]}, None),
            system: ({"Id": "Board_0", "PowerState": self.power, "Actions": self._actions(system),
                      "Processors": {"@odata.id": f"{system}/Processors"},
                      "Links": {"Chassis": [{"@odata.id": chassis}]}}, None),
            # ten sorts before two, as text does
            f"{system}/Processors": (_members([f"{system}/Processors/CPU_0", *sorted(processors)]), None),
            f"{system}/Processors/CPU_0": ({"Id": "CPU_0", "ProcessorType": "CPU"}, None),
            f"{ROOT}/Chassis": (_members([chassis, module]), None),
            module: ({"Id": "Module_0"}, None),
            chassis: ({"Id": "Tray_0", "Controls": {"@odata.id": f"{chassis}/Controls"},
                       "EnvironmentMetrics": {"@odata.id": f"{chassis}/EnvironmentMetrics"}}, None),
        }  # fmt: skip
        for path, gpu in zip(processors, self.gpus, strict=True):
            at = {"@odata.id": f"{path}/EnvironmentMetrics"}
            name = path.rpartition("/")[2]
            out[path] = {"Id": name, "ProcessorType": "GPU", "EnvironmentMetrics": at}, None
            metrics = {"PowerWatts": {"Reading": gpu.power}, "PowerLimitWatts": _shown(gpu)}
            out[f"{path}/EnvironmentMetrics"] = metrics, gpu
        controls = {f"{chassis}/Controls/{c['Id']}": (c, None) for c in self.extra_controls}
        metrics = {}
        if self.node is not None:
            metrics["PowerWatts"] = {"Reading": self.node.power}
            if self.node_as == "control":
                body = {"Id": "NodePower_0", "ControlType": "Power", "PhysicalContext": "Chassis",
                        "SetPointUnits": "W", **_shown(self.node)}  # fmt: skip
                controls[f"{chassis}/Controls/NodePower_0"] = body, self.node  # type: ignore[assignment]
            else:
                metrics["PowerLimitWatts"] = _shown(self.node)
        out |= self._network(module)
        out[module][0]["NetworkAdapters"] = {"@odata.id": f"{module}/NetworkAdapters"}
        out |= controls
        out[f"{chassis}/Controls"] = (_members(list(controls)), None)
        own = self.node if self.node_as != "control" else None
        out[f"{chassis}/EnvironmentMetrics"] = metrics, own
        return out

    def _network(self, module: str) -> dict[str, tuple[JSON, Limit | None]]:
        """Adapters of a chassis, by the schemas NetworkAdapter, EnvironmentMetrics, Port, PortMetrics."""
        out: dict[str, tuple[JSON, Limit | None]] = {}
        paths = [f"{module}/NetworkAdapters/{adapter.name}" for adapter in self.adapters]
        out[f"{module}/NetworkAdapters"] = _members(paths), None
        for path, adapter in zip(paths, self.adapters, strict=True):
            body: JSON = {"Id": adapter.name, "Model": adapter.model,
                          "Status": {"Health": adapter.health, "State": adapter.state},
                          "Ports": {"@odata.id": f"{path}/Ports"}}  # fmt: skip
            if adapter.temp_c is not None:
                body["EnvironmentMetrics"] = {"@odata.id": f"{path}/EnvironmentMetrics"}
                out[f"{path}/EnvironmentMetrics"] = {"TemperatureCelsius": {"Reading": adapter.temp_c}}, None
            out[path] = body, None
            ports = [f"{path}/Ports/{i}" for i in range(len(adapter.errors))]
            out[f"{path}/Ports"] = _members(ports), None
            for at, (received, sent) in zip(ports, adapter.errors, strict=True):
                out[at] = {"Metrics": {"@odata.id": f"{at}/Metrics"}}, None
                out[f"{at}/Metrics"] = {"RXErrors": received, "TXErrors": sent}, None
        return out

    def _actions(self, system: str) -> JSON:
        reset: JSON = {"target": f"{system}/Actions/ComputerSystem.Reset"}
        if self.offers is not None:
            reset["ResetType@Redfish.AllowableValues"] = self.offers
        if self.reset_info is not None:
            reset["@Redfish.ActionInfo"] = f"{system}/ResetActionInfo"
        return {"#ComputerSystem.Reset": reset}


class Services:
    """`count` services, each on a port of its own on loopback."""

    def __init__(
        self, count: int = 1, *, gpus: int = 4, node: bool = True, gpu_high_w: float = 1200.0,
        node_as: str = "control", tls: Any = None,
    ) -> None:  # fmt: skip
        self.made = [Service(gpus, node, gpu_high_w, node_as) for _ in range(count)]
        self._runners: list[web.ServerRunner] = []
        self._tls = tls

    def __getitem__(self, number: int) -> Service:
        return self.made[number]

    async def __aenter__(self) -> Services:
        for service in self.made:
            runner = web.ServerRunner(web.Server(service.answer), shutdown_timeout=0.01)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls).start()
            service.host = f"127.0.0.1:{runner.addresses[0][1]}"
            self._runners.append(runner)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))


def _members(paths: list[str]) -> JSON:
    return {"Members": [{"@odata.id": p} for p in paths], "Members@odata.count": len(paths)}


def _shown(limit: Limit) -> JSON:
    mode = {} if limit.mode is None else {"ControlMode": limit.mode}
    return {"SetPoint": limit.value, "AllowableMin": limit.low, "AllowableMax": limit.high, **mode}


def _error(status: int, code: str, words: str) -> web.Response:
    body = {"error": {"code": code, "message": words, "@Message.ExtendedInfo": [{"Message": words}]}}
    return web.Response(status=status, body=json.dumps(body).encode(), content_type="application/json")


def serving(count: int = 1, **options: Any) -> AbstractContextManager[Services]:
    """Services in a thread, for tests that drive a daemon in a process."""
    return in_thread(Services(count, **options))
