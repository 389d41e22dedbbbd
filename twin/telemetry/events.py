"""Events: changes beside the measured values. The trace records each event, and a replay repeats it.

A frame carries them in order of arrival. An event with an `id` counts once, however often it is delivered.
Entities are named by full path, never by index. Imports msgspec only.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Authority = Literal["off", "advise", "approve", "act"]
TargetKind = Literal["flex", "demand_response", "utility", "operator"]
JobKind = Literal["training", "inference", "batch", "unknown"]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    id: str = ""


class FaultReported(_Event, frozen=True):
    """A device, agent or log reported a fault; `code` is its catalogue number (an XID), `name` the entity.

    `at_ns` is when the device says it happened (0: when it came in); `count` stands for so many alike.
    """

    table: str
    name: str
    code: int
    detail: str = ""
    at_ns: int = 0
    count: int = 1


class NvlinksCounted(_Event, frozen=True):
    """Counts of the NVLinks of a node since the driver of its GPUs was loaded.

    `name` is the node, `read` how many links each of its GPUs reads. A row names a link by GPU of the node
    and number, with its counts: recoveries that succeeded or failed, errors, replays, symbol errors and their
    rate. A link without a row is at zero. `far` is the other end of a row's link, as the device reports it;
    "" where it does not.
    """

    name: str
    at_ns: int = 0
    read: tuple[int, ...] = ()
    gpu: tuple[int, ...] = ()
    link: tuple[int, ...] = ()
    recoveries: tuple[int, ...] = ()
    failures: tuple[int, ...] = ()
    errors: tuple[int, ...] = ()
    replays: tuple[int, ...] = ()
    symbols: tuple[int, ...] = ()
    symbol_ber: tuple[float, ...] = ()
    far: tuple[str, ...] = ()


class CommandAcked(_Event, frozen=True):
    """A sink's answer to a command. `state` is how far it got."""

    control: str
    name: str
    generation: int
    command: str
    state: Literal["accepted", "in_progress", "done", "failed"]
    detail: str = ""


class OperatorRequest(_Event, frozen=True):
    """A request of a person to keep a control of some entities in [lo, hi] until `expires_ns` (0: no end)."""

    author: str
    control: str
    names: tuple[str, ...]
    lo: float
    hi: float
    want: float | None = None
    reason: str = ""
    expires_ns: int = 0


class RequestWithdrawn(_Event, frozen=True):
    """The operator withdraws the request with this id."""

    author: str
    request: str


class Approved(_Event, frozen=True):
    """An operator lets a policy in `approve` act for a limited time on these entities (none named: all)."""

    author: str
    policy: str
    control: str
    names: tuple[str, ...] = ()
    expires_ns: int = 0
    reason: str = ""


class ApprovalWithdrawn(_Event, frozen=True):
    """The operator withdraws the approval with this id."""

    author: str
    approval: str


class Held(_Event, frozen=True):
    """Freeze the site: no new values, running leases renewed unchanged, protective commands still pass."""

    author: str
    reason: str = ""


class Released(_Event, frozen=True):
    """Let all leases lapse; nothing is commanded until `Resumed`."""

    author: str
    reason: str = ""


class Resumed(_Event, frozen=True):
    """End of a hold or a release."""

    author: str


class AuthorityChanged(_Event, frozen=True):
    """A policy's authority is set."""

    author: str
    policy: str
    authority: Authority


class PluginRestored(_Event, frozen=True):
    """A suspended plug-in runs again, after a repair or a restart of the daemon."""

    plugin: str


class EpochChanged(_Event, frozen=True):
    """A new leader's term: commands carry it, so that devices refuse a deposed daemon.

    `head` is the predecessor's last known journal head. With `adopt` the leader is new to this site: it
    adopts what it finds, and changes nothing for one lease unless protective. `returned`: nodes that the
    predecessor saw come back into service lately, and when; what broke before that was dealt with.
    """

    epoch: int
    head: str = ""
    adopt: bool = False
    returned: dict[str, int] = {}


class JobStarted(_Event, frozen=True):
    """A job took its nodes. `coupling` is True if its slowest member sets the pace."""

    job: str
    nodes: tuple[str, ...]
    kind: JobKind = "unknown"
    coupling: Literal["synchronous", "independent"] = "synchronous"
    priority: int = 0
    tenant: str = ""
    floor_w: float = 0.0
    account: str = ""
    queue: str = ""
    """Partition of Slurm, or queue of Kueue; "": none."""
    storage: str = ""
    """File system that it saves to, as stated by it or its label; "" if unknown."""
    time_limit_s: float = 0.0
    """0: no limit is known."""
    checkpoint_interval_s: float = 0.0
    checkpoint_save_s: float = 0.0
    checkpoint_restart_s: float = 0.0
    """Checkpoint times of the job, as stated by it or its labels; 0: not stated."""
    lease_s: float = 0.0
    """A job that registered itself is over when its client is silent for so long; 0: a scheduler ends it."""
    started_ns: int = 0
    """Start that the scheduler reports; 0: unknown. A job that is moved or resized keeps its start."""


class JobEnded(_Event, frozen=True):
    """A job left its nodes."""

    job: str
    reason: str = ""


class CheckpointTold(_Event, frozen=True):
    """A job's report on its own saves, through any wire; 0: not reported.

    `began_ns` is when the save began whose state it holds now in this tier: a durable one outlives its nodes,
    one in memory outlives its process. `save_s` from the begin until the save was done, `block_s` of it
    training stood still, `flush_s` from the begin until it was durable. `restart_s`: what the recovery took
    that is just over. `interval_s` is in force at the job. `progress_per_s`: work done per second of training
    since its last report, in units of its own; saves left out. `remaining_s`: training that is left until it
    ends by itself, at its speed of now; saves left out. `at_ns` is when all of this was so.
    """

    job: str
    at_ns: int = 0
    tier: Literal["durable", "memory"] = "durable"
    began_ns: int = 0
    save_s: float = 0.0
    block_s: float = 0.0
    flush_s: float = 0.0
    restart_s: float = 0.0
    interval_s: float = 0.0
    progress_per_s: float = 0.0
    remaining_s: float = 0.0


class MaintenanceBegun(_Event, frozen=True):
    """Maintenance of these entities and all below them: no alarms, commands or learning until its end."""

    author: str
    table: str
    names: tuple[str, ...]
    until_ns: int
    reason: str = ""


class MaintenanceEnded(_Event, frozen=True):
    """The maintenance window with this id ended early."""

    author: str
    window: str


class EntityReplaced(_Event, frozen=True):
    """Another device is in this slot, or none (""): the history of the old serial is closed.

    `moved_from`: the slot that the device was in before, if it was in one.
    """

    table: str
    name: str
    serial: str
    moved_from: str = ""


class NodeTested(_Event, frozen=True):
    """A site's own test of a node ended: burn-in evidence. `began_ns` and `ended_ns` give its time.

    `passed` is None where it could not be run, or not to its end: that says nothing of the node.
    """

    name: str
    began_ns: int
    ended_ns: int
    passed: bool | None
    test: str = ""
    detail: str = ""


class NodeRepaired(_Event, frozen=True):
    """A person reports a repair of a node, which next needs a test and no other repair."""

    author: str
    name: str
    note: str = ""


class IdentityTold(_Event, frozen=True):
    """Identity that the device in this slot reports; another serial than before is as an EntityReplaced."""

    table: str
    name: str
    serial: str


class PollPeriodChanged(_Event, frozen=True, tag="PeriodTold"):  # as traces have it
    """A polling source reports its period for these signals of these entities, in seconds."""

    table: str
    signals: tuple[str, ...]
    names: tuple[str, ...]
    period_s: float


class SiteChanged(_Event, frozen=True):
    """The site is another one: `spec` is the JSON of `twin.site.site.SiteSpec`: a trace explains itself."""

    site_hash: str
    spec: bytes


class BudgetGranted(_Event, frozen=True):
    """An outside daemon lends a feeder a budget until `expires_ns`; then the guaranteed share applies.

    `epoch` and `issued_ns` order the grants of one feeder: an older one that comes late is refused. 0: it has
    no order.
    """

    author: str
    feeder: str
    budget_w: float
    expires_ns: int
    issued_ns: int = 0
    epoch: int = 0


class LoadTargetSet(_Event, frozen=True):
    """An outside party requests a load of at most `limit_w`, from `start_ns` until `end_ns`.

    0 is from now on, and until it is withdrawn. `feeders`: each of these on its own; none named: the site's
    racks together. `target` names it: a later one under the same name takes its place.
    """

    author: str
    target: str
    limit_w: float
    feeders: tuple[str, ...] = ()
    start_ns: int = 0
    end_ns: int = 0
    kind: TargetKind = "operator"
    best_effort: bool = False


class LoadTargetWithdrawn(_Event, frozen=True):
    """The load target with this name was withdrawn."""

    author: str
    target: str


class OutlookTold(_Event, frozen=True):
    """Future values of a quantity from outside: a weather forecast, day-ahead prices, a plan.

    `values` hold from `start_ns` on, each for `step_s` (None: unknown); `name` is the entity ("" = the site).
    A later outlook of the same quantity and entity replaces it.
    """

    author: str
    quantity: str
    start_ns: int
    step_s: float
    values: tuple[float | None, ...]
    name: str = ""


class ModelFitted(_Event, frozen=True):
    """A worker delivered parameters; `params` is the packed content, `params_hash` its address."""

    fit: str
    model: str
    params_hash: str
    params: bytes


class FitFailed(_Event, frozen=True):
    """A worker gave up, or its answer was lost or late."""

    fit: str
    model: str
    why: str


class TicksSkipped(_Event, frozen=True):
    """Nominal ticks that did not happen; `why` names the cause (overload, suspend, restart)."""

    count: int
    why: str = ""


Event = (
    FaultReported
    | NvlinksCounted
    | CommandAcked
    | OperatorRequest
    | RequestWithdrawn
    | Approved
    | ApprovalWithdrawn
    | Held
    | Released
    | Resumed
    | AuthorityChanged
    | PluginRestored
    | EpochChanged
    | JobStarted
    | JobEnded
    | CheckpointTold
    | MaintenanceBegun
    | MaintenanceEnded
    | EntityReplaced
    | NodeTested
    | NodeRepaired
    | IdentityTold
    | PollPeriodChanged
    | SiteChanged
    | BudgetGranted
    | LoadTargetSet
    | LoadTargetWithdrawn
    | OutlookTold
    | ModelFitted
    | FitFailed
    | TicksSkipped
)
