"""Board `overview`: is anything wrong, and how much room is left before something binds."""

from __future__ import annotations

from racktwin_boards.boards import Board
from racktwin_boards.panels import AT_LEAST_0, BAD, DAEMON, GOOD, NONE_IS_GOOD, RACK, Panel, Query, each

_FED = f'{DAEMON},kind=~"feeder|site"'
_LEADERS = Panel(
    "Daemons that lead",
    "stat",
    (Query(f"sum(racktwin_leads{{{DAEMON}}})", "leaders"),),
    good="1.",
    otherwise=(
        "0: nothing is commanded, leases lapse. 2: stop one. The board `daemon` says which; then "
        "look at etcd."
    ),
    source="the alerts RacktwinNobodyLeads and RacktwinTwoLead",
    steps=((None, BAD), (1.0, GOOD), (2.0, BAD)),
    width=4,
    height=5,
)
_ALARMS = Panel(
    "Active alarms",
    "stat",
    (
        Query(
            each("racktwin_alarms", "severity", where=f'{DAEMON},severity=~"critical|warning"'),
            "{{severity}}",
        ),
    ),
    good="none.",
    otherwise="`racktwin alarm list` or the page of the daemon: each alarm says what, where and what to do.",
    source="one alarm is one too many",
    steps=NONE_IS_GOOD,
    width=4,
    height=5,
)
_HEADROOM = Panel(
    "Least headroom of power",
    "stat",
    (
        Query(
            f"min by (case) (instance_case:racktwin_power_headroom_watts:min{{{_FED}}})",
            "case {{case}}",
        ),
    ),
    good="above 0 in both cases: as fed now, and `lost`, with the other side of a feeder failed.",
    otherwise=(
        "the board `power` names the feeder. Below 0 in the case `lost`, losing a side trips the other one."
    ),
    unit="watt",
    source="the budgets of the site file (`budget_w`)",
    steps=AT_LEAST_0,
    width=5,
    height=5,
)
_MARGIN = Panel(
    "Least margin of temperature",
    "stat",
    (Query(f'min by (limit) (racktwin_limit_margin{{{DAEMON},unit=~"degC|K"}})', "to {{limit}}"),),
    good="above 0 for `guard`: no guard has a reason to act.",
    otherwise=(
        "the board `cooling` names the signal. Below 0 for `guard` caps are due; for `max` parts are at risk."
    ),
    unit="kelvin",
    source="`limits` of the racks' profiles",
    steps=AT_LEAST_0,
    width=5,
    height=5,
)
_CAPPED = Panel(
    "GPUs under a power cap",
    "stat",
    (Query(f'max(racktwin_leases{{{DAEMON},control="gpu.power_cap_w"}})', "GPUs"),),
    good="0, or as many as a budget or load target asks for.",
    otherwise="the board `policies` says which policy holds them, `racktwin power why` for what reason.",
    width=3,
    height=5,
)
_DOWN = Panel(
    "Nodes that are down",
    "stat",
    (Query(f"max(racktwin_nodes_down{{{DAEMON}}})", "nodes"),),
    good="0.",
    otherwise="`racktwin device health` lists them; the board `health` says by which cause.",
    source="one node is one too many",
    steps=NONE_IS_GOOD,
    width=3,
    height=5,
)
_POWER = Panel(
    "Power of the site, and what was expected an hour before",
    "lines",
    (
        Query(f"max(instance:racktwin_rack_power_w:sum{{{DAEMON}}})", "racks together"),
        Query(
            f'max by (edge) (racktwin_forecast_site_power_w{{{DAEMON},horizon_s="3600"}} offset 1h)',
            "expected: {{edge}}",
        ),
    ),
    good="the power runs between `lo` and `hi` nine hours in ten.",
    otherwise=(
        "a load that nobody expected, or racks that fell silent: compare the number of racks that report."
    ),
    unit="watt",
)
_REPORTING = Panel(
    "Racks that report their power",
    "lines",
    (Query(f"max(instance:racktwin_rack_power_w:count{{{DAEMON}}})", "racks"),),
    good="all racks of the site, a flat line.",
    otherwise="`racktwin sources` says which source stopped. Sums of power lack the racks that are silent.",
    width=6,
)
_DEMAND = Panel(
    "GPUs of the scheduler",
    "lines",
    (
        Query(f"max(racktwin_site_gpu_running_count{{{DAEMON}}})", "running"),
        Query(f"max(racktwin_site_gpu_pending_count{{{DAEMON}}})", "asked for"),
        Query(f"max(racktwin_site_gpu_idle_count{{{DAEMON}}})", "idle"),
    ),
    good="few idle while jobs wait.",
    otherwise="idle GPUs beside waiting jobs: nodes are out of service, or the jobs do not fit.",
    width=6,
)
_RACKS = Panel(
    "Racks that draw most",
    "bars",
    (Query(f"topk(10, {each('racktwin_rack_power_w', 'name', where=RACK)})", "{{name}}"),),
    good="below the limit of each rack's profile; follow a rack to its cooling.",
    otherwise="`racktwin power show --kind rack` has the limit and what binds first.",
    unit="watt",
    width=12,
    board="cooling",
)
_HOTTEST = Panel(
    "Hottest GPUs, by rack",
    "bars",
    (Query(f"topk(10, {each('racktwin_rack_gpu_temp_c_max', 'name', where=RACK)})", "{{name}}"),),
    good="alike in racks of one profile under the same load.",
    otherwise="one rack above its like: look at its flow and its supply temperature.",
    unit="celsius",
    width=12,
    board="cooling",
)

OVERVIEW = Board(
    "overview",
    "Is anything wrong, and how much room is left before something binds?",
    (
        _LEADERS, _ALARMS, _HEADROOM, _MARGIN, _CAPPED, _DOWN, _POWER, _REPORTING, _DEMAND, _RACKS,
        _HOTTEST,
    ),
)  # fmt: skip
