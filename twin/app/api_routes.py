"""The table of routes: method, path, the role that it takes, what it says and expects. All that is served.

The application, the check of roles and the OpenAPI document are made from this one table. Part of the shell.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from connectors.job_wire import Report
from twin.app import api_actions as act
from twin.app import api_bodies as bodies
from twin.app import api_checkpoint as saves
from twin.app import api_decisions as decided
from twin.app import api_health as well
from twin.app import api_health_part as explained
from twin.app import api_load_targets as demanded
from twin.app import api_node_service as service
from twin.app import api_outlooks as ahead
from twin.app import api_power as powered
from twin.app import api_replacement as replaced
from twin.app import api_state as state
from twin.app import api_updates as updates
from twin.app import checkpoint_plans as planned
from twin.app.tokens import Role

Serving = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the query."""

    name: str
    what: str
    kind: str = "string"


@dataclass(frozen=True, slots=True)
class Route:
    """One line. `role` None: open to all. `path` as OpenAPI writes it; `pattern` where aiohttp needs more."""

    method: str
    path: str
    serve: Serving
    role: Role | None
    tag: str
    params: tuple[Param, ...] = ()
    body: type | None = None
    media: str = "application/json"
    pattern: str = ""

    @property
    def summary(self) -> str:
        """The first paragraph of what serves it."""
        return " ".join((self.serve.__doc__ or "").split("\n\n")[0].split())


API = "/api/v1"
CLIENTS = "/v1/jobs/{job}/checkpoint"  # as the client of jobs asks, which is told host and port alone
OFFSET = Param("offset", "how many rows to skip", "integer")
LIMIT = Param("limit", "how many rows at most", "integer")
PREFIX = Param("prefix", "only this entity and what is below it, such as lab/h/r1")


def _get(
    path: str, serve: Serving, tag: str, *params: Param, pattern: str = "", role: Role = "viewer"
) -> Route:
    return Route("GET", API + path, serve, role, tag, params, pattern=API + pattern if pattern else "")


def _post(
    path: str, serve: act.Acting, tag: str, body: type, role: Role = "operator", pattern: str = ""
) -> Route:
    return Route(
        "POST", API + path, act.once(serve), role, tag, (), body, pattern=API + pattern if pattern else ""
    )


def _delete(path: str, serve: act.Acting, tag: str, pattern: str = "") -> Route:
    own = API + pattern if pattern else ""
    return Route("DELETE", API + path, act.once(serve), "operator", tag, pattern=own)


READING = (
    _get("/summary", updates.overview, "state"),
    _get("/state", state.tables, "state"),
    _get("/state/{table}", state.table, "state", PREFIX, OFFSET, LIMIT,
         Param("names", "these entities only; commas between them"),
         Param("signals", "these signals only; commas between them")),
    _get("/entities/{table}/{name}", state.entity, "state", pattern="/entities/{table}/{name:.+}"),
    _get("/site", state.site, "state"),
    _get("/forecasts", state.forecasts, "state", PREFIX, OFFSET, LIMIT,
         Param("signal", "such as rack.power_w"), Param("names", "these entities only")),
    _get("/health", well.health, "state", PREFIX, OFFSET, LIMIT,
         Param("part", "gpu, node, switch, link, pump or psu: a row for each of this kind"),
         Param("level", "failed, degraded, watch, unknown, healthy; commas between them")),
    _get("/health/{name}", explained.health_of, "state", pattern="/health/{name:.+}"),
    _get("/outlooks", ahead.outlooks, "state", OFFSET, LIMIT, Param("quantity", "of this only")),
    _get("/load-targets", demanded.targets, "state", OFFSET, LIMIT),
    _get("/jobs/{job}/checkpoint", saves.advised, "jobs", role="job"),
    Route("GET", CLIENTS, saves.advised, "job", "jobs"),
    _get("/checkpoints", planned.plans, "jobs", OFFSET, LIMIT, Param("job", "this one alone")),
    _get("/replacement", replaced.plan, "nodes", OFFSET, LIMIT, Param("node", "this one alone"),
         Param("phase", "suspect, cordoned, saving, draining, out, testing, probation, rma; commas between")),
    _get("/replacement/history", replaced.history, "nodes", LIMIT, Param("node", "this one alone"),
         Param("kind", "gate, outcome, command, test, repair, ...; commas between them"),
         Param("days", "how far back", "number"), Param("before", "`next` of the page before", "integer")),
    _get("/nodes/{node}/rma", replaced.rma, "nodes", Param("days", "how far back", "number"),
         pattern="/nodes/{node:.+}/rma"),
    _get("/power", powered.power, "power", Param("kind", "rack, feeder, cdu, loop, site; commas between"),
         Param("limit", "how many racks at most, the fullest first", "integer")),
    _get("/power/why", powered.why, "power", Param("name", "a rack, node, GPU, job or feeder; needed")),
    _get("/power/cost", powered.cost, "power", Param("hours", "how far back; default 24", "number")),
    _get("/power/fit", powered.fits, "power", Param("feeder", "needed"),
         Param("racks", "profile of the new racks; default: of those that are there"),
         Param("risk", "chance per hour that a limit is exceeded; default 0.01", "number"),
         Param("nameplate_w", "the most that a new rack draws; default: its profile's", "number"),
         Param("days", "of history; default 31", "number")),
    _get("/leases", state.leases, "decisions", PREFIX, OFFSET, LIMIT,
         Param("control", "such as gpu.power_cap_w")),
    _get("/decisions", decided.decisions, "decisions", LIMIT,
         Param("kind", "command, advice, event, finding, ...; commas between them"),
         Param("entity", "a path, or TABLE:PATH"), Param("control", "such as gpu.power_cap_w"),
         Param("since", "ns since 1970", "integer"), Param("before", "`next` of the page before")),
    _get("/alarms", decided.alarms, "alarms", OFFSET, LIMIT, Param("severity", "critical, warning, info"),
         Param("state", "raised, acknowledged, shelved, flapping, cleared"),
         Param("entity", "a path; what is below it counts")),
    _get("/history", decided.history, "state", Param("signal", "such as rack.power_w; needed"),
         Param("name", "entities, commas between them; needed"), Param("since", "ns since 1970", "integer"),
         Param("until", "ns since 1970", "integer"), Param("last_s", "instead of since", "number"),
         Param("step", "seconds between points", "number"), Param("max_points", "at most", "integer")),
    _get("/requests", decided.requests, "decisions"),
    _get("/approvals", decided.approvals, "decisions"),
    _get("/maintenance", decided.maintenance, "alarms"),
    _get("/parts", decided.running_parts, "daemon"),
    _get("/messages", decided.messages, "daemon"),
    _get("/whoami", decided.whoami, "daemon"),
    Route("GET", API + "/events", updates.events, "viewer", "state", media="text/event-stream"),
    _get("/tokens", act.tokens, "daemon", role="admin"),
)  # fmt: skip

ACTING = (
    _post("/requests", act.ask, "acting", bodies.NewRequest),
    _delete("/requests/{id}", act.withdraw, "acting"),
    _post("/approvals", act.approve, "acting", bodies.NewApproval),
    _delete("/approvals/{id}", act.disapprove, "acting"),
    _post("/outlooks", ahead.tell, "acting", ahead.NewOutlook),
    _post("/load-targets", demanded.set_target, "acting", demanded.NewLoadTarget),
    _delete("/load-targets/{name}", demanded.withdraw_target, "acting", "/load-targets/{name:.+}"),
    _post("/jobs/{job}/checkpoint", saves.report, "jobs", Report, "job"),
    Route("POST", CLIENTS, act.once(saves.report), "job", "jobs", (), Report),
    _post(
        "/nodes/{node}/repaired",
        service.repaired,
        "nodes",
        service.NodeRepair,
        pattern="/nodes/{node:.+}/repaired",
    ),
    _post(
        "/nodes/{node}/tested", service.tested, "nodes", service.NodeTest, pattern="/nodes/{node:.+}/tested"
    ),
    _post("/hold", act.hold, "acting", bodies.Reason),
    _post("/resume", act.resume, "acting", bodies.NoBody),
    _post("/release", act.release, "acting", bodies.Reason, "admin"),
    _post("/authority", act.authority, "acting", bodies.NewAuthority, "admin"),
    _post("/maintenance", act.begin_maintenance, "alarms", bodies.NewMaintenance),
    _delete("/maintenance/{id}", act.end_maintenance, "alarms"),
    _post("/alarms/{id}/ack", act.acknowledge, "alarms", bodies.Note, pattern="/alarms/{id:.+}/ack"),
    _post("/alarms/{id}/shelve", act.shelve, "alarms", bodies.Shelving, pattern="/alarms/{id:.+}/shelve"),
    _post("/alarms/{id}/unshelve", act.unshelve, "alarms", bodies.NoBody, pattern="/alarms/{id:.+}/unshelve"),
    _post("/reload", act.reload, "daemon", bodies.NoBody, "admin"),
)
