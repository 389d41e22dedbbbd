"""HTTP API: routes, tokens, answers, metrics and the control room of the daemon."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
