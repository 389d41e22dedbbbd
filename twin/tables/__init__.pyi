from .fault_log_file import read_faults as read_faults
from .outlook import to_tell as to_tell
from .panel_file import SeriesOptions as SeriesOptions, read_series as read_series
