"""Telemetry: readings, events, inbox, frame, state, history, jobs, and the columns of per-entity state."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
