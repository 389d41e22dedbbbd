"""Ledger of sources: what each one sent, and what of it was not used and why, live and in a replay."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
