"""The routers of a pool: Deployment, Service, and the right to watch EndpointSlices.

Routers hold no state, so an ordinary Deployment rolls them. A router that is to go gets no new connections once all
kube-proxies know. It takes requests until then, and finishes the requests that it has.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from pdcluster_operator.api.role import EnvVar
from pdcluster_operator.api.router import RouterProxies
from pdcluster_operator.core import names
from pdcluster_operator.core.manifests import client_tokens, picker, pool_tls
from pdcluster_operator.core.manifests.pool import (
    HTTP,
    INTERNAL,
    INTERNAL_PORT,
    LAST_WORDS,
    PORT,
    ROUTER,
    Document,
    Pool,
    common_labels,
    container_security,
    field_env,
    internal_name,
    labelled,
    make_object,
    metadata_of,
    pod_security,
    resources_of,
    router_selector,
    scratch_volume,
    secret_ref,
)
from pdcluster_operator.core.manifests.strategic_merge import merge_template
from pdcluster_operator.kinds import DEPLOYMENT, ROLE, ROLE_BINDING, SERVICE, SERVICE_ACCOUNT
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role
from pdcluster_protocol.launch import ENGINE_KEY_VARIABLE, ProxyProtocol, router_flag
from pdcluster_protocol.secret import SECRET_VARIABLE

NOTICE_S: Final = 5
"""Seconds for which a removed router takes new connections: kube-proxies of a busy cluster notice the removal late."""
KEYS_FOLDER: Final = "/etc/pdcluster/api-keys"
"""A mounted folder, not a single file: only folders follow a change of their Secret."""
KEYS_FILE: Final = "keys"
TLS_FOLDER: Final = "/etc/pdcluster/tls"
_CLIENTS_KEYS: Final = (pool_tls.CERT, pool_tls.KEY)
"""Keys of the Secret with the certificate that clients are shown, and the names of its files."""
_MAKE_IT: Final = "make it with the keys tls.crt, tls.key and ca.crt, as cert-manager does"
MARGIN_S: Final = 10
"""Seconds from the end of the drain to the end of the pod. Connections get 2 of these seconds to close."""
REQUESTS: Final = {"cpu": "100m", "memory": "128Mi"}
"""A router's requests where the user gives nothing: as much as an idle router takes."""


@dataclass(frozen=True, slots=True)
class MountedSecret:
    """A user's Secret without which ``who`` cannot start. ``cure``: what the user can do if it is missing."""

    name: str
    keys: tuple[str, ...]
    """Keys that the Secret must have."""
    cure: str
    who: str = "routers"


def mounted_secrets(pool: Pool) -> list[MountedSecret]:
    router = pool.spec.router
    keys, tls, inside = router.api_keys_secret_ref, router.tls, pool.spec.tls
    shown, asked = picker.pair_secret(pool), picker.ca_secret(pool)
    key_set, key = client_tokens.key_set_secret(pool)
    out = "make it, or leave {} out"
    return [
        *([MountedSecret(keys.name, (keys.key,), out.format("router.apiKeysSecretRef"))] if keys else []),
        *([MountedSecret(key_set, (key,), out.format("router.tokens"))] if key_set else []),
        *([MountedSecret(tls.secret_name, _CLIENTS_KEYS, out.format("router.tls"))] if tls else []),
        *([MountedSecret(shown, _CLIENTS_KEYS, out.format("router.picker.tls"))] if shown else []),
        *([MountedSecret(asked, (picker.CA,), out.format("router.picker.tls.clientCertificates"))] if asked else []),
        *([MountedSecret(inside.secret_name, pool_tls.KEYS, _MAKE_IT, "engines and routers")] if inside else []),
    ]


def router_name(pool: Pool) -> str:
    """Name of the routers' Deployment, Service, ServiceAccount, Role and so on."""
    return names.child_name(pool.name, ROUTER)


def router_url(pool: Pool) -> str:
    """Where clients within the cluster find the OpenAI API."""
    port = pool.spec.router.service.port
    scheme, usual = ("https", 443) if pool.spec.router.tls else ("http", 80)
    return f"{scheme}://{router_name(pool)}.{pool.namespace}.svc{'' if port == usual else f':{port}'}"


def internal_url(pool: Pool) -> str:
    """Where the operator finds the routers."""
    return f"{pool_tls.scheme_of(pool)}://{internal_name(pool)}.{pool.namespace}.svc:{INTERNAL_PORT}"


def router_service(pool: Pool) -> Document:
    service = pool.spec.router.service
    # Tells gateways to speak HTTPS to the Service: otherwise they speak plain HTTP.
    spoken = {"appProtocol": "https"} if pool.spec.router.tls else {}
    spec = {
        "type": service.type.value,
        "selector": router_selector(pool),
        "ports": [{"name": HTTP, "port": service.port, "targetPort": HTTP, "protocol": "TCP", **spoken}],
    }
    metadata = metadata_of(pool, router_name(pool), ROUTER)
    annotated = {**metadata, "annotations": service.annotations} if service.annotations else metadata
    return make_object(SERVICE, annotated, spec=spec)


def internal_service(pool: Pool, ready_ports: Collection[str] = ()) -> Document:
    """The Service of the internal port, for the operator and for scrapers of metrics, and of the port for gateways.
    Always ClusterIP, whatever the type of the clients' Service, so that the outside does not reach it.

    ``ready_ports``: names of the ports of ready routers.
    """
    port = {"name": INTERNAL, "port": INTERNAL_PORT, "targetPort": INTERNAL, "protocol": "TCP"}
    spec = {
        "type": "ClusterIP",
        "selector": router_selector(pool),
        "ports": [port | pool_tls.app_protocol(pool), *picker.service_ports(pool, ready_ports)],
    }
    metadata = metadata_of(pool, internal_name(pool), ROUTER, pool_tls.service_labels(pool))
    return make_object(SERVICE, metadata, spec=spec)


def router_deployment(pool: Pool) -> Document:
    """
    Raises:
        ConfigError: The user's overrides cannot be merged.
    """
    spec = {
        "replicas": pool.spec.router.replicas,
        "selector": {"matchLabels": router_selector(pool)},
        "template": _template(pool),
        # A new router is ready before an old one goes.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "revisionHistoryLimit": 2,
    }
    return make_object(DEPLOYMENT, metadata_of(pool, router_name(pool), ROUTER), spec=spec)


def router_argv(pool: Pool) -> list[str]:
    """The router's arguments: every option that follows from the spec. All other options keep the router's defaults."""
    transfer, router = pool.spec.transfer, pool.spec.router
    return [
        router_flag("--discovery", "kubernetes"),
        router_flag("--cluster", pool.label),
        router_flag("--host", "0.0.0.0"),  # noqa: S104  # a pod's own network
        router_flag("--port", PORT),
        router_flag("--internal-port", INTERNAL_PORT),
        # Decode engines must call the very process that holds their request, and never the Service.
        router_flag("--advertise-url", f"{pool_tls.scheme_of(pool)}://$(POD_IP):{INTERNAL_PORT}"),
        router_flag("--prefill-timeout", transfer.deadline_seconds),
        router_flag("--on-prefill-failure", transfer.on_failure.value),
        router_flag("--policy", router.policy.value),
        *(router_flag("--model-alias", f"{alias.name}={alias.model}") for alias in router.model_aliases),
        router_flag("--drain-timeout", drain_s(pool)),
        *([router_flag("--request-timeout", router.request_timeout_seconds)] if router.request_timeout_seconds else []),
        *([router_flag("--api-key-file", f"{KEYS_FOLDER}/{KEYS_FILE}")] if router.api_keys_secret_ref else []),
        *client_tokens.router_flags(pool),
        *(_tls_flags() if router.tls else []),
        *pool_tls.router_flags(pool),
        *picker.router_flags(pool),
        *([router_flag("--access-log", "-")] if router.access_log else []),
        *(_proxy_flags(router.proxies) if router.proxies else []),
    ]


def _proxy_flags(proxies: RouterProxies) -> list[str]:
    return [
        router_flag("--trusted-proxies", ",".join(proxies.trusted)),
        router_flag("--forwarded-header", proxies.forwarded_header.value),
        router_flag("--proxy-protocol", proxies.proxy_protocol.value),
    ]


def _tls_flags() -> list[str]:
    cert, key = (f"{TLS_FOLDER}/{name}" for name in _CLIENTS_KEYS)
    return [router_flag("--tls-cert", cert), router_flag("--tls-key", key)]


def drain_s(pool: Pool) -> int:
    """Seconds for which a router that is to go may work on its requests. The router's flag allows an hour at most."""
    return min(pool.spec.drain.timeout_seconds, 3600)


def router_access(pool: Pool) -> tuple[Document, ...]:
    """ServiceAccount, Role and RoleBinding, with the right to list and watch EndpointSlices of this namespace."""
    name = router_name(pool)
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    return (
        make_object(SERVICE_ACCOUNT, metadata_of(pool, name, ROUTER), automountServiceAccountToken=False),
        make_object(ROLE, metadata_of(pool, name, ROUTER), rules=[rule]),
        make_object(
            ROLE_BINDING,
            metadata_of(pool, name, ROUTER),
            roleRef={"apiGroup": ROLE.group, "kind": ROLE.name, "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": pool.namespace}],
        ),
    )


def _template(pool: Pool) -> Document:
    ours = {"metadata": {"labels": common_labels(pool, ROUTER)}, "spec": _pod_spec(pool)}
    return labelled(merge_template(ours, pool.spec.router.pod_overrides), common_labels(pool, ROUTER))


def _pod_spec(pool: Pool) -> Document:
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": router_selector(pool)},
    }
    return {
        "serviceAccountName": router_name(pool),
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": NOTICE_S + drain_s(pool) + MARGIN_S,
        "topologySpreadConstraints": [spread],
        "containers": [_container(pool)],
        "volumes": [
            scratch_volume("tmp"),
            *_keys_volumes(pool),
            *client_tokens.secret_volumes(pool),
            *_tls_volumes(pool),
            *pool_tls.secret_volumes(pool),
            *picker.secret_volumes(pool),
        ],
    }


def _container(pool: Pool) -> Document:
    secret = {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": secret_ref(pool)}}
    return {
        "name": ROUTER,
        "image": pool.router_image,
        "command": ["pdcluster", "router"],
        "args": router_argv(pool),
        "env": [field_env("POD_IP", "status.podIP"), secret, *_engines_key(pool)],
        "ports": [
            {"name": HTTP, "containerPort": PORT, "protocol": "TCP"},
            {"name": INTERNAL, "containerPort": INTERNAL_PORT, "protocol": "TCP"},
            *picker.container_ports(pool),
        ],
        "resources": resources_of(pool.spec.router.resources, REQUESTS),
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # a folder in the container
            *({"name": one["name"], "mountPath": KEYS_FOLDER, "readOnly": True} for one in _keys_volumes(pool)),
            *client_tokens.secret_mounts(pool),
            *({"name": one["name"], "mountPath": TLS_FOLDER, "readOnly": True} for one in _tls_volumes(pool)),
            *pool_tls.secret_mounts(pool),
            *picker.secret_mounts(pool),
        ],
        **LAST_WORDS,
        **_probes(pool),
        # Every image with a shell has ``sleep``. Kubernetes' own can be off (gate PodLifecycleSleepAction).
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(NOTICE_S)]}}},
    }


def _keys_volumes(pool: Pool) -> list[Document]:
    keys = pool.spec.router.api_keys_secret_ref
    if keys is None:
        return []
    return [{"name": "api-keys", "secret": {"secretName": keys.name, "items": [{"key": keys.key, "path": KEYS_FILE}]}}]


def _tls_volumes(pool: Pool) -> list[Document]:
    tls = pool.spec.router.tls
    if tls is None:
        return []
    items = [{"key": key, "path": key} for key in _CLIENTS_KEYS]
    return [{"name": "tls", "secret": {"secretName": tls.secret_name, "items": items}}]


def _engines_key(pool: Pool) -> list[Document]:
    """The engines' ``env`` entry for vLLM's own key; empty: the engines have no key.

    Raises:
        ConfigError: The roles have different entries, but a router sends one key to all engines.
    """
    found = {role: next((one for one in pool.role(role).env if one.name == ENGINE_KEY_VARIABLE), None) for role in Role}
    prefill, decode = (found[role] for role in Role)
    if prefill != decode:
        raise ConfigError(
            f"env {ENGINE_KEY_VARIABLE} is {_key_told(prefill)} in roles.prefill and {_key_told(decode, prefill)} in "
            "roles.decode: give both roles the same, for routers send one key to all engines"
        )
    return [prefill.to_wire()] if prefill else []


def _key_told(entry: EnvVar | None, other: EnvVar | None = None) -> str:
    """Where the key comes from; never its value."""
    if entry is None:
        return "not set"
    if entry.value_from is not None:
        return json.dumps(entry.value_from, sort_keys=True)
    return "another value" if other is not None and other.value_from is None else "a value"


def _probes(pool: Pool) -> Document:
    """The three probes of a router.

    Ready: ``/health`` says that a request could be answered. So a new router gets no request before it has found the
    engines. Alive: the router answers at all, because a pool without engines is no fault of its routers. A kubelet
    takes any certificate, but sends no PROXY header. If the header is required, the internal port is asked instead.
    """
    router, over_tls = pool.spec.router, {"scheme": "HTTPS"}
    is_prefaced = router.proxies is not None and router.proxies.proxy_protocol is ProxyProtocol.REQUIRED
    clients_port = {"port": HTTP, **(over_tls if router.tls else {})}
    internal_port = {"port": INTERNAL, **(over_tls if pool.spec.tls else {})}
    ready = {"httpGet": {"path": "/health", **(internal_port if is_prefaced else clients_port)}}
    alive = {"httpGet": {"path": "/", **internal_port}}
    return {
        "startupProbe": {**alive, "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {**ready, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
    }
