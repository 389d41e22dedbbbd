from .dcmi import (
    MAX_SECRET as MAX_SECRET,
    DcmiAccess as DcmiAccess,
    DcmiBmc as DcmiBmc,
    DcmiCommand as DcmiCommand,
    DcmiSwitch as DcmiSwitch,
)
from .limits import (
    GPU_CAP as GPU_CAP,
    NODE_CAP as NODE_CAP,
    Bmc as Bmc,
    BmcSource as BmcSource,
    Fleet as Fleet,
    Key as Key,
)
from .power import POWER as POWER, PowerSink as PowerSink, Switch as Switch
from .redfish import RedfishBmc as RedfishBmc, RedfishCaps as RedfishCaps, RedfishDpu as RedfishDpu
from .redfish_client import RedfishClient as RedfishClient
from .sink import BmcSink as BmcSink
