from .engine import Engine as Engine
from .explain import (
    Inquiry as Inquiry,
    explain as explain,
    first_commands as first_commands,
    request_of as request_of,
    series_wanted as series_wanted,
    topics_of as topics_of,
)
from .identity import check_serial as check_serial, news as news, replaced_entity as replaced_entity
from .outlook import MAX_STEP_S as MAX_STEP_S, MAX_VALUES as MAX_VALUES, Outlook as Outlook
from .plugin_checks import fresh_memory as fresh_memory
from .records import shown as shown
from .snapshot import encode as encode
from .view import EngineView as EngineView
