"""The record of a node for a ticket: what it is, what it did, what was tried, and why it shall go back.

As data; `rma_markdown` makes a page of it. What is not known is said so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twin.api.health_part import part_tree
from twin.api.runtime import Runtime
from twin.catalogue import clean
from twin.report import score_of

FORMAT = 1
MOST_ROWS, MOST_TESTS, MOST_GPUS, MOST_FAULTS = 200, 20, 64, 256


def record(live: Runtime, node: int, rows: Sequence[dict[str, Any]], notes: Sequence[str], since_ns: int,
           planned: dict[str, Any] | None) -> dict[str, Any]:  # fmt: skip
    """Everything about a node as plain data. `rows`: its history; `planned`: its row of the plan."""
    engine, site = live.engine, live.engine.site
    name, tree = site.name("node", node), part_tree(live, "node", node)
    serials = engine.intake.serials
    first, last = int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1])
    rack = int(site.rack_of_node[node])
    gpus = [{"name": (gpu := site.name("gpu", g)), "serial": _serial(serials.get(f"gpu:{gpu}"))}
            for g in range(first, min(last, first + MOST_GPUS))]  # fmt: skip
    of = {kind: [r for r in rows if r["kind"] == kind] for kind in ("test", "repair", "replaced", "finding")}
    drains = [r for r in rows if r["kind"] == "command"]
    return {
        "format": FORMAT, "made_ns": engine.state.now_ns, "site": site.file.site, "node": name,
        "rack": site.name("rack", rack), "simulated": live.loaded.config.simulated,
        "racktwin": live.version, "since_ns": since_ns,
        "serial": _serial(serials.get(f"node:{name}")), "gpus": gpus, "gpus_total": last - first,
        "level": tree["level"], "action": tree["action"], "do": tree["do"], "sure": tree["sure"],
        "evidence": tree["evidence"], "missing": tree["missing"], "parts": _ill(tree),
        "chance": [{k: c[k] for k in ("horizon_s", "mean", "lo", "hi", "said")} for c in tree["chance"]],
        "lemon": tree["lemon"], "failures": tree["history"]["failures"],
        "failures_total": tree["history"]["failures_total"], "watched_s": tree["history"]["watched_s"],
        "reboots": tree["history"]["reboots"], "gpus_replaced": tree["history"]["gpus_replaced"],
        "faults": _faults(live, node), "planned": planned, "drains": drains[-MOST_ROWS:],
        "tests": of["test"][-MOST_TESTS:], "tests_total": len(of["test"]),
        "tests_failed": sum(r["data"].get("passed") is False for r in of["test"]),
        "repairs": (of["repair"] + of["replaced"])[-MOST_ROWS:], "findings": of["finding"][-MOST_ROWS:],
        "history": [r for r in rows if r["kind"] != "finding"][-MOST_ROWS:], "history_total": len(rows),
        "score": score_of(rows), "notes": list(notes),
    }  # fmt: skip


def _serial(text: str | None) -> str | None:
    return clean(text) if text else None


def _ill(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The GPUs, links and supplies of a node of which something is said."""
    return [p for p in tree["parts"] if p["level"] not in ("healthy", "unknown")]


def _faults(live: Runtime, node: int) -> list[dict[str, Any]]:
    """List the faults its devices reported: by code and device, first, last and count; the latest first."""
    from twin.health import find

    site, book = live.engine.site, live.engine.health.book
    first, last = int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1])
    heard = [("", "node", h) for h in book.of("node", node)]
    heard += [(f"gpu{g - first}", "gpu", h) for g in range(first, last) for h in book.of("gpu", g)]
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for of, table, h in heard:
        row = rows.setdefault((of, h.code), {
            "of": of, "code": h.code, "times": 0, "first_ns": h.at_ns, "last_ns": h.at_ns, "detail": "",
            **_meaning(find(h.code, table, h.detail))})  # fmt: skip
        row["times"] += h.times
        row["first_ns"] = min(row["first_ns"], h.at_ns)
        if h.at_ns >= row["last_ns"]:
            row["last_ns"], row["detail"] = h.at_ns, clean(h.detail, 200) or row["detail"]
    return sorted(rows.values(), key=lambda r: -r["last_ns"])[:MOST_FAULTS]


def _meaning(entry: Any) -> dict[str, str]:
    return {"label": entry.label, "means": entry.name}
