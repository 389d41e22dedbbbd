"""Board `health`: which parts are ill, which nodes are likeliest to fail, and whether spares suffice."""

from __future__ import annotations

from racktwin_boards.boards import Board
from racktwin_boards.panels import BAD, DAEMON, GOOD, NONE_IS_GOOD, POOR, Panel, Query, each

_DAY = 'horizon_s="86400"'
_LEVELS = Panel(
    "Parts that are not healthy",
    "bars",
    (
        Query(
            each("racktwin_health_parts", "part", "level", where=f'{DAEMON},level!="healthy"'),
            "{{part}} {{level}}",
        ),
    ),
    good="few `watch`, none `degraded` or `failed`.",
    otherwise=(
        "`racktwin device health` has the evidence. Many `unknown`: what is not connected is not judged."
    ),
)
_DOWN = Panel(
    "Nodes",
    "stat",
    (
        Query(f"max(racktwin_nodes_down{{{DAEMON}}})", "down"),
        Query(f"max(racktwin_nodes_down_together{{{DAEMON}}})", "of them by a common cause"),
        Query(f"max(racktwin_health_lemons{{{DAEMON}}})", "fail more often than others"),
    ),
    good="0.",
    otherwise=(
        "a common cause is a feed, a CDU or a switch: mend that first. Repeated failures: replace the node."
    ),
    source="one node is one too many",
    steps=NONE_IS_GOOD,
)
_LIKELIEST = Panel(
    "Nodes likeliest to fail within a day",
    "bars",
    (
        Query(
            f"topk(10, {each('racktwin_node_failure_probability', 'name', where=f'{DAEMON},{_DAY}')})",
            "{{name}}",
        ),
    ),
    good="all alike and low: nothing sets one apart.",
    otherwise=(
        "one stands out: `racktwin device health NODE` has the reasons; drain it when its job has saved."
    ),
    unit="percentunit",
)
_EXPECTED = Panel(
    "Node failures expected within a day",
    "lines",
    (Query(each("racktwin_forecast_site_node_failure_count", "edge", where=f"{DAEMON},{_DAY}"), "{{edge}}"),),
    good="flat. `lo` and `hi` bound 90 %.",
    otherwise=(
        "rises: faults accumulate; save more often (the board `policies`) and look for what they share."
    ),
)
_FAULTS = Panel(
    "Faults that devices reported, per hour",
    "lines",
    (
        Query(
            f"3600 * max by (what) (rate(racktwin_health_faults_total{{{DAEMON}}}[$__rate_interval]))",
            "{{what}}",
        ),
    ),
    good="near 0.",
    otherwise="`unknown_entities` and `unknown_tables` are not judged: compare the names with the site file.",
)
_CLASSES = Panel(
    "Node failures remembered, by class",
    "bars",
    (Query(each("racktwin_node_failures", "class"), "{{class}}"),),
    good="no data: none failed since the daemon remembers.",
    otherwise="the class says what to look at: GPU, memory, network, power, cooling or software.",
)
_PHASES = Panel(
    "Nodes on their way out and back",
    "lines",
    (
        Query(
            each("racktwin_replacement_nodes", "phase", where=f'{DAEMON},phase!="in_service"'),
            "{{phase}}",
        ),
    ),
    good="few, and each phase empties again.",
    otherwise=(
        "`out` grows: repairs lag. `draining` grows: jobs do not let go. `racktwin policy explain "
        "replacement`."
    ),
)
_SPARES = Panel(
    "Spares",
    "stat",
    (Query(each("racktwin_replacement_spares", "what"), "{{what}}"),),
    good="`free` at least `wanted`. No data: the policy `replacement` does not run.",
    otherwise="without a free spare a node stays in service until it fails: repair, or add nodes.",
    width=6,
)
_BREAKER = Panel(
    "Replacement held back",
    "stat",
    (Query(f"max(racktwin_replacement_breaker_open{{{DAEMON}}})", "breaker"),),
    good="no: nodes are replaced as they become suspect.",
    otherwise="too many at once look like a common cause, not like bad nodes. An operator decides.",
    source="the breaker of the policy `replacement`",
    steps=((None, GOOD), (1.0, BAD)),
    states={0.0: ("no", GOOD), 1.0: ("yes", BAD)},
    width=6,
)
_READINGS = Panel(
    "Readings that are good, of those ever reported",
    "lines",
    (Query(f"min by (table) (instance_table:racktwin_readings_good:ratio{{{DAEMON}}})", "{{table}}"),),
    good="100 %.",
    otherwise="the rest is stale, untrusted or out of range: `racktwin sources` says which source stopped.",
    unit="percentunit",
)
_AGE = Panel(
    "Age of the last look at all parts",
    "stat",
    (Query(f"max(racktwin_health_age_seconds{{{DAEMON}}})", "age"),),
    good="below a minute.",
    otherwise="health is no longer judged: the log of the daemon says why.",
    unit="s",
    source="the alert RacktwinHealthIsOld",
    steps=((None, GOOD), (60.0, POOR)),
)

HEALTH = Board(
    "health",
    "Which parts are ill, which nodes are likeliest to fail, and do spares suffice?",
    (
        _LEVELS, _DOWN, _LIKELIEST, _EXPECTED, _FAULTS, _CLASSES, _PHASES, _SPARES, _BREAKER, _READINGS, _AGE,
    ),
)  # fmt: skip
