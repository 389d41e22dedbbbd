"""Archive: writes values and journals of a daemon to the fleet's history in ClickHouse, and reads them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
