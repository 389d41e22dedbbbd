from .day_account import DAY as DAY, DayAccount as DayAccount
from .decision_dossier import dossier_reader as dossier_reader
from .decision_search import (
    SEARCH as SEARCH,
    DecisionQuestion as DecisionQuestion,
    DecisionSearch as DecisionSearch,
    place_of as place_of,
    scope_of as scope_of,
)
from .fleet_history import FLEET_QUESTIONS as FLEET_QUESTIONS, MAX_FLEET_QUESTIONS as MAX_FLEET_QUESTIONS
from .hall_account import local_name as local_name
from .journal_state import journal_state as journal_state
from .rack_columns import Columns as Columns, changed as changed, columns as columns
from .responses import with_responses as with_responses
from .running_jobs import job_of_slot as job_of_slot
from .simulations import SIMULATIONS as SIMULATIONS, Simulations as Simulations
from .site_power import SITE_POWER as SITE_POWER, recorded as recorded, supply as supply
