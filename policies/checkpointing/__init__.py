"""Policy `checkpoint`: the interval between the saves of each training job, and saves ahead of trouble."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
