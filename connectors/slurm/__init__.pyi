from .hostlist import expand_hosts as expand_hosts, expand_names as expand_names, find_node as find_node
from .placement import SlurmPlacement as SlurmPlacement
from .sink import CONTROL as CONTROL, SlurmSink as SlurmSink
from .source import SlurmSettings as SlurmSettings, SlurmSource as SlurmSource
from .standby import SlurmStandby as SlurmStandby
