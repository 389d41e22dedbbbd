"""Outlooks of public services: day-ahead prices, carbon intensity and weather, fetched over HTTPS."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
