from .build import build_site as build_site
from .contingency import contingency_caps as contingency_caps
from .design import (
    APPROACH_K as APPROACH_K,
    CDU_FILTER_DROP_PA as CDU_FILTER_DROP_PA,
    CDU_INNER_DROP_PA as CDU_INNER_DROP_PA,
    CDU_VOLUME_MIN as CDU_VOLUME_MIN,
    CONVECTIVE_SHARE as CONVECTIVE_SHARE,
    COOLER_APPROACH_K as COOLER_APPROACH_K,
    FLOW_EXPONENT as FLOW_EXPONENT,
    GPU_TAU_LIQUID_S as GPU_TAU_LIQUID_S,
    LOOP_PUMP_W_PER_LPM as LOOP_PUMP_W_PER_LPM,
    LOOP_VOLUME_MIN as LOOP_VOLUME_MIN,
    PRIMARY_FLOW_RATIO as PRIMARY_FLOW_RATIO,
    PUMP_EFFICIENCY_PU as PUMP_EFFICIENCY_PU,
    PUMP_SHUTOFF_RATIO as PUMP_SHUTOFF_RATIO,
    PUMP_SPEED_NOMINAL_PU as PUMP_SPEED_NOMINAL_PU,
    PUMPS_PER_CDU as PUMPS_PER_CDU,
    RACK_DROP_PA as RACK_DROP_PA,
    RACK_VOLUME_MIN as RACK_VOLUME_MIN,
    RISE_NOMINAL_K as RISE_NOMINAL_K,
    TOWER_APPROACH_K as TOWER_APPROACH_K,
    TOWER_PUMP_W_PER_LPM as TOWER_PUMP_W_PER_LPM,
    Design as Design,
)
from .fabric import (
    BlastRadius as BlastRadius,
    far_end as far_end,
    link_blast as link_blast,
    lost_with as lost_with,
    port_far_end as port_far_end,
    scale_up_blast as scale_up_blast,
    scale_up_domain as scale_up_domain,
    switch_blast as switch_blast,
)
from .file import (
    REST_CLASS as REST_CLASS,
    LoopGroup as LoopGroup,
    ModelEntry as ModelEntry,
    SiteFile as SiteFile,
    convert as convert,
    expand as expand,
    field_words as field_words,
    first_problems as first_problems,
    ranges as ranges,
    salvage as salvage,
    short as short,
)
from .growth import grown_site as grown_site, with_racks as with_racks
from .parts import SplitSite as SplitSite, split_site as split_site
from .profile import Profile as Profile, parse_profile as parse_profile
from .safety import (
    HALL_BUDGET as HALL_BUDGET,
    guaranteed_heat_w as guaranteed_heat_w,
    hall_count as hall_count,
    lapse_faults as lapse_faults,
    noun_key as noun_key,
    share_faults as share_faults,
    share_notes as share_notes,
)
from .site import Envelope as Envelope, Limit as Limit, Site as Site, SiteSpec as SiteSpec
