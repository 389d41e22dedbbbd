"""MQTT: the link to a broker, the routing of topics to decoders, and the source of messages."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
