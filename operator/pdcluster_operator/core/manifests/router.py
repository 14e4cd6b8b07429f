"""The routers of a pool: Deployment, Service, and the right to watch EndpointSlices.

Routers hold no state, so an ordinary Deployment rolls them. A router that goes gets no new connections when its
endpoint is marked, which takes kube-proxies a moment: it takes requests until then, and finishes those it has.
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.core import names
from pdcluster_operator.core.manifests.pool import (
    HTTP,
    PORT,
    ROUTER,
    Document,
    Pool,
    common_labels,
    container_security,
    field_env,
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
from pdcluster_protocol.secret import SECRET_VARIABLE

NOTICE_S: Final = 5
"""Seconds that a removed router still takes new connections: what kube-proxies need to notice on a busy cluster."""
MARGIN_S: Final = 10
"""From the end of the drain to the end of the pod; connections get 2 s of it to close."""


def router_name(pool: Pool) -> str:
    """Of the routers' Deployment, Service, ServiceAccount, Role and so on."""
    return names.child_name(pool.name, ROUTER)


def router_url(pool: Pool) -> str:
    """Where clients within the cluster find the OpenAI API."""
    port = pool.spec.router.service.port
    return f"http://{router_name(pool)}.{pool.namespace}.svc{'' if port == 80 else f':{port}'}"


def router_service(pool: Pool) -> Document:
    service = pool.spec.router.service
    spec = {
        "type": service.type.value,
        "selector": router_selector(pool),
        "ports": [{"name": HTTP, "port": service.port, "targetPort": HTTP, "protocol": "TCP"}],
    }
    metadata = metadata_of(pool, router_name(pool), ROUTER)
    annotated = {**metadata, "annotations": service.annotations} if service.annotations else metadata
    return make_object("v1", "Service", annotated, spec=spec)


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
    return make_object("apps/v1", "Deployment", metadata_of(pool, router_name(pool), ROUTER), spec=spec)


def router_argv(pool: Pool) -> list[str]:
    """Every option that follows from the spec; the others keep the router's own defaults."""
    transfer = pool.spec.transfer
    return [
        "--discovery=kubernetes",
        f"--cluster={pool.label}",
        "--host=0.0.0.0",  # a pod's own network
        f"--port={PORT}",
        # Decode engines call this very process, never the Service: it holds the request that they are about.
        f"--advertise-url=http://$(POD_IP):{PORT}",
        f"--prefill-timeout={transfer.deadline_seconds}",
        f"--on-prefill-failure={transfer.on_failure.value}",
        f"--drain-timeout={drain_s(pool)}",
    ]


def drain_s(pool: Pool) -> int:
    """Seconds that a router which is to go may work on the requests it has; the router takes an hour at most."""
    return min(pool.spec.drain.timeout_seconds, 3600)


def router_access(pool: Pool) -> tuple[Document, ...]:
    """ServiceAccount, Role and RoleBinding: EndpointSlices of this namespace, to read."""
    name = router_name(pool)
    rbac = "rbac.authorization.k8s.io"
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    return (
        make_object("v1", "ServiceAccount", metadata_of(pool, name, ROUTER), automountServiceAccountToken=False),
        make_object(f"{rbac}/v1", "Role", metadata_of(pool, name, ROUTER), rules=[rule]),
        make_object(
            f"{rbac}/v1",
            "RoleBinding",
            metadata_of(pool, name, ROUTER),
            roleRef={"apiGroup": rbac, "kind": "Role", "name": name},
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
        "volumes": [scratch_volume("tmp")],
    }


def _container(pool: Pool) -> Document:
    secret = {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": secret_ref(pool)}}
    return {
        "name": ROUTER,
        "image": pool.router_image,
        "command": ["pdcluster", "router"],
        "args": router_argv(pool),
        "env": [field_env("POD_IP", "status.podIP"), secret],
        "ports": [{"name": HTTP, "containerPort": PORT, "protocol": "TCP"}],
        "resources": resources_of(pool.spec.router.resources),
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108  # a folder in the container
        **_probes(),
        # Every image with a shell has it; Kubernetes' own sleep can be switched off (gate PodLifecycleSleepAction).
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(NOTICE_S)]}}},
    }


def _probes() -> Document:
    """Ready when a request could be answered (``/health``), so that a new router never takes one before it has found
    the engines. Alive as long as it says anything: a pool without engines is no fault of its routers."""
    ready = {"httpGet": {"path": "/health", "port": HTTP}}
    alive = {"httpGet": {"path": "/", "port": HTTP}}
    return {
        "startupProbe": {**alive, "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {**ready, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
    }
