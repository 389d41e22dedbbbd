"""Load forecasts: power, heat, jobs, requests, price and carbon, from a minute to a day ahead."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
