from .arrays import F32 as F32, F64 as F64, I8 as I8, I32 as I32, I64 as I64, U8 as U8, Bool as Bool
from .control_values import (
    INSTANTS as INSTANTS,
    control_value as control_value,
    counted as counted,
    table_noun as table_noun,
)
from .errors import (
    ActuationError as ActuationError,
    BadMessage as BadMessage,
    ConfigError as ConfigError,
    ConnectorError as ConnectorError,
    ContractError as ContractError,
    Divergence as Divergence,
    StorageError as StorageError,
    TwinError as TwinError,
)
from .instants import NS as NS, START_NS as START_NS
from .quantities import find_quantity as find_quantity
from .schema import Control as Control, Signal as Signal
from .signals import (
    CATALOGUE_HASH as CATALOGUE_HASH,
    TABLES as TABLES,
    find_control as find_control,
    find_signal as find_signal,
    signal_of as signal_of,
)
from .text import (
    GLOSSARY as GLOSSARY,
    TimeAxis as TimeAxis,
    Unit as Unit,
    clean as clean,
    did_you_mean as did_you_mean,
    duration as duration,
    is_synthetic as is_synthetic,
    number as number,
    percent as percent,
    quantity as quantity,
    safe as safe,
    seconds_of as seconds_of,
    short as short,
    unit_for as unit_for,
    utc as utc,
)
from .tree import digest as digest, pack as pack, unpack as unpack
from .units import from_dbm as from_dbm, to_core as to_core, unit_of as unit_of
from .vocabulary import (
    CONTROLS as CONTROLS,
    control_words as control_words,
    plain_text as plain_text,
    signal_words as signal_words,
)
