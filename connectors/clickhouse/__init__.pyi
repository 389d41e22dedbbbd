from .http_link import ClickHouseError as ClickHouseError, ClickHouseLink as ClickHouseLink, Login as Login
from .questions import (
    LISTS as LISTS,
    FleetReader as FleetReader,
    ListQuestion as ListQuestion,
    ValueQuestion as ValueQuestion,
)
from .schema import (
    JOURNAL_COLUMNS as JOURNAL_COLUMNS,
    VALUE_COLUMNS as VALUE_COLUMNS,
    Retention as Retention,
    database_problem as database_problem,
    grants_sql as grants_sql,
    schema_sql as schema_sql,
)
from .value_blocks import (
    Labels as Labels,
    ValueBlocks as ValueBlocks,
    ValueBuffer as ValueBuffer,
    rack_of as rack_of,
)
