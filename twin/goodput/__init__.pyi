from .expected_end import ExpectedEnd as ExpectedEnd, expected_end as expected_end
from .goodput import GoodputState as GoodputState, HeldBack as HeldBack
from .slow_links import LinkRecords as LinkRecords
