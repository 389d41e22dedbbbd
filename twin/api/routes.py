"""Route table: method, path, required role, request and response of every route.

The application, the check of roles and the OpenAPI document are built from this table.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import web

from connectors.jobs import JobRegistration, JobReport
from twin import VERSION
from twin.api import (
    actions as act,
    comparisons as beside,
    decisions as decided,
    explain,
    forecasts,
    health as well,
    job_reports as saves,
    load_targets as demanded,
    node_service as service,
    replacement as replaced,
    request_bodies as bodies,
    state,
    updates,
)
from twin.api.page import (
    day_account,
    demand as waiting,
    entity_search,
    fleet_history,
    hall_account,
    ledger_statement,
    policy_settings,
    rack_columns,
    running_jobs,
    simulations,
    site_changes,
    topology as supplied,
)
from twin.api.tokens import Role
from twin.contracts import Explanation, Topic

Serving = Callable[[web.Request], Awaitable[web.StreamResponse]]
API = "/api/v1"
JOBS = "/v1/jobs/{job}"  # as the client of jobs asks, which is given host and port alone
CLIENTS = f"{JOBS}/checkpoint"
TAGS = {
    "state": "Measured and expected values.",
    "decisions": "Decisions with their reasons, and what is in force.",
    "acting": "Requests of people to the daemon. The journal records every action with its author.",
    "jobs": "Jobs that register themselves, their reports on checkpoints, and the advice they get.",
    "nodes": "Nodes withdrawn before they fail, and reports on their repairs and tests.",
    "alarms": "Alarms and their notes.",
    "daemon": "State of the daemon itself.",
}
_REFUSALS = {
    "400": "the request is not valid",
    "401": "no token, or one that is not valid",
    "403": "forbidden: the role of the token is too low, or the token belongs to another job",
    "404": "not found",
    "409": "refused, with the reason",
    "429": "too many wrong tokens from this address, or reports of this job",
    "503": "temporarily unavailable",
}


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
    any_param: bool = False  # whoever serves it checks the parameters itself
    by_hall: bool = False  # it keeps to the halls of a token that is limited to some
    answer: type | None = None  # of a JSON answer with a schema

    @property
    def summary(self) -> str:
        """The first paragraph of what serves it."""
        return " ".join((self.serve.__doc__ or "").split("\n\n")[0].split())


OFFSET = Param("offset", "how many rows to skip", "integer")
LIMIT = Param("limit", "how many rows at most", "integer")
TOPIC = Param("topic", "a topic listed by /explain; its options are further parameters")
PREFIX = Param("prefix", "only this entity and everything below it, such as lab/h/r1")


def _get(
    path: str, serve: Serving, tag: str, *params: Param, pattern: str = "", role: Role = "viewer"
) -> Route:
    return Route("GET", API + path, serve, role, tag, params, pattern=API + pattern if pattern else "")


def _explain(path: str, *params: Param) -> Route:
    own = API + path.replace("{entity}", "{entity:.+}") if "{entity}" in path else ""
    route = Route("GET", API + path, explain.of_policy, "viewer", "decisions", params, pattern=own)
    return replace(route, any_param=True, answer=Explanation)


def _topic(topic: Topic, serve: Serving) -> Route:
    params = [Param(o.name, o.text, o.kind) for o in topic.options]
    form = Param(explain.FORM, "flat (default), or explanation")
    return Route("GET", f"{API}/{topic.path}", serve, "viewer", "decisions", (*params, form))


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
    _get("/summary", updates.summarised, "state"),
    _get("/state", state.tables, "state"),
    _get("/state/{table}", state.table, "state", PREFIX, OFFSET, LIMIT,
         Param("names", "these entities only; comma-separated"),
         Param("signals", "these signals only; comma-separated")),
    _get("/entities/{table}/{name}", state.entity, "state", pattern="/entities/{table}/{name:.+}"),
    _get("/racks", rack_columns.racks, "state"),
    _get("/topology", supplied.topology, "state"),
    _get("/find", entity_search.find, "state", Param("text", "a part of a name (required)"), LIMIT),
    _get("/comparisons/{name}", beside.comparisons, "state", pattern="/comparisons/{name:.+}"),
    _get("/calibration", beside.calibration, "state", PREFIX, OFFSET, LIMIT,
         Param("parameter", "drifts of these only, such as gpu.resistance; comma-separated")),
    _get("/calibration/{name}", beside.calibration_of, "state", pattern="/calibration/{name:.+}"),
    _get("/site", state.site, "state"),
    _get("/words", state.vocabulary, "state"),
    _get("/site/change", site_changes.proposed, "state", Param("profile", "of new racks; none: without one")),
    _get("/forecasts", state.forecasts, "state", PREFIX, OFFSET, LIMIT,
         Param("signal", "such as rack.power_w"), Param("names", "these entities only")),
    _get("/health", well.health, "state", PREFIX, OFFSET, LIMIT,
         Param("part", "gpu, node, switch, link, pump, psu or dpu: a row for each of this kind"),
         Param("level", "failed, degraded, watch, unknown, healthy; comma-separated")),
    _get("/health/{name}", well.health_of, "state", pattern="/health/{name:.+}"),
    _get("/outlooks", forecasts.outlooks, "state", OFFSET, LIMIT, Param("quantity", "only of this quantity")),
    _get("/load-targets", demanded.targets, "state", OFFSET, LIMIT),
    _get("/demand", waiting.demand, "jobs"),
    replace(_get("/fleet", hall_account.fleet, "state"), by_hall=True),
    _get("/jobs", running_jobs.jobs, "jobs", OFFSET, LIMIT, Param("name", "jobs whose name contains it")),
    _get("/jobs/{job}/checkpoint", saves.advised, "jobs", role="job"),
    Route("GET", CLIENTS, saves.advised, "job", "jobs"),
    _get("/replacement/history", replaced.history, "nodes", LIMIT, Param("node", "only this node"),
         Param("kind", "gate, outcome, command, test, repair, ...; comma-separated"),
         Param("days", "how far back", "number"), Param("before", "`next` of the previous page", "integer")),
    _get("/nodes/{node}/rma", replaced.rma, "nodes", Param("days", "how far back", "number"),
         pattern="/nodes/{node:.+}/rma"),
    _get("/ledger", ledger_statement.ledger, "state",
         Param("month", "such as 2026-11, in UTC; default: the present"),
         Param("by", "site, hall, rack, queue, tenant (default) or job"), role="job"),
    _get("/today", day_account.today, "state"),
    _get("/policies", policy_settings.policies, "decisions"),
    _get("/simulations", simulations.listed_runs, "decisions"),
    _get("/simulations/{id}", simulations.one, "decisions"),
    _get("/explain", explain.explanations, "decisions"),
    _explain("/explain/{policy}", TOPIC),
    _explain("/explain/{policy}/{entity}", TOPIC),
    _get("/leases", state.leases, "decisions", OFFSET, LIMIT,
         Param("prefix", "only of this entity and everything below it, or of a job and its nodes"),
         Param("control", "such as gpu.power_cap_w")),
    _get("/decisions", decided.decisions, "decisions", LIMIT,
         Param("kind", "command, advice, event, finding, ...; comma-separated"),
         Param("entity", "a path, or TABLE:PATH, or job:NAME; given several times, any of them"),
         Param("control", "such as gpu.power_cap_w"), Param("policy", "of or about this policy"),
         Param("below", "true: with what is inside the entity; a job alone, with the nodes it ran on"),
         Param("since", "ns since 1970", "integer"), Param("until", "ns since 1970", "integer"),
         Param("before", "`next` of the previous page"), Param("whole", "true: texts are not cut"),
         Param("events", "few: at most one line in four is an event; `events_left_out` counts the others")),
    _get("/decisions/{at}", decided.decision, "decisions",
         Param("entity", "index of the entity in a batch; default: the first"),
         pattern="/decisions/{at:.+}"),
    _get("/journal", decided.journal, "decisions"),
    _get("/alarms/{id}/children", decided.children, "alarms", OFFSET, LIMIT,
         pattern="/alarms/{id:.+}/children"),
    _get("/alarms", decided.alarms, "alarms", OFFSET, LIMIT, Param("severity", "critical, warning, info"),
         Param("state", "raised, acknowledged, shelved, suppressed, flapping, cleared"),
         Param("entity", "a path; includes everything below it")),
    _get("/history", decided.history, "state", Param("signal", "such as rack.power_w (required)"),
         Param("name", "entities, comma-separated (required, but for site.power_w)"),
         Param("since", "ns since 1970", "integer"),
         Param("until", "ns since 1970", "integer"), Param("last_s", "seconds, instead of since", "number"),
         Param("step", "seconds between points", "number"), Param("max_points", "points at most", "integer"),
         Param("beside", "expected: with expected values, their bands and residuals")),
    _get("/fleet/history", fleet_history.values, "state", Param("signal", "such as rack.power_w (required)"),
         Param("entity", "full paths or their ends, comma-separated (required)"),
         Param("hall", "only of this hall"),
         Param("since", "ns since 1970", "integer"), Param("until", "ns since 1970", "integer"),
         Param("last_s", "seconds, instead of since", "number"), Param("step", "seconds of a row", "number")),
    _get("/fleet/lists", fleet_history.lists, "decisions", LIMIT,
         Param("what", "alarms, commands or decisions (default)"), Param("hall", "only of this hall"),
         Param("entity", "a path or part of one, with everything below it"),
         Param("since", "ns since 1970", "integer"), Param("until", "ns since 1970", "integer"),
         Param("last_s", "seconds, instead of since", "number")),
    _get("/requests", decided.requests, "decisions"),
    _get("/approvals", decided.approvals, "decisions"),
    _get("/maintenance", decided.maintenance, "alarms"),
    _get("/parts", decided.running_parts, "daemon"),
    _get("/messages", decided.messages, "daemon"),
    _get("/sources", state.sources, "daemon", OFFSET, LIMIT, Param("name", "sources whose name contains it")),
    replace(_get("/whoami", decided.whoami, "daemon", role="job"), by_hall=True),
    Route("GET", API + "/events", updates.events, "viewer", "state", media="text/event-stream"),
    *(_topic(topic, serve) for topic, serve in explain.topic_routes()),
    _get("/tokens", act.tokens, "daemon", role="admin"),
)  # fmt: skip

ACTING = (
    replace(_post("/requests", act.ask, "acting", bodies.NewRequest), by_hall=True),
    replace(_delete("/requests/{id}", act.withdraw, "acting"), by_hall=True),
    _post("/approvals", act.approve, "acting", bodies.NewApproval),
    _delete("/approvals/{id}", act.disapprove, "acting"),
    _post("/outlooks", forecasts.take_outlook, "acting", forecasts.NewOutlook),
    _post("/load-targets", demanded.set_target, "acting", demanded.NewLoadTarget),
    _delete("/load-targets/{name}", demanded.withdraw_target, "acting", "/load-targets/{name:.+}"),
    _post("/jobs/{job}/checkpoint", saves.report, "jobs", JobReport, "job"),
    Route("POST", CLIENTS, act.once(saves.report), "job", "jobs", (), JobReport),
    Route("POST", JOBS, saves.register, "job", "jobs", (), JobRegistration),  # the same again is the same
    Route("DELETE", JOBS, act.once(saves.unregister), "job", "jobs"),
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
    _post("/simulations", simulations.begin, "acting", simulations.NewSimulation),
    _delete("/simulations/{id}", simulations.cancel, "acting"),
    _post("/hold", act.hold, "acting", bodies.Reason),
    _post("/resume", act.resume, "acting", bodies.NoBody),
    _post("/release", act.release, "acting", bodies.Reason, "admin"),
    _post("/authority", act.authority, "acting", bodies.NewAuthority, "admin"),
    _post("/maintenance", act.begin_maintenance, "alarms", bodies.NewMaintenance),
    _delete("/maintenance/{id}", act.end_maintenance, "alarms"),
    _post("/alarms/{id}/ack", act.acknowledge, "alarms", bodies.Note, pattern="/alarms/{id:.+}/ack"),
    _post("/alarms/{id}/shelve", act.shelve, "alarms", bodies.Shelving, pattern="/alarms/{id:.+}/shelve"),
    _post("/alarms/{id}/unshelve", act.unshelve, "alarms", bodies.NoBody, pattern="/alarms/{id:.+}/unshelve"),
    _post("/site/change", site_changes.approve, "daemon", site_changes.NewSiteChange, "admin"),
    _post("/story", act.set_story, "daemon", bodies.NewStory),
    _post("/reload", act.reload, "daemon", bodies.NoBody, "admin"),
)


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The whole document."""
    routes = list(routes)
    bodies = list(dict.fromkeys(t for r in routes for t in (r.body, r.answer) if t is not None))
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    components = msgspec.json.decode(msgspec.json.encode(components))  # defaults as JSON has them
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    refusal = {"type": "object", "required": ["error", "status"], "properties": {
        "error": {"type": "string", "description": "why, in plain words"},
        "status": {"type": "integer"}}}  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "racktwin", "version": VERSION,
                 "description": "State, forecasts, decisions and alarms of a site, and what operators may "
                 "ask. Instants are ns since 1970 (UTC); what is no number is null."},
        "tags": [{"name": n, "description": d} for n, d in TAGS.items()],
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": {**components, "Refusal": refusal},
                       "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }  # fmt: skip


def _operation(route: Route) -> dict[str, Any]:
    in_path = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}}
               for n in re.findall(r"{(\w+)}", route.path)]  # fmt: skip
    in_query = [{"name": p.name, "in": "query", "description": p.what, "schema": {"type": p.kind}}
                for p in route.params]  # fmt: skip
    schema: dict[str, Any] = {"type": "object" if route.media == "application/json" else "string"}
    if route.answer is not None:
        schema = {"$ref": f"#/components/schemas/{route.answer.__name__}"}
    content: Any = {"schema": schema}
    answers = {"200": {"description": "as asked", "content": {route.media: content}}}
    refusals = ["503"] if route.role is None else ["400", "401", "403", "404", "429", "503"]
    if route.body is not None or route.method == "DELETE":
        refusals.append("409")
    for status in sorted(refusals):
        answers[status] = {"description": _REFUSALS[status], "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}}  # fmt: skip
    out: dict[str, Any] = {
        "operationId": operation_id(route), "summary": route.summary, "tags": [route.tag],
        "parameters": in_path + in_query, "responses": answers, "x-role": route.role or "none",
    }  # fmt: skip
    if route.method != "GET":
        out["parameters"].append({"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"},
                                  "description": "carried out once for each key"})  # fmt: skip
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if route.role is None:
        out["security"] = []
    return out


def operation_id(route: Route) -> str:
    """A name of its own for each operation: get_state_table."""
    words = re.sub(r"\W+", "_", route.path.removeprefix("/api/v1")).strip("_")
    return f"{route.method.lower()}_{words or 'page'}"
