"""Policy `replacement`: nodes leave service before they fail, are tested or repaired, and return."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
