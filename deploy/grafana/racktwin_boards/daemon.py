"""Board `daemon`: whether racktwin itself is well: ticks, parts, messages, journal, alarm load."""

from __future__ import annotations

from racktwin_boards.boards import Board
from racktwin_boards.panels import BAD, DAEMON, GOOD, POOR, Panel, Query

_FATES = f'racktwin_messages_total{{{DAEMON},what=~"staged|ignored|bad|dropped|failed"}}'
_LOSSES = f'racktwin_counted_total{{{DAEMON},what=~"notes_dropped|ticks_not_traced|after_failed"}}'
_STORE = f'racktwin_messages_total{{{DAEMON},what=~"history[.](dropped|write_errors|damaged)"}}'
_LEADS = Panel(
    "Leader and standby",
    "states",
    (Query(f"racktwin_leads{{{DAEMON}}}", "{{instance}}"),),
    good="one leads at any time.",
    otherwise="none, or two: see the election (etcd) and the alarms of both.",
    states={0.0: ("stands by", "text"), 1.0: ("leads", GOOD)},
)
_AGE = Panel(
    "Age of the last tick",
    "lines",
    (Query(f"racktwin_tick_age_seconds{{{DAEMON}}}", "{{instance}}"),),
    good="below the length of a tick.",
    otherwise="the loop stands still: a disk that hangs (the journal is written in the tick), or the host.",
    unit="s",
    source="15 s: the alert RacktwinDoesNotTick at ticks of up to 3 s",
    steps=((None, GOOD), (15.0, BAD)),
)
_TOOK = Panel(
    "Ticks: how long they take, how late they begin",
    "lines",
    (
        Query(f"racktwin_tick_took_seconds{{{DAEMON}}}", "takes, {{percentile}} % {{instance}}"),
        Query(f"racktwin_tick_late_seconds{{{DAEMON}}}", "late, {{percentile}} % {{instance}}"),
        Query(f"racktwin_tick_every_seconds{{{DAEMON}}}", "length of a tick {{instance}}"),
    ),
    good="well below the length of a tick.",
    otherwise="near it ticks are skipped: the host is too slow or busy. Give the daemon a core of its own.",
    unit="s",
)
_SKIPPED = Panel(
    "Ticks that did not happen",
    "lines",
    (Query(f"instance:racktwin_ticks_skipped:ratio_rate5m{{{DAEMON}}}", "{{instance}}"),),
    good="0.",
    otherwise="above 5 % judgement comes late: see how long ticks take, and what else runs on the host.",
    unit="percentunit",
    source="the alert RacktwinSkipsTicks",
    steps=((None, GOOD), (0.05, POOR)),
)
_PARTS = Panel(
    "Sources, sinks and services",
    "states",
    (Query(f"racktwin_part_running{{{DAEMON}}}", "{{kind}} {{part}} {{instance}}"),),
    good="all run. On a standby sinks wait.",
    otherwise=(
        "a source: its readings grow stale. A sink: commands do not arrive. `racktwin status` has the error."
    ),
    states={0.0: ("down", BAD), 1.0: ("runs", GOOD)},
    height=10,
)
_MESSAGES = Panel(
    "Messages by fate, per second",
    "lines",
    (
        Query(
            f"rate({_FATES}[$__rate_interval])",
            "{{what}} {{instance}}",
        ),
    ),
    good="`staged` flat, `bad` and `dropped` 0.",
    otherwise="`bad`: a publisher does not keep to the format. `dropped`: more arrive than a tick takes.",
    height=10,
)
_JOURNAL = Panel(
    "Losses in journal, trace and services, in an hour",
    "lines",
    (
        Query(
            f"increase({_LOSSES}[1h])",
            "{{what}} {{instance}}",
        ),
    ),
    good="0.",
    otherwise="free space on the file system of the state folder; then the log of the daemon.",
    source="the alert RacktwinLosesRecords",
    steps=((None, GOOD), (1.0, BAD)),
)
_HISTORY = Panel(
    "History: samples not kept, in an hour",
    "lines",
    (
        Query(
            f"increase({_STORE}[1h])",
            "{{what}} {{instance}}",
        ),
    ),
    good="0.",
    otherwise="`racktwin alarm list` has the error of the store.",
)
_LOAD = Panel(
    "Alarms in an hour, for one operator",
    "lines",
    (
        Query(f"racktwin_alarms_last_hour{{{DAEMON}}}", "raised in the last hour {{instance}}"),
        Query(f"racktwin_alarms_stale{{{DAEMON}}}", "older than a day {{instance}}"),
        Query(f"racktwin_alarms_chattering{{{DAEMON}}}", "chattering {{instance}}"),
    ),
    good="about 6 an hour, none chattering, fewer than 5 older than a day.",
    otherwise="beyond 12 an hour nobody can follow: mend what chatters, shelve what is known.",
    source="ISA-18.2 / IEC 62682: at most 12 an hour",
    steps=((None, GOOD), (12.0, POOR)),
)
_REFUSED = Panel(
    "Requests refused, per second",
    "lines",
    (Query(f"rate(racktwin_refused_total{{{DAEMON}}}[$__rate_interval])", "{{what}} {{instance}}"),),
    good="near 0. No data: none was refused.",
    otherwise=(
        "`no such token` at a rate is somebody guessing: the journal's `access` lines name the addresses."
    ),
)
_PROCESS = Panel(
    "Memory of the process",
    "lines",
    (Query(f"process_resident_memory_bytes{{{DAEMON}}}", "{{instance}}"),),
    good="flat after the first hours.",
    otherwise="grows without end: restart it at a quiet time (leases outlast that) and file an issue.",
    unit="bytes",
)
_LEFT_OUT = Panel(
    "Series that these boards lack",
    "stat",
    (
        Query(f"sum(racktwin_series_left_out{{{DAEMON}}})", "of the site"),
        Query(f"max(racktwin_forecasts_left_out{{{DAEMON}}})", "of forecasts"),
        Query(f"max(racktwin_explained_left_out{{{DAEMON}}})", "of policies"),
    ),
    good="0, or no data for the site.",
    otherwise="the daemon bounds its series: scrape fewer tables (`params` of the scrape configuration).",
    source="the alert RacktwinLeavesOutSeries",
    steps=((None, GOOD), (1.0, POOR)),
)

DAEMON_BOARD = Board(
    "daemon",
    "Is racktwin itself well: ticks, parts, messages, journal, alarm load?",
    (
        _LEADS, _AGE, _TOOK, _SKIPPED, _PARTS, _MESSAGES, _JOURNAL, _HISTORY, _LOAD, _REFUSED, _PROCESS,
        _LEFT_OUT,
    ),
)  # fmt: skip
