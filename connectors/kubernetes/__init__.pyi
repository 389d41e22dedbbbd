from .access import HOST as HOST, load_access as load_access
from .autoscaler import STANDBY as STANDBY
from .client import KubernetesClient as KubernetesClient
from .jobs import PodLabels as PodLabels
from .nodes import PLACEMENT as PLACEMENT, Hosts as Hosts
from .placement import KubernetesPlacement as KubernetesPlacement
from .provisioning import PodTemplateName as PodTemplateName
from .sink import KubernetesSink as KubernetesSink
from .source import KubernetesSource as KubernetesSource
from .standby import KubernetesStandby as KubernetesStandby
