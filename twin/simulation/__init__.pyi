from .closed_loop import Simulation as Simulation
from .demo_site import DemoPast as DemoPast, DemoSite as DemoSite
from .narrator import Narrator as Narrator, StoryStep as StoryStep
from .plant_live import Broadcast as Broadcast, LivePlant as LivePlant
from .story import FOLDER as FOLDER, Story as Story, load_story as load_story, with_past as with_past
from .subprocesses import (
    HOST as HOST,
    START_S as START_S,
    end_child as end_child,
    free_port as free_port,
    need_agent as need_agent,
    reached as reached,
    start_child as start_child,
    start_daemon as start_daemon,
    tail as tail,
)
from .whatif import (
    Case as Case,
    Question as Question,
    Result as Result,
    authority_of as authority_of,
    engine_of as engine_of,
    newest_snapshot as newest_snapshot,
    run_cases as run_cases,
    when as when,
)
from .whatif_report import (
    armed_words as armed_words,
    case_json as case_json,
    figure_text as figure_text,
    print_whatif as print_whatif,
    summary_of as summary_of,
    write_page as write_page,
)
