"""The OpenAPI 3.1 document, made from the table of routes and from the types of the bodies. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from twin import VERSION
from twin.api.routes import Route

TAGS = {
    "state": "What is measured and expected.",
    "decisions": "What was decided, and why; what stands.",
    "acting": "What people ask of the daemon. Every action is in the journal, with its author.",
    "jobs": "What jobs report of their checkpoints, and what they are advised.",
    "nodes": "Which nodes are withdrawn before they fail, and what people say of their repairs and tests.",
    "alarms": "What is wrong, and what people said of it.",
    "daemon": "How the daemon itself is doing.",
}
_REFUSALS = {
    "400": "the question is not as expected",
    "401": "no token, or one that is not valid",
    "403": "the token may not: its role is too small, or it speaks for another job",
    "404": "there is no such thing",
    "409": "refused, with the reason",
    "429": "too many wrong tokens from this address, or reports of this job",
    "503": "cannot be answered now",
}


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
                                  "description": "with the same key it is done once"})  # fmt: skip
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
