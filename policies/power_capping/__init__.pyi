from .allocation import Budgets as Budgets, Devices as Devices, allocate as allocate
from .budgets import (
    COOLANT_C as COOLANT_C,
    LEAST_FLOW_PU as LEAST_FLOW_PU,
    Carried as Carried,
    budgets_of as budgets_of,
    carried_by as carried_by,
    dead_feeders as dead_feeders,
    gain_of as gain_of,
    pairs_of as pairs_of,
    sums_w as sums_w,
)
from .curves import (
    STATIC_PU as STATIC_PU,
    Curve as Curve,
    energy_minimum_w as energy_minimum_w,
    fit as fit,
    perf as perf,
)
from .demand import (
    AT_CAP_PU as AT_CAP_PU,
    CONTROL as CONTROL,
    Tenant as Tenant,
    classes as classes,
    learned_pu as learned_pu,
    tenants_of as tenants_of,
)
from .external_limits import (
    COURSE_COLUMNS as COURSE_COLUMNS,
    ExternalLimits as ExternalLimits,
    Settings as Settings,
    columns_of as columns_of,
    course_of as course_of,
    outside as outside,
)
from .loads import loads_of as loads_of
from .power_cap import PowerCap as PowerCap
from .power_guard import PowerGuard as PowerGuard
from .savings import CapAccount as CapAccount
