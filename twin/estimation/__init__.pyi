from .estimator import Balance as Balance, Estimator as Estimator
from .parameter import Parameter as Parameter
