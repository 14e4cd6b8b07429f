"""Routers as gateways' endpoint picker (``spec.router.picker``): port, flags, the Secret, and who may come in.

    gateways' namespaces ---> router:9002   which engine gets a request?
                         ---> decode:8000   the request itself

A router speaks either in the clear or by TLS, and the name of its port says which. The internal Service leads gateways
to one name, and so to no router that speaks otherwise. When ``tls`` comes or goes, the Service leads to the old routers
until a new one is ready:

    ready routers         only old ones    a new one too, or none
    the Service leads to  the old name     the new name

Without ``spec.router.picker`` no function adds anything. ``docs/decisions/0053-picker-tls.md`` has the reasons.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pdcluster_operator.core.manifests.pool import Document, Pool, internal_name
from pdcluster_protocol.launch import router_flag

PICKER: Final = "picker"
"""Name of the Service's port for gateways, and of a router's without TLS."""
PICKER_TLS: Final = "picker-tls"
"""Name of a router's port for gateways with TLS."""
_SPOKEN: Final = {PICKER: "kubernetes.io/h2c", PICKER_TLS: "http2"}
"""How gateways speak on a port of this name. Both mean HTTP/2. For TLS each gateway has a setting of its own, for to
Istio ``https`` would be no HTTP/2."""
PICKER_PORT: Final = 9002
"""Number of that port: the one of the Inference Extension's own picker, and the default of its charts."""
FOLDER: Final = "/etc/pdcluster/picker-tls"
CERT: Final = "tls.crt"
KEY: Final = "tls.key"
CA: Final = "ca.crt"
_VOLUME: Final = "picker-tls"


def pair_secret(pool: Pool) -> str:
    """The Secret with the certificate that gateways are shown; empty: there is none."""
    picker = pool.spec.router.picker
    return picker.tls.secret_name if picker and picker.tls else ""


def ca_secret(pool: Pool) -> str:
    """The Secret with the authorities of gateways' certificates; empty: gateways show none."""
    picker = pool.spec.router.picker
    return picker.tls.secret_name if picker and picker.tls and picker.tls.client_certificates else ""


def router_flags(pool: Pool) -> list[str]:
    if pool.spec.router.picker is None:
        return []
    pair = [router_flag("--picker-tls-cert", f"{FOLDER}/{CERT}"), router_flag("--picker-tls-key", f"{FOLDER}/{KEY}")]
    return [
        router_flag("--picker-port", PICKER_PORT),
        *(pair if pair_secret(pool) else []),
        *([router_flag("--picker-client-ca", f"{FOLDER}/{CA}")] if ca_secret(pool) else []),
    ]


def container_ports(pool: Pool) -> list[Document]:
    if pool.spec.router.picker is None:
        return []
    return [{"name": _target(pool), "containerPort": PICKER_PORT, "protocol": "TCP"}]


def service_ports(pool: Pool, ready_ports: Collection[str]) -> list[Document]:
    """Ports that the internal Service has for gateways. ``ready_ports``: names of the ports of ready routers."""
    if pool.spec.router.picker is None:
        return []
    target = _led_to(pool, ready_ports)
    named = {"name": PICKER, "port": PICKER_PORT, "targetPort": target, "protocol": "TCP"}
    return [{**named, "appProtocol": _SPOKEN[target]}]


def held_back(pool: Pool, ready_ports: Collection[str]) -> str:
    """The routers to which the internal Service leads gateways, in words; empty: those that the spec asks for."""
    if pool.spec.router.picker is None or _led_to(pool, ready_ports) == _target(pool):
        return ""
    old = "in the clear" if pair_secret(pool) else "by TLS"
    return f"until a new router is ready, the Service {internal_name(pool)} leads gateways to the old ones, {old}"


def _led_to(pool: Pool, ready_ports: Collection[str]) -> str:
    wanted = _target(pool)
    old = PICKER if wanted == PICKER_TLS else PICKER_TLS
    return old if old in ready_ports and wanted not in ready_ports else wanted


def _target(pool: Pool) -> str:
    return PICKER_TLS if pair_secret(pool) else PICKER


def secret_volumes(pool: Pool) -> list[Document]:
    name = pair_secret(pool)
    if not name:
        return []
    items = [{"key": key, "path": key} for key in (CERT, KEY, *([CA] if ca_secret(pool) else []))]
    return [{"name": _VOLUME, "secret": {"secretName": name, "items": items}}]


def secret_mounts(pool: Pool) -> list[Document]:
    return [{"name": _VOLUME, "mountPath": FOLDER, "readOnly": True}] if pair_secret(pool) else []


def gateway_rules(pool: Pool, port: int) -> list[Document]:
    """Ingress rules that let gateways in on this port."""
    picker = pool.spec.router.picker
    if picker is None:
        return []
    named = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(picker.gateway_namespaces)}
    gateways = {"namespaceSelector": {"matchExpressions": [named]}}
    return [{"from": [gateways], "ports": [{"protocol": "TCP", "port": port}]}]
