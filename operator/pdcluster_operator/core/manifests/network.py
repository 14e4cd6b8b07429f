"""NetworkPolicies: who may speak to whom.

    anybody ---> router:8000      routers ---> engines:8000       engines <--> engines of the same pool, all ports
    router  ---> API server       decode  ---> router:8000        both ---> DNS;  with model.name: HTTPS, to fetch it

Engines of one pool reach each other on all ports, since Mooncake draws its own (15000 to 29999, two for each session)
and has no authentication; outsiders reach none of them. Old and new revisions share these policies, so nothing in them
depends on a role's ports or nodes. Probes come from the node, which is always let in (Kubernetes, "Network Policies").

Policies add up: who scrapes engines' metrics, or whose engines fetch from elsewhere, adds a policy for it.
Pods on their node's own network, and RDMA, are beyond any policy.
"""

from __future__ import annotations

from typing import Any, Final

from pdcluster_operator.core import names
from pdcluster_operator.core.manifests.pool import (
    PORT,
    ROUTER,
    Document,
    Pool,
    engine_selector,
    make_object,
    metadata_of,
    role_labels,
    router_selector,
)
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role

_DNS: Final = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def role_policy(pool: Pool, role: Role) -> Document:
    """Of one role's engines."""
    name = names.role_name(pool.name, role)
    peers, routers = {"podSelector": _engines(pool)}, {"podSelector": {"matchLabels": router_selector(pool)}}
    calls_back = [{"to": [routers], **_tcp(PORT)}] if role is Role.DECODE else []
    fetches = [_tcp(443)] if pool.spec.model.name else []
    spec = {
        "podSelector": {"matchLabels": engine_selector(pool, role)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [routers], **_tcp(PORT)}, {"from": [peers]}],
        "egress": [_DNS, {"to": [peers]}, *calls_back, *fetches],
    }
    return _policy(metadata_of(pool, name, role.value, role_labels(role)), spec)


def router_policy(pool: Pool) -> Document:
    """Of the routers: clients, decode engines and the operator come by one port."""
    engines = {"podSelector": _engines(pool)}
    spec = {
        "podSelector": {"matchLabels": router_selector(pool)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [_tcp(PORT)],
        "egress": [_DNS, {"to": [engines], **_tcp(PORT)}, _tcp(*pool.api_server_ports)],
    }
    return _policy(metadata_of(pool, names.child_name(pool.name, ROUTER), ROUTER), spec)


def _policy(metadata: Document, spec: Document) -> Document:
    return make_object("networking.k8s.io/v1", "NetworkPolicy", metadata, spec=spec)


def _engines(pool: Pool) -> Document:
    """Selects all engines of the pool."""
    is_engine: dict[str, Any] = {"key": labels.ROLE, "operator": "In", "values": [role.value for role in Role]}
    return {"matchLabels": {labels.CLUSTER: pool.label}, "matchExpressions": [is_engine]}


def _tcp(*ports: int) -> Document:
    return {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
