from .account import OTHERS as OTHERS, SourceAccount as SourceAccount, UnusedLine as UnusedLine
from .clock import SourceClock as SourceClock
from .ledger import SourceLedger as SourceLedger
