"""Table of all commands, their old names, and the lookup of a verb's parser.

The module of a verb is imported only when that verb is called, since some modules import large libraries.
"""

from __future__ import annotations

import importlib
import sys

from twin.catalogue import did_you_mean
from twin.cli.grammar import Noun, Parser, Verb, refuse

# One line per noun and verb: name, module, two spaces, summary. `*` marks the default verb of a noun, and `+`
# one that is the default only with --config, since it starts a daemon.
_TABLE = """
init init  discover the site, and write its site file and a configuration
demo demo  run a simulated pod and a daemon that controls it, through a story of faults
status operate.live  show the leader, alarms, commands with their reasons, and sources
top top.command  watch racks, alarms and decisions live on this terminal
demand operate.demand  show GPUs in use and in the queue, by queue and tenant, and requests to services
sources operate.sources  list the sources of telemetry, and the data that is not used, with the reason
calibration operate.calibration  show the learned parameters of the site or of one entity, and their drift
site  site files: the equipment of a site and its topology
    check site  check site files and report every error
    discover site  make a site file from the metadata in a recording
    split site  split a site that is too large for one daemon into parts and a hub
    diff operate.site_change  show equipment that reports telemetry but is missing in the site file
    apply operate.site_change  approve the change of `site diff`, write the site file and reload the daemon
    acl acl  write Mosquitto's access list for a site
daemon  the daemon that mirrors a live site and acts by its policies
    run run  run the daemon: mirror a live site and act by its policies
    check run  check the configuration and the site file; --online also asks each endpoint once
    reload operate.live  reload the configuration, the site file and the tokens of the daemon
fleet  several halls, each with its daemon, that share feeders and budgets
    run+ run  run the daemon of the hub, which lends budgets to the halls of a fleet
    status operate.fleet  show power, budget, GPUs, alarms and freshness of each hall
    budgets operate.fleet  show each hall's share of every shared feeder, loop and contract, with the reason
    hold operate.fleet  keep the budget of a hall at or below a limit for a while
    release operate.fleet  remove the limits that people set on the budget of a hall
    history operate.fleet_history  query values, alarms, commands and decisions of all halls in ClickHouse
token  tokens of the HTTP interface
    add operate.token  create a token and print it once
    list operate.token  list all tokens
    link operate.token  print a link that logs in to the page as the administrator of this host
    revoke operate.token  revoke a token; the daemon refuses it after `racktwin daemon reload`
alarm  active alarms: list, acknowledge and shelve them
    list* operate.live  list active alarms, the most severe first
    ack operate.live  acknowledge an alarm
    shelve operate.live  shelve an alarm for a while
    unshelve operate.live  end the shelving of an alarm before its time
device  health, replacement and maintenance of nodes, GPUs, racks and CDUs
    health* operate.health  show the health of the site or of one part
    show operate.live  compare the measured values of a device with the expected ones
    plan operate.replacement  list nodes in replacement, with phase, reason and what each waits for
    history operate.replacement  list decisions, predictions and repairs of nodes, and score the predictions
    report operate.replacement  write the record of a node for a ticket, as Markdown or JSON
    repaired operate.live  report the repair of a node; the node then waits for a test
    tested operate.live  report the result of a test of a node; it counts like the site's own burn-in
    maintain operate.live  open a maintenance window: its entities raise no alarms and get no commands
    windows operate.live  list open maintenance windows
    close operate.live  close a maintenance window now
policy  authority, proposals and approvals of policies
    list* operate.live  list policies with their authority, controls and reasons
    set operate.live  set the authority of a policy
    explain operate.explain  explain the proposals of a policy; without arguments: list policies and topics
    approvals operate.live  list proposals that wait for approval, and approvals in force
    approve operate.live  approve the proposals of a policy on a control for a while
    revoke operate.live  revoke an approval
control  commands: list them, hold or release the site, request bounds
    decisions* operate.live  list the latest decisions with their reasons
    hold operate.live  freeze the commanded values; moves in the protective direction still pass
    release operate.live  let all leases expire, and command nothing until `racktwin control resume`
    resume operate.live  end a hold or a release
    request operate.live  request that a control stays within bounds
    requests operate.live  list the requests in force
    withdraw operate.live  withdraw a request
power  headroom, power caps and their cost, room for more racks, load targets
    show* operate.power  show the headroom of racks, feeders, CDUs, loops and the site, and their caps
    why operate.power  explain why a rack, node, GPU, job or feeder is capped, and what would lift the cap
    cost operate.power  show the work that power caps cost and the energy that they saved
    fit operate.power  compute how many more racks a feeder can carry at a given risk per hour
    targets operate.power  list the load targets of the site and of feeders
    target operate.power  set a load target: the most that the site, or each named feeder, may draw
    withdraw operate.power  withdraw a load target
ledger operate.ledger  show the energy, GPU-hours, cost and carbon of a month, without double counting
forecast  forecasts of power, demand and weather
    list* operate.forecast  show forecasts of power and demand with 90 % bands
    send operate.outlook  send an outlook: known future values, such as prices or weather
    outlooks operate.outlook  list the outlooks that the daemon holds
job  running jobs: training time, losses and stragglers
    list* operate.jobs  list the running jobs
    show operate.jobs  show one job: time trained and lost, expected end, and its straggler
checkpoint  checkpoint intervals of training jobs
    plan operate.checkpoint  plan checkpoint intervals for the daemon's jobs, or for a hypothetical job
trace  recordings: record, replay, summarise and fetch them
    record record  record live MQTT messages to files for replay
    replay replay  replay recorded telemetry through the twin
    info site  summarise a recorded run or a capture
    list traces  list the public recordings and their folders
    fetch traces  download public recordings and check them by SHA-256
    verify traces  check public recordings by size and SHA-256
    quarantine quarantine  list inputs that a run set aside because the engine failed on them
journal  the hash-chained journal of a run
    show journal  print entries as sentences
    verify journal  verify the hash chain and, with --key, the signed heads
    schema journal  print the JSON Schema of an entry
    key journal  create the key pair that signs and verifies the journal's heads
simulation  simulated sites: scenarios, what-if runs, a plant on a broker
    run simulate  simulate a site under a scenario, for hours or months
    whatif whatif  run a scenario from the twin's state, once with policies and once without
    publish plant  run a simulated site on a broker in real time, to try the daemon
backtest  scores of forecasts and checkpoint intervals on recordings
    load backtest.load  score forecasts of load and demand against last value, yesterday and EWMA
    failures backtest.failures  score failure forecasts of nodes against a ranking by decayed fault count
    lives backtest.lives  score failure forecasts by position, age and history against simpler rankings
    checkpoint backtest.checkpoint  score checkpoint intervals against Young, Daly and an oracle
    power-curves backtest.power_curves  score learned power curves on measured power limits
    stragglers backtest.stragglers  find the straggler of a training job in its recorded operations
models  priors of failure models that sites exchange
    export models  write the failure statistics of this site for other sites, with noise and a signature
    merge models  merge the statistics of several sites into a prior
    import models  verify a prior, and print the setting that makes a daemon start from it
    show models  describe an export or a prior in plain words
completion completion  print the completion script of a shell
"""


def _nouns() -> dict[str, Noun]:
    nouns: dict[str, Noun] = {}
    for line in _TABLE.strip().splitlines():
        words, _, text = line.strip().partition("  ")
        name, _, module = words.partition(" ")
        if line.startswith(" "):
            noun = next(reversed(nouns))
            verb = name.rstrip("*+")
            nouns[noun].verbs[verb] = (f"twin.cli.{module}", text)
            if verb != name:
                nouns[noun] = nouns[noun]._replace(default=verb, starts=name.endswith("+"))
        else:
            nouns[name] = Noun(text, {"": (f"twin.cli.{module}", text)} if module else {})
    return nouns


NOUNS = _nouns()

# Old names, kept for one version. `A | B` means: A if it accepts all remaining words, else B.
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
    """Translate an old command name: (words of the current command, deprecation note or "")."""
    for count in (2, 1):
        old = " ".join(words[:count])
        if old in FORMER and len(words) >= count:
            alone, _, given = FORMER[old].partition(" | ")
            rest = words[count:]
            asked = [word for word in rest if word not in ("-h", "--help")]
            beyond = parser_of(*alone.split()).parse_known_args(asked)[1] if given else []
            new = given if beyond else alone
            note = f"`racktwin {old}` is now `racktwin {new}`; the next version removes the old name"
            return [*new.split(), *rest], note
    return words, ""


def find(words: list[str]) -> tuple[str, str, list[str]]:
    """Return (noun, verb, remaining words). An unknown command ends the program with exit code 2."""
    name, rest = words[0], words[1:]
    if name not in NOUNS:
        verbs = {verb: noun for noun, each in NOUNS.items() for verb in each.verbs if verb}
        near = did_you_mean(name, NOUNS) or (
            f"; did you mean {verbs[name]} {name}?" if name in verbs else did_you_mean(name, FORMER)
        )
        refuse(f"unknown command {name!r}{near or ': expected ' + ', '.join(NOUNS)}", "racktwin")
    noun = NOUNS[name]
    if "" in noun.verbs:
        return name, "", rest
    if rest and rest[0] in noun.verbs:
        return name, rest[0], rest[1:]
    is_named = bool(rest) and not rest[0].startswith("-")
    has_config = any(word.partition("=")[0] == "--config" for word in rest)
    if noun.default and not is_named and (has_config or not noun.starts):
        return name, noun.default, rest
    if not rest:
        sys.stderr.write(help_of(name) + "\n\n")
    what = f"unknown verb {rest[0]!r}" if is_named else "a verb is missing"
    near = did_you_mean(rest[0], noun.verbs) if is_named else ""
    refuse(f"racktwin {name}: {what}{near or ': expected ' + ', '.join(noun.verbs)}", f"racktwin {name}")


def verb_of(noun: str, verb: str) -> Verb:
    """Import the module of a verb, and return the verb."""
    found: Verb = importlib.import_module(NOUNS[noun].verbs[verb][0]).VERBS[f"{noun} {verb}".strip()]
    return found


def parser_of(noun: str, verb: str) -> Parser:
    """Return the parser of a verb. Parsed arguments have the verb as `verb` and its words as `command`."""
    made, command = verb_of(noun, verb), f"{noun} {verb}".strip()
    parser = Parser(f"racktwin {command}", NOUNS[noun].verbs[verb][1], made)
    parser.set_defaults(verb=made, command=command)
    return parser


EXIT_CODES = """
exit codes:
  0    success
  1    failure, or a negative answer: an invalid file or value, a broken chain, a daemon that does not reply
  2    wrong usage: an unknown command or option, or a missing argument
  78   the configuration or the site file keeps the daemon from starting
  130  interrupted by Ctrl-C"""


def overview() -> str:
    """Return the help of `racktwin`: every noun with its verbs, and the exit codes."""
    width = max(map(len, NOUNS))
    lines = ["usage: racktwin COMMAND [VERB] [ARGUMENT ...]; `racktwin COMMAND --help` has details", ""]
    for name, noun in NOUNS.items():
        lines.append(f"  {name:<{width}}  {noun.text}")
        if "" not in noun.verbs:
            lines.append(f"  {'':<{width}}    {' | '.join(noun.verbs)}")
    return "\n".join([*lines, EXIT_CODES])


def help_of(name: str) -> str:
    """Return the help of a noun: its verbs, each with its summary."""
    noun = NOUNS[name]
    width = max(map(len, noun.verbs))
    lines = [f"  {verb:<{width}}  {text}" for verb, (_, text) in noun.verbs.items()]
    options = " --config FILE" if noun.starts else ""
    alone = f"\n\nwithout a verb: racktwin {name}{options} is racktwin {name} {noun.default}{options}"
    examples = (f"  racktwin {name} {verb} {verb_of(name, verb).examples[0]}".rstrip() for verb in noun.verbs)
    return "\n".join(
        (f"usage: racktwin {name} VERB ...\n\n{noun.text}\n\nverbs:", *lines, "\nexamples:", *examples)
    ) + (alone if noun.default else "")
