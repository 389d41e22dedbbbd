"""Policy `cooling_setpoint`: the supply temperature at which GPUs and cooling together draw the least."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
