from .disturbance import Disturbance as Disturbance, SensorFault as SensorFault
from .failure_timeline import (
    FailureTable as FailureTable,
    FailureTimeline as FailureTimeline,
    TimelineEvent as TimelineEvent,
    TimelinePlayer as TimelinePlayer,
)
from .faults import BOTH as BOTH, PUBLISHED as PUBLISHED, Campaign as Campaign, Script as Script
from .frozen_workload import HeldJob as HeldJob
from .jobs import Kind as Kind, Mix as Mix
from .meters import Observation as Observation, Report as Report
from .mirror import mirror_twin as mirror_twin, read_as_one as read_as_one
from .placed_workload import PlacedWorkload as PlacedWorkload
from .plant import Plant as Plant
from .power import Backup as Backup
from .scenario import (
    MAX_CASES as MAX_CASES,
    MAX_HOURS as MAX_HOURS,
    FaultEntry as FaultEntry,
    Scenario as Scenario,
    cases_of as cases_of,
    judge_fault as judge_fault,
    scenario_of as scenario_of,
    script_of as script_of,
)
from .sensors import RACK_LIQUID as RACK_LIQUID, Sensors as Sensors
from .truth import Truth as Truth
from .work import Work as Work
