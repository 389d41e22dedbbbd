"""Lives of devices: their stays at positions, their faults, and the hazard learned from them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
