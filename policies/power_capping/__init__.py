"""Policies `power_cap` and `power_guard`: share power within budgets, and cut an overload at once."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
