"""Anchor: heads of the journal, signed and kept outside, and the proof of a journal by them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
