from .bms import (
    MAX_VALUE_BYTES as MAX_VALUE_BYTES,
    PUB_METADATA as PUB_METADATA,
    PUB_VALUE as PUB_VALUE,
    BmsDecoder as BmsDecoder,
)
from .discovery import (
    Discovery as Discovery,
    discover as discover,
    discover_points as discover_points,
    to_yaml as to_yaml,
)
from .flex import (
    STEM as STEM,
    TOPIC as TOPIC,
    FlexDecoder as FlexDecoder,
    FlexTrust as FlexTrust,
    correlation_of as correlation_of,
    feed_of as feed_of,
)
from .flex_keys import KeySet as KeySet, Signer as Signer
from .flex_state import (
    FeedNow as FeedNow,
    FeedTarget as FeedTarget,
    FlexAgent as FlexAgent,
    FlexPublication as FlexPublication,
    Hint as Hint,
)
from .flex_wire import (
    AGENT as AGENT,
    BREACH as BREACH,
    EventCause as EventCause,
    encode_event as encode_event,
    plain as plain,
)
from .heartbeat import (
    EVERY_S as EVERY_S,
    SYSTEM_METADATA as SYSTEM_METADATA,
    SYSTEM_VALUE as SYSTEM_VALUE,
    Heartbeat as Heartbeat,
)
from .points import Described as Described, site_name as site_name
