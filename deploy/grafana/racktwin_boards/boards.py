"""Board: a page of panels under one name, with the variables and links that all boards share."""

from __future__ import annotations

import json
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from racktwin_boards.panels import DAEMON, SOURCE, Panel, sdk_panel

TAG = "racktwin"
SCHEMA = 41  # of Grafana 12.0 and 12.1; later ones bring it up to date when they load it
ALL = dashboard.VariableOption(text="All", value="$__all")
RACKS = '{__name__=~"racktwin_rack_.+"'  # whichever of their signals are connected


@dataclass(frozen=True)
class Board:
    """A page. Its address in Grafana is `racktwin-NAME`."""

    name: str
    description: str
    panels: tuple[Panel, ...]

    @property
    def title(self) -> str:
        """The heading."""
        return f"racktwin: {self.name}"

    def document(self) -> str:
        """The board as Grafana loads it."""
        out = (
            build.Dashboard(self.title)
            .uid(f"racktwin-{self.name}")
            .description(self.description)
            .tags([TAG])
            .editable()
            .refresh("15s")
            .time("now-3h", "now")
            .timezone("browser")
            .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
            .link(_others())
        )
        for variable in _variables():
            out = out.with_variable(variable)
        for number, panel in enumerate(self.panels, 1):
            out = out.with_panel(sdk_panel(panel, number))
        made = out.build()
        made.schema_version = SCHEMA
        for link in made.links or ():
            link.placement = ""  # in sight, not behind a menu
        return json.dumps(made, cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _others() -> build.DashboardLink:
    """Return links to the boards with our tag; the selection carries over."""
    link = build.DashboardLink("racktwin").type(dashboard.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(False).include_vars(True).keep_time(True)


def _variables() -> tuple[build.DatasourceVariable | build.QueryVariable, ...]:
    """The data source, the site, its daemons (leader and standby), halls and racks; each narrows the next."""
    racks = f"{RACKS},{DAEMON}"
    return (
        build.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _values("site", "Site", "label_values(racktwin_info, site)"),
        _several("daemon", "Daemon", 'label_values(racktwin_info{site="$site"}, instance)'),
        # A match of all, since a list of each would be longer than a query may be
        _several("hall", "Hall", f"label_values({racks}}}, hall)").all_value(".*"),
        _several("rack", "Rack", f'label_values({racks},hall=~"$hall"}}, name)').all_value(".*"),
    )


def _values(name: str, label: str, query: str) -> build.QueryVariable:
    variable = build.QueryVariable(name).label(label).datasource(SOURCE)
    variable = variable.query({"query": query, "refId": name}).definition(query)
    variable = variable.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return variable.sort(dashboard.VariableSort.NATURAL_ASC)


def _several(name: str, label: str, query: str) -> build.QueryVariable:
    return _values(name, label, query).multi(True).include_all(True).current(ALL)
