"""Tables of text as panels on a regular grid, logs of faults, and outlooks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
