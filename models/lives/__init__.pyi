from .candidates import BLIND as BLIND, BY_AGE as BY_AGE, BY_POSITION as BY_POSITION, trained as trained
from .cells import LifeCells as LifeCells, StepCells as StepCells, cut_cells as cut_cells
from .lemons import LemonVerdict as LemonVerdict, judge_lemons as judge_lemons
from .life_hazard import (
    REFIT_STEPS as REFIT_STEPS,
    WARM_STEPS as WARM_STEPS,
    HazardTerms as HazardTerms,
    LifeHazard as LifeHazard,
)
from .life_log import ENDINGS as ENDINGS, SAME_D as SAME_D, LifeLog as LifeLog
