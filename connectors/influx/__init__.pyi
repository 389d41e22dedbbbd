from .line import LineDecoder as LineDecoder
from .lines import LineColumns as LineColumns, SiteNames as SiteNames, heads_of as heads_of
from .writer import InfluxSettings as InfluxSettings, InfluxWriter as InfluxWriter
