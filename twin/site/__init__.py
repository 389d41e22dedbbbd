"""Site: the site file and the profiles become tables, indices and envelopes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
