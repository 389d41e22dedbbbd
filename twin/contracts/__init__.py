"""Contracts: the interfaces of policies, models and connectors, and the data that they exchange."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
