from .collector import Collector as Collector
from .event_texts import few as few, interval as interval
from .forecast_texts import (
    Shown as Shown,
    known_ahead as known_ahead,
    shown as shown,
    time_left as time_left,
    why as why,
)
from .journal_texts import brief as brief, sentence as sentence
from .ledger_store import LedgerStore as LedgerStore
from .page import (
    STYLE as STYLE,
    bullets as bullets,
    cards as cards,
    code as code,
    details as details,
    figure as figure,
    fill as fill,
    heading as heading,
    joined as joined,
    marked as marked,
    page as page,
    pair as pair,
    paragraph as paragraph,
    responsive as responsive,
    section as section,
    stacked as stacked,
    table as table,
    terms as terms,
)
from .plots import LEAST_SPAN as LEAST_SPAN
from .replacement_history import (
    account_words as account_words,
    rows_of as rows_of,
    score_of as score_of,
    unmatched as unmatched,
)
from .replacement_journal import (
    BURN_IN as BURN_IN,
    POLICY as POLICY,
    SERVICE as SERVICE,
    JournalReader as JournalReader,
    RecordedLines as RecordedLines,
)
from .rma_markdown import markdown as markdown
from .svg import Line as Line, PlotLayout as PlotLayout, plot as plot, whiskers as whiskers
from .terminal import (
    grid as grid,
    print_error as print_error,
    print_line as print_line,
    safe_text as safe_text,
    text_table as text_table,
    when as when,
)
from .writer import (
    PAGE as PAGE,
    open_folder as open_folder,
    render_terminal as render_terminal,
    write_report as write_report,
    write_whole as write_whole,
)
