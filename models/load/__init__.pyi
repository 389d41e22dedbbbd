from .blend import EDGES as EDGES, SIDES as SIDES, Blend as Blend, KeptRows as KeptRows
from .calendar import hours_of_week as hours_of_week
from .context import (
    CALM_ROWS as CALM_ROWS,
    LATTICE_EVERY_ROWS as LATTICE_EVERY_ROWS,
    LATTICE_ROWS as LATTICE_ROWS,
    recent_sample as recent_sample,
    restlessness as restlessness,
)
from .expert_aggregation import (
    UNUSUAL as UNUSUAL,
    ExpertAggregation as ExpertAggregation,
    Issue as Issue,
    stride as stride,
)
from .features import known_names as known_names
from .fits import GRIDS as GRIDS, KNOWN as KNOWN, KeptSpan as KeptSpan, fit_rows as fit_rows, lives as lives
from .forecaster import (
    BANDS as BANDS,
    LEVELS as LEVELS,
    MEDIAN as MEDIAN,
    Forecaster as Forecaster,
    ForecastGrid as ForecastGrid,
    Parameters as Parameters,
    QuantileForecast as QuantileForecast,
    forward_fill as forward_fill,
)
from .forecasters import DEFAULT_EXPERTS as DEFAULT_EXPERTS, FORECASTERS as FORECASTERS
from .last_value import (
    LAST_ROWS as LAST_ROWS,
    fill_gaps as fill_gaps,
    last_within as last_within,
    rows_since_epoch as rows_since_epoch,
)
from .model import Load as Load
from .panel import SeriesPanel as SeriesPanel
from .quantisation import quantum as quantum
from .training_set import known_bytes as known_bytes, known_signals as known_signals
