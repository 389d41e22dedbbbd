"""Policy `thermal_guard`: power caps against heat, and further steps where caps are not enough."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
