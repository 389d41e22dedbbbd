"""Goodput: the share of time in which a synchronous job trained, and the member that the others wait for."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
