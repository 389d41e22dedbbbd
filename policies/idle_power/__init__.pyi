from .demand import quantile_of as quantile_of
from .policy import IdlePower as IdlePower
