"""Jobs: reports on checkpoints in, advice out, and burn-in tests of nodes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
