"""The operator's settings: each with its unit, default, bounds, and why that default.

Built once, in ``__main__``, checked there, and handed down. Nothing else of the operator reads the command line
or the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdcluster_kube.access import KubeAccess, checked_api_url
from pdcluster_operator.core.leasing import LeaseTimes
from pdcluster_operator.core.manifests.pool import API_SERVER_PORTS
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.flags import Flags
from pdcluster_protocol.logs import FORMAT_VARIABLE, LogFormat

ApiUrl = Annotated[str, AfterValidator(checked_api_url)]
PortNumber = Annotated[int, Field(ge=1, le=65535)]
DnsName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]


class Settings(BaseModel):
    """All that an operator is told at start. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    router_image: str = Field(min_length=1, max_length=512)
    """Image of the routers: one with the ``pdcluster`` command. No default: the chart gives the operator's own, so that
    both are of one version."""
    namespaces: tuple[DnsName, ...] = ()
    """Namespaces whose PDClusters it keeps, each with a Role there. Empty: all of them, which needs a ClusterRole."""
    kube_api: ApiUrl | None = None
    """Base URL of the API server. None: in a pod what Kubernetes tells it, elsewhere what ``kubeconfig`` says. Plain
    http on loopback only."""
    kube_ca_file: Path | None = None
    """PEM file with the API server's authorities. None: in a pod the one mounted there, else the system's."""
    kube_token_file: Path | None = None
    """File with our token, read anew when it changes: Kubernetes renews it every hour. None: as ``kube_ca_file``."""
    kubeconfig: str = "~/.kube/config"
    """File to use where ``kube_api`` is not given; several with ``:`` between, as kubectl takes them."""
    kube_context: str | None = None
    """Context of the kubeconfig. None: its current one."""
    api_server_ports: tuple[PortNumber, ...] = Field(default=API_SERVER_PORTS, min_length=1)
    """Ports on which the NetworkPolicies of routers let them reach the API server: of its Service, and behind it. 443
    and 6443: where most servers listen."""
    call_timeout_s: float = Field(default=10.0, gt=0, le=60)
    """Seconds for a call to the API server with all its tries. 10: a busy one takes a second or two; after more the
    object is better looked at again than waited for."""
    watch_silence_s: float = Field(default=70.0, gt=0, le=3600)
    """Seconds without a word after which a watch counts as dead, and begins anew where it was. 70: the API server sends
    a bookmark each minute, and remembers events for 75 s, so nothing is listed anew."""
    lease_namespace: DnsName
    """Namespace of the Lease. Default in a pod: the pod's own."""
    lease_name: DnsName = "pdcluster-operator"
    """Name of the Lease; all replicas of one operator share it. Two operators with namespaces of their own need two."""
    identity: str = Field(min_length=1, max_length=253)
    """This process in the Lease. Default: the host's name and a random part: a restarted process is another one."""
    lease_duration_s: float = Field(default=15.0, ge=1, le=3600)
    """Seconds without renewal after which a standby takes over. 15: client-go's own."""
    lease_renew_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds without renewal after which a leader stops acting. 10: client-go's own; clocks may then differ in speed
    by half before two could lead."""
    lease_retry_s: float = Field(default=2.0, gt=0, le=600)
    """Seconds between two looks at the Lease. 2: client-go's own; five tries for a renewal."""
    resync_s: float = Field(default=600.0, ge=10, le=86400)
    """Seconds after which an object is looked at although nothing happened, and the caches are compared with the API
    server. 600: both are safety nets; watches tell of everything else within milliseconds."""
    workers: int = Field(default=16, ge=1, le=256)
    """Objects that are looked at side by side. 16: a look waits for the API server more than it computes."""
    reconcile_timeout_s: float = Field(default=60.0, ge=1, le=3600)
    """Seconds for one look at one object. 60: about twenty children, each with a slow API server."""
    stuck_s: float = Field(default=300.0, ge=10, le=86400)
    """Seconds that an object may be due or looked at before the liveness probe fails. 300: far above a look's own
    deadline, so only an operator that really hangs is restarted."""
    verify_timeout_s: float = Field(default=60.0, ge=1, le=120)
    """Seconds for the request that proves a target. 60: the first request of a cold engine compiles kernels."""
    host: str | None = None
    """Address for probes and metrics. None: all of this pod's, for the kubelet comes from outside."""
    port: int = Field(default=8080, ge=0, le=65535)
    """TCP port for probes and metrics; 0: any free one. 8080: the routers' and engines' is 8000."""
    log_format: LogFormat = LogFormat.TEXT
    """Form of the log's lines. json: one object a line, each value a field of its own. text: for people."""

    @model_validator(mode="after")
    def _can_be_led(self) -> Self:
        self.lease_times  # noqa: B018 - raises now rather than at the first election
        return self

    @property
    def lease_times(self) -> LeaseTimes:
        return LeaseTimes(self.lease_duration_s, self.lease_renew_s, self.lease_retry_s)

    @property
    def access(self) -> KubeAccess | None:
        """None: the kubeconfig says."""
        return KubeAccess(self.kube_api, self.kube_ca_file, self.kube_token_file) if self.kube_api else None


FLAGS: Final = Flags(
    Settings.model_fields,
    named={"namespaces": "--namespace", "api_server_ports": "--api-server-port", "kube_context": "--context"},
    variables={"kubeconfig": "KUBECONFIG", "log_format": FORMAT_VARIABLE},
)


def build_settings(**values: object) -> Settings:
    """Settings from what was given; a value of None stands for its default.

    Raises:
        ConfigError: A value is missing or out of bounds. The message names it.
    """
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        raise ConfigError("; ".join(map(FLAGS.problem, error.errors()))) from error
