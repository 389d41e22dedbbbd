"""Messages of DSX Flex as an ISV sends them: CloudEvents around signed load targets."""

from __future__ import annotations

import json
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from joserfc import jwk

from connectors.dsx import Signer
from connectors.dsx.flex_wire import text_of
from tests.support.builders import START_NS
from twin.catalogue import NS
from twin.telemetry import Message

CORRELATION = "c0ffee00-0000-4000-8000-000000000001"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def key(kid: str = "k1", kind: str = "EC") -> Any:
    """A key of its own for each name."""
    return _key(kid, kind)


@cache
def _key(kid: str, kind: str) -> Any:
    if kind == "EC":
        return jwk.ECKey.generate_key("P-256", {"kid": kid})
    return jwk.RSAKey.generate_key(2048, {"kid": kid})


@cache
def signer(kid: str = "k1", kind: str = "EC") -> Signer:
    return Signer(json.dumps(key(kid, kind).as_dict(private=True)).encode(), "test")


def key_set(*entries: dict[str, Any]) -> bytes:
    """A JWKS; with nothing given, that of k1, for anybody."""
    return json.dumps({"keys": list(entries) or [key().as_dict(private=False)]}).encode()


def target(limit_kw: float | None, *feeds: str, start_s: float | None = None, end_s: float | None = None,
           **more: Any) -> dict[str, Any]:  # fmt: skip
    """One target; times are seconds from START_NS."""
    times = {"start_time": start_s, "end_time": end_s}
    interval = {n: text_of(START_NS + round(s * NS)) for n, s in times.items() if s is not None}
    constraint = None if limit_kw is None else {"value": limit_kw, "unit": "kilowatt"}
    tags = {"feed_tags": list(feeds)} if feeds else {}
    return {"interval": interval, "load_constraint": constraint, **tags, **more}


def envelope(*targets: dict[str, Any], at_s: float = 0.0, isv: str = "acme", by: Signer | None = None,
             **change: Any) -> dict[str, Any]:  # fmt: skip
    """A CloudEvent; a `change` of None leaves an attribute out."""
    data = json.dumps({"targets": list(targets)}).encode()
    event = {
        "specversion": "1.0.2", "id": str(uuid.uuid4()), "source": f"//grid/v1/isv/{isv}",
        "type": "grid.loadtarget.set.v1", "time": text_of(START_NS + round(at_s * NS)),
        "datacontenttype": "application/json", "subject": "loadtarget", "correlationid": CORRELATION,
        "traceparent": TRACE, "data": (by or signer()).sign(data),
    }  # fmt: skip
    return {k: v for k, v in (event | change).items() if v is not None}


def message(event: Any, at_s: float = 0.0, isv: str = "acme", topic: str | None = None) -> Message:
    """As it comes in."""
    payload = event if isinstance(event, bytes) else json.dumps(event).encode()
    at = topic if topic is not None else f"grid/v1/isv/{isv}/loadtarget/set"
    return Message(START_NS + round(at_s * NS), at, payload)


def contract(folder: Path) -> dict[str, Any]:
    """Schemas of the contract in the folder of the recording dsx-bms-capture, for references into them."""
    text = (folder / "dsx-flex.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)
    return {"components": {"schemas": tree["components"]["schemas"]}}


def check_event(tree: dict[str, Any], name: str, event: Any) -> None:
    """Raises ValidationError where an event is not as the contract's schema of this name says."""
    schema = tree | {"$ref": f"#/components/schemas/{name}"}
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(event)
