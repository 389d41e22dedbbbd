from .archive_writer import ArchiveWriter as ArchiveWriter
from .fleet_history import (
    fleet_reader as fleet_reader,
    labels_of as labels_of,
    make_archive as make_archive,
    retention_of as retention_of,
)
from .journal_rows import JournalRows as JournalRows
from .journal_tail import JournalTail as JournalTail, TailPlace as TailPlace
