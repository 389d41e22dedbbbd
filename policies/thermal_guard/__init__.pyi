from .caps import RELEASE_S as RELEASE_S, strain as strain
from .policy import ThermalGuard as ThermalGuard
from .rescue import CALM_S as CALM_S, OFF_LEAD_S as OFF_LEAD_S, STOP_LEAD_S as STOP_LEAD_S
