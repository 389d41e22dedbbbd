"""Health: verdicts on devices with their evidence, failures of nodes, lemons and wear."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
