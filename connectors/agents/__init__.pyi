from .command import (
    MAX_EPOCH as MAX_EPOCH,
    MAX_NAMES as MAX_NAMES,
    MAX_RESULT as MAX_RESULT,
    TABLES_OF_AGENTS as TABLES_OF_AGENTS,
    BmsSink as BmsSink,
    ContingencyTerms as ContingencyTerms,
    MqttSink as MqttSink,
    Publication as Publication,
    Publish as Publish,
    ResultDecoder as ResultDecoder,
    contingency_of as contingency_of,
    presence_of as presence_of,
    publish_all as publish_all,
)
from .frame import (
    EVENT as EVENT,
    FRAME as FRAME,
    JOBS as JOBS,
    ItDecoder as ItDecoder,
    encode_frame as encode_frame,
    encode_json as encode_json,
    gpus_in as gpus_in,
)
