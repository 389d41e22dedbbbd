from .policy import CoolingSetpoint as CoolingSetpoint
