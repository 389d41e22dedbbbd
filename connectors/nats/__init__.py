"""NATS: summaries of halls to the hub of a fleet, and budgets from the hub to its halls."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
