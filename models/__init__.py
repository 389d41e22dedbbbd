"""Models: forecasts of measured quantities. One module or package each, and one line in this registry.

A model knows the core's contracts only and predicts with NumPy; libraries of statistics are imported by its
`fit`, which runs in a worker.
"""

from __future__ import annotations

from models.failure import Failure
from models.load import Load
from models.persistence import Persistence
from models.power_curve import PowerCurve
from twin.contracts import Model

REGISTRY: dict[str, type[Model]] = {
    "failure": Failure,
    "load": Load,
    "persistence": Persistence,
    "power_curve": PowerCurve,
}
# Models of a site that names none; others run where its file names them
DEFAULT = ("load", "failure", "power_curve")
