"""Federation: exchange of failure statistics among sites, with noise and signatures."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
