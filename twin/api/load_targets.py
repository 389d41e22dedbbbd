"""Load targets over the interface: what outside demands are held, whether the load is within them, and
setting or withdrawing one, as an event in the speaker's name.

Policies keep to them as far as they may act; this module only shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric

from twin.api.access import author
from twin.api.actions import new_id, submit
from twin.api.answers import MAX_ROWS, Refused, answer, body_of, live_of, number_of
from twin.api.request_bodies import until
from twin.api.runtime import Runtime
from twin.catalogue import NS, clean, did_you_mean
from twin.contracts import MAX_AHEAD_S, MAX_FEEDERS, MAX_LIMIT_W, MAX_NAME, LoadTarget, finite
from twin.site import Site
from twin.telemetry import events as ev
from twin.wiring import LoadNow, load_now, places_of

SHOWN_PLACES = 64  # of one target, those with the highest load


class NewLoadTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Draw at most `limit_w`, from `start_ns` (default: now) until `end_ns`, or for `for_s`.

    With neither, until it is withdrawn.

    `feeders`: each of these on its own; without them the racks of the site together. `name`: a later target
    under the same name takes its place. `best_effort`: what cannot be shed without disturbing jobs may stay.
    """

    name: str
    limit_w: float
    feeders: list[str] = []
    start_ns: int = 0
    end_ns: int | None = None
    for_s: float | None = None
    kind: ev.TargetKind = "operator"
    best_effort: bool = False


async def set_target(request: web.Request) -> web.Response:
    """Set a load target: the most that the site, or each of some feeders, may draw for a while."""
    body, live = await body_of(request, NewLoadTarget), live_of(request)
    now_ns, site = live.engine.state.now_ns, live.engine.site
    if not body.name or len(body.name) > MAX_NAME or not body.name.isprintable():
        raise Refused(400, f"name: expected 1 to {MAX_NAME} printable characters, to withdraw it by")
    if not 0 <= body.limit_w <= MAX_LIMIT_W:
        raise Refused(400, f"limit_w: expected W from 0 to {MAX_LIMIT_W:g}, got {body.limit_w:g}")
    if len(body.feeders) > MAX_FEEDERS:
        raise Refused(400, f"feeders: expected at most {MAX_FEEDERS}, got {len(body.feeders)}")
    if not 0 <= body.start_ns < 2**63 or body.start_ns - now_ns > MAX_AHEAD_S * NS:
        raise Refused(400, "start_ns: expected ns since 1970 (UTC), at most a year ahead; 0 is now")
    end_ns = until(live, body.for_s, body.end_ns, needed=False)
    if body.for_s is not None and body.start_ns > now_ns:
        end_ns = body.start_ns + round(body.for_s * NS)
    event = ev.LoadTargetSet(
        id=new_id(request), author=author(request), target=body.name, limit_w=body.limit_w,
        feeders=tuple(_feeder(site, name) for name in body.feeders), start_ns=body.start_ns, end_ns=end_ns,
        kind=body.kind, best_effort=body.best_effort,
    )  # fmt: skip
    return await submit(request, event, name=body.name, end_ns=end_ns or None)


async def withdraw_target(request: web.Request) -> web.Response:
    """Withdraw a load target, regardless of its author."""
    name = request.match_info["name"]
    engine = live_of(request).engine
    if name not in {t.name for t in engine.intake.load_targets.current(engine.site)}:
        raise Refused(404, f"no load target {clean(name, 200)}; it may have ended")
    event = ev.LoadTargetWithdrawn(id=new_id(request), author=author(request), target=name)
    return await submit(request, event, name=name)


async def targets(request: web.Request) -> web.Response:
    """List present and future load targets, and true if the load is within each; null is unknown."""
    live = live_of(request)
    offset, limit = number_of(request, "offset", 0, 0, 10**9), number_of(request, "limit", 200, 1, MAX_ROWS)
    engine = live.engine
    in_force, now_ns = engine.intake.load_targets.current(engine.site), engine.state.now_ns
    load = load_now(engine)
    more = offset + limit < len(in_force)
    return answer({
        "now_ns": now_ns, "total": len(in_force), "offset": offset,
        "next_offset": offset + limit if more else None,
        "site": {"load_w": finite(load.site_w), "unheard_racks": load.unheard_racks},
        "targets": [brief(t, engine.site, load, now_ns) for t in in_force[offset : offset + limit]],
    })  # fmt: skip


def brief(target: LoadTarget, site: Site, load: LoadNow, now_ns: int) -> dict[str, Any]:
    """Return a target in the form of the API. `within`: true, false, or null if the load is unknown.

    `places` are those with the highest load, at most 64 of `places_total`; `over` counts all that are beyond
    the limit, `unknown` all whose load is not known. A place is a feeder, or "" for the site.
    """
    feeder, load_w = places_of(target, load)
    partly = target.feeders is None and load.unheard_racks > 0
    over, unknown = load_w > target.limit_w, ~(np.isfinite(load_w))
    if partly:
        unknown = unknown | ~over
    return {
        "name": target.name, "author": target.author, "kind": target.kind, "limit_w": target.limit_w,
        "start_ns": target.start_ns, "end_ns": target.end_ns, "best_effort": target.best_effort,
        "site": target.feeders is None, "runs": target.runs(now_ns),
        "places_total": len(feeder), "over": int(over.sum()), "unknown": int(unknown.sum()),
        "within": False if over.any() else None if unknown.any() or not len(feeder) else True,
        "places": [
            {"feeder": "" if f < 0 else site.name("feeder", f), "load_w": finite(w),
             "left_w": finite(target.limit_w - w)}
            for f, w in zip(feeder[:SHOWN_PLACES].tolist(), load_w[:SHOWN_PLACES].tolist(), strict=True)],
    }  # fmt: skip


def target_series(live: Runtime) -> Iterator[Metric]:
    """Yield the count of load targets by state and the worst excess; none on a site without racks."""
    engine = live.engine
    if not engine.site.sizes["rack"]:
        return
    in_force = engine.intake.load_targets.current(engine.site)
    counts, worst_w = dict.fromkeys(("kept", "exceeded", "unknown", "to_come"), 0), 0.0
    load = load_now(engine) if in_force else None
    for target in in_force:
        if load is None or not target.runs(engine.state.now_ns):
            counts["to_come"] += 1
            continue
        _, load_w = places_of(target, load)
        over_w = load_w - target.limit_w
        partly = target.feeders is None and load.unheard_racks > 0
        if (over_w > 0).any():
            counts["exceeded"] += 1
            worst_w = max(worst_w, float(np.nanmax(over_w)))
        elif partly or not np.isfinite(load_w).all():
            counts["unknown"] += 1
        else:
            counts["kept"] += 1
    targets = GaugeMetricFamily("racktwin_power_targets", "load targets", labels=["state"])
    for state, count in counts.items():
        targets.add_metric([state], count)
    yield targets
    yield GaugeMetricFamily("racktwin_power_target_excess_watts", "the most that any is exceeded by", worst_w)


def _feeder(site: Site, name: str) -> str:
    found = site.entity("feeder", name)
    if found is None:
        near = did_you_mean(name, site.names["feeder"]) or f", such as {_first(site)}"
        raise Refused(404, f"no feeder {clean(name, 200)}; expected one of the site file{near}")
    return site.name("feeder", found)


def _first(site: Site) -> str:
    return site.name("feeder", 0) if site.sizes["feeder"] else "none (this site has no feeders)"
