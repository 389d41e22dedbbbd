"""BMCs: power limits and switches of nodes by Redfish and by IPMI."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
