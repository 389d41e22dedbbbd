"""Archive: values and journals of a daemon on their way to the fleet's history in ClickHouse, and back."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
