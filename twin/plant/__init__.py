"""A simulated site: what a site would do, from causes that the twin does not know."""

from twin.plant.plant import Plant

__all__ = ["Plant"]
