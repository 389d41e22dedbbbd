from .actuators import (
    Dcmi as Dcmi,
    Redfish as Redfish,
    actuator_notes as actuator_notes,
    dpu_of as dpu_of,
    hosts_of as hosts_of,
    sections as sections,
)
from .engine import (
    MAX_SCENARIO_BYTES as MAX_SCENARIO_BYTES,
    arming_faults as arming_faults,
    explain_topic as explain_topic,
    load_site as load_site,
    make_engine as make_engine,
    make_policies as make_policies,
    outside_plug_ins as outside_plug_ins,
    packaged_profiles as packaged_profiles,
    read_yaml as read_yaml,
    site_faults as site_faults,
    spec_of as spec_of,
    uncooled as uncooled,
    underfed as underfed,
    unguarded as unguarded,
)
from .fleet import FleetLink as FleetLink, FleetSettings as FleetSettings
from .logs import set_up as set_up, take_down as take_down
from .outlooks import OutlookService as OutlookService
from .power import SITE as SITE, Flex as Flex, feeder_of as feeder_of, power_notes as power_notes
from .reference import reference_markdown as reference_markdown, reference_yaml as reference_yaml
from .schedulers import (
    Kubernetes as Kubernetes,
    Slurm as Slurm,
    burn_in_notes as burn_in_notes,
    scheduler_notes as scheduler_notes,
)
from .schema import (
    Api as Api,
    Broker as Broker,
    ClickHouse as ClickHouse,
    Config as Config,
    History as History,
    Journal as Journal,
    Loaded as Loaded,
    Notify as Notify,
    Quotas as Quotas,
    Scrape as Scrape,
    Tls as Tls,
    broker_notes as broker_notes,
    differs as differs,
    journal_notes as journal_notes,
    load_config as load_config,
    targets_of as targets_of,
    warn_exposed as warn_exposed,
)
from .search_path import find_config as find_config
from .section import texts_of as texts_of
