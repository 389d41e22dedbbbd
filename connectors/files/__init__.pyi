from .capture import (
    BadRow as BadRow,
    encode_row as encode_row,
    open_bytes as open_bytes,
    read_capture as read_capture,
)
from .ipmi import (
    Dump as Dump,
    MappingPart as MappingPart,
    RowTally as RowTally,
    conversion as conversion,
    discover_ipmi as discover_ipmi,
    hosts_of as hosts_of,
    read_sensor_table as read_sensor_table,
    read_tree as read_tree,
)
from .tabular import read_mapping as read_mapping, read_series as read_series
from .text_table import RowLimit as RowLimit, TableColumns as TableColumns, TableRows as TableRows
from .times import (
    NO_TIME as NO_TIME,
    instant as instant,
    instant_text as instant_text,
    localise as localise,
    span_text as span_text,
    zone_of as zone_of,
)
