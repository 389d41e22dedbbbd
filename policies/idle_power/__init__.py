"""Policy `idle_power`: puts unneeded nodes to sleep, and wakes them before the demand returns."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
