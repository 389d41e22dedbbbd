from .bootstrap import load_checked as load_checked
from .collector import collect_garbage as collect_garbage, freeze_heap as freeze_heap
from .daemon import Daemon as Daemon
from .ingest import Ingest as Ingest
from .journal_anchor import fetch_heads as fetch_heads
from .online_check import EndpointAnswer as EndpointAnswer, OnlineCheck as OnlineCheck
from .sdnotify import SdNotify as SdNotify
