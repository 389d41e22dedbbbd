"""DSX Exchange: building management points, discovery of a site, load targets of the grid."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
