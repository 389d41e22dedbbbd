"""Grafana's part between a board and Prometheus: variables are looked up, chosen and put into queries.

It follows `interpolateQueryExpr` of Grafana's data source for Prometheus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.prometheus_server import Prometheus

BOARDS = Path(__file__).parents[2] / "deploy" / "grafana" / "boards"
RATE_INTERVAL = "1m"  # $__rate_interval: four times the 15 s of the scrape configuration
Choice = Mapping[str, str | Sequence[str]]


def boards() -> dict[str, dict[str, Any]]:
    """The boards that ship, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(BOARDS.glob("*.json"))}


@dataclass(frozen=True)
class Asked:
    """A query of a panel."""

    board: str
    panel: str
    expr: str
    legend: str
    named: bool  # a series leads to another board by its name

    @property
    def labels(self) -> set[str]:
        """The labels that its legend, or its link, wants."""
        return set(re.findall(r"{{\s*(\w+)\s*}}", self.legend)) | ({"name"} if self.named else set())

    def named_as(self, labels: Mapping[str, str]) -> str:
        """The name of a series."""
        return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), self.legend)


def queries() -> Iterator[Asked]:
    """All queries of all boards."""
    for name, board in boards().items():
        for panel in board["panels"]:
            links = panel["fieldConfig"]["defaults"].get("links")
            for target in panel["targets"]:
                yield Asked(name, panel["title"], target["expr"], target["legendFormat"], bool(links))


def interpolated(expr: str, chosen: Choice) -> str:
    """The query that Grafana sends. A list is a choice of several; a text goes in as it is."""

    def put(found: re.Match[str]) -> str:
        name = found[1]
        if name == "__rate_interval":
            return RATE_INTERVAL
        value = chosen[name]
        if isinstance(value, str):
            return value
        escaped = [_special(v) for v in value]
        return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"

    return re.sub(r"\$(\w+)", put, expr)


def _special(value: str) -> str:
    value = value.replace("\\", "\\\\\\\\")
    return re.sub(r"[$^*{}\[\]'+?.()|]", lambda m: "\\\\" + m[0], value)


def options(prometheus: Prometheus, board: dict[str, Any], name: str, chosen: Choice) -> list[str]:
    """The values that a variable of a board offers."""
    (variable,) = (v for v in board["templating"]["list"] if v["name"] == name)
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
    assert found is not None, variable["query"]
    return prometheus.label_values(interpolated(found[1], chosen), found[2])
