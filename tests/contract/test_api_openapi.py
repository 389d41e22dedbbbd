"""The document of the interface: every route is in it, it is valid, and what it says is so."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.in_process_daemon import serving
from twin.api.public import ROUTES
from twin.api.routes import document, operation_id

TREE = document(ROUTES)


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, op) for path, ops in TREE["paths"].items() for method, op in ops.items()]


def test_every_route_is_in_it_and_nothing_else() -> None:
    told = {(method.upper(), path) for path, method, _ in operations()}
    assert told == {(r.method, r.path) for r in ROUTES}
    assert len(ROUTES) == len(told)
    ids = [operation_id(r) for r in ROUTES]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z]+_\w+", i) for i in ids)


def test_the_application_serves_exactly_these(tmp_path: Path) -> None:
    from twin.api.service import make_app

    async def main() -> None:
        async with serving(tmp_path) as pod:
            app = make_app(pod.live, pod.tokens)
            served = {(r.method, re.sub(r":[^}]*}", "}", r.resource.canonical))
                      for r in app.router.routes()
                      if r.resource is not None and r.method != "HEAD"}  # fmt: skip
            assert served == {(r.method, r.path) for r in ROUTES}
            status, tree = await pod.ask("GET", "/openapi.json")
            assert (status, tree) == (200, TREE)

    asyncio.run(main())


def test_its_schemas_are_valid_and_every_reference_leads_somewhere() -> None:
    schemas = TREE["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)  # OpenAPI 3.1 speaks this dialect

    def references(tree: Any) -> list[str]:
        if isinstance(tree, dict):
            own = [tree["$ref"]] if "$ref" in tree else []
            return own + [r for v in tree.values() for r in references(v)]
        return [r for v in tree for r in references(v)] if isinstance(tree, list) else []

    found = references(TREE)
    assert found
    assert {r.rpartition("/")[2] for r in found} <= set(schemas)
    assert all(r.startswith("#/components/schemas/") for r in found)


# The parts of OpenAPI 3.1 that this document uses, as its specification words them.
TEXT = {"type": "string", "minLength": 1}
SHAPE = {
    "type": "object", "required": ["openapi", "info", "paths", "components", "tags"],
    "properties": {
        "openapi": {"const": "3.1.0"},
        "info": {"type": "object", "required": ["title", "version"],
                 "properties": {"title": TEXT, "version": TEXT}},
        "paths": {"type": "object", "patternProperties": {"^/": {"type": "object", "patternProperties": {
            "^(get|post|delete)$": {
                "type": "object", "required": ["operationId", "summary", "tags", "parameters", "responses"],
                "properties": {
                    "summary": TEXT,
                    "parameters": {"type": "array", "items": {
                        "type": "object", "required": ["name", "in", "schema"], "properties": {
                            "name": TEXT, "in": {"enum": ["path", "query", "header"]}},
                        "if": {"properties": {"in": {"const": "path"}}}, "then": {"required": ["required"]}}},
                    "requestBody": {"type": "object", "required": ["content"]},
                    "responses": {"type": "object", "minProperties": 1, "patternProperties": {
                        "^[1-5][0-9][0-9]$": {"type": "object", "required": ["description"]}},
                        "additionalProperties": False},
                }}}, "additionalProperties": False}}, "additionalProperties": False},
    },
}  # fmt: skip


def test_it_has_the_shape_of_openapi() -> None:
    jsonschema.validate(TREE, SHAPE)
    tags = {t["name"] for t in TREE["tags"]}
    for path, _, op in operations():
        assert set(op["tags"]) <= tags
        in_path = {p["name"] for p in op["parameters"] if p["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path))


@pytest.mark.parametrize("route", [r for r in ROUTES if r.method == "GET" and r.params], ids=operation_id)
def test_the_parameters_it_names_are_known_and_others_are_refused(route: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as pod:
            path = route.path.replace("{table}", "rack")
            path = path.replace("{policy}", "operator").replace("{entity}", "site")
            for param in route.params:
                value = {"integer": "1", "number": "1"}.get(param.kind, "x")
                _, tree = await pod.ask("GET", f"{path}?{param.name}={value}")
                assert "unknown parameter" not in str(tree)
            status, tree = await pod.ask("GET", f"{path}?no_such=1")
            assert (status, "unknown parameter no_such" in tree["error"]) == (400, True)

    asyncio.run(main())
