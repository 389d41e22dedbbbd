from .estimator import Balance as Balance, Estimator as Estimator
from .parameter import Parameter as Parameter
from .worst_case import HEATED as HEATED, worst_case as worst_case
