from .columns import (
    OWN as OWN,
    Columns as Columns,
    ColumnSpec as ColumnSpec,
    EntityState as EntityState,
    OldOfNew as OldOfNew,
    PackedState as PackedState,
    RareState as RareState,
    RingSpec as RingSpec,
    Sizes as Sizes,
    SparseState as SparseState,
    cell as cell,
    column as column,
    entries as entries,
    in_order as in_order,
    keyed as keyed,
    part as part,
    pushed as pushed,
    records as records,
    scalar as scalar,
)
from .events import (
    ApprovalWithdrawn as ApprovalWithdrawn,
    Authority as Authority,
    AuthorityChanged as AuthorityChanged,
    BudgetGranted as BudgetGranted,
    CheckpointTold as CheckpointTold,
    CommandAcked as CommandAcked,
    EntityReplaced as EntityReplaced,
    EpochChanged as EpochChanged,
    Event as Event,
    FaultReported as FaultReported,
    FitFailed as FitFailed,
    Held as Held,
    IdentityTold as IdentityTold,
    JobEnded as JobEnded,
    JobKind as JobKind,
    JobStarted as JobStarted,
    LoadTargetSet as LoadTargetSet,
    LoadTargetWithdrawn as LoadTargetWithdrawn,
    MaintenanceBegun as MaintenanceBegun,
    MaintenanceEnded as MaintenanceEnded,
    ModelFitted as ModelFitted,
    NodeTested as NodeTested,
    NvlinksCounted as NvlinksCounted,
    OperatorRequest as OperatorRequest,
    OutlookTold as OutlookTold,
    PluginRestored as PluginRestored,
    PollPeriodChanged as PollPeriodChanged,
    Released as Released,
    RequestWithdrawn as RequestWithdrawn,
    Resumed as Resumed,
    SiteChanged as SiteChanged,
    TargetKind as TargetKind,
    TicksSkipped as TicksSkipped,
)
from .fault_columns import FaultColumns as FaultColumns
from .fault_ids import FaultIds as FaultIds
from .frame import Counts as Counts, Frame as Frame, TableUpdate as TableUpdate
from .freshness import STALE_PERIODS as STALE_PERIODS, Freshness as Freshness
from .history import SignalHistory as SignalHistory
from .inbox import Inbox as Inbox
from .jobs import (
    DURATIONS as DURATIONS,
    KINDS as KINDS,
    STATED_FIELDS as STATED_FIELDS,
    JobSlots as JobSlots,
    start_fault as start_fault,
)
from .observation_gaps import (
    ago_d as ago_d,
    nothing as nothing,
    watched_ns as watched_ns,
    with_gap as with_gap,
)
from .reading import (
    ELSEWHERE as ELSEWHERE,
    OWN_MESSAGE as OWN_MESSAGE,
    Block as Block,
    Ignored as Ignored,
    Message as Message,
    NamedSite as NamedSite,
    Names as Names,
    Reading as Reading,
    nowhere as nowhere,
)
from .stage import ReportLayout as ReportLayout, Stage as Stage
from .state import (
    GOOD as GOOD,
    MISSING as MISSING,
    OUT_OF_RANGE as OUT_OF_RANGE,
    QUALITY_NAMES as QUALITY_NAMES,
    STALE as STALE,
    UNTRUSTED as UNTRUSTED,
    State as State,
    TableState as TableState,
)
