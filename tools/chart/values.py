"""The values of the Helm chart: each with its bounds, its default, and why that default. Data only.

The one source of ``values.yaml``, ``values.schema.json`` and the table in the chart's README (``documents.py``). Helm
refuses all other values before it sends anything to the cluster, so a misspelled value is an error and not a default.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

_DNS_LABEL: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_LABEL_OR_NONE: Final = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"
_SUBDOMAIN: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_NAME_OR_NONE: Final = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
_DURATION: Final = r"^([0-9]+(ms|s|m|h))+$"

Labels = dict[str, str]
OpenObject = dict[str, Any]
"""Kubernetes' own schema, which the API server checks."""
Name = Annotated[str, Field(max_length=63, pattern=_NAME_OR_NONE)]
NamePart = Annotated[str, Field(max_length=63, pattern=_LABEL_OR_NONE)]
"""Of a Service's name, so without dots."""
SecretName = Annotated[str, Field(max_length=253, pattern=_SUBDOMAIN)]
Namespace = Annotated[str, Field(max_length=63, pattern=_DNS_LABEL)]
Amount = int | str
"""As Kubernetes writes a quantity: 2, 500m, 64Mi."""


class ChartModel(BaseModel):
    """A frozen section with names in camelCase, which refuses unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, use_attribute_docstrings=True)


class PullPolicy(Enum):
    """Kubernetes' own words."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Image(ChartModel):
    """Where the operator's image is. The routers that it makes run the same one."""

    repository: str = Field(default="localhost/pdcluster/pdcluster", min_length=1, max_length=255)
    """Repository where you pushed the image, with your registry's host in front. Default: a name that no registry can
    answer for, only a node that the image was loaded into; it is not published yet."""
    tag: str = Field(default="", max_length=128, pattern=r"^[A-Za-z0-9_.-]*$")
    """Tag. Default: the chart's appVersion, with which this chart was tested."""
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$")
    """sha256:... of the image; wins over the tag. Default: none. Give it where tags may be written anew."""
    pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    """Always, IfNotPresent or Never. Default IfNotPresent: a released tag never changes."""
    pull_secrets: tuple[SecretName, ...] = Field(default=(), max_length=16)
    """Names of image pull secrets in the release's namespace, for the operator. Routers get theirs from
    spec.router.podOverrides of each PDCluster, for they run in other namespaces."""


class Crds(ChartModel):
    """The kinds PDCluster and PDRoleScaler."""

    enabled: bool = True
    """Install and upgrade them with the release. They stay when the release goes, and all PDClusters with them. Set
    false for a second release in one cluster, or when somebody else installs crds/."""


class ServiceAccount(ChartModel):
    """The operator's identity for the API server."""

    create: bool = True
    """Make it. False: one of this name exists already."""
    name: Name = ""
    """Its name. Default: made of the release's name."""
    annotations: Labels = {}
    """Annotations of the ServiceAccount."""


class Rbac(ChartModel):
    """Rights."""

    create: bool = True
    """Give the operator the rights of files/rights.yaml, no more. False: you bind them yourself."""
    aggregate: bool = True
    """Add PDClusters to the roles view, edit and admin of the cluster, so that who may work in a namespace may use
    them. Set false for a second release in one cluster."""


class Resources(ChartModel):
    """Resources of the operator's container."""

    model_config = ConfigDict(json_schema_extra={"required": []})  # ``null`` for none, as in a pod

    requests: dict[str, Amount] = {"cpu": "100m", "memory": "128Mi"}
    """Amounts that the scheduler keeps free. Default: the needs of some hundred PDClusters."""
    limits: dict[str, Amount] = {"memory": "512Mi"}
    """Limits. Default: memory for some thousand PDClusters; no limit on cpu, which would only slow down a rollout."""


class DisruptionBudget(ChartModel):
    """PodDisruptionBudget of the operator."""

    enabled: bool = False
    """Let drains of nodes take one replica at a time. Default false: engines serve without the operator. A single
    replica, or one that is not ready, holds up no drain."""


class NetworkPolicy(ChartModel):
    """NetworkPolicy of the operator. The operator makes those of engines and routers itself."""

    enabled: bool = False
    """Let in only probes and metrics, and out only DNS, the API server and routers. Default false: what the API server
    looks like from a pod differs from one network plugin to another."""
    api_server_ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = Field(default=(443, 6443), min_length=1)
    """Ports of the API server, here and in the policies of routers, which the operator makes even if this one is off.
    Default: that of its Service, and the one that most servers have behind it."""
    metrics_from: tuple[OpenObject, ...] = ()
    """NetworkPolicyPeers that may read the operator's metrics. Default: all pods of the cluster. Probes come from the
    pod's own node, which no policy keeps out."""


class ServiceMonitor(ChartModel):
    """For Prometheus operators: who is scraped. Needs their CRDs in the cluster."""

    enabled: bool = False
    """Scrape the operator, all routers and all engines. Default false: without the CRD the release would fail."""
    interval: str = Field(default="30s", pattern=_DURATION)
    """Time between two scrapes. Default 30s, as most do."""
    labels: Labels = {}
    """Labels by which your Prometheus finds its monitors, such as release: prometheus."""


class PrometheusRule(ChartModel):
    """For Prometheus operators: alerts on what routers and engines count. Needs their CRDs in the cluster."""

    enabled: bool = False
    """Install files/alerts.yaml. Default false: without the CRD the release would fail."""
    labels: Labels = {}
    """Labels by which your Prometheus finds its rules."""


class Dashboard(ChartModel):
    """A Grafana dashboard in a ConfigMap, for Grafana's sidecar."""

    enabled: bool = False
    """Install files/dashboard.json. Default false: it is of no use without Grafana."""
    labels: Labels = {"grafana_dashboard": "1"}
    """Labels by which the sidecar finds it. Default: the sidecar's own."""
    annotations: Labels = {}
    """Annotations, such as the folder in Grafana."""


class Values(ChartModel):
    """Everything that may be set at installation. What one pool needs is in its PDCluster, not here."""

    name_override: NamePart = ""
    """Replaces the chart's name in the names of objects."""
    fullname_override: NamePart = ""
    """Replaces release and chart name in the names of objects."""
    replicas: int = Field(default=2, ge=0, le=5)
    """Operators, in [0, 5]. One leads, the others wait with warm caches. Default 2: a lost node costs some seconds
    without rollouts, and nothing to requests. 0 stops the operator; pools go on serving."""
    namespaces: tuple[Namespace, ...] = Field(default=(), max_length=256, json_schema_extra={"uniqueItems": True})
    """Namespaces whose PDClusters this release looks after; they must exist. The operator then has rights there and in
    its own namespace only. Default: all of the cluster. Two releases must not share one."""
    image: Image = Image()
    router_image: str = Field(default="", max_length=512)
    """Image of the routers, whole reference. Default: the operator's own, which holds both."""
    args: tuple[str, ...] = Field(default=(), max_length=32)
    """Further flags: see pdcluster operator --help. Default: none."""
    crds: Crds = Crds()
    service_account: ServiceAccount = ServiceAccount()
    rbac: Rbac = Rbac()
    resources: Resources = Resources()
    pod_labels: Labels = {}
    """Further labels of the operator's pods."""
    pod_annotations: Labels = {}
    """Annotations of the operator's pods."""
    node_selector: Labels = {}
    """Labels of nodes that the operator may run on. It needs no device: keep it off nodes that have them."""
    tolerations: tuple[OpenObject, ...] = ()
    """Taints that the operator tolerates."""
    affinity: OpenObject = {}
    """Affinity of the operator's pods. They are spread over nodes without it."""
    priority_class_name: Name = ""
    """Priority class of the operator's pods."""
    pod_disruption_budget: DisruptionBudget = DisruptionBudget()
    network_policy: NetworkPolicy = NetworkPolicy()
    service_monitor: ServiceMonitor = ServiceMonitor()
    prometheus_rule: PrometheusRule = PrometheusRule()
    dashboard: Dashboard = Dashboard()
