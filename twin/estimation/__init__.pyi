from .calibration import (
    LEARNED as LEARNED,
    LEARNING as LEARNING,
    NOTHING_LEARNED as NOTHING_LEARNED,
    PARAMETER_KINDS as PARAMETER_KINDS,
    STATES as STATES,
    Calibration as Calibration,
    calibrations as calibrations,
)
from .estimator import Balance as Balance, Estimator as Estimator
from .parameter import Parameter as Parameter
from .worst_case import HEATED as HEATED, worst_case as worst_case
