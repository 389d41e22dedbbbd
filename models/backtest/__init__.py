"""Backtests: forecasts of load and failures, scored on recorded series as the daemon would have made them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
