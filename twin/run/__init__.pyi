from .atomic_write import atomic_write as atomic_write
from .comparison import said_simulated as said_simulated
from .fitting import LATENCY_S as LATENCY_S, Fitter as Fitter
from .history_query import HistoryError as HistoryError, HistoryReader as HistoryReader
from .history_sample import (
    Layout as Layout,
    Sample as Sample,
    expected_columns as expected_columns,
    expected_rows as expected_rows,
    recorded_signal as recorded_signal,
    take_sample as take_sample,
)
from .history_schema import FILE_NAME as FILE_NAME
from .history_service import HistoryService as HistoryService, Sampler as Sampler
from .history_store import HistoryStore as HistoryStore
from .journal import (
    READS as READS,
    Entry as Entry,
    RecordedLine as RecordedLine,
    line_hash as line_hash,
    parse_line as parse_line,
)
from .journal_files import (
    OPEN as OPEN,
    JournalVerdict as JournalVerdict,
    closed_segments as closed_segments,
    cut_journal as cut_journal,
    is_torn as is_torn,
    journal_exists as journal_exists,
    journal_lines as journal_lines,
    last_line as last_line,
    line_head as line_head,
    newest_line as newest_line,
    recorded_authority as recorded_authority,
    verify_journal as verify_journal,
    verify_tail as verify_tail,
)
from .journal_walk import (
    FOREVER_NS as FOREVER_NS,
    JournalQuery as JournalQuery,
    JournalWalk as JournalWalk,
    WalkedLine as WalkedLine,
    journal_begin as journal_begin,
)
from .journal_writer import JournalWriter as JournalWriter
from .long_work import (
    ProgressBar as ProgressBar,
    asked_to_stop as asked_to_stop,
    check_interrupt as check_interrupt,
    stop_at_once as stop_at_once,
)
from .parallel import (
    DIED as DIED,
    Failed as Failed,
    Pool as Pool,
    Report as Report,
    no_report as no_report,
    on_cluster as on_cluster,
)
from .quarantine import (
    Poison as Poison,
    Quarantine as Quarantine,
    find_poison as find_poison,
    tick_aside as tick_aside,
)
from .recordings import (
    URGENT_GAP_NS as URGENT_GAP_NS,
    Arrival as Arrival,
    Cutter as Cutter,
    MessageSource as MessageSource,
    form_of as form_of,
    open_source as open_source,
)
from .recovery import (
    LEVELS as LEVELS,
    RecoveredRun as RecoveredRun,
    StartAnew as StartAnew,
    engine_before as engine_before,
    latest_engine as latest_engine,
    mend_unticked as mend_unticked,
    never_ticked as never_ticked,
    open_recorded as open_recorded,
    resume as resume,
)
from .replay import (
    Keeping as Keeping,
    Observer as Observer,
    Outcome as Outcome,
    Pace as Pace,
    Recorder as Recorder,
    copied as copied,
    manifest as manifest,
    plant_words as plant_words,
    replay_arrivals as replay_arrivals,
    replay_frames as replay_frames,
    summary as summary,
)
from .retention import Upkeep as Upkeep
from .run_files import by_number as by_number
from .storage import TraceReader as TraceReader, TraceWriter as TraceWriter, write_snapshot as write_snapshot
