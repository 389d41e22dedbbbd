from .cause import finding_of as finding_of
from .device_reports import good as good
from .diagnosis import Diagnosis as Diagnosis
from .fault_kinds import FAULT_KINDS as FAULT_KINDS
from .outages import Outage as Outage, Outages as Outages, where as where
from .topology import Topology as Topology
