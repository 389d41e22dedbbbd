"""Contracts of racktwin: the interfaces for authors of policies, models and connectors.

A policy reads a View and proposes intervals on controls. A model reads the same View and forecasts. Both are
pure: the view is read-only, memory goes in and comes out, and there is no clock and no randomness. Connectors
deliver readings and carry out commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from twin.catalogue import F32, F64, I32, I64, U8, Bool
from twin.contracts.confidence import Residual
from twin.contracts.health_records import FailureLog, Health, NodeFeatures
from twin.contracts.journal import JournalRecord
from twin.contracts.load_targets import LoadTarget
from twin.contracts.service_book import Service
from twin.site import Envelope, Limit, Site
from twin.telemetry import (
    Block,
    Columns as Columns,  # noqa: PLC0414  part of the contract of policies
    Event,
    Ignored,
    JobSlots,
    Message,
    OperatorRequest,
    Reading,
)

Memory = dict[str, np.ndarray]  # by the names that the policy declared with `Columns`


@dataclass(frozen=True, slots=True)
class Proposal:
    """These entities belong in [lo, hi], ideally at want (NaN: wherever inside they are).

    `index` is unique and ascending; lo, hi, want [k] in the control's unit; `reason` is one sentence.
    """

    control: str
    index: I32
    lo: F64
    hi: F64
    want: F64
    reason: str

    @classmethod
    def uniform(cls, control: str, index: I32, lo: float, hi: float, reason: str) -> Proposal:
        """The same interval for all of `index`, ideally at its lower end."""
        k = len(index)
        return cls(control, index, np.full(k, lo), np.full(k, hi), np.full(k, lo), reason)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The distribution of a quantity `horizon_s` ahead: its centre and a 90 % band, per entity [n].

    `signal` is a key of `twin.catalogue.quantities`. Where two models forecast the same quantity at the same
    horizon, the one whose name comes first is in force. A horizon of 0 is for what is so now and nobody
    measures.
    """

    signal: str
    horizon_s: float
    mean: F32
    lo: F32
    hi: F32
    model: str  # name@hash of its parameters
    basis: str = ""  # what it rests on, in words


@dataclass(frozen=True, slots=True)
class Finding:
    """An alarm or a diagnosis, with its evidence. `id` is stable while the condition lasts."""

    id: str
    severity: str  # info, warning, critical
    title: str
    entities: tuple[str, ...]
    evidence: tuple[str, ...]
    confidence_pu: float
    action: str = ""
    count: int = 1  # of entities concerned; `entities` names the first few


@dataclass(frozen=True, slots=True)
class FitRequest:
    """Slow work that the shell may do in a worker: fit `model` on the trace of these ticks."""

    id: str
    model: str
    first_tick: int
    last_tick: int
    seed: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class CommandBatch:
    """Commands on one control: vectorised here, one per entity on the wire; each a lease until `expires_ns`.

    `final` marks the last command of a lease that nobody needs any more: the device keeps the value (what was
    found before the lease) and the lease is over, so that nothing lapses.
    """

    control: str
    policy: str
    epoch: int
    index: I32
    generation: I32
    command: I64  # number of each command; a renewal keeps it
    value: F64
    reason: str
    issued_ns: int
    expires_ns: int
    deadline_ns: int
    renewal: bool = False
    final: bool = False


class View(Protocol):
    """The state as a policy or a model may see it. Arrays are read only.

    A policy that advises reads it as if all advice were obeyed: leases, read-backs, saves of jobs, and the
    power of capped devices and of what feeds them, with its forecasts. All else is as it is.
    """

    @property
    def site(self) -> Site: ...

    @property
    def jobs(self) -> JobSlots: ...

    @property
    def now_ns(self) -> int: ...

    @property
    def dt_s(self) -> float: ...

    @property
    def requests(self) -> tuple[OperatorRequest, ...]: ...

    @property
    def forecasts(self) -> Mapping[tuple[str, float], Forecast]: ...

    def value(self, key: str) -> F32:
        """Last good value per entity, as it was read; NaN where there never was one."""
        ...

    def believed(self, key: str) -> F32:
        """Last good value per entity, or, where other readings contradict it beyond doubt, what these imply.

        Policies act on it: one wire that lies moves nothing. NaN where there never was a value.
        """
        ...

    def worst(self, key: str) -> F32:
        """The believed value as bad as it may be by now, given its age; NaN where nothing was ever
        reported."""
        ...

    def quality(self, key: str) -> U8:
        """Quality per entity (`twin.telemetry.GOOD` and worse)."""
        ...

    def lately_good(self, key: str) -> Bool:
        """True where the last good reading is not stale by its own cadence, even if bad ones followed.

        One lost reading changes nothing here. Raises ContractError for a counter.
        """
        ...

    def age_s(self, key: str) -> F64:
        """Seconds since the last good reading; inf where there was none."""
        ...

    def total(self, key: str) -> I64:
        """Growth of a counter since it first reported."""
        ...

    def envelope(self, control: str) -> Envelope:
        """Allowed range of a control."""
        ...

    def limit(self, key: str) -> Limit | None:
        """Guard and limit of a signal; None if no profile of this site has them."""
        ...

    def beyond(self, key: str) -> I32:
        """Entities whose worst case is beyond the guard of a signal, ascending; none without a limit."""
        ...

    def commanded(self, control: str) -> F64:
        """The value of the running lease per entity; NaN where there is none."""
        ...

    def targets(self, request: OperatorRequest) -> I32:
        """The entities that a standing request names, unique and ascending; unknown names are left out."""
        ...

    def readback(self, control: str) -> F64:
        """Value of a control as devices last reported it, per entity; NaN where they never did."""
        ...

    def series(self, key: str) -> tuple[I64, F32] | None:
        """(instants, values [n_kept, n]) of a signal with declared history, oldest first; None without."""
        ...

    def budget_w(self) -> F64:
        """Budget per feeder: an outside grant while it runs, else the guaranteed share, else the file's."""
        ...

    def load_targets(self) -> tuple[LoadTarget, ...]:
        """Load targets of external parties for the site or some feeders, now and to come."""
        ...

    def outlook(self, quantity: str, at_ns: int) -> F64:
        """External forecast of a quantity at a coming instant, per entity [n]; NaN where there is none."""
        ...

    def maintenance(self, table: str, asleep: bool = True) -> Bool | None:
        """Mask of entities in maintenance now and, with `asleep`, of those off on purpose [n]; None if there
        are none in this table."""
        ...

    def vacant(self, table: str) -> Bool | None:
        """Mask of slots whose device was found in another slot, by its serial [n]; None if there are none."""
        ...

    def protected_nodes(self) -> Bool:
        """Return the nodes that may not be disturbed unless an operator requests it [n_node].

        All, while no source of jobs has reported (`jobs.known`); then those of jobs of unknown kind. A
        disruptive command on one is held back with the verdict `protected`, unless an operator asks for it.
        """
        ...

    def residual(self, name: str) -> Residual | None:
        """A comparison of the estimator, such as `rack.heat`."""
        ...

    def faults(self) -> tuple[Fault, ...]:
        """Faults that the diagnosis has isolated."""
        ...

    def missing_coolant_ns(self) -> I64:
        """Since when coolant is missing from the circuit of each CDU, by its own pressures and fill pump [n];
        0 where it is not, or where nobody knows."""
        ...

    def health(self, part: str) -> Health:
        """Health of all parts of a kind: gpu, node, switch, link, pump, psu or dpu."""
        ...

    def node_features(self) -> NodeFeatures: ...
    def failures(self) -> FailureLog: ...

    def service(self) -> Service:
        """Instants at which nodes were last tested, repaired and replaced."""
        ...


@dataclass(frozen=True, slots=True)
class Fault:
    """A diagnosis: what is wrong, at the lowest entity that accounts for all that deviates.

    `kind` is one of `twin.diagnosis.FAULT_KINDS`; `signal` names the sensor where the sensor is at fault.
    """

    kind: str
    table: str
    entity: int
    signal: str
    severity: str  # info, warning, critical
    confidence_pu: float
    since_ns: int
    evidence: tuple[str, ...]
    count: int = 1  # entities whose deviation it explains
    parts: tuple[int, ...] = ()  # of the entity, such as its pumps, from 1; none is the whole
    # Of a fault of `count` entities below this one: table and entity of the first
    first: tuple[str, int] | None = None

    @property
    def cooling(self) -> bool:
        """True if the facility's cooling is at fault: throttling that follows from it is no GPU's fault."""
        return self.table in ("rack", "cdu", "loop", "site", "hall") and not self.signal


@runtime_checkable
class Policy(Protocol):
    """Proposes and never acts. Policies run in the order of `rank`, the lowest first; none widens the
    interval of one before it.

    The engine asks it every `period_s`, and at urgent ticks too if it is `urgent`. Settings are keyword
    arguments of `__init__`, each with a default; a bad value raises ContractError. Without declared `memory`
    it is given an empty dict.

    A policy may also have `accounts(view, before, after) -> list[dict]`: what it predicted and what came of
    it, from its memory before and after `propose`, as plain data for the journal. One that explains itself
    implements `twin.contracts.explanation.Explainer` as well; the others are explained by their proposals.
    """

    name: ClassVar[str]
    controls: ClassVar[tuple[str, ...]]
    rank: ClassVar[int]
    period_s: ClassVar[float]
    urgent: ClassVar[bool]
    memory: ClassVar[Columns | None]

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Intervals for some entities of the declared controls, and the memory for next time."""
        ...


@runtime_checkable
class Model(Protocol):
    """Forecasts. Parameters are data: NumPy arrays by name, never pickles.

    What `fit` is given is the declared history of the model's `signals`, or what its `training()` returns, if
    it has one: arrays by name. The worker makes the model anew as `cls(**settings())`, if it has one, else
    from its `signals` and `horizons_s`. A `next_fit_s()` gives the time between fits in place of
    `fit_every_s`, where that is not 0. An optional `forget(table, entity)` is called when a device is
    replaced.
    """

    name: ClassVar[str]
    period_s: ClassVar[float]
    fit_every_s: ClassVar[float]  # 0: never

    def update(self, view: View) -> None:
        """Take in the current tick."""
        ...

    def predict(self, view: View) -> list[Forecast]:
        """Forecasts from what was taken in and the present parameters."""
        ...

    def fit(self, series: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        """New parameters from recorded series [n_time, n]; runs in a worker, may be slow."""
        ...

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Use these parameters from now on. Raises ContractError if they do not fit."""
        ...

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters in use."""
        ...

    def memory(self) -> dict[str, np.ndarray]:
        """State that `update` has gathered, for snapshots."""
        ...

    def restore(self, memory: Mapping[str, np.ndarray]) -> None:
        """Take over what `memory` gave."""
        ...

    def remap(self, old_of_new: Mapping[str, I32]) -> None:
        """The site changed: entity i of a table was `old_of_new[table][i]` before, -1 if it is new."""
        ...


Item = Reading | Block | Event


class Decoder(Protocol):
    """A codec: a pure function of a message, for one site."""

    def decode(self, message: Message) -> Sequence[Item] | Ignored:
        """Decode a message. Raises BadMessage with the reason."""
        ...


class Inlet(Protocol):
    """Destination of decoded readings: the Inbox behind it, the ledger of sources, and the urgent wake-up."""

    def of(self, source: str, outside: bool = False) -> Inlet:
        """The inlet of one source of several that a connector reads, such as `agent lab/h/r1/node3`.

        `outside`: the name comes from outside, and is forgotten unless readings come under it.
        """
        ...

    def stage(self, items: Sequence[Item], now_ns: int, poll_s: float = 0.0) -> None:
        """Stage what one message or scrape brought; when it returns, the message may be acknowledged.

        `poll_s`: the period at which these items are asked for; 0 where the source sends by itself.
        """
        ...

    def skip(self, what: str, why: str, example: str = "", remedy: str = "") -> None:
        """Count a well-formed message that is not used, by its kind.

        `remedy` is what a person can do about it; without one it is routine.
        """
        ...

    def reject(self, where: str, why: str, remedy: str = "") -> None:
        """Count a bad message by where it came from (a topic, an address), and sample its reason."""
        ...

    def fail(self, why: str, remedy: str = "") -> None:
        """Count a request of ours to this source that had no good answer, until the next one has."""
        ...

    def drop(self, where: str, why: str, count: int = 1) -> None:
        """Count what was lost before it could be decoded: an overflow, an oversize."""
        ...


class Source(Protocol):
    """Origin of readings. The daemon supervises it: what it raises restarts it, and nothing else.

    One that reads others has `origins`, their names in the ledger of sources; () if they name themselves.
    """

    name: str

    async def run(self, inlet: Inlet) -> None:
        """Stage readings, blocks and events until cancelled. Raises ConnectorError when its link is down."""
        ...


class Sink(Protocol):
    """Destination of commands. Outcomes come back as `CommandAcked` events, never as a return value."""

    name: str
    controls: tuple[str, ...]
    enforces_safe: bool  # whether a lapse is carried out by the device's own agent

    async def apply(self, commands: tuple[CommandBatch, ...]) -> None:
        """Carry out, idempotent by command number. Raises ActuationError when the device refuses."""
        ...


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything that leaves a tick."""

    tick: int
    now_ns: int
    commands: tuple[CommandBatch, ...] = ()
    advice: tuple[CommandBatch, ...] = ()  # what would be commanded if `advise` and `approve` were `act`
    findings: tuple[Finding, ...] = ()
    fits: tuple[FitRequest, ...] = ()
    records: tuple[JournalRecord, ...] = ()  # for the journal, in order
    deferred: Mapping[str, int] = field(default_factory=dict)  # control -> held back by the blast radius


def read_only(array: Any) -> Any:
    """`array` as a view that cannot be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


def given_away(memory: Memory) -> Memory:
    """A policy's memory whose own arrays cannot be written to any more: the engine need not copy them."""
    for array in memory.values():
        if array.flags.owndata:
            array.flags.writeable = False
    return memory


def mask_index(mask: Bool) -> I32:
    """Ascending indices of a mask, as proposals want them."""
    return np.flatnonzero(mask).astype(np.int32)
