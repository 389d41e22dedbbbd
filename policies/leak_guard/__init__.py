"""Policy `leak_guard`: what detectors and the inventory of a circuit say of leaks, and what follows."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
