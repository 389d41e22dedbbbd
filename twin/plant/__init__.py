"""Simulated site: the plant that demo, what-if and evaluation run against."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
