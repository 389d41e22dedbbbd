from .account import OTHERS as OTHERS, SourceAccount as SourceAccount, UnusedLine as UnusedLine
from .clock import SourceClock as SourceClock, moved as moved
from .ledger import SourceLedger as SourceLedger
