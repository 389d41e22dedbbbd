"""Board `power`: binding feeders, the power of each place, and the cost of caps."""

from __future__ import annotations

from racktwin_boards.boards import Board
from racktwin_boards.panels import AT_LEAST_0, BAD, DAEMON, GOOD, POOR, RACK, Panel, Query, each

_ELECTRIC = f'{DAEMON},kind!="cdu"'
_LOST = f'{DAEMON},kind="feeder",case="lost"'
_USE = Panel(
    "Use of the budgets if the other side fails",
    "bars",
    (
        Query(
            f"topk(20, {each('instance_place:racktwin_power_use:ratio', 'name', where=_LOST)})",
            "{{name}}",
        ),
    ),
    good="below 90 %.",
    otherwise=(
        "`racktwin power why` says what binds; move jobs, lower caps, or raise the budget if the "
        "feed allows it."
    ),
    unit="percentunit",
    source="90 %: from there `racktwin power` warns. 100 %: the budget of the site file",
    steps=((None, GOOD), (0.9, POOR), (1.0, BAD)),
)
_TIGHTEST = Panel(
    "Headroom of the tightest places",
    "lines",
    (
        Query(
            f"bottomk(8, min by (kind, name, case) (racktwin_power_headroom_watts{{{_ELECTRIC}}}))",
            "{{kind}} {{name}}, {{case}}",
        ),
    ),
    good="above 0 in both cases.",
    otherwise=(
        "below 0 as fed now a breaker may trip; below 0 in the case `lost` it may once the other side fails."
    ),
    unit="watt",
    source="the budgets of the site file (`budget_w`)",
    steps=AT_LEAST_0,
)
_FEEDERS = Panel(
    "Power of feeders, and their budgets",
    "lines",
    (
        Query(each("racktwin_feeder_power_w", "name"), "{{name}}"),
        Query(
            each("racktwin_power_budget_watts", "name", where=f'{DAEMON},kind="feeder"'), "{{name}} budget"
        ),
    ),
    good="each feeder below its budget, sides A and B alike.",
    otherwise="sides that differ: a supply of some racks is out. `racktwin power show --kind feeder`.",
    unit="watt",
)
_STATES = Panel(
    "Feeds and breakers",
    "states",
    (
        Query(each("racktwin_feeder_energised_state", "name"), "{{name}} feed"),
        Query(each("racktwin_feeder_breaker_state", "name"), "{{name}} breaker"),
    ),
    good="0 throughout.",
    otherwise="a lost feed or a tripped breaker: the other side carries all; its use is on this board.",
    states={0.0: ("in order", GOOD), 1.0: ("lost or tripped", BAD)},
)
_HALLS = Panel(
    "Power of halls",
    "lines",
    (
        Query(
            each("instance_hall:racktwin_rack_power_w:sum", "hall", where=f'{DAEMON},hall=~"$hall"'),
            "{{hall}}",
        ),
    ),
    good="follows the jobs.",
    otherwise="a step down without the end of a job: racks fell silent or lost power.",
    unit="watt",
)
_RACKS = Panel(
    "Power of racks",
    "lines",
    (Query(f"topk(20, {each('racktwin_rack_power_w', 'name', where=RACK)})", "{{name}}"),),
    good="follows the jobs; the 20 highest are shown, choose racks above for others.",
    otherwise="a rack near the limit of its profile: `racktwin power show --kind rack`.",
    unit="watt",
    board="cooling",
)
_CAPPED = Panel(
    "GPUs held below their maximum",
    "lines",
    (
        Query(each("racktwin_power_capped_gpus", "policy"), "by {{policy}}"),
        Query(f"max(racktwin_power_advised_gpus{{{DAEMON}}})", "advised, not commanded"),
    ),
    good="none, or as many as a budget or load target asks for.",
    otherwise=(
        "`racktwin power why` gives the reason and what would lift it. No line of a policy: it caps none."
    ),
)
_COST = Panel(
    "Work lost to caps, by class of job",
    "lines",
    (
        Query(
            f'max by (class) (increase(racktwin_power_lost_gpu_hours_total{{{DAEMON},case="expected"}}[1h]))',
            "{{class}}",
        ),
    ),
    good="little, and of the class `idle` first. The unit is GPU-hours in an hour.",
    otherwise=(
        "`high` loses work: raise its priority's share or the budget; `racktwin power cost` has the account."
    ),
)
_TARGETS = Panel(
    "Load targets",
    "bars",
    (Query(each("racktwin_power_targets", "state"), "{{state}}"),),
    good="none is `exceeded` or `unknown`.",
    otherwise="`racktwin power target list` names them and the places above their limit.",
    width=6,
)
_EXCESS = Panel(
    "Most that a load target is exceeded by",
    "stat",
    (Query(f"max(racktwin_power_target_excess_watts{{{DAEMON}}})", "excess"),),
    good="0.",
    otherwise="caps are at their floor, or no policy may act: `racktwin policy list`.",
    unit="watt",
    source="the targets themselves",
    steps=((None, GOOD), (1.0, BAD)),
    width=6,
)
_AHEAD = Panel(
    "Power of the site expected, upper edge of the 90 % band",
    "bars",
    (
        Query(
            f'sort(max by (horizon_s) (racktwin_forecast_site_power_w{{{DAEMON},edge="hi"}}))',
            "in {{horizon_s}} s",
        ),
    ),
    good="below what the site may draw.",
    otherwise="plan: move jobs in time, or set a load target. `racktwin forecast list` has the reasons.",
    unit="watt",
)

POWER = Board(
    "power",
    "Which feeder binds first, what is drawn where, and what do caps cost?",
    (_USE, _TIGHTEST, _FEEDERS, _STATES, _HALLS, _RACKS, _CAPPED, _COST, _TARGETS, _EXCESS, _AHEAD),
)
