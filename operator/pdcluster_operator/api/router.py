"""``spec.router``: the routers in front of the engines, how they are reached, and whom they believe."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

from pydantic import Field

from pdcluster_operator.api.base import DAY_S, MAX_LABEL, MAX_NAME, ApiModel, Name, OpenObject, Rule, checked_by
from pdcluster_operator.api.role import Resources
from pdcluster_protocol.launch import ForwardedHeader, ProxyProtocol, RouterPolicy


class ServiceType(Enum):
    """How the routers' Service is reached (Kubernetes' own words)."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class RouterService(ApiModel):
    """The Service that clients reach."""

    type: ServiceType = ServiceType.CLUSTER_IP
    """ClusterIP, NodePort or LoadBalancer. Default ClusterIP: nothing is open to the outside unless asked for."""
    port: int = Field(default=80, ge=1, le=65535)
    """Port, in [1, 65535]. Default 80: the URL needs none."""
    annotations: dict[str, Annotated[str, Field(max_length=4096)]] = Field(default={}, max_length=32)
    """Annotations of the Service, at most 32, for load balancers. Default: none."""


class KeysRef(ApiModel):
    """A key of a Secret in the same namespace, with a digest of each API key."""

    name: Name
    """Name of the Secret."""
    key: str = Field(default="keys", min_length=1, max_length=MAX_NAME, pattern=r"^[-._a-zA-Z0-9]+$")
    """Key in it. Default keys."""


class KeySetRef(ApiModel):
    """A key of a Secret in the same namespace, with the key set (JWKS) of an identity provider."""

    name: Name
    """Name of the Secret."""
    key: str = Field(default="jwks.json", min_length=1, max_length=MAX_NAME, pattern=r"^[-._a-zA-Z0-9]+$")
    """Key in it. Default jwks.json."""


_CLAIM: Final = r"^[!-#%-~]+$"
"""Visible ASCII without the sign that Kubernetes expands in arguments."""
_LABEL: Final = "[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?"
"""Of a host's name."""
_PORT: Final = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5]))))"
"""1 to 65535."""


class RouterTokens(ApiModel):
    """The identity provider whose tokens (JWT) clients may show."""

    issuer: str = Field(min_length=1, max_length=512, pattern=_CLAIM)
    """The provider's name: the claim iss of each token, exactly."""
    audience: str = Field(min_length=1, max_length=512, pattern=_CLAIM)
    """The provider's name for this pool: one of the claim aud of each token."""
    client_claim: str = Field(default="sub", min_length=1, max_length=128, pattern=_CLAIM)
    """The claim with the client's name. Default sub, which each token has."""
    key_set_url: str | None = Field(
        default=None, max_length=1024, pattern=rf"^https://{_LABEL}(\.{_LABEL})*(:{_PORT})?(/[!%-~]*)?$"
    )
    """https:// URL of the provider's public keys (JWKS), without user, fragment and dollar sign. Routers may then reach
    its port at any address, and are ready once they have the keys. Default: none; then give keySetSecretRef."""
    key_set_secret_ref: KeySetRef | None = None
    """Secret with these keys. Routers take a changed one without a restart. Default: none; then give keySetUrl."""

    rules = (
        Rule(
            holds="has(self.keySetUrl) != has(self.keySetSecretRef)",
            says="router.tokens has %s and %s: give one of keySetUrl and keySetSecretRef",
            values=(
                "has(self.keySetUrl) ? 'keySetUrl ' + self.keySetUrl : 'no keySetUrl'",
                "has(self.keySetSecretRef) ? 'keySetSecretRef ' + self.keySetSecretRef.name : 'no keySetSecretRef'",
            ),
            short="router.tokens has no key set, or two: give one of keySetUrl and keySetSecretRef",
        ),
    )


class RouterTls(ApiModel):
    """TLS between clients and routers."""

    secret_name: Name
    """Name of a Secret of type kubernetes.io/tls in the same namespace, as cert-manager makes it: the certificate under
    tls.crt, its key under tls.key. Routers take a renewed one without a restart."""


TrustedNetwork = Annotated[str, Field(min_length=2, max_length=43)]


class RouterProxies(ApiModel):
    """The proxies and load balancers between clients and routers."""

    trusted: list[TrustedNetwork] = Field(min_length=1, max_length=32)
    """Their networks, as 10.0.0.0/8, or addresses, at most 32: of those that tell where a request came from, and of no
    others. What they say goes into the access log."""
    forwarded_header: ForwardedHeader = ForwardedHeader.X_FORWARDED_FOR
    """x-forwarded-for or forwarded: the header in which all of them tell it. Default x-forwarded-for, which most
    proxies write."""
    proxy_protocol: ProxyProtocol = ProxyProtocol.NONE
    """none, or required: each connection of a client begins with a PROXY header of one of them. Default none, for load
    balancers write it only if asked to."""

    rules = (
        Rule(
            holds="self.trusted.all(one, isIP(one) || "
            "(isCIDR(one) && cidr(one) == cidr(one).masked() && cidr(one).prefixLength() > 0))",
            says="router.proxies.trusted is %s: each must be an address, or a network like 10.0.0.0/8 or "
            "2001:db8::/32, not of every address, and without bits behind its prefix",
            short="router.proxies.trusted holds what is no network: write each like 10.0.0.0/8 or 2001:db8::/32",
            values=("self.trusted.join(', ')",),
            path=".trusted",
        ),
    )


Namespace = Annotated[str, Field(min_length=1, max_length=MAX_LABEL, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class PickerTls(ApiModel):
    """TLS between gateways and routers."""

    secret_name: Name
    """Name of a Secret in the same namespace, as cert-manager makes it: the certificate under tls.crt, its key under
    tls.key. The key is RSA with 2048 bits or more, or ECDSA with P-256 or P-384; Envoy and gRPC make no handshake with
    others. Routers take a renewed one without a restart."""
    client_certificates: bool = False
    """Whether gateways must show a certificate (mTLS) of one of the authorities under ca.crt in that Secret, where
    cert-manager puts the issuer of tls.crt. Each certificate of these authorities is taken, whatever its name: give
    gateways and this Secret an issuer of their own. Keys are of the same kinds as that of tls.key. Default false: all
    pods of gatewayNamespaces are answered."""


class RouterPicker(ApiModel):
    """Gateways that ask routers which engine gets a request, and carry the bytes themselves."""

    gateway_namespaces: list[Namespace] = Field(min_length=1, max_length=16)
    """Namespaces in which the pods of gateways run, at most 16; not always that of the Gateway object (Envoy Gateway:
    envoy-gateway-system). The pool's NetworkPolicies let all pods of these namespaces, and no others, reach port 9002
    of routers. They also let them reach port 8000 of decode engines, to which gateways send requests. The engine itself
    checks no client's key, and without spec.tls no certificate. Requests sent there directly bypass the router's queue:
    name namespaces that hold gateways alone, or give engines a key (VLLM_API_KEY in env of both roles)."""
    tls: PickerTls | None = None
    """The certificate that gateways are shown. When it comes or goes, the Service leads gateways to the old routers
    until a new one is ready. Default: none; then prompts and the engines' key go in the clear."""


class Alias(ApiModel):
    """Another name for the model or an adapter of it."""

    name: str = Field(min_length=1, max_length=128, pattern=r"^[^$,=\p{Z}\p{Cc}\p{Cf}\p{Co}]+$")
    """The name that clients may ask for, without blanks, invisible characters, commas, dollar and equals signs."""
    model: str = Field(min_length=1, max_length=128, pattern=r"^[^$,\p{Z}\p{Cc}\p{Cf}\p{Co}]+$")
    """The name that engines list: model.servedName, or an adapter's. Answers bear it."""


_OF_ALIASES: Final = "self.filter(one, self.exists(other, other.name == one.model))"
_ALIAS_RULE: Final = Rule(
    holds=f"{_OF_ALIASES}.size() == 0",
    says="router.modelAliases names %s itself: give %s the name of a model",
    values=(f"{_OF_ALIASES}[0].model", f"{_OF_ALIASES}[0].name"),
    short="router.modelAliases has an alias of an alias: give each the name of a model",
)
_ONCE: Final = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
"""The API server refuses a second entry of the same name."""


class RouterSpec(ApiModel):
    """The routers in front of the engines."""

    replicas: int = Field(default=2, ge=1, le=64)
    """Routers, in [1, 64]. Default 2: one may go at any time."""
    resources: Resources = Resources()
    """Resources of a router's container. Where neither a request nor a limit is given: 100m cpu and 128Mi memory are
    requested."""
    service: RouterService = RouterService()
    """The Service that clients reach."""
    policy: RouterPolicy = Field(
        default=RouterPolicy.LEAST_TOKENS, description=f"{RouterPolicy.explained()} Default least-tokens."
    )
    model_aliases: list[Alias] = Field(default=[], max_length=16, json_schema_extra=checked_by([_ALIAS_RULE]) | _ONCE)
    """Other names by which clients may ask, at most 16. Default: none."""
    request_timeout_seconds: int | None = Field(default=None, ge=1, le=DAY_S)
    """Seconds that a request may take in all, in [1, 86400]; then it is cut. Default: no such limit, for a long answer
    that flows is no fault."""
    api_keys_secret_ref: KeysRef | None = None
    """Secret with the SHA-256 of each API key of clients and its limits, in the form of the router's --api-key-file.
    Default: none; then everyone who reaches the Service may use the model, unless tokens is given."""
    tokens: RouterTokens | None = None
    """Identity provider whose tokens clients may show, in place of API keys or beside them. Default: none; then tokens
    are not read."""
    tls: RouterTls | None = None
    """The certificate that clients are shown. Default: none; then traffic between clients and routers is not encrypted.
    """
    access_log: bool = False
    """Whether routers write one JSON line for each request that has ended to their containers' stdout. Default false: a
    line has 700 bytes, which is 60 GB a day at 1,000 requests a second."""
    proxies: RouterProxies | None = None
    """Proxies whose word about a client's address is believed. Default: none; the access log then names the last
    proxy."""
    picker: RouterPicker | None = None
    """Gateways of the Gateway API Inference Extension, which ask port 9002 of the Service NAME-router-internal. With
    spec.tls decode engines answer only those who show a certificate of its Secret's authority, and an InferencePool
    cannot tell a gateway so. Default: none; then routers have no port for them."""
    pod_overrides: OpenObject | None = None
    """Part of a pod template, merged over the operator's; the container is called router. Default: none."""
