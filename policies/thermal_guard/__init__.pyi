from .caps import RELEASE_S as RELEASE_S, strain as strain
from .endurance import Endurance as Endurance, endurance as endurance
from .policy import ThermalGuard as ThermalGuard
from .rescue import OFF_LEAD_S as OFF_LEAD_S, STOP_LEAD_S as STOP_LEAD_S
