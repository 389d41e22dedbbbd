from .gpu_time import TIME_CLASSES as TIME_CLASSES
from .hour_account import HOUR_NS as HOUR_NS, HourAccount as HourAccount
from .hour_record import (
    HourRecord as HourRecord,
    LedgerRow as LedgerRow,
    decode_hour as decode_hour,
    encode_hour as encode_hour,
)
from .site_ledger import SiteLedger as SiteLedger
from .statement import (
    BY as BY,
    RowFilter as RowFilter,
    Statement as Statement,
    StatementRow as StatementRow,
    statement as statement,
)
