"""Models: forecasts of what is measured. One file each and one line here.

A model knows the core's contracts only and predicts with NumPy; libraries of statistics are imported by its
`fit`, which runs in a worker.
"""

from __future__ import annotations

from models.persistence import Persistence
from twin.contracts import Model

REGISTRY: dict[str, type[Model]] = {
    "persistence": Persistence,
}
