from .findings import Findings as Findings
from .never_reported import SHOWN_ENTITIES as SHOWN_ENTITIES, reported_counts as reported_counts
from .repairs import DRAINED as DRAINED, REPLACE as REPLACE, awaited_repairs as awaited_repairs
