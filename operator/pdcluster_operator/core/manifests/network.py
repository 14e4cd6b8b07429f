"""NetworkPolicies: who may speak to whom.

    anybody  ---> router:8000     routers ---> engines:8000       engines <--> engines of the same pool, all ports
    operator ---> router:8001     decode  ---> router:8001, 8000  all  ---> DNS
    router   ---> API server      engines ---> HTTPS anywhere, with model.name: to fetch the model
    gateways ---> router:9002, decode:8000, with router.picker

Engines of one pool reach each other on all ports, because Mooncake draws its own ports (by default 15000 to 29999, two
for each session). Mooncake has no authentication, so other pods reach none of these ports. Old and new revisions share
these policies, so nothing in them depends on a role's ports or nodes. Probes come from the node, which always gets in
(Kubernetes, "Network Policies").

Policies add up: a user can add one to scrape metrics of engines or routers, or to let engines fetch from elsewhere. No
policy holds for RDMA, or for pods on their node's own network.
"""

from __future__ import annotations

from typing import Any, Final

from pdcluster_operator.core import names
from pdcluster_operator.core.manifests import client_tokens, picker
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
"""Value of the component label of the operator's pods."""
_DNS: Final = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def role_policy(pool: Pool, role: Role) -> Document:
    """The policy of one role's engines."""
    name = names.role_name(pool.name, role)
    peers, routers = {"podSelector": _engines(pool)}, {"podSelector": {"matchLabels": router_selector(pool)}}
    # 8000 too: an upgrade changes policies at once, but routers of an older release may drain for hours. Some of them
    # have no internal port, and decode calls these on 8000.
    calls_back = [{"to": [routers], **_tcp(INTERNAL_PORT, PORT)}] if role is Role.DECODE else []
    fetches = [_tcp(443)] if pool.spec.model.name else []
    gateways = picker.gateway_rules(pool, PORT) if role is Role.DECODE else []
    spec = {
        "podSelector": {"matchLabels": engine_selector(pool, role)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [routers], **_tcp(PORT)}, {"from": [peers]}, *gateways],
        "egress": [_DNS, {"to": [peers]}, *calls_back, *fetches],
    }
    return _policy(metadata_of(pool, name, role.value, role_labels(role)), spec)


def router_policy(pool: Pool) -> Document:
    """The policy of the routers: clients come by one port, engines and the operator by another, gateways by a third."""
    engines = {"podSelector": _engines(pool)}
    out = [_DNS, {"to": [engines], **_tcp(PORT)}, *client_tokens.key_server_rules(pool), _tcp(*pool.api_server_ports)]
    spec = {
        "podSelector": {"matchLabels": router_selector(pool)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            _tcp(PORT),
            {"from": [engines, _operator(pool)], **_tcp(INTERNAL_PORT)},
            *picker.gateway_rules(pool, picker.PICKER_PORT),
        ],
        "egress": out,
    }
    return _policy(metadata_of(pool, names.child_name(pool.name, ROUTER), ROUTER), spec)


def _policy(metadata: Document, spec: Document) -> Document:
    return make_object(NETWORK_POLICY, metadata, spec=spec)


def _engines(pool: Pool) -> Document:
    """Selects all engines of the pool."""
    is_engine: dict[str, Any] = {"key": labels.ROLE, "operator": "In", "values": [role.value for role in Role]}
    return {"matchLabels": {labels.CLUSTER: pool.label}, "matchExpressions": [is_engine]}


def _operator(pool: Pool) -> Document:
    """Selects the operator's pods by the labels that the chart gives them."""
    named = {"kubernetes.io/metadata.name": pool.operator_namespace} if pool.operator_namespace else {}
    return {
        "namespaceSelector": {"matchLabels": named} if named else {},
        "podSelector": {"matchLabels": {labels.PART_OF: labels.APP_NAME, labels.COMPONENT: OPERATOR}},
    }


def _tcp(*ports: int) -> Document:
    return {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
