from .explain import show_explanation as show_explanation
from .power import kw as kw
from .show import TONES as TONES, bounds as bounds
from .sources import show_sources as show_sources, unused_line as unused_line
