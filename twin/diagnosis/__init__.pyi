from .alarm_budget import AlarmBudget as AlarmBudget, lasting_sigmas as lasting_sigmas
from .cause import finding_of as finding_of
from .device_reports import good as good
from .diagnosis import OF_SILENCE as OF_SILENCE, Diagnosis as Diagnosis
from .fault_kinds import FAULT_KINDS as FAULT_KINDS
from .outages import Outages as Outages, place_of as place_of
from .reconciliation import RECONCILED as RECONCILED, danger_sign as danger_sign
from .signature import measured_signal as measured_signal
from .silent_cells import SilentCells as SilentCells, silent_cells as silent_cells
from .silent_signals import measured as measured
from .topology import Topology as Topology
from .verdict import derived_from as derived_from
