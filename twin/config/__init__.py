"""Configuration: the daemon's file, its checks, and the engine made from a site file."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
