"""BMC wiring: sources and sinks for Redfish and IPMI DCMI, made from a configuration for one site.

Each section brings a source that reads back, and sinks where it commands. A GPU whose node has an agent
online is left to the agent, whose leases hold without the daemon; so is the stop of a system that an agent
has begun.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from connectors.bmc import (
    GPU_CAP,
    MAX_SECRET,
    NODE_CAP,
    BmcSink,
    BmcSource,
    DcmiAccess,
    DcmiBmc,
    DcmiCommand,
    Fleet,
    Key,
    PowerSink,
    Switch,
)
from connectors.slurm import find_node
from twin.catalogue import NS, ConfigError, Signal, find_control, signal_of
from twin.config import Dcmi, Loaded, Redfish, dpu_of, hosts_of, sections
from twin.engine import Engine
from twin.site import Site
from twin.telemetry import Freshness
from twin.wiring.schedulers import Schedulers, WiringContext

if TYPE_CHECKING:
    import aiohttp

    from connectors.bmc import RedfishBmc, RedfishDpu

IPMI = 623  # port
CONTROLS = {"gpus": GPU_CAP, "node": NODE_CAP}
ONLINE, STOP = 0.0, 1.0  # of node.agent_state, of node.power_readback_state
STOPPING_S = 60.0  # so long a system may take to stop once its agent is gone; source: estimate


def make_actuators(context: WiringContext, out: Schedulers) -> None:
    """Add all that the configuration asks for to `out`. Raises ConfigError; starts nothing."""
    loaded, site = context.loaded, context.site
    problems = actuator_faults(loaded, site)
    if problems:
        raise ConfigError(problems)
    for _, section, _ in sections(loaded.config.redfish, loaded.config.dcmi):
        _secret(loaded, section)  # so that a file that is absent is refused now
    agents = Agents(site, context.engine, context.sink.now_ns())

    def add(name: str, fleet: Fleet, period_s: float, switches: dict[int, Switch]) -> None:
        source = BmcSource(name, fleet, period_s, agents.why_theirs, agents.power_level)
        out.sources.append(source)
        sinks: list[BmcSink | PowerSink] = []
        if fleet.of:
            sinks.append(BmcSink(name, site, fleet, context.sink, agents.why_theirs, agents.found_before))
        if switches:
            power = f"{name}-power"
            sinks.append(PowerSink(power, site, switches, context.sink, agents.power_level, fleet.close))
        for sink in sinks:
            out.add(sink, sink.counts)
            out.works[f"{sink.name}-work"] = sink.run
            out.faults[sink.name] = partial(getattr, sink, "fault")

    if loaded.config.redfish:  # only here: a site without Redfish need not load what speaks to it
        from connectors.bmc import RedfishDpu
    for i, part in enumerate(loaded.config.redfish):
        http = Http()
        services = _redfish(context, part, f"$.redfish[{i}]", http)
        fleet = Fleet(services, part.at_once, http.close)
        switches: dict[int, Switch] = {}
        if part.power:
            switches |= {x.node: x.switch for x in services if not isinstance(x, RedfishDpu)}
        add("redfish" if i == 0 else f"redfish-{i}", fleet, part.period_s, switches)
    for i, dcmi in enumerate(loaded.config.dcmi):
        bmcs = _dcmi(loaded, dcmi, site)
        switches = {x.node: x.switch for x in bmcs} if dcmi.power else {}
        add("dcmi" if i == 0 else f"dcmi-{i}", Fleet(bmcs, dcmi.at_once), dcmi.period_s, switches)


def actuator_faults(loaded: Loaded, site: Site) -> list[str]:
    """Names of nodes that the site does not have, and caps that it does not know."""
    out: list[str] = []
    config = loaded.config
    for where, part, what in sections(config.redfish, config.dcmi):
        for host, name in hosts_of(part).items():
            node = find_node(site, dpu_of(name)[0] if isinstance(part, Redfish) else name)
            at = f"{loaded.path}: $.{where}.bmcs.{host[:60]}"
            if node is None:
                out.append(f"{at}: the site has no node {name[:80]!r}; expected a full path")
                continue
            for control in sorted(CONTROLS[name] for name in what):
                first = node if control == NODE_CAP else int(site.gpu_start_of_node[node])
                gpus = int(site.gpu_start_of_node[node + 1]) - int(site.gpu_start_of_node[node])
                if control == GPU_CAP and gpus == 0:
                    out.append(f"{at}: {name[:80]} has no GPUs; expected `command` without gpus")
                elif math.isnan(site.envelopes[control].safe[first]):
                    out.append(
                        f"{at}: {control} of {name[:80]} has no limits and no safe value; expected them in "
                        "its profile or in `controls` of the site file"
                    )
    return out[:20]


def reading_notes(loaded: Loaded, site: Site) -> list[str]:
    """Notes on read-backs that come more seldom than `periods_s` of the site allows."""
    out: list[str] = []
    for where, part, _ in sections(loaded.config.redfish, loaded.config.dcmi):
        keys = ["node.power_cap_readback_w", "node.power_readback_state"]
        if isinstance(part, Redfish):
            keys.append("gpu.power_limit_w")
        for key in keys:
            signal = signal_of(key)
            freshness = Freshness(signal.table, site.file.periods_s)
            expected_s = freshness.period_s[signal.row]
            if freshness.fixed[signal.row] and part.period_s > freshness.stale_s[signal.row]:
                out.append(
                    f"{where}.period_s is {part.period_s:g} s, and periods_s sets {expected_s:g} s "
                    f"for {key}: between looks it is stale; leave it out there, and the cadence is learned"
                )
    return out


class Agents:
    """Nodes whose controls an agent carries out, as an engine knows them, looked up anew each time.

    `since_ns`: when the sinks were made, by the clock of the leases.
    """

    def __init__(self, site: Site, engine: Callable[[], Engine], since_ns: int = 0) -> None:
        self._site, self._engine = site, engine
        control = find_control(GPU_CAP)
        assert control is not None  # it is of the catalogue
        self._signal, self._level = signal_of("node.agent_state"), signal_of("node.power_readback_state")
        self._lease_ns = round(control.lease_s * NS)
        self._since_ns = since_ns

    def why_theirs(self, key: Key) -> str:
        """Return the reason why the agent owns a cap; "" if it does not.

        An agent that went offline may still let its last lease lapse: it is waited for that long.
        """
        if key.control != GPU_CAP:
            return ""
        node = int(self._site.node_of_gpu[key.entity])
        value = self._value(self._signal, node)
        if value is None:
            return ""
        if value == ONLINE:
            return "the node's agent carries it out"
        gone_ns = self._age_s(node) * NS
        return "the node's agent went offline just now" if gone_ns < self._lease_ns else ""

    def found_before(self, key: Key) -> float:
        """Return the cap that was found before a lease that began before the sinks; NaN if none is known."""
        lease = self._engine().arbiter.leases[key.control]
        return float(lease.found[key.entity]) if lease.begun_ns[key.entity] <= self._since_ns else math.nan

    def power_level(self, node: int) -> float | None:
        """Level of a node's power as last read, NaN if unknown; None where no agent of it is online.

        One that stops its system ends before that has stopped.
        """
        agent, level = self._value(self._signal, node), self._value(self._level, node)
        if agent == ONLINE:
            return math.nan if level is None else level
        stops = agent is not None and level == STOP and self._age_s(node) < STOPPING_S
        return level if stops else None

    def _age_s(self, node: int) -> float:
        """Age of the last word on a node's agent."""
        state = self._engine().state
        return float(np.asarray(state.tables["node"].age_s(self._signal, state.now_ns))[node])

    def _value(self, signal: Signal, node: int) -> float | None:
        """A signal of a node where it is current."""
        state = self._engine().state
        table = state.tables["node"]
        if node >= table.value.shape[1] or not table.current(signal, state.now_ns, node):
            return None
        return float(table.value[signal.row, node])


def _redfish(context: WiringContext, part: Redfish, where: str, http: Http) -> list[RedfishBmc | RedfishDpu]:
    # Only here: a site without Redfish need not load what speaks to it.
    from connectors.bmc import RedfishBmc, RedfishCaps, RedfishClient, RedfishDpu

    loaded, site, may_act = context.loaded, context.site, context.sink.may_act
    secret = partial(_secret, loaded, part)
    tls = _trust(loaded, part, where) if part.scheme == "https" else None
    own = _own_bmcs(loaded, site)
    out: list[RedfishBmc | RedfishDpu] = []
    for host, whose in hosts_of(part).items():
        name, side = dpu_of(whose)
        node = find_node(site, name)
        assert node is not None  # it was checked
        first, last = (int(x) for x in site.gpu_start_of_node[node : node + 2])
        most_w = {Key(NODE_CAP, node): float(site.envelopes[NODE_CAP].high[node])}
        most_w |= {Key(GPU_CAP, g): float(site.envelopes[GPU_CAP].high[g]) for g in range(first, last)}
        client = RedfishClient(
            f"{part.scheme}://{host}", part.user, secret, http, timeout_s=part.timeout_s, tls=tls
        )
        client.may_change = may_act
        if side:
            out.append(RedfishDpu(host, node, side, client))
            continue
        caps = RedfishCaps(
            command=part.command,
            most_w={key: w for key, w in most_w.items() if math.isfinite(w)},
            gpu_ids=part.gpu_ids,
            dpu_ids=part.dpu_ids,
            own_bmc=own.get(node, ()),
            node_control=part.node_control,
            system=part.system,
            power=part.power,
        )
        out.append(RedfishBmc(host, node, client, range(first, last), caps))
    return out


def _own_bmcs(loaded: Loaded, site: Site) -> dict[int, list[int]]:
    """Numbers of the DPUs that have BMCs of their own, by node: one counter has one source."""
    out: dict[int, list[int]] = {}
    for part in loaded.config.redfish:
        for name, side in map(dpu_of, hosts_of(part).values()):
            if side and (node := find_node(site, name)) is not None:
                out.setdefault(node, []).append(side)
    return out


def _dcmi(loaded: Loaded, part: Dcmi, site: Site) -> list[DcmiBmc]:
    out: list[DcmiBmc] = []
    high_w = site.envelopes[NODE_CAP].high
    options = () if part.cipher is None else ("-C", str(part.cipher))
    for host, name in hosts_of(part).items():
        node = find_node(site, name)
        assert node is not None  # it was checked
        address, _, port = host.partition(":")
        most_w = float(high_w[node])
        access = DcmiAccess(
            host=address,
            port=int(port or IPMI),
            user=part.user,
            secret=partial(_secret, loaded, part),
            timeout_s=part.timeout_s,
            program=part.program,
            options=options,
        )
        command = DcmiCommand(part.correction_ms, part.exception) if part.command else None
        out.append(DcmiBmc(host, node, access, most_w if math.isfinite(most_w) else 0xFFFF, command))
    return out


class Http:
    """The session of aiohttp that all services of a section share, made where it is first needed."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def __call__(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                # a look takes seconds, the next is long after: idle connections of all BMCs would be too many
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=2, keepalive_timeout=3.0),
                headers={
                    "Accept": "application/json",
                    "Accept-Encoding": "identity",
                    "User-Agent": "racktwin",
                    "OData-Version": "4.0",
                },
            )
        return self._session

    async def close(self) -> None:
        """End its connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _secret(loaded: Loaded, part: Redfish | Dcmi) -> str:
    """The password as its file has it now. Raises ConfigError; never quotes it."""
    text, most = loaded.secret(part.password_file) or "", MAX_SECRET if isinstance(part, Dcmi) else 1000
    if len(text) > most or not text.isprintable():
        raise ConfigError(
            f"{loaded.path}: {part.password_file}: a password of {len(text)} characters; expected one line "
            f"of at most {most}"
        )
    return text


def _trust(loaded: Loaded, part: Redfish, where: str) -> Any:
    try:
        context = ssl.create_default_context(
            cafile=None if part.ca_file is None else str(loaded.file(part.ca_file))
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{loaded.path}: {where}.ca_file: expected certificates in PEM: {error}") from error
    if not part.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
