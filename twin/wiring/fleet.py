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
from twin.config import FleetSettings, Loaded, Tls, explain_topic
from twin.contracts import HallHead, HallHeadsRecord, Sink, Source, Value
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
    """The parts of section `fleet`, to be started: of a hall with a publisher, of the hub with a sink."""

    sources: list[Source] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    publisher: SummaryPublisher | None = None
    decoder: SummaryDecoder | None = None
    link: NatsLink | None = None

    def heads(self) -> HallHeadsRecord | None:
        """The journal heads that halls told last; None where none did."""
        newest = {} if self.decoder is None else self.decoder.newest
        heads = {
            hall: HallHead(told.run, told.lines, told.head, told.epoch, told.sequence)
            for hall, told in sorted(newest.items())
            if told.head
        }
        return HallHeadsRecord(heads=heads) if heads else None


class SummaryPublisher:
    """Publishes the state of a hall every few seconds, while its daemon leads."""

    def __init__(
        self, fleet: FleetSettings, link: NatsLink, engine: Callable[[], Engine], state: HallState
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
        told = self.summary(time.time_ns())
        key = f"{told.hall}:{told.epoch}:{told.sequence}"
        try:
            await self._link.publish(summary_subject(self._hall), encode(told), key)
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


def summary_of(engine: Engine, feeder: str, told: HallSummary) -> HallSummary:
    """A summary with what the engine knows of the hall below this feeder."""
    site, intake = engine.site, engine.intake
    at = site.entity("feeder", feeder)
    rows = {str(row["feeder"]): row for row in explain_topic(engine, "feeds").table("feeds")}
    if at is None:
        return told
    row = rows[site.name("feeder", at)]
    budget_w = float(intake.budget_w(site, engine.state.now_ns)[at])
    heard = reported_counts(site, engine.state, engine.diagnosis.silence.hidden).get("gpu", {})
    view = engine.view()
    out_of_service = view.quality("gpu.power_w") != GOOD
    if site.sizes["gpu"]:
        out_of_service |= view.believed("node.service_level_state")[site.node_of_gpu] > 0
    return msgspec.structs.replace(
        told,
        power_w=_known(row["load_w"]) if row["metered"] else None,
        demand_w=_demand_w(engine, row, budget_w),
        floor_w=_known(row["least_w"]),
        budget_w=_known(budget_w),
        guaranteed_w=_known(
            float(np.fmin(site.guaranteed_w[at], np.nan_to_num(site.budget_w[at], nan=np.inf)))
        ),
        granted_ns=int(intake.grant_order[at, 1]),
        heard_pu=heard["heard"] / heard["of"] if heard.get("of") else None,
        gpus=site.sizes["gpu"],
        gpus_out=int(out_of_service.sum()),
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
    fleet = loaded.config.fleet
    if fleet is None:
        return FleetInterface()
    if fleet.hall is not None and fleet.feeder is not None:
        link = NatsLink(_settings(loaded, fleet), budget_subject(fleet.hall))
        source = BudgetSource(link, BudgetDecoder(fleet.hall, fleet.feeder))
        return FleetInterface([source], publisher=SummaryPublisher(fleet, link, engine, state), link=link)
    streams = {f"cpc-{hall}": f"cpc.{hall}.>" for hall in halls_of(site)}
    link = NatsLink(_settings(loaded, fleet), "cpc.*.v1.summary", streams)
    decoder = SummaryDecoder(site)
    return FleetInterface([SummarySource(link, decoder)], [BudgetSink(site, link)], None, decoder, link)


def _settings(loaded: Loaded, fleet: FleetSettings) -> NatsSettings:
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
    if fleet.feeder is not None:
        feeder = site.entity("feeder", fleet.feeder)
        if feeder is None:
            out.append(
                f"{where}.feeder: the site has no feeder {fleet.feeder[:80]!r}; expected an external one"
            )
        elif not site.external_budget[feeder]:
            out.append(
                f"{where}.feeder: the budget of {fleet.feeder[:80]} is not external; expected `external` "
                "and `guaranteed_w` in its line of the site file"
            )
        elif len(site.racks_below(feeder)) < site.sizes["rack"]:
            out.append(
                f"{where}.feeder: {fleet.feeder[:80]} does not feed all racks; expected the one that does"
            )
        elif beside := sorted(set(site.feeders_of_rack.member.tolist()) - set(site.subtree(feeder))):
            out.append(
                f"{where}.feeder: {site.name('feeder', beside[0])} feeds racks beside {fleet.feeder[:80]}, "
                f"which then carries part of their load; expected {fleet.feeder[:80]} above it (`serves`)"
            )
    elif not halls:
        out.append(
            f"{where}: without `hall` this is the hub, and its site file has no rack with guaranteed_w"
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
        _settings(loaded, fleet)
    except ConfigError as error:
        out += error.problems
    return out[:20]
