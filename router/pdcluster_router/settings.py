"""The router's settings: each with its unit, default, bounds, and why that default.

Built once, in ``__main__``, checked there, and handed down. Nothing else reads the command line or the environment.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.metaserver import METASERVER_PATH, Action

_WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared with, not bound
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if "[" not in parts.netloc and parts.netloc.count(":") > 1:
        # A pod's own address, where pods have IPv6 first: the engines would refuse it too.
        raise ValueError(
            f"{url!r} has an IPv6 address without brackets: write [ADDRESS]; decode engines call IPv4 only, so on "
            "Kubernetes give pods IPv4 addresses, or both with IPv4 first"
        )
    if parts.scheme != "http" or not parts.hostname or parts.port == 0:  # .port raises when it is no number
        raise ValueError(f"{url!r} is not a URL like http://HOST:PORT")
    if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{url!r} has more than a host and a port: give http://HOST:PORT only")
    return f"http://{parts.netloc}"


def _checked_api(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/"):
        raise ValueError(f"{url!r} is not a URL like https://HOST:PORT")
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise ValueError(f"{url!r} would send the token in the clear: use https, or kubectl proxy on 127.0.0.1")
    return f"{parts.scheme}://{parts.netloc}"


EngineUrl = Annotated[str, AfterValidator(_checked_url)]
ApiUrl = Annotated[str, AfterValidator(_checked_api)]
DnsName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]


class Discovery(Enum):
    """How a router learns of its engines."""

    STATIC = "static"
    """They are named at start."""
    KUBERNETES = "kubernetes"
    """From the EndpointSlices of one PDCluster, for as long as it runs."""


class Settings(BaseModel):
    """All that a router is told at start. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill_urls: tuple[EngineUrl, ...] = ()
    """Base URLs of the prefill engines: at least one when discovery is static, there is nothing to route to without."""
    decode_urls: tuple[EngineUrl, ...] = ()
    """Base URLs of the decode engines: as ``prefill_urls``."""
    discovery: Discovery = Discovery.STATIC
    """How engines are found. static: works everywhere, and needs no right on any API."""
    namespace: DnsName | None = None
    """Kubernetes namespace of the PDCluster. None: this pod's own."""
    cluster: DnsName | None = None
    """Name of the PDCluster. No default: a namespace may hold several, and their engines are never mixed."""
    kube_api: ApiUrl | None = None
    """Base URL of the API server. None: what Kubernetes tells a pod. Plain http on loopback only, for kubectl proxy."""
    kube_ca_file: Path | None = None
    """PEM file with the API server's authorities. None: in a pod the one mounted there, else the system's."""
    kube_token_file: Path | None = None
    """File with our token, read anew for each request: Kubernetes renews it every hour. None: as ``kube_ca_file``."""
    kube_timeout_s: float = Field(default=10.0, gt=0, le=60)
    """Seconds for a whole list of the API server, and for the head of a watch. 10: a busy one takes a second or two;
    longer waits only delay the next try, engines are kept meanwhile."""
    watch_timeout_s: int = Field(default=30, ge=1, le=3600)
    """Seconds after which the API server ends a watch and the next one goes on from there; one that has not ended 5 s
    later is dead. 30: a connection that died without a word is noticed in half a minute, for two requests a minute."""
    host: str = "127.0.0.1"
    """Address to listen on. Loopback, so that nothing is open to a network unless somebody asks for it."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port to listen on; 0: any free one. 8000 as vLLM's own server."""
    advertise_url: EngineUrl | None = None
    """Where decode engines reach the metaserver of this very process. None: ``http://host:port``, for one machine."""
    request_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """Seconds for a whole request; a client's ``X-Request-Timeout`` can only shorten it. 600: the openai SDK's own."""
    prefill_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """Seconds for the answer of one prefill attempt, within the request's own time. Half of a request, so that another
    attempt or decode itself still has time."""
    max_prefill_attempts: int = Field(default=3, ge=1, le=100)
    """Failed prefill attempts of one request before it is over. 3: two engines that fail at once are bad luck, three
    are not. Each attempt asks an engine on which this request has not failed, so a small pool gives up sooner."""
    max_decode_attempts: int = Field(default=2, ge=1, le=100)
    """Decode engines that a request is sent to, before the client has its first byte. 2: the second one proves whether
    it was the engine or the request; more would carry a request that kills engines through the whole pool."""
    on_prefill_failure: Action = Action.RECOMPUTE
    """What happens when no prefill attempt is left. recompute: decode does what its kv_load_failure_policy says. fail:
    the client gets a 502 at once, for pools whose decode engines must never compute prompts."""
    max_prefill_backlog_tokens: int = Field(default=65536, ge=1, le=1 << 30)
    """Prompt tokens, as estimated from bytes, that may be under way for each healthy prefill engine; a larger request
    enters when there are none. 65536: eight steps of vLLM's usual 8192, some seconds of work. Less lets prefill
    run dry between two requests; more only keeps decode's blocks reserved for longer."""
    max_queued_requests: int = Field(default=4096, ge=0, le=65536)
    """Requests that wait until prefill has room; more get 429. 4096: a second or two of the busiest pool, and some ten
    MiB of waiting bodies."""
    queue_timeout_s: float = Field(default=30.0, gt=0, le=86400)
    """Seconds in that queue before 503. 30: a client that waited longer is better told to come back."""
    reservation_timeout_s: float | None = Field(default=None, gt=0, le=86400)
    """Seconds for decode's reservation. None: no limit but the request's, for a prompt that decode has cached
    whole is answered without any reservation, and a long answer that is not streamed shows nothing before its end."""
    connect_timeout_s: float = Field(default=3.0, gt=0, le=60)
    """Seconds to connect to an engine. 3: one lost SYN is sent again after 1 s; more is a dead host."""
    max_engine_connections: int = Field(default=16384, ge=1, le=65535)
    """Connections to one engine at a time. Above what an engine can run, below the ports one source address has."""
    engine_idle_s: float = Field(default=4.0, gt=0, le=3600)
    """Seconds an idle connection to an engine is used again. 4: vLLM's server closes its own after 5."""
    max_body_bytes: int = Field(default=64 << 20, ge=1024, le=1 << 30)
    """Bytes of a request body. 64 MiB: a few images in base64, or some million tokens."""
    max_reservation_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 30)
    """Bytes of a metaserver call. 8 MiB: the block table of some ten million tokens, and no room for a flood."""
    max_header_bytes: int = Field(default=64 << 10, ge=1024, le=1 << 20)
    """Bytes of a request's line and headers. 64 KiB, twice what nginx takes by default."""
    client_read_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds for a request to arrive whole once it has begun, and for the first one after a connection was made."""
    client_idle_s: float = Field(default=75.0, gt=0, le=3600)
    """Seconds an idle client connection is kept. 75: longer than load balancers' usual 60, so that they close first."""
    client_linger_s: float = Field(default=5.0, gt=0, le=60)
    """Seconds that a client gets to take the last bytes of an answer that was cut."""
    probe_interval_s: float = Field(default=1.0, gt=0, le=60)
    """Seconds between two probes of an engine's ``/health``. 1: a started engine is seen soon; a probe costs 0.1 ms."""
    probe_timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Seconds for one probe. 2: an engine in a long step still answers, its HTTP server runs beside the engine core."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """Seconds that running requests get after SIGTERM. 30: what Kubernetes waits by default."""
    trace_file: Path | None = None
    """File that gets one JSON line for each ended request. None: no trace."""

    @model_validator(mode="after")
    def _finds_engines(self) -> Self:
        given = {"--prefill": self.prefill_urls, "--decode": self.decode_urls}
        if self.discovery is Discovery.STATIC:
            if missing := [flag for flag, urls in given.items() if not urls]:
                raise ValueError(f"{' and '.join(missing)}: name at least one, or use --discovery kubernetes")
            return self
        if named := [flag for flag, urls in given.items() if urls]:
            raise ValueError(f"{' and '.join(named)}: engines are found, not named, with --discovery kubernetes")
        needed = {"--cluster": self.cluster, "--namespace": self.namespace, "--kube-api": self.kube_api}
        if absent := [flag for flag, value in needed.items() if value is None]:
            raise ValueError(f"{' and '.join(absent)}: --discovery kubernetes needs it (a pod knows all but --cluster)")
        return self

    @property
    def metaserver_url(self) -> str:
        """What decode engines call.

        Raises:
            ConfigError: Only wildcards are known of this process's address.
        """
        if self.advertise_url is not None:
            return self.advertise_url + METASERVER_PATH
        if self.host in _WILDCARDS:
            raise ConfigError(
                f"--host {self.host} names no address that a decode engine could call: "
                "add --advertise-url http://ADDRESS:PORT with this machine's own address"
            )
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{METASERVER_PATH}"


def build_settings(**values: object) -> Settings:
    """Settings from named values; those that are None keep their default.

    Raises:
        ConfigError: A value is missing or out of bounds. The message names it.
    """
    given = {name: value for name, value in values.items() if value is not None}
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(f"{_flag(item['loc'])}: {item['msg']}" for item in error.errors())
        raise ConfigError(problems) from error
    settings.metaserver_url  # noqa: B018 - raises now rather than at the first request
    return settings


def _flag(location: tuple[int | str, ...]) -> str:
    if not location:  # Several settings together; the message names them.
        return "these settings do not fit"
    name = str(location[0]).removesuffix("_urls").removesuffix("_s")
    return "--" + name.replace("_", "-")
