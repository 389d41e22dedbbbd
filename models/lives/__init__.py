"""Lives of devices: who sat where from when to when, what failed, and the hazard that follows from it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
