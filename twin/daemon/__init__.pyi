from .bootstrap import load_checked as load_checked
from .daemon import Daemon as Daemon
from .ingest import Ingest as Ingest
from .online_check import EndpointAnswer as EndpointAnswer, OnlineCheck as OnlineCheck
from .sdnotify import SdNotify as SdNotify
