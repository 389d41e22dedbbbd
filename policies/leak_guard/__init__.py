"""Policy `leak_guard`: confirms leaks by detectors and coolant inventory, and isolates leaking racks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
