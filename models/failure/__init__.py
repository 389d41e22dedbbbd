"""Failure forecasts: the chance that a node fails within an hour, a day, a week and a month."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
