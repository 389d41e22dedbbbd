from .bmc import (
    actuator_faults as actuator_faults,
    make_actuators as make_actuators,
    reading_notes as reading_notes,
)
from .connectors import (
    Links as Links,
    Member as Member,
    client_id_of as client_id_of,
    link_settings as link_settings,
    make_jobs as make_jobs,
    make_scrapes as make_scrapes,
    routes_of as routes_of,
    telemetry_faults as telemetry_faults,
    telemetry_notes as telemetry_notes,
)
from .embedded_broker import EmbeddedBroker as EmbeddedBroker
from .external_files import (
    external_file_faults as external_file_faults,
    file_digests as file_digests,
    without_uncheckable as without_uncheckable,
)
from .fleet import (
    FleetInterface as FleetInterface,
    HallState as HallState,
    fleet_faults as fleet_faults,
    make_fleet as make_fleet,
)
from .flex import LoadNow as LoadNow, load_now as load_now, places_of as places_of
from .grid import (
    GridInterface as GridInterface,
    make_grid_interface as make_grid_interface,
    power_faults as power_faults,
)
from .job_advice import Roster as Roster, advice_in_force as advice_in_force, answers_of as answers_of
from .outlooks import make_outlooks as make_outlooks
from .schedulers import (
    Schedulers as Schedulers,
    WiringContext as WiringContext,
    host_notes as host_notes,
    make_schedulers as make_schedulers,
)
from .site_change import (
    NO_PROFILE as NO_PROFILE,
    SelfDescription as SelfDescription,
    SiteChange as SiteChange,
    propose as propose,
)
from .survey import (
    FoundExporter as FoundExporter,
    SiteDraft as SiteDraft,
    as_host_lists as as_host_lists,
    ask_exporters as ask_exporters,
    kubernetes_access as kubernetes_access,
    local_exporters as local_exporters,
    natural as natural,
    place_hosts as place_hosts,
    profile_of as profile_of,
    read_page as read_page,
    scrapes_of as scrapes_of,
    slurm_hosts as slurm_hosts,
    tree_of_frames as tree_of_frames,
    with_one_name as with_one_name,
)
from .target_files import AUTHOR as AUTHOR
