from .day_account import DAY as DAY, DayAccount as DayAccount
from .rack_columns import Columns as Columns, changed as changed, columns as columns
from .responses import with_responses as with_responses
from .running_jobs import job_of_slot as job_of_slot
from .simulations import SIMULATIONS as SIMULATIONS, Simulations as Simulations
from .site_power import SITE_POWER as SITE_POWER, recorded as recorded, supply as supply
