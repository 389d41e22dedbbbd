from .fault_log_file import content_of as content_of, read_faults as read_faults
from .life_file import LivesRead as LivesRead, read_lives as read_lives, read_node_faults as read_node_faults
from .outlook import outlook_of as outlook_of
from .panel_file import SeriesOptions as SeriesOptions, read_series as read_series
