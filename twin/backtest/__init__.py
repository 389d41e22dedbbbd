"""Backtests: forecasts, intervals, power curves and stragglers, scored on a user's own recordings."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
