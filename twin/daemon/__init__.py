"""Daemon: the process that runs one site: ticks, sources, sinks, leadership and alarms."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
