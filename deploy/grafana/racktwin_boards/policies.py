"""Board `policies`: authorities, commands, their outcomes, and their cost."""

from __future__ import annotations

from racktwin_boards.boards import Board
from racktwin_boards.panels import BAD, DAEMON, GOOD, Panel, Query, each

_AUTHORITY = Panel(
    "Authority of policies",
    "states",
    (Query(each("racktwin_policy_authority", "policy", "authority"), "{{policy}}: {{authority}}"),),
    good="as you armed them. A row begins when a level comes into force and ends with it.",
    otherwise="`racktwin policy set` changes it; `racktwin control decisions --kind event` says who did.",
    states={1.0: ("in force", GOOD)},
)
_MODE = Panel(
    "Mode of the site",
    "states",
    (Query(each("racktwin_mode", "mode"), "{{mode}}"),),
    good="`normal`.",
    otherwise="`racktwin status` says since when and why; `racktwin control resume` ends it.",
    states={1.0: ("in force", GOOD)},
    width=6,
)
_SUSPENDED = Panel(
    "Policies suspended",
    "stat",
    (Query(f"sum({each('racktwin_policy_suspended', 'policy')})", "policies"),),
    good="0.",
    otherwise=(
        "a policy broke its contract; its leases lapse. `racktwin policy list`, then the log of the daemon."
    ),
    source="the alert RacktwinPolicySuspended",
    steps=((None, GOOD), (1.0, BAD)),
    width=6,
)
_LEASES = Panel(
    "Entities under command",
    "lines",
    (Query(each("racktwin_leases", "control"), "{{control}}"),),
    good="0, or as many as there are reasons.",
    otherwise="`racktwin control decisions --control NAME` lists the commands with their reasons.",
)
_ADVISED = Panel(
    "Entities that advice would command besides",
    "lines",
    (Query(each("racktwin_advised_leases", "control"), "{{control}}"),),
    good="what you would do yourself. No data: no policy advises anything.",
    otherwise="before you arm a policy, see here what it would do.",
)
_COMMANDS = Panel(
    "Commands by sink and outcome, per second",
    "lines",
    (
        Query(
            f'max by (what) (rate(racktwin_messages_total{{{DAEMON},what=~"sinks[.].+"}}[$__rate_interval]))',
            "{{what}}",
        ),
    ),
    good="`sent` alone. A standby counts `not_leading`.",
    otherwise="`failed` or `expired`: the sink or the device does not answer; leases lapse by themselves.",
)
_LOST = Panel(
    "GPU-hours lost to caps in a day, by class of job",
    "bars",
    (
        Query(
            f'max by (class) (increase(racktwin_power_lost_gpu_hours_total{{{DAEMON},case="expected"}}[1d]))',
            "{{class}}",
        ),
    ),
    good="little, and of the class `idle` first.",
    otherwise="`racktwin power cost` has the account by feeder and job.",
)
_SAVED = Panel(
    "Energy not drawn under caps in a day, by class of job",
    "bars",
    (Query(f"max by (class) (increase(racktwin_power_saved_kwh_total{{{DAEMON}}}[1d]))", "{{class}}"),),
    good="more than the lost work will take once it is made up (`racktwin_power_net_kwh`).",
    otherwise="caps cost more than they save: they are there for a budget, not for energy.",
    unit="kwatth",
)
_PREDICTED = Panel(
    "Interruptions of jobs by node failures: predicted, and those that came",
    "lines",
    (Query(each("racktwin_replacement_interruptions_total", "what"), "{{what}}"),),
    good="`came` stays below `predicted`. No data: the policy `replacement` does not run.",
    otherwise=(
        "more come than were predicted: the odds are wrong here. `racktwin policy explain replacement`."
    ),
)
_TESTS = Panel(
    "Tests of nodes that were taken out",
    "stat",
    (Query(each("racktwin_replacement_tests_total", "what"), "{{what}}"),),
    good="more `bad` than `well`: those taken out were ill.",
    otherwise="most are well: replacement takes out healthy nodes; raise its threshold.",
)

POLICIES = Board(
    "policies",
    "Who may act, what is commanded, what became of it, and what did it cost?",
    (
        _AUTHORITY, _MODE, _SUSPENDED, _LEASES, _ADVISED, _COMMANDS, _LOST, _SAVED, _PREDICTED, _TESTS,
    ),
)  # fmt: skip
