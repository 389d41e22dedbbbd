from .client import HttpsClient as HttpsClient, ServiceError as ServiceError
from .electricity_maps import ElectricityMaps as ElectricityMaps
from .entsoe import EntsoePrices as EntsoePrices
from .open_meteo import OpenMeteo as OpenMeteo
from .series import OutlookAnswer as OutlookAnswer, OutlookSeries as OutlookSeries
from .source import OutlookProvider as OutlookProvider, OutlookSource as OutlookSource
from .watttime import WattTime as WattTime
