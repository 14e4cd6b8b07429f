"""The router's settings: each with its unit, default, bounds, and why that default.

Built in ``__main__``, at the start and on SIGHUP, checked there, and handed down. Nothing else reads the command line
or the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.flags import Flags
from pdcluster_protocol.launch import ENGINE_KEY_VARIABLE, ForwardedHeader, ProxyProtocol, RouterPolicy
from pdcluster_protocol.logs import FORMAT_VARIABLE, LogFormat
from pdcluster_protocol.metaserver import METASERVER_PATH, Action
from pdcluster_router.settings.forms import (
    ApiUrl,
    Discovery,
    DnsName,
    EngineDialect,
    EngineUrl,
    ModelAlias,
    ProxyNetwork,
    UnknownModels,
    check_pair,
    listed,
)
from pdcluster_router.settings.picker_settings import PickerSettings
from pdcluster_router.settings.process_settings import ProcessSettings
from pdcluster_router.settings.span_settings import SPAN_HIDDEN, SPAN_VARIABLES, SpanSettings
from pdcluster_router.settings.token_settings import TokenSettings

_WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared with, not bound
_LAST_PORT = 65535
TRUSTED_PROXIES_VARIABLE: Final = "PDCLUSTER_TRUSTED_PROXIES"
MODEL_ALIASES_VARIABLE: Final = "PDCLUSTER_MODEL_ALIASES"


class Settings(TokenSettings, SpanSettings, ProcessSettings, PickerSettings):
    """All that a router is told. Frozen: others come as a new object."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    prefill_urls: tuple[EngineUrl, ...] = ()
    """Base URLs of the prefill engines, https:// for those with TLS. With static discovery at least one is needed."""
    decode_urls: tuple[EngineUrl, ...] = ()
    """Base URLs of the decode engines: as ``prefill_urls``."""
    discovery: Discovery = Discovery.STATIC
    """How engines are found. static: by ``prefill_urls`` and ``decode_urls``; works everywhere, and needs no right on
    any API. file: by ``engines_file``. kubernetes: by EndpointSlices."""
    engines_file: Path | None = None
    """File that names the engines, each in a line: its role, its URL, and revision=NAME where there are several. Read
    again when it changes, in the event loop: on a local disk. For --discovery file."""
    engines_file_interval_s: float = Field(default=3.0, gt=0, le=3600)
    """Seconds between two looks at that file. 3: as ``api_key_interval_s``."""
    engine_dialect: EngineDialect = EngineDialect.PDCLUSTER
    """The dialect of the engines' KV connector. pdcluster: ours, with all our promises. vllm-ascend:
    engines of vllm-ascend 0.23 as they are released. Their calls to the internal port show no token, so only engines
    may reach that port; docs/operations.md says what else they lack."""
    policy: RouterPolicy = Field(default=RouterPolicy.LEAST_TOKENS, description=RouterPolicy.explained())
    unknown_models: UnknownModels = UnknownModels.REFUSE
    """The answer to a request for a model that no engine lists. refuse: vLLM's own 404, and no engine is asked. ask:
    any engine's, for engines that load adapters at their first request, or take any name."""
    model_aliases: Annotated[tuple[ModelAlias, ...], BeforeValidator(listed)] = ()
    """Other names for models, each as NAME=MODEL, with commas between them. A client that asks for NAME gets MODEL: a
    name that engines list, of a model or an adapter. Engines get that name, and the answer bears it. NAME must be
    nothing that engines list. None by default."""
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
    """TCP port for clients; 0: any free one. 8000 as vLLM's own server."""
    internal_port: int | None = Field(default=None, ge=0, le=65535)
    """TCP port for engines' calls, metrics, the pool's pages and the operator's orders, so that no client reaches them
    and idle clients take none of it; 0: any free one. None: the one after ``port``, or any where ``port`` is 0."""
    advertise_url: EngineUrl | None = None
    """Where decode engines reach the internal port of this very process. None: ``http://host:internal_port``, for one
    machine."""
    api_key_file: Path | None = None
    """File with the SHA-256 of each key that clients may show, and its limits. None: clients need none, and a gateway
    must ask, unless they need a token (``jwt_key_set``)."""
    api_key_interval_s: float = Field(default=3.0, gt=0, le=3600)
    """Seconds between two looks at that file. 3: a key is good or gone within seconds; a look costs microseconds."""
    tls_cert: Path | None = None
    """PEM file with the certificate that clients are shown, followed by the intermediate certificates. The client port
    then speaks TLS 1.2 and 1.3 only; the internal one has a certificate of its own. None: plain HTTP, for a gateway
    with TLS, or one machine."""
    tls_key: Path | None = None
    """PEM file with the private key of ``tls_cert``, without a password. None: as ``tls_cert``."""
    tls_interval_s: float = Field(default=3.0, gt=0, le=3600)
    """Seconds between two looks at the files of certificates, keys and authorities. 3: as ``api_key_interval_s``; a
    renewed certificate has days, but one that was revoked shall go."""
    trusted_proxies: Annotated[tuple[ProxyNetwork, ...], BeforeValidator(listed)] = ()
    """Networks of proxies before the client port, as 10.0.0.0/8, with commas between them. The router believes what
    they say of their client's address. Name all that write ``forwarded_header``, and no others. None by default: what
    a client says of itself is not believed."""
    forwarded_header: ForwardedHeader = ForwardedHeader.X_FORWARDED_FOR
    """The header in which all of ``trusted_proxies`` tell where a request came from. x-forwarded-for: what most proxies
    write. forwarded: that of RFC 7239. Only one, for a proxy lets the other through as its client wrote it."""
    proxy_protocol: ProxyProtocol = ProxyProtocol.NONE
    """Whether each connection to the client port begins with a PROXY header, version 1 or 2, before TLS too. required:
    from ``trusted_proxies`` only, all other connections are closed. none: load balancers write none unless asked to."""
    engine_ca: Path | None = None
    """PEM file with the authorities that engines' certificates are trusted by, or these certificates themselves. All
    engines must then be https. None: the authorities of this system."""
    engine_cert: Path | None = None
    """PEM file with the certificate for engines that ask for one (mTLS), followed by the intermediate certificates. All
    engines must then be https. None: engines are shown none."""
    engine_key: Path | None = None
    """PEM file with the private key of ``engine_cert``, without a password. None: as ``engine_cert``."""
    engine_tls_name: DnsName | None = None
    """The name that the certificate of every engine must have, and that engines are asked for (SNI). For pods, whose
    certificates name a service and not their addresses. All engines must then be https. None: the host of each
    engine's URL."""
    internal_tls_cert: Path | None = None
    """As ``tls_cert``, for the internal port: engines, operator and monitoring then ask it by https. None: plain HTTP,
    for a network that only they can reach."""
    internal_tls_key: Path | None = None
    """PEM file with the private key of ``internal_tls_cert``, without a password. None: as ``internal_tls_cert``."""
    internal_client_ca: Path | None = None
    """PEM file with the authorities by whose certificates all that call the internal port must show who they are
    (mTLS). None: no caller is asked; engines' calls have their seals, verifications their pass."""
    engine_api_key: str | None = Field(default=None, repr=False, pattern=r"^[!-~]+$")
    """The engines' own key, where they were started with one: ``VLLM_API_KEY``, for an argument is seen by everybody
    on the machine. None: engines want none, or clients show it."""
    request_timeout_s: float | None = Field(default=None, gt=0, le=86400)
    """Seconds for a whole request; a client's ``X-Request-Timeout`` can only shorten it. None: as long as its answer
    flows, for a total would cut a long answer that nothing is wrong with."""
    first_byte_timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """Seconds from a request until its stream begins, and until decode has the KV of any request. 600: what the openai
    SDK waits for a byte."""
    whole_answer_timeout_s: float = Field(default=3600.0, gt=0, le=86400)
    """Seconds from a request until an answer that is not streamed begins, which is when it is whole. 3600: 32,000
    tokens at 40 a second take 800 s, and nothing is seen of them before the last one."""
    idle_timeout_s: float = Field(default=120.0, gt=0, le=86400)
    """Seconds between two bytes of an answer; a client that takes none is cut off after it as well. It is looked at
    four times in it. 120: decode may preempt a request and compute its prompt again, which is seconds; engines and
    clients that are silent for minutes have stopped."""
    keep_alive_s: float = Field(default=15.0, ge=0, le=3600)
    """Seconds of silence after which a stream gets a comment, which clients ignore, so that no proxy cuts it off while
    it waits for room, for prefill, or between two tokens. After the first comment an error comes in the stream, not as
    a status. 0: no comments. 15: what the standard of event streams advises; proxies cut after 30 s at the earliest,
    and what fails at once still has its status."""
    prefill_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """Seconds for the answer of one prefill attempt, within the time until the first byte. Half of that, so that
    another attempt or decode itself still has time."""
    max_prefill_attempts: int = Field(default=3, ge=1, le=100)
    """Failed prefill attempts of one request before it is over. 3: two engines that fail at once are bad luck, three
    are not. Each attempt asks an engine on which this request has not failed, so a small pool gives up sooner."""
    max_decode_attempts: int = Field(default=2, ge=1, le=100)
    """Decode engines that a request is sent to, before the client has its first byte. 2: the second one proves whether
    it was the engine or the request; more would carry a request that kills engines through the whole pool."""
    on_prefill_failure: Action = Action.RECOMPUTE
    """Decode's action when no prefill attempt is left. recompute: as its kv_load_failure_policy says. fail: another
    revision's pair is asked if there is one, else the client gets a 502 at once. For pools whose decode engines must
    never compute prompts."""
    max_prefill_backlog_tokens: int = Field(default=65536, ge=1, le=1 << 30)
    """Prompt tokens that may be under way for each usable prefill engine, and for each decode engine of what it has to
    prefill by itself: estimated from bytes, exact once decode has reserved. No request counts for more than a quarter.
    65536: eight steps of vLLM's usual 8192, some seconds of work. Less lets prefill run dry between two requests; more
    only keeps decode's blocks reserved for longer."""
    max_queued_requests: int = Field(default=4096, ge=0, le=65536)
    """Requests that wait until prefill has room, for each model and role; more get 429. 4096: a second or two
    of the busiest pool. Their bytes are bounded by ``max_buffered_bytes``."""
    queue_timeout_s: float = Field(default=30.0, gt=0, le=86400)
    """Seconds in that queue before 503. 30: a client that waited longer is better told to come back."""
    reservation_timeout_s: float | None = Field(default=None, gt=0, le=86400)
    """Seconds for decode's reservation, or its word that it needs none. None: only the first byte's limit. Decode
    reserves nothing while the request waits in its own queue."""
    connect_timeout_s: float = Field(default=3.0, gt=0, le=60)
    """Seconds to connect to an engine. 3: one lost SYN is sent again after 1 s; more is a dead host."""
    max_engine_connections: int = Field(default=16384, ge=1, le=65535)
    """Connections to one engine at a time. Above what an engine can run, below the ports one source address has."""
    engine_idle_s: float = Field(default=4.0, gt=0, le=3600)
    """Seconds an idle connection to an engine is used again. 4: vLLM's server closes its own after 5."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 30)
    """Bytes of a request body. 8 MiB: two million tokens of text, or some photographs in base64. The event loop stands
    still while one is scanned: 4 ms for 8 MiB of text, up to 45 ms where a client made it to be slow. Where clients are
    trusted and send many large images, give more."""
    max_buffered_bytes: int = Field(default=256 << 20, ge=1 << 20, le=1 << 40)
    """Bytes of requests whose answer has not begun, heads included, over all connections and the queue, and of answers
    to questions that clients have not taken; what finds no room gets 503. With several keys, each may hold at most
    twice the bytes that are free. 256 MiB: 4,096 queued prompts of 16,000 tokens, or 32 bodies of the largest size, in
    the memory of a small pod. Bodies count once, also before they are decrypted; while a request is sent on there are
    up to two copies more, and two encrypted ones with TLS."""
    max_connections: int = Field(default=0, ge=0, le=1 << 20)
    """Connections of clients that are served at a time; further ones get 503, except probes of ``/health``. 0: a fifth
    of the files that the process may open, 16,384 at most. A request holds up to four descriptors."""
    max_internal_connections: int = Field(default=0, ge=0, le=1 << 20)
    """Connections to the internal port at a time. Of more, those on which no whole call waits are closed, first of the
    address with the most of them; no new one is turned away. 0: as many as ``max_connections``, for each request may
    have a call of decode's, and a quarter more, at least 16, for probes, monitoring and the operator."""
    max_reservation_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 30)
    """Bytes of a metaserver call. 8 MiB: the block table of some ten million tokens, and no room for a flood."""
    max_header_bytes: int = Field(default=64 << 10, ge=1024, le=1 << 20)
    """Bytes of a request's line and headers. 64 KiB, twice what nginx takes by default."""
    client_read_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds for a request to arrive whole once it has begun, and for the first one after a connection was made. A
    body that comes with 16 KiB/s or more has longer. 60: nginx's own; who trickles holds a socket no longer."""
    client_idle_s: float = Field(default=75.0, gt=0, le=3600)
    """Seconds an idle client connection is kept. 75: longer than load balancers' usual 60, so that they close first."""
    client_linger_s: float = Field(default=5.0, gt=0, le=60)
    """Seconds that a client gets to take the last bytes of an answer that was cut."""
    probe_interval_s: float = Field(default=1.0, gt=0, le=60)
    """Seconds between two probes of an engine's ``/health``. 1: a started engine is seen soon; a probe costs 0.1 ms."""
    probe_timeout_s: float = Field(default=2.0, gt=0, le=60)
    """Seconds for one probe. 2: an engine in a long step still answers, its HTTP server runs beside the engine core."""
    engine_gone_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds that an engine refuses connections, or answers 503 to ``/health``, before its requests that have no byte
    since then are lost: tried elsewhere, or told an error. 30: what Kubernetes gives a process to end. Engines that
    answer on for longer while they shut down need more. One whose ``/health`` only gives no answer has
    ``idle_timeout_s``: it may be stopped or busy."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """Seconds that running requests get after SIGTERM. 30: what Kubernetes waits by default."""
    trace_file: Path | None = None
    """File that gets one JSON line for each ended request. None: no trace."""
    access_log: Path | None = None
    """File that gets one JSON line for each request of a client that has ended, or ``-`` for stdout. Its fields are in
    docs/operations.md. None: no access log, for a line has 700 bytes: 60 GB a day at 1,000 requests a second."""
    kept_requests_bytes: int = Field(default=8 << 20, ge=0, le=64 << 20)
    """Bytes of memory in which the router remembers its last requests, for ``pdcluster why``: half of it for those that
    failed, three eighths for good ones, an eighth for those that clients caused, so that none push out the others. 0:
    it remembers none. 8 MiB: some 7,000 good requests and 6,000 failed ones, and a sixteenth of what a small pod has.
    All of it is searched at once when somebody asks."""
    log_format: LogFormat = LogFormat.TEXT
    """Form of the log's lines. json: one object a line, each value a field of its own. text: for people."""

    @model_validator(mode="after")
    def _finds_engines(self) -> Self:
        given = {"--prefill": self.prefill_urls, "--decode": self.decode_urls}
        kind = self.discovery.value
        if self.engines_file is not None and self.discovery is not Discovery.FILE:
            raise ValueError(
                f"--engines-file {self.engines_file}: --discovery is {kind}, give --discovery file with it"
            )
        if self.discovery is Discovery.STATIC:
            if missing := [flag for flag, urls in given.items() if not urls]:
                raise ValueError(f"{' and '.join(missing)}: name at least one, or use --discovery kubernetes or file")
            return self
        if named := [flag for flag, urls in given.items() if urls]:
            raise ValueError(f"{' and '.join(named)}: engines are found, not named, with --discovery {kind}")
        if self.discovery is Discovery.FILE:
            if self.engines_file is None:
                raise ValueError("--engines-file: --discovery file needs it")
            return self
        needed = {"--cluster": self.cluster, "--namespace": self.namespace, "--kube-api": self.kube_api}
        if absent := [flag for flag, value in needed.items() if value is None]:
            raise ValueError(f"{' and '.join(absent)}: --discovery kubernetes needs it (a pod knows all but --cluster)")
        return self

    @model_validator(mode="after")
    def _names_models_by_aliases(self) -> Self:
        known: dict[str, str] = {}
        for name, _, model in (alias.partition("=") for alias in self.model_aliases):
            if name in known:
                raise ValueError(f"--model-alias {name}={known[name]} and {name}={model}: leave one of them out")
            known[name] = model
        for name, model in known.items():
            if model in known:
                told = f"--model-alias {name}={model} and {model}={known[model]}: {model} is an alias itself"
                raise ValueError(f"{told}: give {name} the name of a model that engines list")
        return self

    @model_validator(mode="after")
    def _has_two_ports(self) -> Self:
        if self.port and self.internal_port == self.port:
            raise ValueError(f"--internal-port {self.port} is the clients' port too: choose another one")
        if self.internal_port is None and self.port == _LAST_PORT:
            raise ValueError(f"--internal-port: there is none after --port {_LAST_PORT}, name one")
        return self

    @model_validator(mode="after")
    def _has_whole_tls(self) -> Self:
        check_pair("--tls-cert", self.tls_cert, "--tls-key", self.tls_key, "for plain HTTP")
        check_pair("--engine-cert", self.engine_cert, "--engine-key", self.engine_key, "to show engines none")
        cert, key = self.internal_tls_cert, self.internal_tls_key
        check_pair("--internal-tls-cert", cert, "--internal-tls-key", key, "for plain HTTP")
        if self.internal_client_ca is not None and self.internal_tls_cert is None:
            raise ValueError("--internal-client-ca: it needs --internal-tls-cert and --internal-tls-key")
        return self

    @model_validator(mode="after")
    def _trusts_who_must_be(self) -> Self:
        if self.proxy_protocol is ProxyProtocol.REQUIRED and not self.trusted_proxies:
            raise ValueError(
                "--proxy-protocol is required and --trusted-proxies not given: name the load balancers' networks"
            )
        return self

    @model_validator(mode="after")
    def _asks_no_engine_in_the_clear(self) -> Self:
        plain = [url for url in (*self.prefill_urls, *self.decode_urls) if not url.startswith("https://")]
        if plain and (flags := self.engine_tls_flags):
            raise ValueError(f"{' and '.join(flags)}: engines are asked by https then, and {plain[0]} is not")
        if self.internal_tls_cert and self.advertise_url and not self.advertise_url.startswith("https://"):
            raise ValueError(f"--advertise-url {self.advertise_url}: with --internal-tls-cert it is https")
        return self

    @property
    def models_by_alias(self) -> dict[str, str]:
        """The model that each alias stands for."""
        return dict(alias.split("=", 1) for alias in self.model_aliases)

    @property
    def engine_tls_flags(self) -> list[str]:
        """The given flags that say how engines are asked by https. With any of them no engine is asked in the clear."""
        given = {"--engine-ca": self.engine_ca, "--engine-cert": self.engine_cert}
        return [flag for flag, value in {**given, "--engine-tls-name": self.engine_tls_name}.items() if value]

    @property
    def wanted_internal_port(self) -> int:
        """The internal port that is to be bound; 0: any free one."""
        if self.internal_port is not None:
            return self.internal_port
        return self.port + 1 if self.port else 0

    @property
    def metaserver_url(self) -> str:
        """The URL that decode engines call.

        Raises:
            ConfigError: ``host`` is a wildcard and ``advertise_url`` is not given, so there is no address to call.
        """
        if self.advertise_url is not None:
            return self.advertise_url + METASERVER_PATH
        if self.host in _WILDCARDS:
            raise ConfigError(
                f"--host {self.host} names no address that a decode engine could call: "
                "add --advertise-url http://ADDRESS:INTERNAL_PORT with this machine's own address"
            )
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "http" if self.internal_tls_cert is None else "https"
        return f"{scheme}://{host}:{self.wanted_internal_port}{METASERVER_PATH}"


SETTINGS_FLAG: Final = "--settings"
VARIABLES_PREFIX: Final = "PDCLUSTER_ROUTER__"
"""With two underscores: beside a Service ``pdcluster-router`` Kubernetes sets variables that begin with one."""
SETTINGS_VARIABLE: Final = f"{VARIABLES_PREFIX}SETTINGS"

FLAGS: Final = Flags(
    {name: Settings.model_fields[name] for name in (*Settings.__annotations__, *Settings.model_fields)},
    named={"prefill_urls": "--prefill", "decode_urls": "--decode", "model_aliases": "--model-alias"},
    hidden=frozenset({"engine_api_key"}) | SPAN_HIDDEN,
    shown={"model_aliases": "NAME=MODEL"},
    variables={
        "engine_api_key": ENGINE_KEY_VARIABLE,
        "log_format": FORMAT_VARIABLE,
        "model_aliases": MODEL_ALIASES_VARIABLE,
        "trusted_proxies": TRUSTED_PROXIES_VARIABLE,
        **SPAN_VARIABLES,
    },
    prefix=VARIABLES_PREFIX,
)


def build_settings(sources: Mapping[str, str] = MappingProxyType({}), /, **values: object) -> Settings:
    """Settings from named values; those that are None keep their default. ``sources``: by name, what gave the value in
    place of its flag.

    Raises:
        ConfigError: A value is missing or out of bounds. The message names it.
    """
    given = {name: value for name, value in values.items() if value is not None}
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        raise ConfigError("; ".join(FLAGS.problem(each, sources) for each in error.errors())) from error
    settings.metaserver_url  # noqa: B018 - raises now rather than at the first request
    return settings
