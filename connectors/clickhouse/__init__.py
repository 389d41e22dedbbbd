"""ClickHouse: tables of the fleet's history, their rows, and the HTTP interface over which both travel."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
