from .budgets import BudgetDecoder as BudgetDecoder, BudgetSink as BudgetSink, BudgetSource as BudgetSource
from .link import NatsLink as NatsLink, NatsSettings as NatsSettings
from .nkey import NKey as NKey, read_nkey as read_nkey, seed_of as seed_of
from .summaries import SummaryDecoder as SummaryDecoder, SummarySource as SummarySource
from .wire import (
    HallGrant as HallGrant,
    HallSummary as HallSummary,
    budget_subject as budget_subject,
    encode as encode,
    hall_problem as hall_problem,
    halls_of as halls_of,
    parse_grant as parse_grant,
    parse_summary as parse_summary,
    summary_subject as summary_subject,
)
