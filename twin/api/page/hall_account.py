"""Hall account: the halls of a fleet and the feeders, loops and contracts that they share, as known here.

The account is that of the policy `hall_budgets`; here is added what people asked for and the address of each
hall's own page. A token of some halls gets the rows of these alone, and no sum that holds another's.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from twin.api.access import WHO
from twin.api.answers import Refused, answer, live_of
from twin.api.explain import explanation_of
from twin.api.runtime import Runtime
from twin.archive import labels_of
from twin.catalogue import clean
from twin.contracts import Explanation
from twin.site import HALL_BUDGET, hall_count

POLICY = "hall_budgets"
SEVERITIES = ("critical", "warning", "info")
OF_OTHERS = ("power_w", "held_w", "other_w", "left_w")  # of a shared place: sums that hold what others hold


def local_name(path: str) -> str:
    """Return the local name of a hall, which its daemon, tokens and people use."""
    return path.rpartition("/")[2]


async def fleet(request: web.Request) -> web.Response:
    """Return the halls of a fleet and who holds what of all that they share; null is unknown."""
    live, own = live_of(request), request[WHO].halls
    engine = live.engine
    if not hall_count(engine.site):
        no_hub = "this daemon is no hub of a fleet: its site file has no rack with guaranteed_w"
        raise Refused(404, f"{no_hub}; `racktwin status` shows its site")
    found = await explanation_of(live, POLICY, "", "", {})
    asked, pages = (
        _standing_requests(live),
        live.loaded.config.fleet.pages if live.loaded.config.fleet else {},
    )
    halls = [_hall(row, asked, pages) for row in found.table("halls")]
    parts = [row | {"hall": local_name(str(row["hall"]))} for row in found.table("parts")]
    if own:
        halls, parts = ([row for row in rows if row["hall"] in own] for rows in (halls, parts))
        if not halls:
            why = f"the token {request[WHO].name} is for {', '.join(own)}, not for halls of this hub"
            raise Refused(404, f"{why}; ask the operator for another (racktwin token add --hall)")
    return answer({
        "now_ns": engine.state.now_ns, "tick": engine.state.tick, "site": engine.site.file.site,
        "role": live.role, "simulated": live.loaded.config.simulated, "authority": found.authority,
        "suspended": found.suspended, "only": own, "halls": halls, "archive": _archive(live),
        "feeders": _feeders(found, parts, bool(own)),
    })  # fmt: skip


def _archive(live: Runtime) -> str | None:
    """Return the name of this hub's rows in the fleet's history; None without ClickHouse."""
    configured = live.loaded.config.history.clickhouse is not None
    return labels_of(live.loaded, live.engine.site).hall if configured else None


def _hall(
    row: dict[str, Any], asked: dict[str, list[dict[str, Any]]], pages: dict[str, str]
) -> dict[str, Any]:
    """Return a hall. Its power, GPUs and alarms are unknown while it is silent, and unknown is never
    healthy."""
    name = local_name(row["hall"])
    alarms = {severity: row.pop(f"alarm_{severity}_count") for severity in SEVERITIES}
    power_w = row["power_w"]
    return row | {
        "hall": name,
        "name": row["hall"],
        "url": pages.get(name),
        "headroom_w": None if power_w is None else row["budget_w"] - power_w,
        "alarms": alarms,
        "holds": asked.get(row["hall"], []),
    }


def _standing_requests(live: Runtime) -> dict[str, list[dict[str, Any]]]:
    """Return the standing requests on budgets of halls, by full name."""
    out: dict[str, list[dict[str, Any]]] = {}
    for r in live.engine.intake.requests.values():
        for name in r.names if r.control == HALL_BUDGET else ():
            out.setdefault(name, []).append({"id": r.id, "author": clean(r.author), "budget_w": r.hi,
                                             "expires_ns": r.expires_ns, "reason": clean(r.reason, 300),
                                             "halls": len(r.names)})  # fmt: skip
    return out


def _feeders(found: Explanation, parts: list[dict[str, Any]], limited: bool) -> list[dict[str, Any]]:
    """Return the places that halls share with each part; parts of others are null for a limited token."""
    out = []
    for row in found.table("feeders"):
        own = [{k: v for k, v in part.items() if k not in ("feeder", "kind")} for part in parts
               if (part["feeder"], part["kind"]) == (row["feeder"], row["kind"])]  # fmt: skip
        if own or not limited:
            out.append(row | (dict.fromkeys(OF_OTHERS) if limited else {}) | {"parts": own})
    return out
