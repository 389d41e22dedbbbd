"""Anchor: signed heads of the journal, their copies outside the run folder, and the proof of a journal."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
