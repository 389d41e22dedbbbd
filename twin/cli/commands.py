"""The table of all commands, their old names, and the way from words to a verb's parser.

A module is imported when one of its verbs is called: some bring much along.
"""

from __future__ import annotations

import importlib

from twin.catalogue import did_you_mean
from twin.cli.grammar import Noun, Parser, Verb, refuse

# Noun and verbs, with the module that holds each, two spaces, a sentence; *: the verb that a noun has alone.
_TABLE = """
init init  make a site file and a configuration from what is there
demo demo  run a simulated pod under control of the daemon until Ctrl-C
status operate.live  show leader, alarms, commands with their reasons, and sources
top top.command  watch racks, alarms and decisions live on this terminal
demand operate.demand  show what jobs hold and wait for, by queue and tenant, and requests of services
sources operate.sources  list who sends telemetry, and what of it is not used and why
calibration operate.calibration  show what was learned of the site or of one entity, and what drifted
site  site files: what stands where
    check site  check site files and report every error
    discover site  make a site file from the metadata in a recording
    split site  split a site that is larger than one daemon into parts and their hub
    diff operate.site_change  show what the site file of a daemon lacks of what is heard on the bus
    apply operate.site_change  approve that change, write the file and make the daemon read it
    acl acl  write Mosquitto's access list for a site
daemon  the daemon that mirrors a live site and acts by its policies
    run run  run the daemon: mirror a live site and act by its policies
    check run  check configuration and site of a daemon; --online asks each endpoint once
    reload operate.live  make the daemon read its configuration, site and tokens again
fleet  halls of several daemons below feeders that they share
    run* run  run the daemon of the hub, which lends budgets to the halls of a fleet
    status operate.fleet  show power, budget, GPUs, alarms and freshness of each hall
    budgets operate.fleet  show who holds what of each shared feeder, and why
    hold operate.fleet  keep the budget of a hall at or below a limit for a while
    release operate.fleet  take the limits back that people set on the budget of a hall
    history operate.fleet_history  show values, alarms, commands and decisions of all halls from ClickHouse
token  tokens of the HTTP interface
    add operate.token  make a token; its text is shown once
    list operate.token  list all tokens
    link operate.token  print the link to log in to the page as the administrator of this host
    revoke operate.token  revoke a token; then reload the daemon
alarm  active alarms
    list* operate.live  list active alarms, the most severe first
    ack operate.live  acknowledge an alarm
    shelve operate.live  shelve an alarm for a while
    unshelve operate.live  end the shelving of an alarm
device  health, replacement and maintenance of nodes, GPUs, racks, CDUs
    health* operate.health  show the health of the site or of one part
    show operate.live  show what is measured of a device beside what is expected of it
    plan operate.replacement  show which nodes are suspected or on their way out, why, what each waits for
    history operate.replacement  show what was decided, predicted and done, and how the predictions did
    report operate.replacement  write the record of a node, to attach to a ticket: markdown, or JSON
    repaired operate.live  report that a node was repaired and now waits for a test
    tested operate.live  report how a test of a node ended; it counts like the site's own burn-in
    maintain operate.live  open a maintenance window: no alarms and no commands there
    windows operate.live  list open maintenance windows
    close operate.live  close a maintenance window now
policy  authority, proposals and approvals of policies
    list* operate.live  list policies with authority, controls and reasons
    set operate.live  set the authority of a policy
    explain operate.explain  explain why a policy proposes what it proposes; alone, the policies and topics
    approvals operate.live  list what waits for approval, and the approvals in force
    approve operate.live  let a policy act for a while
    revoke operate.live  withdraw an approval
control  what is commanded: hold it, release it, ask for bounds
    decisions* operate.live  list the latest decisions with their reasons
    hold operate.live  freeze the site: no new values; protective moves still pass
    release operate.live  let all leases lapse; nothing is commanded until resume
    resume operate.live  end a hold or a release
    request operate.live  keep a control within bounds
    requests operate.live  list standing requests
    withdraw operate.live  withdraw a request
power  headroom, caps and their price, room for more racks, load targets
    show* operate.power  show the headroom of racks, feeders, CDUs, loops and the site, and their caps
    why operate.power  explain why a rack, node, GPU, job or feeder is capped, and what would lift it
    cost operate.power  show what caps cost in work and saved in energy
    fit operate.power  show how many more racks fit on a feeder, at a risk per hour
    targets operate.power  list what somebody outside lets the site or feeders draw
    target operate.power  let the site, or each of some feeders, draw no more than a limit
    withdraw operate.power  take a load target back
ledger operate.ledger  show the energy, GPU-hours, cost and carbon of a month, each of them once
forecast  what is expected of power, demand and weather
    list* operate.forecast  show forecasts of power and demand with 90 % bands
    send operate.outlook  send future values, such as prices or weather
    outlooks operate.outlook  list the future values that were sent
job  what runs, how much of its time it trains, what holds it back
    list* operate.jobs  list the running jobs
    show operate.jobs  show one job: time trained and lost, its end, the member that the others wait for
checkpoint  how often training jobs should save
    plan operate.checkpoint  plan the intervals of a daemon's jobs, or of a job that is only thought of
trace  recordings: made, replayed, summarised, fetched
    record record  record live MQTT messages to files for replay
    replay replay  replay recorded telemetry through the twin
    info site  summarise a recorded run or a capture
    list traces  list the public recordings and where they lie
    fetch traces  download public recordings and check them by SHA-256
    verify traces  check public recordings by size and SHA-256
    quarantine quarantine  list the input that a run left out, since the engine failed on it; repeat it
journal  the hash-chained journal of a run
    show journal  print entries as sentences
    verify journal  verify the hash chain; --key: prove the journal by its signed heads
    schema journal  print the JSON Schema of a line
    key journal  make the pair of keys that sign the journal's heads and verify them
simulation  simulated sites: scenarios, what-ifs, a plant on a broker
    run simulate  simulate a site under a scenario, for hours or months
    whatif whatif  run a scenario from the twin's state, with policies and without
    publish plant  run a simulated site on a broker in real time, to try the daemon
backtest  scores of forecasts and intervals on recordings
    load backtest.load  score forecasts of load and demand beside the last value, yesterday and EWMA
    failures backtest.failures  score which nodes fail next, beside ranking by decayed fault count
    lives backtest.lives  score which devices fail next by position, age and past, beside simpler ones
    checkpoint backtest.checkpoint  score intervals between saves beside Young, Daly and an oracle
    power-curves backtest.power_curves  score learned power curves on measured power limits
    stragglers backtest.stragglers  find what holds a training job back, by its recorded operations
models  priors of failure models that travel between sites
    export models  write the statistics of this site's failures, with noise and signed, for other sites
    merge models  merge the statistics of several sites into a prior
    import models  verify a prior, and print the setting that makes a daemon start from it
    show models  show in plain words what such a file says
completion completion  print the completion script of a shell
"""


def _nouns() -> dict[str, Noun]:
    nouns: dict[str, Noun] = {}
    for line in _TABLE.strip().splitlines():
        words, _, text = line.strip().partition("  ")
        name, _, module = words.partition(" ")
        if line.startswith(" "):
            noun = next(reversed(nouns))
            nouns[noun].verbs[name.rstrip("*")] = (f"twin.cli.{module}", text)
            if name.endswith("*"):
                nouns[noun] = nouns[noun]._replace(default=name.rstrip("*"))
        else:
            nouns[name] = Noun(text, {"": (f"twin.cli.{module}", text)} if module else {})
    return nouns


NOUNS = _nouns()

# Names of before, for one version. `A | B`: A if it takes all the words behind it, else B.
FORMER = {
    "ack": "alarm ack",
    "alarms": "alarm list",
    "approve": "policy approvals | policy approve",
    "authority": "policy list | policy set",
    "broker-acl": "site acl",
    "check": "site check",
    "decisions": "control decisions",
    "discover": "site discover",
    "explain": "policy explain",
    "forecasts": "forecast list",
    "health": "device health",
    "hold": "control hold",
    "maintenance": "device windows | device maintain",
    "maintenance --end": "device close",
    "node repaired": "device repaired",
    "node tested": "device tested",
    "outlook": "forecast outlooks | forecast send",
    "plant": "simulation publish",
    "record": "trace record",
    "record-info": "trace info",
    "release": "control release",
    "reload": "daemon reload",
    "replacement history": "device history",
    "replacement plan": "device plan",
    "replacement report": "device report",
    "replay": "trace replay",
    "request": "control requests | control request",
    "resume": "control resume",
    "run": "daemon run",
    "shelve": "alarm shelve",
    "simulate": "simulation run",
    "traces fetch": "trace fetch",
    "traces list": "trace list",
    "traces verify": "trace verify",
    "unshelve": "alarm unshelve",
    "whatif": "simulation whatif",
    "withdraw": "control withdraw",
}


def renamed(words: list[str]) -> tuple[list[str], str]:
    """(the call in today's form, a note on its old name or nothing)."""
    for count in (2, 1):
        old = " ".join(words[:count])
        if old in FORMER and len(words) >= count:
            alone, _, given = FORMER[old].partition(" | ")
            rest = words[count:]
            asked = [word for word in rest if word not in ("-h", "--help")]
            beyond = parser_of(*alone.split()).parse_known_args(asked)[1] if given else []
            new = given if beyond else alone
            note = f"`racktwin {old}` is now `racktwin {new}`; the old name goes with the next version"
            return [*new.split(), *rest], note
    return words, ""


def find(words: list[str]) -> tuple[str, str, list[str]]:
    """(noun, verb, the words behind them) of a call. A wrong one ends the program with what was expected."""
    name, rest = words[0], words[1:]
    if name not in NOUNS:
        verbs = {verb: noun for noun, each in NOUNS.items() for verb in each.verbs if verb}
        near = did_you_mean(name, NOUNS) or (
            f"; did you mean {verbs[name]} {name}?" if name in verbs else did_you_mean(name, FORMER)
        )
        refuse(f"{name!r} is no command{near or ': expected ' + ', '.join(NOUNS)}", "racktwin")
    noun = NOUNS[name]
    if "" in noun.verbs:
        return name, "", rest
    if rest and rest[0] in noun.verbs:
        return name, rest[0], rest[1:]
    if noun.default and (not rest or rest[0].startswith("-")):
        return name, noun.default, rest
    what = f"{rest[0]!r} is no verb of it" if rest else "a verb is missing"
    near = did_you_mean(rest[0], noun.verbs) if rest else ""
    refuse(f"racktwin {name}: {what}{near or ': expected ' + ', '.join(noun.verbs)}", f"racktwin {name}")


def verb_of(noun: str, verb: str) -> Verb:
    """A verb, from its module."""
    found: Verb = importlib.import_module(NOUNS[noun].verbs[verb][0]).VERBS[f"{noun} {verb}".strip()]
    return found


def parser_of(noun: str, verb: str) -> Parser:
    """The parser of a verb; the result has the verb itself as `verb`, and its words as `command`."""
    made, command = verb_of(noun, verb), f"{noun} {verb}".strip()
    parser = Parser(f"racktwin {command}", NOUNS[noun].verbs[verb][1], made)
    parser.set_defaults(verb=made, command=command)
    return parser


EXIT_CODES = """
exit codes: 0 done; 1 the answer is no, or nobody answers; 2 a wrong call; 78 the daemon's files are wrong;
130 interrupted"""


def overview() -> str:
    """The help of racktwin itself: every noun with its verbs."""
    width = max(map(len, NOUNS))
    lines = []
    for name, noun in NOUNS.items():
        lines.append(f"  {name:<{width}}  {noun.text}")
        if "" not in noun.verbs:
            lines.append(f"  {'':<{width}}    {' | '.join(noun.verbs)}")
    return "\n".join([*lines, EXIT_CODES])


def help_of(name: str) -> str:
    """The help of a noun: its verbs, each with its summary."""
    noun = NOUNS[name]
    width = max(map(len, noun.verbs))
    lines = [f"  {verb:<{width}}  {text}" for verb, (_, text) in noun.verbs.items()]
    alone = f"\n\nalone: racktwin {name} {noun.default}" if noun.default else ""
    examples = (f"  racktwin {name} {verb} {verb_of(name, verb).examples[0]}".rstrip() for verb in noun.verbs)
    return (
        "\n".join(
            (f"usage: racktwin {name} VERB ...\n\n{noun.text}\n\nverbs:", *lines, "\nexamples:", *examples)
        )
        + alone
    )
