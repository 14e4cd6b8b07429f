"""NetworkPolicies: who may speak to whom.

    anybody  ---> router:8000     routers ---> engines:8000       engines <--> engines of the same pool, all ports
    operator ---> router:8001     decode  ---> router:8001, 8000  both ---> DNS;  with model.name: HTTPS, to fetch it
    router   ---> API server

Engines of one pool reach each other on all ports, since Mooncake draws its own (15000 to 29999, two for each session)
and has no authentication; outsiders reach none of them. Old and new revisions share these policies, so nothing in them
depends on a role's ports or nodes. Probes come from the node, which is always let in (Kubernetes, "Network Policies").

Policies add up: a user adds one to scrape metrics of engines or routers, or to let engines fetch from elsewhere. Pods
on their node's own network, and RDMA, are beyond any policy.
"""

from __future__ import annotations

from typing import Any, Final

from pdcluster_operator.core import names
from pdcluster_operator.core.manifests.pool import (
    INTERNAL_PORT,
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
from pdcluster_operator.kinds import NETWORK_POLICY
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role

OPERATOR: Final = "operator"
"""Component of the operator's pods."""
_DNS: Final = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def role_policy(pool: Pool, role: Role) -> Document:
    """Of one role's engines."""
    name = names.role_name(pool.name, role)
    peers, routers = {"podSelector": _engines(pool)}, {"podSelector": {"matchLabels": router_selector(pool)}}
    # 8000 too: at an upgrade policies change at once, while routers of a release without the internal port, which are
    # called back there, drain for hours.
    calls_back = [{"to": [routers], **_tcp(INTERNAL_PORT, PORT)}] if role is Role.DECODE else []
    fetches = [_tcp(443)] if pool.spec.model.name else []
    spec = {
        "podSelector": {"matchLabels": engine_selector(pool, role)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [routers], **_tcp(PORT)}, {"from": [peers]}],
        "egress": [_DNS, {"to": [peers]}, *calls_back, *fetches],
    }
    return _policy(metadata_of(pool, name, role.value, role_labels(role)), spec)


def router_policy(pool: Pool) -> Document:
    """Of the routers: clients come by one port, decode engines and the operator by another."""
    engines = {"podSelector": _engines(pool)}
    spec = {
        "podSelector": {"matchLabels": router_selector(pool)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [_tcp(PORT), {"from": [engines, _operator(pool)], **_tcp(INTERNAL_PORT)}],
        "egress": [_DNS, {"to": [engines], **_tcp(PORT)}, _tcp(*pool.api_server_ports)],
    }
    return _policy(metadata_of(pool, names.child_name(pool.name, ROUTER), ROUTER), spec)


def _policy(metadata: Document, spec: Document) -> Document:
    return make_object(NETWORK_POLICY, metadata, spec=spec)


def _engines(pool: Pool) -> Document:
    """Selects all engines of the pool."""
    is_engine: dict[str, Any] = {"key": labels.ROLE, "operator": "In", "values": [role.value for role in Role]}
    return {"matchLabels": {labels.CLUSTER: pool.label}, "matchExpressions": [is_engine]}


def _operator(pool: Pool) -> Document:
    """Selects operators, by the labels that the chart gives them."""
    named = {"kubernetes.io/metadata.name": pool.operator_namespace} if pool.operator_namespace else {}
    return {
        "namespaceSelector": {"matchLabels": named} if named else {},
        "podSelector": {"matchLabels": {labels.PART_OF: labels.APP_NAME, labels.COMPONENT: OPERATOR}},
    }


def _tcp(*ports: int) -> Document:
    return {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
