"""Ledger of a site: energy, GPU time, cost and carbon by the hour, each joule and GPU-second counted once."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
