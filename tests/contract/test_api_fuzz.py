"""The interface against requests made up from its own document: no answer is an error of the server.

Each operation is asked with sound names, wild ones, and bodies whose keys are those of its schema.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from tests.support.in_process_daemon import Pod, serving
from twin.api.public import ROUTES
from twin.api.routes import document

TREE = document(ROUTES)
STREAMS = ("text/event-stream",)  # they end when the watcher leaves
EACH = 8  # requests of an operation
WILD: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, 2**63, 10**30, "", "x", "é\u202e\x1b[2J", "\0", "../../etc/passwd", "<script>",
    [], {},
    [[]], {"a": {"b": []}}, "r1", "lab/h/r1", "rack.power_w", "gpu.power_cap_w", "1h", "2026-01-01T00:00:00Z",
    "a" * 5000, float("nan"), ["r1", "r1"], [None], "%00", "' OR 1=1 --",
)  # fmt: skip
RAW = (b"", b"{", b"[" * 5000, b"\xff\xfe", b"null", b'{"a":1,"a":2}', b"1e999", b'"' + b"x" * 10_000 + b'"')


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = TREE["components"]["schemas"][name] if name else schema
    return found


def value_for(schema: dict[str, Any], rng: random.Random) -> Any:
    """Sometimes what the schema asks for, mostly not."""
    if rng.random() < 0.5:
        return rng.choice(WILD)
    kinds = schema.get("anyOf") or [schema]
    kind = resolved(rng.choice(kinds))
    if "enum" in kind:
        return rng.choice(kind["enum"])
    sound: dict[str, Any] = {"string": "r1", "number": 1.5, "integer": 3, "boolean": True, "array": ["r1"],
                             "object": {}, "null": None}  # fmt: skip
    return sound.get(kind.get("type", "string"))


def body_for(operation: dict[str, Any], rng: random.Random) -> bytes | None:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return None if rng.random() < 0.8 else b"{}"
    if rng.random() < 0.2:
        return rng.choice(RAW)
    properties = resolved(content["schema"]).get("properties", {})
    body = {key: value_for(schema, rng) for key, schema in properties.items() if rng.random() < 0.9}
    if rng.random() < 0.1:
        body["no_such_key"] = 1
    return json.dumps(body).encode()


def url_for(path: str, operation: dict[str, Any], rng: random.Random) -> str:
    sound = ["rack", "gpu", "r1", "lab/h/r1", "site", "operator", "power", "1-1", "0"]

    def part(_: Any) -> str:
        return quote(
            str(rng.choice(sound if rng.random() < 0.6 else WILD)), safe="/" if rng.random() < 0.5 else ""
        )

    query = [
        f"{p['name']}={quote(str(value_for(p['schema'], rng)))}"
        for p in operation["parameters"]
        if p["in"] == "query" and rng.random() < 0.6
    ]
    return re.sub(r"{\w+}", part, path) + ("?" + "&".join(query) if query else "")


async def ask(session: aiohttp.ClientSession, pod: Pod, method: str, url: str, body: bytes | None) -> str:
    """Return the fault of an answer; "" for none."""
    async with session.request(method, pod.url + url, data=body, headers=pod.head("admin")) as answer:
        raw = await answer.read()
        if answer.status >= 500 and answer.status != 503:  # what is not there yet says so
            return f"{method} {url[:200]} {body!r:.300}: {answer.status} {raw[:300]!r}"
        if answer.status >= 400 and not json.loads(raw).get("error"):
            return f"{method} {url[:200]}: {answer.status} without a word"
    return ""


@pytest.mark.parametrize("seed", [1])
def test_no_request_brings_an_error_of_the_server(tmp_path: Path, seed: int) -> None:
    rng, wrong = random.Random(seed), list[str]()

    async def main() -> None:
        async with serving(tmp_path) as pod, aiohttp.ClientSession() as session:
            for path, operations in TREE["paths"].items():
                for method, operation in operations.items():
                    said = [m for r in operation["responses"].values() for m in r.get("content", {})]
                    if any(media in STREAMS for media in said):
                        continue
                    for _ in range(EACH):
                        url, body = url_for(path, operation, rng), body_for(operation, rng)
                        if problem := await ask(session, pod, method.upper(), url, body):
                            wrong.append(problem)
            assert (await pod.ask("GET", "/api/v1/whoami"))[0] == 200
            assert not any(task.done() for task in pod.work)

    asyncio.run(main())
    assert wrong == []
