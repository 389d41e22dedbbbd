"""Simulation: the closed loop of plant and engine, what-if, and simulated sites on a broker."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
