from .arbiter import (
    MAX_PROPOSALS as MAX_PROPOSALS,
    Arbiter as Arbiter,
    Claim as Claim,
    Settlement as Settlement,
    check_proposal as check_proposal,
)
from .leases import (
    ACCEPTED as ACCEPTED,
    ACK_STATES as ACK_STATES,
    DONE as DONE,
    EXPIRED as EXPIRED,
    FAILED as FAILED,
    IN_PROGRESS as IN_PROGRESS,
    MISMATCH_S as MISMATCH_S,
    NONE as NONE,
    SENT as SENT,
    Leases as Leases,
    Setpoints as Setpoints,
)
from .shadow import HANDOVER_S as HANDOVER_S, MOST_HANDOVER_S as MOST_HANDOVER_S, ShadowLeases as ShadowLeases
