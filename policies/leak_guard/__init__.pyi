from .detectors import HOLD_S as HOLD_S
from .evidence import GRACE_S as GRACE_S, JOIN_S as JOIN_S
from .policy import LeakGuard as LeakGuard
