"""Physics: closed forms of heat, flow, pressure and power, shared by plant and estimators."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
