"""Catalogue: signals, controls, quantities, units, errors; types and texts that all packages share."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
