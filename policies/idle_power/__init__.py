"""Policy `idle_power`: nodes that no forecast needs sleep, and are back before the demand is."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
