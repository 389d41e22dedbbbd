from .burn_in import BurnInProgram as BurnInProgram, BurnInSink as BurnInSink
from .files import FolderSink as FolderSink, FolderSource as FolderSource, ReportFolder as ReportFolder
from .registration import (
    MAX_OF_TENANT as MAX_OF_TENANT,
    JobLeases as JobLeases,
    JobRegistration as JobRegistration,
    nodes_of as nodes_of,
    start_of as start_of,
)
from .sink import (
    CONTROLS as CONTROLS,
    INTERVAL as INTERVAL,
    LOCAL as LOCAL,
    SINCE as SINCE,
    JobBook as JobBook,
    JobLease as JobLease,
    JobSink as JobSink,
    compose as compose,
)
from .start_ids import StartIds as StartIds
from .start_times import skip_start_times as skip_start_times
from .wire import (
    MAX_REASON as MAX_REASON,
    MAX_REPORT as MAX_REPORT,
    REPORT as REPORT,
    Advice as Advice,
    JobDecoder as JobDecoder,
    JobReport as JobReport,
    decode_advice as decode_advice,
    encode_report as encode_report,
    job_of as job_of,
    level_of as level_of,
)
