"""Policy settings: every policy with its authority and settings, each with its value and its source."""

from __future__ import annotations

import inspect
from typing import Any

from aiohttp import web

from twin.api.answers import answer, live_of
from twin.api.state import policy_rows
from twin.catalogue import clean
from twin.contracts import Explainer, Policy

MAX_VALUE = 200  # characters of a setting's value


async def policies(request: web.Request) -> web.Response:
    """List the policies, strongest first: authority, controls, reasons, and settings with their sources."""
    engine = live_of(request).engine
    entries = engine.site.file.policies
    out = []
    for policy, row in zip(engine.policies, policy_rows(live_of(request)), strict=True):
        entry = entries.get(policy.name)
        declared = entry.authority if entry is not None else None
        out.append(row | {
            "text": _text(policy), "explains": isinstance(policy, Explainer),
            "declared": declared, "acknowledge": f"{policy.name} may act on {engine.site.file.site}",
            "settings": _settings(policy, entry.settings if entry is not None else {}),
        })  # fmt: skip
    return answer({"now_ns": engine.state.now_ns, "mode": engine.arbiter.mode, "policies": out})


def _text(policy: Policy) -> str:
    """Return the first paragraph of a policy's documentation."""
    return " ".join((inspect.getdoc(type(policy)) or "").split("\n\n")[0].split())


def _settings(policy: Policy, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings by name; those of the site file are marked, the others have their defaults."""
    rows = []
    for name, parameter in inspect.signature(type(policy)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = None if parameter.default is parameter.empty else parameter.default
        value = given.get(name, getattr(policy, name, default))
        rows.append({"name": name, "value": _plain(value), "default": _plain(default),
                     "source": "site file" if name in given else "default"})  # fmt: skip
    return rows


def _plain(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    return clean(str(value), MAX_VALUE)
