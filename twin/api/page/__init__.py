"""Control room: the web application that the daemon serves, and the routes that it asks beside the others."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
