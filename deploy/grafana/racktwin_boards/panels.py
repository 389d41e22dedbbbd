"""Panel: a question, the queries that answer it, and the way it is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from grafana_foundation_sdk.builders import (
    bargauge,
    common as shared,
    dashboard as build,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.models import common, dashboard

Kind = Literal["stat", "lines", "bars", "states"]
AnyPanel = stat.Panel | timeseries.Panel | bargauge.Panel | statetimeline.Panel
Steps = tuple[tuple[float | None, str], ...]  # (from this value, colour); the first from below all

DAEMON = 'instance=~"$daemon"'
RACK = f'{DAEMON},hall=~"$hall",name=~"$rack"'
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

GOOD, POOR, BAD, PLAIN = "green", "orange", "red", "text"
AT_LEAST_0: Steps = ((None, BAD), (0.0, GOOD))
NONE_IS_GOOD: Steps = ((None, GOOD), (1.0, POOR))


@dataclass(frozen=True)
class Query:
    """A query in PromQL, and the name of each of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A question. `good` says when all is well, `otherwise` what to do.

    `source` says where the thresholds come from.
    """

    title: str
    kind: Kind
    queries: tuple[Query, ...]
    good: str
    otherwise: str
    unit: str = "short"
    source: str = ""
    steps: Steps = ()
    states: Mapping[float, tuple[str, str]] = field(default_factory=dict)  # value -> (text, colour)
    width: int = 12
    height: int = 8
    board: str = ""  # where a series leads that names a rack

    @property
    def description(self) -> str:
        """The text behind the panel's mark."""
        text = f"Good: {self.good}\n\nElse: {self.otherwise}"
        return f"{text}\n\nThresholds: {self.source}" if self.source else text


def each(metric: str, *by: str, where: str = DAEMON) -> str:
    """The series of a metric, once where a standby reports the same."""
    return f"max by ({', '.join(by)}) ({metric}{{{where}}})"


def sdk_panel(panel: Panel, number: int) -> AnyPanel:
    """The panel as the SDK has it."""
    out = _plot(panel)
    out = out.id(number).title(panel.title).description(panel.description).datasource(SOURCE)
    out = out.unit(panel.unit).span(panel.width).height(panel.height)
    out = out.thresholds(
        build.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value, colour) for value, colour in panel.steps or ((None, PLAIN),)])
    )
    if panel.states:
        found = {
            f"{value:g}": dashboard.ValueMappingResult(text=text, color=colour, index=i)
            for i, (value, (text, colour)) in enumerate(panel.states.items())
        }
        out = out.mappings([dashboard.ValueMap(options=found)])
    if panel.board:
        out = out.data_links([_drill_down(panel.board)])
    for i, query in enumerate(panel.queries):
        out = out.with_target(_target(query, "ABCDEFGH"[i], now=panel.kind in ("stat", "bars")))
    return out


def _target(query: Query, name: str, now: bool) -> prometheus.Dataquery:
    out = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(name).datasource(SOURCE)
    return out.instant() if now else out.range()


def _drill_down(board: str) -> build.DashboardLink:
    # Names are encoded: what a site calls its things cannot change where the link leads
    kept = "${__url_time_range}&${datasource:queryparam}&${site:queryparam}&${daemon:queryparam}"
    url = f"/d/racktwin-{board}?{kept}&var-rack=${{__field.labels.name:percentencode}}"
    return build.DashboardLink(f"{board.capitalize()} of this rack").url(url)


def _plot(panel: Panel) -> AnyPanel:
    latest = shared.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    by_step = build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS)
    by_name = build.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC)
    legend = shared.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
    legend = legend.placement(common.LegendPlacement.BOTTOM)
    if panel.kind == "stat":
        return (
            stat.Panel()
            .reduce_options(latest)
            .graph_mode(common.BigValueGraphMode.NONE)
            .color_mode(common.BigValueColorMode.VALUE)
            .text_mode(common.BigValueTextMode.VALUE_AND_NAME)
            .color_scheme(by_step)
        )
    if panel.kind == "bars":
        return (
            bargauge.Panel()
            .reduce_options(latest)
            .orientation(common.VizOrientation.HORIZONTAL)
            .display_mode(common.BarGaugeDisplayMode.BASIC)
            .value_mode(common.BarGaugeValueMode.COLOR)
            .color_scheme(by_step)
        )
    if panel.kind == "states":
        return (
            statetimeline.Panel()
            .show_value(common.VisibilityMode.AUTO)
            .merge_values(True)
            .row_height(0.8)
            .legend(legend)
            .color_scheme(by_step)
        )
    lines = timeseries.Panel().legend(legend).color_scheme(by_name).line_width(1).span_nulls(False)
    lines = lines.tooltip(
        shared.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )
    if panel.steps:
        drawn = common.GraphThresholdsStyleMode.LINE
        lines = lines.thresholds_style(shared.GraphThresholdsStyleConfig().mode(drawn))
    return lines
