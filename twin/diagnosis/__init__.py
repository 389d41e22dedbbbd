"""Diagnosis: faults at the lowest entity that accounts for all deviations."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
