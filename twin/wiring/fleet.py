"""Fleet wiring: the parts of section `fleet`, made for a hall or for the hub, and the summary of a hall."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from connectors.nats import (
    BudgetDecoder,
    BudgetSink,
    BudgetSource,
    HallSummary,
    NatsLink,
    NatsSettings,
    SummaryDecoder,
    SummarySource,
    budget_subject,
    encode,
    hall_problem,
    halls_of,
    summary_subject,
)
from twin.alerts import reported_counts
from twin.catalogue import ConfigError, ConnectorError, clean
from twin.config import FleetLink, Loaded, Tls, explain_topic
from twin.contracts import HallHead, HallHeadsRecord, Sink, Source, Value, measured
from twin.engine import Engine
from twin.site import Site
from twin.telemetry import GOOD
from twin.wiring.flex import float_of

NEAR_PU = 0.8  # of its budget, from which on caps hold a hall back; below, only idle GPUs. source: estimate
BEYOND_PU = 0.1  # of its budget: a hall that is held back wants so much more each time. source: estimate
SEVERITIES = ("critical", "warning", "info")


@dataclass(frozen=True)
class HallState:
    """State of the daemon of a hall beside its engine: its epoch, alarms and the journal on the disk."""

    epoch: Callable[[], int]
    alarms: Callable[[], dict[str, int]]
    journal: Callable[[], tuple[str, int, str]]  # run, lines, head
    may_act: Callable[[], bool]


@dataclass
class FleetInterface:
    """The parts of section `fleet`, to be started: of a hall with a publisher, of a hub with a sink, of a hub
    that is a hall of another with both. `links`: by the path of their sections."""

    sources: list[Source] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    publisher: SummaryPublisher | None = None
    decoder: SummaryDecoder | None = None
    links: dict[str, NatsLink] = field(default_factory=dict)

    def heads(self) -> HallHeadsRecord | None:
        """The last reported journal heads of halls; None if there are none."""
        newest = {} if self.decoder is None else self.decoder.newest
        heads = {
            hall: HallHead(summary.run, summary.lines, summary.head, summary.epoch, summary.sequence)
            for hall, summary in sorted(newest.items())
            if summary.head
        }
        return HallHeadsRecord(heads=heads) if heads else None


class SummaryPublisher:
    """Publishes the state of a hall every few seconds, while its daemon leads."""

    def __init__(
        self, fleet: FleetLink, link: NatsLink, engine: Callable[[], Engine], state: HallState
    ) -> None:
        self._hall, self._feeder, self._every_s = fleet.hall or "", fleet.feeder or "", fleet.every_s
        self._link, self._engine, self._state = link, engine, state
        self._sequence = 0
        self.counts = {"summaries": 0, "not_sent": 0}

    async def run(self) -> None:
        """Publish until cancelled; a link that is down is its source's affair."""
        while True:
            if self._state.may_act() and self._link.connected:
                await self.once()
            await asyncio.sleep(self._every_s)

    async def once(self) -> None:
        """Publish one summary."""
        summary = self.summary(time.time_ns())
        key = f"{summary.hall}:{summary.epoch}:{summary.sequence}"
        try:
            await self._link.publish(summary_subject(self._hall), encode(summary), key)
            self.counts["summaries"] += 1
        except ConnectorError:
            self.counts["not_sent"] += 1

    def summary(self, now_ns: int) -> HallSummary:
        """The next summary."""
        epoch = self._state.epoch()
        # By the clock, so that it goes on where a reload or a restart within an epoch begins anew
        self._sequence = max(self._sequence + 1, now_ns // 1_000_000)
        run, lines, head = self._state.journal()
        return summary_of(
            self._engine(),
            self._feeder,
            HallSummary(
                hall=self._hall,
                epoch=epoch,
                sequence=self._sequence,
                t_ns=now_ns,
                alarms={s: n for s, n in self._state.alarms().items() if s in SEVERITIES},
                run=run,
                lines=lines,
                head=head,
            ),
        )


def summary_of(engine: Engine, feeder: str, summary: HallSummary) -> HallSummary:
    """A summary with what the engine knows of the hall, or of all halls of this hub, below this feeder."""
    site, intake = engine.site, engine.intake
    at = site.entity("feeder", feeder)
    if at is None:
        return summary
    budget_w = float(intake.budget_w(site, engine.state.now_ns)[at])
    summary = msgspec.structs.replace(
        summary,
        budget_w=_known(budget_w),
        guaranteed_w=_known(
            float(np.fmin(site.guaranteed_w[at], np.nan_to_num(site.budget_w[at], nan=np.inf)))
        ),
        granted_ns=int(intake.grant_order[at, 1]),
    )
    return _of_halls(engine, at, summary) if halls_of(site) else _of_racks(engine, at, summary)


def _of_racks(engine: Engine, feeder: int, summary: HallSummary) -> HallSummary:
    site, budget_w = engine.site, float_of(summary.budget_w)
    rows = {str(row["feeder"]): row for row in explain_topic(engine, "feeds").table("feeds")}
    row = rows[site.name("feeder", feeder)]
    gpus = reported_counts(site, engine.state, engine.diagnosis.silence.hidden).get("gpu", {})
    view = engine.view()
    out_of_service = view.quality("gpu.power_w") != GOOD
    if site.sizes["gpu"]:
        out_of_service |= view.believed("node.service_level_state")[site.node_of_gpu] > 0
    return msgspec.structs.replace(
        summary,
        power_w=_known(row["load_w"]) if row["metered"] else None,
        demand_w=_demand_w(engine, row, budget_w),
        floor_w=_known(row["least_w"]),
        heard_pu=gpus["heard"] / gpus["of"] if gpus.get("of") else None,
        gpus=site.sizes["gpu"],
        gpus_out=int(out_of_service.sum()),
    )


def _of_halls(engine: Engine, feeder: int, summary: HallSummary) -> HallSummary:
    """Halls as one. It holds what they may hold: the hub above counts with that until they have given way.

    A hub that may not act lends nothing, so that they hold what they say.
    """
    meter_w = measured(engine.view(), "feeder.power_w")[feeder]
    found = explain_topic(engine, "together")
    one = found.table("together")[0]
    held_w = float_of(one["held_w" if found.authority in ("act", "approve") else "told_w"])
    alarms = {s: summary.alarms.get(s, 0) + int(float_of(one[f"alarm_{s}_count"])) for s in SEVERITIES}
    return msgspec.structs.replace(
        summary,
        power_w=_known(float(np.fmax(meter_w, float_of(one["power_w"])))),
        demand_w=_known(one["demand_w"]),
        floor_w=_known(one["floor_w"]),
        budget_w=_known(float(np.fmax(float_of(summary.budget_w), held_w))),
        lapse_s=_known(one["lapse_s"]),
        heard_pu=_known(one["heard_pu"]),
        gpus=int(float_of(one["gpu_count"])),
        gpus_out=int(float_of(one["gpu_out_count"])),
        alarms={s: n for s, n in alarms.items() if n},
    )


def _demand_w(engine: Engine, row: dict[str, Value], budget_w: float) -> float | None:
    """Demand of a hall: the upper band of its forecast, and more than it has while that holds it back."""
    load_w, most_w = float_of(row["load_w"]), float_of(row["most_w"])
    ahead = [
        (h, float(f.hi[0])) for (key, h), f in engine.forecasts.items() if key == "site.power_w" and h > 0
    ]
    wanted_w = np.fmax(load_w, min(ahead)[1] if ahead else np.nan)
    if row["held_back"] and not load_w < NEAR_PU * budget_w:
        wanted_w = np.fmax(wanted_w, budget_w * (1.0 + BEYOND_PU))
    return _known(float(np.fmin(wanted_w, most_w)))


def _known(value: Value | float) -> float | None:
    number = float_of(value)
    return number if np.isfinite(number) and number >= 0 else None


def make_fleet(loaded: Loaded, site: Site, engine: Callable[[], Engine], state: HallState) -> FleetInterface:
    """All that the section asks for. Raises ConfigError; starts nothing."""
    fleet, made = loaded.config.fleet, FleetInterface()
    if fleet is None:
        return made
    if fleet.hall is None:
        streams = {f"cpc-{hall}": f"cpc.{hall}.>" for hall in halls_of(site)}
        link = made.links["fleet"] = NatsLink(_settings(loaded, fleet), "cpc.*.v1.summary", streams)
        made.decoder = SummaryDecoder(site)
        made.sources.append(SummarySource(link, made.decoder))
        made.sinks.append(BudgetSink(site, link, state.may_act))
    if (up := fleet.upward) is not None and up.hall is not None and up.feeder is not None:
        name = "fleet" if up is fleet else "fleet.above"
        link = made.links[name] = NatsLink(_settings(loaded, up), budget_subject(up.hall))
        made.sources.append(BudgetSource(link, BudgetDecoder(up.hall, up.feeder)))
        made.publisher = SummaryPublisher(up, link, engine, state)
    return made


def _settings(loaded: Loaded, fleet: FleetLink) -> NatsSettings:
    def path(name: str | None) -> str | None:
        return None if name is None else str(loaded.file(name))

    tls = None
    if fleet.ca_file is not None or any(server.startswith("tls://") for server in fleet.servers):
        files = Tls(ca_file=fleet.ca_file, cert_file=fleet.cert_file, key_file=fleet.key_file)
        tls = loaded.trust(files, "fleet")
    return NatsSettings(
        tuple(fleet.servers),
        f"racktwin {fleet.hall or 'hub'}",
        path(fleet.credentials_file),
        path(fleet.nkey_file),
        fleet.username,
        loaded.secret(fleet.password_file),
        tls,
    )


def fleet_faults(loaded: Loaded, site: Site) -> list[str]:
    """Faults where the section and the site file do not agree."""
    fleet, halls, out = loaded.config.fleet, halls_of(site), list[str]()
    if fleet is None:
        return out
    where = f"{loaded.path}: $.fleet"
    if (up := fleet.upward) is not None and up.feeder is not None:
        out += _feeder_faults(site, where if up is fleet else f"{where}.above", up.feeder)
    named = {entry.kind or name for name, entry in site.file.policies.items()}
    if up is not None and halls and "hall_budgets" not in named:
        out.append(
            f"{where}: what it is granted is for halls, and no policy of the site file shares it out; "
            "expected `policies: {hall_budgets: {authority: act}}`"
        )
    if fleet.hall is None and not halls:
        out.append(
            f"{where}: without `hall` this is the hub, and its site file has no rack with guaranteed_w"
        )
    elif fleet.hall is not None and halls:
        out.append(
            f"{where}.hall: the site file has halls of a fleet, so this is a hub; expected `hall` and "
            "`feeder` in $.fleet.above"
        )
    for hall in sorted(set(fleet.pages) - set(halls)):
        out.append(f"{where}.pages: {clean(hall, 80)} is no hall of the site file")
    names = [path.rpartition("/")[2] for path in site.names["rack"]]
    for hall in halls:
        if names.count(hall) > 1:
            out.append(f"{where}: two halls are called {hall[:80]!r}; expected names of their own")
        elif why := hall_problem(hall):
            out.append(f"{where}: the hall {why}")
    try:
        for link in (fleet, fleet.above):
            if link is not None:
                _settings(loaded, link)
    except ConfigError as error:
        out += error.problems
    return out[:20]


def _feeder_faults(site: Site, where: str, name: str) -> list[str]:
    """Return the reason for which grants cannot apply to the feeder of this name; at most one."""
    feeder, shown = site.entity("feeder", name), name[:80]
    if feeder is None:
        return [f"{where}.feeder: the site has no feeder {shown!r}; expected an external one"]
    if not site.external_budget[feeder]:
        return [
            f"{where}.feeder: the budget of {shown} is not external; expected `external` and `guaranteed_w` "
            "in its line of the site file"
        ]
    if len(site.racks_below(feeder)) < site.sizes["rack"]:
        return [f"{where}.feeder: {shown} does not feed all racks; expected the one that does"]
    if beside := sorted(set(site.feeders_of_rack.member.tolist()) - set(site.subtree(feeder))):
        return [
            f"{where}.feeder: {site.name('feeder', beside[0])} feeds racks beside {shown}, which then "
            f"carries part of their load; expected {shown} above it (`serves`)"
        ]
    return []
