"""Control: the arbiter settles proposals, and the lease table holds what was commanded."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
