"""Ledger of sources: the data of each source, used and unused, with reasons, live and in a replay."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
